//! A step on the device: one upload, the launches, one download, for each pass.

use std::collections::HashMap;

use super::{
    args::Found,
    buffers::{AttentionMode, Bucket, Buffers, Limits, Outputs, bucket_of, capacity},
    device::{Address, Device, DeviceError, Launch, Part, Recording},
    forward::Pass,
    plan::{self, AllWanted, Image, Piece, Wanted},
    shape::Shape,
    weights::Weights,
};
use crate::{
    backend::{
        Backend, Chunk, Logits, StepError, TokenLogit, cpu::screen::SCREEN_SHARE, positions,
    },
    config::ModelConfig,
    kv::BlockId,
};

/// Rows from which one digit is enough for the screen: more candidates, half the products.
const ONE_DIGIT_ROWS: usize = 33;
/// Share of the vocabulary, above which candidates cost more than a second digit.
const ONE_DIGIT_SHARE: usize = 64;
/// Recordings that are kept.
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
    pub(super) state: State,
}

/// What is kept between steps; nothing that a result depends on.
#[derive(Default)]
pub(super) struct State {
    recordings: HashMap<Bucket, Recording>,
    image: Image,
    found: Vec<u8>,
    /// One digit left too many candidates once: from then on two are used.
    coarse: bool,
    /// A copy that failed: the next step says so.
    failed: Option<DeviceError>,
}

/// Lists of the largest logits, in the order of the positions.
type Lists = Vec<Vec<TokenLogit>>;

/// A part of a step and what is wanted of it.
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
    /// Whether it is the pass that runs the layers.
    first: bool,
}

impl CudaBackend {
    /// Whether so many of the largest logits are found by the screen.
    fn screens(&self, count: usize) -> bool {
        let room = self.shape.groups().min(capacity(&self.shape) / 2);
        self.weights.head.screen.is_some()
            && count.saturating_mul(SCREEN_SHARE) <= self.shape.vocab
            && count <= room
    }

    fn run(&mut self, chunks: &[Chunk<'_>], logits: &mut Logits) -> Result<(), DeviceError> {
        if let Some(error) = self.state.failed.take() {
            return Err(error);
        }
        let parts = plan::cut(chunks, &self.limits);
        logits.clear(self.shape.vocab);
        logits.lay_out(chunks.iter().flat_map(|chunk| {
            let (rows, count) = chunk.logits.rows(0..chunk.tokens.len());
            let all = count.is_none_or(|count| !self.screens(count));
            rows.map(move |_| all)
        }));
        let mut lists = Lists::new();
        let mut all = logits.all_mut();
        for part in &parts {
            let wanted = plan::wanted(part, chunks, |count| self.screens(count));
            let (attention, reach) = plan::attention(part, chunks, &self.shape, &self.buffers);
            let work = Work { part, chunks, attention, reach };
            let (here, rest) = all.split_at_mut(wanted.whole.len() * self.shape.vocab);
            self.run_part(&work, &wanted, here, &mut lists)?;
            all = rest;
        }
        logits.set_largest(lists.iter().map(Vec::as_slice));
        Ok(())
    }

    /// Runs a part; its whole rows' logits go to `all` `(whole, vocab)`.
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
        let mut overflown = Vec::new();
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
            self.pass(work, rows, here, lists, &mut overflown)?;
            (all, first) = (rest, false);
        }
        let mut logits = Vec::new();
        for (list, wanted) in overflown {
            logits.resize(self.shape.vocab, 0.0);
            let rows = OfPass { whole: &[wanted.row], screened: &[], first: false };
            self.pass(work, rows, &mut logits, &mut Lists::new(), &mut Vec::new())?;
            lists[list] = largest_of(&logits, wanted.count);
        }
        Ok(())
    }

    /// One upload, the launches, one download. Rows with more candidates than there is room for are
    /// noted, with their list's place.
    fn pass(
        &mut self,
        work: &Work<'_>,
        rows: OfPass<'_>,
        all: &mut [f32],
        lists: &mut Lists,
        overflown: &mut Vec<(usize, Wanted)>,
    ) -> Result<(), DeviceError> {
        let bucket = self.bucket(work, rows.whole.len(), rows.screened.len());
        let (inputs, outputs) =
            (self.buffers.inputs(&bucket, &self.shape), self.buffers.outputs(&bucket));
        let image = &mut self.state.image;
        let wanted = (rows.whole, rows.screened);
        image.draw((work.part, work.chunks), wanted, &inputs, &bucket, &self.shape);
        self.device.write(inputs.step, image.bytes())?;
        self.launch(&bucket, &outputs, rows.first)?;
        self.download(&outputs, rows, all)?;
        let of_rows = self.lists(&bucket, rows.screened.len());
        let mut total = 0;
        for (found, wanted) in of_rows.into_iter().zip(rows.screened) {
            total += found.len();
            if found.is_empty() {
                overflown.push((lists.len(), *wanted));
                total += self.shape.vocab;
            }
            lists.push(found);
        }
        if bucket.digits == 1 && total > rows.screened.len() * self.shape.vocab / ONE_DIGIT_SHARE {
            self.state.coarse = true;
        }
        Ok(())
    }

    fn bucket(&self, work: &Work<'_>, whole: usize, screened: usize) -> Bucket {
        let one_digit = screened >= ONE_DIGIT_ROWS && !self.state.coarse;
        Bucket {
            rows: bucket_of(work.part.iter().map(|piece| piece.len).sum()).min(self.limits.rows),
            whole: bucket_of(whole).min(self.limits.whole),
            screened: bucket_of(screened).min(self.limits.screened),
            reach: work.reach,
            attention: work.attention,
            digits: if one_digit { 1 } else { 2 },
        }
    }

    /// What a step of one pass launches. Its inputs are there after it ran.
    pub(super) fn launches(&self, chunks: &[Chunk<'_>]) -> Vec<Launch> {
        let parts = plan::cut(chunks, &self.limits);
        let [part] = &parts[..] else { panic!("the step is of {} passes", parts.len()) };
        let wanted = plan::wanted(part, chunks, |count| self.screens(count));
        let (attention, reach) = plan::attention(part, chunks, &self.shape, &self.buffers);
        let work = Work { part, chunks, attention, reach };
        let bucket = self.bucket(&work, wanted.whole.len(), wanted.screened.len());
        let pass = self.pass_of(&bucket);
        [pass.body(), pass.head(&self.buffers.outputs(&bucket))].concat()
    }

    /// Forgets the launches of all buckets.
    pub(super) fn forget_recordings(&mut self) -> Result<(), DeviceError> {
        self.state.recordings.clear();
        self.device.forget_recordings()
    }

    /// What the launches of a pass are made of.
    pub(super) fn pass_of(&self, bucket: &Bucket) -> Pass<'_> {
        let properties = self.device.properties();
        Pass {
            weights: &self.weights,
            buffers: &self.buffers,
            shape: &self.shape,
            inputs: self.buffers.inputs(bucket, &self.shape),
            bucket: *bucket,
            kv_base: self.kv_base,
            multiprocessors: properties.multiprocessors as usize,
            shared_bytes: properties.shared_bytes as usize,
        }
    }

    /// Launches the layers, if they are to run, and the head; what comes often is recorded once.
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

    /// Waits for the pass and fetches what it found.
    fn download(
        &mut self,
        outputs: &Outputs,
        rows: OfPass<'_>,
        all: &mut [f32],
    ) -> Result<(), DeviceError> {
        let of_row = capacity(&self.shape) * size_of::<Found>();
        let counts = (outputs.found - outputs.found_counts) as usize;
        let found = &mut self.state.found;
        found.resize(
            if rows.screened.is_empty() { 0 } else { counts + rows.screened.len() * of_row },
            0,
        );
        let mut parts = Vec::new();
        if !found.is_empty() {
            parts.push(Part { from: outputs.found_counts, to: found });
        }
        if !all.is_empty() {
            parts.push(Part { from: outputs.logits, to: bytemuck::cast_slice_mut(all) });
        }
        self.device.read(&mut parts)
    }

    /// The candidates of each screened row, by ascending token; none where there was no room for them.
    fn lists(&self, bucket: &Bucket, rows: usize) -> Lists {
        let outputs = self.buffers.outputs(bucket);
        let (bytes, of_row) = (&self.state.found, capacity(&self.shape));
        let start = (outputs.found - outputs.found_counts) as usize;
        (0..rows)
            .map(|row| {
                let count: u32 = bytemuck::pod_read_unaligned(&bytes[row * 4..row * 4 + 4]);
                if count as usize > of_row {
                    return Vec::new();
                }
                let at = start + row * of_row * size_of::<Found>();
                let mut list: Vec<TokenLogit> = bytes[at..at + count as usize * size_of::<Found>()]
                    .chunks_exact(size_of::<Found>())
                    .map(|bytes| {
                        let Found { token, logit } = bytemuck::pod_read_unaligned(bytes);
                        TokenLogit { id: token, logit }
                    })
                    .collect();
                list.sort_unstable_by_key(|found| found.id);
                list
            })
            .collect()
    }
}

/// The largest logits and their equals, and what is no number, by ascending token.
fn largest_of(logits: &[f32], count: usize) -> Vec<TokenLogit> {
    let mut sorted = logits.to_vec();
    let place = count.clamp(1, sorted.len()) - 1;
    let least = *sorted.select_nth_unstable_by(place, |a, b| b.total_cmp(a)).1;
    let all = logits.iter().zip(0u32..).map(|(&logit, id)| TokenLogit { id, logit });
    all.filter(|choice| choice.logit.is_nan() || choice.logit >= least).collect()
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
        positions::check(chunks, &self.config, self.block_count)?;
        self.run(chunks, logits).map_err(|error| match error {
            DeviceError::Sticky { .. } | DeviceError::Lost { .. } => {
                StepError::DeviceLost(Box::new(error))
            }
            _ => StepError::Device(Box::new(error)),
        })
    }

    fn copy_block(&mut self, from: BlockId, to: BlockId) {
        let bytes = self.shape.kv_block_bytes();
        let at = |block: BlockId| {
            assert!((block.0 as usize) < self.block_count, "a block of this pool");
            self.kv_base + u64::from(block.0) * bytes as u64
        };
        if from != to
            && let Err(error) = self.device.copy(at(from), at(to), bytes)
        {
            self.state.failed.get_or_insert(error);
        }
    }
}
