//! Global functions and tests of Jinja, and `namespace` and `dict` as transformers has them.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use minijinja::{
    Environment, Error, ErrorKind, State, Value,
    value::{Enumerator, Kwargs, Object, ObjectRepr, Rest, ValueKind, from_args},
};

use super::{
    limits::{take_items, take_text},
    methods::{arguments, from_keys},
    operators::{contains, equal, key, order},
    text::{error, float, integer, is_space, of_integer, to_text, type_name},
};

/// Longest range, as in Jinja's sandbox.
const RANGE_MAX: u128 = 100_000;
/// Most names that a namespace begins with.
const NAMES_MAX: usize = 255;

/// What minijinja has and Jinja has not.
const FOREIGN_TESTS: [&str; 4] = ["startingwith", "endingwith", "safe", "int"];

/// Adds the functions and tests, and removes those that Jinja does not have.
pub(super) fn add_to(environment: &mut Environment<'_>) {
    environment.remove_global("debug");
    for name in FOREIGN_TESTS {
        environment.remove_test(name);
    }
    environment.add_function("raise_exception", |message: Value| -> Result<Value, Error> {
        Err(error(to_text(&message)))
    });
    environment.add_function("range", range);
    environment.add_global("dict", Value::from_object(Dict));
    environment.add_function("namespace", namespace);
    environment.add_function("joiner", |separator: Option<Value>| {
        let separator = separator.unwrap_or_else(|| Value::from(", "));
        Value::from_object(Joiner { separator, calls: AtomicUsize::new(0) })
    });
    environment.add_function("cycler", |items: Rest<Value>| match items.is_empty() {
        true => Err(error("at least one item has to be provided")),
        false => Ok(Value::from_object(Cycler { items: items.to_vec(), at: AtomicUsize::new(0) })),
    });
    environment.add_function("lipsum", lipsum);
    add_tests(environment);
}

fn add_tests(environment: &mut Environment<'_>) {
    environment.add_test("callable", |value: Value| {
        let object = value.as_object().is_some();
        object && matches!(value.kind(), ValueKind::Plain)
    });
    environment.add_test("sequence", |value: Value| {
        let is_range = value.as_object().is_some_and(|object| object.is::<Range>());
        let is_text = value.as_str().is_some() || value.is_undefined();
        is_range || is_text || matches!(value.kind(), ValueKind::Seq | ValueKind::Map)
    });
    environment.add_test("iterable", |value: Value| {
        let is_text = matches!(value.kind(), ValueKind::Undefined | ValueKind::String);
        is_text || (!value.is_none() && value.try_iter().is_ok())
    });
    environment.add_test("number", |value: Value| float(&value).is_some());
    environment.add_test("integer", |value: Value| value.is_number() && value.is_integer());
    environment.add_test("eq", |a: Value, b: Value| equal(&a, &b));
    environment.add_test("equalto", |a: Value, b: Value| equal(&a, &b));
    environment.add_test("==", |a: Value, b: Value| equal(&a, &b));
    environment.add_test("ne", |a: Value, b: Value| equal(&a, &b).map(|is_equal| !is_equal));
    environment.add_test("!=", |a: Value, b: Value| equal(&a, &b).map(|is_equal| !is_equal));
    environment.add_test("in", |value: Value, values: Value| contains(&values, &value));
    type Holds = fn(std::cmp::Ordering) -> bool;
    let comparisons: [(&'static str, Holds); 10] = [
        ("lt", std::cmp::Ordering::is_lt),
        ("lessthan", std::cmp::Ordering::is_lt),
        ("<", std::cmp::Ordering::is_lt),
        ("le", std::cmp::Ordering::is_le),
        ("<=", std::cmp::Ordering::is_le),
        ("gt", std::cmp::Ordering::is_gt),
        ("greaterthan", std::cmp::Ordering::is_gt),
        (">", std::cmp::Ordering::is_gt),
        ("ge", std::cmp::Ordering::is_ge),
        (">=", std::cmp::Ordering::is_ge),
    ];
    for (name, holds) in comparisons {
        environment.add_test(name, move |a: Value, b: Value| -> Result<bool, Error> {
            Ok(order(&a, &b)?.is_some_and(holds))
        });
    }
    let remainder = |value: &Value, by: &Value| super::operators::binary("%", value, by);
    let is_remainder = move |value: &Value, by: i64, wanted: i64| -> Result<bool, Error> {
        equal(&remainder(value, &Value::from(by))?, &Value::from(wanted))
    };
    environment.add_test("odd", move |value: Value| is_remainder(&value, 2, 1));
    environment.add_test("even", move |value: Value| is_remainder(&value, 2, 0));
    environment.add_test("divisibleby", move |value: Value, by: Rest<Value>, named: Kwargs| {
        let by = super::filters::option(&by, &named, 0, "num")?.unwrap_or_default();
        equal(&remainder(&value, &by)?, &Value::from(0))
    });
    let case = |value: &Value, is_wanted: fn(char) -> bool, is_other: fn(char) -> bool| {
        let text = to_text(value);
        text.chars().any(is_wanted) && !text.chars().any(is_other)
    };
    environment.add_test("lower", move |value: Value| {
        case(&value, char::is_lowercase, char::is_uppercase)
    });
    environment.add_test("upper", move |value: Value| {
        case(&value, char::is_uppercase, char::is_lowercase)
    });
}

/// Python's `range`.
#[derive(Debug)]
pub(super) struct Range {
    start: i128,
    stop: i128,
    step: i128,
    length: usize,
}

fn range(values: Rest<Value>) -> Result<Value, Error> {
    let number = |value: &Value| {
        let problem =
            || error(format!("'{}' object cannot be interpreted as an integer", type_name(value)));
        integer(value).ok_or_else(problem)
    };
    let numbers = values.iter().map(number).collect::<Result<Vec<i128>, Error>>()?;
    let (start, stop, step) = match numbers.as_slice() {
        [stop] => (0, *stop, 1),
        [start, stop] => (*start, *stop, 1),
        [start, stop, step] => (*start, *stop, *step),
        _ => return Err(error("range takes one to three arguments")),
    };
    if step == 0 {
        return Err(error("range() arg 3 must not be zero"));
    }
    let distance = if step > 0 { stop.saturating_sub(start) } else { start.saturating_sub(stop) };
    let length = distance.max(0).unsigned_abs().div_ceil(step.unsigned_abs());
    if length > RANGE_MAX {
        return Err(error(format!("range too big: the sandbox blocks more than {RANGE_MAX}")));
    }
    Ok(Value::from_object(Range {
        start,
        stop,
        step,
        length: usize::try_from(length).unwrap_or(0),
    }))
}

impl Object for Range {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let index = key.as_usize().filter(|index| *index < self.length)?;
        Some(of_integer(self.start + self.step * i128::try_from(index).ok()?))
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.length)
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.step {
            1 => write!(f, "range({}, {})", self.start, self.stop),
            step => write!(f, "range({}, {}, {step})", self.start, self.stop),
        }
    }
}

/// Reads the arguments of `dict` and `namespace`.
fn pairs(values: &[Value], named: &Kwargs) -> Result<Vec<(Value, Value)>, Error> {
    let mut pairs: Vec<(Value, Value)> = Vec::new();
    take_items(values.first().and_then(Value::len).unwrap_or(0))?;
    match values {
        [] => {}
        [mapping] if mapping.kind() == ValueKind::Map => {
            for key in mapping.try_iter()? {
                let item = mapping.get_item(&key)?;
                pairs.push((key, item));
            }
        }
        [items] => {
            for item in items.try_iter()? {
                let pair: Vec<Value> = item.try_iter()?.take(3).collect();
                let Ok([name, value]) = <[Value; 2]>::try_from(pair) else {
                    return Err(error("dictionary update sequence element is not a pair"));
                };
                key(&name)?;
                pairs.push((name, value));
            }
        }
        _ => return Err(error("dict expected at most 1 argument")),
    }
    for name in named.args().map(str::to_owned).collect::<Vec<_>>() {
        let value = named.get(&name)?;
        pairs.push((Value::from(name), value));
    }
    Ok(pairs)
}

/// minijinja's namespace, with the arguments of `dict`. transformers refuses names with `_`.
fn namespace(values: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let pairs = pairs(&values, &named)?;
    if pairs.iter().any(|(name, _)| name.as_str().is_some_and(|name| name.starts_with('_'))) {
        return Err(error("a namespace has no names with _"));
    }
    if pairs.len() > NAMES_MAX {
        return Err(error(format!("a namespace begins with more than {NAMES_MAX} names")));
    }
    let texts = pairs.into_iter().map(|(name, value)| (to_text(&name), value));
    let defaults = Value::from_pairs(texts);
    minijinja::functions::namespace(Some(minijinja::value::ValueOrKwargs::from(defaults)))
}

/// The function `dict`, and `dict.fromkeys`.
#[derive(Debug)]
struct Dict;

impl Object for Dict {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, _: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        let (values, named): (Rest<Value>, Kwargs) = from_args(args)?;
        pairs(&values, &named).map(Value::from_pairs)
    }

    fn call_method(
        self: &Arc<Self>,
        _: &mut State<'_, '_>,
        method: &str,
        args: &[Value],
    ) -> Result<Value, Error> {
        match method {
            "fromkeys" => from_keys(&arguments(method, args)?),
            _ => Err(Error::from(ErrorKind::UnknownMethod)),
        }
    }
}

/// `joiner`: nothing at the first call, then the separator.
#[derive(Debug)]
pub(super) struct Joiner {
    pub separator: Value,
    calls: AtomicUsize,
}

impl Object for Joiner {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, _: &mut State<'_, '_>, _: &[Value]) -> Result<Value, Error> {
        let is_first = self.calls.fetch_add(1, Ordering::Relaxed) == 0;
        Ok(if is_first { Value::from("") } else { self.separator.clone() })
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<joiner>")
    }
}

/// `cycler`: its items in turn.
#[derive(Debug)]
pub(super) struct Cycler {
    pub items: Vec<Value>,
    at: AtomicUsize,
}

impl Cycler {
    fn current(&self) -> Value {
        self.items[self.at.load(Ordering::Relaxed) % self.items.len()].clone()
    }
}

impl Object for Cycler {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        (key.as_str()? == "current").then(|| self.current())
    }

    fn call_method(
        self: &Arc<Self>,
        _: &mut State<'_, '_>,
        method: &str,
        _: &[Value],
    ) -> Result<Value, Error> {
        match method {
            "next" => {
                let item = self.current();
                self.at.fetch_add(1, Ordering::Relaxed);
                Ok(item)
            }
            "reset" => {
                self.at.store(0, Ordering::Relaxed);
                Ok(Value::from(()))
            }
            _ => Err(Error::from(ErrorKind::UnknownMethod)),
        }
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<cycler>")
    }
}

/// `lipsum`: text to fill a page. Jinja's is random; this is always the same.
fn lipsum(values: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    const WORDS: &str = "lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor \
                         incididunt ut labore et dolore magna aliqua";
    let number = |index: usize, name: &str, default: usize| -> Result<usize, Error> {
        let named: Option<Value> = named.get(name)?;
        let value = values.get(index).cloned().or(named);
        Ok(value
            .as_ref()
            .and_then(integer)
            .and_then(|n| usize::try_from(n).ok())
            .unwrap_or(default))
    };
    let is_html = values.get(1).is_none_or(Value::is_true);
    let (paragraphs, words) = (number(0, "n", 5)?.min(100), number(2, "min", 20)?.min(1000));
    let text: Vec<&str> =
        WORDS.split(is_space).filter(|word| !word.is_empty()).cycle().take(words).collect();
    let paragraph = text.join(" ") + ".";
    let paragraphs: Vec<String> = (0..paragraphs)
        .map(|_| if is_html { format!("<p>{paragraph}</p>") } else { paragraph.clone() })
        .collect();
    let joined = paragraphs.join(if is_html { "\n" } else { "\n\n" });
    take_text(joined.len())?;
    Ok(if is_html { Value::from_safe_string(joined) } else { Value::from(joined) })
}
