//! Prices of tokens, and budgets.

use axum::Json;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tritmill_queue::{
    billing::{Currency, InvalidAmount, Price, parse_amount, parse_price, write_price},
    store::charges::{InvalidPriceOf, PriceOf},
};
use utoipa::ToSchema;
use uuid::Uuid;

use super::{DONE, Done, audit, params};
use crate::{
    ApiError, App, Call, Caller, JsonBody, JsonResult, QueryParams,
    budgets::{self, BudgetState},
    days::day_text,
    store::budgets::{Budget, BudgetOf, BudgetPeriod},
};

/// A price, per million tokens.
#[derive(Serialize, ToSchema)]
#[schema(as = Price)]
pub(crate) struct PriceView {
    /// `*` is every model without a price of its own.
    model: String,
    /// `priority`, `default`, `flex`, `batch` or `background`; `*` is every one without a price of its own.
    tier: &'static str,
    currency: String,
    /// Decimal numbers as texts, so that no digit is lost.
    input: String,
    cached_input: String,
    output: String,
}

impl From<(PriceOf, Price)> for PriceView {
    fn from((of, price): (PriceOf, Price)) -> Self {
        let (model, tier) = of.names();
        Self {
            model: model.to_owned(),
            tier,
            currency: price.currency.as_str().to_owned(),
            input: write_price(price.input),
            cached_input: write_price(price.cached_input),
            output: write_price(price.output),
        }
    }
}

/// Prices.
#[derive(Serialize, ToSchema)]
pub(crate) struct PriceList {
    /// By model and tier.
    data: Vec<PriceView>,
}

/// Lists the prices.
#[utoipa::path(get, path = "/v1/prices", tag = "costs",
    responses((status = 200, description = "By model and tier", body = PriceList)))]
pub(crate) async fn list(Call { app, .. }: Call) -> JsonResult<PriceList> {
    let data = app.store.prices().await?.into_iter().map(PriceView::from).collect();
    Ok(Json(PriceList { data }))
}

/// A price to set, per million tokens.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct PriceRequest {
    /// A model without a format, or `*` for every model without a price of its own.
    #[schema(min_length = 1)]
    model: String,
    /// `priority`, `default`, `flex`, `batch` or `background`, or `*` (the default) for every one without a price of its own.
    #[serde(default)]
    tier: Option<String>,
    /// Three to eight capital letters or digits, such as `EUR`.
    currency: String,
    /// Tokens of prompts: a number, or a decimal number as text, with at most six digits after the point.
    #[schema(value_type = Amount)]
    input: Value,
    /// Tokens of prompts that were not computed again; by default as `input`.
    #[serde(default)]
    #[schema(value_type = Option<Amount>)]
    cached_input: Option<Value>,
    /// Generated tokens.
    #[schema(value_type = Amount)]
    output: Value,
}

/// A decimal number, or one as text.
#[derive(Deserialize, ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "a schema only")]
enum Amount {
    Number(f64),
    Text(String),
}

/// Returns a decimal number as text.
fn decimal(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn invalid_amount(param: &'static str) -> impl Fn(InvalidAmount) -> ApiError {
    move |error| ApiError::invalid_value(param, format!("{param} {error}"))
}

fn currency(text: &str) -> Result<Currency, ApiError> {
    let message = "currency must be three to eight capital letters or digits, such as EUR";
    text.parse().map_err(|_| ApiError::invalid_value("currency", message))
}

/// Returns the answers that a price is for; without a tier, of every one.
fn price_of(model: &str, tier: Option<&str>) -> Result<PriceOf, ApiError> {
    PriceOf::parse(model, tier.unwrap_or("*")).map_err(|error| {
        let param = if error == InvalidPriceOf::Model { "model" } else { "tier" };
        ApiError::invalid_value(param, error.to_string())
    })
}

/// Sets a price, for the answers from now on.
#[utoipa::path(post, path = "/admin/v1/prices", tag = "costs", request_body = PriceRequest,
    responses((status = 200, description = "The answers from now on have it", body = Done)))]
pub(crate) async fn set(
    Call { app, caller }: Call,
    JsonBody(request): JsonBody<PriceRequest>,
) -> JsonResult<Done> {
    let of = price_of(&request.model, request.tier.as_deref())?;
    let amount = |param, value: &Value| parse_price(&decimal(value)).map_err(invalid_amount(param));
    let input = amount("input", &request.input)?;
    let price = Price {
        currency: currency(&request.currency)?,
        input,
        cached_input: match request.cached_input.as_ref().filter(|value| !value.is_null()) {
            Some(value) => amount("cached_input", value)?,
            None => input,
        },
        output: amount("output", &request.output)?,
    };
    set_price(&app, &caller, &of, &price).await?;
    Ok(DONE)
}

/// Sets a price and records it in the audit log.
pub(crate) async fn set_price(
    app: &App,
    caller: &Caller,
    of: &PriceOf,
    price: &Price,
) -> Result<(), ApiError> {
    let view = PriceView::from((of.clone(), price.clone()));
    audit::record(app, caller, "price.set", &view.model, json!(view)).await?;
    Ok(app.store.set_price(of, price).await?)
}

/// The price to delete.
#[derive(Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct PriceQuery {
    /// Its model, or `*`.
    model: String,
    /// Its tier, or `*` (the default).
    #[param(nullable = false)]
    tier: Option<String>,
}

/// Deletes a price. Answers keep what they cost.
#[utoipa::path(delete, path = "/admin/v1/prices", tag = "costs", params(PriceQuery),
    responses((status = 200, description = "The answers from now on do not have it", body = Done)))]
pub(crate) async fn remove(
    Call { app, caller }: Call,
    QueryParams(PriceQuery { model, tier }): QueryParams<PriceQuery>,
) -> JsonResult<Done> {
    let of = price_of(&model, tier.as_deref())?;
    let detail = json!({ "tier": of.names().1 });
    audit::record(&app, &caller, "price.delete", &model, detail).await?;
    match app.store.delete_price(&of).await? {
        true => Ok(DONE),
        false => Err(ApiError::not_found("price", &model)),
    }
}

/// A budget with what is spent of it.
#[derive(Serialize, ToSchema)]
#[schema(as = Budget)]
pub(crate) struct BudgetView {
    tenant: String,
    /// The id of an API key; null for all of the tenant's work.
    key: Option<String>,
    /// `day` or `month`, in UTC.
    period: &'static str,
    currency: String,
    /// From here on it is nearly spent.
    soft: Option<String>,
    /// From here on new work is refused.
    hard: Option<String>,
    /// In the present period.
    spent: String,
    /// Whether the soft bound is reached.
    nearly_spent: bool,
    /// Whether the hard bound is reached.
    is_spent: bool,
    /// The day on which it begins anew.
    next_period: String,
}

impl From<&BudgetState> for BudgetView {
    fn from(state: &BudgetState) -> Self {
        let amount = |nanounits| state.charge(nanounits).amount();
        let Budget { of, currency, soft, hard, .. } = &state.budget;
        Self {
            tenant: of.tenant.0.clone(),
            key: of.key.map(|key| key.to_string()),
            period: of.period.as_str(),
            currency: currency.as_str().to_owned(),
            soft: soft.map(amount),
            hard: hard.map(amount),
            spent: amount(state.spent),
            nearly_spent: state.is_nearly_spent(),
            is_spent: state.is_spent(),
            next_period: day_text(state.period.1),
        }
    }
}

/// Budgets.
#[derive(Serialize, ToSchema)]
pub(crate) struct BudgetList {
    /// By tenant, key and period.
    data: Vec<BudgetView>,
}

/// Lists the budgets of the caller's tenant and its keys; for operators, of all tenants.
#[utoipa::path(get, path = "/v1/budgets", tag = "costs",
    responses((status = 200, description = "With what is spent", body = BudgetList)))]
pub(crate) async fn budgets(Call { app, caller }: Call) -> JsonResult<BudgetList> {
    let tenant = (!caller.may_operate()).then_some(&caller.tenant);
    let states = budgets::states(app.store.as_ref(), tenant).await?;
    Ok(Json(BudgetList { data: states.iter().map(BudgetView::from).collect() }))
}

/// A budget to set.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct BudgetRequest {
    #[schema(min_length = 1)]
    tenant: String,
    /// The id of an API key; null for all of the tenant's work.
    #[serde(default)]
    key: Option<String>,
    /// `day` or `month`, in UTC.
    period: String,
    /// Three to eight capital letters or digits, such as `EUR`. Charges in other currencies do not count.
    currency: String,
    /// From here on it is nearly spent: a number, or a decimal number as text.
    #[serde(default)]
    #[schema(value_type = Option<Amount>)]
    soft: Option<Value>,
    /// From here on new work is refused; work that was accepted goes on.
    #[serde(default)]
    #[schema(value_type = Option<Amount>)]
    hard: Option<Value>,
}

/// Sets a budget. Without bounds it is deleted.
#[utoipa::path(post, path = "/admin/v1/budgets", tag = "costs", request_body = BudgetRequest,
    responses((status = 200, description = "The next requests are held to it", body = Done)))]
pub(crate) async fn set_budget(
    Call { app, caller }: Call,
    JsonBody(request): JsonBody<BudgetRequest>,
) -> JsonResult<Done> {
    let tenant = params::tenant(&request.tenant)?;
    let key: Option<Uuid> = params::parsed("key", "the id of an API key", request.key.as_deref())?;
    let period: Option<BudgetPeriod> =
        params::parsed("period", "'day' or 'month'", Some(&request.period))?;
    let of = BudgetOf { tenant, key, period: period.unwrap_or(BudgetPeriod::Month) };
    let amount = |param, value: Option<&Value>| {
        let value = value.filter(|value| !value.is_null());
        value.map(|value| parse_amount(&decimal(value)).map_err(invalid_amount(param))).transpose()
    };
    let soft = amount("soft", request.soft.as_ref())?;
    let hard = amount("hard", request.hard.as_ref())?;
    let currency = currency(&request.currency)?;
    if soft.zip(hard).is_some_and(|(soft, hard)| soft > hard) {
        return Err(ApiError::invalid_value("soft", "soft must be at most hard"));
    }
    let detail = json!({
        "key": key, "period": of.period.as_str(), "currency": currency, "soft": request.soft, "hard": request.hard,
    });
    audit::record(&app, &caller, "budget.set", &of.tenant.0, detail).await?;
    match (soft, hard) {
        (None, None) => drop(app.store.delete_budget(&of).await?),
        _ => {
            let set_at = app.store.now().await?;
            app.store.set_budget(&Budget { of, currency, soft, hard, set_at }).await?;
        }
    }
    Ok(DONE)
}
