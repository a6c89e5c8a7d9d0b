//! Kernels on one thread: the matrices of a model with 2 billion weights, and its attention.
//!
//! ```text
//! cargo bench --bench kernels                      (all)
//! cargo bench --bench kernels -- i2_s/2560-6912/32 (one, by name)
//! cargo bench --bench kernels -- groups            (scales of groups, as in Ternary Bonsai)
//! cargo bench --bench kernels -- attention         (of a decode, for each KV type)
//! cargo bench --bench kernels -- tile-stores       (of AMX, by the steps between them)
//! TRITMILL_ISA=avx2 cargo bench --bench kernels
//! ```
//!
//! It first prints the machine's limits: products per second in registers, and bytes per second from
//! memory. Each result is followed by its share of the nearer limit, computed from the pass at the first decile: on a
//! shared machine the others say how busy its neighbours are. The matrices are too many for any weight to stay in a cache.

#![allow(missing_docs, reason = "macros of the harness make public functions")]

use std::{
    hint::black_box,
    marker::PhantomData,
    time::{Duration, Instant},
};

use bytemuck::Pod;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use half::f16;
use memmap2::{Advice, MmapMut};
use tritmill_engine::{
    formats::{Format, GroupScales, PackedMatrix, Scale, TILE_ROWS, TernaryMatrix},
    kernels::{
        self, Activations, Digits, GroupActivations, GroupShape, Isa, SCALED_INPUTS,
        float::{AttentionTile, FloatKernels, KvElement, LANES},
    },
    kv::BlockId,
    measure,
};

/// Outputs and inputs of the feed-forward linears of the 2B shape.
const SHAPES: [(usize, usize); 2] = [(6912, 2560), (2560, 6912)];
/// Enough matrices to exceed the caches.
const MATRICES: usize = 24;
const ROWS: [usize; 6] = [1, 4, 8, 16, 32, 512];
/// Tiles of a task, as in the engine.
const TASK_TILES: usize = 4;
const AMX_TASK_TILES: usize = 16;
const PASSES: usize = 10;

fn isa() -> Isa {
    let named = std::env::var("TRITMILL_ISA").ok();
    named.map_or_else(Isa::detect, |name| name.parse().expect("TRITMILL_ISA names an ISA"))
}

/// Returns whether the filter of the command line, if there is one, is about a group of benchmarks.
fn is_selected(group: &str) -> bool {
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with('-'));
    filter.is_none_or(|filter| filter.starts_with(group) || group.starts_with(&filter))
}

fn matrix(format: Format, (outputs, inputs): (usize, usize), seed: usize) -> PackedMatrix {
    let trit = |i: usize| ((i + seed).wrapping_mul(2_654_435_761) >> 7) % 3;
    let trits: Vec<i8> = (0..outputs * inputs).map(|i| trit(i) as i8 - 1).collect();
    PackedMatrix::pack(format, outputs, inputs, &trits).expect("the shape can be packed")
}

fn activations(format: Format, inputs: usize, rows: usize) -> Activations {
    let mut x = Activations::new();
    x.reset(format, inputs, rows);
    for row in 0..rows {
        let q: Vec<i8> = (0..inputs).map(|i| (i * 31 + row * 17) as u8 as i8).collect();
        x.set_row(row, &q);
    }
    x
}

/// Returns the time of a pass over a matrix in seconds, at the first decile of [`PASSES`] passes or of all matrices.
fn pass(matrices: &[PackedMatrix], rows: usize, mut one: impl FnMut(&PackedMatrix)) -> f64 {
    let count = if rows > 32 { PASSES } else { 2 * MATRICES };
    let mut time = |matrix: &PackedMatrix| {
        let started = Instant::now();
        one(matrix);
        started.elapsed().as_secs_f64()
    };
    let mut times: Vec<f64> = matrices.iter().cycle().take(count).map(&mut time).collect();
    times.sort_by(f64::total_cmp);
    times[count / 10]
}

fn products(c: &mut Criterion) {
    if !Format::ALL.iter().any(|format| is_selected(&format.to_string())) {
        return;
    }
    let isa = isa();
    let bandwidth = measure::memory_bandwidth(1, None);
    let peak = measure::product_peak(isa, 1);
    let peak_text = peak.map_or("unknown".to_owned(), |peak| format!("{:.0} G", peak / 1e9));
    println!("{isa}, one thread: {peak_text} products/s, {:.1} GB/s from memory", bandwidth / 1e9);
    let task_tiles = if isa == Isa::Amx { AMX_TASK_TILES } else { TASK_TILES };
    for (format, shape) in Format::ALL.into_iter().flat_map(|f| SHAPES.map(|shape| (f, shape))) {
        if !is_selected(&format.to_string()) {
            continue;
        }
        let (outputs, inputs) = shape;
        let matrices: Vec<PackedMatrix> =
            (0..MATRICES).map(|seed| matrix(format, shape, seed)).collect();
        let mut group = c.benchmark_group(format!("{format}/{inputs}-{outputs}"));
        group.sample_size(10).measurement_time(Duration::from_secs(1));
        group.warm_up_time(Duration::from_millis(200));
        for rows in ROWS {
            let x = activations(format, inputs, rows);
            let mut y = vec![0i32; rows * task_tiles * TILE_ROWS];
            let mut one = |matrix: &PackedMatrix| {
                for first in (0..matrix.tile_count()).step_by(task_tiles) {
                    let tiles = first..(first + task_tiles).min(matrix.tile_count());
                    kernels::gemm(isa, matrix, tiles, black_box(&x).all(), &mut y);
                }
                black_box(&y);
            };
            let count = (rows * outputs * inputs) as f64;
            group.throughput(Throughput::Elements(count as u64));
            let mut next = matrices.iter().cycle();
            group.bench_function(rows.to_string(), |b| {
                b.iter(|| one(next.next().expect("a cycle never ends")));
            });
            let time = pass(&matrices, rows, one);
            let (rate, read) = (count / time, matrices[0].size_bytes() as f64 / time);
            let share = peak.map_or(0.0, |peak| rate / peak).max(read / bandwidth);
            println!(
                "{format}, {inputs} to {outputs}, {rows} rows: {:.0} G products/s, {:.1} GB/s, {:.0} % of the limit",
                rate / 1e9,
                read / 1e9,
                share * 100.0
            );
        }
        group.finish();
    }
}

/// Outputs and inputs of the feed-forward linears of Ternary Bonsai 2 9B.
const GROUP_SHAPES: [(usize, usize); 2] = [(12_288, 4096), (4096, 12_288)];

/// Products with a scale for each group of inputs, with one digit and two.
fn group_products(_: &mut Criterion) {
    if !is_selected("groups") {
        return;
    }
    let (isa, format) = (isa(), Format::I2S);
    let Some(peak) = measure::product_peak(isa, 1) else { return };
    println!("{isa}, one thread: {:.0} G products/s", peak / 1e9);
    for (outputs, inputs) in GROUP_SHAPES {
        let matrices: Vec<PackedMatrix> = (0..MATRICES / 4)
            .map(|seed| {
                let trit = |i: usize| ((i + seed).wrapping_mul(2_654_435_761) >> 7) % 3;
                let trits = (0..outputs * inputs).map(|i| trit(i) as i8 - 1).collect();
                let scale = |i: usize| f16::from_f32((i % 97 + 1) as f32 / 999.0);
                let scales = (0..outputs * inputs / SCALED_INPUTS).map(scale).collect();
                let groups = Some(GroupScales { size: SCALED_INPUTS, scales });
                let scale = Scale::Multiply(1.0);
                let matrix = TernaryMatrix { rows: outputs, cols: inputs, trits, scale, groups };
                PackedMatrix::pack_matrix(format, &matrix).expect("the shape can be packed")
            })
            .collect();
        for (digits, rows) in Digits::ALL.into_iter().flat_map(|d| ROWS.map(|rows| (d, rows))) {
            let shape = GroupShape { format, digits, cols: inputs, group: SCALED_INPUTS };
            let mut x = GroupActivations::default();
            x.reset(shape, rows);
            let q: Vec<i8> = (0..inputs * digits.count()).map(|i| (i * 31) as u8 as i8).collect();
            (0..rows).for_each(|row| x.set_row(row, &q, &vec![0.01; shape.scales()]));
            let mut y = vec![0f32; rows * TASK_TILES * TILE_ROWS];
            let time = pass(&matrices, rows, |matrix| {
                for first in (0..matrix.tile_count()).step_by(TASK_TILES) {
                    let tiles = first..(first + TASK_TILES).min(matrix.tile_count());
                    kernels::gemm_groups(isa, matrix, tiles, black_box(x.all()), &mut y);
                }
                black_box(&y);
            });
            let rate = (rows * outputs * inputs * digits.count()) as f64 / time;
            println!(
                "groups, {digits}, {inputs} to {outputs}, {rows} rows: {:.0} G products/s, {:.0} % of the limit",
                rate / 1e9,
                rate / peak * 100.0
            );
        }
    }
}

/// Positions that a decode attends to.
const CONTEXTS: [usize; 3] = [128, 1000, 4000];
/// Query heads per KV head, and elements per head.
const GROUP: usize = 4;
const HEAD_DIM: usize = 128;
/// KV heads and layers: at the longest context, 0.6 GB of keys and values in f16 exceed every cache.
const KV_HEADS: usize = 5;
const LAYERS: usize = 60;

/// Bytes of a small page.
const PAGE: usize = 4096;
/// Elements of a block in one layer: of its keys, and of its values.
const LAYER_ELEMENTS: usize = KV_HEADS * LANES * HEAD_DIM;

/// Keys and values of one type, and the queries of a KV head at the last position.
struct Attention<E> {
    /// As in the engine: all layers of a block together, blocks an odd number of pages apart, huge pages.
    stored: MmapMut, // (block, keys and values, layer, kv_head, 16 * HEAD_DIM), of E
    block_stride: usize, // elements
    scales: Vec<f32>,    // (block, kv_head, 16)
    blocks: Vec<BlockId>,
    queries: Vec<f32>,
    positions: [usize; GROUP],
    scratch: Vec<f32>,
    out: Vec<f32>,
    element: PhantomData<E>,
}

impl<E: KvElement + Pod> Attention<E> {
    fn new(kernels: &FloatKernels, context: usize) -> Self {
        let count = context.div_ceil(LANES);
        let block_bytes = 2 * LAYERS * LAYER_ELEMENTS * size_of::<E>();
        let stride = (block_bytes.div_ceil(PAGE) | 1) * PAGE;
        let mut stored = MmapMut::map_anon(count * stride).expect("memory for keys and values");
        #[cfg(target_os = "linux")]
        stored.advise(Advice::HugePage).expect("advice about memory");
        let x = |i: usize| ((i * 31) % 255) as f32 - 127.0;
        let x: Vec<f32> = (0..block_bytes / size_of::<E>()).map(x).collect();
        let mut block = vec![E::default(); x.len()];
        E::narrow(kernels, &x, 1.0, &mut block);
        for to in stored.chunks_exact_mut(stride) {
            to[..block_bytes].copy_from_slice(bytemuck::cast_slice(&block));
        }
        // Blocks of a sequence are not contiguous.
        let block = |i: usize| BlockId((i * 7919 % count) as u32);
        Self {
            stored,
            block_stride: stride / size_of::<E>(),
            scales: vec![0.01; count * KV_HEADS * LANES],
            blocks: (0..count).map(block).collect(),
            queries: (0..GROUP * HEAD_DIM).map(|i| (i % 13) as f32 * 0.01).collect(),
            positions: [context - 1; GROUP],
            scratch: Vec::new(),
            out: vec![0.0; GROUP * HEAD_DIM],
            element: PhantomData,
        }
    }

    /// Attention of one token in all layers.
    fn run(&mut self, kernels: &FloatKernels) {
        let stored: &[E] = bytemuck::cast_slice(&self.stored);
        for layer in 0..LAYERS {
            for kv_head in 0..KV_HEADS {
                let offset = kv_head * LANES * HEAD_DIM;
                let tile = AttentionTile {
                    keys: stored[layer * LAYER_ELEMENTS..].into(),
                    values: stored[(LAYERS + layer) * LAYER_ELEMENTS..].into(),
                    key_block_stride: self.block_stride,
                    value_block_stride: self.block_stride,
                    key_head_offset: offset,
                    value_head_offset: offset,
                    key_scales: self.scales[..].into(),
                    value_scales: self.scales[..].into(),
                    scale_block_stride: KV_HEADS * LANES,
                    scale_head_offset: kv_head * LANES,
                    blocks: &self.blocks,
                    head_dim: HEAD_DIM,
                    padded_head_dim: HEAD_DIM,
                    scale: 0.01,
                    window: usize::MAX,
                };
                let (queries, positions) = (&self.queries, &self.positions);
                kernels.attention(&tile, queries, positions, &mut self.scratch, &mut self.out);
            }
        }
        black_box(&self.out);
    }
}

/// Attention of a decode: f16 and q8 in turns, so that other load on the machine affects both alike.
fn attention(c: &mut Criterion) {
    if !is_selected("attention") {
        return;
    }
    let isa = isa();
    let kernels = FloatKernels::for_isa(isa).expect("this machine has the ISA");
    let mut group = c.benchmark_group("attention");
    group.sample_size(10).measurement_time(Duration::from_secs(1));
    group.warm_up_time(Duration::from_millis(200));
    for context in CONTEXTS {
        let mut half = Attention::<f16>::new(kernels, context);
        let mut int8 = Attention::<i8>::new(kernels, context);
        group.throughput(Throughput::Elements((context * LAYERS) as u64));
        group.bench_function(format!("f16/{context}"), |b| b.iter(|| half.run(kernels)));
        group.bench_function(format!("q8/{context}"), |b| b.iter(|| int8.run(kernels)));
        let mut times = [Vec::new(), Vec::new()];
        for _ in 0..PASSES * 8 {
            for (kind, times) in times.iter_mut().enumerate() {
                let started = Instant::now();
                if kind == 0 {
                    half.run(kernels)
                } else {
                    int8.run(kernels)
                }
                times.push(started.elapsed().as_secs_f64());
            }
        }
        let [half, int8] = times.map(|mut times| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2] * 1e6 / LAYERS as f64
        });
        println!(
            "{isa}, context {context}: {half:.1} µs per layer in f16, {int8:.1} in q8: {:.2} times as fast",
            half / int8
        );
    }
    group.finish();
}

/// Numbers of AMX steps between two tile stores.
const STEPS: [usize; 8] = [8, 16, 24, 30, 32, 34, 40, 80];

/// What an AMX tile store costs, by the number of steps since the one before.
fn tile_stores(_: &mut Criterion) {
    if !is_selected("tile-stores") {
        return;
    }
    for steps in STEPS {
        match measure::tile_store(steps) {
            Some(cost) => {
                println!("tile store after {steps} steps: the time of {cost:.1} products")
            }
            None => return println!("tile-stores: this machine has no AMX"),
        }
    }
}

criterion_group!(benches, products, group_products, attention, tile_stores);
criterion_main!(benches);
