//! Prices, and the charges of answers by day.

use std::str::FromStr;

use async_trait::async_trait;

use super::StoreError;
use crate::{
    billing::{Charge, Price, Tier},
    job::{Tenant, Timestamp, UnknownWord},
    outcome::Usage,
};

/// The answers that a price is for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PriceOf {
    /// The model; `None` is every model without a price of its own.
    pub model: Option<String>,
    /// The tier; `None` is every tier without a price of its own.
    pub tier: Option<Tier>,
}

/// The name of every model, and of every tier.
const ANY: &str = "*";

/// A model or tier that no price can be for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPriceOf {
    /// The model is no name, or has a format.
    #[error("model must be the name of a model without a format, or '*'")]
    Model,
    /// The tier is not known.
    #[error("tier must be 'priority', 'default', 'flex', 'batch', 'background' or '*'")]
    Tier,
}

impl PriceOf {
    /// Parses a model and a tier, each of which may be `*`.
    ///
    /// # Errors
    /// Names the one that cannot be used.
    pub fn parse(model: &str, tier: &str) -> Result<Self, InvalidPriceOf> {
        if model.is_empty() || model.contains(['\0', '@']) {
            return Err(InvalidPriceOf::Model);
        }
        let tier = (tier != ANY).then(|| tier.parse()).transpose();
        let model = (model != ANY).then(|| model.to_owned());
        Ok(Self { model, tier: tier.map_err(|_| InvalidPriceOf::Tier)? })
    }

    /// Returns the names that [`parse`](Self::parse) takes.
    pub fn names(&self) -> (&str, &'static str) {
        (self.model.as_deref().unwrap_or(ANY), self.tier.map_or(ANY, Tier::as_str))
    }
}

/// A number of days since 1970 in UTC.
pub type Day = i64;

/// Returns the day of a time.
pub fn day_of(at: Timestamp) -> Day {
    const DAY_MS: i64 = 86_400_000;
    at.0.div_euclid(DAY_MS)
}

/// Which charges are summed. All given conditions must hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChargeFilter {
    /// The tenant.
    pub tenant: Option<Tenant>,
    /// The id of the API key.
    pub key: Option<String>,
    /// The model.
    pub model: Option<String>,
    /// First day.
    pub from: Day,
    /// Last day (exclusive).
    pub to: Day,
}

/// By what charges are summed, beside the currency.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ChargeGroups {
    /// A sum for each day.
    pub day: bool,
    /// A sum for each tenant.
    pub tenant: bool,
    /// A sum for each API key.
    pub key: bool,
    /// A sum for each model.
    pub model: bool,
    /// A sum for each tier.
    pub tier: bool,
}

impl ChargeGroups {
    /// Returns by how many things charges are summed, beside the currency.
    pub fn count(self) -> usize {
        [self.day, self.tenant, self.key, self.model, self.tier]
            .into_iter()
            .filter(|by| *by)
            .count()
    }
}

impl FromStr for ChargeGroups {
    type Err = UnknownWord;

    /// Parses a list of `day`, `tenant`, `key`, `model` and `tier`, separated by commas.
    fn from_str(text: &str) -> Result<Self, UnknownWord> {
        let mut groups = Self::default();
        for word in text.split(',') {
            match word {
                "day" => groups.day = true,
                "tenant" => groups.tenant = true,
                "key" => groups.key = true,
                "model" => groups.model = true,
                "tier" => groups.tier = true,
                _ => return Err(UnknownWord { what: "group", word: word.to_owned() }),
            }
        }
        Ok(groups)
    }
}

/// A sum of charges. What they are not summed by is `None`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChargeSum {
    /// The day.
    pub day: Option<Day>,
    /// The tenant.
    pub tenant: Option<Tenant>,
    /// The id of the API key; empty for answers that were asked for without one.
    pub key: Option<String>,
    /// The model.
    pub model: Option<String>,
    /// The tier.
    pub tier: Option<Tier>,
    /// Number of answers.
    pub answers: u64,
    /// Their tokens.
    pub usage: Usage,
    /// Their charge; `None` for answers without a price.
    pub charge: Option<Charge>,
}

/// The rest of a FROM clause: joins the price of the answer of the row `ended`.
macro_rules! price_of_ended {
    () => {
        " LEFT JOIN prices ON state = 'completed' AND prices.id = (
              SELECT id FROM prices AS of_job
              WHERE of_job.model IN (ended.model, '*') AND of_job.tier IN (ended.tier, '*')
              ORDER BY of_job.model = '*', of_job.tier = '*' LIMIT 1)"
    };
}

/// The charge of an answer, rounded half up: see [`Price::charge`].
macro_rules! charge_of_ended {
    () => {
        "((prompt_tokens - cached_tokens) * input + cached_tokens * cached_input
          + completion_tokens * output + 500) / 1000"
    };
}

/// Prices and charges in a store.
#[async_trait]
pub trait Charges: Send + Sync {
    /// Returns all prices, by model and tier.
    async fn prices(&self) -> Result<Vec<(PriceOf, Price)>, StoreError>;

    /// Sets a price, for the answers from now on.
    async fn set_price(&self, of: &PriceOf, price: &Price) -> Result<(), StoreError>;

    /// Deletes a price; returns whether there was one.
    async fn delete_price(&self, of: &PriceOf) -> Result<bool, StoreError>;

    /// Returns up to `max` sums of charges, in the order of [`ChargeSum`]'s fields. Answers of the last seconds may be
    /// missing.
    async fn charges(
        &self,
        filter: &ChargeFilter,
        groups: ChargeGroups,
        max: u32,
    ) -> Result<Vec<ChargeSum>, StoreError>;
}

/// Returns the price of a model in a tier: the most specific one, of which the model counts first.
pub fn price_of<'a>(prices: &'a [(PriceOf, Price)], model: &str, tier: Tier) -> Option<&'a Price> {
    let fits = |of: &PriceOf| {
        of.model.as_deref().is_none_or(|name| name == model)
            && of.tier.is_none_or(|name| name == tier)
    };
    let found = prices.iter().filter(|(of, _)| fits(of));
    found.min_by_key(|(of, _)| (of.model.is_none(), of.tier.is_none())).map(|(_, price)| price)
}
