//! The sampler against the reference implementation's distributions, and against definitions that
//! sort the whole vocabulary.

mod bounds;
mod listed;
mod raised;

use std::{collections::BTreeMap, convert::Infallible, path::Path};

use proptest::prelude::*;
use serde_json::Value;

use super::{
    row::every,
    sampler::THRESHOLDS,
    top_k_top_p::{Candidate, candidates},
    *,
};
use crate::math;
use listed::Listed;

type Sampled = Result<Drawn, DrawError<Infallible>>;

const NO_COUNTS: fn() -> TokenCounts = TokenCounts::default;

fn golden(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn golden_logits() -> Vec<f32> {
    let file = golden("sampler.safetensors");
    let tensors = safetensors::SafeTensors::deserialize(&file).expect("a valid file");
    let logits = tensors.tensor("logits").expect("it has logits");
    let bytes = logits.data().chunks_exact(4);
    bytes.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// Candidates after penalties and filters, most probable first, with their probabilities.
fn distribution(params: &SamplingParams, context_ids: &[u32]) -> Vec<(u32, f64)> {
    let mut logits = golden_logits();
    TokenCounts::new(params, context_ids).apply(params, &mut logits[..]);
    let mut scratch = top_k_top_p::Scratch::default();
    let kept = candidates(&logits[..], params, None, &mut scratch).expect("the logits are finite");
    assert!(!kept.lacks_some, "all logits are there");
    let kept = kept.kept;
    assert!(kept.is_sorted_by_key(|candidate| candidate.token));
    let total: f64 = kept.iter().map(|candidate| candidate.weight).sum();
    let mut list: Vec<_> = kept.iter().map(|c| (c.token, c.weight / total)).collect();
    list.sort_by(|a, b| b.1.total_cmp(&a.1));
    list
}

#[test]
fn distributions_equal_those_of_the_reference_implementation() {
    let file: Value = serde_json::from_slice(&golden("sampler.json")).expect("valid JSON");
    let ids = |value: &Value| -> Vec<u32> { serde_json::from_value(value.clone()).expect("ids") };
    let context_ids = ids(&file["context_ids"]);
    let cases = file["cases"].as_array().expect("cases");
    assert_eq!(cases.len(), 8);
    for case in cases {
        let number = |name: &str| case["params"][name].as_f64().expect(name) as f32;
        let params = SamplingParams {
            temperature: number("temperature"),
            top_k: number("top_k") as usize,
            top_p: number("top_p"),
            min_p: number("min_p"),
            repetition_penalty: number("repetition_penalty"),
            ..SamplingParams::default()
        };
        let actual = distribution(&params, &context_ids);
        let actual_ids: Vec<u32> = actual.iter().map(|(token, _)| *token).collect();
        let probs: Vec<f64> = serde_json::from_value(case["probs"].clone()).expect("probs");
        let (mut sorted, mut expected) = (actual_ids.clone(), ids(&case["ids"]));
        // The reference may order equal probabilities differently: compare as sets, then values.
        sorted.sort_unstable();
        expected.sort_unstable();
        assert_eq!(sorted, expected, "{params:?}");
        for ((token, actual), expected) in actual.iter().zip(&probs) {
            assert!((actual / expected - 1.0).abs() < 1e-5, "{token}: {actual}, not {expected}");
        }
    }
}

/// What a draw with these parameters depends on besides the logits.
fn metadata<'a>(
    params: &'a SamplingParams,
    counts: &'a TokenCounts,
    position: usize,
) -> RowMetadata<'a> {
    RowMetadata { params, counts, drafts: &[], allowed: None, choice: 0, position, choices: 1 }
}

fn sampled(params: &SamplingParams, logits: &[f32], position: usize) -> Result<u32, SampleError> {
    let counts = NO_COUNTS();
    let drawn = of_all(logits, &metadata(params, &counts, position));
    drawn.map(|drawn| drawn.token).map_err(|error| match error {
        DrawError::Sample(error) => error,
        DrawError::Row(never) => match never {},
    })
}

/// Draws from all logits.
fn of_all(logits: &[f32], metadata: &RowMetadata<'_>) -> Sampled {
    sample(&mut logits.to_vec()[..], metadata, None, &mut Scratch::default())
}

fn noise(position: usize, token: u32) -> f64 {
    GumbelNoise::new(0, 0, position as u64, 1.0).of_token(token)
}

#[test]
fn greedy_takes_the_lowest_of_equal_tokens() {
    let params = SamplingParams::greedy(1);
    assert_eq!(sampled(&params, &[1.0, 3.0, 3.0, 2.0], 0), Ok(1));
    assert_eq!(sampled(&params, &[f32::NEG_INFINITY, -5.0], 0), Ok(1));
    assert_eq!(sampled(&params, &[f32::MIN, f32::NEG_INFINITY], 0), Ok(0));
}

#[test]
fn non_finite_logits_are_an_error_not_a_panic() {
    for params in [SamplingParams::greedy(1), SamplingParams::default()] {
        for logprobs in [None, Some(2)] {
            let params = SamplingParams { logprobs, ..params.clone() };
            for bad in [f32::NAN, f32::INFINITY] {
                let error = sampled(&params, &[0.0, bad, 9.0], 0).expect_err("not finite");
                assert!(matches!(error, SampleError::NotFinite { token: 1, .. }), "{error:?}");
            }
            let nothing = [f32::NEG_INFINITY; 3];
            assert_eq!(sampled(&params, &nothing, 0), Err(SampleError::NothingLeft));
            assert_eq!(sampled(&params, &[], 0), Err(SampleError::NothingLeft));
        }
    }
}

#[test]
fn refused_tokens_are_never_drawn_with_any_bias() {
    let params = SamplingParams { logit_bias: [(1, 100.0)].into(), ..SamplingParams::default() };
    let (counts, allowed) = (NO_COUNTS(), AllowedTokens::all_but(4, [1, 9]));
    for position in 0..200 {
        let metadata =
            RowMetadata { allowed: Some(&allowed), ..metadata(&params, &counts, position) };
        let drawn = of_all(&[0.0; 4], &metadata).expect("three are left");
        assert_ne!(drawn.token, 1);
    }
}

#[test]
fn extreme_temperatures_are_greedy_and_uniform() {
    let logits = [1.0, 1.5, -3.0e38, 1.4];
    let at = |temperature| SamplingParams { temperature, ..SamplingParams::default() };
    let mut hot = [0u32; 4];
    for position in 0..400 {
        assert_eq!(sampled(&at(f32::MIN_POSITIVE), &logits, position), Ok(1));
        hot[sampled(&at(1e30), &logits, position).expect("a token") as usize] += 1;
    }
    assert!([0, 1, 3].iter().all(|token| (90..180).contains(&hot[*token])), "{hot:?}");
    assert_eq!(hot[2], 0, "3e8 units of 1e30 below the others");
}

#[test]
fn tokens_are_drawn_in_proportion_to_their_probability() {
    let params = SamplingParams { top_k: 3, seed: 5, ..SamplingParams::default() };
    let logits = [0.0, 2.0f32.ln(), 5.0f32.ln(), -1.0];
    let mut counts = [0u32; 4];
    for position in 0..8000 {
        counts[sampled(&params, &logits, position).expect("a token") as usize] += 1;
    }
    for (count, expected) in counts.iter().zip([1000u32, 2000, 5000, 0]) {
        assert!(count.abs_diff(expected) < 130, "{counts:?}");
    }
}

#[test]
fn drawn_tokens_are_the_same_on_every_machine() {
    let logits = golden_logits();
    let base = SamplingParams { seed: 42, ..SamplingParams::default() };
    let draws = |params: SamplingParams| -> Vec<u32> {
        (0..8).map(|position| sampled(&params, &logits, position).expect("a token")).collect()
    };
    // From an independent implementation, in Python.
    assert_eq!(draws(base.clone()), [693, 540, 786, 786, 786, 314, 314, 709]);
    assert_eq!(
        draws(SamplingParams { top_p: 0.9, temperature: 0.7, ..base.clone() }),
        [227, 378, 786, 786, 786, 314, 314, 227]
    );
    assert_eq!(
        draws(SamplingParams { top_k: 40, min_p: 0.02, ..base }),
        [227, 378, 786, 786, 786, 314, 314, 227]
    );
}

/// Draws a million tokens and compares their counts with the probabilities by Pearson's test.
#[test]
fn a_million_draws_have_the_distribution_of_the_softmax() {
    let logits: Vec<f32> = (0..40u8).map(|token| f32::from(token % 13) * 0.7 - 2.0).collect();
    let draws = 1_000_000u32;
    for temperature in [1.0, 0.6] {
        let weights = logits.iter().map(|logit| (f64::from(*logit) / f64::from(temperature)).exp());
        let total: f64 = weights.clone().sum();
        let mut counts = vec![0u32; logits.len()];
        for draw in 0..draws {
            // Positions of many short answers.
            let (seed, position) = (u64::from(draw / 50), u64::from(draw % 50));
            let noise = GumbelNoise::new(seed, 0, position, temperature);
            let token = gumbel::argmax(every(&logits), &noise);
            counts[token.expect("a token") as usize] += 1;
        }
        let terms = counts.iter().zip(weights).map(|(count, weight)| {
            let expected = weight / total * f64::from(draws);
            (f64::from(*count) - expected).powi(2) / expected
        });
        let statistic: f64 = terms.sum();
        // 39 degrees of freedom: 80.1 is exceeded with probability 1e-4, 11.7 undercut with 1e-6.
        assert!((11.7..80.1).contains(&statistic), "{statistic} at {temperature}");
    }
}

#[test]
fn tokens_below_the_first_threshold_are_drawn_too() {
    // A third of the probability is in two hundred tokens, six below the largest.
    let logits: Vec<f32> = (0..201).map(|token| if token == 77 { 6.0 } else { 0.0 }).collect();
    let params = SamplingParams { top_p: 0.9, ..SamplingParams::default() };
    let mut others = 0;
    for position in 0..300 {
        let (drawn, _) = listed::draw(&params, &logits, position);
        assert_eq!(drawn, sampled(&params, &logits, position).ok());
        others += usize::from(drawn != Some(77));
    }
    assert!((45..130).contains(&others), "{others}");
}

/// The definition of the filters, with a sort of the whole vocabulary.
fn filtered_by_sorting(logits: &[f32], params: &SamplingParams) -> Vec<u32> {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let weight = |logit: f32| math::exp((f64::from(logit) - max) / f64::from(params.temperature));
    let mut list: Vec<Candidate> = logits
        .iter()
        .enumerate()
        .filter(|(_, logit)| **logit > f32::NEG_INFINITY)
        .map(|(token, logit)| Candidate {
            token: token as u32,
            logit: *logit,
            weight: weight(*logit),
            is_certain: true,
        })
        .collect();
    list.sort_by(|a, b| b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token)));
    if params.top_k > 0 && params.top_k < list.len() {
        let least = list[params.top_k - 1].logit;
        list.retain(|candidate| candidate.logit >= least);
    }
    if params.top_p < 1.0 {
        let mut by_id = list.clone();
        by_id.sort_by_key(|candidate| candidate.token);
        let total: f64 = by_id.iter().map(|candidate| candidate.weight).sum();
        let mut before = 0.0;
        list.retain(|candidate| {
            let keep = before < f64::from(params.top_p) * total;
            before += candidate.weight;
            keep
        });
    }
    list.retain(|candidate| candidate.weight >= f64::from(params.min_p));
    let mut tokens: Vec<u32> = list.iter().map(|candidate| candidate.token).collect();
    tokens.sort_unstable();
    tokens
}

proptest! {
    #[test]
    fn filters_keep_the_same_tokens_as_sorting(
        // Few distinct values, so that there are many ties; enough tokens for several rounds of top-p.
        logits in prop::collection::vec(
            prop_oneof![
                8 => (-20i8..20).prop_map(|logit| f32::from(logit) / 4.0),
                4 => -9.0f32..9.0,
                1 => Just(f32::NEG_INFINITY),
            ],
            1..1500,
        ),
        top_k in prop_oneof![Just(0usize), 1usize..40, 1usize..2000],
        top_p in prop_oneof![Just(1.0f32), 0.001f32..1.0],
        min_p in prop_oneof![Just(0.0f32), 0.0f32..=1.0],
        temperature in 0.05f32..20.0,
        position in 0usize..1000,
    ) {
        prop_assume!(logits.iter().any(|logit| logit.is_finite()));
        let params = SamplingParams { top_k, top_p, min_p, temperature, ..Default::default() };
        let mut scratch = top_k_top_p::Scratch::default();
        let kept = candidates(&logits[..], &params, None, &mut scratch).expect("the logits are finite");
        prop_assert!(!kept.lacks_some, "all logits are there");
        let tokens: Vec<u32> = kept.kept.iter().map(|candidate| candidate.token).collect();
        prop_assert_eq!(&tokens, &filtered_by_sorting(&logits, &params));
        let value = |token: &u32| f64::from(logits[*token as usize]) + f64::from(temperature) * noise(position, *token);
        let first = tokens.iter().copied().reduce(|a, b| if value(&b) > value(&a) { b } else { a });
        prop_assert_eq!(sampled(&params, &logits, position).ok(), first);
    }

    #[test]
    fn largest_logits_draw_the_same_token_as_all(
        logits in prop::collection::vec((-20i8..20).prop_map(|logit| f32::from(logit) / 4.0), 1..300),
        temperature in prop_oneof![Just(0.0f32), 0.1f32..3.0],
        (top_k, top_p) in prop_oneof![(1usize..20, 0.01f32..=1.0), Just((0, 1.0))],
        min_p in prop_oneof![Just(0.0f32), 0.0f32..=1.0],
        penalty in prop_oneof![Just(1.0f32), 1.0f32..3.0, 0.3f32..1.0],
        bias in prop_oneof![-9.0f32..=0.0, 0.0f32..9.0],
        refused in prop::collection::vec(0u32..300, 0..5),
        position in 0usize..99,
    ) {
        let params = SamplingParams {
            temperature, top_k, top_p, min_p, repetition_penalty: penalty,
            logit_bias: BTreeMap::from([(7, bias), (11, bias), (13, -bias)]),
            ..Default::default()
        };
        let counts = TokenCounts::new(&params, &[0, 3, 70]);
        let allowed = AllowedTokens::all_but(logits.len(), refused);
        let metadata = RowMetadata { allowed: Some(&allowed), ..metadata(&params, &counts, position) };
        let mut row = Listed::new(&logits, 1.0);
        let drawn = sample(&mut row, &metadata, None, &mut Scratch::default());
        prop_assert!(!row.took_all && row.thresholds == 0, "the first answer decides");
        prop_assert_eq!(drawn, of_all(&logits, &metadata));
    }

    /// Few allowed tokens: their logits alone are asked for.
    #[test]
    fn few_allowed_tokens_draw_the_same_token_as_all(
        logits in prop::collection::vec((-20i8..20).prop_map(|logit| f32::from(logit) / 4.0), 1..300),
        mask in prop::collection::vec(prop_oneof![Just(0u32), any::<u32>(), Just(1)], 10),
        temperature in prop_oneof![Just(0.0f32), 0.1f32..3.0],
        top_k in prop_oneof![Just(0usize), 1usize..9],
        top_p in prop_oneof![Just(1.0f32), 0.01f32..=1.0],
        min_p in prop_oneof![Just(0.0f32), 0.0f32..=1.0],
        penalty in prop_oneof![Just(1.0f32), 0.3f32..3.0],
        bias in -9.0f32..9.0,
        position in 0usize..99,
    ) {
        let params = SamplingParams {
            temperature, top_k, top_p, min_p, repetition_penalty: penalty,
            logit_bias: BTreeMap::from([(7, bias), (70, -bias)]),
            ..Default::default()
        };
        let counts = TokenCounts::new(&params, &[0, 3, 70]);
        let allowed = AllowedTokens::of_mask(&mask, logits.len());
        let metadata = RowMetadata { allowed: Some(&allowed), ..metadata(&params, &counts, position) };
        let mut row = Listed::new(&logits, 1.0);
        let drawn = sample(&mut row, &metadata, None, &mut Scratch::default());
        prop_assert!(!row.took_all && row.thresholds == 0);
        prop_assert_eq!(drawn, of_all(&logits, &metadata));
    }

    #[test]
    fn thresholds_draw_the_same_token_as_all_logits(
        logits in prop::collection::vec(prop_oneof![
            3 => (-60i8..20).prop_map(|logit| f32::from(logit) / 4.0), 1 => -15.0f32..5.0,
        ], 1..400),
        temperature in 0.1f32..3.0,
        top_p in prop_oneof![0.01f32..=0.99, 0.9999f32..0.999999],
        min_p in prop_oneof![Just(0.0f32), 0.0f32..=0.3],
        penalty in prop_oneof![Just(1.0f32), 1.0f32..3.0, 0.3f32..1.0],
        bias in prop_oneof![Just(0.0f32), 0.0f32..9.0],
        looseness in prop_oneof![Just(1.0f64), 1.0f64..6.0],
        position in 0usize..99,
    ) {
        let params = SamplingParams {
            temperature, top_p, min_p, repetition_penalty: penalty,
            logit_bias: BTreeMap::from([(7, bias), (70, -bias)]),
            ..Default::default()
        };
        let counts = TokenCounts::new(&params, &[0, 3, 70]);
        let allowed = AllowedTokens::all_but(logits.len(), [5]);
        let metadata = RowMetadata { allowed: Some(&allowed), ..metadata(&params, &counts, position) };
        let mut row = Listed::new(&logits, looseness);
        let drawn = sample(&mut row, &metadata, None, &mut Scratch::default());
        prop_assert!(row.thresholds <= THRESHOLDS.len(), "each threshold is lower");
        prop_assert_eq!(drawn, of_all(&logits, &metadata));
    }

    #[test]
    fn logits_of_any_bits_give_a_token_or_an_error(
        bits in prop::collection::vec(any::<u32>(), 0..60),
        temperature in prop_oneof![Just(0.0f32), Just(f32::MIN_POSITIVE), 0.1f32..3.0],
        top_k in 0usize..10,
        top_p in 0.01f32..=1.0,
        penalty in prop_oneof![Just(1.0f32), f32::MIN_POSITIVE..=f32::MAX],
        logprobs in prop::option::of(0usize..4),
    ) {
        let logits: Vec<f32> = bits.iter().map(|bits| f32::from_bits(*bits)).collect();
        let params = SamplingParams {
            temperature, top_k, top_p, logprobs, repetition_penalty: penalty, ..Default::default()
        };
        let counts = TokenCounts::new(&params, &[0, 3, 70]);
        let allowed = AllowedTokens::all_but(logits.len(), [2]);
        let metadata = RowMetadata { allowed: Some(&allowed), ..metadata(&params, &counts, 1) };
        if let Ok(drawn) = of_all(&logits, &metadata) {
            prop_assert!((drawn.token as usize) < bits.len());
        }
    }
}
