//! Draws from some logits at the bounds of what they decide.

use super::*;

/// The largest logit may be far below zero: only differences count. A draw that refuses the first token needs a further threshold.
#[test]
fn the_first_threshold_decides_most_draws_that_take_the_first_token_at_any_height() {
    for height in [-80.0, -20.0, 0.0, 50.0] {
        let logits: Vec<f32> = (0..400).map(|token| height - 0.08 * token as f32).collect();
        for temperature in [0.5f32, 0.8] {
            let params = SamplingParams { temperature, top_p: 0.9, ..Default::default() };
            let all = SamplingParams { temperature, ..Default::default() };
            let (mut further, mut refused) = (0, 0);
            for position in 0..200 {
                let (token, thresholds) = listed::draw(&params, &logits, position);
                let expected = sampled(&params, &logits, position).ok();
                assert_eq!(token, expected, "{height} at {temperature}");
                if token == sampled(&all, &logits, position).ok() {
                    further += thresholds - 1;
                } else {
                    refused += 1;
                    assert!(thresholds <= 2, "{thresholds} thresholds to refuse a token");
                }
            }
            assert!(refused < 30, "a tenth of the draws, {refused}");
            assert!(further < 20, "{further} further thresholds of 200 draws from {height}");
        }
    }
}

/// The smallest logit with a probability of at least `min_p` times the largest, which is zero.
fn lowest_kept(params: &SamplingParams) -> f32 {
    let keeps = |logit: f32| {
        let logits = [0.0, logit];
        let mut scratch = top_k_top_p::Scratch::default();
        let kept = candidates(&logits[..], params, None, &mut scratch).expect("they are finite");
        kept.kept.len() == 2
    };
    // The bits of negative floats ascend with their magnitude.
    let (mut kept, mut dropped) = ((-1e-20f32).to_bits(), (-1e6f32).to_bits());
    while dropped - kept > 1 {
        let middle = kept + (dropped - kept) / 2;
        if keeps(f32::from_bits(middle)) { kept = middle } else { dropped = middle }
    }
    f32::from_bits(kept)
}

#[test]
fn every_token_that_min_p_keeps_is_among_the_largest() {
    let counts = NO_COUNTS();
    for temperature in [0.05f32, 0.3, 1.0, 1.7, 20.0] {
        for hundredth in 1..100u8 {
            let min_p = f32::from(hundredth) / 100.0;
            let params = SamplingParams { temperature, min_p, ..Default::default() };
            let logits = [0.0, lowest_kept(&params)];
            let wanted = metadata(&params, &counts, 1).largest();
            let found = |logits: [f32; 2]| {
                let mut found = Vec::new();
                let Ok(()) = logits.to_vec().largest(&wanted, &mut found);
                found.len()
            };
            assert_eq!(found(logits), 2, "{min_p} at {temperature}: {logits:?}");
            let far = [0.0, logits[1] * 1.001 - 1e-6];
            assert_eq!(found(far), 1, "{min_p} at {temperature}");
        }
    }
}

#[test]
fn only_parameters_that_need_more_than_the_first_token_ask_for_more() {
    let counts = NO_COUNTS();
    let of = |params: SamplingParams| metadata(&params, &counts, 1).largest();
    let base = SamplingParams::default();
    let plain = of(base.clone());
    assert!(
        plain.count == 1 && plain.within == 0.0 && plain.noise.is_some() && !plain.others_follow
    );
    assert!(of(SamplingParams { top_p: 0.9, ..base.clone() }).others_follow);
    let lowers = [(7, -1.0), (8, 0.0)].into();
    let lowered = of(SamplingParams { logit_bias: lowers, presence_penalty: 0.5, ..base.clone() });
    assert!(lowered.count == 3 && !lowered.others_follow, "{lowered:?}");
    for raises in [
        SamplingParams { logit_bias: [(7, 1.0)].into(), ..base.clone() },
        SamplingParams { presence_penalty: -0.5, ..base.clone() },
        SamplingParams { frequency_penalty: -0.5, ..base.clone() },
        SamplingParams { repetition_penalty: 0.5, ..base },
    ] {
        assert!(of(raises.clone()).others_follow, "{raises:?}");
    }
}
