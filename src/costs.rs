//! `tritmill costs`: prices, budgets, and what answers cost.

use std::process::ExitCode;

use anyhow::{Context as _, bail};
use clap::{ArgGroup, Args, Subcommand};
use serde_json::{Value, json};
use tritmill_admin::{
    costs::csv,
    days::{day_text, month_of_day, parse_month},
    store::{
        audit::AuditEntry,
        budgets::{Budget, BudgetOf, BudgetPeriod},
    },
};
use tritmill_queue::{
    Tenant,
    billing::{Currency, Price, parse_amount, parse_price, write_price},
    store::charges::{ChargeFilter, ChargeGroups, ChargeSum, PriceOf, day_of},
};
use uuid::Uuid;

use crate::{block_on, keys::StoreOptions, output};

/// Most sums that are printed.
const SUMS_MAX: u32 = 1_000_000;

/// Set prices and budgets, and sum what answers cost.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Sum what the answers of a month cost
    Show(Show),
    /// List the prices
    Prices(Prices),
    /// Set or remove the price of a model
    Price(PriceArguments),
    /// List the budgets
    Budgets(Budgets),
    /// Set or remove a budget of a tenant or API key
    Budget(BudgetArguments),
}

/// Sum what the answers of a month cost.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tritmill costs show --by tenant
  tritmill costs show --month 2026-11 --by day,tenant,model --csv > november.csv")]
pub struct Show {
    /// The month [default: this month]
    #[arg(long, value_name = "YYYY-MM")]
    month: Option<String>,
    /// What to sum by: day, tenant, key, model and tier, separated by commas [default: all answers]
    #[arg(long, value_name = "LIST")]
    by: Option<ChargeGroups>,
    /// One tenant
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// Print a table with commas for spreadsheets, instead of JSON
    #[arg(long)]
    csv: bool,
    #[command(flatten)]
    store_options: StoreOptions,
}

/// List the prices.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  tritmill costs prices\n  tritmill costs prices --store tritmill.sqlite"
)]
pub struct Prices {
    #[command(flatten)]
    store_options: StoreOptions,
}

/// Set or remove the price of a model, per million tokens.
///
/// The most specific price counts: that of the model and tier, of the model, of the tier, then that of everything. An answer
/// keeps what it cost when it came.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("change").required(true).args(["input", "remove"]), after_help = "\
Examples:
  tritmill costs price bitnet-2b --currency EUR --input 0.05 --output 0.20
  tritmill costs price '*' --tier batch --currency EUR --input 0.02 --cached-input 0.01 --output 0.08
  tritmill costs price bitnet-2b --remove")]
pub struct PriceArguments {
    /// Model without a format, or `*` for every model without a price of its own
    #[arg(value_name = "MODEL")]
    model: String,
    /// priority, default, flex, batch or background, or `*` for every one without a price of its own
    #[arg(long, value_name = "TIER", default_value = "*")]
    tier: String,
    /// Currency: three to eight capital letters or digits
    #[arg(long, value_name = "CODE", requires = "input")]
    currency: Option<Currency>,
    /// Price of a million tokens of prompts
    #[arg(long, value_name = "AMOUNT", value_parser = parse_price, requires_all = ["currency", "output"])]
    input: Option<u64>,
    /// Price of a million tokens of prompts that were not computed again [default: as --input]
    #[arg(long, value_name = "AMOUNT", value_parser = parse_price, requires = "input")]
    cached_input: Option<u64>,
    /// Price of a million generated tokens
    #[arg(long, value_name = "AMOUNT", value_parser = parse_price, requires = "input")]
    output: Option<u64>,
    /// Remove the price
    #[arg(long)]
    remove: bool,
    #[command(flatten)]
    store_options: StoreOptions,
}

/// List the budgets.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  tritmill costs budgets\n  tritmill costs budgets acme")]
pub struct Budgets {
    /// One tenant
    #[arg(value_name = "TENANT")]
    tenant: Option<String>,
    #[command(flatten)]
    store_options: StoreOptions,
}

/// Set or remove a budget of a tenant or API key.
///
/// From the hard bound on new work is refused with status 403 until the period ends; work that was accepted goes on. Without
/// bounds the budget is removed.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tritmill costs budget acme --currency EUR --soft 80 --hard 100
  tritmill costs budget acme --key 019aa0de-3f5c-7d61-b8f7-2c7f1d9b7c11 --period day --currency EUR --hard 5
  tritmill costs budget acme                    # no budget of a month any more")]
pub struct BudgetArguments {
    /// Tenant, which may be a new one
    #[arg(value_name = "TENANT")]
    tenant: String,
    /// One of its API keys, by id
    #[arg(long, value_name = "ID")]
    key: Option<Uuid>,
    /// day or month, in UTC
    #[arg(long, default_value = "month")]
    period: BudgetPeriod,
    /// Currency: charges in others do not count
    #[arg(long, value_name = "CODE")]
    currency: Option<Currency>,
    /// From here on it is reported as nearly spent
    #[arg(long, value_name = "AMOUNT", value_parser = parse_amount, requires = "currency")]
    soft: Option<i64>,
    /// From here on new work is refused
    #[arg(long, value_name = "AMOUNT", value_parser = parse_amount, requires = "currency")]
    hard: Option<i64>,
    #[command(flatten)]
    store_options: StoreOptions,
}

/// Runs the command.
pub fn run(command: Command) -> anyhow::Result<ExitCode> {
    block_on(async {
        match command {
            Command::Show(arguments) => show(arguments).await,
            Command::Prices(arguments) => prices(&arguments.store_options).await,
            Command::Price(arguments) => price(arguments).await,
            Command::Budgets(arguments) => budgets(arguments).await,
            Command::Budget(arguments) => budget(arguments).await,
        }
    })
}

async fn show(arguments: Show) -> anyhow::Result<ExitCode> {
    let store = arguments.store_options.open().await?;
    let (from, to) = match &arguments.month {
        Some(month) => parse_month(month).context("--month must be a month such as 2026-11")?,
        None => month_of_day(day_of(store.now().await.context("cannot read the time")?)),
    };
    let tenant = arguments.tenant.map(Tenant);
    let filter = ChargeFilter { tenant, from, to, ..ChargeFilter::default() };
    let groups = arguments.by.unwrap_or_default();
    let sums = store.charges(&filter, groups, SUMS_MAX).await.context("cannot sum the costs")?;
    if arguments.csv {
        output::line(csv(&sums).trim_end())?;
        return Ok(ExitCode::SUCCESS);
    }
    for sum in &sums {
        output::json(line(sum))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns a sum with what it is summed by.
fn line(sum: &ChargeSum) -> Value {
    let mut line = json!({});
    let names = [
        ("day", sum.day.map(day_text)),
        ("tenant", sum.tenant.as_ref().map(|tenant| tenant.0.clone())),
        ("key", sum.key.clone()),
        ("model", sum.model.clone()),
        ("tier", sum.tier.map(|tier| tier.as_str().to_owned())),
    ];
    for (name, value) in names {
        if let Some(value) = value {
            line[name] = json!(value);
        }
    }
    line["answers"] = json!(sum.answers);
    line["input_tokens"] = json!(sum.usage.prompt_tokens);
    line["cached_tokens"] = json!(sum.usage.cached_tokens);
    line["output_tokens"] = json!(sum.usage.completion_tokens);
    if let Some(charge) = &sum.charge {
        line["currency"] = json!(charge.currency);
        line["cost"] = json!(charge.amount());
    }
    line
}

async fn prices(store_options: &StoreOptions) -> anyhow::Result<ExitCode> {
    for (of, price) in
        store_options.open().await?.prices().await.context("cannot list the prices")?
    {
        let (model, tier) = of.names();
        output::json(json!({
            "model": model,
            "tier": tier,
            "currency": price.currency,
            "input": write_price(price.input),
            "cached_input": write_price(price.cached_input),
            "output": write_price(price.output),
        }))?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn price(arguments: PriceArguments) -> anyhow::Result<ExitCode> {
    let of = PriceOf::parse(&arguments.model, &arguments.tier)?;
    let store = arguments.store_options.open().await?;
    let PriceArguments { currency, input, cached_input, output, .. } = arguments;
    let tier = arguments.tier;
    let Some(((currency, input), output)) = currency.zip(input).zip(output) else {
        let detail = json!({ "tier": tier });
        let line = AuditEntry::from_command_line("price.delete", &arguments.model, detail);
        store.record_audit(&line).await.context("cannot write the audit log")?;
        if !store.delete_price(&of).await.context("cannot remove the price")? {
            bail!("there is no such price: see tritmill costs prices");
        }
        note!("the price is removed");
        return Ok(ExitCode::SUCCESS);
    };
    let price = Price { currency, input, cached_input: cached_input.unwrap_or(input), output };
    let detail = json!({
        "tier": tier,
        "currency": price.currency,
        "input": write_price(price.input),
        "cached_input": write_price(price.cached_input),
        "output": write_price(price.output),
    });
    let line = AuditEntry::from_command_line("price.set", &arguments.model, detail);
    store.record_audit(&line).await.context("cannot write the audit log")?;
    store.set_price(&of, &price).await.context("cannot set the price")?;
    note!("the price is set");
    Ok(ExitCode::SUCCESS)
}

async fn budgets(arguments: Budgets) -> anyhow::Result<ExitCode> {
    let store = arguments.store_options.open().await?;
    let tenant = arguments.tenant.map(Tenant);
    for state in tritmill_admin::budgets::states(store.as_ref(), tenant.as_ref())
        .await
        .context("cannot list the budgets")?
    {
        let Budget { of, currency, soft, hard, .. } = &state.budget;
        let amount = |nanounits| state.charge(nanounits).amount();
        output::json(json!({
            "tenant": of.tenant,
            "key": of.key,
            "period": of.period.as_str(),
            "currency": currency,
            "soft": soft.map(amount),
            "hard": hard.map(amount),
            "spent": amount(state.spent),
        }))?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn budget(arguments: BudgetArguments) -> anyhow::Result<ExitCode> {
    let BudgetArguments { tenant, key, period, currency, soft, hard, store_options } = arguments;
    if tenant.is_empty() {
        bail!("TENANT must not be empty");
    }
    if soft.zip(hard).is_some_and(|(soft, hard)| soft > hard) {
        bail!("--soft must be at most --hard");
    }
    let store = store_options.open().await?;
    let detail = json!({
        "key": key, "period": period.as_str(), "currency": currency, "soft": soft, "hard": hard,
    });
    let line = AuditEntry::from_command_line("budget.set", &tenant, detail);
    store.record_audit(&line).await.context("cannot write the audit log")?;
    let of = BudgetOf { tenant: Tenant(tenant), key, period };
    match currency {
        Some(currency) if soft.is_some() || hard.is_some() => {
            let set_at = store.now().await.context("cannot read the time")?;
            let budget = Budget { of, currency, soft, hard, set_at };
            store.set_budget(&budget).await.context("cannot set the budget")?;
            note!("the budget is set");
        }
        _ => {
            let was_there = store.delete_budget(&of).await.context("cannot remove the budget")?;
            note!(
                "{}",
                if was_there { "the budget is removed" } else { "there was no such budget" }
            );
        }
    }
    Ok(ExitCode::SUCCESS)
}
