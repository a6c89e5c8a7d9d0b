//! JSON schemas before the library gets them: what it would get wrong is written in words that it gets right, or refused
//! by its path.

use std::{collections::HashSet, fmt};

use serde_json::{Map, Value, json};

use crate::GrammarError;

/// Most properties of an object that may be left out: the library looks at all of them at once, and gives up in the middle of an
/// answer when there are some 500.
const OPTIONAL_MAX: usize = 400;
/// The library reads numbers as doubles, which stand for one integer each below it.
const EXACT: i128 = 1 << 53;
/// The largest double that is an integer of 64 bits, as the library writes them.
const LARGEST: i128 = (1 << 63) - 1024;
/// Keywords that describe a schema and change nothing.
const REMARKS: [&str; 4] = ["$comment", "description", "title", "type"];

type Schema = Map<String, Value>;

/// Where a schema is in another one. It becomes a text only for an error: names may be long, and many.
#[derive(Clone, Copy)]
enum Path<'a> {
    Root,
    Field(&'a Self, &'a str),
    Item(&'a Self, usize),
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Root => f.write_str("$"),
            Self::Field(parent, name) => write!(f, "{parent}.{name}"),
            Self::Item(parent, index) => write!(f, "{parent}[{index}]"),
        }
    }
}

impl Path<'_> {
    fn refused(self, problem: fmt::Arguments<'_>) -> GrammarError {
        GrammarError(format!("{self}: {problem}"))
    }
}

/// Prepares a schema for the library. Answers that match the result match the schema.
///
/// # Errors
/// The path of what cannot be used.
pub(crate) fn prepared(mut schema: Value) -> Result<Value, GrammarError> {
    // A reference to a schema that is moved would lead nowhere.
    let may_move = !schema.to_string().contains("/additionalProperties");
    visit(&mut schema, Path::Root, &mut |fields, path| {
        if may_move {
            list_names(fields);
        }
        check_count(fields, path)?;
        check_optional(fields, path)?;
        for name in ["const", "enum"] {
            let value = fields.get(name);
            value.map_or(Ok(()), |value| check_exact(value, Path::Field(&path, name)))?;
        }
        move_bounds_inside(fields);
        Ok(())
    })?;
    Ok(schema)
}

/// Returns the path of the first schema with a keyword.
pub(crate) fn path_of(schema: &Value, keyword: &str) -> Option<String> {
    let found = visit(&mut schema.clone(), Path::Root, &mut |fields, path| match fields
        .contains_key(keyword)
    {
        true => Err(GrammarError(path.to_string())),
        false => Ok(()),
    });
    found.err().map(|GrammarError(path)| path)
}

/// Visits a schema and then those in it: not the values that it lists.
fn visit(
    schema: &mut Value,
    path: Path<'_>,
    each: &mut impl FnMut(&mut Schema, Path<'_>) -> Result<(), GrammarError>,
) -> Result<(), GrammarError> {
    match schema {
        Value::Array(items) => {
            let mut items = items.iter_mut().enumerate();
            items.try_for_each(|(index, item)| visit(item, Path::Item(&path, index), each))
        }
        Value::Object(fields) => {
            each(fields, path)?;
            fields.iter_mut().try_for_each(|(name, value)| {
                let path = Path::Field(&path, name);
                match (name.as_str(), value) {
                    ("const" | "default" | "enum" | "example" | "examples", _) => Ok(()),
                    (name, _) if name.starts_with("x-") => Ok(()),
                    // Their names are not keywords.
                    (
                        "properties" | "patternProperties" | "$defs" | "definitions"
                        | "dependentSchemas",
                        Value::Object(named),
                    ) => named
                        .iter_mut()
                        .try_for_each(|(name, part)| visit(part, Path::Field(&path, name), each)),
                    (_, part) => visit(part, path, each),
                }
            })
        }
        _ => Ok(()),
    }
}

/// Refuses schemas that need more different names than one which are not listed: nothing keeps an answer from repeating a name.
fn check_count(fields: &Schema, path: Path<'_>) -> Result<(), GrammarError> {
    let least = fields.get("minProperties").and_then(Value::as_f64);
    let is_listed = fields.get("additionalProperties") == Some(&Value::Bool(false))
        && fields.get("patternProperties").is_none_or(Value::is_null);
    if least.is_some_and(|least| least > 1.0) && !is_listed {
        let problem = format_args!("minProperties above 1 needs additionalProperties to be false");
        return Err(path.refused(problem));
    }
    Ok(())
}

/// Refuses objects with more optional properties than the library can look at.
fn check_optional(fields: &Schema, path: Path<'_>) -> Result<(), GrammarError> {
    let (mut names, mut required) = (HashSet::new(), HashSet::new());
    collect_names(fields, &mut names, &mut required);
    let optional = names.difference(&required).count();
    if optional > OPTIONAL_MAX {
        let problem =
            format_args!("has {optional} optional properties, at most {OPTIONAL_MAX} fit");
        return Err(path.refused(problem));
    }
    Ok(())
}

/// Collects the names of the properties of an object, and of those that it must have.
fn collect_names<'a>(
    fields: &'a Schema,
    names: &mut HashSet<&'a str>,
    required: &mut HashSet<&'a str>,
) {
    let listed = fields.get("properties").and_then(Value::as_object).into_iter().flatten();
    names.extend(listed.map(|(name, _)| name.as_str()));
    let items = |name: &str| fields.get(name).and_then(Value::as_array).into_iter().flatten();
    required.extend(items("required").filter_map(Value::as_str));
    for part in items("allOf").filter_map(Value::as_object) {
        collect_names(part, names, required);
    }
}

/// Refuses values with an integer that the library would change.
fn check_exact(value: &Value, path: Path<'_>) -> Result<(), GrammarError> {
    match value {
        Value::Number(number) => {
            let is_written = |integer: i128| {
                integer.abs() <= EXACT
                    || (integer.abs() <= LARGEST && to_double(integer) as i128 == integer)
            };
            match integer(value) {
                Some(exact) if value.is_f64() || !is_written(exact) => {
                    let problem =
                        "is beyond 2^53, where not every integer can be written: use a text";
                    Err(path.refused(format_args!("{number} {problem}")))
                }
                _ => Ok(()),
            }
        }
        Value::Array(items) => items.iter().try_for_each(|item| check_exact(item, path)),
        Value::Object(fields) => fields.values().try_for_each(|value| check_exact(value, path)),
        _ => Ok(()),
    }
}

/// Returns a whole number; of doubles only those that may stand for more than one integer.
fn integer(value: &Value) -> Option<i128> {
    let whole = value.as_i64().map(i128::from).or(value.as_u64().map(i128::from));
    #[expect(clippy::cast_possible_truncation, reason = "larger ones become the largest integer")]
    let of_double = |double: f64| double as i128;
    whole.or_else(|| value.as_f64().map(of_double).filter(|whole| whole.abs() > EXACT))
}

#[expect(clippy::cast_precision_loss, reason = "the caller looks at what is lost")]
fn to_double(integer: i128) -> f64 {
    integer as f64
}

/// Writes `propertyNames` as `properties`, where it lists names, and leaves it out where it allows all, as zod's records do.
fn list_names(fields: &mut Schema) {
    let Some(names) = fields.get("propertyNames") else { return };
    let is_text = |names: &Schema| names.get("type").is_none_or(|kind| kind == "string");
    let has_only = |names: &Schema, more: &[&str]| {
        names.keys().all(|name| REMARKS.contains(&&**name) || more.contains(&&**name))
    };
    let is_absent = |name: &str| match fields.get(name) {
        None => true,
        Some(value) => value.as_object().is_some_and(Map::is_empty),
    };
    match names {
        Value::Bool(true) => {}
        Value::Object(names) if is_text(names) && has_only(names, &[]) => {}
        Value::Object(names)
            if is_text(names)
                && has_only(names, &["enum"])
                && is_absent("properties")
                && is_absent("patternProperties") =>
        {
            let texts = names["enum"].as_array().into_iter().flatten().filter_map(Value::as_str);
            let value = fields.get("additionalProperties").cloned().unwrap_or(json!(true));
            let listed: Schema = texts.map(|text| (text.to_owned(), value.clone())).collect();
            fields.insert("properties".to_owned(), Value::Object(listed));
            fields.insert("additionalProperties".to_owned(), json!(false));
        }
        _ => return,
    }
    fields.remove("propertyNames");
}

/// Moves bounds that are no doubles, or no integers of 64 bits, inside. The new bounds include their number.
fn move_bounds_inside(fields: &mut Schema) {
    let is_number = fields.get("type").is_some_and(|kind| kind == "number");
    for (including, excluding, side) in
        [("minimum", "exclusiveMinimum", -1), ("maximum", "exclusiveMaximum", 1)]
    {
        let far = |name: &str| {
            let value = fields.get(name)?;
            let bound = integer(value).filter(|bound| bound.abs() >= EXACT)?;
            // A double as a bound of numbers means what it says.
            (!is_number || !value.is_f64()).then_some(bound)
        };
        // In drafts up to 4 it is a flag of the other bound.
        let is_flag = fields.get(excluding) == Some(&Value::Bool(true));
        let included = far(including).map(|bound| bound - side * i128::from(is_flag));
        let excluded = far(excluding).map(|bound| bound - side);
        let tighter = |a: i128, b: i128| if side == 1 { a.min(b) } else { a.max(b) };
        let bound = match (included, excluded) {
            (Some(a), Some(b)) => tighter(a, b),
            (Some(bound), None) | (None, Some(bound)) => bound,
            (None, None) => continue,
        };
        let bound = if is_number { bound } else { tighter(bound, side * LARGEST) };
        if excluded.is_some() || (is_flag && included.is_some()) {
            fields.remove(excluding);
        }
        let near = fields.get(including).and_then(Value::as_f64).filter(|_| included.is_none());
        let double = inside(bound, side);
        let double = match near {
            Some(near) if side == 1 => double.min(near),
            Some(near) => double.max(near),
            None => double,
        };
        fields.insert(including.to_owned(), json!(double));
    }
}

/// Returns the double next to an integer that is not beyond it, on a side: −1 is that of a minimum.
fn inside(bound: i128, side: i128) -> f64 {
    let is_inside = |double: f64| {
        #[expect(clippy::cast_possible_truncation, reason = "it is in the range of integers")]
        let exact = double as i128;
        // The library writes integers exactly, and other numbers with the digits that tell a double from the next.
        let written = format!("{double}").parse().unwrap_or(exact);
        [exact, written].iter().all(|number: &i128| side * (number - bound) <= 0)
    };
    let mut double = to_double(bound);
    while !is_inside(double) {
        double = if side == 1 { double.next_down() } else { double.next_up() };
    }
    double
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO_53: u64 = 1 << 53;

    fn refused(schema: Value) -> String {
        prepared(schema).expect_err("it cannot be used").to_string()
    }

    #[test]
    fn bounds_are_moved_inside() {
        let bounds = |schema: Value| {
            let schema = prepared(schema).expect("it can be used");
            let bound = |name: &str| schema.get(name).and_then(Value::as_f64);
            assert!(bound("exclusiveMinimum").is_none() && bound("exclusiveMaximum").is_none());
            (bound("minimum"), bound("maximum"))
        };
        let double = |more: i64| Some(9_007_199_254_740_992.0 + more as f64);
        let odd = json!({ "minimum": TWO_53 + 1, "maximum": TWO_53 + 3 });
        assert_eq!(bounds(odd), (double(2), double(2)));
        let negative = json!({ "minimum": -9_007_199_254_740_993_i64 });
        assert_eq!(bounds(negative), (Some(-9_007_199_254_740_992.0), None));
        let excluded = json!({ "exclusiveMinimum": TWO_53, "exclusiveMaximum": TWO_53 + 6 });
        assert_eq!(bounds(excluded), (double(2), double(4)));
        let flag = json!({ "maximum": TWO_53 + 6, "exclusiveMaximum": true, "minimum": 1 });
        assert_eq!(bounds(flag), (Some(1.0), double(4)));
        let both = json!({ "minimum": 5, "exclusiveMinimum": -(1_i64 << 60), "maximum": 7 });
        assert_eq!(bounds(both), (Some(5.0), Some(7.0)));
        // The largest double of 64 bits is written with digits that are more.
        let largest = LARGEST as f64 - 1024.0;
        for kind in [json!("integer"), json!(["integer", "null"]), json!(null)] {
            let all = json!({ "type": kind, "minimum": i64::MIN, "maximum": u64::MAX });
            assert_eq!(bounds(all), (Some(-largest), Some(largest)), "{kind}");
        }
        assert_eq!(bounds(json!({ "minimum": 0.5, "maximum": 7 })), (Some(0.5), Some(7.0)));
        let real =
            json!({ "type": "number", "minimum": 1_152_921_504_606_847_231_u64, "maximum": 1e300 });
        let (Some(least), most) = bounds(real) else { panic!("it has a bound") };
        assert!(least >= 1_152_921_504_606_847_232.0 && most == Some(1e300), "{least}");
    }

    #[test]
    fn names_are_listed_or_free() {
        let nothing = || json!({ "type": "null" });
        let free =
            json!({ "propertyNames": { "type": "string" }, "additionalProperties": nothing() });
        assert_eq!(
            prepared(free).expect("it can be used"),
            json!({ "additionalProperties": nothing() })
        );
        let listed = json!({ "propertyNames": { "enum": ["a", "b"] }, "additionalProperties": nothing(), "minProperties": 2 });
        let listed = prepared(listed).expect("it can be used");
        assert_eq!(listed["properties"], json!({ "a": nothing(), "b": nothing() }));
        assert_eq!(listed["additionalProperties"], false);
        for left in [
            json!({ "propertyNames": { "minLength": 3 } }),
            json!({ "propertyNames": { "enum": ["a"] }, "items": { "$ref": "#/additionalProperties" } }),
        ] {
            assert_eq!(prepared(left.clone()).expect("the library refuses it"), left);
        }
    }

    #[test]
    fn what_would_be_changed_is_refused_by_its_path() {
        let id = 1_187_236_485_760_118_785_u64;
        let nested = json!({ "properties": { "const": { "const": { "ids": [id] } } } });
        assert!(refused(nested).starts_with("$.properties.const.const: 1187236485760118785 is "));
        let negative = json!({ "items": { "enum": [1, -1_187_236_485_760_118_785_i64] } });
        assert!(refused(negative).starts_with("$.items.enum: -11"));
        let beyond: Value = serde_json::from_str("18446744073709551617").expect("JSON");
        assert!(refused(json!({ "const": beyond })).starts_with("$.const: "));
        assert!(refused(json!({ "const": 1_u64 << 63 })).starts_with("$.const: "));
        for exact in
            [json!(TWO_53), json!(TWO_53 + 2), json!(10_000_000_000_000_000_u64), json!(0.5)]
        {
            prepared(json!({ "const": exact })).expect("it is exact");
        }
        let example = json!({ "const": id });
        prepared(json!({ "default": id, "examples": [id], "example": example, "x-a": example }))
            .expect("they are no schemas");
    }

    #[test]
    fn objects_with_many_optional_properties_are_refused() {
        let names = |first: usize, count: usize| -> Value {
            let names = (first..first + count).map(|i| (format!("p{i}"), json!({})));
            names.collect::<Schema>().into()
        };
        let problem = "has 401 optional properties, at most 400 fit";
        let many = json!({ "anyOf": [{ "properties": names(0, 401), "required": ["a", "a"] }] });
        assert_eq!(refused(many), format!("$.anyOf[0]: {problem}"));
        let parts = json!({ "allOf": [{ "properties": names(0, 200) }, { "properties": names(200, 201) }] });
        assert_eq!(refused(parts), format!("$: {problem}"));
        let listed: Vec<String> = (0..401).map(|i| format!("p{i}")).collect();
        let record = json!({ "propertyNames": { "enum": listed } });
        assert_eq!(refused(record), format!("$: {problem}"));
        prepared(json!({ "properties": names(0, 401), "required": ["p7"] }))
            .expect("400 are optional");
    }

    #[test]
    fn long_names_and_many_values_take_little_memory() {
        let many = vec![json!(1); 70_000];
        let schema = json!({ "properties": { "n".repeat(100_000): { "type": "object", "required": many } } });
        prepared(schema).expect("it can be used");
    }

    #[test]
    fn keywords_are_found() {
        let schema = json!({ "properties": { "not": { "items": { "not": {} } } } });
        assert_eq!(path_of(&schema, "not").as_deref(), Some("$.properties.not.items"));
        assert_eq!(path_of(&schema, "contains"), None);
    }
}
