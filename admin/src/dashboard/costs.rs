//! Page of costs: what the answers of a month cost by day, model, tenant, key or tier, and budgets.

use askama::Template;
use axum::extract::Query;
use serde::Deserialize;
use tritmill_queue::{
    Tenant,
    store::charges::{ChargeFilter, ChargeGroups, ChargeSum, Day, day_of},
};

use super::{Content, PageError, PageResult, Visit, filters, percent_encoded};
use crate::{
    ApiError, App, Caller,
    budgets::{self, BudgetState},
    costs,
    days::{day_text, month_of_day, parse_month},
};

/// Rows of the page; the CSV file has all.
const ROWS_MAX: usize = 500;

/// What the page shows.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct CostsQuery {
    month: String,
    by: String,
    tenant: String,
}

#[derive(Template)]
#[template(path = "costs.html")]
struct CostsView {
    query: CostsQuery,
    /// The months before and after.
    around: [String; 2],
    month: String,
    is_operator: bool,
    groups: ChargeGroups,
    rows: Vec<ChargeSum>,
    has_more: bool,
    /// Sums over the rows, by currency.
    total: Vec<ChargeSum>,
    budgets: Vec<BudgetState>,
}

impl CostsView {
    /// The ways to sum, each with a name.
    fn ways(&self) -> Vec<(&'static str, &'static str)> {
        let all = [
            ("day", "Day"),
            ("model", "Model"),
            ("tenant", "Tenant"),
            ("key", "API key"),
            ("tier", "Tier"),
            ("day,model", "Day and model"),
            ("tenant,model", "Tenant and model"),
        ];
        let may = |way: &(&str, &str)| self.is_operator || !way.0.contains("tenant");
        all.into_iter().filter(may).collect()
    }

    fn is_way(&self, way: &str) -> bool {
        self.query.by == way
    }

    /// URL of the page with another month or way to sum.
    fn href(&self, month: &str, by: &str) -> String {
        let tenant = percent_encoded(&self.query.tenant);
        format!("/dashboard/costs?month={month}&by={by}&tenant={tenant}")
    }

    /// URL of the whole table as a file.
    fn csv_href(&self) -> String {
        let tenant = percent_encoded(&self.query.tenant);
        format!("/dashboard/costs/csv?month={}&by={}&tenant={tenant}", self.month, self.query.by)
    }

    fn day(sum: &ChargeSum) -> String {
        sum.day.map_or_else(String::new, day_text)
    }

    /// What a sum costs, rounded to what a person reads.
    fn cost(sum: &ChargeSum) -> String {
        let Some(charge) = &sum.charge else { return "no price".to_owned() };
        let amount = charge.nanounits as f64 / 1e9;
        let digits = if amount < 1.0 { 6 } else { 2 };
        format!("{amount:.digits$} {}", charge.currency.as_str())
    }

    /// Percent of a budget's hard or soft bound that is spent.
    fn percent(state: &BudgetState) -> u64 {
        let bound = state.budget.hard.or(state.budget.soft).unwrap_or(1).max(1);
        (state.spent as f64 * 100.0 / bound as f64).clamp(0.0, 999.0) as u64
    }

    fn amount(state: &BudgetState, nanounits: &Option<i64>) -> String {
        nanounits.map_or_else(String::new, |nanounits| state.charge(nanounits).to_string())
    }
}

/// The month of a query, or the present one, and the sums that a visitor may see.
async fn filter(
    app: &App,
    caller: &Caller,
    query: &CostsQuery,
) -> Result<(ChargeFilter, ChargeGroups), ApiError> {
    let (from, to) = match query.month.as_str() {
        "" => month_of_day(day_of(app.store.now().await?)),
        month => parse_month(month).ok_or_else(|| {
            ApiError::invalid_value("month", "month must be a month such as 2026-11")
        })?,
    };
    let named = (!query.tenant.is_empty()).then(|| Tenant(query.tenant.clone()));
    let tenant = if caller.may_operate() { named } else { Some(caller.tenant.clone()) };
    let invalid =
        |_| ApiError::invalid_value("by", "by must be a list of day, model, tier, key, tenant");
    let groups: ChargeGroups = query.by.parse().map_err(invalid)?;
    let groups = ChargeGroups { tenant: groups.tenant && caller.may_operate(), ..groups };
    Ok((ChargeFilter { tenant, from, to, ..ChargeFilter::default() }, groups))
}

/// Shows the costs of a month.
pub(crate) async fn show(visit: Visit, Query(mut query): Query<CostsQuery>) -> PageResult {
    if query.by.is_empty() {
        query.by = if visit.caller.may_operate() { "tenant,model" } else { "day,model" }.to_owned();
    }
    visit.show(move |app, caller| load(app, caller, query.clone())).await
}

async fn load(app: App, caller: Caller, query: CostsQuery) -> Result<Content, PageError> {
    let (filter, groups) = filter(&app, &caller, &query).await?;
    let (mut rows, more) = costs::sums(&app, &filter, groups).await?;
    let (total, _) = costs::sums(&app, &filter, ChargeGroups::default()).await?;
    let has_more = more || rows.len() > ROWS_MAX;
    rows.truncate(ROWS_MAX);
    let month = |day: Day| day_text(day)[..7].to_owned();
    let budgets = budgets::states(app.store.as_ref(), filter.tenant.as_ref()).await?;
    let view = CostsView {
        around: [month(filter.from - 1), month(filter.to)],
        month: month(filter.from),
        is_operator: caller.may_operate(),
        query,
        groups,
        rows,
        has_more,
        total,
        budgets,
    };
    Ok(Content::new("Costs", &view))
}

/// Returns the table of a month as a file for spreadsheets.
pub(crate) async fn csv(visit: Visit, Query(query): Query<CostsQuery>) -> PageResult {
    let (filter, groups) = filter(&visit.app, &visit.caller, &query).await?;
    let (sums, _) = costs::sums(&visit.app, &filter, groups).await?;
    Ok(costs::csv_response(filter.from, &sums))
}
