//! A step on the device. Each pass is one upload, the launches, and one download.

use std::collections::HashMap;

use super::{
    buffers::{AttentionMode, Bucket, Buffers, Limits, Outputs, bucket_of, capacity},
    device::{Address, Device, DeviceError, Launch, Part, Recording},
    forward::Pass,
    found::{Downloaded, Lists},
    plan::{self, AllWanted, Image, Piece, Wanted},
    shape::Shape,
    tuning::Tuning,
    weights::Weights,
};
use crate::{
    backend::{
        Backend, Chunk, Logits, Ranking, StepError, cpu::screen::SCREEN_SHARE, logits, positions,
    },
    config::ModelConfig,
    kv::BlockId,
};

/// Above one candidate per this many tokens, candidates cost more than a second digit.
const ONE_DIGIT_SHARE: usize = 64;
/// Most recordings that are kept.
const RECORDINGS_MAX: usize = 256;

/// A model on a device.
pub struct CudaBackend {
    pub(super) device: Box<dyn Device>,
    pub(super) weights: Weights,
    pub(super) buffers: Buffers,
    pub(super) shape: Shape,
    pub(super) config: ModelConfig,
    pub(super) limits: Limits,
    pub(super) kv_base: Address,
    pub(super) block_count: usize,
    pub(super) numerics_class: String,
    pub(super) tuning: Tuning,
    pub(super) state: State,
}

/// State between steps. No result depends on it.
#[derive(Default)]
pub(super) struct State {
    recordings: HashMap<Bucket, Recording>,
    image: Image,
    found: Downloaded,
    /// Candidates of the last step's screened rows.
    pub(super) candidates: usize,
    /// Scratch of the check of a step.
    written: Vec<u64>,
    /// Whether one digit has ever left too many candidates; later steps then use two.
    pub(super) coarse: bool,
}

/// A part of a step, and its attention kernels.
struct Work<'a> {
    part: &'a [Piece],
    chunks: &'a [Chunk<'a>],
    attention: AttentionMode,
    reach: usize,
}

/// Rows of one pass.
#[derive(Clone, Copy)]
struct OfPass<'a> {
    whole: &'a [usize],
    screened: &'a [Wanted],
    /// Whether this pass runs the layers.
    first: bool,
}

impl CudaBackend {
    /// Returns whether the screen finds the first tokens of a ranking. It keeps nothing for further looks.
    fn screens(&self, ranking: &Ranking) -> bool {
        let count = ranking.count;
        let room = self.shape.groups().min(capacity(&self.shape) / 2);
        self.weights.head.screen.is_some()
            && !ranking.keeps
            && count.saturating_mul(SCREEN_SHARE) <= self.shape.vocab
            && count <= room
    }

    fn run(&mut self, chunks: &[Chunk<'_>], logits: &mut Logits) -> Result<(), DeviceError> {
        let parts = plan::cut(chunks, &self.limits);
        logits.clear(self.shape.vocab);
        self.state.candidates = 0;
        logits.lay_out(chunks.iter().flat_map(|chunk| {
            let wanted = chunk.logits.wanted(0..chunk.tokens.len());
            wanted.map(|(_, ranking)| ranking.is_none_or(|ranking| !self.screens(&ranking)))
        }));
        let mut lists = Lists::new();
        let mut all = logits.all_mut();
        for part in &parts {
            let wanted = plan::wanted(part, chunks, |ranking| self.screens(ranking));
            let (attention, reach) = self.attention(part, chunks);
            let work = Work { part, chunks, attention, reach };
            let (here, rest) = all.split_at_mut(wanted.whole.len() * self.shape.vocab);
            self.run_part(&work, &wanted, here, &mut lists)?;
            all = rest;
        }
        logits.set_largest(lists.iter().map(Vec::as_slice));
        Ok(())
    }

    /// Chooses the attention kernels of a part, and the room for scores in positions.
    fn attention(&self, part: &[Piece], chunks: &[Chunk<'_>]) -> (AttentionMode, usize) {
        let multiprocessors = self.device.properties().multiprocessors as usize;
        let tasks_max = self.tuning.split_tasks.saturating_mul(multiprocessors);
        plan::attention(part, chunks, &self.shape, &self.buffers, tasks_max)
    }

    /// Runs a part; writes all logits of its whole rows to `all` `(whole, vocab)`.
    fn run_part(
        &mut self,
        work: &Work<'_>,
        wanted: &AllWanted,
        mut all: &mut [f32],
        lists: &mut Lists,
    ) -> Result<(), DeviceError> {
        let Limits { whole, screened, .. } = self.limits;
        let mut wholes = wanted.whole.chunks(whole);
        let mut screens = wanted.screened.chunks(screened);
        let mut overflowed = Vec::new();
        let mut first = true;
        loop {
            let (whole, screened) = (wholes.next(), screens.next());
            if !first && whole.is_none() && screened.is_none() {
                break;
            }
            let rows = OfPass {
                whole: whole.unwrap_or_default(),
                screened: screened.unwrap_or_default(),
                first,
            };
            let (here, rest) = all.split_at_mut(rows.whole.len() * self.shape.vocab);
            self.pass(work, rows, here, lists, &mut overflowed)?;
            (all, first) = (rest, false);
        }
        self.list_overflowed(work, &overflowed, lists)
    }

    /// Computes all logits of rows that the screen did not decide, many rows in a pass, and lists the first tokens.
    fn list_overflowed(
        &mut self,
        work: &Work<'_>,
        overflowed: &[(usize, Wanted)],
        lists: &mut Lists,
    ) -> Result<(), DeviceError> {
        let vocab = self.shape.vocab;
        for some in overflowed.chunks(self.limits.whole) {
            let whole: Vec<usize> = some.iter().map(|(_, wanted)| wanted.row).collect();
            let rows = OfPass { whole: &whole, screened: &[], first: false };
            let mut all = vec![0.0; whole.len() * vocab];
            self.pass(work, rows, &mut all, &mut Lists::new(), &mut Vec::new())?;
            for ((list, wanted), logits) in some.iter().zip(all.chunks_exact(vocab)) {
                lists[*list] = logits::first(logits, &wanted.ranking);
            }
        }
        Ok(())
    }

    /// Runs one upload, the launches and one download. Adds rows with more candidates than fit to `overflowed`, with the
    /// index of their list.
    fn pass(
        &mut self,
        work: &Work<'_>,
        rows: OfPass<'_>,
        all: &mut [f32],
        lists: &mut Lists,
        overflowed: &mut Vec<(usize, Wanted)>,
    ) -> Result<(), DeviceError> {
        let bucket = self.bucket(work, rows.whole.len(), rows.screened.len());
        let (inputs, outputs) =
            (self.buffers.inputs(&bucket, &self.shape), self.buffers.outputs(&bucket));
        let image = &mut self.state.image;
        let wanted = (rows.whole, rows.screened);
        image.write((work.part, work.chunks), wanted, &inputs, &bucket, &self.shape);
        self.device.write(inputs.step, image.bytes())?;
        self.launch(&bucket, &outputs, rows.first)?;
        self.download(&outputs, rows, all)?;
        let mut total = 0;
        for (place, wanted) in rows.screened.iter().enumerate() {
            let count = self.state.found.count(place);
            total += count.min(self.shape.vocab);
            if count > capacity(&self.shape) {
                overflowed.push((lists.len(), *wanted));
            }
            lists.push(self.state.found.of_row(place, wanted.is_single()));
        }
        self.state.candidates += total;
        if bucket.digits == 1 && total > rows.screened.len() * self.shape.vocab / ONE_DIGIT_SHARE {
            self.state.coarse = true;
        }
        Ok(())
    }

    fn bucket(&self, work: &Work<'_>, whole: usize, screened: usize) -> Bucket {
        let one_digit = screened >= self.tuning.one_digit_rows && !self.state.coarse;
        Bucket {
            rows: bucket_of(work.part.iter().map(|piece| piece.len).sum()).min(self.limits.rows),
            whole: bucket_of(whole).min(self.limits.whole),
            screened: bucket_of(screened).min(self.limits.screened),
            reach: work.reach,
            attention: work.attention,
            digits: if one_digit { 1 } else { 2 },
        }
    }

    /// Returns the launches of a step of one pass. Their inputs are those of the last step.
    pub(super) fn launches(&self, chunks: &[Chunk<'_>]) -> Vec<Launch> {
        let parts = plan::cut(chunks, &self.limits);
        let [part] = &parts[..] else { panic!("the step is of {} passes", parts.len()) };
        let wanted = plan::wanted(part, chunks, |ranking| self.screens(ranking));
        let (attention, reach) = self.attention(part, chunks);
        let work = Work { part, chunks, attention, reach };
        let bucket = self.bucket(&work, wanted.whole.len(), wanted.screened.len());
        let pass = self.pass_of(&bucket);
        [pass.body(), pass.head(&self.buffers.outputs(&bucket))].concat()
    }

    /// Drops all recordings.
    pub(super) fn forget_recordings(&mut self) -> Result<(), DeviceError> {
        self.state.recordings.clear();
        self.device.forget_recordings()
    }

    /// Collects what the launches of a pass depend on.
    pub(super) fn pass_of(&self, bucket: &Bucket) -> Pass<'_> {
        Pass {
            weights: &self.weights,
            buffers: &self.buffers,
            shape: &self.shape,
            inputs: self.buffers.inputs(bucket, &self.shape),
            bucket: *bucket,
            kv_base: self.kv_base,
            tuning: self.tuning,
            device: self.device.as_ref(),
        }
    }

    /// Launches the layers (if `first`) and the head. Launches of small passes are recorded once and then replayed.
    fn launch(
        &mut self,
        bucket: &Bucket,
        outputs: &Outputs,
        first: bool,
    ) -> Result<(), DeviceError> {
        let recorded = first && bucket.rows <= self.limits.recorded;
        if let Some(recording) = self.state.recordings.get(bucket).filter(|_| recorded) {
            return self.device.replay(*recording);
        }
        let pass = self.pass_of(bucket);
        let mut launches = if first { pass.body() } else { Vec::new() };
        launches.extend(pass.head(outputs));
        if !recorded {
            return launches.iter().try_for_each(|launch| self.device.launch(launch));
        }
        if self.state.recordings.len() >= RECORDINGS_MAX {
            self.forget_recordings()?;
        }
        let recording = self.device.record(&launches)?;
        self.state.recordings.insert(*bucket, recording);
        self.device.replay(recording)
    }

    /// Waits for the pass and downloads its outputs.
    fn download(
        &mut self,
        outputs: &Outputs,
        rows: OfPass<'_>,
        all: &mut [f32],
    ) -> Result<(), DeviceError> {
        let mut parts = Vec::new();
        if !rows.screened.is_empty() {
            parts.push(self.state.found.part(outputs, rows.screened, capacity(&self.shape)));
        }
        if !all.is_empty() {
            parts.push(Part { from: outputs.logits, to: bytemuck::cast_slice_mut(all) });
        }
        // It waits without outputs, too: the engine measures the time of every step.
        self.device.read(&mut parts)
    }
}

impl Backend for CudaBackend {
    fn vocab_size(&self) -> usize {
        self.shape.vocab
    }

    fn block_count(&self) -> usize {
        self.block_count
    }

    fn weight_bytes(&self) -> Option<usize> {
        Some(self.weights.step_bytes)
    }

    fn numerics_class(&self) -> &str {
        &self.numerics_class
    }

    fn step(&mut self, chunks: &[Chunk<'_>], logits: &mut Logits) -> Result<(), StepError> {
        positions::check(chunks, &self.config, self.block_count, &mut self.state.written)?;
        self.run(chunks, logits).map_err(failure)
    }

    fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<(), StepError> {
        let (bytes, from_at, to_at) = (self.block_bytes(), self.block_at(from), self.block_at(to));
        // The ranges of a copy must not overlap.
        if from == to { Ok(()) } else { self.device.copy(from_at, to_at, bytes).map_err(failure) }
    }

    fn block_bytes(&self) -> usize {
        self.shape.kv_block_bytes()
    }

    fn read_block(&mut self, block: BlockId, content: &mut Vec<u8>) -> Result<(), StepError> {
        let (from, before) = (self.block_at(block), content.len());
        content.resize(before + self.block_bytes(), 0);
        self.device.read(&mut [Part { from, to: &mut content[before..] }]).map_err(failure)
    }

    fn write_block(&mut self, block: BlockId, content: &[u8]) -> Result<(), StepError> {
        assert_eq!(content.len(), self.block_bytes(), "the content of one block");
        self.device.write(self.block_at(block), content).map_err(failure)
    }
}

fn failure(error: DeviceError) -> StepError {
    match error {
        DeviceError::Sticky { .. } | DeviceError::Lost { .. } => {
            StepError::DeviceLost(Box::new(error))
        }
        _ => StepError::Device(Box::new(error)),
    }
}

impl CudaBackend {
    /// Returns the address of a block's keys and values.
    fn block_at(&self, block: BlockId) -> Address {
        assert!((block.0 as usize) < self.block_count, "a block of this pool");
        self.kv_base + u64::from(block.0) * self.block_bytes() as u64
    }
}
