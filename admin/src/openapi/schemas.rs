//! What requests and answers look like.

#![allow(dead_code, reason = "read by the document's generator alone")]

use serde_json::Value;
use utoipa::ToSchema;

/// A refusal.
#[derive(ToSchema)]
pub(crate) struct Refused {
    error: RefusedError,
}

/// Why.
#[derive(ToSchema)]
pub(crate) struct RefusedError {
    /// A sentence for people.
    message: String,
    /// Whose fault it is.
    #[schema(examples("invalid_request_error"))]
    r#type: String,
    /// The field at fault.
    param: Option<String>,
    /// A word for programs.
    code: String,
}

/// A conversation to go on with.
#[derive(ToSchema)]
pub(crate) struct ChatRequest {
    /// `NAME` or `NAME@FORMAT`.
    #[schema(examples("demo"))]
    model: String,
    messages: Vec<ChatMessage>,
    /// Answer in pieces, by server-sent events.
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    max_tokens: Option<u32>,
    /// The newer name of `max_tokens`.
    max_completion_tokens: Option<u32>,
    min_tokens: Option<u32>,
    /// 0 is greedy.
    #[schema(minimum = 0, maximum = 2)]
    temperature: Option<f32>,
    top_k: Option<i64>,
    #[schema(minimum = 0, maximum = 1)]
    top_p: Option<f32>,
    #[schema(minimum = 0, maximum = 1)]
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    /// By token id.
    logit_bias: Option<Value>,
    /// A text or several: the answer ends before the first of them.
    stop: Option<Value>,
    stop_token_ids: Option<Vec<u32>>,
    ignore_eos: Option<bool>,
    #[schema(minimum = 1, maximum = 128)]
    n: Option<u32>,
    logprobs: Option<bool>,
    #[schema(maximum = 20)]
    top_logprobs: Option<u32>,
    /// The same seed, the same answer.
    seed: Option<i64>,
    /// Accepted, and without effect.
    user: Option<String>,
}

/// A turn of a conversation.
#[derive(ToSchema)]
pub(crate) struct ChatMessage {
    /// `system`, `developer`, `user`, `assistant` or `tool`.
    role: String,
    /// A text, or parts of type `text`.
    content: Value,
    name: Option<String>,
}

/// How to answer in pieces.
#[derive(ToSchema)]
pub(crate) struct StreamOptions {
    /// A last piece says how many tokens it took.
    include_usage: Option<bool>,
}

/// Text to go on with.
#[derive(ToSchema)]
pub(crate) struct TextRequest {
    /// `NAME` or `NAME@FORMAT`.
    #[schema(examples("demo"))]
    model: String,
    /// A text, or token ids.
    prompt: Value,
    /// Answer in pieces, by server-sent events.
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    max_tokens: Option<u32>,
    min_tokens: Option<u32>,
    /// 0 is greedy.
    #[schema(minimum = 0, maximum = 2)]
    temperature: Option<f32>,
    top_k: Option<i64>,
    #[schema(minimum = 0, maximum = 1)]
    top_p: Option<f32>,
    #[schema(minimum = 0, maximum = 1)]
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    /// By token id.
    logit_bias: Option<Value>,
    /// A text or several: the answer ends before the first of them.
    stop: Option<Value>,
    stop_token_ids: Option<Vec<u32>>,
    ignore_eos: Option<bool>,
    #[schema(minimum = 1, maximum = 128)]
    n: Option<u32>,
    #[schema(maximum = 20)]
    logprobs: Option<u32>,
    /// The same seed, the same answer.
    seed: Option<i64>,
    /// Accepted, and without effect.
    user: Option<String>,
}

/// An answer.
#[derive(ToSchema)]
pub(crate) struct Completion {
    id: String,
    /// `chat.completion` or `text_completion`.
    object: String,
    created: i64,
    model: String,
    system_fingerprint: String,
    choices: Vec<Value>,
    usage: Usage,
}

/// Tokens of an answer.
#[derive(ToSchema)]
pub(crate) struct Usage {
    prompt_tokens: u64,
    completion_tokens: u64,
    total_tokens: u64,
}

/// A model that is served.
#[derive(ToSchema)]
pub(crate) struct Model {
    id: String,
    object: String,
    created: i64,
    owned_by: String,
}

/// Models that are served.
#[derive(ToSchema)]
pub(crate) struct ModelList {
    object: String,
    data: Vec<Model>,
}

/// A file and what it is for.
#[derive(ToSchema)]
pub(crate) struct Upload {
    /// `batch`
    purpose: String,
    /// Batch lines.
    #[schema(value_type = String, format = Binary)]
    file: Vec<u8>,
    /// `created_at`
    #[schema(rename = "expires_after[anchor]")]
    anchor: Option<String>,
    /// From an hour to thirty days.
    #[schema(rename = "expires_after[seconds]", minimum = 3600, maximum = 2_592_000)]
    seconds: Option<u64>,
}

/// A file, without its content.
#[derive(ToSchema)]
pub(crate) struct File {
    id: String,
    object: String,
    bytes: u64,
    created_at: i64,
    expires_at: Option<i64>,
    filename: String,
    /// `batch` or `batch_output`.
    purpose: String,
    status: String,
}

/// A page of files.
#[derive(ToSchema)]
pub(crate) struct FileList {
    object: String,
    data: Vec<File>,
    first_id: Option<String>,
    last_id: Option<String>,
    has_more: bool,
}

/// A file that is gone.
#[derive(ToSchema)]
pub(crate) struct FileDeleted {
    id: String,
    object: String,
    deleted: bool,
}

/// A file to be answered line by line.
#[derive(ToSchema)]
pub(crate) struct BatchRequest {
    input_file_id: String,
    /// `/v1/chat/completions` or `/v1/completions`, of every line.
    #[schema(examples("/v1/chat/completions"))]
    endpoint: String,
    /// A number and one of s, m, h, d.
    #[schema(examples("24h"))]
    completion_window: String,
    /// Up to sixteen texts by name.
    metadata: Option<Value>,
    output_expires_after: Option<ExpiresAfter>,
    /// `normal`, or `low`.
    priority: Option<String>,
    webhook: Option<NewWebhook>,
}

/// Who is to be told when a batch is over: by a POST signed as Standard Webhooks say.
#[derive(ToSchema)]
pub(crate) struct NewWebhook {
    /// `http://` or `https://`, at a public address unless the service allows others.
    url: String,
    /// `whsec_` and the base64 of 24 to 64 bytes; without one, the answer has one, this once.
    secret: Option<String>,
}

/// Who is told when a batch is over.
#[derive(ToSchema)]
pub(crate) struct Webhook {
    url: String,
    /// `pending`; at last `delivered` or `failed`.
    status: String,
    /// Calls so far.
    attempts: u32,
    /// Why the last call failed.
    error: Option<String>,
    /// Shown to the batch's creator, once.
    secret: Option<String>,
}

/// How long output is kept.
#[derive(ToSchema)]
pub(crate) struct ExpiresAfter {
    /// `created_at`
    anchor: String,
    #[schema(minimum = 3600, maximum = 2_592_000)]
    seconds: u32,
}

/// A batch.
#[derive(ToSchema)]
pub(crate) struct Batch {
    id: String,
    object: String,
    endpoint: String,
    model: Option<String>,
    errors: Option<Value>,
    input_file_id: String,
    completion_window: String,
    /// `validating`, `in_progress`, `finalizing`, `cancelling`; at last `completed`, `failed`,
    /// `expired` or `cancelled`.
    status: String,
    output_file_id: Option<String>,
    error_file_id: Option<String>,
    created_at: i64,
    in_progress_at: Option<i64>,
    expires_at: i64,
    finalizing_at: Option<i64>,
    completed_at: Option<i64>,
    failed_at: Option<i64>,
    expired_at: Option<i64>,
    cancelling_at: Option<i64>,
    cancelled_at: Option<i64>,
    request_counts: RequestCounts,
    metadata: Option<Value>,
    webhook: Option<Webhook>,
}

/// Lines of a batch.
#[derive(ToSchema)]
pub(crate) struct RequestCounts {
    total: u64,
    completed: u64,
    failed: u64,
}

/// A page of batches.
#[derive(ToSchema)]
pub(crate) struct BatchList {
    object: String,
    data: Vec<Batch>,
    first_id: Option<String>,
    last_id: Option<String>,
    has_more: bool,
}
