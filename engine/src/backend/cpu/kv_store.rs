//! Storage of keys and values, block by block and layer by layer.

use std::marker::PhantomData;

use crate::formats::memory::AlignedBytes;
use crate::kernels::float::{AttentionTile, FloatKernels, KvElement, LANES};
use crate::kv::{BLOCK_TOKENS, BlockId};

const _: () = assert!(BLOCK_TOKENS == LANES, "a block of keys is one vector of positions");

/// Elements of keys that are narrowed at a time.
const NARROW: usize = 128;

/// Shape of one block in one layer.
#[derive(Debug, Clone, Copy)]
pub struct KvShape {
    /// Transformer layers.
    pub layer_count: usize,
    /// Key/value heads.
    pub kv_head_count: usize,
    /// Elements per head.
    pub head_dim: usize,
}

impl KvShape {
    fn padded_head_dim(&self) -> usize {
        self.head_dim.next_multiple_of(LANES)
    }

    fn key_stride(&self) -> usize {
        self.kv_head_count * self.head_dim * BLOCK_TOKENS
    }

    fn value_stride(&self) -> usize {
        self.kv_head_count * self.padded_head_dim() * BLOCK_TOKENS
    }

    /// Elements of one block over all layers.
    pub fn block_elements(&self) -> usize {
        self.layer_count * (self.key_stride() + self.value_stride())
    }
}

/// Keys and values of every block, on huge pages: a head's part of a block is one small page. They
/// cost no memory until they are written.
pub struct KvStore<E> {
    shape: KvShape,
    keys: Vec<AlignedBytes>, // of E, per layer: (block, kv_head, head_dim, 16)
    values: Vec<AlignedBytes>, // of E, per layer: (block, kv_head, 16, padded_head_dim)
    element: PhantomData<E>,
}

/// One layer's keys and values, writable by several tasks at once.
pub struct KvLayerMut<'a, E> {
    shape: KvShape,
    keys: super::disjoint::Disjoint<'a, E>,
    values: super::disjoint::Disjoint<'a, E>,
}

impl<E: KvElement + bytemuck::Pod> KvStore<E> {
    /// Room for `block_count` blocks.
    pub fn new(shape: KvShape, block_count: usize) -> Self {
        let layer = |stride: usize| {
            AlignedBytes::zeroed((stride * block_count * size_of::<E>()).next_multiple_of(64))
        };
        Self {
            shape,
            keys: (0..shape.layer_count).map(|_| layer(shape.key_stride())).collect(),
            values: (0..shape.layer_count).map(|_| layer(shape.value_stride())).collect(),
            element: PhantomData,
        }
    }

    /// Copies a block in every layer.
    pub fn copy_block(&mut self, from: BlockId, to: BlockId) {
        let copy = |data: &mut AlignedBytes, stride: usize| {
            let data: &mut [E] = bytemuck::cast_slice_mut(data);
            let from = from.0 as usize * stride;
            data.copy_within(from..from + stride, to.0 as usize * stride);
        };
        for keys in &mut self.keys {
            copy(keys, self.shape.key_stride());
        }
        for values in &mut self.values {
            copy(values, self.shape.value_stride());
        }
    }

    /// One layer, for writing the step's keys and values.
    pub fn layer_mut(&mut self, layer: usize) -> KvLayerMut<'_, E> {
        KvLayerMut {
            shape: self.shape,
            keys: super::disjoint::Disjoint::new(bytemuck::cast_slice_mut(&mut self.keys[layer])),
            values: super::disjoint::Disjoint::new(bytemuck::cast_slice_mut(
                &mut self.values[layer],
            )),
        }
    }

    /// What attention reads for one layer, KV head and sequence.
    pub fn tile<'a>(
        &'a self,
        layer: usize,
        kv_head: usize,
        blocks: &'a [BlockId],
    ) -> AttentionTile<'a, E> {
        let shape = self.shape;
        AttentionTile {
            keys: bytemuck::cast_slice(&self.keys[layer]),
            values: bytemuck::cast_slice(&self.values[layer]),
            key_block_stride: shape.key_stride(),
            value_block_stride: shape.value_stride(),
            key_head_offset: kv_head * shape.head_dim * BLOCK_TOKENS,
            value_head_offset: kv_head * shape.padded_head_dim() * BLOCK_TOKENS,
            blocks,
            head_dim: shape.head_dim,
            padded_head_dim: shape.padded_head_dim(),
            scale: 1.0 / (shape.head_dim as f32).sqrt(),
        }
    }
}

impl<E: KvElement> KvLayerMut<'_, E> {
    /// Stores one position's keys and values, both `(kv_head, head_dim)`.
    ///
    /// # Safety
    /// No other thread may write the same position of the same block meanwhile.
    pub unsafe fn write(
        &self,
        kernels: &FloatKernels,
        blocks: &[BlockId],
        position: usize,
        keys: &[f32],
        values: &[f32],
    ) {
        let KvShape { kv_head_count, head_dim, .. } = self.shape;
        let padded = self.shape.padded_head_dim();
        let block = blocks[position / BLOCK_TOKENS].0 as usize;
        let slot = position % BLOCK_TOKENS;
        let mut narrow = [E::default(); NARROW];
        for (part, keys) in keys.chunks(NARROW).enumerate() {
            E::narrow(kernels, keys, &mut narrow[..keys.len()]);
            let first = block * self.shape.key_stride() + part * NARROW * BLOCK_TOKENS + slot;
            for (row, &key) in narrow[..keys.len()].iter().enumerate() {
                let at = first + row * BLOCK_TOKENS;
                // SAFETY: one element of this position, which is the caller's alone.
                unsafe { self.keys.part(at..at + 1)[0] = key };
            }
        }
        for (head, values) in values.chunks_exact(head_dim).take(kv_head_count).enumerate() {
            let at = block * self.shape.value_stride() + (head * BLOCK_TOKENS + slot) * padded;
            // SAFETY: the elements of this position, which are the caller's alone.
            E::narrow(kernels, values, unsafe { self.values.part(at..at + head_dim) });
        }
    }
}
