//! Parses the tools of a chat request: `tools`, `tool_choice` and `parallel_tool_calls`, by OpenAI's definition.

use serde_json::Value;
use tritmill_queue::{Grammar, Tool, ToolChoice};

use crate::fields::{FieldError, Fields, shorten};

/// Most tools of a request.
const TOOLS_MAX: usize = 128;
/// Longest name of a function, in bytes.
const NAME_BYTES_MAX: usize = 64;

/// The tools of a request.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Tools {
    /// The functions; empty if none may be called.
    pub tools: Vec<Tool>,
    /// Whether they are called.
    pub choice: ToolChoice,
    /// Whether an answer makes one call at most.
    pub one_call: bool,
}

/// Takes the tools.
///
/// # Errors
/// The field that cannot be used: for a schema, the keyword that is not supported.
pub fn tools(fields: &mut Fields) -> Result<Tools, FieldError> {
    let items = fields.list("tools")?.unwrap_or_default();
    if items.len() > TOOLS_MAX {
        let problem = format!("has {} tools, at most {TOOLS_MAX} fit", items.len());
        return Err(FieldError::new("tools", "invalid_value", problem));
    }
    let each = |(index, item)| tool(&format!("tools[{index}]"), item);
    let tools: Vec<Tool> = items.into_iter().enumerate().map(each).collect::<Result<_, _>>()?;
    for (index, tool) in tools.iter().enumerate() {
        if tools[..index].iter().any(|known| known.name == tool.name) {
            let problem = format!("'{}' names two tools", tool.name);
            let path = format!("tools[{index}].function.name");
            return Err(FieldError::new(path, "invalid_value", problem));
        }
    }
    let one_call = fields.boolean("parallel_tool_calls")? == Some(false);
    match choice(fields, &tools)? {
        Some(choice) => {
            // A function that is named is called once.
            let is_named = matches!(&choice, ToolChoice::RequiredOf(names) if names.len() == 1);
            Ok(Tools { tools, choice, one_call: one_call || is_named })
        }
        None => Ok(Tools::default()),
    }
}

fn tool(path: &str, item: Value) -> Result<Tool, FieldError> {
    let Value::Object(map) = item else {
        return Err(FieldError::wrong_type(path, "an object", &item));
    };
    let mut outer = Fields::new(map, format!("{path}."));
    match outer.text("type")?.as_deref() {
        Some("function") => {}
        Some(other) => {
            let problem = format!("is supported as 'function' only, got '{}'", shorten(other));
            return Err(FieldError::new(outer.path("type"), "unsupported_value", problem));
        }
        None => return Err(FieldError::new(outer.path("type"), "missing_field", "is missing")),
    }
    let at = outer.path("function");
    let function = match outer.take("function") {
        Some(Value::Object(map)) => map,
        Some(other) => return Err(FieldError::wrong_type(at, "an object", &other)),
        None => return Err(FieldError::new(at, "missing_field", "is missing")),
    };
    outer.finish()?;
    let mut given = Fields::new(function.clone(), format!("{at}."));
    let name = match given.text("name")? {
        Some(name) => name,
        None => return Err(FieldError::new(given.path("name"), "missing_field", "is missing")),
    };
    let is_letter = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.chars().all(is_letter) {
        let problem = format!(
            "must be 1 to {NAME_BYTES_MAX} letters, digits, '_', '-' or '.', got '{}'",
            shorten(&name)
        );
        return Err(FieldError::new(given.path("name"), "invalid_value", problem));
    }
    given.text("description")?;
    given.boolean("strict")?;
    let parameters = given.path("parameters");
    if let Some(value) = given.take("parameters")
        && !value.is_object()
    {
        return Err(FieldError::wrong_type(parameters, "a JSON schema", &value));
    }
    given.finish()?;
    let tool = Tool { name, function };
    Grammar::of_schema(&tool.parameters()).check().map_err(|error| {
        let problem = format!("cannot be used: {error}");
        FieldError::new(parameters, "unsupported_value", problem)
    })?;
    Ok(tool)
}

/// Takes `tool_choice`; `None` if no tool may be called.
fn choice(fields: &mut Fields, tools: &[Tool]) -> Result<Option<ToolChoice>, FieldError> {
    const NAME: &str = "tool_choice";
    let value = fields.take(NAME);
    let choice = match &value {
        None => Some(ToolChoice::Auto),
        Some(Value::String(word)) => match word.as_str() {
            "auto" => Some(ToolChoice::Auto),
            "none" => None,
            "required" => Some(ToolChoice::Required),
            other => {
                let problem = format!(
                    "must be 'auto', 'none', 'required' or a function, got '{}'",
                    shorten(other)
                );
                return Err(FieldError::new(NAME, "invalid_value", problem));
            }
        },
        Some(Value::Object(map)) => Some(named_choice(Fields::new(map.clone(), "tool_choice."))?),
        Some(other) => return Err(FieldError::wrong_type(NAME, "a string or an object", other)),
    };
    let names = match &choice {
        Some(ToolChoice::AutoOf(names) | ToolChoice::RequiredOf(names)) => names.as_slice(),
        _ => &[],
    };
    for name in names {
        if !tools.iter().any(|tool| tool.name == *name) {
            let problem = format!("names '{}', which is not in tools", shorten(name));
            return Err(FieldError::new(NAME, "invalid_value", problem));
        }
    }
    if tools.is_empty() && choice.as_ref().is_some_and(ToolChoice::is_required) {
        return Err(FieldError::new(NAME, "invalid_value", "needs tools"));
    }
    Ok(choice.filter(|_| !tools.is_empty()))
}

/// Parses a choice of one function, or of several.
fn named_choice(mut choice: Fields) -> Result<ToolChoice, FieldError> {
    let path = choice.path("type");
    match choice.text("type")?.as_deref() {
        Some("function") => {
            let name = name_of(&mut choice)?;
            choice.finish()?;
            Ok(ToolChoice::RequiredOf(vec![name]))
        }
        Some("allowed_tools") => {
            let at = choice.path("allowed_tools");
            let mut allowed = match choice.take("allowed_tools") {
                Some(Value::Object(map)) => Fields::new(map, format!("{at}.")),
                Some(other) => return Err(FieldError::wrong_type(at, "an object", &other)),
                None => return Err(FieldError::new(at, "missing_field", "is missing")),
            };
            let mode = allowed.text("mode")?;
            let items = allowed.list("tools")?.unwrap_or_default();
            let each = |(index, item)| match item {
                Value::Object(map) => {
                    name_of(&mut Fields::new(map, format!("{at}.tools[{index}].")))
                }
                other => {
                    let path = format!("{at}.tools[{index}]");
                    Err(FieldError::wrong_type(path, "an object", &other))
                }
            };
            let names = items.into_iter().enumerate().map(each).collect::<Result<Vec<_>, _>>()?;
            if names.is_empty() {
                return Err(FieldError::new(allowed.path("tools"), "invalid_value", "is empty"));
            }
            match mode.as_deref() {
                Some("auto") | None => Ok(ToolChoice::AutoOf(names)),
                Some("required") => Ok(ToolChoice::RequiredOf(names)),
                Some(other) => {
                    let problem = format!("must be 'auto' or 'required', got '{}'", shorten(other));
                    Err(FieldError::new(allowed.path("mode"), "invalid_value", problem))
                }
            }
        }
        Some(other) => {
            let problem =
                format!("is supported as 'function' or 'allowed_tools', got '{}'", shorten(other));
            Err(FieldError::new(path, "unsupported_value", problem))
        }
        None => Err(FieldError::new(path, "missing_field", "is missing")),
    }
}

/// Returns the name in `{"type": "function", "function": {"name": …}}`, or in the form of the Responses API, which has no inner
/// object.
fn name_of(fields: &mut Fields) -> Result<String, FieldError> {
    let at = fields.path("function");
    let name = match fields.take("function") {
        Some(Value::Object(map)) => Fields::new(map, format!("{at}.")).text("name")?,
        Some(other) => return Err(FieldError::wrong_type(at, "an object", &other)),
        None => fields.text("name")?,
    };
    name.ok_or_else(|| FieldError::new(format!("{at}.name"), "missing_field", "is missing"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parsed(body: Value) -> Result<Tools, FieldError> {
        let mut fields = Fields::new(body.as_object().cloned().expect("an object"), "");
        let tools = tools(&mut fields)?;
        fields.finish()?;
        Ok(tools)
    }

    fn tool(name: &str) -> Value {
        let parameters =
            json!({ "type": "object", "properties": { "city": { "type": "string" } } });
        let function =
            json!({ "name": name, "description": "d", "parameters": parameters, "strict": true });
        json!({ "type": "function", "function": function })
    }

    #[test]
    fn choices_select_tools() {
        let choice = |choice: Value| {
            let body = json!({ "tools": [tool("a"), tool("b")], "tool_choice": choice });
            parsed(body).map(|tools| (tools.tools.len(), tools.choice))
        };
        let names = |list: &[&str]| list.iter().map(|name| (*name).to_owned()).collect();
        assert_eq!(choice(Value::Null), Ok((2, ToolChoice::Auto)));
        assert_eq!(choice(json!("required")), Ok((2, ToolChoice::Required)));
        assert_eq!(choice(json!("none")), Ok((0, ToolChoice::Auto)));
        let one = json!({ "type": "function", "function": { "name": "b" } });
        assert_eq!(choice(one), Ok((2, ToolChoice::RequiredOf(names(&["b"])))));
        let some = json!({ "type": "allowed_tools", "allowed_tools": { "mode": "auto", "tools": [
            { "type": "function", "function": { "name": "a" } }
        ] } });
        assert_eq!(choice(some), Ok((2, ToolChoice::AutoOf(names(&["a"])))));
        assert_eq!(parsed(json!({ "tool_choice": "auto" })), Ok(Tools::default()));
        let one_call = parsed(json!({ "tools": [tool("a")], "parallel_tool_calls": false }));
        assert!(one_call.expect("tools").one_call);
        let named = json!({ "type": "function", "function": { "name": "a" } });
        let named = parsed(json!({ "tools": [tool("a")], "tool_choice": named }));
        assert!(named.expect("tools").one_call);
    }

    #[test]
    fn what_cannot_be_used_is_refused_by_its_path() {
        let with = |parameters: Value| json!({ "tools": [{ "type": "function", "function": { "name": "a", "parameters": parameters } }] });
        let cases = [
            (json!({ "tools": {} }), "tools"),
            (json!({ "tools": [7] }), "tools[0]"),
            (json!({ "tools": [{ "type": "web_search" }] }), "tools[0].type"),
            (json!({ "tools": [{ "type": "function" }] }), "tools[0].function"),
            (json!({ "tools": [tool("a b")] }), "tools[0].function.name"),
            (json!({ "tools": [tool("a"), tool("a")] }), "tools[1].function.name"),
            (with(json!("x")), "tools[0].function.parameters"),
            (
                with(json!({ "type": "object", "dependentSchemas": { "a": {} } })),
                "tools[0].function.parameters",
            ),
            (json!({ "tools": [tool("a")], "tool_choice": "any" }), "tool_choice"),
            (
                json!({ "tools": [tool("a")], "tool_choice": { "type": "function", "function": { "name": "b" } } }),
                "tool_choice",
            ),
            (json!({ "tool_choice": "required" }), "tool_choice"),
            (json!({ "tools": [tool("a")], "parallel_tool_calls": 1 }), "parallel_tool_calls"),
        ];
        for (body, path) in cases {
            let error = parsed(body.clone()).expect_err("it cannot be used");
            assert_eq!(error.path, path, "{body}: {error}");
        }
    }
}
