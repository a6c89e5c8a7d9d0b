//! Money: what jobs are charged as, prices, and charges.
//!
//! A store fixes the charge of an answer in the statement that records the answer, from the prices of that moment. Amounts
//! are integers, so that sums are exact: prices are in picounits (10⁻¹²) of a currency per token, charges in nanounits
//! (10⁻⁹), rounded half up for each answer.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::{
    job::{Priority, UnknownWord},
    outcome::Usage,
};

/// Decimal digits of a price per million tokens after the point.
const PRICE_DIGITS: usize = 6;
/// Highest price: a hundred thousand units per million tokens.
const PRICE_MAX: u64 = 100_000 * 1_000_000;
/// Decimal digits of a charge after the point.
const CHARGE_DIGITS: usize = 9;

/// What a job is charged as.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// A request with `service_tier: priority`, which goes before the other requests of its tenant.
    Priority,
    /// A single request, and a job of the client library.
    #[default]
    Default,
    /// A single request with `service_tier: flex`.
    Flex,
    /// A line of a batch with a completion window.
    Batch,
    /// A line of a batch with the completion window `background`.
    Background,
}

impl Tier {
    /// All tiers.
    pub const ALL: [Self; 5] =
        [Self::Priority, Self::Default, Self::Flex, Self::Batch, Self::Background];

    /// Returns the priority of its jobs.
    pub const fn priority(self) -> Priority {
        match self {
            Self::Priority | Self::Default => Priority::High,
            Self::Flex | Self::Batch => Priority::Normal,
            Self::Background => Priority::Low,
        }
    }

    /// Returns the name in stores and on the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Priority => "priority",
            Self::Default => "default",
            Self::Flex => "flex",
            Self::Batch => "batch",
            Self::Background => "background",
        }
    }
}

impl FromStr for Tier {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        let found = Self::ALL.into_iter().find(|tier| tier.as_str() == word);
        found.ok_or_else(|| UnknownWord { what: "tier", word: word.to_owned() })
    }
}

/// To which account a job is charged, besides its tenant. Columns of the store have it beside the request, so jobs that were
/// read do not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Billing {
    /// The tier of its price.
    pub tier: Tier,
    /// The API key that submitted it.
    pub key: Option<Uuid>,
}

/// A currency: three to eight capital letters or digits, such as `EUR`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Currency(String);

impl Currency {
    /// Returns its letters.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Currency {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        let is_name = (3..=8).contains(&word.len())
            && word.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit());
        match is_name {
            true => Ok(Self(word.to_owned())),
            false => Err(UnknownWord { what: "currency", word: word.to_owned() }),
        }
    }
}

/// A text is no price or amount that can be stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must be a decimal number from 0 to {max} with at most {digits} digits after the point")]
pub struct InvalidAmount {
    max: u64,
    digits: usize,
}

const NO_PRICE: InvalidAmount = InvalidAmount { max: PRICE_MAX / 1_000_000, digits: PRICE_DIGITS };
const NO_AMOUNT: InvalidAmount =
    InvalidAmount { max: i64::MAX as u64 / 1_000_000_000, digits: CHARGE_DIGITS };

/// Prices of the tokens of a model in a tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Price {
    /// The currency.
    pub currency: Currency,
    /// Picounits per token of a prompt.
    pub input: u64,
    /// Picounits per token of a prompt that was not computed again.
    pub cached_input: u64,
    /// Picounits per generated token.
    pub output: u64,
}

/// Parses a price of a million tokens, such as `0.15`, into picounits per token.
///
/// # Errors
/// If it is no decimal number, negative, too high or too long.
pub fn parse_price(text: &str) -> Result<u64, InvalidAmount> {
    decimal(text, PRICE_DIGITS).filter(|amount| *amount <= PRICE_MAX).ok_or(NO_PRICE)
}

/// Writes picounits per token as the price of a million tokens.
pub fn write_price(picounits: u64) -> String {
    written(i64::try_from(picounits).unwrap_or(i64::MAX), PRICE_DIGITS)
}

/// Parses an amount of money, such as `12.50`, into nanounits.
///
/// # Errors
/// If it is no decimal number, negative, or has more than nine digits after the point.
pub fn parse_amount(text: &str) -> Result<i64, InvalidAmount> {
    let amount = decimal(text, CHARGE_DIGITS).and_then(|amount| i64::try_from(amount).ok());
    amount.ok_or(NO_AMOUNT)
}

impl Price {
    /// Returns the charge of an answer.
    pub fn charge(&self, usage: Usage) -> Charge {
        let cached = usage.cached_tokens.min(usage.prompt_tokens);
        let parts = [
            (usage.prompt_tokens - cached, self.input),
            (cached, self.cached_input),
            (usage.completion_tokens, self.output),
        ];
        let picounits: u128 =
            parts.iter().map(|(tokens, price)| u128::from(*tokens) * u128::from(*price)).sum();
        let nanounits = i64::try_from((picounits + 500) / 1000).unwrap_or(i64::MAX);
        Charge { currency: self.currency.clone(), nanounits }
    }
}

/// An amount of money.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Charge {
    /// The currency.
    pub currency: Currency,
    /// The amount in 10⁻⁹ of the currency's unit.
    pub nanounits: i64,
}

impl Charge {
    /// Adds a charge to those in the same currency.
    pub fn add_to(&self, sums: &mut Vec<Self>) {
        match sums.iter_mut().find(|sum| sum.currency == self.currency) {
            Some(sum) => sum.nanounits = sum.nanounits.saturating_add(self.nanounits),
            None => sums.push(self.clone()),
        }
    }

    /// Returns the amount as a decimal number.
    pub fn amount(&self) -> String {
        written(self.nanounits, CHARGE_DIGITS)
    }
}

impl fmt::Display for Charge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.amount(), self.currency.as_str())
    }
}

/// Parses a decimal number, in units of its last of `digits` digits after the point.
fn decimal(text: &str, digits: usize) -> Option<u64> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let is_digits = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    if !is_digits(whole) || !is_digits(fraction) {
        return None;
    }
    let fraction = fraction.trim_end_matches('0');
    let missing = u32::try_from(digits.checked_sub(fraction.len())?).ok()?;
    let part: u64 = if fraction.is_empty() { 0 } else { fraction.parse().ok()? };
    let unit = 10u64.pow(u32::try_from(digits).ok()?);
    whole.parse::<u64>().ok()?.checked_mul(unit)?.checked_add(part * 10u64.pow(missing))
}

/// Writes a number of units of the last of `digits` digits after the point, without trailing zeros.
fn written(amount: i64, digits: usize) -> String {
    let unit = 10u64.pow(digits as u32);
    let (sign, amount) = (if amount < 0 { "-" } else { "" }, amount.unsigned_abs());
    let fraction = format!("{:0digits$}", amount % unit);
    match fraction.trim_end_matches('0') {
        "" => format!("{sign}{}", amount / unit),
        fraction => format!("{sign}{}.{fraction}", amount / unit),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prices_and_amounts_are_read_and_written_exactly() {
        for (text, picounits) in
            [("0", 0), ("0.15", 150_000), ("2", 2_000_000), ("0.000001", 1), ("0.100", 100_000)]
        {
            assert_eq!(parse_price(text), Ok(picounits), "{text}");
            let shortest = if text == "0.100" { "0.1" } else { text };
            assert_eq!(write_price(picounits), shortest);
        }
        let wrong =
            ["", ".5", "5.", "-1", "+1", "1e3", "0.0000001", "100000.1", "1_000", "٣", "NaN"];
        for text in wrong {
            assert_eq!(parse_price(text), Err(NO_PRICE), "{text}");
        }
        assert_eq!(parse_price("100000"), Ok(PRICE_MAX));
        assert_eq!(parse_amount("12.50"), Ok(12_500_000_000));
        assert!(parse_amount("99999999999999999999").is_err());
    }

    #[test]
    fn charge_counts_cached_tokens_apart_and_rounds_half_up() {
        let currency: Currency = "EUR".parse().expect("a currency");
        let price = Price { currency, input: 150_000, cached_input: 75_000, output: 600_500 };
        let usage = |prompt_tokens, cached_tokens, completion_tokens| Usage {
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            ..Usage::default()
        };
        assert_eq!(price.charge(usage(100, 40, 0)).nanounits, 60 * 150 + 40 * 75);
        assert_eq!(price.charge(usage(0, 0, 1)).nanounits, 601);
        assert_eq!(price.charge(usage(1, 5, 0)).nanounits, 75);
        assert_eq!(price.charge(usage(100, 40, 0)).to_string(), "0.000012 EUR");
        assert_eq!(written(-1_500_000_000, CHARGE_DIGITS), "-1.5");
    }

    #[test]
    fn words_are_checked() {
        for tier in Tier::ALL {
            assert_eq!(tier.as_str().parse::<Tier>().expect("its own word"), tier);
        }
        assert!("gold".parse::<Tier>().is_err());
        for wrong in ["", "eu", "eur", "EURO-DOLLAR", "€€€"] {
            assert!(wrong.parse::<Currency>().is_err(), "{wrong}");
        }
    }
}
