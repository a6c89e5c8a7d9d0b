//! `tritmill model prompt`: what a model reads for a conversation.

use std::{fs, io::Read as _, process::ExitCode};

use anyhow::{Context as _, bail};
use clap::Args;
use serde_json::{Map, Value, json};
use tritmill_client::{Endpoint, Prompt, parse_body};
use tritmill_engine::chat::{self, Encoded};
use tritmill_worker::TemplateInput;

use crate::{options::ModelOption, output};

const EXAMPLES: &str = "\
Examples:
  tritmill model prompt --model ./bitnet-2b --messages conversation.json
  echo '[{\"role\": \"user\", \"content\": \"Hi\"}]' | tritmill model prompt --model model.gguf --messages -

The file has the messages of a request to /v1/chat/completions: an array, or an object with \"messages\", and with \"tools\" or
\"chat_template_kwargs\" if the request has them.";

/// Arguments of `model prompt`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelOption,
    /// JSON file with the messages; - reads standard input
    #[arg(long, value_name = "FILE")]
    messages: String,
    /// Leave out the begin of the assistant's answer
    #[arg(long)]
    no_generation_prompt: bool,
    /// Read the names of control tokens in messages as these tokens
    #[arg(long)]
    control_tokens: bool,
    /// Print JSON: text, tokens
    #[arg(long)]
    json: bool,
}

/// Renders the messages and prints the text and its tokens.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let model = arguments.model.open()?;
    let Some(template) = model.chat_template() else {
        bail!("model {} has no chat template: its prompts are plain text", model.name());
    };
    let Prompt::Messages(conversation) = parse(&read(&arguments.messages)?)? else {
        bail!("{} has no messages", arguments.messages);
    };
    let TemplateInput { messages, options } = TemplateInput::new(template, &conversation);
    let tokenizer = model.tokenizer();
    let input = (&messages[..], &options);
    let is_answered = !arguments.no_generation_prompt;
    let Encoded { text, tokens } =
        chat::encode(template, tokenizer, input, is_answered, arguments.control_tokens)?;
    if arguments.json {
        output::json(json!({ "text": text, "tokens": tokens }))?;
        return Ok(ExitCode::SUCCESS);
    }
    output::line(&text)?;
    output::line(format_args!("\n{} tokens:", tokens.len()))?;
    for token in tokens {
        let bytes = tokenizer.token_bytes(token).unwrap_or_default();
        let text = String::from_utf8_lossy(bytes);
        let special = if tokenizer.is_special(token) { "  special" } else { "" };
        output::line(format_args!("{token:>8}  {text:?}{special}"))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn read(file: &str) -> anyhow::Result<Vec<u8>> {
    if file != "-" {
        return fs::read(file).with_context(|| format!("cannot read {file}"));
    }
    let mut bytes = Vec::new();
    std::io::stdin().read_to_end(&mut bytes).context("cannot read standard input")?;
    Ok(bytes)
}

/// Reads messages as a request has them.
fn parse(bytes: &[u8]) -> anyhow::Result<Prompt> {
    let json: Value = serde_json::from_slice(bytes).context("the messages are no JSON")?;
    let body = match json {
        Value::Object(body) => body,
        messages => Map::from_iter([("messages".to_owned(), messages)]),
    };
    Ok(parse_body(Endpoint::Chat, body)?.prompt)
}
