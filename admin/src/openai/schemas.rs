//! Schemas of requests that are parsed field by field, and of completions, which the client crate writes.
//!
//! A test holds the fields of completion requests to the parser.

#![expect(dead_code, reason = "read by the OpenAPI derive only")]

use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use super::batches::EscalationView;

/// Headers of calls that wait for an answer.
#[derive(IntoParams)]
#[into_params(parameter_in = Header)]
pub(crate) struct CallHeaders {
    /// Seconds within which the caller needs the whole answer; the service has a longest time.
    #[param(rename = "x-request-timeout")]
    request_timeout: Option<f64>,
    /// The same request with the same key gets the answer of the first, for a day.
    #[param(rename = "idempotency-key")]
    idempotency_key: Option<String>,
}

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
            /// Up to sixteen named texts, which the answer repeats.
            metadata: Option<Value>,
            /// `auto`, `default`, `flex`, `priority` or `scale`: there is one tier.
            service_tier: Option<String>,
            /// Answers are kept as long as jobs, in either case.
            store: Option<bool>,
            /// Accepted without effect.
            user: Option<String>,
            /// Accepted without effect.
            safety_identifier: Option<String>,
            /// Accepted without effect: begins of prompts are found by their content.
            prompt_cache_key: Option<String>,
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
        /// Functions that the model may call.
        tools: Option<Vec<Value>>,
        /// `auto` (the default), `none`, `required`, or a function.
        tool_choice: Option<Value>,
        /// False: at most one call.
        parallel_tool_calls: Option<bool>,
        /// `none`, `minimal`, `low`, `medium`, `high` or `xhigh`, for chat templates that know it.
        reasoning_effort: Option<String>,
        /// Further variables of the model's chat template.
        chat_template_kwargs: Option<Value>,
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
    /// A text, or parts of type `text`; null beside calls.
    content: Option<Value>,
    name: Option<String>,
    /// The call that a message of the role `tool` answers.
    tool_call_id: Option<String>,
    /// The calls that a message of the role `assistant` made.
    tool_calls: Option<Vec<Value>>,
    /// What the model thought before it answered.
    reasoning_content: Option<String>,
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

/// Texts to embed.
#[derive(ToSchema)]
pub(crate) struct EmbeddingsRequest {
    /// An embedding model: `NAME` or `NAME@FORMAT`.
    model: String,
    /// A text, token ids, or a list of up to 2048 of them. Texts get the model's end token; token ids are taken as they are.
    input: Value,
    /// `float`, the default: lists of numbers; `base64`: of their bytes, 4 each in little-endian order.
    encoding_format: Option<String>,
    /// Without effect.
    user: Option<String>,
}

/// The vectors of texts, each of length 1, as `tritmill_client::answer::body` writes them.
#[derive(ToSchema)]
pub(crate) struct Embeddings {
    /// `list`
    object: String,
    data: Vec<Embedding>,
    model: String,
    usage: EmbeddingsUsage,
}

/// The vector of a text.
#[derive(ToSchema)]
pub(crate) struct Embedding {
    /// `embedding`
    object: String,
    /// The text in the request, from 0.
    index: u64,
    /// Numbers, or base64.
    embedding: Value,
}

/// Tokens of texts.
#[derive(ToSchema)]
pub(crate) struct EmbeddingsUsage {
    prompt_tokens: u64,
    total_tokens: u64,
    /// With `cached_tokens`, those that were not computed because an earlier text began in the same way.
    prompt_tokens_details: Option<Value>,
}

/// A text or a conversation to tokenize.
#[derive(ToSchema)]
pub(crate) struct TokenizeRequest {
    model: String,
    /// A text; or `messages`.
    prompt: Option<String>,
    messages: Option<Vec<ChatMessage>>,
    tools: Option<Vec<Value>>,
    chat_template_kwargs: Option<Value>,
    /// Whether a text gets the special tokens around it; true by default.
    add_special_tokens: Option<bool>,
    /// Whether a conversation ends where an answer begins; true by default.
    add_generation_prompt: Option<bool>,
    /// Return the texts of the tokens, too.
    return_token_strs: Option<bool>,
}

/// The tokens of a text.
#[derive(ToSchema)]
pub(crate) struct TokenizedText {
    count: u64,
    /// Longest sequence of the model, in tokens.
    max_model_len: u64,
    tokens: Vec<u32>,
    token_strs: Option<Vec<String>>,
}

/// Tokens to turn into text.
#[derive(ToSchema)]
pub(crate) struct DetokenizeRequest {
    model: String,
    tokens: Vec<u32>,
}

/// The text of tokens.
#[derive(ToSchema)]
pub(crate) struct Detokenized {
    prompt: String,
}

/// A request for a response.
#[derive(ToSchema)]
pub(crate) struct ResponseBody {
    /// `NAME` or `NAME@FORMAT`.
    #[schema(examples("demo"))]
    model: String,
    /// A text, or a list of messages, calls and their outputs.
    input: Value,
    /// A message of the system before the input.
    instructions: Option<String>,
    /// The response that this one continues.
    previous_response_id: Option<String>,
    /// Return at once: the response is read later.
    background: Option<bool>,
    /// False: the response cannot be read later.
    store: Option<bool>,
    /// Stream the response as server-sent events.
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    #[schema(minimum = 1, maximum = 1048576)]
    max_output_tokens: Option<u32>,
    #[schema(minimum = 0, maximum = 2)]
    temperature: Option<f32>,
    #[schema(minimum = 0, maximum = 1)]
    top_p: Option<f32>,
    #[schema(maximum = 20)]
    top_logprobs: Option<u32>,
    /// `message.output_text.logprobs`
    include: Option<Vec<String>>,
    /// `{"format": …}`: what the text must match, as `response_format` of chat completions, with the schema beside its type.
    text: Option<Value>,
    /// `{"effort": …}`, for chat templates that know it.
    reasoning: Option<Value>,
    /// Functions that the model may call: `{"type": "function", "name": …, "parameters": …}`.
    tools: Option<Vec<Value>>,
    /// `auto` (the default), `none`, `required`, or a function.
    tool_choice: Option<Value>,
    /// False: at most one call.
    parallel_tool_calls: Option<bool>,
    /// Up to sixteen named texts, which the response repeats.
    metadata: Option<Value>,
    /// The same seed gives the same answer.
    seed: Option<i64>,
    /// `disabled`: a prompt that is too long is an error.
    truncation: Option<String>,
    /// `auto`, `default`, `flex`, `priority` or `scale`: there is one tier.
    service_tier: Option<String>,
    /// Accepted without effect.
    user: Option<String>,
}

/// A response, with the parameters of its request.
#[derive(ToSchema)]
pub(crate) struct ResponseObject {
    id: String,
    /// `response`
    object: String,
    created_at: i64,
    /// `queued`, `in_progress`, `completed`, `incomplete`, `failed` or `cancelled`.
    status: String,
    error: Option<Value>,
    /// `{"reason": "max_output_tokens"}` for a response that was cut.
    incomplete_details: Option<Value>,
    model: String,
    /// Items of the types `reasoning`, `message` and `function_call`.
    output: Vec<Value>,
    usage: Option<Value>,
    metadata: Value,
}

/// Number of tokens of a response's input.
#[derive(serde::Serialize, ToSchema)]
pub(crate) struct InputTokens {
    /// `response.input_tokens`
    pub object: &'static str,
    pub input_tokens: usize,
}

/// A response that was deleted.
#[derive(serde::Serialize, ToSchema)]
pub(crate) struct ResponseDeleted {
    pub id: String,
    /// `response`
    pub object: &'static str,
    pub deleted: bool,
}

/// Token counts of a completion.
#[derive(ToSchema)]
pub(crate) struct Usage {
    prompt_tokens: u64,
    completion_tokens: u64,
    total_tokens: u64,
    prompt_tokens_details: PromptTokensDetails,
    completion_tokens_details: CompletionTokensDetails,
}

/// What of an answer was not its text.
#[derive(ToSchema)]
pub(crate) struct CompletionTokensDetails {
    /// Tokens of what the model thought.
    reasoning_tokens: u64,
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
    /// Needed unless the batch is open, comes after another one, or has an `input_url`.
    input_file_id: Option<String>,
    /// Where the service reads the lines instead: `s3://`, `gs://`, `az://` or `https://`, below what the operator allows. JSON lines, CSV,
    /// TSV or Parquet, plain or compressed by gzip or zstd; a folder of an object store ends with `/`.
    #[schema(examples("s3://data/questions.parquet"))]
    input_url: Option<String>,
    input_options: Option<NewInputOptions>,
    /// Where the service writes the answers and errors, too, in the order of the lines, when the batch ends: `s3://`, `gs://` or `az://`, below
    /// what the operator allows; JSON lines, CSV, TSV or Parquet by its name.
    #[schema(examples("s3://data/answers.parquet"))]
    output_url: Option<String>,
    /// `jsonl`, `csv`, `tsv` or `parquet`, if the name of `output_url` does not tell it.
    output_format: Option<String>,
    after: Option<NewAfter>,
    /// An open batch takes lines while it runs, until it is sealed.
    open: Option<bool>,
    /// The path of every line: `/v1/chat/completions`, `/v1/completions`, `/v1/embeddings`, `/v1/messages` or `/v1/responses`; or `mixed`, for lines
    /// with paths and models of their own.
    #[schema(examples("/v1/chat/completions"))]
    endpoint: String,
    /// A number and one of s, m, h, d, or `background`: no promise, with spare capacity.
    #[schema(examples("24h"))]
    completion_window: String,
    /// Up to sixteen named texts.
    metadata: Option<Value>,
    output_expires_after: Option<ExpiresAfter>,
    /// `normal` (the default) or `low`.
    priority: Option<String>,
    webhook: Option<NewWebhook>,
    /// Another model for lines that have not begun at some time.
    escalation: Option<EscalationView>,
}

/// How an `input_url` is read.
#[derive(ToSchema)]
pub(crate) struct NewInputOptions {
    /// `jsonl`, `csv`, `tsv` or `parquet`, if the name does not tell it.
    format: Option<String>,
    /// Files of a folder to read, such as `train` or `test`.
    split: Option<String>,
    /// The column with the prompt, a text or a list of messages. By default `prompt`, `text` or `messages`, the first that is there.
    prompt_column: Option<String>,
    /// The column with the `custom_id`. By default it is `row-` and the number of the row.
    id_column: Option<String>,
    /// Fields of each request. Rows need `model`.
    #[schema(value_type = Option<Object>)]
    body: Option<Value>,
}

/// An earlier batch: when it has ended, a line is made of each of its lines.
#[derive(ToSchema)]
pub(crate) struct NewAfter {
    /// A batch of the same tenant, which may run.
    batch_id: String,
    lines: NewLines,
}

/// A template: `{{ previous.content }}`, `{{ previous.custom_id }}` and `{{ previous.body.FIELD }}` in its strings are read from an
/// earlier line and its answer.
#[derive(ToSchema)]
pub(crate) struct NewLines {
    /// By default that of the earlier line.
    #[schema(examples("{{ previous.custom_id }}-summary"))]
    custom_id: Option<String>,
    /// `POST`
    method: Option<String>,
    #[schema(examples("/v1/chat/completions"))]
    url: String,
    #[schema(value_type = Object)]
    body: Value,
}

/// A webhook to call when the batch has ended, is paused or goes on: a POST signed according to Standard Webhooks.
#[derive(ToSchema)]
pub(crate) struct NewWebhook {
    /// `http://` or `https://`, at a public address unless the service allows others.
    url: String,
    /// `whsec_` and the base64 of 24 to 64 bytes. By default one is generated and returned once.
    secret: Option<String>,
    /// The events that it is told of; all by default. A batch's: `batch.completed`, `batch.failed`, `batch.expired`, `batch.cancelled`,
    /// `batch.paused`, `batch.resumed`; a tenant's also `budget.soft_reached`, `budget.spent`.
    events: Option<Vec<String>>,
}

/// A schedule to create.
#[derive(ToSchema)]
pub(crate) struct ScheduleRequest {
    /// Five fields of cron: minute, hour, day of the month, month, day of the week.
    #[schema(examples("30 6 * * 1-5"))]
    cron: String,
    /// Time zone of these fields, by its name in the IANA database; by default `UTC`.
    #[schema(examples("Europe/Berlin"))]
    timezone: Option<String>,
    /// The body of a request that creates a batch. Its file must stay.
    batch: BatchRequest,
}

/// How long output files are kept.
#[derive(ToSchema)]
pub(crate) struct ExpiresAfter {
    /// `created_at`
    anchor: String,
    #[schema(minimum = 3600, maximum = 2_592_000)]
    seconds: u32,
}

/// How a batch is paused.
#[derive(ToSchema)]
pub(crate) struct PauseRequest {
    /// Whether running lines stop at once and go on from their latest checkpoint at the resume. By default they go to
    /// their end.
    now: Option<bool>,
}

/// Lines that run again.
#[derive(ToSchema)]
pub(crate) struct RetryRequest {
    /// Up to 10,000 lines. By default all that failed, expired or were cancelled.
    custom_ids: Option<Vec<String>>,
    /// Whether named lines that have an answer run again. Their earlier answer is deleted.
    force: Option<bool>,
}
