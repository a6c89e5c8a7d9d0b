//! Sampling parameters of a request, and their ranges.

use std::collections::BTreeMap;

/// Most choices per request.
pub const MAX_CHOICES: usize = 128;
/// Most stop strings, and most stop tokens, per request.
pub const MAX_STOPS: usize = 64;
/// Longest stop string, in bytes.
pub const STOP_BYTES_MAX: usize = 1024;
/// Most alternatives reported with a token.
pub const MAX_TOP_LOGPROBS: usize = 20;

/// Sampling parameters of one request. The defaults sample from the model's own distribution.
///
/// A next token is drawn in this order: logit bias, repetition penalty, presence and frequency
/// penalties, temperature, top-k, top-p, min-p.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// Most tokens to generate; the context may allow fewer.
    pub max_tokens: usize,
    /// Fewest tokens to generate. Until then stop strings are ignored, and stop tokens and end-of-sequence
    /// tokens cannot be drawn (except end-of-sequence tokens with `ignore_eos`).
    pub min_tokens: usize,
    /// Divisor of the logits; 0 takes the most probable token.
    pub temperature: f32,
    /// Keep the `k` most probable tokens, and tokens as probable as the last of these; 0 is off.
    pub top_k: usize,
    /// Keep the most probable tokens until their sum reaches this; 1 is off, and 0 takes the most probable token.
    pub top_p: f32,
    /// Drop tokens less probable than this share of the most probable one; 0 is off.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt or output; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens in the output.
    pub presence_penalty: f32,
    /// Subtracted from the logits of tokens in the output, once per occurrence.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens.
    pub logit_bias: BTreeMap<u32, f32>,
    /// Key of the random numbers: the same seed draws the same tokens.
    pub seed: u64,
    /// Number of independent choices to generate.
    pub n: usize,
    /// Strings that end the output, which is cut before them.
    pub stop: Vec<String>,
    /// Tokens that end the output; their text is not part of it.
    pub stop_tokens: Vec<u32>,
    /// Whether end-of-sequence tokens do not end the output.
    pub ignore_eos: bool,
    /// Report log-probabilities, with this many of the most probable tokens at each position.
    pub logprobs: Option<usize>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            max_tokens: 256,
            min_tokens: 0,
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: BTreeMap::new(),
            seed: 0,
            n: 1,
            stop: Vec::new(),
            stop_tokens: Vec::new(),
            ignore_eos: false,
            logprobs: None,
        }
    }
}

/// A parameter outside its range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {value}, expected {expected}")]
pub struct InvalidParam {
    /// Name of the field.
    pub field: &'static str,
    /// The offending value.
    pub value: String,
    /// The accepted range.
    pub expected: &'static str,
}

impl SamplingParams {
    /// Greedy decoding of at most `max_tokens` tokens.
    pub fn greedy(max_tokens: usize) -> Self {
        Self { max_tokens, temperature: 0.0, ..Self::default() }
    }

    /// Returns whether top-k, top-p or min-p is on.
    pub fn has_filters(&self) -> bool {
        self.top_k > 0 || self.top_p < 1.0 || self.min_p > 0.0
    }

    /// Checks every field against its range.
    ///
    /// # Errors
    /// The first field outside its range.
    pub fn validate(&self) -> Result<(), InvalidParam> {
        let at_least_one = "an integer of at least 1";
        check(self.max_tokens >= 1, "max_tokens", self.max_tokens, at_least_one)?;
        let fits = self.min_tokens <= self.max_tokens;
        check(fits, "min_tokens", self.min_tokens, "at most max_tokens")?;
        in_range("temperature", self.temperature, 0.0, f32::MAX, "a finite number from 0")?;
        in_range("top_p", self.top_p, 0.0, 1.0, "a number from 0 to 1")?;
        in_range("min_p", self.min_p, 0.0, 1.0, "a number from 0 to 1")?;
        let (lowest, expected) = (f32::MIN_POSITIVE, "a finite number above 0");
        in_range("repetition_penalty", self.repetition_penalty, lowest, f32::MAX, expected)?;
        let expected = "a number from -2 to 2";
        in_range("presence_penalty", self.presence_penalty, -2.0, 2.0, expected)?;
        in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0, expected)?;
        for bias in self.logit_bias.values() {
            in_range("logit_bias", *bias, -100.0, 100.0, "numbers from -100 to 100")?;
        }
        let choices = (1..=MAX_CHOICES).contains(&self.n);
        check(choices, "n", self.n, "an integer from 1 to 128")?;
        self.validate_stops()?;
        let top = self.logprobs.unwrap_or(0);
        check(top <= MAX_TOP_LOGPROBS, "logprobs", top, "an integer from 0 to 20")
    }

    fn validate_stops(&self) -> Result<(), InvalidParam> {
        let count = self.stop.len();
        check(count <= MAX_STOPS, "stop", format_args!("{count} strings"), "at most 64 strings")?;
        for stop in &self.stop {
            let expected = "strings of 1 to 1024 bytes";
            let bytes = stop.len();
            let length = format_args!("a string of {bytes} bytes");
            check((1..=STOP_BYTES_MAX).contains(&bytes), "stop", length, expected)?;
        }
        let count = self.stop_tokens.len();
        let given = format_args!("{count} tokens");
        check(count <= MAX_STOPS, "stop_tokens", given, "at most 64 tokens")
    }
}

fn check(
    valid: bool,
    field: &'static str,
    value: impl std::fmt::Display,
    expected: &'static str,
) -> Result<(), InvalidParam> {
    if valid { Ok(()) } else { Err(InvalidParam { field, value: value.to_string(), expected }) }
}

fn in_range(
    field: &'static str,
    value: f32,
    lowest: f32,
    highest: f32,
    expected: &'static str,
) -> Result<(), InvalidParam> {
    check((lowest..=highest).contains(&value), field, value, expected)
}

// The messages above contain the bounds.
const _: () = assert!(MAX_CHOICES == 128 && MAX_STOPS == 64);
const _: () = assert!(STOP_BYTES_MAX == 1024 && MAX_TOP_LOGPROBS == 20);

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(field: &str, change: impl FnOnce(&mut SamplingParams)) {
        let mut params = SamplingParams::default();
        change(&mut params);
        let error = params.validate().expect_err(field);
        assert_eq!(error.field, field);
        assert!(error.to_string().contains(field), "{error}");
    }

    #[test]
    fn defaults_are_valid() {
        assert_eq!(SamplingParams::default().validate(), Ok(()));
        assert_eq!(SamplingParams::greedy(1).validate(), Ok(()));
    }

    #[test]
    fn field_outside_its_range_is_refused_by_name() {
        refused("max_tokens", |p| p.max_tokens = 0);
        refused("min_tokens", |p| p.min_tokens = 257);
        refused("temperature", |p| p.temperature = -0.1);
        refused("temperature", |p| p.temperature = f32::NAN);
        refused("temperature", |p| p.temperature = f32::INFINITY);
        refused("top_p", |p| p.top_p = -0.1);
        refused("top_p", |p| p.top_p = 1.1);
        refused("min_p", |p| p.min_p = -0.1);
        refused("min_p", |p| p.min_p = 1.5);
        refused("repetition_penalty", |p| p.repetition_penalty = 0.0);
        refused("presence_penalty", |p| p.presence_penalty = 2.5);
        refused("frequency_penalty", |p| p.frequency_penalty = -3.0);
        refused("logit_bias", |p| p.logit_bias = BTreeMap::from([(1, 101.0)]));
        refused("n", |p| p.n = 0);
        refused("n", |p| p.n = 129);
        refused("stop", |p| p.stop = vec![String::new()]);
        refused("stop", |p| p.stop = vec!["x".into(); 65]);
        refused("stop", |p| p.stop = vec!["x".repeat(1025)]);
        refused("stop_tokens", |p| p.stop_tokens = vec![1; 65]);
        refused("logprobs", |p| p.logprobs = Some(21));
    }
}
