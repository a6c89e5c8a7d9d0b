//! [`Asked`]: what a request for a batch asked for, by which a repeated request with the same idempotency key is told from another one.
//!
//! It is made of a request before anything is looked up that may have changed since, such as the queue of a model.

use serde_json::{Map, Value};
use tritmill_queue::Priority;

use super::request::NewBatch;
use crate::{
    data_urls::InputOptions,
    store::{Batch, FileId, events::NoticeKind, webhooks::Webhook},
};

/// What a request asked for.
#[derive(Debug, PartialEq)]
pub(super) struct Asked {
    /// The file that was given. An open batch has a copy of it.
    input: Option<String>,
    is_open: bool,
    /// The earlier batch, and the template of the lines.
    after: Option<(String, String)>,
    input_url: Option<(String, InputOptions)>,
    output_url: Option<(String, Option<String>)>,
    endpoint: String,
    window: String,
    priority: Priority,
    /// The other model, and the time.
    escalation: Option<(String, String)>,
    /// URL and events of its own webhook.
    webhook: Option<(String, Vec<NoticeKind>)>,
    metadata: Option<Map<String, Value>>,
    output_expires_s: Option<u64>,
}

fn called(webhook: &Webhook) -> (String, Vec<NoticeKind>) {
    (webhook.url.clone(), webhook.events.clone())
}

impl Asked {
    /// Returns what a request asks for. `file` is that with the lines, if the request does not name it.
    pub fn by(new: &NewBatch, file: Option<FileId>) -> Self {
        let file = file.map(|id| id.to_string());
        Self {
            input: file.or_else(|| new.input.clone()),
            is_open: new.open,
            after: new.after.clone().map(|(earlier, lines)| (earlier, lines.into())),
            input_url: new.input_url.clone().map(|input| (input.url, input.options)),
            output_url: new.output_url.clone().map(|output| (output.url, output.format)),
            endpoint: new.endpoint.clone(),
            window: new.window.clone(),
            priority: new.priority,
            escalation: new.escalation.as_ref().map(|asked| asked.parts()),
            webhook: new.webhook.as_ref().map(called),
            metadata: new.metadata.clone(),
            output_expires_s: new.output_expires_s,
        }
    }

    /// Returns what the request asked for that created a batch.
    pub fn of(batch: &Batch) -> Self {
        let is_open = batch.is_open || batch.at.sealed.is_some();
        let has_own = batch.after.is_some() || batch.input_url.is_some();
        let given = if is_open { batch.began_with } else { Some(batch.input) };
        let after = batch.after.as_ref();
        let own = batch.webhook.as_ref().filter(|webhook| !webhook.is_of_tenant);
        Self {
            input: given.filter(|_| !has_own).map(|id| id.to_string()),
            is_open,
            after: after.map(|after| (after.batch.to_string(), after.lines.clone().into())),
            input_url: batch.input_url.as_ref().map(|of| (of.url.clone(), of.options.clone())),
            output_url: batch.output_url.as_ref().map(|of| (of.url.clone(), of.format.clone())),
            endpoint: batch.endpoint.clone(),
            window: batch.completion_window.clone(),
            priority: batch.priority,
            escalation: batch.escalation.as_ref().map(|of| (of.model.clone(), of.after.clone())),
            webhook: own.map(called),
            metadata: batch.metadata.clone(),
            output_expires_s: batch.output_expires_s,
        }
    }
}
