//! Operators as Python computes them.

use std::{cmp::Ordering, sync::Arc};

use minijinja::{
    Environment, Error, State, Value,
    value::{Kwargs, Object, ObjectRepr, Rest, Tuple, ValueKind, from_args},
};

use super::{
    filters::escape,
    format::percent,
    globals::Range,
    text::{check_length, error, float, integer, of_integer, repr, to_text, type_name},
};

/// Longest string or list that `*` makes.
const REPEATED_MAX: usize = 1 << 20;

/// Adds the functions that translated operators call.
pub(super) fn add_to(environment: &mut Environment<'_>) {
    environment.add_function("__compute", compute);
    environment.add_function("__concat", concat);
    environment.add_function("__compare", compare_all);
    environment.add_function("__negative", |value: Value| negative(&value));
    environment.add_function("__positive", |value: Value| match integer(&value) {
        Some(integer) => Ok(of_integer(integer)),
        None if value.is_number() => Ok(value),
        None => Err(error(format!("bad operand type for unary +: '{}'", type_name(&value)))),
    });
    environment.add_function("__item", |value: Value, key: Value| item(&value, &key));
    environment.add_function("__slice", slice);
    environment.add_function("__iterate", iterate);
    environment.add_function("__unpack", |value: Value| match value.kind() {
        ValueKind::String => Ok(value.try_iter()?.collect()),
        _ => iterate(value),
    });
    environment.add_function("__attribute", |value: Value, name: String| attribute(&value, &name));
    environment.add_function("__any_arguments", |value: Value, parameters: usize| {
        Value::from_object(AnyArguments { inner: value, parameters })
    });
}

/// Refuses an undefined value.
fn defined(value: &Value) -> Result<(), Error> {
    if value.is_undefined() { Err(error("the value is undefined")) } else { Ok(()) }
}

/// `a + b - c`: values with operators of the same precedence, from the left.
fn compute(values: Rest<Value>) -> Result<Value, Error> {
    let mut result = values.first().cloned().unwrap_or_default();
    for pair in values.get(1..).unwrap_or_default().chunks_exact(2) {
        let [operator, right] = pair else { continue };
        result = binary(operator.as_str().unwrap_or_default(), &result, right)?;
    }
    Ok(result)
}

/// Computes one operator.
pub(super) fn binary(operator: &str, left: &Value, right: &Value) -> Result<Value, Error> {
    let unsupported = || {
        error(format!(
            "unsupported operand types for {operator}: '{}' and '{}'",
            type_name(left),
            type_name(right)
        ))
    };
    if let ("%", Some(text)) = (operator, left.as_str()) {
        return percent(text, right, left.is_safe());
    }
    defined(left)?;
    defined(right)?;
    match operator {
        "+" => {
            if let (Some(a), Some(b)) = (left.as_str(), right.as_str()) {
                check_length(a.len() + b.len())?;
                let is_safe = left.is_safe() || right.is_safe();
                return Ok(match is_safe {
                    true => Value::from_safe_string(escape(left) + &escape(right)),
                    false => Value::from(format!("{a}{b}")),
                });
            }
            if is_list(left) && is_list(right) && left.is_tuple() == right.is_tuple() {
                check_length(left.len().unwrap_or(0) + right.len().unwrap_or(0))?;
                let items: Vec<Value> = left.try_iter()?.chain(right.try_iter()?).collect();
                return Ok(sequence(items, left.is_tuple()));
            }
        }
        "*" => {
            for (value, count) in [(left, right), (right, left)] {
                let Some(count) = integer(count) else { continue };
                if value.as_str().is_some() || is_list(value) {
                    return repeat(value, count);
                }
            }
        }
        _ => {}
    }
    if let (Some(a), Some(b)) = (integer(left), integer(right)) {
        return integers(operator, a, b);
    }
    let (Some(a), Some(b)) = (float(left), float(right)) else { return Err(unsupported()) };
    floats(operator, a, b)
}

#[allow(clippy::cast_precision_loss, reason = "as Python does")]
fn integers(operator: &str, a: i128, b: i128) -> Result<Value, Error> {
    let too_large = || error("a number that is too large");
    if b == 0 && matches!(operator, "/" | "//" | "%") {
        return Err(error("division by zero"));
    }
    let result = match operator {
        "+" => a.checked_add(b),
        "-" => a.checked_sub(b),
        "*" => a.checked_mul(b),
        "//" => a.checked_div(b).map(|q| q - i128::from(a % b != 0 && (a < 0) != (b < 0))),
        "%" => a.checked_rem(b).map(|r| if r != 0 && (r < 0) != (b < 0) { r + b } else { r }),
        "**" if b >= 0 => u32::try_from(b).ok().and_then(|b| a.checked_pow(b)),
        _ => return floats(operator, a as f64, b as f64),
    };
    result.map(of_integer).ok_or_else(too_large)
}

fn floats(operator: &str, a: f64, b: f64) -> Result<Value, Error> {
    if b == 0.0 && matches!(operator, "/" | "//" | "%") {
        return Err(error("float division by zero"));
    }
    let remainder = || {
        let r = a % b;
        if r == 0.0 {
            0f64.copysign(b)
        } else if (r < 0.0) != (b < 0.0) {
            r + b
        } else {
            r
        }
    };
    Ok(Value::from(match operator {
        "+" => a + b,
        "-" => a - b,
        "*" => a * b,
        "/" => a / b,
        "%" => remainder(),
        "//" => {
            let quotient = (a - remainder()) / b;
            let floor = quotient.floor();
            let floor = if quotient - floor > 0.5 { floor + 1.0 } else { floor };
            if floor == 0.0 { 0f64.copysign(a / b) } else { floor }
        }
        _ if a == 0.0 && b < 0.0 => return Err(error("0.0 cannot be raised to a negative power")),
        _ => a.powf(b),
    }))
}

fn repeat(value: &Value, count: i128) -> Result<Value, Error> {
    let count = usize::try_from(count.max(0)).unwrap_or(usize::MAX);
    let length = value.as_str().map_or_else(|| value.len().unwrap_or(0), str::len);
    if length.saturating_mul(count) > REPEATED_MAX {
        return Err(error("a value that is too long"));
    }
    Ok(match value.as_str() {
        Some(text) if value.is_safe() => Value::from_safe_string(text.repeat(count)),
        Some(text) => Value::from(text.repeat(count)),
        None => {
            let items: Vec<Value> = value.try_iter()?.collect();
            let length = items.len() * count;
            sequence(items.into_iter().cycle().take(length).collect(), value.is_tuple())
        }
    })
}

fn negative(value: &Value) -> Result<Value, Error> {
    match integer(value) {
        Some(integer) => {
            integer.checked_neg().map(of_integer).ok_or_else(|| error("a number that is too large"))
        }
        None if value.is_number() => Ok(Value::from(-float(value).unwrap_or(f64::NAN))),
        None => Err(error(format!("bad operand type for unary -: '{}'", type_name(value)))),
    }
}

/// `a ~ b`: the texts of all values.
fn concat(values: Rest<Value>) -> Result<Value, Error> {
    let texts: Vec<String> = values.iter().map(to_text).collect();
    check_length(texts.iter().map(String::len).sum())?;
    Ok(Value::from(texts.concat()))
}

/// `a < b < c`: whether all comparisons hold.
fn compare_all(values: Rest<Value>) -> Result<bool, Error> {
    let mut left = values.first().cloned().unwrap_or_default();
    for pair in values.get(1..).unwrap_or_default().chunks_exact(2) {
        let [operator, right] = pair else { continue };
        let holds = match operator.as_str().unwrap_or_default() {
            "==" => equal(&left, right),
            "!=" => !equal(&left, right),
            "in" => contains(right, &left)?,
            "not in" => !contains(right, &left)?,
            "<" => order(&left, right)?.is_some_and(Ordering::is_lt),
            "<=" => order(&left, right)?.is_some_and(Ordering::is_le),
            ">" => order(&left, right)?.is_some_and(Ordering::is_gt),
            _ => order(&left, right)?.is_some_and(Ordering::is_ge),
        };
        if !holds {
            return Ok(false);
        }
        left = right.clone();
    }
    Ok(true)
}

/// Python's `==`.
pub(super) fn equal(left: &Value, right: &Value) -> bool {
    if let (Some(a), Some(b)) = (integer(left), integer(right)) {
        return a == b;
    }
    #[allow(clippy::float_cmp, reason = "as Python does")]
    if let (Some(a), Some(b)) = (float(left), float(right)) {
        return a == b;
    }
    let is_range = |value: &Value| value.as_object().is_some_and(|object| object.is::<Range>());
    if is_list(left) && is_list(right) {
        if is_range(left) != is_range(right) {
            return false;
        }
        let (Ok(a), Ok(b)) = (left.try_iter(), right.try_iter()) else { return false };
        return left.is_tuple() == right.is_tuple()
            && left.len() == right.len()
            && a.zip(b).all(|(a, b)| equal(&a, &b));
    }
    if left.kind() == ValueKind::Map && right.kind() == ValueKind::Map {
        let Ok(mut keys) = left.try_iter() else { return false };
        return left.len() == right.len()
            && keys.all(|key| match (left.get_item(&key), right.get_item(&key)) {
                (Ok(a), Ok(b)) => equal(&a, &b) && a.is_undefined() == b.is_undefined(),
                _ => false,
            });
    }
    left.kind() == right.kind() && left == right
}

/// Python's order of two values: `None` if one is not a number.
pub(super) fn order(left: &Value, right: &Value) -> Result<Option<Ordering>, Error> {
    defined(left)?;
    defined(right)?;
    if let (Some(a), Some(b)) = (integer(left), integer(right)) {
        return Ok(Some(a.cmp(&b)));
    }
    if let (Some(a), Some(b)) = (float(left), float(right)) {
        return Ok(a.partial_cmp(&b));
    }
    if let (Some(a), Some(b)) = (left.as_str(), right.as_str()) {
        return Ok(Some(a.cmp(b)));
    }
    if is_list(left) && is_list(right) && left.is_tuple() == right.is_tuple() {
        for (a, b) in left.try_iter()?.zip(right.try_iter()?) {
            if !equal(&a, &b) {
                return order(&a, &b);
            }
        }
        return Ok(Some(left.len().cmp(&right.len())));
    }
    Err(error(format!(
        "'<' not supported between instances of '{}' and '{}'",
        type_name(left),
        type_name(right)
    )))
}

/// Python's `in`.
pub(super) fn contains(values: &Value, value: &Value) -> Result<bool, Error> {
    if let Some(text) = values.as_str() {
        return match value.as_str() {
            Some(part) => Ok(text.contains(part)),
            None => Err(error(format!(
                "'in <string>' requires string as left operand, not {}",
                type_name(value)
            ))),
        };
    }
    match values.kind() {
        // An undefined value is empty.
        ValueKind::Undefined => Ok(false),
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map => {
            Ok(values.try_iter()?.any(|item| equal(&item, value)))
        }
        _ => Err(error(format!("argument of type '{}' is not iterable", type_name(values)))),
    }
}

/// `values[key]`; undefined if there is none.
pub(super) fn item(values: &Value, key: &Value) -> Result<Value, Error> {
    defined(values)?;
    if let (Some(text), Some(index)) = (values.as_str(), integer(key)) {
        let length = i128::try_from(text.chars().count()).unwrap_or(i128::MAX);
        let index = if index < 0 { index + length } else { index };
        let letter = usize::try_from(index).ok().and_then(|index| text.chars().nth(index));
        return Ok(letter.map_or(Value::UNDEFINED, |letter| Value::from(letter.to_string())));
    }
    // A number in a string names no item of a list.
    if values.kind() == ValueKind::Seq && integer(key).is_none() {
        return Ok(Value::UNDEFINED);
    }
    // minijinja tells truth values and floats from integers as keys.
    let number = integer(key).or_else(|| {
        float(key).filter(|f| f.fract() == 0.0).map(|f| {
            #[allow(clippy::cast_possible_truncation, reason = "it has no fraction")]
            let integer = f as i128;
            integer
        })
    });
    let found = values.get_item(key)?;
    match number {
        Some(number) if found.is_undefined() => values.get_item(&of_integer(number)),
        _ => Ok(found),
    }
}

/// `values[start:stop:step]`.
fn slice(values: Value, start: Value, stop: Value, step: Value) -> Result<Value, Error> {
    defined(&values)?;
    let number = |value: &Value| match (value.is_none(), integer(value)) {
        (true, _) => Ok(None),
        (false, Some(number)) => Ok(Some(number)),
        (false, None) => Err(error("slice indices must be integers or None")),
    };
    let letters: Vec<Value> = match values.as_str() {
        Some(text) => text.chars().map(|letter| Value::from(letter.to_string())).collect(),
        None if is_list(&values) => values.try_iter()?.collect(),
        // As `values[…]` without such an item.
        None => return Ok(Value::UNDEFINED),
    };
    let length = i128::try_from(letters.len()).unwrap_or(i128::MAX);
    let step = number(&step)?.unwrap_or(1);
    if step == 0 {
        return Err(error("slice step cannot be zero"));
    }
    let (lowest, highest) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let bound = |value: Option<i128>, default: i128| match value {
        None => default,
        Some(value) if value < 0 => (value + length).max(lowest),
        Some(value) => value.min(highest),
    };
    let start = bound(number(&start)?, if step > 0 { 0 } else { length - 1 });
    let stop = bound(number(&stop)?, if step > 0 { length } else { -1 });
    let mut picked = Vec::new();
    let mut index = start;
    while if step > 0 { index < stop } else { index > stop } {
        picked.extend(usize::try_from(index).ok().and_then(|index| letters.get(index)).cloned());
        index = index.saturating_add(step);
    }
    Ok(match values.as_str() {
        Some(_) => {
            let text: String = picked.iter().filter_map(Value::as_str).collect();
            if values.is_safe() { Value::from_safe_string(text) } else { Value::from(text) }
        }
        None => sequence(picked, values.is_tuple()),
    })
}

/// What a loop is over.
fn iterate(values: Value) -> Result<Value, Error> {
    match values.kind() {
        ValueKind::Undefined | ValueKind::Seq | ValueKind::Map => Ok(values),
        // As a list, so that the loop knows its length.
        ValueKind::String | ValueKind::Iterable => Ok(values.try_iter()?.collect()),
        ValueKind::Plain if values.try_iter().is_ok() => Ok(values),
        _ => Err(error(format!("'{}' object is not iterable", type_name(&values)))),
    }
}

/// An attribute that Python's numbers have.
fn attribute(value: &Value, name: &str) -> Result<Value, Error> {
    defined(value)?;
    Ok(match (integer(value), float(value), name) {
        (Some(value), _, "real" | "numerator") => of_integer(value),
        (Some(_), _, "imag") => Value::from(0),
        (Some(_), _, "denominator") => Value::from(1),
        (None, Some(value), "real") => Value::from(value),
        (None, Some(_), "imag") => Value::from(0.0),
        _ => value.get_attr(name)?,
    })
}

/// Whether a value is a list or a tuple.
pub(super) fn is_list(value: &Value) -> bool {
    value.kind() == ValueKind::Seq || (value.kind() == ValueKind::Iterable && value.len().is_some())
}

/// Returns a list or a tuple.
pub(super) fn sequence(items: Vec<Value>, is_tuple: bool) -> Value {
    if is_tuple { Value::from(Tuple::from(items)) } else { Value::from(items) }
}

/// A macro that takes any arguments: those without a parameter are `varargs` and `kwargs`.
#[derive(Debug)]
struct AnyArguments {
    inner: Value,
    parameters: usize,
}

impl Object for AnyArguments {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        match key.as_str()? {
            "catch_varargs" | "catch_kwargs" => Some(Value::from(true)),
            name => self.inner.get_attr(name).ok(),
        }
    }

    fn call(self: &Arc<Self>, state: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        let (args, given): (Rest<Value>, Kwargs) = from_args(args)?;
        let split = args.len().min(self.parameters);
        let mut passed = args[..split].to_vec();
        let names: Vec<String> =
            self.inner.get_attr("arguments")?.try_iter()?.map(|name| to_text(&name)).collect();
        let mut known: Vec<(String, Value)> =
            vec![("varargs".to_owned(), Value::from(Tuple::from(&args[split..])))];
        let mut others: Vec<(String, Value)> = Vec::new();
        for name in given.args() {
            let value: Value = given.get(name)?;
            let is_known =
                name == "caller" || names.iter().take(self.parameters).any(|n| n == name);
            if is_known { &mut known } else { &mut others }.push((name.to_owned(), value));
        }
        known.push(("kwargs".to_owned(), Value::from_pairs(others)));
        passed.push(Kwargs::from_iter(known).into());
        self.inner.call(state, &passed)
    }

    fn render(self: &Arc<Self>, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&repr(&self.inner))
    }
}
