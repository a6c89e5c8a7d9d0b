//! Tokens that bias and penalties raise.

use super::*;

#[test]
fn only_raised_tokens_are_listed() {
    let of = |params: SamplingParams| {
        let mut counts = TokenCounts::new(&params, &[9, 4]);
        counts.add(2);
        let mut raised = vec![77];
        metadata(&params, &counts, 3).list_raised(&mut raised);
        raised
    };
    let bias = |logit_bias| SamplingParams { logit_bias, ..Default::default() };
    assert_eq!(of(bias(BTreeMap::from([(8, 0.5), (3, -1.0), (1, 0.0)]))), [8]);
    assert_eq!(of(SamplingParams { presence_penalty: 0.5, ..Default::default() }), [0u32; 0]);
    assert_eq!(of(SamplingParams { frequency_penalty: -0.5, ..Default::default() }), [2]);
    let params = SamplingParams { repetition_penalty: 0.5, ..bias(BTreeMap::from([(4, 1.0)])) };
    assert_eq!(of(params), [2, 4, 9]);
}
