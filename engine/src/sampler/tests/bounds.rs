//! Draws from some logits at the bounds of what they decide.

use super::*;

/// Looks until a draw is decided; returns the token and the number of looks, or no token if all logits are needed.
pub(super) fn looks(
    params: &SamplingParams,
    logits: &[f32],
    position: usize,
) -> (Option<u32>, usize) {
    let counts = NO_COUNTS();
    let context = Context {
        counts: &counts,
        masked: &[],
        choice: 0,
        position,
        known: None,
        distribution: None,
    };
    let needed = needed(params, context);
    let mut scratch = Scratch::default();
    let mut some = logits::first(logits, &needed);
    let mut drawn = sample(&mut some[..], params, context, &mut scratch);
    for looks in 1.. {
        let (first, above) = match drawn.expect("the logits are finite") {
            Sampled::Drawn(drawn) => return (Some(drawn.token), looks - 1),
            Sampled::Undecided { above: None, .. } => return (None, looks - 1),
            Sampled::Undecided { first, above: Some(above) } => (first, above),
        };
        let (mut some, rest) = logits::above(logits, above);
        let known = Some(Known { rest, first, looks });
        drawn = sample(&mut some[..], params, Context { known, ..context }, &mut scratch);
    }
    unreachable!("looks end")
}

/// The largest logit may be far below zero: only differences count.
#[test]
fn the_first_look_decides_most_draws_with_top_p_at_any_height() {
    for height in [-80.0, -20.0, 0.0, 50.0] {
        let logits: Vec<f32> = (0..400).map(|token| height - 0.08 * token as f32).collect();
        for temperature in [0.5f32, 0.8] {
            let params = SamplingParams { temperature, top_p: 0.9, ..Default::default() };
            let mut further = 0;
            for position in 0..200 {
                let (token, looks) = looks(&params, &logits, position);
                let expected = sampled(&params, &logits, position).ok();
                assert_eq!(token, expected, "{height} at {temperature}");
                further += looks - 1;
            }
            assert!(further < 20, "{further} further looks of 200 draws from {height}");
        }
    }
}

/// The smallest logit with a probability of at least `min_p` times the largest, which is zero.
fn lowest_kept(params: &SamplingParams) -> f32 {
    let keeps = |logit: f32| {
        let logits = [0.0, logit];
        let mut scratch = Scratch::default();
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
fn every_token_that_min_p_keeps_is_among_the_needed() {
    let counts = NO_COUNTS();
    let context = Context {
        counts: &counts,
        masked: &[],
        choice: 0,
        position: 1,
        known: None,
        distribution: None,
    };
    for temperature in [0.05f32, 0.3, 1.0, 1.7, 20.0] {
        for hundredth in 1..100u8 {
            let min_p = f32::from(hundredth) / 100.0;
            let params = SamplingParams { temperature, min_p, ..Default::default() };
            let logits = [0.0, lowest_kept(&params)];
            let needed = needed(&params, context);
            let found = logits::first(&logits, &needed);
            assert_eq!(found.len(), 2, "{min_p} at {temperature}: {logits:?}");
            let far = [0.0, logits[1] * 1.001 - 1e-6];
            assert_eq!(logits::first(&far, &needed).len(), 1, "{min_p} at {temperature}");
        }
    }
}

#[test]
fn only_parameters_that_need_more_than_the_first_token_ask_for_more() {
    let counts = NO_COUNTS();
    let context = Context {
        counts: &counts,
        masked: &[],
        choice: 0,
        position: 1,
        known: None,
        distribution: None,
    };
    let of = |params: SamplingParams| needed(&params, context);
    let base = SamplingParams::default();
    let plain = of(base.clone());
    assert!(plain.count == 1 && plain.within == 0.0 && plain.noise.is_some() && !plain.keeps);
    assert!(of(SamplingParams { top_p: 0.9, ..base.clone() }).keeps);
    let lowers = [(7, -1.0), (8, 0.0)].into();
    let lowered = of(SamplingParams { logit_bias: lowers, presence_penalty: 0.5, ..base.clone() });
    assert!(lowered.count == 3 && !lowered.keeps, "{lowered:?}");
    for raises in [
        SamplingParams { logit_bias: [(7, 1.0)].into(), ..base.clone() },
        SamplingParams { presence_penalty: -0.5, ..base.clone() },
        SamplingParams { frequency_penalty: -0.5, ..base.clone() },
        SamplingParams { repetition_penalty: 0.5, ..base },
    ] {
        assert!(of(raises.clone()).keeps, "{raises:?}");
    }
}
