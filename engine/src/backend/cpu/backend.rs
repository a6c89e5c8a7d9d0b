//! The parts of a CPU engine. What a step computes is in [`forward`](super::forward) and the files that it names.

use std::sync::Arc;

use super::{
    CpuOptions,
    buffers::Buffers,
    delta::States,
    kv_layers::KvLayers,
    kv_store::{KvShape, KvStore},
    pool::Pool,
    screen::ScreenState,
    weights::Weights,
};
use crate::{
    backend::{class, positions::Rope, slot_sets::SetsOf},
    kernels::{
        Digits, Isa,
        float::{FloatKernels, KvElement},
    },
};

/// Weights, KV storage and threads of one CPU engine.
pub(super) struct CpuBackend<E> {
    pub weights: Arc<Weights>,
    pub kernels: &'static FloatKernels,
    pub isa: Isa,
    pub pool: Pool,
    pub kv: KvStore<E>,
    pub kv_layers: KvLayers,
    /// States of recurrent layers, of each engine that shares this.
    pub states: SetsOf<States>,
    pub block_count: usize,
    pub numerics_class: String,
    pub rope: Rope,
    /// Digits of the activations of linears, for matrices with scales of groups.
    pub digits: Digits,
    pub buffers: Buffers,
    pub screen_state: ScreenState,
}

impl<E: KvElement + bytemuck::Pod> CpuBackend<E> {
    /// Makes the KV pool and starts the threads.
    pub(super) fn new(
        weights: Arc<Weights>,
        kernels: &'static FloatKernels,
        options: CpuOptions,
        numerics_class: String,
    ) -> Self {
        let config = weights.config();
        let kv = KvStore::new(KvShape::from_config(config), options.block_count);
        let kv_layers = KvLayers::of(config);
        let states = SetsOf::new(States::new(config, options.slots));
        let rope = Rope::from_config(config);
        let digits = class::digits(config, options.activations);
        Self {
            weights,
            kernels,
            isa: options.isa,
            pool: Pool::new(options.node, options.threads),
            kv,
            kv_layers,
            states,
            block_count: options.block_count,
            numerics_class,
            rope,
            digits,
            buffers: Buffers::default(),
            screen_state: ScreenState::default(),
        }
    }

    /// Returns a backend with the same weights, options and kernels, and these storages; it starts threads of its own.
    pub(super) fn with_storage(&self, kv: KvStore<E>, states: SetsOf<States>) -> Self {
        Self {
            weights: Arc::clone(&self.weights),
            kernels: self.kernels,
            isa: self.isa,
            pool: Pool::new(self.pool.node(), self.pool.threads()),
            kv,
            kv_layers: self.kv_layers.clone(),
            states,
            block_count: self.block_count,
            numerics_class: self.numerics_class.clone(),
            rope: self.rope.clone(),
            digits: self.digits,
            buffers: Buffers::default(),
            screen_state: ScreenState::default(),
        }
    }
}
