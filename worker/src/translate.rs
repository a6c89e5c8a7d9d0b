//! Translates jobs into engine requests, and the ends of requests into outcomes of jobs.

use std::{borrow::Cow, time::Instant};

use serde::{Deserialize, Serialize};
use tritmill_engine::{
    Choice as EngineChoice, FinishReason as EngineReason, Output, Priority as EnginePriority,
    Request, RequestError, SamplingParams, SubmitError, TokenLogprob as EngineLogprob,
    chat::{AnswerLayout, Piece},
};
use tritmill_queue::{
    Choice, Claim, Completion, Embedded, ErrorKind, FinishReason, JobError, LengthLimit, Outcome,
    Priority, Prompt, Task, TokenLogprob, ToolCall, TopLogprob, Usage, Vector, VectorFormat, wire,
};

use crate::{
    engine_thread::End,
    served::{PreparedPrompt, ServedModel, chain, refused},
};

/// Stands for a log probability of minus infinity in results, as in the OpenAI API.
const LOGPROB_FLOOR: f32 = -9999.0;

/// A running answer: its tokens, and the numerics class that computed them.
#[derive(Debug, Serialize, Deserialize)]
struct Checkpoint<'a> {
    numerics_class: Cow<'a, str>,
    tokens: Cow<'a, [u32]>,
}

/// Encodes a checkpoint with the tokens of a running answer.
pub(crate) fn checkpoint(served: &ServedModel, tokens: &[u32]) -> Vec<u8> {
    let numerics_class = Cow::Borrowed(served.numerics_class());
    wire::encode(&Checkpoint { numerics_class, tokens: Cow::Borrowed(tokens) })
}

/// Returns the tokens after which an answer continues. The answer restarts if another numerics class
/// began it, since no class would produce the mixed text. It also restarts if the checkpoint is
/// unreadable, or an older one without a class; this costs only time.
fn resume(served: &ServedModel, checkpoint: &[u8]) -> Vec<u32> {
    match wire::decode::<Checkpoint<'_>>(checkpoint) {
        Ok(saved) if saved.numerics_class == served.numerics_class() => saved.tokens.into_owned(),
        _ => Vec::new(),
    }
}

/// What a claimed job is for the engine.
#[derive(Debug, Default)]
pub(crate) struct Work {
    /// A request for each of its prompts.
    pub requests: Vec<Request>,
    /// What is done with the answers.
    pub expected: Expected,
}

/// What is known of the answers to a job before they come.
#[derive(Debug, Clone, Default)]
pub(crate) struct Expected {
    /// How a text is divided.
    pub layout: AnswerLayout,
    /// The limit that would cut the answers to each prompt.
    pub limits: Vec<LengthLimit>,
    /// Choices of each prompt.
    pub choices: u32,
    /// How vectors are written, if they are asked for.
    pub vectors: Option<VectorFormat>,
}

/// Returns the work of a claimed job, or the outcome of one that needs no engine. Equal prompts get different seeds, as the
/// choices of one prompt do.
pub(crate) fn work(served: &ServedModel, claim: &Claim) -> Result<Work, Box<Outcome>> {
    let work = match (claim.job.task, served.embeds()) {
        (Task::Generate, false) => generation(served, claim),
        (Task::Embed { format }, true) => embedding(served, claim, format),
        (Task::Generate, true) | (Task::Embed { .. }, false) => Err(served.other_kind()),
        (task @ (Task::Tokenize { .. } | Task::Detokenize), _) => {
            return Err(Box::new(tokens_or_text(served, &claim.job.prompt, task)));
        }
    };
    work.map_err(|error| Box::new(Outcome::Error(error)))
}

/// Returns the outcome of a job that needs the tokenizer alone.
fn tokens_or_text(served: &ServedModel, prompt: &Prompt, task: Task) -> Outcome {
    let outcome = match task {
        Task::Tokenize { special, generation_prompt } => {
            let tokens = served.tokenize(prompt, special, generation_prompt);
            tokens.map(|tokens| served.tokenized(tokens))
        }
        _ => served.detokenize(prompt),
    };
    outcome.unwrap_or_else(Outcome::Error)
}

fn embedding(served: &ServedModel, claim: &Claim, format: VectorFormat) -> Result<Work, JobError> {
    let mut work = Work::default();
    (work.expected.choices, work.expected.vectors) = (1, Some(format));
    for prompt in claim.job.prompt.parts() {
        let prompt = served.tokens_to_embed(prompt)?;
        work.requests.push(Request { prompt, embeds: true, ..request_of(claim) });
    }
    Ok(work)
}

fn generation(served: &ServedModel, claim: &Claim) -> Result<Work, JobError> {
    let sampling = &claim.job.sampling;
    let parts = claim.job.prompt.parts();
    let mut work = Work::default();
    work.expected.choices = sampling.n;
    for (seed, prompt) in (0..).zip(parts) {
        let prepared = served.prepare(prompt, sampling.grammar.as_ref())?;
        if matches!(prompt, Prompt::Messages(_)) {
            work.expected.layout = prepared.layout.clone();
        }
        let (max_tokens, limit) = served.longest(sampling, prepared.tokens.len(), parts.len());
        work.expected.limits.push(limit);
        let seed = claim.job.seed.wrapping_add(seed);
        work.requests.push(request(claim, served, (prepared, max_tokens), seed));
    }
    Ok(work)
}

fn request(
    claim: &Claim,
    served: &ServedModel,
    (prepared, max_tokens): (PreparedPrompt, usize),
    seed: u64,
) -> Request {
    let Claim { job, checkpoint, .. } = claim;
    let sampling = &job.sampling;
    let resume = checkpoint.as_ref().map(|bytes| resume(served, bytes)).unwrap_or_default();
    Request {
        prompt: prepared.tokens,
        sampling: SamplingParams {
            max_tokens,
            min_tokens: size(sampling.min_tokens),
            temperature: sampling.temperature,
            top_k: size(sampling.top_k),
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            repetition_penalty: sampling.repetition_penalty,
            presence_penalty: sampling.presence_penalty,
            frequency_penalty: sampling.frequency_penalty,
            logit_bias: sampling.logit_bias.iter().copied().collect(),
            seed,
            n: size(sampling.n),
            stop: sampling.stop.clone(),
            stop_tokens: sampling.stop_tokens.clone(),
            ignore_eos: sampling.ignore_eos,
            logprobs: sampling.logprobs.map(size),
        },
        constraint: prepared.constraint,
        resume,
        ..request_of(claim)
    }
}

/// Returns what the requests of every task have.
fn request_of(claim: &Claim) -> Request {
    Request {
        priority: match claim.job.priority {
            Priority::High => EnginePriority::High,
            Priority::Normal => EnginePriority::Normal,
            Priority::Low => EnginePriority::Low,
        },
        deadline: claim.expires_in.and_then(|left| Instant::now().checked_add(left)),
        salt: claim.job.tenant.0.clone().into_bytes(),
        ..Request::default()
    }
}

const fn size(count: u32) -> usize {
    // Every machine this runs on has at least 32 bits of address.
    count as usize
}

/// Returns the outcome to record for the end of a request; `None` if it was cancelled, which is
/// recorded already.
pub(crate) fn outcome(
    served: &ServedModel,
    (prompt, expected): (&Prompt, &Expected),
    end: End,
) -> Option<Outcome> {
    match end {
        End::Finished(output) => finished(served, expected, output),
        End::Refused(error) => Some(Outcome::Error(refusal((prompt, expected), &error))),
        // Another attempt would come to the same place.
        End::Failed(RequestError::Grammar(error)) => {
            let problem = format!("the answer cannot go on as it must: {error}");
            Some(Outcome::Error(refused("grammar", "response_format", problem)))
        }
        End::Failed(error) => Some(Outcome::Error(failure(chain(&error)))),
    }
}

/// Returns the error of a failed engine; another attempt may succeed.
fn failure(message: String) -> JobError {
    JobError { kind: ErrorKind::Engine, code: "engine_error".to_owned(), message, param: None }
}

fn finished(served: &ServedModel, expected: &Expected, output: Output) -> Option<Outcome> {
    let ended = |reason| output.choices.iter().any(|choice| choice.finish_reason == reason);
    if ended(EngineReason::Cancelled) {
        return None;
    }
    if ended(EngineReason::Failed) {
        return Some(Outcome::Error(failure("a choice failed".to_owned())));
    }
    if ended(EngineReason::Deadline) {
        return Some(Outcome::Expired);
    }
    let usage = Usage {
        prompt_tokens: output.prompt_tokens as u64,
        completion_tokens: output.completion_tokens as u64,
        cached_tokens: output.cached_tokens as u64,
        reasoning_tokens: output
            .choices
            .iter()
            .map(|c| reasoning_tokens(served, expected, c))
            .sum(),
    };
    let (model, fingerprint) = (served.name().to_owned(), served.numerics_class().to_owned());
    let mut completion = Completion { model, fingerprint, usage, ..Completion::default() };
    let choices = output.choices.into_iter();
    match expected.vectors {
        None => completion.choices = choices.map(|choice| divided(expected, choice)).collect(),
        Some(format) => {
            let vectors = choices.filter_map(|choice| choice.vector).map(Vector).collect();
            completion.embedded = Some(Embedded { format, vectors });
        }
    }
    Some(Outcome::Completed(completion))
}

/// Returns how many tokens of a choice are of what the model thought, the tags included.
fn reasoning_tokens(served: &ServedModel, expected: &Expected, choice: &EngineChoice) -> u64 {
    let end = expected.layout.reasoning_end(&choice.text);
    let mut length = 0;
    let is_reasoning = |token: &&u32| {
        let before = length;
        length += served.text_length(**token);
        before < end
    };
    choice.tokens.iter().take_while(is_reasoning).count() as u64
}

/// Divides the text of a choice into what the model thinks, says and calls.
fn divided(expected: &Expected, choice: EngineChoice) -> Choice {
    let part = choice.index / expected.choices.max(1);
    let limit = expected.limits.get(part as usize).copied();
    let (finish_reason, length_limit) = match choice.finish_reason {
        EngineReason::Length => (FinishReason::Length, limit),
        _ => (FinishReason::Stop, None),
    };
    let logprobs = choice.logprobs.map(|all| all.into_iter().map(logprob).collect());
    let mut divided =
        Choice { length_limit, logprobs, ..Choice::new(choice.index, "", finish_reason) };
    divided.stop_string = choice.stop_string;
    for piece in expected.layout.divide(&choice.text) {
        match piece {
            Piece::Reasoning(text) => {
                divided.reasoning.get_or_insert_default().push_str(&text);
            }
            Piece::Content(text) => divided.text.push_str(&text),
            Piece::Call(name) => divided.tool_calls.push(ToolCall {
                id: String::new(),
                name,
                arguments: String::new(),
            }),
            Piece::Arguments(text) => {
                if let Some(call) = divided.tool_calls.last_mut() {
                    call.arguments.push_str(&text);
                }
            }
        }
    }
    if !divided.tool_calls.is_empty() && divided.finish_reason == FinishReason::Stop {
        divided.finish_reason = FinishReason::ToolCalls;
    }
    divided
}

/// Returns a log probability as results have it.
pub(crate) fn logprob(token: EngineLogprob) -> TokenLogprob {
    let top = token.top.into_iter().map(|top| TopLogprob {
        token: top.token,
        bytes: top.bytes,
        logprob: finite(top.logprob),
    });
    TokenLogprob {
        token: token.token,
        bytes: token.bytes,
        logprob: finite(token.logprob),
        top: top.collect(),
    }
}

fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { LOGPROB_FLOOR }
}

/// Returns the error for a request that the engine refused, with the field names of the API.
fn refusal((prompt, expected): (&Prompt, &Expected), error: &SubmitError) -> JobError {
    let prompt_field = match prompt {
        _ if expected.vectors.is_some() => "input",
        Prompt::Messages(_) => "messages",
        Prompt::Text(_) | Prompt::Question(_) | Prompt::Tokens(_) | Prompt::Several(_) => "prompt",
    };
    let code = match error {
        SubmitError::PromptTooLong { .. } | SubmitError::PromptExceedsCache { .. } => {
            "context_length_exceeded"
        }
        SubmitError::Full { .. } => {
            return JobError {
                kind: ErrorKind::Engine,
                code: "engine_full".to_owned(),
                message: error.to_string(),
                param: None,
            };
        }
        _ => "invalid_value",
    };
    let field = match error.field() {
        Some("prompt") | None => prompt_field,
        Some("stop_tokens") => "stop_token_ids",
        Some(other) => other,
    };
    refused(code, field, error.to_string())
}

#[cfg(test)]
mod tests {
    use std::{path::Path, sync::Arc};

    use tritmill_engine::files::Model;

    use super::*;

    #[test]
    fn cancelled_expired_and_failed_requests_have_different_outcomes() {
        let golden =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/golden/bitnet-tiny");
        let model = Arc::new(Model::open(&golden).expect("the golden model"));
        let served = ServedModel::new(model, "tiny".to_owned(), "class".to_owned());
        let ended = |reasons: &[EngineReason]| {
            let choice = |(index, reason): (u32, &EngineReason)| EngineChoice {
                index,
                tokens: vec![1],
                text: "a".to_owned(),
                finish_reason: *reason,
                stop_string: None,
                logprobs: None,
                vector: None,
            };
            let output = Output {
                choices: (0..).zip(reasons).map(choice).collect(),
                prompt_tokens: 1,
                completion_tokens: reasons.len(),
                cached_tokens: 0,
            };
            let prompt = Prompt::Text("a".to_owned());
            outcome(&served, (&prompt, &Expected::default()), End::Finished(output))
        };
        use EngineReason::{Cancelled, Deadline, Failed, Length, Stop};
        assert!(matches!(ended(&[Stop, Length]), Some(Outcome::Completed(_))));
        assert_eq!(ended(&[Stop, Cancelled]), None);
        assert_eq!(ended(&[Stop, Deadline]), Some(Outcome::Expired));
        let Some(Outcome::Error(error)) = ended(&[Failed, Stop]) else { panic!("it failed") };
        assert_eq!(error.kind, ErrorKind::Engine, "which keeps its other attempts");
    }
}
