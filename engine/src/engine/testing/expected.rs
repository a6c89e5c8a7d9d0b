//! The expected output of a request.

use super::*;
use crate::{
    sampling::{self, AllowedTokens, RowMetadata, TokenCounts},
    text::TextAssembler,
};

/// Returns the choices that the engine is expected to return, independent of other requests.
pub fn expected(request: &Request) -> Vec<Choice> {
    (0..request.sampling.n as u32).map(|choice| expected_choice(request, choice)).collect()
}

fn expected_choice(request: &Request, index: u32) -> Choice {
    let params = SamplingParams { logprobs: None, ..request.sampling.clone() };
    let mut end_tokens = params.stop_tokens.clone();
    end_tokens.extend(Some(EOS).filter(|_| !params.ignore_eos));
    let letters = Letters::new();
    let mut counts = TokenCounts::new(&params, &request.prompt);
    let mut text = TextAssembler::new(&params.stop);
    let mut all = request.prompt.clone();
    let mut tokens = Vec::new();
    let finish_reason = loop {
        if tokens.len() == params.max_tokens || all.len() == CONTEXT {
            break FinishReason::Length;
        }
        let early = tokens.len() < params.min_tokens;
        let allowed = AllowedTokens::all_but(VOCAB, end_tokens.iter().copied());
        let metadata = RowMetadata {
            params: &params,
            counts: &counts,
            drafts: &[],
            allowed: early.then_some(&allowed),
            choice: index,
            position: all.len(),
            choices: 1,
        };
        let logits = &mut logits_after(&all)[..];
        let drawn = sampling::sample(logits, &metadata, None, &mut Scratch::default());
        let token = drawn.expect("the logits are finite").token;
        tokens.push(token);
        all.push(token);
        counts.add(token);
        if end_tokens.contains(&token) {
            break FinishReason::Stop;
        }
        let bytes = if letters.is_special(token) { &[] } else { letters.bytes(token) };
        if text.push(bytes, tokens.len() >= params.min_tokens) {
            break FinishReason::Stop;
        }
    };
    let stopped = text.finish(tokens.len() >= params.min_tokens);
    let finish_reason = if stopped { FinishReason::Stop } else { finish_reason };
    Choice {
        index,
        tokens,
        stop_string: text.stop_string().map(str::to_owned),
        text: text.into_text(),
        finish_reason,
        logprobs: None,
        vector: None,
    }
}
