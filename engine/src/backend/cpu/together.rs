//! Decodes that begin with the same KV blocks: their attention reads these once ([`Together`](crate::kernels::float::Together)).
//!
//! A step's decodes are ordered by their block tables, so that those with the longest common beginning are neighbours, and cut where
//! neighbours have much less in common than others. Each run is cut further into tasks, as few as keep all threads busy.

use std::ops::Range;

use super::buffers::ROWS_PER_TASK;
use crate::{
    backend::Chunk,
    config::ModelConfig,
    kernels::float::{LANES, POSITIONS_PART},
};

/// Most sequences of a task.
pub const SEQUENCES_MAX: usize = 16;
/// Floats of the scores of a task with more sequences than rows of other tasks.
const SCORES_MAX: usize = 1 << 20;
/// Largest share of a region's time that threads may wait, tasks of one size assumed.
const IDLE_MAX: f64 = 0.1;
/// Blocks of a segment.
const SEGMENT_BLOCKS: usize = POSITIONS_PART / LANES;

/// Queries of several decodes for one KV head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedTask {
    /// Their places among the [members](SharedPrefixes::members).
    pub members: Range<usize>,
    pub kv_head: usize,
    /// Leading segments of blocks that all have.
    pub segments: usize,
}

/// The decodes of a step that attend together.
#[derive(Default)]
pub struct SharedPrefixes {
    /// Their chunks, each once.
    pub members: Vec<usize>,
    pub tasks: Vec<SharedTask>,
    /// Segments that a decode has in common with the next one. // (decode)
    common: Vec<usize>,
}

/// Returns the most sequences of a task.
pub fn sequences_max(config: &ModelConfig) -> usize {
    let scores = config.head_count / config.kv_head_count * config.context_length;
    (SCORES_MAX / scores.max(1)).clamp(ROWS_PER_TASK, SEQUENCES_MAX)
}

/// Returns the number of parts of `count` sequences, at least `least`: the smallest with which threads wait for one another for
/// at most [`IDLE_MAX`] of a region, if there is one with two sequences in each part.
fn even_parts(least: usize, count: usize, kv_head_count: usize, threads: usize) -> usize {
    let is_even = |parts: &usize| {
        let tasks = parts * kv_head_count;
        (tasks.next_multiple_of(threads) - tasks) as f64 <= IDLE_MAX * tasks as f64
    };
    (least..=count / 2).find(is_even).unwrap_or(least)
}

/// Returns the leading segments that two decodes have in common, before the block of either's token.
fn common_segments(a: &Chunk<'_>, b: &Chunk<'_>) -> usize {
    let most = a.position.min(b.position) / POSITIONS_PART;
    let equal = a.blocks.iter().zip(b.blocks).take_while(|(a, b)| a == b).count();
    most.min(equal / SEGMENT_BLOCKS)
}

impl SharedPrefixes {
    /// Finds the decodes that begin in the same way, and cuts them into tasks of up to `most` sequences for each KV head.
    pub fn find(
        &mut self,
        chunks: &[Chunk<'_>],
        kv_head_count: usize,
        threads: usize,
        most: usize,
    ) {
        let Self { members, tasks, common } = self;
        tasks.clear();
        members.clear();
        let decodes =
            |chunk: &Chunk<'_>| chunk.tokens.len() == 1 && chunk.position >= POSITIONS_PART;
        members.extend((0..chunks.len()).filter(|index| decodes(&chunks[*index])));
        members.sort_unstable_by(|a, b| chunks[*a].blocks.cmp(chunks[*b].blocks).then(a.cmp(b)));
        common.clear();
        common.extend(
            members.windows(2).map(|two| common_segments(&chunks[two[0]], &chunks[two[1]])),
        );
        let at = |place: usize| common.get(place).copied().unwrap_or(0);
        let is_cut = |place: usize| {
            let before = place.checked_sub(1).map_or(0, at);
            at(place) == 0 || 2 * at(place) < before.max(at(place + 1))
        };
        let (mut start, mut kept) = (0, 0);
        while start < members.len() {
            let end = (start..members.len()).find(|place| is_cut(*place)).unwrap_or(start) + 1;
            let count = end - start;
            if count > 1 {
                let segments = (start..end - 1).map(at).min().unwrap_or(0);
                members.copy_within(start..end, kept);
                let size = (count * kv_head_count / (2 * threads)).clamp(2, most.max(2));
                let parts = even_parts(count.div_ceil(size), count, kv_head_count, threads);
                for (part, kv_head) in
                    (0..parts).flat_map(|part| (0..kv_head_count).map(move |head| (part, head)))
                {
                    let members = kept + part * count / parts..kept + (part + 1) * count / parts;
                    tasks.push(SharedTask { members, kv_head, segments });
                }
                kept += count;
            }
            start = end;
        }
        members.truncate(kept);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{backend::LogitsFor, kv::BlockId};

    /// Finds the members and segments of the tasks of one of two KV heads. Each decode has a block table of letters, one for each
    /// segment, at its last position.
    fn found(tables: &[&str], threads: usize, most: usize) -> Vec<(Vec<usize>, usize)> {
        let blocks = |table: &str| -> Vec<BlockId> {
            let of_segment = |letter: u8| {
                (0..SEGMENT_BLOCKS as u32).map(move |i| BlockId(u32::from(letter) * 8 + i))
            };
            table.bytes().flat_map(of_segment).collect()
        };
        let tables: Vec<Vec<BlockId>> = tables.iter().map(|table| blocks(table)).collect();
        let chunks: Vec<Chunk<'_>> = tables
            .iter()
            .map(|blocks| Chunk {
                tokens: &[1],
                position: blocks.len() * LANES - 1,
                blocks,
                windows: &[],
                logits: LogitsFor::Nothing,
                state: 0.into(),
            })
            .collect();
        let mut shared = SharedPrefixes::default();
        shared.find(&chunks, 2, threads, most);
        let of_head = |head| shared.tasks.iter().filter(move |task| task.kv_head == head);
        assert!(of_head(0).zip(of_head(1)).all(|(a, b)| a.members == b.members));
        let members = |task: &SharedTask| shared.members[task.members.clone()].to_vec();
        of_head(1).map(|task| (members(task), task.segments)).collect()
    }

    #[test]
    fn decodes_with_the_longest_common_beginnings_are_together() {
        let tables = ["abcd", "xy", "abce", "pqr", "abcf", "xz", "a"];
        // The segment of a decode's own token is not shared.
        assert_eq!(found(&tables, 1, 16), [(vec![0, 2, 4], 3), (vec![1, 5], 1)]);
        let longer = ["abcdefgh1", "ab2", "abcdefgh3", "ab4"];
        assert_eq!(found(&longer, 1, 16), [(vec![1, 3], 2), (vec![0, 2], 8)]);
        assert_eq!(found(&["ab", "cd", "e"], 1, 16), []);
        assert_eq!(found(&[], 1, 16), []);
    }

    #[test]
    fn there_are_tasks_for_all_threads_of_about_the_same_size() {
        let tables: Vec<String> =
            (b'b'..b'b' + 9).map(|last| format!("a{}", last as char)).collect();
        let tables: Vec<&str> = tables.iter().map(String::as_str).collect();
        let sizes = |threads, most| -> Vec<usize> {
            found(&tables, threads, most).iter().map(|(members, _)| members.len()).collect()
        };
        assert_eq!(sizes(1, 16), [9]);
        assert_eq!(sizes(1, 4), [3, 3, 3]);
        assert_eq!(sizes(2, 16), [3, 3, 3], "six tasks");
        assert_eq!(sizes(64, 16), [1, 2, 2, 2, 2]);
    }

    #[test]
    fn tasks_are_a_multiple_of_the_threads_if_parts_can_be_smaller() {
        assert_eq!(even_parts(1, 16, 5, 2), 2, "ten tasks, where five keep one thread waiting");
        assert_eq!(even_parts(1, 16, 8, 2), 1);
        assert_eq!(even_parts(1, 16, 4, 3), 3);
        assert_eq!(even_parts(1, 3, 5, 2), 1, "parts of one sequence share nothing");
        assert_eq!(even_parts(3, 7, 1, 64), 3);
    }

    #[test]
    fn long_contexts_have_fewer_sequences_at_once() {
        let config = |context_length| {
            let golden =
                std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/bitnet-tiny");
            let model = crate::files::Model::open(&golden).expect("a golden model");
            ModelConfig {
                context_length,
                head_count: 4,
                kv_head_count: 1,
                ..model.config().clone()
            }
        };
        assert_eq!(
            [4096, 32_768, 1 << 20].map(|context| sequences_max(&config(context))),
            [16, 8, 4]
        );
    }
}
