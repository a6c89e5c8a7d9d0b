//! The draw: from a row of logits to a token.

use std::borrow::BorrowMut;

use super::{
    Distribution, LogitsRow, Logprobs, Remainder, RowMetadata, Threshold, TokenLogit, gumbel,
    logit_bias,
    logits::{FewLogits, LogitSet},
    top_k_top_p::{self, Candidate, Filtered},
};

/// The thresholds that top-p asks for, while a draw is not decided, in units of the temperature: how far they are at least below the
/// largest logit, and below that of the first token, which has the largest sum of logit and noise; and the further distance of
/// logits that are bounded closely. The tokens around the first one and above decide most draws that take it, so the first threshold
/// does not ask for the weight of the others. A draw that refuses it needs to know that all others weigh little.
pub(super) const THRESHOLDS: [(f32, f32, f32); 3] =
    [(0.0, 1.0, 0.0), (10.0, 2.0, 1.0), (13.0, 4.0, 1.0)];

/// Logits that no token can be drawn from. The request fails; others continue.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SampleError {
    /// The model computed NaN or +∞.
    #[error("logit of token {token} is {logit}")]
    NotFinite {
        /// The first such token.
        token: u32,
        /// Its logit.
        logit: f32,
    },
    /// Every token has probability zero.
    #[error("every logit is negative infinity")]
    NothingLeft,
}

/// Why no token was drawn.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum DrawError<E> {
    /// There is none to draw.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// The row did not answer.
    #[error(transparent)]
    Row(E),
}

/// A drawn token.
#[derive(Debug, Clone, PartialEq)]
pub struct Drawn {
    /// The token.
    pub token: u32,
    /// Log-probabilities, if requested.
    pub logprobs: Option<Logprobs>,
}

/// Buffers of draws, reused from token to token.
#[derive(Debug, Clone, Default)]
pub struct Scratch {
    filters: top_k_top_p::Scratch,
    some: Vec<TokenLogit>,
    raised: Vec<u32>,
}

/// What is known of the tokens of a position besides some logits.
#[derive(Debug, Clone, Copy)]
struct PartialRow {
    /// The other tokens.
    remainder: Remainder,
    /// The token with the largest sum of logit and noise.
    first: u32,
    /// Number of thresholds asked for.
    asked: usize,
}

/// What some logits decide.
enum Decision<T> {
    /// All that was to be decided.
    Made(T),
    /// Not which token is drawn.
    Open {
        /// The token with the largest sum of logit and noise.
        first: u32,
        /// What may decide it; all logits, if nothing less does.
        threshold: Option<Threshold>,
    },
}

/// Draws a token from a row. It asks for as few logits as decide the draw. `distribution` is the row's, if the step reported it.
///
/// With top-p, the token with the largest noise is drawn if the tokens with larger logits weigh less than `top_p` of all. The
/// first question finds that token; further ones find the most probable tokens, and where these do not decide the draw a bound on the
/// weight of all others.
///
/// # Errors
/// If a logit is NaN or +∞, every logit is −∞, or the row does not answer.
pub fn sample<R: LogitsRow + ?Sized>(
    row: &mut R,
    metadata: &RowMetadata<'_>,
    distribution: Option<&Distribution>,
    scratch: &mut Scratch,
) -> Result<Drawn, DrawError<R::Error>> {
    if let Some(tokens) =
        metadata.few_allowed().filter(|tokens| !row.is_whole() && row.has_found(tokens))
    {
        return sample_few(row, tokens, metadata, scratch);
    }
    if !row.is_whole() {
        let mut some = std::mem::take(&mut scratch.some);
        let drawn = sample_some(row, metadata, distribution, &mut some, scratch);
        scratch.some = some;
        if let Some(drawn) = drawn? {
            return Ok(drawn);
        }
    }
    let all = row.all().map_err(DrawError::Row)?;
    match draw(all, metadata, None, distribution, scratch)? {
        Decision::Made(drawn) => Ok(drawn),
        Decision::Open { .. } => unreachable!("all logits decide every draw"),
    }
}

/// Draws one of few allowed tokens. All others have the logit −∞.
fn sample_few<R: LogitsRow + ?Sized>(
    row: &mut R,
    tokens: &[u32],
    metadata: &RowMetadata<'_>,
    scratch: &mut Scratch,
) -> Result<Drawn, DrawError<R::Error>> {
    let mut few = FewLogits(std::mem::take(&mut scratch.some));
    few.0.clear();
    let drawn = match row.logits_of(tokens, &mut few.0) {
        Ok(()) => {
            let metadata = RowMetadata { allowed: None, ..*metadata };
            draw(&mut few, &metadata, None, None, scratch).map_err(DrawError::from)
        }
        Err(error) => Err(DrawError::Row(error)),
    };
    scratch.some = few.0;
    match drawn? {
        Decision::Made(drawn) => Ok(drawn),
        Decision::Open { .. } => unreachable!("all logits decide every draw"),
    }
}

/// Draws a token from some logits; `None` if all are needed.
fn sample_some<R: LogitsRow + ?Sized>(
    row: &mut R,
    metadata: &RowMetadata<'_>,
    distribution: Option<&Distribution>,
    some: &mut Vec<TokenLogit>,
    scratch: &mut Scratch,
) -> Result<Option<Drawn>, DrawError<R::Error>> {
    row.largest(&metadata.largest(), some).map_err(DrawError::Row)?;
    let mut known = None;
    for asked in 1.. {
        add_raised(row, metadata, some, &mut scratch.raised).map_err(DrawError::Row)?;
        let (first, threshold) = match draw(&mut some[..], metadata, known, distribution, scratch)?
        {
            Decision::Made(drawn) => return Ok(Some(drawn)),
            Decision::Open { threshold: None, .. } => return Ok(None),
            Decision::Open { first, threshold: Some(threshold) } => (first, threshold),
        };
        match row.at_least(threshold, some).map_err(DrawError::Row)? {
            Some(remainder) => known = Some(PartialRow { remainder, first, asked }),
            None => return Ok(None),
        }
    }
    unreachable!("thresholds end")
}

/// Adds the tokens that parameters may raise to those that were found, by ascending token.
fn add_raised<R: LogitsRow + ?Sized>(
    row: &mut R,
    metadata: &RowMetadata<'_>,
    found: &mut Vec<TokenLogit>,
    raised: &mut Vec<u32>,
) -> Result<(), R::Error> {
    metadata.list_raised(raised);
    raised.retain(|token| found.binary_search_by_key(token, |found| found.id).is_err());
    if !raised.is_empty() {
        row.logits_of(raised, found)?;
        found.sort_unstable_by_key(|found| found.id);
    }
    Ok(())
}

/// Draws from logits of the whole vocabulary, or of those tokens that were asked for; overwrites them.
fn draw<C: LogitSet + ?Sized>(
    logits: &mut C,
    metadata: &RowMetadata<'_>,
    known: Option<PartialRow>,
    distribution: Option<&Distribution>,
    scratch: &mut Scratch,
) -> Result<Decision<Drawn>, SampleError> {
    let params = metadata.params;
    let raw = match params.logprobs {
        None => None,
        Some(top) => {
            let (_, largest) = top_k_top_p::largest(logits)?;
            let distribution = distribution.cloned().unwrap_or_else(|| {
                assert!(logits.is_whole(), "log-probabilities need all logits");
                Distribution::from_logits(logits.entries(), largest, top)
            });
            Some((distribution, logits.to_owned()))
        }
    };
    if let Some(allowed) = metadata.allowed {
        logits.refuse(allowed);
    }
    logit_bias::apply(params, logits);
    metadata.counts().apply(params, logits);
    let token = if params.temperature == 0.0 {
        top_k_top_p::largest(logits)?.0
    } else {
        match draw_with_noise(logits, metadata, known, scratch)? {
            Decision::Made(token) => token,
            Decision::Open { first, threshold } => return Ok(Decision::Open { first, threshold }),
        }
    };
    let logprobs = raw.map(|(distribution, mut raw)| {
        let logit = raw.borrow_mut().logit_mut(token).copied();
        Logprobs::from_distribution(&distribution, logit.unwrap_or(f32::NEG_INFINITY))
    });
    Ok(Decision::Made(Drawn { token, logprobs }))
}

/// Draws at a temperature above 0 from changed logits.
fn draw_with_noise<C: LogitSet + ?Sized>(
    logits: &C,
    metadata: &RowMetadata<'_>,
    known: Option<PartialRow>,
    scratch: &mut Scratch,
) -> Result<Decision<u32>, SampleError> {
    let (params, noise) = (metadata.params, metadata.noise());
    let (max, temperature) = (top_k_top_p::largest(logits)?.1, params.temperature);
    let open = |first: u32| {
        let logit = logits.entries().find(|choice| choice.id == first).map_or(max, |c| c.logit);
        let asked = known.map_or(0, |known| known.asked);
        let threshold = THRESHOLDS.get(asked).map(|(below_max, below_first, close)| Threshold {
            logit: (max - below_max * temperature).min(logit - below_first * temperature),
            close: close * temperature,
            temperature: (asked > 0).then_some(temperature),
        });
        Ok(Decision::Open { first, threshold })
    };
    // Top-p finds the first token before it asks for those that may weigh more.
    let finds_first = params.top_p < 1.0 && params.top_k == 0 && !logits.is_whole();
    let finds_first = finds_first && known.is_none();
    let first = if params.has_filters() && !finds_first {
        let Filtered { kept, lacks_some } = top_k_top_p::candidates(
            logits,
            params,
            known.map(|known| known.remainder),
            &mut scratch.filters,
        )?;
        let logit = |kept: &Candidate| TokenLogit { id: kept.token, logit: kept.logit };
        let is_certain = |first: u32| {
            let place = kept.binary_search_by_key(&first, |kept| kept.token);
            place.is_ok_and(|place| kept[place].is_certain)
        };
        // The first of all tokens is the first of those that are kept, if it is one of them.
        let of_all = known.map(|known| known.first);
        let of_all = of_all.filter(|first| lacks_some || is_certain(*first));
        let first = of_all.or_else(|| gumbel::argmax(kept.iter().map(logit), &noise));
        if let Some(known) = known.filter(|_| !first.is_some_and(is_certain)) {
            return open(known.first);
        }
        first
    } else {
        gumbel::argmax(logits.entries(), &noise)
    };
    let token = first.ok_or(SampleError::NothingLeft)?;
    if finds_first {
        return open(token);
    }
    Ok(Decision::Made(token))
}
