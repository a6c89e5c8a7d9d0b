//! Speed of the ternary kernels on one thread: packed weight bytes and products a second.
//!
//! `cargo run --release -p tritmill-engine --example kernel_speed [-- ROWSxCOLS [N,N,...]]`
//!
//! Weights rotate through more memory than any cache holds, as in a step of a whole model. ISAs and
//! row counts take turns, so that a busy moment of the machine hits all alike. A call is a
//! task-sized range of tiles; the figure is the first decile of the calls.

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use tritmill_engine::{
    formats::{Format, PackedMatrix, TILE_ROWS},
    kernels::{Activations, Isa, gemm},
};

/// Weights rotated through, at least.
const WORKING_SET_BYTES: usize = 160 << 20;

/// Tiles of one call, about what a thread is given.
const TASK_TILES: usize = 16;

/// What is measured, and its times.
struct Lane {
    format: Format,
    isa: Isa,
    n: usize,
    times: Vec<Duration>,
}

fn main() {
    let mut args = std::env::args().skip(1);
    let shape = args.next().unwrap_or_else(|| "6912x2560".to_owned());
    let counts = args.next().unwrap_or_else(|| "1,2,4,8,16,64".to_owned());
    let (rows, cols) = shape.split_once('x').expect("a shape like 6912x2560");
    let rows: usize = rows.parse().expect("rows");
    let cols: usize = cols.parse().expect("columns");
    let counts: Vec<usize> = counts.split(',').map(|n| n.parse().expect("a count")).collect();

    let trits: Vec<i8> = (0..rows * cols).map(|i| (i * 7919 / 13 % 3) as i8 - 1).collect();
    println!("{rows} x {cols}, one thread");
    for format in Format::ALL {
        let first = PackedMatrix::pack(format, rows, cols, &trits).expect("trits");
        let copies = WORKING_SET_BYTES.div_ceil(first.size_bytes());
        let mut matrices = vec![first];
        matrices
            .resize_with(copies, || PackedMatrix::pack(format, rows, cols, &trits).expect("trits"));
        let mut lanes = lanes(format, &counts);
        measure(&matrices, &mut lanes);
        for lane in &mut lanes {
            report(&matrices[0], lane);
        }
    }
}

fn lanes(format: Format, counts: &[usize]) -> Vec<Lane> {
    let isas = Isa::ALL.into_iter().filter(|&isa| isa != Isa::Scalar && isa.is_available());
    let lane = |isa, n| Lane { format, isa, n, times: Vec::new() };
    isas.flat_map(|isa| counts.iter().map(move |&n| lane(isa, n))).collect()
}

fn measure(matrices: &[PackedMatrix], lanes: &mut [Lane]) {
    let cols = matrices[0].cols();
    let tasks = matrices[0].tile_count() / TASK_TILES;
    let mut task = 0;
    let limit = Duration::from_millis(400).mul_f64(lanes.len() as f64);
    let mut x = Activations::new();
    let mut y = Vec::new();
    let begin = Instant::now();
    while begin.elapsed() < limit {
        for lane in &mut *lanes {
            x.reset(lane.format, cols, lane.n);
            for row in 0..lane.n {
                let q: Vec<i8> = (0..cols).map(|k| (k * 31 + row * 17) as i8).collect();
                x.set_row(row, &q);
            }
            y.resize(lane.n * TASK_TILES * TILE_ROWS, 0);
            for call in 0..2 + 64 / lane.n {
                let w = &matrices[task / tasks % matrices.len()];
                let first = task % tasks * TASK_TILES;
                task += 1;
                let start = Instant::now();
                gemm(lane.isa, w, first..first + TASK_TILES, &x, &mut y);
                let elapsed = start.elapsed();
                black_box(&y);
                // The first call warms the activations.
                if call > 0 {
                    lane.times.push(elapsed);
                }
            }
        }
    }
}

fn report(w: &PackedMatrix, lane: &mut Lane) {
    lane.times.sort_unstable();
    let seconds = lane.times[lane.times.len() / 10].as_secs_f64();
    let products = (TASK_TILES * TILE_ROWS * w.cols() * lane.n) as f64;
    let bytes = (w.size_bytes() / w.tile_count() * TASK_TILES) as f64;
    println!(
        "{:5} {:7} n={:<3} {:7.1} µs  {:6.2} GB/s  {:7.1} G products/s",
        lane.format.to_string(),
        lane.isa.to_string(),
        lane.n,
        seconds * 1e6,
        bytes / seconds / 1e9,
        products / seconds / 1e9
    );
}
