//! Cuts the tiles of matrices into tasks for the threads of a step.

use std::ops::Range;

use crate::{formats::PackedMatrix, kernels::Isa};

/// Bytes of weights per task: small enough that threads finish at nearly the same time, large enough
/// that the cost of distributing tasks is negligible.
const TASK_BYTES: usize = 40 << 10;
/// Most tiles per task: the number that the kernels for many rows take together.
const TASK_TILES: usize = 4;
/// Most rows for which reading the weights dominates.
const FEW_ROWS: usize = 3;
/// The same, with AMX.
const AMX_FEW_ROWS: usize = 7;
/// Most rows for which the kernels of AMX expand the codes of two tiles together.
const AMX_PAIR_ROWS: usize = 64;
/// Most tiles per task with AMX: a task reads all activations, which may come from the third cache.
const AMX_TASK_TILES: usize = 16;

/// Index of a matrix, and a range of its tiles.
pub(super) type TileTask = (usize, Range<usize>);

/// Returns the most tiles of a task, by the number of rows and the bytes of a tile.
pub(super) fn tiles_per_task(isa: Isa, rows: usize, tile_bytes: usize) -> usize {
    match (rows, isa) {
        (..=AMX_FEW_ROWS, Isa::Amx) | (..=FEW_ROWS, _) => {
            (TASK_BYTES / tile_bytes).clamp(1, TASK_TILES)
        }
        (..=AMX_PAIR_ROWS, Isa::Amx) => AMX_TASK_TILES / 2,
        (_, Isa::Amx) => AMX_TASK_TILES,
        _ => TASK_TILES,
    }
}

/// Cuts the tiles of matrices into tasks, in order. Each thread's share ends with smaller tasks, so that
/// threads finish at nearly the same time.
pub(super) fn tile_tasks(
    isa: Isa,
    matrices: &[&PackedMatrix],
    rows: usize,
    threads: usize,
    tasks: &mut Vec<TileTask>,
) {
    let total: usize = matrices.iter().map(|matrix| matrix.tile_count()).sum();
    let (mut matrix, mut tile) = (0, 0);
    tasks.clear();
    for thread in 0..threads {
        let mut left = (thread + 1) * total / threads - thread * total / threads;
        while left > 0 {
            let in_matrix = matrices[matrix].tile_count() - tile;
            let count = tiles_per_task(isa, rows, matrices[matrix].tile_bytes())
                .min(left.div_ceil(2))
                .min(in_matrix);
            tasks.push((matrix, tile..tile + count));
            (tile, left) = (tile + count, left - count);
            if tile == matrices[matrix].tile_count() {
                (matrix, tile) = (matrix + 1, 0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::{Format, TILE_ROWS};

    #[test]
    fn tasks_cover_every_tile_once_and_shrink_within_each_share() {
        let matrix = |rows: usize| {
            PackedMatrix::pack(Format::I2S, rows, 64, &vec![0; rows * 64])
                .expect("the shape can be packed")
        };
        let (large, small) = (matrix(70 * TILE_ROWS), matrix(3 * TILE_ROWS + 1));
        let mut tasks = Vec::new();
        for (rows, largest) in [(32, TASK_TILES), (512, TASK_TILES)] {
            for threads in [1, 2, 3, 64, 200] {
                tile_tasks(Isa::Avx512, &[&large, &small, &small], rows, threads, &mut tasks);
                let tiles = tasks.iter().flat_map(|(matrix, tiles)| {
                    assert!((1..=largest).contains(&tiles.len()));
                    tiles.clone().map(move |tile| (*matrix, tile))
                });
                let all = [(0, 70), (1, 4), (2, 4)];
                let all = all.into_iter().flat_map(|(m, count)| (0..count).map(move |t| (m, t)));
                assert!(tiles.eq(all), "{threads} threads, {rows} rows");
            }
            tile_tasks(Isa::Avx512, &[&large], rows, 2, &mut tasks);
            let sizes: Vec<usize> = tasks.iter().map(|(_, tiles)| tiles.len()).collect();
            let (first, second) = sizes.split_at(sizes.len() / 2);
            assert_eq!(first, second, "each of two threads has a half");
            assert!(first.is_sorted_by(|a, b| a >= b) && first.ends_with(&[1]), "{first:?}");
        }
    }
}
