//! Storage of keys and values, block by block and layer by layer.

use std::marker::PhantomData;

use super::{KvType, disjoint::Disjoint};
use crate::{
    config::ModelConfig,
    formats::memory::AlignedBytes,
    kernels::float::{AttentionTile, FloatKernels, KvElement, LANES},
    kv::{BLOCK_TOKENS, BlockId},
};

const _: () = assert!(BLOCK_TOKENS == LANES, "a block of keys is one vector of positions");

/// Elements narrowed at a time.
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
    /// Returns the KV shape of a model.
    pub fn of(config: &ModelConfig) -> Self {
        Self {
            layer_count: config.layer_count,
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

    /// Returns the number of bytes of one block over all layers.
    pub fn block_bytes(&self, kv: KvType) -> usize {
        let elements = (self.key_stride() + self.value_stride()) * kv.size_bytes();
        self.layer_count * (elements + 2 * self.scale_stride() * kv.scale_bytes())
    }

    /// Returns the number of bytes of a store of `block_count` blocks.
    pub fn store_bytes(&self, kv: KvType, block_count: usize) -> usize {
        let scales = self.scale_stride() * kv.scale_bytes();
        let parts = [self.key_stride() * kv.size_bytes(), self.value_stride() * kv.size_bytes()];
        let parts = parts.into_iter().chain([scales, scales]);
        let layer: usize = parts.map(|part| (part * block_count).next_multiple_of(64)).sum();
        self.layer_count * layer
    }
}

/// Keys and values of every block. They are on huge pages, because a head's part of a block is only one
/// small page long. A page takes memory at its first write.
pub struct KvStore<E> {
    shape: KvShape,
    block_count: usize,
    keys: Vec<AlignedBytes>, // of E, per layer: (block, kv_head, head_dim / A, 16, A), A = E::ADJACENT
    values: Vec<AlignedBytes>, // of E, per layer: (block, kv_head, 16 / A, padded_head_dim, A)
    key_scales: Vec<AlignedBytes>, // of f32, per layer: (block, kv_head, 16); empty without scales
    value_scales: Vec<AlignedBytes>, // like `key_scales`
    element: PhantomData<E>,
}

/// One layer's keys and values, shared by several tasks.
pub struct KvLayer<'a, E> {
    shape: KvShape,
    keys: Disjoint<'a, E>,
    values: Disjoint<'a, E>,
    key_scales: Disjoint<'a, f32>,
    value_scales: Disjoint<'a, f32>,
}

impl<E: KvElement + bytemuck::Pod> KvStore<E> {
    /// Makes storage for `block_count` blocks.
    pub fn new(shape: KvShape, block_count: usize) -> Self {
        let layers = |block_bytes: usize| {
            let layer = || AlignedBytes::zeroed((block_bytes * block_count).next_multiple_of(64));
            (0..shape.layer_count).map(|_| layer()).collect()
        };
        let [keys, values, scales] = Self::part_bytes(&shape);
        Self {
            shape,
            block_count,
            keys: layers(keys),
            values: layers(values),
            key_scales: layers(scales),
            value_scales: layers(scales),
            element: PhantomData,
        }
    }

    /// Returns a block's bytes in one layer: of its keys, of its values, and of the scales of one of the two.
    fn part_bytes(shape: &KvShape) -> [usize; 3] {
        let scales = if E::SCALED { shape.scale_stride() * size_of::<f32>() } else { 0 };
        [shape.key_stride() * size_of::<E>(), shape.value_stride() * size_of::<E>(), scales]
    }

    /// Copies a block in every layer.
    pub fn copy_block(&mut self, from: BlockId, to: BlockId) {
        let copy = |layers: &mut [AlignedBytes], bytes: usize| {
            for layer in layers {
                let from = from.0 as usize * bytes;
                layer.copy_within(from..from + bytes, to.0 as usize * bytes);
            }
        };
        let [keys, values, scales] = Self::part_bytes(&self.shape);
        copy(&mut self.keys, keys);
        copy(&mut self.values, values);
        copy(&mut self.key_scales, scales);
        copy(&mut self.value_scales, scales);
    }

    /// Returns storage of the same size with the contents of these blocks.
    pub fn with_copies(&mut self, blocks: &[BlockId]) -> Self {
        let mut copy = Self::new(self.shape, self.block_count);
        for ((from, bytes), (to, _)) in self.parts().zip(copy.parts()) {
            for block in blocks {
                let range = block.index() * bytes..(block.index() + 1) * bytes;
                to[range.clone()].copy_from_slice(&from[range]);
            }
        }
        copy
    }

    /// Returns the parts of each layer with the bytes of a block in them, in the order of a block's content.
    fn parts(&mut self) -> impl Iterator<Item = (&mut AlignedBytes, usize)> {
        let [keys, values, scales] = Self::part_bytes(&self.shape);
        let keys = self.keys.iter_mut().map(move |layer| (layer, keys));
        let values = self.values.iter_mut().map(move |layer| (layer, values));
        let key_scales = self.key_scales.iter_mut();
        let all_scales = key_scales.chain(&mut self.value_scales).map(move |layer| (layer, scales));
        keys.chain(values).chain(all_scales)
    }

    /// Returns the memory in bytes.
    #[cfg(test)]
    pub fn size_bytes(&self) -> usize {
        let parts = [&self.keys, &self.values, &self.key_scales, &self.value_scales];
        parts.into_iter().flatten().map(|layer| layer.len()).sum()
    }

    /// Returns the number of bytes of one block over all layers.
    pub fn block_bytes(&self) -> usize {
        let [keys, values, scales] = Self::part_bytes(&self.shape);
        self.shape.layer_count * (keys + values + 2 * scales)
    }

    /// Appends a block's keys, values and scales of all layers.
    pub fn read_block(&mut self, block: BlockId, content: &mut Vec<u8>) {
        for (layer, bytes) in self.parts() {
            let from = block.index() * bytes;
            content.extend_from_slice(&layer[from..from + bytes]);
        }
    }

    /// Writes what [`Self::read_block`] returned.
    ///
    /// # Panics
    /// If the content is shorter or longer.
    pub fn write_block(&mut self, block: BlockId, content: &[u8]) {
        assert_eq!(content.len(), self.block_bytes(), "the content of one block");
        let mut rest = content;
        for (layer, bytes) in self.parts() {
            let (part, after) = rest.split_at(bytes);
            let to = block.index() * bytes;
            layer[to..to + bytes].copy_from_slice(part);
            rest = after;
        }
    }

    /// Borrows one layer for the reads and writes of a step.
    pub fn layer(&mut self, layer: usize) -> KvLayer<'_, E> {
        KvLayer {
            shape: self.shape,
            keys: Disjoint::new(bytemuck::cast_slice_mut(&mut self.keys[layer])),
            values: Disjoint::new(bytemuck::cast_slice_mut(&mut self.values[layer])),
            key_scales: Disjoint::new(bytemuck::cast_slice_mut(&mut self.key_scales[layer])),
            value_scales: Disjoint::new(bytemuck::cast_slice_mut(&mut self.value_scales[layer])),
        }
    }
}

impl<E: KvElement> KvLayer<'_, E> {
    /// Returns the keys and values of one KV head and sequence, as the attention kernel reads them.
    ///
    /// # Safety
    /// While the tile is used, no thread writes the sequence's blocks of this head.
    pub unsafe fn tile<'b>(
        &'b self,
        kv_head: usize,
        blocks: &'b [BlockId],
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
            key_block_stride: shape.key_stride(),
            value_block_stride: shape.value_stride(),
            key_head_offset: kv_head * shape.padded_key_dim() * BLOCK_TOKENS,
            value_head_offset: kv_head * shape.padded_head_dim() * BLOCK_TOKENS,
            key_scales,
            value_scales,
            scale_block_stride: shape.scale_stride(),
            scale_head_offset: kv_head * BLOCK_TOKENS,
            blocks,
            head_dim: shape.head_dim,
            padded_head_dim: shape.padded_head_dim(),
            scale: 1.0 / (shape.head_dim as f32).sqrt(),
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
        let first = block * self.shape.key_stride() + kv_head * key_dim * BLOCK_TOKENS;
        // SAFETY: one element of this position, which only the caller uses, here and below.
        narrow_each(kernels, keys, key_scale, |d, key: E| unsafe {
            let at = first + E::key_at(slot, d);
            self.keys.part(at..at + 1)[0] = key;
        });
        let first = block * self.shape.value_stride() + kv_head * BLOCK_TOKENS * padded;
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
            let at = block * self.shape.scale_stride() + kv_head * BLOCK_TOKENS + slot;
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

    fn check<E: KvElement + bytemuck::Pod>(kv: KvType, block_bytes: usize) {
        let shape = KvShape { layer_count: 3, kv_head_count: 5, head_dim: 128 };
        assert_eq!(shape.block_bytes(kv), block_bytes, "{kv:?}");
        let store = KvStore::<E>::new(shape, 4);
        let held = store.size_bytes();
        assert_eq!(held, 4 * block_bytes, "{kv:?}");
        assert_eq!(held, shape.store_bytes(kv, 4), "{kv:?}");
    }

    #[test]
    fn copies_have_the_contents_of_the_given_blocks() {
        let shape = KvShape { layer_count: 2, kv_head_count: 1, head_dim: 16 };
        let mut store = KvStore::<i8>::new(shape, 4);
        let content = |block: u8| vec![block + 1; shape.block_bytes(KvType::Q8)];
        (0..4).for_each(|block| store.write_block(BlockId(block.into()), &content(block)));
        let mut copy = store.with_copies(&[BlockId(1), BlockId(3)]);
        let mut read = |block| {
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
        check::<f16>(KvType::F16, positions * 256);
        check::<f32>(KvType::F32, positions * 512);
        check::<i8>(KvType::Q8, positions * 132);
    }
}
