//! Cuts the tiles of matrices into tasks for the threads of a step.

use std::ops::Range;

use crate::{
    formats::PackedMatrix,
    kernels::{Activations, Digits, GroupShape, Isa},
};

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
/// Most tiles per task with AMX: a task reads all activations of a block of rows from the second cache.
const AMX_TASK_TILES: usize = 16;

/// Products of some rows of a step with some tiles of a matrix.
#[derive(Clone)]
pub(super) struct TileTask {
    /// Index of the matrix.
    pub matrix: usize,
    pub tiles: Range<usize>,
    pub rows: Range<usize>,
}

/// The rows of a step.
#[derive(Clone, Copy)]
pub(super) struct StepRows {
    count: usize,
    /// Bytes from the activations of one row to those of the next.
    stride: usize,
}

impl StepRows {
    /// Returns `count` rows as the input of a matrix.
    pub fn of(matrix: &PackedMatrix, count: usize, digits: Digits) -> Self {
        let (format, cols) = (matrix.format(), matrix.cols());
        let stride = match matrix.group() {
            Some(group) => GroupShape { format, digits, cols, group }.stride(),
            None => Activations::stride(format, cols),
        };
        Self { count, stride }
    }
}

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

/// Cuts the tiles of matrices into tasks, in order. Each thread has a share of the tiles, which it multiplies by one
/// block of rows after the other ([`Isa::rows_per_block`]). A share ends with smaller tasks, so that threads finish at
/// nearly the same time.
pub(super) fn tile_tasks(
    isa: Isa,
    matrices: &[&PackedMatrix],
    rows: StepRows,
    threads: usize,
    tasks: &mut Vec<TileTask>,
) {
    let total: usize = matrices.iter().map(|matrix| matrix.tile_count()).sum();
    let block = isa.rows_per_block(rows.count, rows.stride);
    let mut place = (0, 0); // matrix, tile
    tasks.clear();
    for thread in 0..threads {
        let share = (thread + 1) * total / threads - thread * total / threads;
        let first = place;
        for start in (0..rows.count).step_by(block.max(1)) {
            let of_block = start..rows.count.min(start + block);
            let is_last = of_block.end == rows.count;
            let mut left = share;
            place = first;
            while left > 0 {
                let (matrix, tile) = place;
                let most = tiles_per_task(isa, of_block.len(), matrices[matrix].tile_bytes());
                let in_matrix = matrices[matrix].tile_count() - tile;
                let of_share = if is_last { left.div_ceil(2) } else { left };
                let count = most.min(of_share).min(in_matrix);
                let tiles = tile..tile + count;
                tasks.push(TileTask { matrix, tiles, rows: of_block.clone() });
                place = if count == in_matrix { (matrix + 1, 0) } else { (matrix, tile + count) };
                left -= count;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::{Format, TILE_ROWS};

    fn matrix(rows: usize) -> PackedMatrix {
        PackedMatrix::pack(Format::I2S, rows, 64, &vec![0; rows * 64])
            .expect("the shape can be packed")
    }

    #[test]
    fn tasks_cover_every_tile_once_for_every_row() {
        let (large, small) = (matrix(70 * TILE_ROWS), matrix(3 * TILE_ROWS + 1));
        let mut tasks = Vec::new();
        for isa in [Isa::Avx512, Isa::Amx] {
            for (count, threads) in [(1, 1), (32, 64), (512, 1), (512, 3), (300, 200)] {
                let rows = StepRows { count, stride: 6976 };
                tile_tasks(isa, &[&large, &small, &small], rows, threads, &mut tasks);
                let most = tiles_per_task(isa, count, small.tile_bytes());
                let mut seen = vec![0; 78 * count]; // (tile of all matrices, row)
                for TileTask { matrix, tiles, rows } in &tasks {
                    assert!((1..=most).contains(&tiles.len()) && !rows.is_empty());
                    for tile in tiles.clone().map(|tile| [0, 70, 74][*matrix] + tile) {
                        seen[tile * count..][rows.clone()].iter_mut().for_each(|seen| *seen += 1);
                    }
                }
                assert!(
                    seen.iter().all(|&seen| seen == 1),
                    "{isa}: {count} rows, {threads} threads"
                );
            }
        }
    }

    #[test]
    fn shares_end_with_smaller_tasks() {
        let large = matrix(70 * TILE_ROWS);
        let mut tasks = Vec::new();
        for count in [32, 512] {
            let rows = StepRows { count, stride: 64 };
            tile_tasks(Isa::Avx512, &[&large], rows, 2, &mut tasks);
            let sizes: Vec<usize> = tasks.iter().map(|task| task.tiles.len()).collect();
            let (first, second) = sizes.split_at(sizes.len() / 2);
            assert_eq!(first, second, "each of two threads has a half");
            assert!(first.is_sorted_by(|a, b| a >= b) && first.ends_with(&[1]), "{first:?}");
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn a_thread_multiplies_all_its_tiles_by_a_block_of_rows_before_the_next() {
        let large = matrix(70 * TILE_ROWS);
        let mut tasks = Vec::new();
        let rows = StepRows { count: 512, stride: 6976 };
        tile_tasks(Isa::Amx, &[&large], rows, 2, &mut tasks);
        for share in [0..35, 35..70] {
            let of_share = tasks.iter().filter(|task| share.contains(&task.tiles.start));
            let mut blocks: Vec<_> = of_share.clone().map(|task| task.rows.clone()).collect();
            assert!(blocks.is_sorted_by_key(|rows| rows.start));
            blocks.dedup();
            assert_eq!(blocks, [0..128, 128..256, 256..384, 384..512]);
            let last = of_share.filter(|task| task.rows.end == 512);
            let sizes: Vec<usize> = last.map(|task| task.tiles.len()).collect();
            assert_eq!(sizes, [16, 10, 5, 2, 1, 1], "only the last block's tasks shrink");
        }
    }
}
