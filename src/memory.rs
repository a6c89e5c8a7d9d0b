//! The memory budget of a process, and what each model gets of it.

use anyhow::Context as _;
use tritmill_engine::{
    backend::cpu::PackedCache,
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

    /// Returns most of the memory that is available now.
    pub fn available() -> Self {
        Self::from_option(&MemoryOption { memory: None })
    }

    /// Chooses the KV memory of each model, where the options leave it open. Returns the complete options and the
    /// memory that each model takes. If all models fit together, they share what is left; else each one fits alone.
    ///
    /// # Errors
    /// [`load::OverBudget`] if a model does not fit alone.
    pub fn fit(&self, models: &[Candidate<'_>]) -> anyhow::Result<Vec<(EngineOptions, u64)>> {
        let budget = self.bytes.unwrap_or(u64::MAX);
        let placed = |candidate| Candidate { options: self.place_experts(candidate), ..*candidate };
        let models: Vec<Candidate<'_>> = models.iter().map(placed).collect();
        let mut demands = Vec::new();
        for candidate in &models {
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

impl Budget {
    /// Returns a model's options. If a packed file is in use, and the model fits only without its experts, they stay in that file.
    ///
    /// Where they fit they are in memory: in huge pages, and out of reach of what other programs read, which would make steps slow
    /// at any time.
    pub fn place_experts(&self, candidate: &Candidate<'_>) -> EngineOptions {
        let Candidate { name, model, options, device_count } = *candidate;
        let in_file = EngineOptions { packed_cache: PackedCache::Mapped, ..options };
        let is_open = options.packed_cache == PackedCache::On && options.device.is_cpu();
        let experts = load::expert_bytes(model, &options).filter(|_| is_open);
        let (Some(experts), Some(budget)) = (experts, self.bytes) else { return options };
        let fits = |options| {
            let candidate = Candidate { name, model, options, device_count };
            candidate.need(load::kv_bytes_min(model, &options)).check(budget).is_ok()
        };
        if fits(options) || !fits(in_file) {
            return options;
        }
        tracing::info!(
            model = name,
            expert_bytes = experts.all,
            budget_bytes = budget,
            "experts stay in the packed file: they do not fit in memory"
        );
        in_file
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
    fn experts_stay_in_their_file_where_they_do_not_fit_in_memory() {
        let golden = "engine/tests/golden/maple-tiny/maple-tiny-tq2_0.gguf";
        let open = |name: &str| {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
            Model::open(&path).expect("a golden model")
        };
        let chosen = |model: &Model, packed_cache, less: u64| {
            let threads = std::num::NonZeroUsize::new(1);
            let options = EngineOptions { threads, packed_cache, ..Default::default() };
            let candidate = Candidate { name: "maple", model, options, device_count: 1 };
            let all = candidate.need(load::kv_bytes_min(model, &options)).total();
            let budget = Budget { bytes: Some(all - less), is_given: false };
            let fitted = budget.fit(&[candidate]);
            fitted.map(|fitted| fitted[0].0.packed_cache).ok()
        };
        let (on, off, mapped) = (PackedCache::On, PackedCache::Off, PackedCache::Mapped);
        let model = open(golden);
        assert_eq!(chosen(&model, on, 0), Some(on));
        assert_eq!(chosen(&model, on, 1), Some(mapped));
        assert_eq!(chosen(&model, off, 1), None, "without a file to stay in");
        let experts = load::expert_bytes(&model, &EngineOptions::default()).expect("experts");
        assert_eq!(chosen(&model, on, experts.all + 1), None, "the rest does not fit either");
        assert_eq!(chosen(&open("engine/tests/golden/bitnet-tiny"), on, 1), None);
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
