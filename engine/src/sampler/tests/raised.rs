//! Tokens that bias and penalties raise.

use super::*;

/// Adds the tokens that parameters may raise to those that were found.
pub(super) fn with_raised(
    mut some: Vec<TokenLogit>,
    logits: &[f32],
    params: &SamplingParams,
    context: Context<'_>,
) -> Vec<TokenLogit> {
    let mut raised = Vec::new();
    raised_tokens(params, context, &mut raised);
    assert!(raised.is_sorted());
    raised.retain(|token| {
        (*token as usize) < logits.len() && some.iter().all(|found| found.id != *token)
    });
    some.extend(raised.iter().map(|&id| TokenLogit { id, logit: logits[id as usize] }));
    some.sort_unstable_by_key(|found| found.id);
    some
}

#[test]
fn only_raised_tokens_are_listed() {
    let of = |params: SamplingParams| {
        let mut counts = TokenCounts::new(&params, &[9, 4]);
        counts.add(2);
        let context = Context {
            counts: &counts,
            masked: &[],
            choice: 0,
            position: 3,
            known: None,
            distribution: None,
        };
        let mut raised = vec![77];
        raised_tokens(&params, context, &mut raised);
        raised
    };
    let bias = |logit_bias| SamplingParams { logit_bias, ..Default::default() };
    assert_eq!(of(bias(BTreeMap::from([(8, 0.5), (3, -1.0), (1, 0.0)]))), [8]);
    assert_eq!(of(SamplingParams { presence_penalty: 0.5, ..Default::default() }), [0u32; 0]);
    assert_eq!(of(SamplingParams { frequency_penalty: -0.5, ..Default::default() }), [2]);
    let params = SamplingParams { repetition_penalty: 0.5, ..bias(BTreeMap::from([(4, 1.0)])) };
    assert_eq!(of(params), [2, 4, 9]);
}
