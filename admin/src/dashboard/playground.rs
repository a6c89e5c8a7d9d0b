//! The playground: a prompt for a served model, answered as by `/v1/chat/completions`, or embedded as by `/v1/embeddings`.
//!
//! The form becomes the body of such a request, which goes the way of the API: the same parser, limits and deadline,
//! for the visitor's tenant. The script asks for an event stream and shows the text while it is generated; without it,
//! the form loads a page with the whole answer.

use askama::Template;
use axum::{
    body::{Bytes, to_bytes},
    http::{HeaderMap, StatusCode},
    response::{IntoResponse as _, Response},
};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tritmill_client::Endpoint;

use super::{Content, PageError, PageForm, PageResult, Visit, assets, filters, live};
use crate::{ApiError, App, openai::completions, request_trace::JobParent};

/// Longest answer that the page without a script shows, in bytes.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// The form.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub(crate) struct PromptForm {
    model: String,
    /// `chat`, or `embed` for the vector of the prompt.
    task: String,
    system: String,
    prompt: String,
    temperature: String,
    max_tokens: String,
    /// JSON schema that the answer must match; empty: any text.
    schema: String,
}

impl Default for PromptForm {
    fn default() -> Self {
        let empty = String::new;
        Self {
            model: empty(),
            task: "chat".to_owned(),
            system: empty(),
            prompt: empty(),
            temperature: "1".to_owned(),
            max_tokens: "256".to_owned(),
            schema: empty(),
        }
    }
}

impl PromptForm {
    fn endpoint(&self) -> Endpoint {
        if self.task == "embed" { Endpoint::Embeddings } else { Endpoint::Chat }
    }

    /// The body of the request; what its fields hold is left to the API's parser, except that they are JSON.
    fn body(&self) -> Result<Map<String, Value>, ApiError> {
        if self.endpoint() == Endpoint::Embeddings {
            let body = [("model", json!(self.model)), ("input", json!(self.prompt))];
            return Ok(body.map(|(name, value)| (name.to_owned(), value)).into_iter().collect());
        }
        let mut messages = Vec::new();
        for (role, text) in [("system", &self.system), ("user", &self.prompt)] {
            if !text.is_empty() {
                messages.push(json!({ "role": role, "content": text }));
            }
        }
        let mut body = Map::new();
        body.insert("model".to_owned(), json!(self.model));
        body.insert("messages".to_owned(), Value::Array(messages));
        for (name, text) in [("temperature", &self.temperature), ("max_tokens", &self.max_tokens)] {
            if !text.trim().is_empty() {
                body.insert(name.to_owned(), parsed(name, text)?);
            }
        }
        if !self.schema.trim().is_empty() {
            let schema = parsed("schema", &self.schema)?;
            let named = json!({ "name": "answer", "schema": schema });
            let format = json!({ "type": "json_schema", "json_schema": named });
            body.insert("response_format".to_owned(), format);
        }
        Ok(body)
    }
}

fn parsed(name: &str, text: &str) -> Result<Value, ApiError> {
    serde_json::from_str(text.trim())
        .map_err(|error| ApiError::invalid_value(name, format!("{name} is not JSON: {error}")))
}

/// What a request without the script came to.
enum Outcome {
    None,
    Answer { text: String, prompt_tokens: u64, completion_tokens: u64 },
    Problem(String),
}

#[derive(Template)]
#[template(path = "playground.html")]
struct PlaygroundView {
    models: Vec<String>,
    form: PromptForm,
    outcome: Outcome,
    version: &'static str,
}

async fn content(app: &App, form: PromptForm, outcome: Outcome) -> Result<Content, PageError> {
    let models = app.models.all().await?;
    let models = models.into_iter().map(|known| known.queue.to_string()).collect();
    let view = PlaygroundView { models, form, outcome, version: assets::version() };
    Ok(Content::new("Playground", &view))
}

/// Shows the form.
pub(crate) async fn show(visit: Visit) -> PageResult {
    let page = content(&visit.app, PromptForm::default(), Outcome::None).await?;
    Ok(visit.page(StatusCode::OK, &page))
}

/// Answers the prompt: as an event stream, or as a page.
pub(crate) async fn ask(
    visit: Visit,
    parent: JobParent,
    headers: HeaderMap,
    PageForm(form): PageForm<PromptForm>,
) -> PageResult {
    if live::is_requested(&headers) {
        return Ok(match stream(&visit, parent, &form).await {
            Ok(response) => response,
            Err(error) => {
                visit.app.metrics.refusals.count_error(&error, &visit.caller.tenant);
                error.into_response()
            }
        });
    }
    let (status, outcome) = match whole(&visit, parent, &form).await {
        Ok(answer) => (StatusCode::OK, answer),
        Err(error) if error.status().is_server_error() => return Err(error.into()),
        Err(error) => (error.status(), Outcome::Problem(error.message().to_owned())),
    };
    let page = content(&visit.app, form, outcome).await?;
    Ok(visit.page(status, &page))
}

/// Shows a vector as the script does.
fn vector_text(vector: &[Value]) -> String {
    let elements: Vec<String> = vector.iter().map(Value::to_string).collect();
    format!("{} dimensions\n[{}]", elements.len(), elements.join(", "))
}

async fn stream(visit: &Visit, parent: JobParent, form: &PromptForm) -> Result<Response, ApiError> {
    let mut body = form.body()?;
    // A vector comes at once.
    if form.endpoint() == Endpoint::Chat {
        body.insert("stream".to_owned(), json!(true));
        body.insert("stream_options".to_owned(), json!({ "include_usage": true }));
    }
    let asked = (form.endpoint(), body);
    completions::answer_body(visit.app.clone(), visit.caller.clone(), parent, asked).await
}

async fn whole(visit: &Visit, parent: JobParent, form: &PromptForm) -> Result<Outcome, ApiError> {
    let (app, caller) = (visit.app.clone(), visit.caller.clone());
    let asked = (form.endpoint(), form.body()?);
    let response = completions::answer_body(app, caller, parent, asked).await?;
    let long = |_| ApiError::too_large("answer", ANSWER_BYTES_MAX as u64);
    let bytes: Bytes = to_bytes(response.into_body(), ANSWER_BYTES_MAX).await.map_err(long)?;
    let answer: Value = serde_json::from_slice(&bytes).unwrap_or_default();
    let tokens = |name: &str| answer["usage"][name].as_u64().unwrap_or_default();
    let text = match &answer["data"][0]["embedding"] {
        Value::Array(vector) => vector_text(vector),
        _ => answer["choices"][0]["message"]["content"].as_str().unwrap_or_default().to_owned(),
    };
    Ok(Outcome::Answer {
        text,
        prompt_tokens: tokens("prompt_tokens"),
        completion_tokens: tokens("completion_tokens"),
    })
}
