//! The memory budget of a process, and what each model gets of it.

use anyhow::Context as _;
use tritmill_engine::{
    files::Model,
    load::{self, EngineOptions, MemoryNeed},
};
use tritmill_worker::machine::Machine;

use crate::options::MemoryOption;

/// Options that make a model fit, for error messages.
const HELP: &str = "raise --memory, or lower it with --kv-memory, --kv q8, --head full, --format tl2, \
                    --max-sequences, --kv-host-memory or --threads";

/// Memory that models may take.
#[derive(Debug, Clone, Copy)]
pub struct Budget {
    /// In bytes; `None` if nothing is known.
    pub bytes: Option<u64>,
    /// Whether the user chose it: then KV caches may take all that is left.
    is_given: bool,
}

/// A model, and how it is run.
pub struct Candidate<'a> {
    /// For messages.
    pub name: &'a str,
    pub model: &'a Model,
    pub options: EngineOptions,
    /// Engines, each with its own weights, KV cache and buffers.
    pub device_count: usize,
}

impl Budget {
    /// Returns the budget of the option, else most of the memory that is available now.
    pub fn from_option(option: &MemoryOption) -> Self {
        // The rest is for everything else in the process.
        let available = || Machine::read().memory_available_bytes.map(|bytes| bytes / 16 * 15);
        Self { bytes: option.memory.or_else(available), is_given: option.memory.is_some() }
    }

    /// Chooses the KV memory of each model, where the options leave it open. Returns the complete options and the
    /// memory that each model takes. If all models fit together, they share what is left; else each one fits alone.
    ///
    /// # Errors
    /// [`load::OverBudget`] if a model does not fit alone.
    pub fn fit(&self, models: &[Candidate<'_>]) -> anyhow::Result<Vec<(EngineOptions, u64)>> {
        let budget = self.bytes.unwrap_or(u64::MAX);
        let mut demands = Vec::new();
        for candidate in models {
            let least = candidate.need(load::kv_bytes_min(candidate.model, &candidate.options));
            let fits = least.check(budget).context(HELP);
            fits.with_context(|| format!("model {} does not fit", candidate.name))?;
            let usual = load::kv_bytes_default(candidate.model);
            let limit = if self.is_given { u64::MAX } else { usual };
            let most = candidate.need(limit);
            demands.push(KvDemand {
                fixed: least.total() - least.kv,
                least: least.kv,
                most: most.kv,
                usual,
            });
        }
        let kv_bytes = share(budget, &demands);
        let with = |(candidate, kv_bytes): (&Candidate<'_>, u64)| {
            let of_one = kv_bytes / candidate.device_count.max(1) as u64;
            (candidate.with_kv(of_one), candidate.need(of_one).total())
        };
        Ok(models.iter().zip(kv_bytes).map(with).collect())
    }
}

impl Candidate<'_> {
    /// Returns the options with at most this much KV memory, unless they state it. That of GPUs stays open.
    fn with_kv(&self, kv_bytes: u64) -> EngineOptions {
        let is_open = self.options.kv_bytes.is_none() && self.options.device.is_cpu();
        let kv_bytes = if is_open { Some(kv_bytes) } else { self.options.kv_bytes };
        EngineOptions { kv_bytes, ..self.options }
    }

    /// Returns what all engines need, with this much KV memory for each.
    fn need(&self, kv_bytes: u64) -> MemoryNeed {
        let need = load::memory_needed(self.model, &self.with_kv(kv_bytes));
        let all = |bytes: u64| bytes.saturating_mul(self.device_count as u64);
        MemoryNeed { weights: all(need.weights), kv: all(need.kv), scratch: all(need.scratch) }
    }
}

/// What a model takes in any case, and its least, most and usual KV memory.
#[derive(Debug, Clone, Copy)]
struct KvDemand {
    fixed: u64,
    least: u64,
    most: u64,
    usual: u64,
}

/// Returns the KV memory of each model. Each one fits the budget alone.
fn share(budget: u64, demands: &[KvDemand]) -> Vec<u64> {
    let together =
        demands.iter().fold(0u64, |sum, demand| sum.saturating_add(demand.fixed + demand.least));
    let Some(mut left) = budget.checked_sub(together) else {
        let alone = |demand: &KvDemand| {
            demand.most.min(budget - demand.fixed).min(demand.usual).max(demand.least)
        };
        return demands.iter().map(alone).collect();
    };
    let mut kv_bytes: Vec<u64> = demands.iter().map(|demand| demand.least).collect();
    let more = |demand: &KvDemand| demand.most.saturating_sub(demand.least);
    let mut order: Vec<usize> = (0..demands.len()).collect();
    // Who wants least first: what it does not need is for the others.
    order.sort_by_key(|&index| more(&demands[index]));
    for (place, &index) in order.iter().enumerate() {
        let part = more(&demands[index]).min(left / (order.len() - place) as u64);
        kv_bytes[index] += part;
        left -= part;
    }
    kv_bytes
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn demand(fixed: u64, least: u64, most: u64) -> KvDemand {
        KvDemand { fixed, least, most, usual: 1 << 30 }
    }

    #[test]
    fn models_that_fit_together_share_the_rest_and_others_fit_alone() {
        assert_eq!(share(100, &[demand(10, 5, 500)]), [90]);
        assert_eq!(share(100, &[demand(10, 5, 20)]), [20]);
        assert_eq!(
            share(100, &[demand(10, 5, 500), demand(20, 5, 10), demand(10, 0, 0)]),
            [50, 10, 0]
        );
        assert_eq!(share(100, &[demand(60, 5, 500), demand(50, 5, 10)]), [40, 10]);
        assert_eq!(share(100, &[demand(10, 90, 90), demand(10, 5, 500)]), [90, 90]);
        assert_eq!(share(u64::MAX, &[demand(10, 5, 7), demand(10, 5, 8)]), [7, 8]);
    }

    #[test]
    fn model_gets_what_is_left_and_is_refused_without_room_for_a_sequence() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("engine/tests/golden/bitnet-tiny");
        let model = Model::open(&golden).expect("a golden model");
        let options =
            EngineOptions { threads: std::num::NonZeroUsize::new(1), ..Default::default() };
        let fit = |bytes: u64| {
            let budget = Budget { bytes: Some(bytes), is_given: true };
            let candidate = Candidate { name: "tiny", model: &model, options, device_count: 1 };
            budget.fit(&[candidate])
        };
        let all = load::memory_needed(&model, &options);
        let (_, taken) = fit(all.total() + (1 << 20)).expect("it fits")[0];
        assert_eq!(taken, all.total(), "no more than the sequences need");
        let tight = all.total() - all.kv / 2;
        let (options, taken) = fit(tight).expect("it fits with fewer blocks")[0];
        assert!(taken <= tight && taken > tight - (1 << 20), "{taken} of {tight}");
        assert!(options.kv_bytes.expect("chosen") < all.kv);
        let two = Candidate { name: "tiny", model: &model, options, device_count: 2 };
        let budget = Budget { bytes: Some(2 * all.total() - all.kv), is_given: true };
        let (halved, taken) = budget.fit(&[two]).expect("it fits with fewer blocks")[0];
        assert!(taken <= 2 * all.total() - all.kv, "{taken}");
        assert!(
            halved.kv_bytes.expect("chosen") <= all.kv / 2 + (1 << 20),
            "each engine has its own"
        );
        let error = fit(all.weights).expect_err("there is no room for buffers");
        assert!(error.downcast_ref::<load::OverBudget>().is_some());
        let text = format!("{error:#}");
        assert!(text.contains("model tiny does not fit") && text.contains("--kv q8"), "{text}");
    }
}
