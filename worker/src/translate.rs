//! Translates jobs into engine requests, and the ends of requests into outcomes of jobs.

use std::{borrow::Cow, time::Instant};

use serde::{Deserialize, Serialize};
use tritmill_engine::{
    FinishReason as EngineReason, Output, Priority as EnginePriority, Request, RequestError,
    SamplingParams, SubmitError, TokenLogprob as EngineLogprob,
};
use tritmill_queue::{
    Choice, Claim, Completion, ErrorKind, FinishReason, JobError, Outcome, Priority, Prompt,
    TokenLogprob, TopLogprob, Usage, wire,
};

use crate::{
    engine_thread::End,
    served::{ServedModel, chain, refused},
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

/// Returns the engine requests of a claimed job: one for each prompt. Equal prompts get different seeds, as the choices
/// of one prompt do.
pub(crate) fn requests(served: &ServedModel, claim: &Claim) -> Result<Vec<Request>, JobError> {
    let parts = claim.job.prompt.parts();
    let each = |(seed, prompt)| request(served, claim, prompt, claim.job.seed.wrapping_add(seed));
    (0..).zip(parts).map(each).collect()
}

fn request(
    served: &ServedModel,
    claim: &Claim,
    prompt: &Prompt,
    seed: u64,
) -> Result<Request, JobError> {
    let Claim { job, expires_in, checkpoint, .. } = claim;
    let sampling = &job.sampling;
    let resume = checkpoint.as_ref().map(|bytes| resume(served, bytes)).unwrap_or_default();
    Ok(Request {
        prompt: served.tokens(prompt)?,
        sampling: SamplingParams {
            max_tokens: size(sampling.max_tokens),
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
        constraint: sampling.grammar.as_ref().map(|g| served.constraint(g)).transpose()?,
        priority: match job.priority {
            Priority::High => EnginePriority::High,
            Priority::Normal => EnginePriority::Normal,
            Priority::Low => EnginePriority::Low,
        },
        deadline: expires_in.and_then(|left| Instant::now().checked_add(left)),
        salt: job.tenant.0.clone().into_bytes(),
        resume,
    })
}

const fn size(count: u32) -> usize {
    // Every machine this runs on has at least 32 bits of address.
    count as usize
}

/// Returns the outcome to record for the end of a request; `None` if it was cancelled, which is
/// recorded already.
pub(crate) fn outcome(served: &ServedModel, prompt: &Prompt, end: End) -> Option<Outcome> {
    match end {
        End::Finished(output) => finished(served, output),
        End::Refused(error) => Some(Outcome::Error(refusal(prompt, &error))),
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

fn finished(served: &ServedModel, output: Output) -> Option<Outcome> {
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
    };
    let choices = output
        .choices
        .into_iter()
        .map(|choice| Choice {
            index: choice.index,
            text: choice.text,
            finish_reason: match choice.finish_reason {
                EngineReason::Length => FinishReason::Length,
                _ => FinishReason::Stop,
            },
            logprobs: choice.logprobs.map(|all| all.into_iter().map(logprob).collect()),
        })
        .collect();
    Some(Outcome::Completed(Completion {
        model: served.name().to_owned(),
        fingerprint: served.numerics_class().to_owned(),
        choices,
        usage,
    }))
}

fn logprob(token: EngineLogprob) -> TokenLogprob {
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
fn refusal(prompt: &Prompt, error: &SubmitError) -> JobError {
    let prompt_field = match prompt {
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

    use tritmill_engine::{Choice as EngineChoice, files::Model};

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
                logprobs: None,
            };
            let output = Output {
                choices: (0..).zip(reasons).map(choice).collect(),
                prompt_tokens: 1,
                completion_tokens: reasons.len(),
                cached_tokens: 0,
            };
            outcome(&served, &Prompt::Text("a".to_owned()), End::Finished(output))
        };
        use EngineReason::{Cancelled, Deadline, Failed, Length, Stop};
        assert!(matches!(ended(&[Stop, Length]), Some(Outcome::Completed(_))));
        assert_eq!(ended(&[Stop, Cancelled]), None);
        assert_eq!(ended(&[Stop, Deadline]), Some(Outcome::Expired));
        let Some(Outcome::Error(error)) = ended(&[Failed, Stop]) else { panic!("it failed") };
        assert_eq!(error.kind, ErrorKind::Engine, "which keeps its other attempts");
    }
}
