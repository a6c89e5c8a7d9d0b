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
    limits::{check_length, keep, keep_data, take, take_items, take_text, visit},
    text::{error, float, integer, of_integer, repr, to_text, type_name},
};

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
    environment.add_function("__key", |value: Value| key(&value).map(|()| value));
    environment.add_function("__slice", slice);
    environment.add_function("__iterate", iterate);
    environment.add_function("__spread", |value: Value| {
        take_items(value.len().unwrap_or(0)).map(|()| value)
    });
    environment.add_filter("__keep", keep);
    environment.add_filter("__keep_data", keep_data);
    environment.add_function("__loop", loop_method);
    environment.add_function("__attribute", |value: Value, name: Value| {
        attribute(&value, name.as_str().unwrap_or_default())
    });
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
                take_text(a.len() + b.len())?;
                let is_safe = left.is_safe() || right.is_safe();
                return Ok(match is_safe {
                    true => Value::from_safe_string(escape(left) + &escape(right)),
                    false => Value::from(format!("{a}{b}")),
                });
            }
            if is_list(left) && is_list(right) && left.is_tuple() == right.is_tuple() {
                take_items(left.len().unwrap_or(0) + right.len().unwrap_or(0))?;
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
    if let Some(text) = value.as_str() {
        take_text(text.len().saturating_mul(count))?;
        let text = text.repeat(count);
        return Ok(match value.is_safe() {
            true => Value::from_safe_string(text),
            false => Value::from(text),
        });
    }
    let items: Vec<Value> = value.try_iter()?.collect();
    let length = items.len().saturating_mul(count);
    take_items(length)?;
    Ok(sequence(items.into_iter().cycle().take(length).collect(), value.is_tuple()))
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
            "==" => equal(&left, right)?,
            "!=" => !equal(&left, right)?,
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
pub(super) fn equal(left: &Value, right: &Value) -> Result<bool, Error> {
    equal_at(left, right, 0)
}

/// Compares values that are nested this deeply.
fn equal_at(left: &Value, right: &Value, depth: usize) -> Result<bool, Error> {
    visit(depth)?;
    if let (Some(a), Some(b)) = (integer(left), integer(right)) {
        return Ok(a == b);
    }
    #[allow(clippy::float_cmp, reason = "as Python does")]
    if let (Some(a), Some(b)) = (float(left), float(right)) {
        return Ok(a == b);
    }
    let is_range = |value: &Value| value.as_object().is_some_and(|object| object.is::<Range>());
    if is_list(left) && is_list(right) {
        let are_alike = left.is_tuple() == right.is_tuple() && is_range(left) == is_range(right);
        if !are_alike || left.len() != right.len() {
            return Ok(false);
        }
        for (a, b) in left.try_iter()?.zip(right.try_iter()?) {
            if !equal_at(&a, &b, depth + 1)? {
                return Ok(false);
            }
        }
        return Ok(true);
    }
    if left.kind() == ValueKind::Map && right.kind() == ValueKind::Map {
        if left.len() != right.len() {
            return Ok(false);
        }
        for key in left.try_iter()? {
            let (a, b) = (left.get_item(&key)?, right.get_item(&key)?);
            if a.is_undefined() != b.is_undefined() || !equal_at(&a, &b, depth + 1)? {
                return Ok(false);
            }
        }
        return Ok(true);
    }
    take_texts(left, right)?;
    Ok(left.kind() == right.kind() && left == right)
}

/// Takes the work to compare two values, if they are texts.
fn take_texts(left: &Value, right: &Value) -> Result<(), Error> {
    match (left.as_str(), right.as_str()) {
        (Some(a), Some(b)) => take(a.len().min(b.len())),
        _ => Ok(()),
    }
}

/// Python's order of two values: `None` if one is not a number.
pub(super) fn order(left: &Value, right: &Value) -> Result<Option<Ordering>, Error> {
    order_at(left, right, 0)
}

/// Compares values that are nested this deeply.
fn order_at(left: &Value, right: &Value, depth: usize) -> Result<Option<Ordering>, Error> {
    visit(depth)?;
    defined(left)?;
    defined(right)?;
    if let (Some(a), Some(b)) = (integer(left), integer(right)) {
        return Ok(Some(a.cmp(&b)));
    }
    if let (Some(a), Some(b)) = (float(left), float(right)) {
        return Ok(a.partial_cmp(&b));
    }
    take_texts(left, right)?;
    if let (Some(a), Some(b)) = (left.as_str(), right.as_str()) {
        return Ok(Some(a.cmp(b)));
    }
    if is_list(left) && is_list(right) && left.is_tuple() == right.is_tuple() {
        for (a, b) in left.try_iter()?.zip(right.try_iter()?) {
            if !equal_at(&a, &b, depth + 1)? {
                return order_at(&a, &b, depth + 1);
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
        take(text.len())?;
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
            for item in values.try_iter()? {
                if equal(&item, value)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        _ => Err(error(format!("argument of type '{}' is not iterable", type_name(values)))),
    }
}

/// Refuses a value that cannot be a key of a mapping, as a list.
pub(super) fn key(value: &Value) -> Result<(), Error> {
    match is_key(value, 0)? {
        true => Ok(()),
        false => Err(error(format!("unhashable type: '{}'", type_name(value)))),
    }
}

/// Returns whether a value that is nested this deeply can be a key, or a part of one.
fn is_key(value: &Value, depth: usize) -> Result<bool, Error> {
    visit(depth)?;
    if let Some(text) = value.as_str() {
        take(text.len())?;
    }
    if value.is_tuple() {
        for item in value.try_iter()? {
            if !is_key(&item, depth + 1)? {
                return Ok(false);
            }
        }
        return Ok(true);
    }
    Ok(value.as_object().is_none())
}

/// `values[key]`; undefined if there is none.
pub(super) fn item(values: &Value, key: &Value) -> Result<Value, Error> {
    defined(values)?;
    if let (Some(text), Some(index)) = (values.as_str(), integer(key)) {
        take(text.len())?;
        let length = i128::try_from(text.chars().count()).unwrap_or(i128::MAX);
        let index = if index < 0 { index + length } else { index };
        let letter = usize::try_from(index).ok().and_then(|index| text.chars().nth(index));
        return Ok(letter.map_or(Value::UNDEFINED, |letter| Value::from(letter.to_string())));
    }
    if values.kind() == ValueKind::Iterable {
        take_items(values.len().unwrap_or(0))?;
    }
    // A number in a string names no item of a list, and a list is no key of a mapping.
    if (values.kind() == ValueKind::Seq && integer(key).is_none()) || !is_key(key, 0)? {
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
    let text = values.as_str();
    if text.is_none() && !is_list(&values) {
        // As `values[…]` without such an item.
        return Ok(Value::UNDEFINED);
    }
    let number = |value: &Value| match (value.is_none(), integer(value)) {
        (true, _) => Ok(None),
        (false, Some(number)) => Ok(Some(number)),
        (false, None) => Err(error("slice indices must be integers or None")),
    };
    let step = number(&step)?.unwrap_or(1);
    if step == 0 {
        return Err(error("slice step cannot be zero"));
    }
    let bounds = [number(&start)?, number(&stop)?];
    let Some(text) = text else {
        take_items(values.len().unwrap_or(0))?;
        let items: Vec<Value> = values.try_iter()?.collect();
        let picked = places(items.len(), bounds, step).filter_map(|at| items.get(at).cloned());
        return Ok(sequence(picked.collect(), values.is_tuple()));
    };
    take_text(text.len())?;
    let letters: Vec<char> = text.chars().collect();
    let picked: String =
        places(letters.len(), bounds, step).filter_map(|at| letters.get(at)).collect();
    Ok(if values.is_safe() { Value::from_safe_string(picked) } else { Value::from(picked) })
}

/// Returns the places that a slice picks of a list of this length.
fn places(length: usize, bounds: [Option<i128>; 2], step: i128) -> impl Iterator<Item = usize> {
    let length = i128::try_from(length).unwrap_or(i128::MAX);
    let (lowest, highest) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let bound = |value: Option<i128>, default: i128| match value {
        None => default,
        Some(value) if value < 0 => (value + length).max(lowest),
        Some(value) => value.min(highest),
    };
    let start = bound(bounds[0], if step > 0 { 0 } else { length - 1 });
    let stop = bound(bounds[1], if step > 0 { length } else { -1 });
    let is_before_stop = move |place: &i128| if step > 0 { *place < stop } else { *place > stop };
    std::iter::successors(Some(start), move |place| Some(place.saturating_add(step)))
        .take_while(is_before_stop)
        .filter_map(|place| usize::try_from(place).ok())
}

/// What a loop is over.
fn iterate(values: Value) -> Result<Value, Error> {
    match values.kind() {
        ValueKind::Undefined | ValueKind::Seq | ValueKind::Map => keep(values),
        // As a list, so that the loop knows its length.
        ValueKind::String | ValueKind::Iterable => {
            take_items(values.len().unwrap_or(0))?;
            keep(values.try_iter()?.collect())
        }
        ValueKind::Plain if values.try_iter().is_ok() => Ok(values),
        _ => Err(error(format!("'{}' object is not iterable", type_name(&values)))),
    }
}

/// `loop.cycle` and `loop.changed`. The second compares texts: a loop keeps them, and could hold itself.
fn loop_method(
    state: &mut State<'_, '_>,
    value: Value,
    name: Value,
    values: Rest<Value>,
) -> Result<Value, Error> {
    match name.as_str().unwrap_or_default() {
        "cycle" if values.is_empty() => Err(error("no items for cycling given")),
        "changed" => {
            let text = Value::from(repr(&Value::from(values.0)));
            value.call_method(state, "changed", &[text])
        }
        name => value.call_method(state, name, &values),
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
pub(super) struct AnyArguments {
    pub inner: Value,
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
