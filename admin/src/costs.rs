//! What answers cost: sums of charges by day, tenant, key, model and tier, as JSON and as CSV.

use axum::{
    Json,
    http::header::{CONTENT_DISPOSITION, CONTENT_TYPE},
    response::{IntoResponse as _, Response},
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tritmill_client::answer;
use tritmill_queue::{
    Tenant,
    billing::Tier,
    store::charges::{ChargeFilter, ChargeGroups, ChargeSum, Day, day_of},
};
use utoipa::ToSchema;

use crate::{
    ApiError, App, Call, QueryParams,
    days::{day_text, month_of_day, parse_day, parse_month},
    operator::params,
};

/// Most sums of an answer.
const SUMS_MAX: u32 = 10_000;
/// Most days that are summed.
const DAYS_MAX: Day = 3660;

/// Which charges are summed, and by what.
#[derive(Debug, Default, Deserialize, utoipa::IntoParams)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct CostQuery {
    /// A month, as `2026-11`. By default this month.
    #[param(nullable = false)]
    month: Option<String>,
    /// First day, as `2026-11-30`, instead of a month.
    #[param(nullable = false)]
    from: Option<String>,
    /// Last day (exclusive). By default the day after today.
    #[param(nullable = false)]
    to: Option<String>,
    /// `day`, `model`, `tier`, `key` and, for operators, `tenant`, separated by commas. By default all answers are summed.
    #[param(nullable = false)]
    group_by: Option<String>,
    /// A model.
    #[param(nullable = false)]
    model: Option<String>,
    /// The id of an API key.
    #[param(nullable = false)]
    key: Option<String>,
    /// A tenant. Only operators may name another one than their own.
    #[param(nullable = false)]
    tenant: Option<String>,
    /// `json` (the default) or `csv`.
    #[param(nullable = false)]
    format: Option<String>,
}

/// A sum of charges. What they are not summed by is null.
#[derive(Serialize, ToSchema)]
#[schema(as = CostSum)]
pub(crate) struct CostView {
    day: Option<String>,
    tenant: Option<String>,
    /// The id of an API key; empty for answers that were asked for without one.
    key: Option<String>,
    model: Option<String>,
    /// `priority`, `default`, `flex`, `batch` or `background`.
    tier: Option<&'static str>,
    /// Number of answers.
    answers: u64,
    input_tokens: u64,
    /// Input tokens that were not computed, because an earlier prompt began in the same way.
    cached_tokens: u64,
    output_tokens: u64,
    /// Null for answers without a price.
    currency: Option<String>,
    /// In the currency's unit; null for answers without a price.
    #[schema(value_type = Option<f64>)]
    cost: Option<Value>,
}

impl From<&ChargeSum> for CostView {
    fn from(sum: &ChargeSum) -> Self {
        Self {
            day: sum.day.map(day_text),
            tenant: sum.tenant.as_ref().map(|tenant| tenant.0.clone()),
            key: sum.key.clone(),
            model: sum.model.clone(),
            tier: sum.tier.map(Tier::as_str),
            answers: sum.answers,
            input_tokens: sum.usage.prompt_tokens,
            cached_tokens: sum.usage.cached_tokens,
            output_tokens: sum.usage.completion_tokens,
            currency: sum.charge.as_ref().map(|charge| charge.currency.as_str().to_owned()),
            cost: sum.charge.as_ref().map(answer::cost),
        }
    }
}

/// What answers cost.
#[derive(Serialize, ToSchema)]
pub(crate) struct CostList {
    object: &'static str,
    /// Sums in the order of their fields.
    data: Vec<CostView>,
    /// Whether there are more sums than an answer has.
    has_more: bool,
}

/// Sums what answers of the caller's tenant cost; for operators, of any or all tenants. Answers of the last seconds may be
/// missing.
#[utoipa::path(get, path = "/v1/costs", tag = "costs", params(CostQuery),
    responses((status = 200, description = "The sums", content(
        (CostList = "application/json"), (String = "text/csv")))))]
pub(crate) async fn list(
    Call { app, caller }: Call,
    QueryParams(query): QueryParams<CostQuery>,
) -> Result<Response, ApiError> {
    let groups = groups(query.group_by.as_deref(), caller.may_operate())?;
    let tenant = match query.tenant.as_deref().map(params::tenant).transpose()? {
        _ if !caller.may_operate() => match query.tenant {
            Some(other) if other != caller.tenant.0 => {
                return Err(ApiError::forbidden(crate::store::KeyRole::Operate));
            }
            _ => Some(caller.tenant),
        },
        named => named,
    };
    let is_csv = match query.format.as_deref() {
        None | Some("json") => false,
        Some("csv") => true,
        Some(_) => {
            return Err(ApiError::invalid_value("format", "format must be 'json' or 'csv'"));
        }
    };
    let (from, to) = span(&app, &query).await?;
    let filter = ChargeFilter { tenant, key: query.key, model: query.model, from, to };
    let (sums, has_more) = sums(&app, &filter, groups).await?;
    Ok(match is_csv {
        true => csv_response(from, &sums),
        false => {
            let data = sums.iter().map(CostView::from).collect();
            Json(CostList { object: "list", data, has_more }).into_response()
        }
    })
}

/// Returns sums from a day on as a file for spreadsheets.
pub(crate) fn csv_response(from: Day, sums: &[ChargeSum]) -> Response {
    let name = format!("attachment; filename=\"costs-{}.csv\"", day_text(from));
    let headers =
        [(CONTENT_TYPE, "text/csv; charset=utf-8".to_owned()), (CONTENT_DISPOSITION, name)];
    (headers, csv(sums)).into_response()
}

/// Returns sums, and whether there are more.
pub(crate) async fn sums(
    app: &App,
    filter: &ChargeFilter,
    groups: ChargeGroups,
) -> Result<(Vec<ChargeSum>, bool), ApiError> {
    let mut sums = app.store.charges(filter, groups, SUMS_MAX + 1).await?;
    let has_more = sums.len() > SUMS_MAX as usize;
    sums.truncate(SUMS_MAX as usize);
    Ok((sums, has_more))
}

/// Returns the first day and the day after the last one.
async fn span(app: &App, query: &CostQuery) -> Result<(Day, Day), ApiError> {
    let invalid = |param: &'static str, expected: &str| {
        ApiError::invalid_value(param, format!("{param} must be {expected}"))
    };
    let days = (query.from.as_deref(), query.to.as_deref());
    if let Some(month) = query.month.as_deref() {
        if days != (None, None) {
            return Err(invalid("month", "without 'from' and 'to'"));
        }
        return parse_month(month).ok_or_else(|| invalid("month", "a month such as 2026-11"));
    }
    let today = day_of(app.store.now().await?);
    let day = |param, text: &str| {
        parse_day(text).ok_or_else(|| invalid(param, "a day such as 2026-11-30"))
    };
    let to = days.1.map(|text| day("to", text)).transpose()?;
    let from = days.0.map(|text| day("from", text)).transpose()?;
    let to = to.unwrap_or(today + 1);
    let from = from.unwrap_or_else(|| month_of_day((to - 1).min(today)).0);
    match to - from {
        1..=DAYS_MAX => Ok((from, to)),
        _ => Err(invalid("to", &format!("1 to {DAYS_MAX} days after 'from'"))),
    }
}

fn groups(text: Option<&str>, may_operate: bool) -> Result<ChargeGroups, ApiError> {
    let others = if may_operate { ", 'tenant'" } else { "" };
    let words = format!("a list of 'day', 'model', 'tier', 'key'{others}, separated by commas");
    let groups: ChargeGroups = params::parsed("group_by", &words, text)?.unwrap_or_default();
    if groups.tenant && !may_operate {
        return Err(ApiError::invalid_value("group_by", format!("group_by must be {words}")));
    }
    Ok(groups)
}

/// Writes sums as a table for spreadsheets (RFC 4180).
pub fn csv(sums: &[ChargeSum]) -> String {
    let mut table =
        csv::WriterBuilder::new().terminator(csv::Terminator::CRLF).from_writer(Vec::new());
    let names = [
        "day",
        "tenant",
        "key",
        "model",
        "tier",
        "answers",
        "input_tokens",
        "cached_tokens",
        "output_tokens",
        "currency",
        "cost",
    ];
    table.write_record(names).expect("memory can be written");
    for sum in sums {
        let charge = sum.charge.as_ref();
        let fields = [
            sum.day.map(day_text),
            sum.tenant.as_ref().map(|Tenant(name)| name.clone()),
            sum.key.clone(),
            sum.model.clone(),
            sum.tier.map(|tier| tier.as_str().to_owned()),
            Some(sum.answers.to_string()),
            Some(sum.usage.prompt_tokens.to_string()),
            Some(sum.usage.cached_tokens.to_string()),
            Some(sum.usage.completion_tokens.to_string()),
            charge.map(|charge| charge.currency.as_str().to_owned()),
            charge.map(|charge| charge.amount()),
        ];
        let fields = fields.map(|field| as_text(field.unwrap_or_default()));
        table.write_record(fields).expect("memory can be written");
    }
    let bytes = table.into_inner().expect("memory can be written");
    String::from_utf8(bytes).expect("fields are texts")
}

/// Puts an apostrophe before a name that a spreadsheet would take for a formula.
fn as_text(field: String) -> String {
    match field.starts_with(['=', '+', '-', '@', '\t', '\r']) {
        true => format!("'{field}"),
        false => field,
    }
}

#[cfg(test)]
mod tests {
    use tritmill_queue::{Charge, Usage};

    use super::*;

    #[test]
    fn table_is_quoted() {
        let charge = Charge { currency: "EUR".parse().expect("a currency"), nanounits: 1_500_000 };
        let sum = ChargeSum {
            day: Some(20_787),
            tenant: Some(Tenant("a, \"b\"".into())),
            key: None,
            model: Some("=cmd()".into()),
            tier: Some(Tier::Batch),
            answers: 2,
            usage: Usage { prompt_tokens: 3, completion_tokens: 4, ..Usage::default() },
            charge: Some(charge),
        };
        let text = csv(&[sum]);
        let line = text.lines().nth(1).expect("a line");
        assert_eq!(line, "2026-11-30,\"a, \"\"b\"\"\",,'=cmd(),batch,2,3,0,4,EUR,0.0015");
    }
}
