//! One thread's kernels on the matrices of a model of 2 billion weights:
//!
//! ```text
//! cargo bench --bench kernels                      (all of them)
//! cargo bench --bench kernels -- i2_s/32           (one, by its name)
//! TRITMILL_ISA=avx2 cargo bench --bench kernels
//! ```
//!
//! First it says what the machine can do at best: products a second with everything in registers, and
//! bytes a second from memory. After each product follows its share of the nearer of these limits,
//! by the median of passes over enough matrices to leave no weight in a cache.

#![allow(missing_docs, reason = "macros of the harness make public functions")]

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use tritmill_engine::{
    formats::{Format, PackedMatrix, TILE_ROWS},
    kernels::{self, Activations, Isa},
    measure,
};

/// Outputs and inputs of a feed-forward linear of the 2B shape.
const OUTPUTS: usize = 6912;
const INPUTS: usize = 2560;
/// So many matrices are more than a cache.
const MATRICES: usize = 24;
const ROWS: [usize; 6] = [1, 4, 8, 16, 32, 512];
const PASSES: usize = 5;

fn isa() -> Isa {
    let named = std::env::var("TRITMILL_ISA").ok();
    named.map_or_else(Isa::detect, |name| name.parse().expect("TRITMILL_ISA names an ISA"))
}

fn matrix(format: Format, seed: usize) -> PackedMatrix {
    let trit = |i: usize| ((i + seed).wrapping_mul(2_654_435_761) >> 7) % 3;
    let trits: Vec<i8> = (0..OUTPUTS * INPUTS).map(|i| trit(i) as i8 - 1).collect();
    PackedMatrix::pack(format, OUTPUTS, INPUTS, &trits).expect("the shape is a good one")
}

fn activations(format: Format, rows: usize) -> Activations {
    let mut x = Activations::new();
    x.reset(format, INPUTS, rows);
    for row in 0..rows {
        let q: Vec<i8> = (0..INPUTS).map(|i| (i * 31 + row * 17) as u8 as i8).collect();
        x.set_row(row, &q);
    }
    x
}

fn products(c: &mut Criterion) {
    let isa = isa();
    let bandwidth = measure::memory_bandwidth(1, None);
    let peak = measure::product_peak(isa, 1);
    let peak_text = peak.map_or("unknown".to_owned(), |peak| format!("{:.0} G", peak / 1e9));
    println!("{isa}, one thread: {peak_text} products/s, {:.1} GB/s from memory", bandwidth / 1e9);
    for format in Format::ALL {
        let matrices: Vec<PackedMatrix> = (0..MATRICES).map(|seed| matrix(format, seed)).collect();
        let mut group = c.benchmark_group(format.to_string());
        group.sample_size(10).measurement_time(Duration::from_secs(1));
        group.warm_up_time(Duration::from_millis(200));
        for rows in ROWS {
            let x = activations(format, rows);
            let mut y = vec![0i32; rows * 4 * TILE_ROWS];
            let mut one = |matrix: &PackedMatrix| {
                for first in (0..matrix.tile_count()).step_by(4) {
                    let tiles = first..(first + 4).min(matrix.tile_count());
                    kernels::gemm(isa, matrix, tiles, black_box(&x), &mut y);
                }
                black_box(&y);
            };
            let count = (rows * OUTPUTS * INPUTS) as f64;
            group.throughput(Throughput::Elements(count as u64));
            let mut next = matrices.iter().cycle();
            group.bench_function(rows.to_string(), |b| {
                b.iter(|| one(next.next().expect("cycles have no end")));
            });
            let mut passes: Vec<f64> = (0..PASSES)
                .map(|_| {
                    let (started, of_pass) = (Instant::now(), if rows > 32 { 3 } else { MATRICES });
                    matrices[..of_pass].iter().for_each(&mut one);
                    started.elapsed().as_secs_f64() / of_pass as f64
                })
                .collect();
            passes.sort_by(f64::total_cmp);
            let time = passes[PASSES / 2];
            let (rate, read) = (count / time, matrices[0].size_bytes() as f64 / time);
            let share = peak.map_or(0.0, |peak| rate / peak).max(read / bandwidth);
            println!(
                "{format}, {rows} rows: {:.0} G products/s, {:.1} GB/s, {:.0} % of the limit",
                rate / 1e9,
                read / 1e9,
                share * 100.0
            );
        }
        group.finish();
    }
}

criterion_group!(benches, products);
criterion_main!(benches);
