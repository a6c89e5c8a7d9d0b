//! `tritmill model generate`: one prompt, one answer.

use std::{
    fs,
    io::{self, Write as _},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::Context as _;
use clap::Args;
use serde_json::{Value, json};
use tritmill_engine::{
    Choice, FinishReason, Grammar, Request, SamplingParams, TokenLogprob,
    chat::{self, Message, TemplateOptions},
    files::Model,
    generate, load,
};

use crate::{
    memory::{Budget, Candidate},
    options::{ModelOption, RunOptions},
    output,
};

const EXAMPLES: &str = "\
Examples:
  tritmill model generate --model ./bitnet-2b --prompt 'The capital of France is' --max-tokens 16
  tritmill model generate --model ./bitnet-2b --chat --prompt 'Name three rivers.' --temperature 0.7 --seed 1
  tritmill model generate --model ./bitnet-2b --chat --prompt 'A river, as JSON' --json-schema river.schema.json
  tritmill model generate --model model.gguf --tokens 128000,791,6864 --max-tokens 8 --json

The default temperature 0 takes the most probable token at each step.";

/// Arguments of `model generate`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelOption,
    #[command(flatten)]
    prompt: Prompt,
    /// Treat the text as a user message in the model's chat template
    #[arg(long, requires = "prompt")]
    chat: bool,
    /// Print JSON: tokens, text, finish_reason
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    sampling: Sampling,
    #[command(flatten)]
    structure: Structure,
    #[command(flatten)]
    run: RunOptions,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct Prompt {
    /// Text to continue
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// Token ids to continue, separated by commas
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    tokens: Option<Vec<u32>>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Structured output")]
#[group(multiple = false)]
struct Structure {
    /// Answer with a JSON object
    #[arg(long)]
    json_object: bool,
    /// Answer with JSON that the schema in a file accepts
    #[arg(long, value_name = "FILE")]
    json_schema: Option<PathBuf>,
    /// Answer with a text that a regular expression matches as a whole
    #[arg(long, value_name = "REGEX")]
    regex: Option<String>,
    /// Answer with one of some texts; may be given several times
    #[arg(long, value_name = "TEXT")]
    choice: Vec<String>,
    /// Answer with a text of the Lark grammar in a file (llguidance's variant)
    #[arg(long, value_name = "FILE")]
    grammar: Option<PathBuf>,
}

impl Structure {
    /// Returns what the answer must match.
    fn grammar(self) -> anyhow::Result<Option<Grammar>> {
        let read = |path: &PathBuf| {
            fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
        };
        let grammar = match self {
            Self { json_object: true, .. } => Grammar::JsonObject,
            Self { json_schema: Some(path), .. } => Grammar::JsonSchema(read(&path)?),
            Self { regex: Some(regex), .. } => Grammar::Regex(regex),
            Self { grammar: Some(path), .. } => Grammar::Lark(read(&path)?),
            Self { choice, .. } if !choice.is_empty() => Grammar::Choice(choice),
            _ => return Ok(None),
        };
        grammar.check().with_context(|| format!("the {} cannot be used", grammar.kind()))?;
        Ok(Some(grammar))
    }
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Sampling")]
struct Sampling {
    /// Maximum number of generated tokens
    #[arg(long, value_name = "N", default_value_t = 256)]
    max_tokens: usize,
    /// Number of tokens before which nothing ends the answer
    #[arg(long, value_name = "N", default_value_t = 0)]
    min_tokens: usize,
    /// Divisor of the logits; 0 takes the most probable token
    #[arg(long, value_name = "T", default_value_t = 0.0, allow_negative_numbers = true)]
    temperature: f32,
    /// Keep the K most probable tokens; 0 keeps all
    #[arg(long, value_name = "K", default_value_t = 0)]
    top_k: usize,
    /// Keep the smallest set of tokens with this probability
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_negative_numbers = true)]
    top_p: f32,
    /// Drop tokens below this share of the highest probability
    #[arg(long, value_name = "P", default_value_t = 0.0, allow_negative_numbers = true)]
    min_p: f32,
    /// Divisor of the logits of tokens in prompt and answer
    #[arg(long, value_name = "R", default_value_t = 1.0, allow_negative_numbers = true)]
    repetition_penalty: f32,
    /// Subtracted from the logits of tokens in the answer
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    presence_penalty: f32,
    /// Subtracted from the logits of tokens in the answer, once for each time
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    frequency_penalty: f32,
    /// Added to a token's logit; may be given several times
    #[arg(long, value_name = "ID=BIAS", value_parser = parse_bias)]
    logit_bias: Vec<(u32, f32)>,
    /// Seed of the random numbers
    #[arg(long, value_name = "N", default_value = "0", value_parser = parse_seed, allow_negative_numbers = true)]
    seed: u64,
    /// Text that ends the answer; may be given several times
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    stop: Vec<String>,
    /// Token that ends the answer; may be given several times
    #[arg(long, value_name = "ID")]
    stop_token: Vec<u32>,
    /// Continue after an end-of-sequence token
    #[arg(long)]
    ignore_eos: bool,
    /// Print log probabilities, with the N most probable tokens at each position
    #[arg(long, value_name = "N")]
    logprobs: Option<usize>,
}

impl Sampling {
    fn params(self) -> SamplingParams {
        SamplingParams {
            max_tokens: self.max_tokens,
            min_tokens: self.min_tokens,
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: self.logit_bias.into_iter().collect(),
            seed: self.seed,
            n: 1,
            stop: self.stop,
            stop_tokens: self.stop_token,
            ignore_eos: self.ignore_eos,
            logprobs: self.logprobs,
        }
    }
}

/// Parses a number of 64 bits; a negative one is its two's complement, as in requests.
fn parse_seed(text: &str) -> Result<u64, String> {
    let number = text.parse().or_else(|_| text.parse().map(i64::cast_unsigned));
    number.map_err(|_| "expected an integer of 64 bits".to_owned())
}

fn parse_bias(text: &str) -> Result<(u32, f32), String> {
    let (id, bias) = text.split_once('=').ok_or("expected ID=BIAS, as in 128001=-100")?;
    let id = id.parse().map_err(|error| format!("token id '{id}': {error}"))?;
    let bias = bias.parse().map_err(|error| format!("bias '{bias}': {error}"))?;
    Ok((id, bias))
}

/// Generates and prints an answer.
pub fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let model = arguments.model.open()?;
    let grammar = arguments.structure.grammar()?;
    let constraint =
        grammar.map(|grammar| load::grammars(&model)?.compile(&grammar)).transpose()?;
    let prompt = arguments.prompt.tokens(&model, arguments.chat)?;
    let options = load::EngineOptions { max_sequences: 1, ..arguments.run.engine_on_one()? };
    let candidate = Candidate { name: model.name(), model: &model, options, device_count: 1 };
    let options = Budget::available().place_experts(&candidate);
    let mut engine = load::engine(&model, &options)?;
    let sampling = arguments.sampling.params();
    let request = Request { prompt, sampling, constraint, ..Request::default() };
    let json = arguments.json;
    let output = generate::run(&mut engine, request, |_, text| {
        if !json {
            // A closed pipe is noticed when the last line is printed.
            let _ = write!(io::stdout(), "{text}").and_then(|()| io::stdout().flush());
        }
    })?;
    let choice = output.choices.first().context("the engine returned no answer")?;
    if json {
        output::json(answer(choice))?;
    } else {
        output::line("")?;
        let (prompt, completion) = (output.prompt_tokens, output.completion_tokens);
        let reason = finish_reason(choice.finish_reason);
        note!("[{prompt} prompt tokens, {completion} generated, finish_reason {reason}]");
    }
    Ok(ExitCode::SUCCESS)
}

impl Prompt {
    fn tokens(self, model: &Model, chat: bool) -> anyhow::Result<Vec<u32>> {
        let Some(text) = self.prompt else { return Ok(self.tokens.unwrap_or_default()) };
        if !chat {
            return Ok(model.tokenizer().encode(&text, true)?);
        }
        let template = model
            .chat_template()
            .with_context(|| format!("model {} has no chat template: drop --chat", model.name()))?;
        let question = [Message::new("user", text)];
        let input = (&question[..], &TemplateOptions::default());
        Ok(chat::encode(template, model.tokenizer(), input, true, false)?.tokens)
    }
}

fn answer(choice: &Choice) -> Value {
    let mut answer = json!({
        "tokens": choice.tokens,
        "text": choice.text,
        "finish_reason": finish_reason(choice.finish_reason),
    });
    if let Some(logprobs) = &choice.logprobs {
        answer["logprobs"] = logprobs.iter().map(logprob).collect();
    }
    answer
}

fn logprob(token: &TokenLogprob) -> Value {
    let mut value = json!({ "token": token.token, "bytes": token.bytes, "logprob": token.logprob });
    if !token.top.is_empty() {
        value["top"] = token.top.iter().map(logprob).collect();
    }
    value
}

fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Cancelled => "cancelled",
        FinishReason::Deadline => "deadline",
        FinishReason::Failed => "failed",
    }
}
