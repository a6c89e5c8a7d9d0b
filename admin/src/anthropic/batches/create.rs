//! Creates a batch of messages: its requests become the lines of a file.

use std::collections::HashSet;

use axum::extract::Request;
use serde::Deserialize;
use serde_json::{Value, json, value::RawValue};
use tritmill_client::{Endpoint, LINE_BYTES_MAX};
use tritmill_queue::{Priority, Timestamp};

use crate::{
    ApiError, App, Caller, FileWriter,
    extract::bounded,
    openai::{
        batches::{NewBatch, create_with_file},
        idempotency,
    },
    store::{
        Batch, FileId,
        batches::parse_window,
        files::{Completion, FilePurpose, StoredFile, UploadKey},
    },
    tenant_limits,
};

/// Most bytes of a request.
const BYTES_MAX: usize = 32 << 20;
/// Most letters of a `custom_id`: Anthropic's limit.
const NAME_MAX: usize = 64;
/// Time in which a batch is answered: Anthropic's.
const WINDOW: &str = "24h";

/// A request to create a batch.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Given<'a> {
    #[serde(borrow)]
    requests: Vec<GivenRequest<'a>>,
}

/// A request of a batch. Its parameters are parsed one after another.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GivenRequest<'a> {
    custom_id: String,
    #[serde(borrow)]
    params: &'a RawValue,
}

/// Creates a batch, or returns the one that was created with the same key.
pub(super) async fn create(
    app: &App,
    caller: &Caller,
    request: Request,
    idempotency_key: Option<String>,
) -> Result<Batch, ApiError> {
    let bytes = bounded(request, BYTES_MAX).await?;
    let given: Given<'_> = serde_json::from_slice(&bytes)
        .map_err(|error| ApiError::invalid("invalid_body", format!("invalid body: {error}")))?;
    check(&given.requests, app.limits.batch_lines_max)?;
    let room = tenant_limits::file_room(app, &caller.tenant).await?;
    let file = StoredFile {
        id: FileId::generate(),
        tenant: caller.tenant.clone(),
        purpose: FilePurpose::Batch,
        filename: "requests.jsonl".to_owned(),
        size_bytes: 0,
        created_at: Timestamp::default(),
        expires_at: None,
    };
    let mut writer = FileWriter::begin(app, &file).await?;
    for (index, request) in given.requests.iter().enumerate() {
        writer.write(line(index, request)?.as_bytes()).await?;
        room.check(writer.size_bytes())?;
    }
    let (lines, hash) = (given.requests.len() as u64, writer.sha256());
    let written = writer.finish().await?;
    let file = complete(app, written.clone(), (idempotency_key.as_deref(), &hash)).await?;
    let new = NewBatch {
        input: None,
        input_url: None,
        output_url: None,
        after: None,
        open: false,
        endpoint: Endpoint::Messages.as_str().to_owned(),
        window: WINDOW.to_owned(),
        within: parse_window(WINDOW).expect("it is a window"),
        priority: Priority::Normal,
        metadata: None,
        output_expires_s: None,
        webhook: None,
        escalation: None,
    };
    let created = create_with_file(app, caller, new, (&file, lines), idempotency_key).await;
    let is_used = created.as_ref().is_ok_and(|batch| batch.input == file.id);
    if !is_used && file.id == written.id {
        app.store.delete_file(&caller.tenant, file.id).await?;
    }
    created
}

/// Completes a file; returns that of an earlier request with the same key, which asked the same.
async fn complete(
    app: &App,
    file: StoredFile,
    (key, hash): (Option<&str>, &[u8; 32]),
) -> Result<StoredFile, ApiError> {
    let Some(key) = key else {
        app.store.complete_file(file.id, file.size_bytes, file.expires_at).await?;
        return Ok(file);
    };
    let key = format!("messages/batches/{key}");
    let key = UploadKey { key: &key, request_hash: hash };
    let completed = app.store.complete_file_once(&file, key).await?;
    if completed != Completion::New {
        app.store.abandon_file(file.id).await?;
    }
    match completed {
        Completion::New => Ok(file),
        Completion::Known(known) => Ok(*known),
        Completion::Conflict => Err(idempotency::conflict("batch")),
    }
}

/// Checks the number of requests, and their names.
fn check(requests: &[GivenRequest<'_>], lines_max: u64) -> Result<(), ApiError> {
    if requests.is_empty() || requests.len() as u64 > lines_max {
        let message = format!("requests must be 1 to {lines_max} requests, got {}", requests.len());
        return Err(ApiError::invalid_value("requests", message));
    }
    let mut names = HashSet::with_capacity(requests.len());
    for (index, GivenRequest { custom_id, .. }) in requests.iter().enumerate() {
        let param = format!("requests[{index}].custom_id");
        let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
        let is_name = (1..=NAME_MAX).contains(&custom_id.len()) && custom_id.bytes().all(is_letter);
        if !is_name {
            let message = format!("{param} must be 1 to {NAME_MAX} letters, digits, '_' or '-'");
            return Err(ApiError::invalid_value(param, message));
        }
        if !names.insert(custom_id) {
            let message = format!("{param} is the same as that of an earlier request");
            return Err(ApiError::invalid("duplicate_custom_id", message).at(param));
        }
    }
    Ok(())
}

/// Returns the line of a request.
fn line(index: usize, request: &GivenRequest<'_>) -> Result<String, ApiError> {
    let param = format!("requests[{index}].params");
    let body: Value = serde_json::from_str(request.params.get()).map_err(|_| {
        ApiError::invalid("invalid_json", format!("{param} cannot be read")).at(&*param)
    })?;
    if !body.is_object() {
        let message = format!("{param} must be an object");
        return Err(ApiError::invalid("invalid_type", message).at(param));
    }
    let line = json!({
        "custom_id": request.custom_id,
        "method": "POST",
        "url": Endpoint::Messages.as_str(),
        "body": body,
    });
    let line = format!("{line}\n");
    match line.len() <= LINE_BYTES_MAX {
        true => Ok(line),
        false => Err(ApiError::too_large(&param, LINE_BYTES_MAX as u64).at(param)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_request() {
        let failed = |text: &str| {
            let given: Given<'_> = serde_json::from_str(text).expect("requests");
            let lines = || given.requests.iter().enumerate().map(|(i, it)| line(i, it));
            let error =
                check(&given.requests, 2).and_then(|()| lines().collect::<Result<Vec<_>, _>>());
            error.err().and_then(|error| error.param().map(str::to_owned))
        };
        let fine = r#"{"custom_id":"a-1","params":{"max_tokens": 3}}"#;
        assert_eq!(failed(&format!(r#"{{"requests":[{fine}]}}"#)), None);
        for (requests, param) in [
            (String::new(), "requests"),
            (format!("{fine},{fine},{fine}"), "requests"),
            (format!("{fine},{fine}"), "requests[1].custom_id"),
            (r#"{"custom_id":"a b","params":{}}"#.to_owned(), "requests[0].custom_id"),
            (r#"{"custom_id":"","params":{}}"#.to_owned(), "requests[0].custom_id"),
            (r#"{"custom_id":"a","params":[]}"#.to_owned(), "requests[0].params"),
        ] {
            let found = failed(&format!(r#"{{"requests":[{requests}]}}"#));
            assert_eq!(found.as_deref(), Some(param), "{requests}");
        }
    }
}
