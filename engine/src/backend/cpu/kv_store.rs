//! Storage of keys and values, block by block and layer by layer.
//!
//! A block's keys and values of all layers lie together, so that its first use takes memory for one block: zeroing a
//! huge page in each layer at the same time made a step 60 ms longer (2B shape).

use std::{marker::PhantomData, ops::Range};

use super::{KvType, disjoint::Disjoint, kv_layers::KvLayers};
use crate::{
    config::ModelConfig,
    formats::memory::AlignedBytes,
    kernels::float::{AttentionTile, FloatKernels, KvElement, LANES},
    kv::{BLOCK_TOKENS, BlockId},
};

const _: () = assert!(BLOCK_TOKENS == LANES, "a block of keys is one vector of positions");

/// Elements narrowed at a time.
const NARROW: usize = 128;

/// Bytes of a small page.
const PAGE: usize = 4096;
/// Blocks of at least this many bytes start an odd number of small pages apart, so that the same part of many blocks is
/// spread over all sets of a cache.
const SPREAD_BYTES_MIN: usize = 64 * PAGE;

/// Shape of one block in one layer.
#[derive(Debug, Clone, Copy)]
pub struct KvShape {
    /// Layers of a block.
    pub layer_count: usize,
    /// Key/value heads.
    pub kv_head_count: usize,
    /// Elements per head.
    pub head_dim: usize,
}

impl KvShape {
    /// Returns the KV shape of a model.
    pub fn from_config(config: &ModelConfig) -> Self {
        Self {
            layer_count: KvLayers::of(config).per_block,
            kv_head_count: config.kv_head_count,
            head_dim: config.head_dim,
        }
    }

    fn padded_head_dim(&self) -> usize {
        self.head_dim.next_multiple_of(LANES)
    }

    /// Returns the elements of a head's key, with zeros at the end: whole groups of adjacent elements of any type.
    fn padded_key_dim(&self) -> usize {
        self.head_dim.next_multiple_of(<i8 as KvElement>::ADJACENT)
    }

    fn key_stride(&self) -> usize {
        self.kv_head_count * self.padded_key_dim() * BLOCK_TOKENS
    }

    fn value_stride(&self) -> usize {
        self.kv_head_count * self.padded_head_dim() * BLOCK_TOKENS
    }

    fn scale_stride(&self) -> usize {
        self.kv_head_count * BLOCK_TOKENS
    }

    /// Returns the number of bytes of one block over all its layers.
    pub fn block_bytes(&self, kv: KvType) -> usize {
        let elements = (self.key_stride() + self.value_stride()) * kv.size_bytes();
        self.layer_count * (elements + 2 * self.scale_stride() * kv.scale_bytes())
    }

    /// Returns the number of bytes from the start of one block to the start of the next.
    pub fn block_stride_bytes(&self, kv: KvType) -> usize {
        block_stride_bytes(self.block_bytes(kv))
    }

    /// Returns the number of bytes of a store of `block_count` blocks.
    pub fn store_bytes(&self, kv: KvType, block_count: usize) -> usize {
        self.block_stride_bytes(kv) * block_count
    }
}

fn block_stride_bytes(block_bytes: usize) -> usize {
    match block_bytes {
        ..SPREAD_BYTES_MIN => block_bytes.next_multiple_of(64),
        SPREAD_BYTES_MIN.. => (block_bytes.div_ceil(PAGE) | 1) * PAGE,
    }
}

/// Keys and values of every block. They are on huge pages, because a head's part of a block is only one
/// small page long. Most pages take memory at their first write.
pub struct KvStore<E> {
    shape: KvShape,
    parts: Parts,
    block_count: usize,
    /// Of each block, with A = `E::ADJACENT`: the keys, as E `(layer, kv_head, head_dim / A, 16, A)`; the values, as E
    /// `(layer, kv_head, 16 / A, padded_head_dim, A)`; the scales of keys, as f32 `(layer, kv_head, 16)`, and those of values; no
    /// scales if the elements have none. Then padding.
    bytes: AlignedBytes, // (block, block stride)
    element: PhantomData<E>,
}

/// Bytes of a block's parts in one layer, and from block to block.
#[derive(Debug, Clone, Copy)]
struct Parts {
    keys: usize,
    values: usize,
    /// Of the scales of keys, and of those of values.
    scales: usize,
    block_stride: usize,
}

/// One layer's keys and values, shared by several tasks. Each array starts at the layer's part of block 0.
pub struct KvLayer<'a, E> {
    shape: KvShape,
    block_stride_bytes: usize,
    keys: Disjoint<'a, E>,
    values: Disjoint<'a, E>,
    key_scales: Disjoint<'a, f32>,
    value_scales: Disjoint<'a, f32>,
}

impl<E: KvElement + bytemuck::Pod> KvStore<E> {
    /// Makes storage for `block_count` blocks.
    pub fn new(shape: KvShape, block_count: usize) -> Self {
        let scales = if E::SCALED { shape.scale_stride() * size_of::<f32>() } else { 0 };
        let (keys, values) =
            (shape.key_stride() * size_of::<E>(), shape.value_stride() * size_of::<E>());
        let block_stride = block_stride_bytes(shape.layer_count * (keys + values + 2 * scales));
        let parts = Parts { keys, values, scales, block_stride };
        let bytes = AlignedBytes::zeroed(block_stride * block_count);
        Self { shape, parts, block_count, bytes, element: PhantomData }
    }

    /// Returns the place of a block's content.
    fn block(&self, block: BlockId) -> Range<usize> {
        let start = block.index() * self.parts.block_stride;
        start..start + self.block_bytes()
    }

    /// Takes memory for the first blocks, which hold nothing yet.
    pub fn ready_blocks(&mut self, count: usize) {
        let ready = count.min(self.block_count) * self.parts.block_stride;
        self.bytes[..ready].iter_mut().step_by(PAGE).for_each(|byte| *byte = 0);
    }

    /// Copies a block in every layer.
    pub fn copy_block(&mut self, from: BlockId, to: BlockId) {
        let (from, to) = (self.block(from), self.block(to));
        self.bytes.copy_within(from, to.start);
    }

    /// Returns storage of the same size with the contents of these blocks.
    pub fn with_copies(&self, blocks: &[BlockId]) -> Self {
        let mut copy = Self::new(self.shape, self.block_count);
        for block in blocks {
            let range = self.block(*block);
            copy.bytes[range.clone()].copy_from_slice(&self.bytes[range]);
        }
        copy
    }

    /// Returns the memory in bytes.
    #[cfg(test)]
    pub fn size_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Returns the number of bytes of one block over all its layers.
    pub fn block_bytes(&self) -> usize {
        let Parts { keys, values, scales, .. } = self.parts;
        self.shape.layer_count * (keys + values + 2 * scales)
    }

    /// Appends a block's keys, values and scales of all layers.
    pub fn read_block(&self, block: BlockId, content: &mut Vec<u8>) {
        content.extend_from_slice(&self.bytes[self.block(block)]);
    }

    /// Writes what [`Self::read_block`] returned.
    ///
    /// # Panics
    /// If the content is shorter or longer.
    pub fn write_block(&mut self, block: BlockId, content: &[u8]) {
        let range = self.block(block);
        self.bytes[range].copy_from_slice(content);
    }

    /// Borrows one layer of each block for the reads and writes of a step.
    pub fn layer(&mut self, layer: usize) -> KvLayer<'_, E> {
        let Parts { keys, values, scales, block_stride } = self.parts;
        let layers = self.shape.layer_count;
        let starts = [
            layer * keys,
            layers * keys + layer * values,
            layers * (keys + values) + layer * scales,
            layers * (keys + values + scales) + layer * scales,
        ];
        let all = Disjoint::new(&mut self.bytes);
        // A store without blocks has no bytes.
        let [keys, values, key_scales, value_scales] =
            starts.map(|start| all.after(start.min(self.block_count * block_stride)));
        KvLayer {
            shape: self.shape,
            block_stride_bytes: block_stride,
            keys: keys.of_type(),
            values: values.of_type(),
            key_scales: key_scales.of_type(),
            value_scales: value_scales.of_type(),
        }
    }
}

impl<E: KvElement> KvLayer<'_, E> {
    /// Returns the distance between two blocks in elements of a type.
    fn block_stride<T>(&self) -> usize {
        self.block_stride_bytes / size_of::<T>()
    }

    /// Returns the keys and values of one KV head and sequence within a window, as the attention kernel reads them.
    ///
    /// # Safety
    /// While the tile is used, no thread writes the sequence's blocks of this head.
    pub unsafe fn tile<'b>(
        &'b self,
        kv_head: usize,
        (blocks, window): (&'b [BlockId], usize),
    ) -> AttentionTile<'b, E> {
        let shape = self.shape;
        // SAFETY: guaranteed by the caller; the tile's other blocks and heads are not read.
        let (keys, values, key_scales, value_scales) = unsafe {
            (
                self.keys.stored(),
                self.values.stored(),
                self.key_scales.stored(),
                self.value_scales.stored(),
            )
        };
        AttentionTile {
            keys,
            values,
            key_block_stride: self.block_stride::<E>(),
            value_block_stride: self.block_stride::<E>(),
            key_head_offset: kv_head * shape.padded_key_dim() * BLOCK_TOKENS,
            value_head_offset: kv_head * shape.padded_head_dim() * BLOCK_TOKENS,
            key_scales,
            value_scales,
            scale_block_stride: self.block_stride::<f32>(),
            scale_head_offset: kv_head * BLOCK_TOKENS,
            blocks,
            head_dim: shape.head_dim,
            padded_head_dim: shape.padded_head_dim(),
            scale: 1.0 / (shape.head_dim as f32).sqrt(),
            window,
        }
    }

    /// Stores keys and values of a position for one KV head, both `(head_dim)`.
    ///
    /// # Safety
    /// No other thread reads or writes this position of the block for this head at the same time.
    pub unsafe fn write(
        &self,
        kernels: &FloatKernels,
        (blocks, position): (&[BlockId], usize),
        kv_head: usize,
        [keys, values]: [&[f32]; 2],
    ) {
        let (key_dim, padded) = (self.shape.padded_key_dim(), self.shape.padded_head_dim());
        let block = blocks[position / BLOCK_TOKENS].0 as usize;
        let slot = position % BLOCK_TOKENS;
        let (key_scale, value_scale) = (E::scale(kernels, keys), E::scale(kernels, values));
        let first = block * self.block_stride::<E>() + kv_head * key_dim * BLOCK_TOKENS;
        // SAFETY: one element of this position, which only the caller uses, here and below.
        narrow_each(kernels, keys, key_scale, |d, key: E| unsafe {
            let at = first + E::key_at(slot, d);
            self.keys.part(at..at + 1)[0] = key;
        });
        let first = block * self.block_stride::<E>() + kv_head * BLOCK_TOKENS * padded;
        if E::ADJACENT == 1 {
            let at = first + E::value_at(padded, slot, 0);
            // SAFETY: the elements of this position.
            let to = unsafe { self.values.part(at..at + values.len()) };
            E::narrow(kernels, values, value_scale, to);
        } else {
            // SAFETY: one element of this position, as above.
            narrow_each(kernels, values, value_scale, |d, value: E| unsafe {
                let at = first + E::value_at(padded, slot, d);
                self.values.part(at..at + 1)[0] = value;
            });
        }
        if E::SCALED {
            let at = block * self.block_stride::<f32>() + kv_head * BLOCK_TOKENS + slot;
            // SAFETY: the scales of this position, which only the caller uses.
            unsafe {
                self.key_scales.part(at..at + 1)[0] = key_scale;
                self.value_scales.part(at..at + 1)[0] = value_scale;
            }
        }
    }
}

/// Narrows elements by a scale, and calls `write` with each index and element.
fn narrow_each<E: KvElement>(
    kernels: &FloatKernels,
    elements: &[f32],
    scale: f32,
    mut write: impl FnMut(usize, E),
) {
    let mut narrow = [E::default(); NARROW];
    for (part, elements) in elements.chunks(NARROW).enumerate() {
        let narrow = &mut narrow[..elements.len()];
        E::narrow(kernels, elements, scale, narrow);
        for (i, &element) in narrow.iter().enumerate() {
            write(part * NARROW + i, element);
        }
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    fn check<E: KvElement + bytemuck::Pod>(kv: KvType, block_bytes: usize, pages: usize) {
        let shape = KvShape { layer_count: 3, kv_head_count: 5, head_dim: 128 };
        assert_eq!(shape.block_bytes(kv), block_bytes, "{kv:?}");
        assert_eq!(KvStore::<E>::new(shape, 4).size_bytes(), 4 * block_bytes, "{kv:?}");
        assert_eq!(shape.store_bytes(kv, 4), 4 * block_bytes, "{kv:?}");
        let deep = KvShape { layer_count: 30, ..shape };
        assert_eq!(KvStore::<E>::new(deep, 1).block_bytes(), 10 * block_bytes, "{kv:?}");
        assert_eq!(deep.block_stride_bytes(kv), pages * PAGE, "{kv:?}: an odd number");
    }

    #[test]
    fn layers_lie_side_by_side_in_every_block() {
        let shape = KvShape { layer_count: 2, kv_head_count: 1, head_dim: 16 };
        let mut store = KvStore::<i8>::new(shape, 3);
        let Parts { keys, values, scales, .. } = store.parts;
        let ends = [keys, values, scales, scales].map(|part| [part; 2]);
        let mut content: Vec<u8> = Vec::new();
        for (part, bytes) in ends.as_flattened().iter().enumerate() {
            content.resize(content.len() + bytes, part as u8 + 1);
        }
        store.write_block(BlockId(1), &content);
        for layer in 0..2 {
            let layer = (store.layer(layer), layer as u8);
            let (KvLayer { keys, values, key_scales, value_scales, .. }, index) = layer;
            let stride = shape.block_stride_bytes(KvType::Q8);
            // SAFETY: no other part is taken meanwhile.
            unsafe {
                assert_eq!(keys.part(stride..stride + 1), [1 + index as i8]);
                assert_eq!(values.part(stride..stride + 1), [3 + index as i8]);
                for (scales, first) in [(key_scales, 5), (value_scales, 7)] {
                    let scale = scales.part(stride / 4..stride / 4 + 1)[0];
                    assert_eq!(scale.to_le_bytes(), [first + index; 4]);
                }
            }
        }
    }

    #[test]
    fn copies_have_the_contents_of_the_given_blocks() {
        let shape = KvShape { layer_count: 2, kv_head_count: 1, head_dim: 16 };
        let mut store = KvStore::<i8>::new(shape, 4);
        let content = |block: u8| vec![block + 1; shape.block_bytes(KvType::Q8)];
        (0..4).for_each(|block| store.write_block(BlockId(block.into()), &content(block)));
        let mut copy = store.with_copies(&[BlockId(1), BlockId(3)]);
        let read = |block| {
            let mut bytes = Vec::new();
            copy.read_block(BlockId(block), &mut bytes);
            bytes
        };
        assert_eq!((read(1), read(3)), (content(1), content(3)));
        assert_eq!(read(0), vec![0; content(0).len()]);
        copy.write_block(BlockId(1), &content(8));
        let mut bytes = Vec::new();
        store.read_block(BlockId(1), &mut bytes);
        assert_eq!(bytes, content(1), "the original is unchanged");
    }

    #[test]
    fn block_bytes_equal_the_storage_of_a_block() {
        let positions = 3 * 2 * 5 * 16;
        check::<f16>(KvType::F16, positions * 256, 301);
        check::<f32>(KvType::F32, positions * 512, 601);
        check::<i8>(KvType::Q8, positions * 132, 155);
    }
}
