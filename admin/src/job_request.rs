//! The request that a job was made from, written again: what operators edit to run it once more.
//!
//! A field that has its default is left out. The parser reads what is written here as the same prompt and sampling
//! parameters; a parameter without a name in requests is refused by its name, never lost.

use serde_json::{Map, Value, json};
use tritmill_client::Endpoint;
use tritmill_queue::{
    Content, Conversation, Grammar, Job, Message, Prompt, Task, Tool, ToolChoice,
};

/// Returns the endpoint and the body of a request for the job, with its seed.
pub(crate) fn of_job(job: &Job) -> (Endpoint, Map<String, Value>) {
    if let Task::Embed { format } = job.task {
        let body = json!({
            "model": job.queue.to_string(),
            "input": prompt(&job.prompt),
            "encoding_format": format.as_str(),
        });
        return (Endpoint::Embeddings, body.as_object().cloned().unwrap_or_default());
    }
    let (endpoint, name, prompt) = match &job.prompt {
        Prompt::Messages(conversation) => {
            let messages = conversation.messages.iter().map(message).collect();
            (Endpoint::Chat, "messages", Value::Array(messages))
        }
        Prompt::Question(text) => (Endpoint::Plain, "prompt", json!(text)),
        other => (Endpoint::Completions, "prompt", prompt(other)),
    };
    let mut body = Map::new();
    body.insert("model".to_owned(), json!(job.queue.to_string()));
    body.insert(name.to_owned(), prompt);
    if let Prompt::Messages(conversation) = &job.prompt {
        body.extend(tools(conversation));
    }
    body.extend(sampling(job, endpoint));
    body.insert("seed".to_owned(), json!(job.seed));
    (endpoint, body)
}

fn prompt(prompt: &Prompt) -> Value {
    match prompt {
        Prompt::Text(text) | Prompt::Question(text) => json!(text),
        Prompt::Tokens(tokens) => json!(tokens),
        Prompt::Several(parts) => parts.iter().map(self::prompt).collect(),
        // A conversation never is part of another prompt.
        Prompt::Messages(conversation) => conversation.messages.iter().map(message).collect(),
    }
}

fn message(message: &Message) -> Value {
    let content = match &message.content {
        Content::Text(text) => json!(text),
        Content::Parts(texts) => {
            texts.iter().map(|text| json!({ "type": "text", "text": text })).collect()
        }
    };
    let mut map = Map::new();
    map.insert("role".to_owned(), json!(message.role.as_str()));
    map.insert("content".to_owned(), content);
    let others = [
        ("name", &message.name),
        ("tool_call_id", &message.tool_call_id),
        ("reasoning_content", &message.reasoning),
    ];
    for (name, value) in others {
        if let Some(value) = value {
            map.insert(name.to_owned(), json!(value));
        }
    }
    if !message.tool_calls.is_empty() {
        let calls = message.tool_calls.iter().map(|call| {
            let function = json!({ "name": call.name, "arguments": call.arguments });
            json!({ "id": call.id, "type": "function", "function": function })
        });
        map.insert("tool_calls".to_owned(), calls.collect());
    }
    Value::Object(map)
}

/// The tools of a conversation, and the variables of its template.
fn tools(conversation: &Conversation) -> Map<String, Value> {
    let Conversation { tools, tool_choice, one_call, template_arguments, .. } = conversation;
    let mut map = Map::new();
    if !template_arguments.is_empty() {
        let arguments = Value::Object(template_arguments.clone());
        map.insert("chat_template_kwargs".to_owned(), arguments);
    }
    if tools.is_empty() {
        return map;
    }
    let tool = |tool: &Tool| json!({ "type": "function", "function": tool.function });
    map.insert("tools".to_owned(), tools.iter().map(tool).collect());
    let of = |mode: &str, names: &[String]| {
        let tool = |name: &String| json!({ "type": "function", "function": { "name": name } });
        let allowed = json!({ "mode": mode, "tools": names.iter().map(tool).collect::<Vec<_>>() });
        json!({ "type": "allowed_tools", "allowed_tools": allowed })
    };
    let choice = match tool_choice {
        ToolChoice::Auto => json!("auto"),
        ToolChoice::Required => json!("required"),
        ToolChoice::AutoOf(names) => of("auto", names),
        ToolChoice::RequiredOf(names) => of("required", names),
    };
    map.insert("tool_choice".to_owned(), choice);
    if *one_call {
        map.insert("parallel_tool_calls".to_owned(), json!(false));
    }
    map
}

/// The sampling parameters that differ from their defaults, by their names in requests.
fn sampling(job: &Job, endpoint: Endpoint) -> Map<String, Value> {
    let sampling = &job.sampling;
    // As text, a number of 32 bits keeps its few digits.
    let text = serde_json::to_string(sampling).expect("parameters have text keys");
    let mut map: Map<String, Value> = serde_json::from_str(&text).expect("it was just written");
    if map.swap_remove("logit_bias").is_some() {
        let biases = sampling.logit_bias.iter();
        let biases = biases.map(|(token, bias)| (token.to_string(), json!(bias)));
        map.insert("logit_bias".to_owned(), Value::Object(biases.collect()));
    }
    if let Some(tokens) = map.swap_remove("stop_tokens") {
        map.insert("stop_token_ids".to_owned(), tokens);
    }
    if let Some(top) = sampling.logprobs
        && endpoint == Endpoint::Chat
    {
        map.insert("logprobs".to_owned(), json!(true));
        map.insert("top_logprobs".to_owned(), json!(top));
    }
    map.swap_remove("grammar");
    if let Some(grammar) = &sampling.grammar {
        let (kind, value) = match grammar {
            Grammar::JsonObject => ("json_object", json!(true)),
            Grammar::JsonSchema(schema) => ("json", schema_of(schema)),
            Grammar::Regex(regex) => ("regex", json!(regex)),
            Grammar::Choice(texts) => ("choice", json!(texts)),
            Grammar::Lark(grammar) => ("grammar", json!(grammar)),
        };
        map.insert("structured_outputs".to_owned(), json!({ kind: value }));
    }
    map
}

/// The schema as an object, if it is written as this program writes it; else as text, so that it stays the same.
fn schema_of(text: &str) -> Value {
    match serde_json::from_str::<Value>(text) {
        Ok(schema) if Grammar::of_schema(&schema) == Grammar::JsonSchema(text.to_owned()) => schema,
        _ => json!(text),
    }
}

#[cfg(test)]
mod tests {
    use tritmill_client::parse_body;
    use tritmill_queue::{JobId, QueueName};

    use super::*;

    /// Parses a body into a job, writes its request and parses that.
    fn check(endpoint: Endpoint, body: Value) {
        let job_of = |body: &Map<String, Value>| {
            let parsed = parse_body(endpoint, body.clone()).expect("a body");
            let queue = QueueName { model: "demo".to_owned(), format: "i2_s".to_owned() };
            parsed.job(JobId::generate(), queue)
        };
        let Value::Object(body) = body else { panic!("an object") };
        let job = job_of(&body);
        let (of_job, written) = of_job(&job);
        assert_eq!(of_job, endpoint);
        let again = job_of(&written);
        assert_eq!((&again.prompt, &again.sampling), (&job.prompt, &job.sampling), "{written:?}");
        assert_eq!(again.seed, job.seed);
    }

    #[test]
    fn written_request_is_read_as_the_same_job() {
        check(Endpoint::Plain, json!({ "prompt": "hi" }));
        check(Endpoint::Completions, json!({ "prompt": ["a", [1, 2]], "logprobs": 2, "n": 2 }));
        check(Endpoint::Embeddings, json!({ "input": ["a", [1, 2]], "encoding_format": "base64" }));
        check(Endpoint::Completions, json!({ "prompt": [3, 4], "max_tokens": 9 }));
        let parts = json!([{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }]);
        check(
            Endpoint::Chat,
            json!({
                "messages": [
                    { "role": "system", "content": "be brief" },
                    { "role": "user", "content": parts, "name": "ann" },
                    { "role": "tool", "content": "7", "tool_call_id": "c1" },
                ],
                "max_tokens": 40, "min_tokens": 2, "temperature": 0.7, "top_k": 5, "top_p": 0.9,
                "min_p": 0.05, "repetition_penalty": 1.1, "presence_penalty": 0.5,
                "frequency_penalty": -0.5, "logit_bias": { "7": -1.5, "9": 2 },
                "stop": ["\n"], "stop_token_ids": [5], "ignore_eos": true, "n": 3,
                "logprobs": true, "top_logprobs": 4, "seed": 42,
            }),
        );
        let message = json!([{ "role": "user", "content": "hi" }]);
        let tool = json!({ "type": "function", "function": { "name": "look", "parameters": { "type": "object" } } });
        let call = json!({ "id": "c1", "type": "function", "function": { "name": "look", "arguments": "{}" } });
        for choice in [
            json!("auto"),
            json!("required"),
            json!("none"),
            json!({ "type": "function", "function": { "name": "look" } }),
        ] {
            check(
                Endpoint::Chat,
                json!({
                    "messages": [
                        { "role": "assistant", "content": null, "tool_calls": [call], "reasoning_content": "so" },
                        { "role": "tool", "content": "7", "tool_call_id": "c1" },
                    ],
                    "tools": [tool], "tool_choice": choice, "parallel_tool_calls": false,
                    "chat_template_kwargs": { "enable_thinking": false }, "reasoning_effort": "low",
                }),
            );
        }
        let schema = json!({ "type": "object", "properties": { "a": { "type": "integer" } } });
        for grammar in [
            json!({ "json": schema }),
            json!({ "json": "{ \"type\":  \"object\" }" }),
            json!({ "json_object": true }),
            json!({ "regex": "[a-z]+" }),
            json!({ "choice": ["a", "b"] }),
            json!({ "grammar": "start: \"a\"" }),
        ] {
            check(Endpoint::Chat, json!({ "messages": message, "structured_outputs": grammar }));
        }
    }
}
