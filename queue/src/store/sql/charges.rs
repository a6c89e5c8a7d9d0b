//! Prices, and the charges of answers by day.

use async_trait::async_trait;

use super::{
    SqlStore,
    calls::{Row, query},
    dialect::{self, storable},
    rows,
};
use crate::{
    billing::{Charge, Price},
    job::Tenant,
    outcome::{Outcome, Usage},
    store::{
        StoreError,
        charges::{ChargeFilter, ChargeGroups, ChargeSum, Charges, PriceOf},
    },
};

/// Returns the outcome of a job, an answer with its charge, and whether a later release wrote it.
pub(crate) fn outcome(row: &Row) -> Result<(Option<Outcome>, bool), StoreError> {
    let (mut outcome, is_later) = dialect::outcome(row)?;
    if let Some(Outcome::Completed(completion)) = &mut outcome {
        completion.charge = charge(row)?.map(Box::new);
    }
    Ok((outcome, is_later))
}

/// Returns the charge in the columns `charge` and `currency`.
fn charge(row: &Row) -> Result<Option<Charge>, StoreError> {
    let Some(nanounits) = rows::get::<Option<i64>>(row, "charge")? else { return Ok(None) };
    Ok(Some(Charge { currency: rows::word(row, "currency")?, nanounits }))
}

fn price(row: &Row) -> Result<(PriceOf, Price), StoreError> {
    let of = PriceOf::parse(rows::get(row, "model")?, rows::get(row, "tier")?);
    let of = of.map_err(|error| rows::damaged("price", error))?;
    let price = Price {
        currency: rows::word(row, "currency")?,
        input: rows::count(row, "input")?,
        cached_input: rows::count(row, "cached_input")?,
        output: rows::count(row, "output")?,
    };
    Ok((of, price))
}

fn sum(row: &Row) -> Result<ChargeSum, StoreError> {
    let tier = match rows::get::<Option<&str>>(row, "tier")? {
        None => None,
        Some(_) => Some(rows::word(row, "tier")?),
    };
    let charge = match rows::get::<&str>(row, "currency")? {
        "" => None,
        _ => charge(row)?,
    };
    Ok(ChargeSum {
        day: rows::get(row, "day")?,
        tenant: rows::get::<Option<String>>(row, "tenant")?.map(Tenant),
        key: rows::get(row, "api_key")?,
        model: rows::get(row, "model")?,
        tier,
        answers: rows::count(row, "answers")?,
        usage: Usage {
            prompt_tokens: rows::count(row, "prompt_tokens")?,
            cached_tokens: rows::count(row, "cached_tokens")?,
            completion_tokens: rows::count(row, "completion_tokens")?,
            reasoning_tokens: 0,
        },
        charge,
    })
}

#[async_trait]
impl Charges for SqlStore {
    async fn prices(&self) -> Result<Vec<(PriceOf, Price)>, StoreError> {
        let found = "SELECT model, tier, currency, input, cached_input, output FROM prices
             ORDER BY model, tier";
        self.fetch_all(query(found)).await?.iter().map(price).collect()
    }

    async fn set_price(&self, of: &PriceOf, price: &Price) -> Result<(), StoreError> {
        let (model, tier) = of.names();
        storable("model", model)?;
        let set = "INSERT INTO prices (model, tier, currency, input, cached_input, output)
             VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (model, tier) DO UPDATE SET
                 currency = excluded.currency, input = excluded.input,
                 cached_input = excluded.cached_input, output = excluded.output";
        let set = query(set)
            .bind(model)
            .bind(tier)
            .bind(price.currency.as_str())
            .bind(rows::stored(price.input))
            .bind(rows::stored(price.cached_input))
            .bind(rows::stored(price.output));
        self.execute(set).await.map(drop)
    }

    async fn delete_price(&self, of: &PriceOf) -> Result<bool, StoreError> {
        let (model, tier) = of.names();
        let delete = query("DELETE FROM prices WHERE model = $1 AND tier = $2");
        Ok(self.execute(delete.bind(model).bind(tier)).await? > 0)
    }

    async fn charges(
        &self,
        filter: &ChargeFilter,
        groups: ChargeGroups,
        max: u32,
    ) -> Result<Vec<ChargeSum>, StoreError> {
        let found =
            "SELECT CASE WHEN $6 THEN day END AS day, CASE WHEN $7 THEN tenant END AS tenant,
                    CASE WHEN $8 THEN api_key END AS api_key, CASE WHEN $9 THEN model END AS model,
                    CASE WHEN $10 THEN tier END AS tier, currency,
                    CAST(sum(answers) AS bigint) AS answers,
                    CAST(sum(prompt_tokens) AS bigint) AS prompt_tokens,
                    CAST(sum(cached_tokens) AS bigint) AS cached_tokens,
                    CAST(sum(completion_tokens) AS bigint) AS completion_tokens,
                    CAST(sum(charge) AS bigint) AS charge
             FROM charges
             WHERE day >= $1 AND day < $2 AND ($3 IS NULL OR tenant = $3)
               AND ($4 IS NULL OR api_key = $4) AND ($5 IS NULL OR model = $5)
             GROUP BY 1, 2, 3, 4, 5, 6 ORDER BY 1, 2, 3, 4, 5, 6 LIMIT $11";
        let found = query(found)
            .bind(filter.from)
            .bind(filter.to)
            .bind(filter.tenant.as_ref().map(|tenant| &tenant.0))
            .bind(filter.key.as_deref())
            .bind(filter.model.as_deref())
            .bind(groups.day)
            .bind(groups.tenant)
            .bind(groups.key)
            .bind(groups.model)
            .bind(groups.tier)
            .bind(i64::from(max));
        self.fetch_all(found).await?.iter().map(sum).collect()
    }
}
