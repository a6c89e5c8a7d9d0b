//! Filters of Jinja that divide, turn and pick lists.
//!
//! `map`, `select` and their kin are minijinja's, which get no names but texts: it would write any other value as a name,
//! however large the text.

use std::borrow::Cow;

use minijinja::{
    Environment, Error, State, Value, filters as of_minijinja,
    value::{Kwargs, Rest, ValueOrKwargs, from_args},
};

use super::{
    filters::{iterate, option},
    limits::{check_name, keep, take, take_items},
    operators::key,
    text::{error, integer, type_name},
};

pub(super) fn add_to(environment: &mut Environment<'_>) {
    environment.add_filter("batch", batch);
    environment.add_filter("slice", slice);
    environment.add_filter("reverse", reverse);
    environment.add_filter("map", map);
    environment.add_filter("select", select);
    environment.add_filter("reject", reject);
    environment.add_filter("selectattr", select_attribute);
    environment.add_filter("rejectattr", reject_attribute);
}

/// `batch(linecount, fill_with=none)`: lists of this many items.
fn batch(value: Value, rest: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let (count, filler) = division(&rest, &named, "linecount")?;
    let items = iterate(&keep(value)?)?;
    take_items(items.len())?;
    let mut batches: Vec<Vec<Value>> = items.chunks(count).map(<[Value]>::to_vec).collect();
    if let (Some(last), Some(filler)) = (batches.last_mut(), filler) {
        take_items(count - last.len())?;
        last.resize(count, filler);
    }
    Ok(batches.into_iter().map(Value::from).collect())
}

/// `slice(slices, fill_with=none)`: this many lists, of which the first have one item more.
fn slice(value: Value, rest: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let (count, filler) = division(&rest, &named, "slices")?;
    let items = iterate(&keep(value)?)?;
    take_items(items.len().saturating_add(count))?;
    let (least, longer) = (items.len() / count, items.len() % count);
    let mut items = items.into_iter();
    let slices = (0..count).map(|index| {
        let is_longer = index < longer;
        let mut part: Vec<Value> = items.by_ref().take(least + usize::from(is_longer)).collect();
        part.extend(filler.clone().filter(|_| !is_longer));
        Value::from(part)
    });
    Ok(slices.collect())
}

/// Reads the arguments of `batch` and `slice`: a number, and what fills up.
fn division(rest: &[Value], named: &Kwargs, name: &str) -> Result<(usize, Option<Value>), Error> {
    let count = option(rest, named, 0, name)?.as_ref().and_then(integer).unwrap_or(0);
    let filler = option(rest, named, 1, "fill_with")?;
    named.assert_all_used()?;
    if count < 1 {
        return Err(error("the count must be at least 1"));
    }
    let filler = filler.filter(|filler| !filler.is_none() && !filler.is_undefined());
    Ok((usize::try_from(count).unwrap_or(usize::MAX), filler))
}

/// Items from the last to the first. minijinja's would hold the value itself, which may hold more than its items.
fn reverse(value: Value) -> Result<Value, Error> {
    if value.as_object().is_none() {
        take(value.as_bytes().map_or(0, <[u8]>::len))?;
        return of_minijinja::reverse(&value);
    }
    let mut items = iterate(&value)?;
    items.reverse();
    Ok(Value::make_object_iterable(items, |items| Box::new(items.iter().cloned())))
}

fn map(
    state: &mut State<'_, '_>,
    value: Value,
    rest: Rest<ValueOrKwargs>,
) -> Result<Vec<Value>, Error> {
    take_items(value.len().unwrap_or(0))?;
    let values = rest.into_values();
    let (_, named): (Rest<Value>, Kwargs) = from_args(&values)?;
    if named.has("attribute") {
        let attribute = named.get::<Value>("attribute")?;
        check_name(&attribute)?;
        key(&attribute)?;
    }
    of_minijinja::map(state, value, arguments(values.into_iter()))
}

fn select(
    state: &mut State<'_, '_>,
    value: Value,
    rest: Rest<ValueOrKwargs>,
) -> Result<Vec<Value>, Error> {
    let (test, rest) = test(&value, rest)?;
    of_minijinja::select(state, value, test, rest)
}

fn reject(
    state: &mut State<'_, '_>,
    value: Value,
    rest: Rest<ValueOrKwargs>,
) -> Result<Vec<Value>, Error> {
    let (test, rest) = test(&value, rest)?;
    of_minijinja::reject(state, value, test, rest)
}

fn select_attribute(
    state: &mut State<'_, '_>,
    value: Value,
    attribute: Value,
    rest: Rest<ValueOrKwargs>,
) -> Result<Vec<Value>, Error> {
    let (test, rest) = test(&value, rest)?;
    of_minijinja::selectattr(state, value, name(&attribute)?, test, rest)
}

fn reject_attribute(
    state: &mut State<'_, '_>,
    value: Value,
    attribute: Value,
    rest: Rest<ValueOrKwargs>,
) -> Result<Vec<Value>, Error> {
    let (test, rest) = test(&value, rest)?;
    of_minijinja::rejectattr(state, value, name(&attribute)?, test, rest)
}

/// Takes the work to look at the items of a value; returns the name of a test, if there is one, and its arguments.
fn test(
    value: &Value,
    rest: Rest<ValueOrKwargs>,
) -> Result<(Option<Cow<'static, str>>, Rest<ValueOrKwargs>), Error> {
    take_items(value.len().unwrap_or(0))?;
    let mut values = rest.into_values().into_iter();
    let test = values.next().filter(|test| !test.is_undefined() && !test.is_none());
    let test = test.as_ref().map(name).transpose()?;
    Ok((test, arguments(values)))
}

fn arguments(values: impl Iterator<Item = Value>) -> Rest<ValueOrKwargs> {
    Rest(values.map(ValueOrKwargs::from).collect())
}

/// Returns the name of a test or of an attribute, or the number of an item.
fn name(value: &Value) -> Result<Cow<'static, str>, Error> {
    check_name(value)?;
    match (value.as_str(), integer(value)) {
        (Some(text), _) => Ok(text.to_owned().into()),
        (None, Some(number)) => Ok(number.to_string().into()),
        (None, None) => Err(error(format!("a name must be str, not {}", type_name(value)))),
    }
}
