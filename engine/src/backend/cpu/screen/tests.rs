//! Screened logits compared with the whole head.

use super::{
    super::{HeadMode, head::Head},
    copies::can_screen,
    *,
};
use crate::{
    backend::Logits,
    files::{Dense, DenseType},
    kernels::{Isa, float::FloatKernels, screen::six},
    sampling::{AllowedTokens, GumbelNoise, LogitsRow as _, Remainder, Threshold},
};

const VOCAB: usize = 700;
const WIDTH: usize = 100;

fn wave(i: usize) -> f32 {
    ((i.wrapping_mul(i).wrapping_mul(40_503) >> 7) % 2001) as f32 / 1000.0 - 1.0
}

fn head(weights: &[f32], mode: HeadMode) -> Head {
    let bytes = bytemuck::cast_slice(weights);
    let rows = weights.len() / WIDTH;
    Head::from_dense(Dense { dtype: DenseType::F32, rows, cols: WIDTH, bytes }, mode, || {})
}

/// Returns the logits of the whole head, and the logits that the screen computes for a question of each row.
fn both(isa: Isa, weights: &[f32], xs: &[f32], questions: &[Largest]) -> (Vec<f32>, Vec<f32>) {
    let (whole, lists, _) = found(isa, weights, xs, questions, None);
    let mut screened = vec![f32::NEG_INFINITY; whole.len()];
    for (list, screened) in lists.iter().zip(screened.chunks_exact_mut(VOCAB)) {
        list.iter().for_each(|found| screened[found.id as usize] = found.logit);
    }
    (whole, screened)
}

/// Returns the logits of the whole head, what the screen finds for a question of each row, and with a threshold what it finds
/// after that in each row that keeps its estimates.
#[expect(clippy::type_complexity, reason = "results to take apart")]
fn found(
    isa: Isa,
    weights: &[f32],
    xs: &[f32],
    questions: &[Largest],
    threshold: Option<Threshold>,
) -> (Vec<f32>, Vec<Vec<TokenLogit>>, Vec<Option<(Remainder, Vec<TokenLogit>)>>) {
    let (n, vocab) = (xs.len() / WIDTH, weights.len() / WIDTH);
    let kernels = FloatKernels::for_isa(isa).expect("the ISA is available");
    let (head, mut scratch) = (head(weights, HeadMode::Exact), Vec::new());
    let mut whole = vec![0.0; n * vocab];
    for (x, logits) in xs.chunks_exact(WIDTH).zip(whole.chunks_exact_mut(vocab)) {
        head.logits(kernels, 0, vocab, x, &mut scratch, logits);
    }
    let (given, allowed) = (&[][..], &[][..]);
    let input = ScreenInput { head: &head, kernels, isa, xs, questions, given, allowed };
    let screen = head.screen().expect("the vocabulary is large enough");
    let (mut pool, mut state) = (Pool::new(None, 2), ScreenState::default());
    let mut logits = Logits::default();
    logits.clear(vocab);
    logits.lay_out(questions.iter().map(|_| false));
    let kept = logits.keep(questions.iter().map(|question| question.others_follow));
    screen.largest(&input, kept, &mut pool, &mut state);
    let lists: Vec<Vec<TokenLogit>> = state.found().map(<[_]>::to_vec).collect();
    assert_eq!(lists.len(), n);
    let mut ascending = lists.iter();
    assert!(ascending.all(|list| list.is_sorted_by(|a, b| a.id < b.id)), "without duplicates");
    let further = |row| {
        let (kept, questions) = (logits.row(row).1?, &[Largest::logits(1)]);
        let input = ScreenInput { xs: kept.hidden, questions, ..input };
        let rest = screen.at_least(&input, kept, threshold?, &mut pool, &mut state)?;
        Some((rest, state.found().flatten().copied().collect()))
    };
    let further = (0..n).map(further).collect();
    (whole, lists, further)
}

#[test]
fn logits_of_given_tokens_are_those_of_the_whole_head() {
    let weights: Vec<f32> = (0..VOCAB * WIDTH).map(wave).collect();
    let x: Vec<f32> = (0..WIDTH).map(|i| wave(i + 77)).collect();
    let spread: Vec<u32> = (0..VOCAB as u32).step_by(97).collect();
    let close: Vec<u32> = (60..90).collect();
    for isa in isas() {
        let kernels = FloatKernels::for_isa(isa).expect("the ISA is available");
        let head = head(&weights, HeadMode::Exact);
        let mut whole = vec![0.0; VOCAB];
        head.logits(kernels, 0, VOCAB, &x, &mut Vec::new(), &mut whole);
        let screen = head.screen().expect("the vocabulary is large enough");
        let (mut pool, mut state) = (Pool::new(None, 2), ScreenState::default());
        for questions in [&[][..], &[Largest::logits(1)]] {
            let xs = x.repeat(questions.len() + 2);
            let (given, allowed) = (&[&spread[..], &close][..], &[][..]);
            let input =
                ScreenInput { head: &head, kernels, isa, xs: &xs, questions, given, allowed };
            screen.largest(&input, &mut ScreenedRows::default(), &mut pool, &mut state);
            for (tokens, row) in given.iter().zip(questions.len()..) {
                let logit = |&id: &u32| TokenLogit { id, logit: whole[id as usize] };
                let expected: Vec<TokenLogit> = tokens.iter().map(logit).collect();
                assert_eq!(state.list(row), expected, "{isa}");
            }
        }
    }
}

/// Checks every row for the largest logits; returns the number of computed logits.
fn check(isa: Isa, weights: &[f32], xs: &[f32], count: usize) -> usize {
    check_questions(isa, weights, xs, &vec![Largest::logits(count); xs.len() / WIDTH])
}

/// Checks every row; returns the number of computed logits.
fn check_questions(isa: Isa, weights: &[f32], xs: &[f32], questions: &[Largest]) -> usize {
    let (whole, screened) = both(isa, weights, xs, questions);
    let mut computed = 0;
    let rows = whole.chunks_exact(VOCAB).zip(screened.chunks_exact(VOCAB));
    for ((whole, screened), question) in rows.zip(questions) {
        for (token, (exact, found)) in whole.iter().zip(screened).enumerate() {
            let is_same = found.to_bits() == exact.to_bits();
            assert!(is_same || *found == f32::NEG_INFINITY, "token {token}");
            computed += usize::from(is_same);
        }
        let mut first = Vec::new();
        let Ok(()) = whole.to_vec().largest(question, &mut first);
        for TokenLogit { id, logit } in first {
            assert_eq!(
                screened[id as usize].to_bits(),
                logit.to_bits(),
                "token {id}, {question:?}"
            );
        }
    }
    computed
}

pub(super) fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available())
}

#[test]
fn largest_logits_are_exact_and_most_others_are_not_computed() {
    let weights: Vec<f32> = (0..VOCAB * WIDTH).map(wave).collect();
    for (isa, n, count) in
        isas().flat_map(|isa| [(isa, 1, 1), (isa, 3, 20), (isa, 9, 1), (isa, 9, 20)])
    {
        let xs: Vec<f32> = (0..n * WIDTH).map(|i| wave(i + 31) * 3.0).collect();
        let computed = check(isa, &weights, &xs, count);
        assert!(computed < n * (count + VOCAB / 8), "{isa}, {n} rows, {count}: {computed}");
    }
}

#[test]
fn all_of_equal_logits_are_found() {
    let weights: Vec<f32> = (0..VOCAB * WIDTH).map(|i| wave(i % (50 * WIDTH))).collect();
    for isa in isas() {
        let xs: Vec<f32> = (0..5 * WIDTH).map(|i| wave(i + 7)).collect();
        // Every logit occurs fourteen times.
        assert!(check(isa, &weights, &xs, 1) >= 5 * 14);
        check(isa, &weights, &xs, 20);
        for n in [1, 3] {
            assert_eq!(check(isa, &weights, &vec![0.0; n * WIDTH], 1), n * VOCAB, "{isa}");
        }
    }
}

#[test]
fn outliers_zeros_nan_and_infinity_do_not_change_the_result() {
    for isa in isas() {
        let mut weights: Vec<f32> = (0..VOCAB * WIDTH).map(wave).collect();
        weights[3 * WIDTH..4 * WIDTH].fill(0.0);
        weights[5 * WIDTH + 3] = 1e6;
        weights[6 * WIDTH + 3] = f32::NAN;
        weights[7 * WIDTH + 9] = f32::INFINITY;
        let mut xs: Vec<f32> = (0..6 * WIDTH).map(|i| wave(i + 11)).collect();
        xs[WIDTH..2 * WIDTH].fill(0.0);
        xs[2 * WIDTH + 1] = 1e9;
        xs[3 * WIDTH + 1] = f32::NAN;
        xs[4 * WIDTH + 1] = f32::INFINITY;
        let (whole, screened) = both(isa, &weights, &xs, &[Largest::logits(1); 6]);
        for (token, (whole, screened)) in whole.iter().zip(&screened).enumerate() {
            let same = whole.to_bits() == screened.to_bits() || whole.is_nan() && screened.is_nan();
            assert!(same || *screened == f32::NEG_INFINITY, "token {token}");
            assert!(same || !whole.is_nan(), "token {token}");
        }
        for (whole, screened) in whole.chunks_exact(VOCAB).zip(screened.chunks_exact(VOCAB)) {
            let largest = |logits: &[f32]| logits.iter().fold(f32::MIN, |a, b| a.max(*b));
            assert_eq!(largest(whole).to_bits(), largest(screened).to_bits());
        }
    }
}

#[test]
fn tokens_with_the_largest_noise_are_found_and_few_others_are_computed() {
    let weights: Vec<f32> = (0..VOCAB * WIDTH).map(wave).collect();
    for (isa, n) in isas().flat_map(|isa| [(isa, 1), (isa, 5)]) {
        for (temperature, factor) in
            [(0.3, 0.3), (1.0, 0.3), (20.0, 3.0), (1e30, 1.0), (1e-30, 1.0)]
        {
            let mut computed = 0;
            for position in 0..20 {
                let xs: Vec<f32> =
                    (0..n * WIDTH).map(|i| wave(i + 31 * position) * factor).collect();
                let question = |row| {
                    let noise = Some(GumbelNoise::new(1, row, position as u64, temperature));
                    Largest { noise, ..Largest::logits(1 + position % 3) }
                };
                let questions: Vec<Largest> = (0..n as u32).map(question).collect();
                computed += check_questions(isa, &weights, &xs, &questions);
            }
            assert!(computed < 20 * n * VOCAB / 8, "{isa}, {n} rows, {temperature}: {computed}");
        }
    }
}

#[test]
fn tokens_within_a_distance_of_the_largest_are_found() {
    let weights: Vec<f32> = (0..VOCAB * WIDTH).map(wave).collect();
    for isa in isas() {
        let xs: Vec<f32> = (0..7 * WIDTH).map(|i| wave(i + 5) * 2.0).collect();
        for within in [0.0, 1e-3, 1.0, 7.5, 1e9, f32::INFINITY] {
            let questions = [1, 2, 40].map(|count| Largest { within, ..Largest::logits(count) });
            for questions in [&questions[..1], &[&questions[..], &questions[..]].concat()] {
                check_questions(isa, &weights, &xs[..questions.len() * WIDTH], questions);
            }
        }
    }
}

#[test]
fn further_tokens_are_found_and_the_weight_of_others_is_bounded() {
    // The latter is more than one task.
    for (isa, n, vocab) in
        isas().flat_map(|isa| [(isa, 1, VOCAB), (isa, 4, VOCAB), (isa, 1, 4000), (isa, 4, 4000)])
    {
        let weights: Vec<f32> = (0..vocab * WIDTH).map(wave).collect();
        let xs: Vec<f32> = (0..n * WIDTH).map(|i| wave(i + 3)).collect();
        // Rows that keep their estimates stand among others.
        let keeps = |row| n == 1 || row % 4 != 1;
        let question = |row| Largest { others_follow: keeps(row), ..Largest::logits(2) };
        let questions: Vec<Largest> = (0..n).map(question).collect();
        for (temperature, logit, close) in [
            (1.0, 9.0, 0.0),
            (1.0, 9.0, 2.0),
            (1.0, 30.0, 5.0),
            (0.2, 12.0, 0.5),
            (5.0, 8.0, 9.0),
            (1e-3, 7.9, 0.1),
        ] {
            let threshold = Threshold { logit, close, temperature: Some(temperature) };
            let (whole, _, further) = found(isa, &weights, &xs, &questions, Some(threshold));
            for (row, (whole, further)) in whole.chunks_exact(vocab).zip(further).enumerate() {
                assert_eq!(further.is_some(), keeps(row), "row {row}");
                let Some((rest, list)) = further else { continue };
                let mut screened = vec![f32::NEG_INFINITY; vocab];
                for token in &list {
                    screened[token.id as usize] = token.logit;
                    assert_eq!(token.logit.to_bits(), whole[token.id as usize].to_bits());
                }
                assert_eq!(rest.below, logit);
                let left_out =
                    whole.iter().zip(&screened).filter(|(_, s)| **s == f32::NEG_INFINITY);
                let exact: f64 = left_out
                    .map(|(other, _)| {
                        assert!(*other < logit, "{isa}: {other} was left out");
                        ((f64::from(*other) - f64::from(logit)) / f64::from(temperature)).exp()
                    })
                    .sum();
                assert!(exact <= rest.weight, "{isa}, {n} rows: {exact} > {}", rest.weight);
                let is_close = rest.weight <= 4.0 * exact + 1e-30;
                assert!(temperature < 1.0 || is_close, "{isa}: {}, {exact}", rest.weight);
            }
        }
        for logit in [-1e9, 0.0] {
            let most = Threshold { logit, close: 0.0, temperature: Some(1.0) };
            let (_, _, further) = found(isa, &weights, &xs, &questions, Some(most));
            assert!(further.iter().all(Option::is_none), "all logits are faster than so many");
        }
    }
}

#[test]
fn a_step_reads_one_copy_and_its_stats() {
    let weights: Vec<f32> = (0..VOCAB * WIDTH).map(wave).collect();
    let head = head(&weights, HeadMode::Exact);
    let screen = head.screen().expect("the vocabulary is large enough");
    for isa in isas() {
        let row = if screen::has_six(isa) { six::size(screen::STRIDE) } else { screen::STRIDE };
        // Scale, sum, error and norm.
        assert_eq!(screen.step_bytes(isa), VOCAB * (row + 4 * 4), "{isa}");
    }
}

#[test]
fn small_vocabularies_and_wide_rows_are_not_screened() {
    let can = |rows, cols| can_screen(Dense { dtype: DenseType::F32, rows, cols, bytes: &[] });
    assert!(can(512, screen::LEN_MAX));
    assert!(!can(511, screen::LEN_MAX), "the whole head is fast enough");
    assert!(!can(512, screen::LEN_MAX + 1), "sums could overflow");
}

#[test]
fn largest_of_the_tokens_that_may_be_drawn_are_found() {
    const COUNT: usize = 5;
    let weights: Vec<f32> = (0..VOCAB * WIDTH).map(wave).collect();
    let xs: Vec<f32> = (0..2 * WIDTH).map(|i| wave(i + 31)).collect();
    for isa in isas() {
        let kernels = FloatKernels::for_isa(isa).expect("the ISA is available");
        let head = head(&weights, HeadMode::Exact);
        let mut whole = vec![0.0; VOCAB];
        head.logits(kernels, 0, VOCAB, &xs[WIDTH..], &mut Vec::new(), &mut whole);
        let mut descending: Vec<u32> = (0..VOCAB as u32).collect();
        descending.sort_by(|a, b| whole[*b as usize].total_cmp(&whole[*a as usize]));
        // The largest of all are refused, and every third of the others.
        let refused = descending.iter().copied().take(40).chain((0..VOCAB as u32).step_by(3));
        let refused: Vec<u32> = refused.collect();
        let mask = AllowedTokens::all_but(VOCAB, refused.iter().copied());
        let question = Largest { refused: refused.len(), ..Largest::logits(COUNT + refused.len()) };
        let questions = [Largest::logits(1), question.of_allowed()];
        let allowed = &[(1, &mask)][..];
        let input = ScreenInput {
            head: &head,
            kernels,
            isa,
            xs: &xs,
            questions: &questions,
            given: &[],
            allowed,
        };
        let (mut pool, mut state) = (Pool::new(None, 2), ScreenState::default());
        let mut logits = Logits::default();
        logits.clear(VOCAB);
        logits.lay_out([false, false]);
        let kept = logits.keep([false, false]);
        head.screen().expect("it is large enough").largest(&input, kept, &mut pool, &mut state);
        let found: Vec<u32> =
            state.found().nth(1).expect("two rows").iter().map(|t| t.id).collect();
        let expected = descending.iter().filter(|token| mask.contains(**token)).take(COUNT);
        assert!(expected.into_iter().all(|token| found.contains(token)), "{isa}: {found:?}");
        assert!(found.iter().all(|token| mask.contains(*token)), "{isa}: {found:?}");
        assert!(found.len() < 200, "{isa}: {}", found.len());
    }
}
