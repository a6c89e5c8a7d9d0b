//! The memory and the numerics class of an engine, before its model is loaded.

pub use crate::backend::cpu::packed_file::ExpertsInFile;

use super::{DeviceChoice, EngineOptions, state_bytes};
use crate::{
    EngineConfig,
    backend::{
        STEP_ROWS,
        class::{self, Choices},
        cpu::{
            self, PackedCache,
            memory::{self, StepSize},
            packed_file,
        },
    },
    files::{Model, ModelError},
};

/// The least KV memory that an engine gets by default, unless its sequences cannot use as much.
const KV_BYTES_MIN: u64 = 64 << 20;

/// The memory of the processor that an engine takes, in bytes. An engine on a GPU has its weights and KV blocks
/// there, and takes only scratch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryNeed {
    /// Packed matrices, and the head with its copies; without experts that stay in their file, of which the system keeps in
    /// memory what it has room for.
    pub weights: u64,
    /// Storage of the KV blocks, and of the states of recurrent layers.
    pub kv: u64,
    /// Buffers of the largest step, or of loading if that takes more.
    pub scratch: u64,
}

/// A model needs more memory than it may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "it needs {} of memory, {} for weights, {} for the KV cache and {} for buffers, and the budget is {}",
    mib(.need.total()), mib(.need.weights), mib(.need.kv), mib(.need.scratch), mib(*.budget)
)]
pub struct OverBudget {
    /// What it needs at least.
    pub need: MemoryNeed,
    /// The budget in bytes.
    pub budget: u64,
}

/// Formats bytes as `1.5 MiB`, rounded up.
fn mib(bytes: u64) -> String {
    let tenths = (u128::from(bytes) * 10).div_ceil(1 << 20);
    format!("{}.{} MiB", tenths / 10, tenths % 10)
}

impl MemoryNeed {
    /// Checks that the sum is within a budget in bytes.
    ///
    /// # Errors
    /// [`OverBudget`] if it is not.
    pub fn check(self, budget: u64) -> Result<(), OverBudget> {
        if self.total() > budget { Err(OverBudget { need: self, budget }) } else { Ok(()) }
    }

    /// Returns the sum.
    pub fn total(&self) -> u64 {
        self.weights.saturating_add(self.kv).saturating_add(self.scratch)
    }
}

/// Returns the memory that an engine with these options takes, from the shapes of the model alone.
pub fn memory_needed(model: &Model, options: &EngineOptions) -> MemoryNeed {
    let config = model.config();
    let rows = EngineConfig::new(config.context_length).token_budget.max(options.max_sequences);
    let activations = options.activations(model);
    let (sequences, threads) = (options.max_sequences, options.threads());
    let size = StepSize { rows, sequences, threads, activations };
    let loading = memory::load_bytes(config) as u64;
    if let DeviceChoice::Cuda(_) = options.device.resolved() {
        let logits = 4 * (options.max_sequences * config.vocab_size) as u64;
        return MemoryNeed { weights: 0, kv: 0, scratch: logits.max(loading) };
    }
    let step = memory::step_bytes(config, options.format, size) as u64;
    let weights = memory::weight_bytes(model, options.format, options.head) as u64;
    let in_file = match options.packed_cache {
        PackedCache::Mapped => memory::expert_bytes(config, options.format) as u64,
        PackedCache::Off | PackedCache::On => 0,
    };
    MemoryNeed {
        weights: weights - in_file,
        kv: (memory::kv_bytes(model, options.kv, options.block_count(model))
            + options.all_states(model) * state_bytes(model)) as u64,
        scratch: step.max(loading),
    }
}

/// The packed matrices of a model's experts, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertBytes {
    /// Of all experts.
    pub all: u64,
    /// Of those that one token goes through.
    pub of_token: u64,
}

/// Returns how much of the weights are experts, from the shapes of the model alone; `None` for a model without experts.
pub fn expert_bytes(model: &Model, options: &EngineOptions) -> Option<ExpertBytes> {
    let experts = model.config().experts.as_ref()?;
    let all = memory::expert_bytes(model.config(), options.format);
    let of_token = all / experts.count * experts.used;
    Some(ExpertBytes { all: all as u64, of_token: of_token as u64 })
}

/// Returns how much of a model's experts lies in its packed file, and how much of that is in memory now; `None` without experts or
/// such a file.
pub fn experts_in_file(model: &Model, options: &EngineOptions) -> Option<ExpertsInFile> {
    packed_file::experts_in_file(model, options.format, options.head)
}

/// Returns the least KV memory to give an engine, in bytes: what one sequence of full length takes, at most 64 MiB.
/// If the options state the KV memory, that much.
pub fn kv_bytes_min(model: &Model, options: &EngineOptions) -> u64 {
    if options.kv_bytes.is_some() || !options.device.is_cpu() {
        return memory_needed(model, options).kv;
    }
    let blocks = cpu::layer_groups(model).blocks_for(model.config().context_length, STEP_ROWS);
    // Half of the memory may be states.
    (memory::kv_bytes(model, options.kv, blocks) as u64).min(KV_BYTES_MIN)
        + 2 * state_bytes(model) as u64
}

/// Returns the numerics class of the engine that these options make. The first call for a model reads all of it, unless
/// the packed weights beside it state its fingerprint.
///
/// # Errors
/// If a tensor cannot be decoded.
pub fn numerics_class(model: &Model, options: &EngineOptions) -> Result<String, ModelError> {
    let backend = match options.device.resolved() {
        DeviceChoice::Cuda(_) => "cuda",
        _ => "cpu",
    };
    let EngineOptions { format, kv, head, activations, .. } = *options;
    if options.packed_cache != PackedCache::Off {
        packed_file::recall_fingerprint(model, format, head);
    }
    class::numerics_class(model, Choices { kv, head, activations }, backend)
}

#[cfg(test)]
mod tests {
    use std::{path::Path, sync::Arc};

    use super::*;
    use crate::{
        backend::cpu::{HeadMode, KvType, topology},
        load,
    };

    #[test]
    fn class_and_blocks_equal_those_of_the_loaded_engine() {
        for name in ["bitnet-tiny", "llama-norm-tiny", "gguf/synth-i2_s-q6k.gguf"] {
            let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
            let model = Arc::new(Model::open(&golden).expect("a golden model"));
            for head in [HeadMode::Exact, HeadMode::Full, HeadMode::Q8] {
                for kv in [KvType::F16, KvType::Q8] {
                    let kv_bytes = Some(1 << 20);
                    let options = EngineOptions { kv, head, kv_bytes, ..EngineOptions::default() };
                    let engine = load::engine(&model, &options).expect("it loads");
                    let class = numerics_class(&model, &options).expect("it can be read");
                    assert_eq!(class, engine.backend().numerics_class(), "{name}");
                    let held = engine.backend().block_bytes() * engine.backend().block_count();
                    assert_eq!(memory_needed(&model, &options).kv, held as u64, "{name}");
                }
            }
        }
    }

    #[test]
    fn engine_on_a_memory_node_uses_its_cores_and_is_of_the_same_class() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/bitnet-tiny");
        let model = Arc::new(Model::open(&golden).expect("a golden model"));
        let on = |device| EngineOptions { device, kv_bytes: Some(1 << 20), ..Default::default() };
        let node = &topology::memory_nodes()[0];
        let options = on(DeviceChoice::CpuNode(node.number));
        assert_eq!(options.threads(), node.cores.len().min(topology::core_limit()));
        let engine = load::engine(&model, &options).expect("it loads");
        let whole = load::engine(&model, &on(DeviceChoice::Cpu)).expect("it loads");
        assert_eq!(engine.backend().numerics_class(), whole.backend().numerics_class());
        let refused = load::engine(&model, &on(DeviceChoice::CpuNode(4095))).map(drop);
        let error = refused.expect_err("there is no such node").to_string();
        assert!(error.contains("node 4095") && error.contains("cpu:"), "{error}");
    }

    #[test]
    fn need_over_the_budget_is_an_error_with_its_parts() {
        let need = MemoryNeed { weights: 3 << 20, kv: 1 << 20, scratch: 1 << 19 };
        assert_eq!(need.check(need.total()), Ok(()));
        let error = need.check(need.total() - 1).expect_err("a byte too much").to_string();
        let parts = "4.5 MiB of memory, 3.0 MiB for weights, 1.0 MiB for the KV cache and 0.5 MiB for buffers";
        assert!(error.contains(parts) && error.ends_with("the budget is 4.5 MiB"), "{error}");
        let most = MemoryNeed { weights: u64::MAX, kv: u64::MAX, scratch: 1 };
        assert!(most.check(1 << 40).is_err());
    }

    #[test]
    fn experts_that_stay_in_their_file_are_not_counted() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
        let open = |name: &str| Model::open(&golden.join(name)).expect("a golden model");
        let on = EngineOptions { packed_cache: PackedCache::On, ..EngineOptions::default() };
        let mapped = EngineOptions { packed_cache: PackedCache::Mapped, ..on };
        let weights = |model, options| memory_needed(model, options).weights;
        let maple = open("maple-tiny/maple-tiny-tq2_0.gguf");
        let experts = expert_bytes(&maple, &on).expect("it has experts");
        assert_eq!(experts.of_token, experts.all / 8 * 3);
        assert_eq!(weights(&maple, &on) - weights(&maple, &mapped), experts.all);
        let dense = open("bitnet-tiny");
        assert_eq!(expert_bytes(&dense, &on), None);
        assert_eq!(weights(&dense, &on), weights(&dense, &mapped));
    }

    #[test]
    fn more_sequences_and_threads_need_more_and_a_gpu_needs_little() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/bitnet-tiny");
        let model = Model::open(&golden).expect("a golden model");
        let few = EngineOptions { max_sequences: 2, threads: None, ..EngineOptions::default() };
        let many = EngineOptions { max_sequences: 600, ..few };
        let (less, more) = (memory_needed(&model, &few), memory_needed(&model, &many));
        assert!(less.scratch < more.scratch && less.kv < more.kv, "{less:?} {more:?}");
        assert_eq!(less.weights, more.weights);
        assert!(kv_bytes_min(&model, &few) < less.kv, "room for one sequence");
        let gpu = EngineOptions { device: DeviceChoice::Cuda(0), ..many };
        let on_gpu = memory_needed(&model, &gpu);
        assert_eq!((on_gpu.weights, on_gpu.kv, kv_bytes_min(&model, &gpu)), (0, 0, 0));
    }
}
