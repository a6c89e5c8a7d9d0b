//! Structured output in the body of a request: OpenAI's `response_format`, and vLLM's `structured_outputs` and `guided_*`.

use serde_json::{Map, Value};
use tritmill_queue::Grammar;

use crate::fields::{FieldError, Fields, brief};

/// Takes the fields that say what an answer must match, and checks it.
///
/// # Errors
/// The field: of an unknown kind, a second one, or a schema or grammar that cannot be used.
pub fn grammar(fields: &mut Fields) -> Result<Option<Grammar>, FieldError> {
    let mut found: Option<(String, Grammar)> = None;
    let mut add = |path: String, grammar: Option<Grammar>| {
        let Some(grammar) = grammar else { return Ok(()) };
        if let Some((first, _)) = &found {
            let problem = format!("cannot be combined with {first}");
            return Err(FieldError::new(path, "invalid_value", problem));
        }
        grammar.check().map_err(|error| {
            let problem = format!("cannot be used: {error}");
            FieldError::new(path.as_str(), "unsupported_value", problem)
        })?;
        found = Some((path, grammar));
        Ok(())
    };
    let format = response_format(fields)?;
    let path = match format {
        Some(Grammar::JsonSchema(_)) => "response_format.json_schema.schema",
        _ => "response_format",
    };
    add(path.to_owned(), format)?;
    for (name, kind) in [
        ("guided_json", "json"),
        ("guided_regex", "regex"),
        ("guided_choice", "choice"),
        ("guided_grammar", "grammar"),
    ] {
        add(name.to_owned(), of_kind(fields, name, kind)?)?;
    }
    if let Some(value) = fields.take("structured_outputs") {
        let Value::Object(map) = value else {
            return Err(FieldError::wrong_type("structured_outputs", "an object", &value));
        };
        let mut inner = Fields::new(map, "structured_outputs.");
        for kind in ["json", "regex", "choice", "grammar", "json_object"] {
            add(inner.path(kind), of_kind(&mut inner, kind, kind)?)?;
        }
        inner.finish()?;
    }
    Ok(found.map(|(_, grammar)| grammar))
}

/// Takes `response_format`: `text`, `json_object`, or `json_schema` with a schema.
fn response_format(fields: &mut Fields) -> Result<Option<Grammar>, FieldError> {
    const NAME: &str = "response_format";
    let Some(value) = fields.take(NAME) else { return Ok(None) };
    let Value::Object(map) = value else {
        return Err(FieldError::wrong_type(NAME, "an object", &value));
    };
    let mut format = Fields::new(map, "response_format.");
    let kind = format.text("type")?;
    let grammar = match kind.as_deref() {
        Some("text") => None,
        Some("json_object") => Some(Grammar::JsonObject),
        Some("json_schema") => Some(named_schema(&mut format)?),
        Some(other) => {
            let problem = format!(
                "must be 'text', 'json_object' or 'json_schema', got '{}'",
                crate::fields::shorten(other)
            );
            return Err(FieldError::new(format.path("type"), "unsupported_value", problem));
        }
        None => return Err(FieldError::new(format.path("type"), "missing_field", "is missing")),
    };
    format.finish()?;
    Ok(grammar)
}

/// Takes `json_schema`: a name, a schema, and what changes nothing here: answers always match.
fn named_schema(format: &mut Fields) -> Result<Grammar, FieldError> {
    let path = format.path("json_schema");
    let map = match format.take("json_schema") {
        Some(Value::Object(map)) => map,
        Some(other) => return Err(FieldError::wrong_type(path, "an object", &other)),
        None => return Err(FieldError::new(path, "missing_field", "is missing")),
    };
    let mut named = Fields::new(map, format!("{path}."));
    named.text("name")?;
    named.text("description")?;
    named.boolean("strict")?;
    let Some(schema) = named.take("schema") else {
        return Err(FieldError::new(named.path("schema"), "missing_field", "is missing"));
    };
    let grammar = schema_of(&named.path("schema"), schema)?;
    named.finish()?;
    Ok(grammar)
}

/// Takes a field of vLLM's, by the kind of its grammar.
fn of_kind(fields: &mut Fields, name: &str, kind: &str) -> Result<Option<Grammar>, FieldError> {
    let path = fields.path(name);
    Ok(match kind {
        "json" => fields.take(name).map(|schema| schema_of(&path, schema)).transpose()?,
        "regex" => fields.text(name)?.map(Grammar::Regex),
        "grammar" => fields.text(name)?.map(Grammar::Lark),
        "json_object" => (fields.boolean(name)? == Some(true)).then_some(Grammar::JsonObject),
        _ => {
            let text = |(index, item)| match item {
                Value::String(text) => Ok(text),
                other => {
                    Err(FieldError::wrong_type(format!("{path}[{index}]"), "a string", &other))
                }
            };
            let texts = fields.list(name)?.map(|items| {
                items.into_iter().enumerate().map(text).collect::<Result<Vec<_>, _>>()
            });
            texts.transpose()?.map(Grammar::Choice)
        }
    })
}

/// Returns the grammar of a schema: an object, or its text as JSON.
fn schema_of(path: &str, schema: Value) -> Result<Grammar, FieldError> {
    match schema {
        Value::Object(_) | Value::Bool(_) => Ok(Grammar::of_schema(&schema)),
        Value::String(text) => match serde_json::from_str::<Map<String, Value>>(&text) {
            Ok(_) => Ok(Grammar::JsonSchema(text)),
            Err(_) => {
                let problem = format!("must be a JSON schema, got {}", brief(&Value::String(text)));
                Err(FieldError::new(path, "invalid_value", problem))
            }
        },
        other => Err(FieldError::wrong_type(path, "a JSON schema", &other)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parsed(body: Value) -> Result<Option<Grammar>, FieldError> {
        let mut fields = Fields::new(body.as_object().cloned().expect("an object"), "");
        let grammar = grammar(&mut fields)?;
        fields.finish()?;
        Ok(grammar)
    }

    fn schema() -> Value {
        json!({ "type": "object", "properties": { "b": { "type": "integer" }, "a": {} } })
    }

    #[test]
    fn every_way_to_ask_gives_a_grammar() {
        let named = json!({ "name": "n", "strict": true, "schema": schema() });
        let cases = [
            (json!({}), None),
            (json!({ "response_format": { "type": "text" } }), None),
            (json!({ "response_format": { "type": "json_object" } }), Some(Grammar::JsonObject)),
            (
                json!({ "response_format": { "type": "json_schema", "json_schema": named } }),
                Some(Grammar::of_schema(&schema())),
            ),
            (json!({ "guided_json": schema() }), Some(Grammar::of_schema(&schema()))),
            (json!({ "guided_json": schema().to_string() }), Some(Grammar::of_schema(&schema()))),
            (json!({ "guided_regex": "a+" }), Some(Grammar::Regex("a+".to_owned()))),
            (
                json!({ "guided_choice": ["a", "b"] }),
                Some(Grammar::Choice(vec!["a".to_owned(), "b".to_owned()])),
            ),
            (
                json!({ "guided_grammar": "start: \"a\"" }),
                Some(Grammar::Lark("start: \"a\"".to_owned())),
            ),
            (
                json!({ "structured_outputs": { "choice": ["a"] } }),
                Some(Grammar::Choice(vec!["a".to_owned()])),
            ),
            (json!({ "structured_outputs": { "json_object": true } }), Some(Grammar::JsonObject)),
        ];
        for (body, expected) in cases {
            assert_eq!(parsed(body.clone()), Ok(expected), "{body}");
        }
    }

    #[test]
    fn what_cannot_be_used_is_refused_by_its_path() {
        let named = |schema: Value| json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "n", "schema": schema } } });
        let cases = [
            (json!({ "response_format": "json" }), "response_format"),
            (json!({ "response_format": { "type": "xml" } }), "response_format.type"),
            (json!({ "response_format": {"x": 1} }), "response_format.type"),
            (
                json!({ "response_format": { "type": "json_schema" } }),
                "response_format.json_schema",
            ),
            (
                json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "n" } } }),
                "response_format.json_schema.schema",
            ),
            (named(json!(7)), "response_format.json_schema.schema"),
            (
                named(json!({ "type": "object", "dependentSchemas": { "a": {} } })),
                "response_format.json_schema.schema",
            ),
            (json!({ "guided_regex": "(" }), "guided_regex"),
            (json!({ "guided_choice": ["a", 3] }), "guided_choice[1]"),
            (json!({ "guided_choice": ["a"], "guided_regex": "a" }), "guided_choice"),
            (json!({ "structured_outputs": { "xml": "a" } }), "structured_outputs.xml"),
        ];
        for (body, path) in cases {
            let error = parsed(body.clone()).expect_err("it cannot be used");
            assert_eq!(error.path, path, "{body}: {error}");
        }
    }
}
