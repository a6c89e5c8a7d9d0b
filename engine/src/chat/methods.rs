//! Methods of Python's strings, numbers, lists and mappings.

use std::sync::Arc;

use minijinja::{
    Error, ErrorKind, State, Value,
    value::{
        Enumerator, Kwargs, Object, ObjectExt as _, ObjectRepr, Rest, Tuple, ValueKind, from_args,
    },
};

use super::{
    format::str_format,
    limits::{take, take_items},
    operators::{equal, is_list, key},
    string_methods,
    text::{error, float, integer, of_integer, repr, type_name},
};

/// Methods that change a list or a mapping, which Jinja's immutable sandbox refuses.
const CHANGES: [&str; 12] = [
    "append",
    "clear",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "reverse",
    "setdefault",
    "sort",
    "update",
    "__setitem__",
];

/// Arguments of a method: by place, then by name.
pub(super) struct Arguments<'a> {
    method: &'a str,
    values: Vec<Value>,
    pub named: Kwargs,
}

impl Arguments<'_> {
    /// Checks the number of arguments by place, and the names of the others.
    pub fn check(
        &self,
        count: std::ops::RangeInclusive<usize>,
        names: &[&str],
    ) -> Result<(), Error> {
        if !count.contains(&self.values.len()) {
            return Err(error(format!(
                "{}() does not take {} arguments",
                self.method,
                self.values.len()
            )));
        }
        match self.named.args().find(|name| !names.contains(name)) {
            Some(name) => Err(error(format!("{}() takes no argument '{name}'", self.method))),
            None => Ok(()),
        }
    }

    pub fn values(&self) -> &[Value] {
        &self.values
    }

    /// Returns an argument by its place or name, if it is given and is not none.
    pub fn find(&self, index: usize, name: &str) -> Option<Value> {
        let named = || self.named.get::<Value>(name).ok().filter(|_| self.named.has(name));
        self.values.get(index).cloned().or_else(named).filter(|value| !value.is_none())
    }

    /// Returns a string.
    pub fn text(&self, index: usize, name: &str) -> Result<Option<String>, Error> {
        match self.find(index, name) {
            None => Ok(None),
            Some(value) => match value.as_str() {
                Some(text) => {
                    take(text.len())?;
                    Ok(Some(text.to_owned()))
                }
                None => {
                    Err(error(format!("{}() needs a str, not {}", self.method, type_name(&value))))
                }
            },
        }
    }

    /// Returns a string that must be given.
    pub fn required_text(&self, index: usize) -> Result<String, Error> {
        self.text(index, "")?.ok_or_else(|| error(format!("{}() needs a str", self.method)))
    }

    /// Returns an integer.
    pub fn integer(&self, index: usize, name: &str) -> Result<Option<i128>, Error> {
        match self.find(index, name) {
            None => Ok(None),
            Some(value) => integer(&value).map(Some).ok_or_else(|| {
                error(format!("{}() needs an int, not {}", self.method, type_name(&value)))
            }),
        }
    }
}

/// Calls a method that minijinja does not know.
pub(super) fn call(
    _state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let (values, named): (Rest<Value>, Kwargs) = from_args(args)?;
    let arguments = Arguments { method, values: values.to_vec(), named };
    if matches!(value.kind(), ValueKind::Seq | ValueKind::Map) && CHANGES.contains(&method) {
        return Err(error(format!(
            "access to attribute '{method}' of '{}' object is unsafe",
            type_name(value)
        )));
    }
    match value.kind() {
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            take(text.len())?;
            match method {
                "format" => str_format(text, &arguments.values, &arguments.named).map(Value::from),
                "format_map" => {
                    arguments.check(1..=1, &[])?;
                    let mapping = &arguments.values[0];
                    take_items(mapping.len().unwrap_or(0))?;
                    let mut named = Vec::new();
                    for key in mapping.try_iter()? {
                        let item = mapping.get_item(&key)?;
                        named.extend(key.as_str().map(|key| (key.to_owned(), item)));
                    }
                    str_format(text, &[], &Kwargs::from_iter(named)).map(Value::from)
                }
                _ => {
                    let result = string_methods::call(text, method, &arguments)?;
                    // A method of a string that is safe as HTML returns such a string.
                    Ok(match (value.is_safe(), result.as_str()) {
                        (true, Some(text)) => Value::from_safe_string(text.to_owned()),
                        _ => result,
                    })
                }
            }
        }
        ValueKind::Number | ValueKind::Bool => number_method(value, method, &arguments),
        ValueKind::Map => map_method(value, method, &arguments),
        ValueKind::Seq | ValueKind::Iterable => list_method(value, method, &arguments),
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

fn number_method(value: &Value, method: &str, arguments: &Arguments<'_>) -> Result<Value, Error> {
    let plain = || arguments.check(0..=0, &[]);
    match (integer(value), float(value), method) {
        (Some(number), _, "bit_length") => {
            plain()?;
            Ok(Value::from(128 - number.unsigned_abs().leading_zeros()))
        }
        (Some(number), _, "bit_count") => {
            plain()?;
            Ok(Value::from(number.unsigned_abs().count_ones()))
        }
        (Some(number), _, "conjugate") => plain().map(|()| of_integer(number)),
        (Some(number), _, "as_integer_ratio") => {
            plain()?;
            Ok(Value::from(Tuple::from([of_integer(number), Value::from(1)])))
        }
        (Some(number), _, "to_bytes") => to_bytes(number, arguments),
        (None, Some(_), "conjugate") => plain().map(|()| value.clone()),
        (None, Some(number), "is_integer") => {
            plain()?;
            Ok(Value::from(number.is_finite() && number.fract() == 0.0))
        }
        (None, Some(number), "as_integer_ratio") => plain().and_then(|()| ratio(number)),
        (None, Some(number), "hex") => plain().map(|()| Value::from(hexadecimal(number))),
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

fn to_bytes(number: i128, arguments: &Arguments<'_>) -> Result<Value, Error> {
    arguments.check(0..=2, &["length", "byteorder", "signed"])?;
    let length = usize::try_from(arguments.integer(0, "length")?.unwrap_or(1)).unwrap_or(0);
    let order = arguments.text(1, "byteorder")?.unwrap_or_else(|| "big".to_owned());
    let is_signed = arguments.find(2, "signed").is_some_and(|value| value.is_true());
    let mut bytes = number.to_le_bytes().to_vec();
    let sign = if number < 0 { 0xff } else { 0 };
    let fits = length >= 16 || bytes[length..].iter().all(|byte| *byte == sign);
    if !fits || length > 64 || (number < 0 && !is_signed) {
        return Err(error("int too big to convert"));
    }
    bytes.resize(length, sign);
    if order == "big" {
        bytes.reverse();
    }
    Ok(Value::from_bytes(bytes))
}

/// `float.as_integer_ratio()`.
fn ratio(number: f64) -> Result<Value, Error> {
    let (mut numerator, mut denominator) = (number, 1i128);
    while numerator.is_finite() && numerator.fract() != 0.0 && denominator < 1 << 100 {
        numerator *= 2.0;
        denominator *= 2;
    }
    if numerator.fract() != 0.0 || numerator.abs() > 1e38 {
        return Err(error("a number that is too large"));
    }
    #[allow(clippy::cast_possible_truncation, reason = "it has no fraction and is in range")]
    let numerator = numerator as i128;
    Ok(Value::from(Tuple::from([of_integer(numerator), of_integer(denominator)])))
}

/// `float.hex()`.
fn hexadecimal(number: f64) -> String {
    let bits = number.abs().to_bits();
    let (exponent, fraction) = (bits >> 52, bits & ((1 << 52) - 1));
    let sign = if number.is_sign_negative() { "-" } else { "" };
    match exponent {
        0x7ff => super::text::float_text(number),
        0 if fraction == 0 => format!("{sign}0x0.0p+0"),
        0 => format!("{sign}0x0.{fraction:013x}p-1022"),
        exponent => format!("{sign}0x1.{fraction:013x}p{:+}", exponent.cast_signed() - 1023),
    }
}

fn map_method(value: &Value, method: &str, arguments: &Arguments<'_>) -> Result<Value, Error> {
    let items = || -> Result<Vec<(Value, Value)>, Error> {
        take_items(value.len().unwrap_or(0))?;
        value.try_iter()?.map(|key| Ok((key.clone(), value.get_item(&key)?))).collect()
    };
    let view = |name, items: Vec<Value>| Value::from_object(View { name, items });
    match method {
        "get" => {
            arguments.check(1..=2, &[])?;
            let found = super::operators::item(value, &arguments.values[0])?;
            let default = arguments.values.get(1).cloned().unwrap_or(Value::from(()));
            Ok(if found.is_undefined() { default } else { found })
        }
        "keys" => {
            arguments.check(0..=0, &[])?;
            Ok(view("dict_keys", items()?.into_iter().map(|(key, _)| key).collect()))
        }
        "values" => {
            arguments.check(0..=0, &[])?;
            Ok(view("dict_values", items()?.into_iter().map(|(_, item)| item).collect()))
        }
        "items" => {
            arguments.check(0..=0, &[])?;
            let pairs = items()?.into_iter();
            Ok(view("dict_items", pairs.map(|(k, v)| Value::from(Tuple::from([k, v]))).collect()))
        }
        "copy" => {
            arguments.check(0..=0, &[])?;
            Ok(Value::from_pairs(items()?))
        }
        "fromkeys" => from_keys(arguments),
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

/// `dict.fromkeys(keys, value)`.
pub(super) fn from_keys(arguments: &Arguments<'_>) -> Result<Value, Error> {
    arguments.check(1..=2, &[])?;
    let value = arguments.values.get(1).cloned().unwrap_or(Value::from(()));
    take_items(arguments.values[0].len().unwrap_or(0))?;
    let mut pairs = Vec::new();
    for name in arguments.values[0].try_iter()? {
        key(&name)?;
        pairs.push((name, value.clone()));
    }
    Ok(Value::from_pairs(pairs))
}

/// Reads the arguments of `dict.fromkeys`.
pub(super) fn arguments<'a>(method: &'a str, args: &[Value]) -> Result<Arguments<'a>, Error> {
    let (values, named): (Rest<Value>, Kwargs) = from_args(args)?;
    Ok(Arguments { method, values: values.to_vec(), named })
}

fn list_method(value: &Value, method: &str, arguments: &Arguments<'_>) -> Result<Value, Error> {
    if !is_list(value) {
        return Err(Error::from(ErrorKind::UnknownMethod));
    }
    match method {
        "count" => {
            arguments.check(1..=1, &[])?;
            let mut count = 0;
            for item in value.try_iter()? {
                count += usize::from(equal(&item, &arguments.values[0])?);
            }
            Ok(Value::from(count))
        }
        "index" => {
            arguments.check(1..=3, &[])?;
            let length = i128::try_from(value.len().unwrap_or(0)).unwrap_or(0);
            let bound = |given: Option<i128>, default| {
                let given = given.unwrap_or(default);
                if given < 0 { given + length } else { given }
            };
            let start = bound(arguments.integer(1, "")?, 0);
            let end = bound(arguments.integer(2, "")?, length);
            for (index, item) in (0i128..).zip(value.try_iter()?) {
                if (start..end).contains(&index) && equal(&item, &arguments.values[0])? {
                    return Ok(of_integer(index));
                }
            }
            Err(error(format!("{} is not in list", repr(&arguments.values[0]))))
        }
        "copy" if !value.is_tuple() => {
            arguments.check(0..=0, &[])?;
            Ok(value.clone())
        }
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

/// What `dict.keys()`, `values()` and `items()` return.
#[derive(Debug)]
pub(super) struct View {
    name: &'static str,
    items: Vec<Value>,
}

impl View {
    /// Returns the name of its type in Python.
    pub fn name(&self) -> &'static str {
        self.name
    }
}

impl Object for View {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        self.mapped_enumerator(|view| Box::new(view.items.iter().cloned()))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.items.len())
    }
}
