//! Schemas of `/v1/messages`, which the client crate parses and writes. A test holds the fields of requests to the parser.

#![expect(dead_code, reason = "read by the OpenAPI derive only")]

use serde_json::Value;
use utoipa::ToSchema;

/// A request for a message.
#[derive(ToSchema)]
pub(crate) struct MessagesRequest {
    /// `NAME` or `NAME@FORMAT`.
    #[schema(examples("demo"))]
    model: String,
    /// Messages of the user and the assistant: texts, calls of tools and their results, and what the model thought.
    messages: Vec<Value>,
    /// Bounds the answer, with all that the model thinks. Counting needs none.
    #[schema(minimum = 1, maximum = 1048576)]
    max_tokens: Option<u32>,
    /// Instructions: a text, or blocks of text.
    system: Option<Value>,
    /// Tools with `name`, `description` and `input_schema`.
    tools: Option<Vec<Value>>,
    /// `{"type": "auto"}`, `any`, `none`, or `tool` with a `name`; `disable_parallel_tool_use` allows one call.
    tool_choice: Option<Value>,
    stop_sequences: Option<Vec<String>>,
    /// 0 is greedy.
    #[schema(minimum = 0, maximum = 2)]
    temperature: Option<f32>,
    #[schema(minimum = 0, maximum = 1)]
    top_p: Option<f32>,
    top_k: Option<i64>,
    /// `{"type": "enabled", "budget_tokens": …}`, `adaptive` or `disabled`, for templates that know the switch.
    thinking: Option<Value>,
    /// `format`: a JSON schema that the answer matches; `effort`, for templates that know it.
    output_config: Option<Value>,
    /// `user_id`, which has no effect.
    metadata: Option<Value>,
    /// `auto` or `standard_only`: there is one tier.
    service_tier: Option<String>,
    /// Accepted without effect: prompts that begin in the same way are computed once.
    cache_control: Option<Value>,
    /// Stream the answer as server-sent events.
    stream: Option<bool>,
    /// The same seed gives the same answer. This and the following are not Anthropic's.
    seed: Option<i64>,
    #[schema(minimum = 0, maximum = 1)]
    min_p: Option<f32>,
    min_tokens: Option<u32>,
    repetition_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    logit_bias: Option<Value>,
    stop_token_ids: Option<Vec<u32>>,
    ignore_eos: Option<bool>,
    chat_template_kwargs: Option<Value>,
}

/// A request for a batch of messages: at most 32 MiB.
#[derive(ToSchema)]
pub(crate) struct MessageBatchRequest {
    requests: Vec<MessageBatchItem>,
}

/// A request of a batch.
#[derive(ToSchema)]
pub(crate) struct MessageBatchItem {
    /// 1 to 64 letters, digits, `_` or `-`; no two of a batch are the same.
    custom_id: String,
    params: MessagesRequest,
}

/// A message.
#[derive(ToSchema)]
pub(crate) struct MessageObject {
    id: String,
    #[schema(examples("message"))]
    r#type: String,
    #[schema(examples("assistant"))]
    role: String,
    model: String,
    /// Blocks: `thinking`, `text`, `tool_use`.
    content: Vec<Value>,
    /// `end_turn`, `max_tokens`, `stop_sequence` or `tool_use`.
    stop_reason: Option<String>,
    #[schema(required)]
    stop_sequence: Option<String>,
    usage: MessageUsage,
}

/// Tokens of a message.
#[derive(ToSchema)]
pub(crate) struct MessageUsage {
    /// Those of the input that were computed.
    input_tokens: u64,
    /// Always 0: keeping a prompt costs nothing.
    cache_creation_input_tokens: u64,
    /// Those that were not computed, because an earlier prompt began in the same way.
    cache_read_input_tokens: u64,
    output_tokens: u64,
}

/// Number of tokens.
#[derive(ToSchema)]
pub(crate) struct MessageTokens {
    input_tokens: u64,
}

/// The body of every failed request below `/v1/messages`.
#[derive(ToSchema)]
pub(crate) struct MessagesErrorResponse {
    #[schema(examples("error"))]
    r#type: String,
    error: MessagesErrorDetail,
    #[schema(required)]
    request_id: Option<String>,
}

/// What went wrong.
#[derive(ToSchema)]
pub(crate) struct MessagesErrorDetail {
    /// Class of the error.
    #[schema(examples("invalid_request_error"))]
    r#type: String,
    /// Explanation for people.
    message: String,
}
