//! The sampling parameters of a job and their valid ranges.
//!
//! Names and meanings are OpenAI's where OpenAI has the parameter (`temperature`, `top_p`,
//! `presence_penalty`, `frequency_penalty`, `logit_bias`, `stop`, `n`, `logprobs`), vLLM's for the
//! others (`top_k`, `min_p`, `repetition_penalty`, `stop_token_ids`, `min_tokens`, `ignore_eos`).

use serde::{Deserialize, Serialize};
use tritmill_grammar::Grammar;

/// Tokens that an answer without `max_tokens` is estimated to have.
pub const ANSWER_TOKENS_ESTIMATE: u32 = 256;
/// Highest `max_tokens`.
pub const MAX_TOKENS_LIMIT: u32 = 1 << 20;
/// Maximum number of choices per job.
pub const CHOICES_LIMIT: u32 = 128;
/// Maximum number of stop strings per job.
pub const STOP_LIMIT: usize = 64;
/// Longest stop string in bytes.
pub const STOP_BYTES_LIMIT: usize = 1024;
/// Maximum number of stop tokens per job.
pub const STOP_TOKENS_LIMIT: usize = 64;
/// Maximum number of alternatives per position in logprobs.
pub const TOP_LOGPROBS_LIMIT: u32 = 20;
/// Maximum number of entries of a logit bias.
pub const LOGIT_BIAS_LIMIT: usize = 1024;
/// Maximum of `n × max_tokens × (1 + top_logprobs)`: the tokens that a result can name. Each of the three
/// is within its own range; together they could ask for a result of gigabytes.
pub const RESULT_TOKENS_LIMIT: u64 = 1 << 20;

// The longest single choice is accepted without log probabilities, and some tokens with all of them.
const _: () = assert!(MAX_TOKENS_LIMIT as u64 <= RESULT_TOKENS_LIMIT);
const _: () =
    assert!(CHOICES_LIMIT as u64 * (1 + TOP_LOGPROBS_LIMIT as u64) <= RESULT_TOKENS_LIMIT);

/// Sampling parameters. A job is accepted only if [`Sampling::validate`] succeeds. Default values are
/// not serialized: most are default, and there may be millions of jobs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sampling {
    /// Maximum number of tokens to generate. `None`: up to the end of the context, or the worker's own limit.
    pub max_tokens: Option<u32>,
    /// Minimum number of tokens before an end-of-text token or a stop may end the text.
    #[serde(skip_serializing_if = "is_zero")]
    pub min_tokens: u32,
    /// Temperature; 0 is greedy.
    #[serde(skip_serializing_if = "is_one")]
    pub temperature: f32,
    /// Keep this many of the most likely tokens; 0 keeps all.
    #[serde(skip_serializing_if = "is_zero")]
    pub top_k: u32,
    /// Keep the smallest set of tokens with this probability; 1 keeps all.
    #[serde(skip_serializing_if = "is_one")]
    pub top_p: f32,
    /// Keep tokens with at least this share of the highest probability; 0 keeps all.
    #[serde(skip_serializing_if = "is_zero")]
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens that occurred; 1 is off.
    #[serde(skip_serializing_if = "is_one")]
    pub repetition_penalty: f32,
    /// Subtracted once from the logit of each generated token.
    #[serde(skip_serializing_if = "is_zero")]
    pub presence_penalty: f32,
    /// Subtracted from a token's logit for each time it was generated.
    #[serde(skip_serializing_if = "is_zero")]
    pub frequency_penalty: f32,
    /// Values added to the logits of tokens, by token id.
    #[serde(skip_serializing_if = "is_zero")]
    pub logit_bias: Vec<(u32, f32)>,
    /// Stop strings; the text ends before the first one.
    #[serde(skip_serializing_if = "is_zero")]
    pub stop: Vec<String>,
    /// Stop tokens; the text ends before the first one.
    #[serde(skip_serializing_if = "is_zero")]
    pub stop_tokens: Vec<u32>,
    /// Whether to continue past end-of-text tokens.
    #[serde(skip_serializing_if = "is_zero")]
    pub ignore_eos: bool,
    /// Number of independent choices to generate.
    #[serde(skip_serializing_if = "is_one")]
    pub n: u32,
    /// Number of alternatives per position in the log probabilities; `None` returns no log
    /// probabilities.
    #[serde(skip_serializing_if = "is_zero")]
    pub logprobs: Option<u32>,
    /// What every answer must match; `None`: any text.
    #[serde(skip_serializing_if = "is_zero")]
    pub grammar: Option<Grammar>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            max_tokens: None,
            min_tokens: 0,
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            stop: Vec::new(),
            stop_tokens: Vec::new(),
            ignore_eos: false,
            n: 1,
            logprobs: None,
            grammar: None,
        }
    }
}

/// Returns whether a parameter with a zero or empty default has its default value.
fn is_zero<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Returns whether a parameter with the default 1 has its default value.
fn is_one<T: From<u8> + PartialEq>(value: &T) -> bool {
    *value == T::from(1)
}

/// A parameter is outside its range.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{field} must be {expected}, got {found}")]
pub struct SamplingError {
    /// Name of the parameter in requests.
    pub field: &'static str,
    /// Its valid range.
    pub expected: String,
    /// Its value.
    pub found: String,
}

impl Sampling {
    /// Checks every parameter against its range.
    ///
    /// # Errors
    /// Reports the first parameter outside its range.
    pub fn validate(&self) -> Result<(), SamplingError> {
        if let Some(max_tokens) = self.max_tokens {
            within("max_tokens", max_tokens, 1, MAX_TOKENS_LIMIT)?;
        }
        within("min_tokens", self.min_tokens, 0, self.max_tokens.unwrap_or(MAX_TOKENS_LIMIT))?;
        within("temperature", self.temperature, 0.0, 2.0)?;
        within("top_p", self.top_p, 0.0, 1.0)?;
        within("min_p", self.min_p, 0.0, 1.0)?;
        within("repetition_penalty", self.repetition_penalty, 0.01, 100.0)?;
        within("presence_penalty", self.presence_penalty, -2.0, 2.0)?;
        within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)?;
        within("n", self.n, 1, CHOICES_LIMIT)?;
        within("logprobs", self.logprobs.unwrap_or(0), 0, TOP_LOGPROBS_LIMIT)?;
        within("logit_bias entries", self.logit_bias.len(), 0, LOGIT_BIAS_LIMIT)?;
        within("stop entries", self.stop.len(), 0, STOP_LIMIT)?;
        within("stop_token_ids entries", self.stop_tokens.len(), 0, STOP_TOKENS_LIMIT)?;
        for (_, bias) in &self.logit_bias {
            within("logit_bias", *bias, -100.0, 100.0)?;
        }
        for stop in &self.stop {
            within("stop length in bytes", stop.len(), 1, STOP_BYTES_LIMIT)?;
        }
        if let Some(grammar) = &self.grammar
            && let Err(error) = grammar.check()
        {
            let expected = format!("a {} that can be used ({error})", grammar.kind());
            return Err(SamplingError { field: "grammar", expected, found: "another".to_owned() });
        }
        self.validate_result()
    }

    /// Returns the most tokens of a choice that fit into a result, if the request has this many prompts.
    pub fn longest_choice(&self, prompts: usize) -> u64 {
        // At least one token, in ranges that were checked.
        let each = u64::from(self.n) * (1 + u64::from(self.logprobs.unwrap_or(0)));
        (RESULT_TOKENS_LIMIT / each.saturating_mul(prompts as u64).max(1)).max(1)
    }

    /// Checks the number of tokens that the result can name.
    fn validate_result(&self) -> Result<(), SamplingError> {
        let (n, top, longest) = (self.n, self.logprobs.unwrap_or(0), self.longest_choice(1));
        let Some(max_tokens) = self.max_tokens.filter(|most| u64::from(*most) > longest) else {
            return Ok(());
        };
        Err(SamplingError {
            field: "max_tokens",
            expected: format!(
                "at most {longest} with n {n} and top_logprobs {top} (the limit of n × max_tokens × \
                 (1 + top_logprobs) is {RESULT_TOKENS_LIMIT})"
            ),
            found: max_tokens.to_string(),
        })
    }
}

/// `low <= value <= high`; NaN is outside every range.
fn within<T: PartialOrd + std::fmt::Display>(
    field: &'static str,
    value: T,
    low: T,
    high: T,
) -> Result<(), SamplingError> {
    if low <= value && value <= high {
        return Ok(());
    }
    Err(SamplingError {
        field: field.split(' ').next().unwrap_or(field),
        expected: match field.split_once(' ') {
            Some((_, what)) => format!("{low} to {high} {what}"),
            None => format!("between {low} and {high}"),
        },
        found: value.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl FnOnce(&mut Sampling)) -> String {
        let mut sampling = Sampling::default();
        change(&mut sampling);
        sampling.validate().expect_err("outside its range").to_string()
    }

    #[test]
    fn defaults_are_in_range() {
        assert_eq!(Sampling::default().validate(), Ok(()));
    }

    #[test]
    fn value_outside_its_range_is_refused_by_name() {
        assert_eq!(
            refused(|s| s.temperature = 3.5),
            "temperature must be between 0 and 2, got 3.5"
        );
        assert!(refused(|s| s.temperature = f32::NAN).starts_with("temperature"));
        assert_eq!(refused(|s| s.top_p = -0.1), "top_p must be between 0 and 1, got -0.1");
        assert!(
            refused(|s| (s.max_tokens, s.min_tokens) = (Some(256), 257)).starts_with("min_tokens")
        );
        assert!(refused(|s| s.n = 0).starts_with("n must"));
        assert!(refused(|s| s.logit_bias = vec![(1, 101.0)]).starts_with("logit_bias must"));
        assert_eq!(
            refused(|s| s.stop = vec![String::new()]),
            "stop must be 1 to 1024 length in bytes, got 0"
        );
        assert!(refused(|s| s.stop = vec!["x".into(); 65]).contains("0 to 64 entries"));
    }

    #[test]
    fn grammar_that_cannot_be_used_is_refused() {
        let error = refused(|s| s.grammar = Some(Grammar::Regex("(".to_owned())));
        assert!(error.starts_with("grammar must be a regular expression"), "{error}");
    }

    #[test]
    fn size_of_the_result_is_limited_as_a_product() {
        let accepted = |max_tokens, n, logprobs| {
            let max_tokens = Some(max_tokens);
            let sampling = Sampling { max_tokens, n, logprobs, ..Sampling::default() };
            sampling.validate().map_err(|error| error.to_string())
        };
        assert_eq!(accepted(MAX_TOKENS_LIMIT, 1, None), Ok(()));
        assert_eq!(accepted(MAX_TOKENS_LIMIT, 1, Some(0)), Ok(()));
        assert_eq!(accepted(390, 128, Some(20)), Ok(()));
        assert_eq!(
            accepted(391, 128, Some(20)).expect_err("too large"),
            "max_tokens must be at most 390 with n 128 and top_logprobs 20 (the limit of n × max_tokens \
             × (1 + top_logprobs) is 1048576), got 391"
        );
        assert!(accepted(MAX_TOKENS_LIMIT, 2, None).is_err());
        assert!(accepted(MAX_TOKENS_LIMIT, CHOICES_LIMIT, Some(TOP_LOGPROBS_LIMIT)).is_err());
    }
}
