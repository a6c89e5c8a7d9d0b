//! Measures how fast a backend runs steps: real steps over real KV blocks, without scheduler and sampler.
//!
//! One repetition takes every batch size in turn, prefill and then decode, so that changes of the clock or
//! of other load on the machine affect all batch sizes alike. The median of the repetitions is reported.
//! Token ids are arbitrary: no time depends on them. Embedding models are measured with the scheduler ([`texts`]): a text is one
//! request and takes no steps of its own.

mod scripted;
mod texts;

pub use scripted::{Script, Scripted};
pub use texts::texts;

use std::{hint::black_box, ops::Range, time::Instant};

use crate::{
    backend::{Backend, Chunk, Logits, LogitsFor, StepError},
    formats::memory::AlignedBytes,
    kernels::{self, Isa},
    kv::{BLOCK_TOKENS, BlockId, LayerGroups, blocks_for},
    names::names,
};

/// Bytes that a bandwidth measurement reads per pass if memory allows; twice the caches of large servers.
const BANDWIDTH_BYTES: usize = 1 << 30;
/// Passes of a bandwidth measurement; the fastest is used.
const BANDWIDTH_PASSES: usize = 4;

/// Steps to measure.
#[derive(Debug, Clone, PartialEq)]
pub struct Workload {
    /// Batch sizes in sequences per step, each at least 1; one measurement for each.
    pub batches: Vec<usize>,
    /// Tokens of each prompt, at least 1.
    pub prompt_tokens: usize,
    /// Leading tokens of the prompts that all have in common, in whole KV blocks: they are computed once, before the others. Fewer
    /// than those of a prompt.
    pub shared_tokens: usize,
    /// Decode steps of each sequence.
    pub generate_tokens: usize,
    /// Logits that a step requests: all, as a draw from the whole distribution does, or the largest.
    pub logits: LogitsFor<'static>,
    /// Repetitions, at least 1.
    pub repetitions: usize,
}

impl Workload {
    /// Returns the number of KV blocks that the largest batch needs.
    pub fn block_count(&self) -> usize {
        self.batch_max().saturating_mul(self.sequence_blocks())
    }

    pub(crate) fn batch_max(&self) -> usize {
        self.batches.iter().max().copied().unwrap_or(0)
    }

    fn sequence_blocks(&self) -> usize {
        blocks_for(self.prompt_tokens.saturating_add(self.generate_tokens))
    }
}

/// Returns the time of a store of an AMX register after `steps` steps of four loads and four products without one, in
/// units of a product's time; `None` without AMX or steps.
pub fn tile_store(steps: usize) -> Option<f64> {
    kernels::tile_store(steps)
}

/// The kinds of steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Many tokens of each prompt in a step; logits for the last token only.
    Prefill,
    /// One token of each sequence in a step, with logits.
    Decode,
    /// Many tokens of each text in a step, and a vector for each text.
    Embed,
}

names!(Phase, "phase", Prefill = "prefill", Decode = "decode", Embed = "embed");

/// The speed of one phase at one batch size, in tokens of all sequences per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Speed {
    /// The phase.
    pub phase: Phase,
    /// Sequences.
    pub batch: usize,
    /// Median of the repetitions.
    pub median: f64,
    /// The slowest repetition.
    pub lowest: f64,
    /// The fastest repetition.
    pub highest: f64,
}

/// Runs the workload; calls `progress` with the number of each repetition before it starts. The backend
/// needs [`Workload::block_count`] KV blocks.
///
/// # Errors
/// If a step fails.
pub fn run(
    backend: &mut dyn Backend,
    workload: &Workload,
    mut progress: impl FnMut(usize),
) -> Result<Vec<Speed>, StepError> {
    let sequences = Sequences::new(workload, backend.vocab_size(), backend.layer_groups());
    let (prompt, generate) = (workload.prompt_tokens, workload.generate_tokens);
    let mut logits = Logits::default();
    // Warm-up: the first access to weights and KV blocks must not count.
    sequences.run_prompts(backend, 1, &mut logits)?;
    let cases = workload.batches.len();
    let mut samples = vec![Vec::with_capacity(workload.repetitions); 2 * cases];
    for repetition in 0..workload.repetitions {
        progress(repetition);
        for (case, &batch) in workload.batches.iter().enumerate() {
            let start = Instant::now();
            sequences.run_prompts(backend, batch, &mut logits)?;
            samples[case].push(rate(sequences.prompt_rows(batch), start));
            let start = Instant::now();
            for position in prompt..prompt + generate {
                backend.step(&sequences.decode(batch, position), &mut logits)?;
            }
            samples[cases + case].push(rate(batch * generate, start));
        }
    }
    let phases = [Phase::Prefill, Phase::Decode].into_iter();
    let cases = phases.flat_map(|phase| workload.batches.iter().map(move |&batch| (phase, batch)));
    Ok(cases
        .zip(samples)
        .filter_map(|((phase, batch), rates)| speed(phase, batch, rates))
        .collect())
}

/// Median and range of the samples; `None` without samples, if the workload has no decode steps.
fn speed(phase: Phase, batch: usize, rates: Vec<Option<f64>>) -> Option<Speed> {
    let mut rates: Vec<f64> = rates.into_iter().flatten().collect();
    rates.sort_by(f64::total_cmp);
    let (&lowest, &highest) = (rates.first()?, rates.last()?);
    let middle = rates.len() / 2;
    let median = if rates.len() % 2 == 1 {
        rates[middle]
    } else {
        (rates[middle - 1] + rates[middle]) / 2.0
    };
    Some(Speed { phase, batch, median, lowest, highest })
}

/// Block tables and tokens of the sequences.
pub(crate) struct Sequences {
    prompt_tokens: usize,
    /// Leading tokens of sequences behind the first one that it has computed.
    shared_tokens: usize,
    logits: LogitsFor<'static>,
    /// The block tables of each sequence of the largest batch, without and with windows.
    tables: Vec<(Vec<BlockId>, Vec<Vec<BlockId>>)>,
    /// Tokens of any sequence, by position.
    tokens: Vec<u32>,
}

impl Sequences {
    pub(crate) fn new(workload: &Workload, vocab_size: usize, groups: LayerGroups) -> Self {
        let (blocks, sequences) = (workload.sequence_blocks(), workload.batch_max());
        let shared = workload.shared_tokens / BLOCK_TOKENS;
        let first = groups.tables(0, blocks);
        let table = |i| {
            let mut own = groups.tables(i * blocks * groups.count(), blocks);
            own.0[..shared].copy_from_slice(&first.0[..shared]);
            for (own, first) in own.1.iter_mut().zip(&first.1) {
                own[..shared].copy_from_slice(&first[..shared]);
            }
            own
        };
        let positions = (workload.prompt_tokens + workload.generate_tokens) as u64;
        let vocab_size = vocab_size as u64;
        let token = |position: u64| (position.wrapping_mul(2_654_435_761) % vocab_size) as u32;
        Self {
            prompt_tokens: workload.prompt_tokens,
            shared_tokens: shared * BLOCK_TOKENS,
            logits: workload.logits,
            tables: (0..sequences).map(table).collect(),
            tokens: (0..positions).map(token).collect(),
        }
    }

    /// Returns the rows of the prompts of `batch` sequences.
    fn prompt_rows(&self, batch: usize) -> usize {
        self.shared_tokens + batch * (self.prompt_tokens - self.shared_tokens)
    }

    /// Returns the chunks of one prefill step: `rows` of the concatenated prompts, without what others have in common with the first.
    pub(crate) fn prefill(&self, rows: Range<usize>) -> Vec<Chunk<'_>> {
        let (length, shared) = (self.prompt_tokens, self.shared_tokens);
        let own = length - shared;
        let chunk = |sequence: usize| {
            // Where its prompt would begin if it were computed whole.
            let origin = sequence * own;
            let first = if sequence == 0 { 0 } else { shared };
            let start = rows.start.max(origin + first) - origin;
            let end = rows.end.min(origin + length) - origin;
            Chunk {
                state: (sequence as u32).into(),
                tokens: &self.tokens[start..end],
                position: start,
                blocks: &self.tables[sequence].0,
                windows: &self.tables[sequence].1,
                logits: if end == length { self.logits } else { LogitsFor::Nothing },
            }
        };
        let last = rows.end.saturating_sub(shared).div_ceil(own).max(1);
        (rows.start.saturating_sub(shared) / own..last).map(chunk).collect()
    }

    /// Returns the chunks of one decode step.
    pub(crate) fn decode(&self, batch: usize, position: usize) -> Vec<Chunk<'_>> {
        let chunk = |slot: usize| Chunk {
            state: (slot as u32).into(),
            tokens: &self.tokens[position..=position],
            position,
            blocks: &self.tables[slot].0,
            windows: &self.tables[slot].1,
            logits: self.logits,
        };
        (0..batch).map(chunk).collect()
    }

    /// Computes the prompts of `batch` sequences, [`Backend::step_rows`] rows in a step.
    pub(crate) fn run_prompts(
        &self,
        backend: &mut dyn Backend,
        batch: usize,
        logits: &mut Logits,
    ) -> Result<(), StepError> {
        let (total, rows) = (self.prompt_rows(batch), backend.step_rows());
        // What others have in common with the first prompt is computed before they begin.
        let alone = if self.shared_tokens > 0 { self.prompt_tokens } else { 0 };
        for part in [0..alone, alone..total] {
            for first in part.clone().step_by(rows) {
                let chunks = self.prefill(first..part.end.min(first + rows));
                backend.step(&chunks, logits)?;
            }
        }
        backend.as_asynchronous().map_or(Ok(()), |backend| backend.wait())
    }
}

fn rate(tokens: usize, start: Instant) -> Option<f64> {
    (tokens > 0).then(|| tokens as f64 / start.elapsed().as_secs_f64().max(1e-9))
}

/// Bytes per second that `threads` threads together read from memory: the best of a few passes of
/// [`MemoryReads`].
pub fn memory_bandwidth(threads: usize, available: Option<u64>) -> f64 {
    let reads = MemoryReads::new(threads, available);
    (0..BANDWIDTH_PASSES).map(|_| reads.bytes_per_s()).fold(0.0, f64::max)
}

/// Measures the memory bandwidth of several threads, over huge pages like those of weights. It limits
/// decode, which reads every weight once per token. On a shared machine it changes from minute to
/// minute, so measure it in turns with the value that is compared with it.
pub struct MemoryReads {
    bytes: AlignedBytes,
    threads: usize,
}

impl MemoryReads {
    /// Allocates 1 GiB, or a quarter of `available` bytes if that is less.
    pub fn new(threads: usize, available: Option<u64>) -> Self {
        let quarter = available.and_then(|bytes| usize::try_from(bytes / 4).ok());
        let len = quarter.map_or(BANDWIDTH_BYTES, |bytes| bytes.clamp(1 << 20, BANDWIDTH_BYTES));
        let mut bytes = AlignedBytes::zeroed(len & !63);
        // Pages that were never written all map to one page of zeros.
        bytes.fill(1);
        Self { bytes, threads: threads.max(1) }
    }

    /// Returns the memory in bytes.
    pub fn size_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Reads the memory once and returns the bandwidth in bytes per second.
    pub fn bytes_per_s(&self) -> f64 {
        let words: &[u64] = bytemuck::cast_slice(&self.bytes);
        let part = words.len().div_ceil(self.threads);
        let start = Instant::now();
        std::thread::scope(|scope| {
            for words in words.chunks(part) {
                scope.spawn(move || black_box(sum(black_box(words))));
            }
        });
        self.bytes.len() as f64 / start.elapsed().as_secs_f64().max(1e-9)
    }
}

/// Products per second of `threads` threads that only multiply in registers, if the ISA has an
/// instruction for it. It limits prefill, which does one product per weight and token.
pub fn product_peak(isa: Isa, threads: usize) -> Option<f64> {
    let peaks = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads.max(1))
            .map(|_| scope.spawn(|| kernels::peak_products_per_s(isa)))
            .collect();
        threads.into_iter().map(|thread| thread.join().ok().flatten()).collect::<Vec<_>>()
    });
    peaks.into_iter().sum()
}

/// Prefetch distance in bytes.
const AHEAD_BYTES: usize = 64 * 160;

/// Reads four parts of memory at once, a cache line of each in turn, and prefetches. A single part, or the
/// processor's own prefetching alone, does not reach the full bandwidth.
fn sum(words: &[u64]) -> u64 {
    let (near, far) = words.split_at(words.len() / 2);
    let ((a, b), (c, d)) = (near.split_at(near.len() / 2), far.split_at(far.len() / 2));
    let count = a.len().min(b.len()).min(c.len()).min(d.len()) / 8;
    let mut sums = [0u64; 8];
    for line in 0..count {
        for part in [a, b, c, d] {
            let words = &part[8 * line..8 * line + 8];
            kernels::prefetch::second(words.as_ptr().cast::<u8>().wrapping_add(AHEAD_BYTES));
            for (sum, word) in sums.iter_mut().zip(words) {
                *sum = sum.wrapping_add(*word);
            }
        }
    }
    let rest = [a, b, c, d].into_iter().flat_map(|part| &part[8 * count..]);
    sums.iter().chain(rest).fold(0, |a, b| a.wrapping_add(*b))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A backend that records its steps.
    #[derive(Default)]
    struct Recorder {
        steps: Vec<Vec<(usize, usize, LogitsFor<'static>)>>, // (position, tokens, logits) of each chunk
    }

    impl Backend for Recorder {
        fn vocab_size(&self) -> usize {
            10
        }
        fn block_count(&self) -> usize {
            usize::MAX
        }
        fn numerics_class(&self) -> &str {
            "recorder"
        }
        fn step(&mut self, chunks: &[Chunk<'_>], _: &mut Logits) -> Result<(), StepError> {
            for chunk in chunks {
                assert!(chunk.position + chunk.tokens.len() <= chunk.blocks.len() * 16);
                assert!(chunk.tokens.iter().all(|&token| token < 10));
            }
            let logits = |logits: LogitsFor<'_>| match logits {
                LogitsFor::Nothing => LogitsFor::Nothing,
                LogitsFor::Last => LogitsFor::Last,
                LogitsFor::Largest(ranking) => LogitsFor::Largest(ranking),
                other => panic!("no measurement requests {other:?}"),
            };
            let seen = |c: &Chunk<'_>| (c.position, c.tokens.len(), logits(c.logits));
            let seen = chunks.iter().map(seen).collect();
            self.steps.push(seen);
            Ok(())
        }
        fn copy_block(&mut self, _: BlockId, _: BlockId) -> Result<(), StepError> {
            Ok(())
        }
        fn block_bytes(&self) -> usize {
            0
        }
        fn read_block(&mut self, _: BlockId, _: &mut Vec<u8>) -> Result<(), StepError> {
            Ok(())
        }
        fn write_block(&mut self, _: BlockId, _: &[u8]) -> Result<(), StepError> {
            Ok(())
        }
    }

    fn workload(batches: &[usize], prompt_tokens: usize, generate_tokens: usize) -> Workload {
        let (batches, logits) = (batches.to_vec(), LogitsFor::Last);
        let shared_tokens = 0;
        Workload { batches, prompt_tokens, shared_tokens, generate_tokens, logits, repetitions: 2 }
    }

    #[test]
    fn what_prompts_have_in_common_is_computed_once_and_first() {
        let mut recorder = Recorder::default();
        let shared = Workload { shared_tokens: 250, repetitions: 1, ..workload(&[3], 300, 1) };
        run(&mut recorder, &shared, |_| {}).expect("never fails");
        // 240 tokens are whole blocks.
        let first = vec![(0, 300, LogitsFor::Last)];
        let others = vec![(240, 60, LogitsFor::Last); 2];
        let decodes = vec![(300, 1, LogitsFor::Last); 3];
        assert_eq!(recorder.steps, [first.clone(), first, others, decodes]);
        let tables = Sequences::new(&shared, 10, LayerGroups::ONE).tables;
        assert_eq!(tables[2].0[..15], tables[0].0[..15]);
        assert!(tables[2].0[15..].iter().all(|own| !tables[0].0.contains(own)));
    }

    #[test]
    fn prompts_are_divided_at_the_rows_of_a_step() {
        let mut recorder = Recorder::default();
        run(&mut recorder, &workload(&[2], 300, 1), |_| {}).expect("never fails");
        // The warm-up is one prompt; then two repetitions of two steps of prompts and one decode.
        let steps = &recorder.steps;
        assert_eq!(steps.len(), 1 + 2 * 3);
        assert_eq!(steps[1], [(0, 300, LogitsFor::Last), (0, 212, LogitsFor::Nothing)]);
        assert_eq!(steps[2], [(212, 88, LogitsFor::Last)]);
        assert_eq!(steps[3], [(300, 1, LogitsFor::Last), (300, 1, LogitsFor::Last)]);
    }

    #[test]
    fn every_phase_and_batch_has_a_speed() {
        let rows = |generate| {
            let mut recorder = Recorder::default();
            let speeds = run(&mut recorder, &workload(&[1, 4], 5, generate), |_| {});
            let speeds = speeds.expect("never fails");
            assert!(speeds.iter().all(|s| s.lowest <= s.median && s.median <= s.highest));
            speeds.iter().map(|s| (s.phase.name(), s.batch)).collect::<Vec<_>>()
        };
        assert_eq!(rows(3), [("prefill", 1), ("prefill", 4), ("decode", 1), ("decode", 4)]);
        assert_eq!(rows(0), [("prefill", 1), ("prefill", 4)]);
    }

    #[test]
    fn block_count_is_that_of_the_largest_batch() {
        assert_eq!(workload(&[1, 32, 4], 128, 64).block_count(), 32 * 12);
        assert_eq!(workload(&[3], 1, 0).block_count(), 3);
    }

    #[test]
    fn every_word_is_summed_for_any_length() {
        for length in [0, 8, 64, 800] {
            assert_eq!(sum(&vec![3; length]), 3 * length as u64);
        }
    }

    #[test]
    fn median_of_an_even_count_is_the_mean_of_the_middle() {
        let all = speed(Phase::Decode, 1, vec![Some(4.0), Some(1.0), Some(2.0), Some(3.0)]);
        let all = all.expect("has samples");
        assert_eq!((all.lowest, all.median, all.highest), (1.0, 2.5, 4.0));
    }
}
