//! `/v1/messages/batches/{id}/results`: a line for each request of a batch that has ended.

use std::{io, sync::Arc};

use axum::{
    body::Body,
    extract::Path,
    http::{HeaderValue, header},
    response::{IntoResponse as _, Response},
};
use futures_util::{Stream, stream};
use serde_json::{Value, json};
use tritmill_client::{anthropic::answer, json_line};

use super::find;
use crate::{
    ApiError, Call,
    driver::lines::{self, Line},
    results::{self, ResultFilter, ResultPage},
    store::{BatchState, batch_ends::EndOrder, step_state::FilePosition},
};

/// Lines that are read at once.
const PAGE: usize = 1000;
const JSONL: HeaderValue = HeaderValue::from_static("application/x-jsonl");

/// Returns the results of a batch of messages that has ended, as lines of JSON.
#[utoipa::path(get, path = "/v1/messages/batches/{id}/results", tag = "messages", params(("id" = String, Path)),
    responses((status = 200, description = "A line for each request", body = String,
        content_type = "application/x-jsonl")))]
pub(crate) async fn results(
    Call { app, caller }: Call,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let batch = find(&app, &caller, &id).await?;
    if !batch.state.is_terminal() {
        let message = "the batch has not ended: its results are there when it has";
        return Err(ApiError::invalid("batch_unfinished", message));
    }
    // One that ended before its lines were checked has no results of its own.
    if batch.at.in_progress.is_none() {
        let is_cancelled = batch.state == BatchState::Cancelled;
        let pages = lines::read(&app.files, &batch, FilePosition::default());
        let texts = stream::unfold((pages, is_cancelled), async |(mut pages, is_cancelled)| {
            let page = pages.recv().await?;
            let text =
                page.map(|page| page.iter().map(|line| unread(line, is_cancelled)).collect());
            Some((text.map_err(io::Error::other), (pages, is_cancelled)))
        });
        return Ok(response(texts));
    }
    let filter = ResultFilter { order: EndOrder::Lines, states: Vec::new(), search: None };
    let read = Arc::new((app, batch, filter));
    let pages = stream::try_unfold((read, Some(0)), async |(read, after)| {
        let Some(after) = after else { return Ok(None) };
        let (app, batch, filter) = &*read;
        let page = results::read(&*app.store, batch, filter, after, PAGE).await;
        let page = page.map_err(io::Error::other)?;
        let next = page.has_more.then_some(page.next.position);
        Ok::<_, io::Error>(Some((text(&page), (read, next))))
    });
    Ok(response(pages))
}

fn response(texts: impl Stream<Item = io::Result<String>> + Send + 'static) -> Response {
    let mut response = Body::from_stream(texts).into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, JSONL);
    response
}

/// Returns the result of a request that was never checked, as a line.
fn unread(line: &Line, is_cancelled: bool) -> String {
    let custom_id = match &line.parsed {
        Ok(request) => Some(request.custom_id.as_str()),
        Err(refused) => refused.custom_id.as_deref(),
    };
    let code = if is_cancelled { "batch_cancelled" } else { "batch_failed" };
    let error =
        json!({ "code": code, "message": "the batch ended before the request was checked" });
    let line = json!({ "custom_id": custom_id, "response": null, "error": error });
    format!("{}\n", json_line(&result(line)))
}

fn text(page: &ResultPage) -> String {
    let mut text = String::new();
    for line in &page.lines {
        // A line of output is JSON that this program wrote.
        let line: Value = serde_json::from_str(&line.text).unwrap_or_default();
        text.push_str(&json_line(&result(line)));
        text.push('\n');
    }
    text
}

/// Returns the result that a line of output says.
fn result(mut line: Value) -> Value {
    let custom_id = line["custom_id"].take();
    let result = match (line["response"]["status_code"].as_u64(), line["error"]["code"].as_str()) {
        (Some(200), _) => {
            json!({ "type": "succeeded", "message": line["response"]["body"].take() })
        }
        (Some(_), _) => json!({ "type": "errored", "error": line["response"]["body"].take() }),
        (None, Some("batch_cancelled")) => json!({ "type": "canceled" }),
        (None, Some("batch_expired")) => json!({ "type": "expired" }),
        (None, _) => {
            let message = line["error"]["message"].as_str().unwrap_or_default();
            let error = answer::error("api_error", message, None);
            json!({ "type": "errored", "error": error })
        }
    };
    json!({ "custom_id": custom_id, "result": result })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn result_has_the_type_of_the_output() {
        let of = |response: Value, error: Value| {
            result(json!({ "id": "b", "custom_id": "a", "response": response, "error": error }))
        };
        let answered = json!({ "status_code": 200, "body": { "type": "message" } });
        let expected = json!({ "custom_id": "a", "result": { "type": "succeeded", "message": { "type": "message" } } });
        assert_eq!(of(answered, Value::Null), expected);
        let refused = of(json!({ "status_code": 400, "body": { "type": "error" } }), Value::Null);
        assert_eq!(refused["result"], json!({ "type": "errored", "error": { "type": "error" } }));
        for (code, kind) in [("batch_cancelled", "canceled"), ("batch_expired", "expired")] {
            assert_eq!(of(Value::Null, json!({ "code": code }))["result"]["type"], kind);
        }
        let deleted = of(Value::Null, json!({ "code": "result_deleted", "message": "gone" }));
        assert_eq!(deleted["result"]["error"]["error"]["message"], "gone");
    }
}
