//! JSON schemas before the library gets them: what it would get wrong is written in words that it gets right, or refused
//! by its path.

use serde_json::{Map, Value, json};

use crate::GrammarError;

/// Most properties of an object that may be left out: the library looks at all of them at once, and gives up in the middle of an
/// answer when there are some 500.
const OPTIONAL_MAX: usize = 400;
/// The library reads numbers as doubles, which stand for one integer each up to here.
const EXACT: u64 = 1 << 53;
/// The bound that stands for larger ones of integers: the library writes 18 digits, and this is the largest double that has as many.
const LARGEST_BOUND: i64 = 1_000_000_000_000_000_000 - 128;
/// Keywords that describe a schema and change nothing.
const REMARKS: [&str; 4] = ["$comment", "description", "title", "type"];

type Schema = Map<String, Value>;

/// Prepares a schema for the library. Answers that match the result match the schema.
///
/// # Errors
/// The path of what cannot be used.
pub(crate) fn prepared(mut schema: Value) -> Result<Value, GrammarError> {
    prepare(&mut schema, "$")?;
    Ok(schema)
}

fn prepare(schema: &mut Value, path: &str) -> Result<(), GrammarError> {
    if let Value::Object(fields) = schema {
        check_count(fields, path)?;
        check_optional(fields, path)?;
        for name in ["const", "enum"] {
            fields
                .get(name)
                .map_or(Ok(()), |value| check_exact(value, &format!("{path}.{name}")))?;
        }
        list_names(fields);
        round_bounds(fields);
    }
    parts(schema, path).into_iter().try_for_each(|(path, part)| prepare(part, &path))
}

/// Returns what is part of a schema and may be a schema, with its path: not the values that it lists.
fn parts<'a>(schema: &'a mut Value, path: &str) -> Vec<(String, &'a mut Value)> {
    match schema {
        Value::Array(items) => {
            let items = items.iter_mut().enumerate();
            items.map(|(i, item)| (format!("{path}[{i}]"), item)).collect()
        }
        Value::Object(fields) => {
            let mut parts = Vec::new();
            for (name, value) in fields {
                let path = format!("{path}.{name}");
                match (name.as_str(), value) {
                    ("const" | "default" | "enum" | "examples", _) => {}
                    // Their names are not keywords.
                    (
                        "properties" | "patternProperties" | "$defs" | "definitions",
                        Value::Object(named),
                    ) => parts.extend(
                        named.iter_mut().map(|(name, part)| (format!("{path}.{name}"), part)),
                    ),
                    (_, part) => parts.push((path, part)),
                }
            }
            parts
        }
        _ => Vec::new(),
    }
}

/// Refuses schemas that need more different names than one which are not listed: nothing keeps an answer from repeating a name.
fn check_count(fields: &Schema, path: &str) -> Result<(), GrammarError> {
    let least = fields.get("minProperties").and_then(Value::as_f64);
    let is_listed = fields.get("additionalProperties") == Some(&Value::Bool(false))
        && fields.get("patternProperties").is_none_or(Value::is_null);
    if least.is_some_and(|least| least > 1.0) && !is_listed {
        let problem = "minProperties above 1 needs additionalProperties to be false";
        return Err(GrammarError(format!("{path}: {problem}")));
    }
    Ok(())
}

fn check_optional(fields: &Schema, path: &str) -> Result<(), GrammarError> {
    let Some(Value::Object(named)) = fields.get("properties") else { return Ok(()) };
    let required = fields.get("required").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    // Names in `required` that are no properties count for one each, which refuses a little more.
    let optional = named.len().saturating_sub(required.len());
    if optional > OPTIONAL_MAX {
        let problem = format!("has {optional} optional properties, at most {OPTIONAL_MAX} fit");
        return Err(GrammarError(format!("{path}: {problem}")));
    }
    Ok(())
}

/// Refuses values with an integer that the library would change.
fn check_exact(value: &Value, path: &str) -> Result<(), GrammarError> {
    match value {
        Value::Number(number) if magnitude(value).is_some_and(|integer| integer > EXACT) => {
            let problem = format!("{number} is beyond 2^53, where numbers are not exact");
            Err(GrammarError(format!("{path}: {problem}; use a string")))
        }
        Value::Array(items) => items.iter().try_for_each(|item| check_exact(item, path)),
        Value::Object(fields) => fields.values().try_for_each(|value| check_exact(value, path)),
        _ => Ok(()),
    }
}

/// Returns the magnitude of an integer.
fn magnitude(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_i64().map(i64::unsigned_abs))
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

/// Moves bounds that are no doubles to the next double inside, and bounds of integers to those that the library can write.
fn round_bounds(fields: &mut Schema) {
    let is_integer = fields.get("type").is_some_and(|kind| kind == "integer");
    let bounds =
        [("minimum", -1), ("exclusiveMinimum", -1), ("maximum", 1), ("exclusiveMaximum", 1)];
    for (name, side) in bounds {
        let Some(bound) = fields.get_mut(name) else { continue };
        let Some(double) = bound.as_f64() else { continue };
        let is_far = double * f64::from(side) > LARGEST_BOUND as f64;
        if is_integer && is_far {
            *bound = json!(i64::from(side) * LARGEST_BOUND);
        } else if magnitude(bound).is_some_and(|integer| integer > EXACT) {
            *bound = json!(inside(bound, double, side));
        }
    }
}

/// Returns the double next to an integer that is not beyond it, on a side: −1 is that of a minimum.
fn inside(bound: &Value, double: f64, side: i32) -> f64 {
    #[expect(clippy::cast_possible_truncation, reason = "an integer of 64 bits, rounded")]
    let rounded = double as i128;
    let exact = bound.as_i64().map(i128::from).or(bound.as_u64().map(i128::from));
    match (side, exact) {
        (1, Some(exact)) if rounded > exact => double.next_down(),
        (-1, Some(exact)) if rounded < exact => double.next_up(),
        _ => double,
    }
}

/// Returns the path of the first schema with a keyword.
pub(crate) fn path_of(schema: &Value, keyword: &str) -> Option<String> {
    fn find(schema: &mut Value, path: &str, keyword: &str) -> Option<String> {
        if schema.as_object().is_some_and(|fields| fields.contains_key(keyword)) {
            return Some(path.to_owned());
        }
        parts(schema, path).into_iter().find_map(|(path, part)| find(part, &path, keyword))
    }
    find(&mut schema.clone(), "$", keyword)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(schema: Value) -> String {
        prepared(schema).expect_err("it cannot be used").to_string()
    }

    #[test]
    fn bounds_are_moved_inside() {
        let bounds = |schema: Value| {
            let schema = prepared(schema).expect("it can be used");
            (schema["minimum"].as_f64(), schema["maximum"].as_f64())
        };
        let two_53 = 9_007_199_254_740_992.0;
        let odd =
            json!({ "minimum": 9_007_199_254_740_993_u64, "maximum": 9_007_199_254_740_995_u64 });
        assert_eq!(bounds(odd), (Some(two_53 + 2.0), Some(two_53 + 2.0)));
        let negative =
            json!({ "minimum": -9_007_199_254_740_993_i64, "maximum": -9_007_199_254_740_993_i64 });
        assert_eq!(bounds(negative), (Some(-two_53), Some(-two_53 - 2.0)));
        let largest = LARGEST_BOUND as f64;
        let all = json!({ "type": "integer", "minimum": i64::MIN, "maximum": u64::MAX });
        assert_eq!(bounds(all), (Some(-largest), Some(largest)));
        assert_eq!(bounds(json!({ "minimum": 0.5, "maximum": 7 })), (Some(0.5), Some(7.0)));
    }

    #[test]
    fn names_are_listed_or_free() {
        let free = json!({ "type": "object", "propertyNames": { "type": "string" }, "additionalProperties": { "type": "null" } });
        let prepared_free = prepared(free).expect("it can be used");
        assert!(prepared_free.get("propertyNames").is_none());
        assert_eq!(prepared_free["additionalProperties"], json!({ "type": "null" }));
        let listed = json!({ "propertyNames": { "enum": ["a", "b"] }, "additionalProperties": { "type": "null" } });
        let nothing = json!({ "type": "null" });
        assert_eq!(
            prepared(listed).expect("it can be used"),
            json!({ "properties": { "a": nothing, "b": nothing }, "additionalProperties": false })
        );
        let long = json!({ "propertyNames": { "minLength": 3 } });
        assert_eq!(prepared(long.clone()).expect("the library refuses it"), long);
    }

    #[test]
    fn what_would_be_changed_is_refused_by_its_path() {
        let id = 1_187_236_485_760_118_785_u64;
        let nested = json!({ "properties": { "const": { "const": { "ids": [id] } } } });
        assert!(refused(nested).starts_with("$.properties.const.const: 1187236485760118785 "));
        assert!(
            refused(json!({ "items": { "enum": [1, -(id as i64)] } }))
                .starts_with("$.items.enum: ")
        );
        prepared(json!({ "const": 9_007_199_254_740_992_u64 })).expect("it is exact");
        prepared(json!({ "default": id, "examples": [id] })).expect("they are no schemas");
        let names = |count: usize| -> Value {
            (0..count).map(|i| (format!("p{i}"), json!({}))).collect::<Schema>().into()
        };
        let many = json!({ "anyOf": [{ "properties": names(OPTIONAL_MAX + 1) }] });
        assert!(refused(many).starts_with("$.anyOf[0]: has 401 optional properties"));
        let one = json!({ "properties": names(OPTIONAL_MAX + 1), "required": ["p7"] });
        prepared(one).expect("400 are optional");
    }

    #[test]
    fn keywords_are_found() {
        let schema = json!({ "properties": { "not": { "items": { "not": {} } } } });
        assert_eq!(path_of(&schema, "not").as_deref(), Some("$.properties.not.items"));
        assert_eq!(path_of(&schema, "contains"), None);
    }
}
