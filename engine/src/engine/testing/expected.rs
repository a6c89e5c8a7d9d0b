//! The expected output of a request.

use super::*;
use crate::{
    sampler::{self, Context, Drawn, Sampled, TokenCounts},
    text::TextAssembler,
};

/// Returns the choices that the engine is expected to return, independent of other requests.
pub fn expected(request: &Request) -> Vec<Choice> {
    (0..request.sampling.n as u32).map(|choice| expected_choice(request, choice)).collect()
}

fn expected_choice(request: &Request, index: u32) -> Choice {
    let sampling = SamplingParams { logprobs: None, ..request.sampling.clone() };
    let mut end_tokens = sampling.stop_tokens.clone();
    end_tokens.extend(Some(EOS).filter(|_| !sampling.ignore_eos));
    let letters = Letters::new();
    let mut counts = TokenCounts::new(&sampling, &request.prompt);
    let mut text = TextAssembler::new(&sampling.stop);
    let mut all = request.prompt.clone();
    let mut tokens = Vec::new();
    let finish_reason = loop {
        if tokens.len() == sampling.max_tokens || all.len() == CONTEXT {
            break FinishReason::Length;
        }
        let early = tokens.len() < sampling.min_tokens;
        let masked = if early { end_tokens.as_slice() } else { &[] };
        let context = Context {
            counts: &counts,
            masked,
            choice: index,
            position: all.len(),
            known: None,
            distribution: None,
        };
        let mut scratch = Scratch::default();
        let drawn = sampler::sample(&mut logits_after(&all)[..], &sampling, context, &mut scratch);
        let Ok(Sampled::Drawn(Drawn { token, .. })) = drawn else { panic!("all logits are there") };
        tokens.push(token);
        all.push(token);
        counts.add(token);
        if end_tokens.contains(&token) {
            break FinishReason::Stop;
        }
        let bytes = if letters.is_special(token) { &[] } else { letters.bytes(token) };
        if text.push(bytes, tokens.len() >= sampling.min_tokens) {
            break FinishReason::Stop;
        }
    };
    let stopped = text.finish(tokens.len() >= sampling.min_tokens);
    let finish_reason = if stopped { FinishReason::Stop } else { finish_reason };
    Choice { index, tokens, text: text.into_text(), finish_reason, logprobs: None }
}
