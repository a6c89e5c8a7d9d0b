//! Rows become lines of a batch: which column is the prompt, which the `custom_id`, and what is carried to the answer.

use crate::{
    DataError,
    rows::{BadRow, Row},
};
use serde_json::{Map, Value, json};

/// Columns that may have the prompt, if none is named.
const PROMPT_COLUMNS: [&str; 3] = ["prompt", "text", "messages"];

/// The endpoint that answers rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndpointOfRows {
    /// `/v1/chat/completions`: a prompt is a message of the user.
    Chat,
    /// `/v1/completions`: a prompt is continued.
    Completions,
    /// `/v1/embeddings`: a prompt is turned into a vector.
    Embeddings,
}

impl EndpointOfRows {
    /// Returns the endpoint with this path.
    pub fn of_path(path: &str) -> Option<Self> {
        [Self::Chat, Self::Completions, Self::Embeddings].into_iter().find(|it| it.url() == path)
    }

    const fn url(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Embeddings => "/v1/embeddings",
        }
    }
}

/// How rows become requests.
#[derive(Debug, Clone, PartialEq)]
pub struct Columns {
    /// The column of the prompt; by default `prompt`, `text` or `messages`, the first that is there.
    pub prompt: Option<String>,
    /// The column of the `custom_id`; by default it is `row-` and the number of the row.
    pub id: Option<String>,
    /// The endpoint.
    pub endpoint: EndpointOfRows,
    /// More fields of each request, in place of its own.
    pub body: Map<String, Value>,
    /// Whether JSON lines are rows even if nothing else of these was chosen.
    pub of_lines: bool,
}

/// A row as a line of a batch.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Request {
    /// The line.
    pub line: Value,
    /// The columns that are carried to the answer.
    pub carried: Map<String, Value>,
}

impl Columns {
    /// Whether something of them was chosen, which makes every line a row.
    pub fn are_told(&self) -> bool {
        let Self { prompt, id, body, of_lines, .. } = self;
        *of_lines || prompt.is_some() || id.is_some() || !body.is_empty()
    }

    /// Returns the line of a row with a short prompt.
    pub fn example(&self) -> Value {
        let prompt = self.prompt.as_deref().unwrap_or(PROMPT_COLUMNS[0]);
        let mut row = Map::from_iter([(prompt.to_owned(), json!("x"))]);
        if let Some(id) = &self.id {
            row.insert(id.clone(), json!("x"));
        }
        self.request(Row::Values(row), 1, "a row").line
    }

    /// Checks that a file has the columns.
    ///
    /// # Errors
    /// [`DataError::NoColumn`]
    pub(crate) fn check(&self, name: &str, columns: &[String]) -> Result<(), DataError> {
        let has = |column: &str| columns.iter().any(|found| found == column);
        let missing = |column| {
            let found = match columns {
                [] => "none".to_owned(),
                _ => columns.iter().map(|c| format!("'{c}'")).collect::<Vec<_>>().join(", "),
            };
            Err(DataError::NoColumn { name: name.to_owned(), column, found })
        };
        if let Some(id) = self.id.as_deref().filter(|id| !has(id)) {
            return missing(format!("'{id}' (the id column)"));
        }
        match self.prompt.as_deref() {
            Some(prompt) if !has(prompt) => missing(format!("'{prompt}' (the prompt column)")),
            None if !PROMPT_COLUMNS.into_iter().any(has) => missing(
                "'prompt', 'text' or 'messages' (another may be named the prompt column)"
                    .to_owned(),
            ),
            _ => Ok(()),
        }
    }

    /// Returns a row that is a line of a batch already, with the fields that every request gets.
    pub(crate) fn told_request(&self, mut line: Map<String, Value>) -> Value {
        if let Some(Value::Object(body)) = line.get_mut("body") {
            body.extend(self.body.clone());
        }
        Value::Object(line)
    }

    /// Returns the line of a row. `number` counts the rows of all files, `place` names the row in messages.
    pub(crate) fn request(&self, row: Row, number: u64, place: &str) -> Request {
        let mut carried = match row {
            Row::Values(values) => values,
            Row::Bad(bad) => return refused(&format!("row-{number}"), &bad, place, Map::new()),
        };
        let custom_id = match self.custom_id(&mut carried, number) {
            Ok(custom_id) => custom_id,
            Err(bad) => return refused(&format!("row-{number}"), &bad, place, carried),
        };
        let body = match self.body(&mut carried) {
            Ok(body) => body,
            Err(bad) => return refused(&custom_id, &bad, place, carried),
        };
        let url = self.endpoint.url();
        let line = json!({ "custom_id": custom_id, "method": "POST", "url": url, "body": body });
        Request { line, carried }
    }

    fn custom_id(&self, values: &mut Map<String, Value>, number: u64) -> Result<String, BadRow> {
        let Some(column) = &self.id else { return Ok(format!("row-{number}")) };
        match values.shift_remove(column) {
            Some(Value::String(id)) => Ok(id),
            Some(Value::Number(id)) => Ok(id.to_string()),
            None => Err(bad(column, "missing_column", "is missing")),
            Some(Value::Null) => Err(bad(column, "null_value", "is null")),
            Some(_) => Err(bad(column, "invalid_type", "must be a text or a number")),
        }
    }

    fn body(&self, values: &mut Map<String, Value>) -> Result<Map<String, Value>, BadRow> {
        let told = self.prompt.as_deref();
        let column = told.or_else(|| PROMPT_COLUMNS.into_iter().find(|c| values.contains_key(*c)));
        let column = column.unwrap_or(PROMPT_COLUMNS[0]);
        let Some(prompt) = values.shift_remove(column) else {
            return Err(bad(column, "missing_column", "is missing"));
        };
        // A CSV file has a list of messages as text.
        let prompt = match prompt {
            Value::String(text) if column == "messages" => serde_json::from_str(&text)
                .map_err(|_| bad(column, "invalid_type", "must be a list of messages"))?,
            prompt => prompt,
        };
        let is_text = prompt.is_string();
        let is_list = prompt.is_array();
        let (field, value) = match self.endpoint {
            _ if prompt.is_null() => return Err(bad(column, "null_value", "is null")),
            EndpointOfRows::Chat if is_list => ("messages", without_nulls(prompt)),
            EndpointOfRows::Chat if is_text => {
                ("messages", json!([{ "role": "user", "content": prompt }]))
            }
            EndpointOfRows::Completions if is_text => ("prompt", prompt),
            EndpointOfRows::Embeddings if is_text || is_list => ("input", prompt),
            EndpointOfRows::Chat => {
                return Err(bad(column, "invalid_type", "must be a text or a list of messages"));
            }
            _ => return Err(bad(column, "invalid_type", "must be a text")),
        };
        let mut body = Map::new();
        body.insert(field.to_owned(), value);
        body.extend(self.body.clone());
        Ok(body)
    }
}

fn bad(column: &str, code: &'static str, problem: &str) -> BadRow {
    let problem = format!("column '{column}' {problem}");
    BadRow { column: Some(column.to_owned()), code, problem }
}

/// Returns messages without the fields that are null: a column of a file has the same fields in every row.
fn without_nulls(messages: Value) -> Value {
    let Value::Array(messages) = messages else { return messages };
    let kept = messages.into_iter().map(|message| match message {
        Value::Object(mut fields) => {
            fields.retain(|name, value| !value.is_null() || name == "content");
            Value::Object(fields)
        }
        other => other,
    });
    kept.collect()
}

/// Returns a line that is refused with the error of the row.
fn refused(custom_id: &str, bad: &BadRow, place: &str, carried: Map<String, Value>) -> Request {
    let BadRow { column, code, problem } = bad;
    let error = json!({ "code": code, "message": format!("{place}: {problem}"), "param": column });
    let line = json!({ "custom_id": custom_id, "row_error": error });
    Request { line, carried }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn columns(prompt: Option<&str>, id: Option<&str>, endpoint: EndpointOfRows) -> Columns {
        let [prompt, id] = [prompt, id].map(|name| name.map(str::to_owned));
        Columns { prompt, id, endpoint, body: Map::new(), of_lines: false }
    }

    fn line(columns: &Columns, row: Value) -> (Value, Value) {
        let Value::Object(row) = row else { panic!("an object") };
        let made = columns.request(Row::Values(row), 7, "x.csv row 7");
        (made.line, Value::Object(made.carried))
    }

    #[test]
    fn prompt_becomes_a_request_and_the_rest_is_carried() {
        let chat = columns(None, None, EndpointOfRows::Chat);
        let (request, carried) = line(&chat, json!({ "a": 1, "text": "hi", "b": [2] }));
        assert_eq!(request["custom_id"], "row-7");
        assert_eq!(request["body"], json!({ "messages": [{ "role": "user", "content": "hi" }] }));
        assert_eq!(carried, json!({ "a": 1, "b": [2] }));

        let told = columns(Some("q"), Some("id"), EndpointOfRows::Completions);
        let (request, carried) = line(&told, json!({ "id": 3, "q": "once", "prompt": "kept" }));
        assert_eq!(
            (&request["custom_id"], &request["body"]),
            (&json!("3"), &json!({ "prompt": "once" }))
        );
        assert_eq!(carried, json!({ "prompt": "kept" }));

        let (request, _) =
            line(&chat, json!({ "messages": [{ "role": "user", "content": "x", "name": null }] }));
        assert_eq!(request["body"]["messages"], json!([{ "role": "user", "content": "x" }]));
        let (request, _) = line(&chat, json!({ "messages": "[{\"role\": \"user\"}]" }));
        assert_eq!(request["body"]["messages"], json!([{ "role": "user" }]));
    }

    #[test]
    fn line_of_a_batch_gets_the_fields_of_every_request() {
        let body = Map::from_iter([("max_tokens".to_owned(), json!(1))]);
        let told = Columns { body, ..columns(None, None, EndpointOfRows::Chat) };
        let line = json!({ "custom_id": "a", "url": "/v1/messages", "body": { "max_tokens": 9, "top_k": 2 } });
        let Value::Object(fields) = line.clone() else { panic!("an object") };
        let made = told.told_request(fields);
        assert_eq!(made["body"], json!({ "max_tokens": 1, "top_k": 2 }));
        assert_eq!((&made["custom_id"], &made["url"]), (&line["custom_id"], &line["url"]));
    }

    #[test]
    fn row_without_a_usable_prompt_is_refused_by_row_and_column() {
        let chat = columns(None, None, EndpointOfRows::Chat);
        for (row, message) in [
            (json!({ "prompt": null }), "x.csv row 7: column 'prompt' is null"),
            (json!({}), "x.csv row 7: column 'prompt' is missing"),
            (
                json!({ "text": 5 }),
                "x.csv row 7: column 'text' must be a text or a list of messages",
            ),
            (
                json!({ "messages": "hi" }),
                "x.csv row 7: column 'messages' must be a list of messages",
            ),
        ] {
            let (request, _) = line(&chat, row);
            assert_eq!(request["row_error"]["message"], message);
        }
        let id = columns(None, Some("id"), EndpointOfRows::Chat);
        let (request, carried) = line(&id, json!({ "id": [], "prompt": "x" }));
        assert_eq!(request["row_error"]["param"], "id");
        assert_eq!(carried, json!({ "prompt": "x" }));
    }

    #[test]
    fn file_without_the_column_is_refused_by_its_columns() {
        let error = |columns: &Columns, found: &[&str]| {
            let found: Vec<String> = found.iter().map(|name| (*name).to_owned()).collect();
            columns.check("a.parquet", &found).map_err(|error| error.to_string())
        };
        let chat = columns(None, None, EndpointOfRows::Chat);
        assert_eq!(error(&chat, &["text"]), Ok(()));
        let message = error(&chat, &["question", "answer"]).expect_err("no prompt");
        assert!(message.ends_with("it has 'question', 'answer'"), "{message}");
        let told = columns(Some("q"), None, EndpointOfRows::Chat);
        let message = error(&told, &["prompt"]).expect_err("no q");
        assert_eq!(message, "a.parquet has no column 'q' (the prompt column): it has 'prompt'");
    }
}
