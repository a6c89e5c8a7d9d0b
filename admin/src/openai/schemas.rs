//! Schemas of requests that are parsed field by field, and of completions, which the client crate writes.
//!
//! A test holds the fields of completion requests to the parser.

#![expect(dead_code, reason = "read by the OpenAPI derive only")]

use serde_json::Value;
use utoipa::ToSchema;

/// Defines a completion request: its own fields, and those that both endpoints have.
macro_rules! completion_request {
    ($(#[$($doc:tt)*])* $name:ident { $($(#[$($attribute:tt)*])* $field:ident: $type:ty,)* }) => {
        $(#[$($doc)*])*
        #[derive(ToSchema)]
        pub(crate) struct $name {
            /// `NAME` or `NAME@FORMAT`.
            #[schema(examples("demo"))]
            model: String,
            $($(#[$($attribute)*])* $field: $type,)*
            /// Stream the answer as server-sent events.
            stream: Option<bool>,
            stream_options: Option<StreamOptions>,
            /// `n × max_tokens × (1 + top_logprobs)` is at most 1048576; for text completions,
            /// `logprobs` takes the place of `top_logprobs`.
            #[schema(minimum = 1, maximum = 1048576)]
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
            /// Bias by token id.
            logit_bias: Option<Value>,
            /// One or more texts; the answer ends before the first of them.
            stop: Option<Value>,
            stop_token_ids: Option<Vec<u32>>,
            ignore_eos: Option<bool>,
            #[schema(minimum = 1, maximum = 128)]
            n: Option<u32>,
            /// What the answer must match: `{"type": "text"}`, `{"type": "json_object"}`, or `{"type": "json_schema", "json_schema": {"name":
            /// …, "schema": …}}`. At most one of this and the next five.
            response_format: Option<Value>,
            /// A JSON schema.
            guided_json: Option<Value>,
            /// A regular expression.
            guided_regex: Option<String>,
            /// Texts, one of which is the answer.
            guided_choice: Option<Vec<String>>,
            /// A grammar in llguidance's variant of Lark.
            guided_grammar: Option<String>,
            /// One of `json`, `regex`, `choice`, `grammar` and `json_object`.
            structured_outputs: Option<Value>,
            /// The same seed gives the same answer.
            seed: Option<i64>,
            /// Accepted without effect.
            user: Option<String>,
        }
    };
}

completion_request! {
    /// A chat completion request.
    ChatRequest {
        messages: Vec<ChatMessage>,
        /// The newer name of `max_tokens`.
        max_completion_tokens: Option<u32>,
        logprobs: Option<bool>,
        #[schema(maximum = 20)]
        top_logprobs: Option<u32>,
    }
}

completion_request! {
    /// A text completion request.
    TextRequest {
        /// A text, token ids, or a list of up to 1024 of them. With several, the choices are those of the first prompt, then
        /// those of the second, and so on.
        prompt: Value,
        #[schema(maximum = 20)]
        logprobs: Option<u32>,
    }
}

/// A message of a conversation.
#[derive(ToSchema)]
pub(crate) struct ChatMessage {
    /// `system`, `developer`, `user`, `assistant` or `tool`.
    role: String,
    /// A text, or parts of type `text`.
    content: Value,
    name: Option<String>,
    /// The call that a message of the role `tool` answers.
    tool_call_id: Option<String>,
}

/// Options of a streamed answer.
#[derive(ToSchema)]
pub(crate) struct StreamOptions {
    /// Send the token counts in a last chunk.
    include_usage: Option<bool>,
}

/// A completion, as `tritmill_client::answer::body` writes it.
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

/// Token counts of a completion.
#[derive(ToSchema)]
pub(crate) struct Usage {
    prompt_tokens: u64,
    completion_tokens: u64,
    total_tokens: u64,
    prompt_tokens_details: PromptTokensDetails,
}

/// What of a prompt was not computed.
#[derive(ToSchema)]
pub(crate) struct PromptTokensDetails {
    /// Tokens whose keys and values an earlier prompt had left.
    cached_tokens: u64,
}

/// An upload form.
#[derive(ToSchema)]
pub(crate) struct Upload {
    /// `batch`
    purpose: String,
    /// Batch lines in JSONL.
    #[schema(value_type = String, format = Binary)]
    file: Vec<u8>,
    /// `created_at`
    #[schema(rename = "expires_after[anchor]")]
    anchor: Option<String>,
    /// From one hour to thirty days.
    #[schema(rename = "expires_after[seconds]", minimum = 3600, maximum = 2_592_000)]
    seconds: Option<u64>,
}

/// A batch to create.
#[derive(ToSchema)]
pub(crate) struct BatchRequest {
    input_file_id: String,
    /// `/v1/chat/completions` or `/v1/completions`, the same for every line.
    #[schema(examples("/v1/chat/completions"))]
    endpoint: String,
    /// A number and one of s, m, h, d.
    #[schema(examples("24h"))]
    completion_window: String,
    /// Up to sixteen named texts.
    metadata: Option<Value>,
    output_expires_after: Option<ExpiresAfter>,
    /// `normal` (the default) or `low`.
    priority: Option<String>,
    webhook: Option<NewWebhook>,
}

/// A webhook to call when the batch is finished: a POST signed according to Standard Webhooks.
#[derive(ToSchema)]
pub(crate) struct NewWebhook {
    /// `http://` or `https://`, at a public address unless the service allows others.
    url: String,
    /// `whsec_` and the base64 of 24 to 64 bytes. By default one is generated and returned once.
    secret: Option<String>,
}

/// How long output files are kept.
#[derive(ToSchema)]
pub(crate) struct ExpiresAfter {
    /// `created_at`
    anchor: String,
    #[schema(minimum = 3600, maximum = 2_592_000)]
    seconds: u32,
}
