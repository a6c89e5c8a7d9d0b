//! Passes on the device: one upload, the launches, and one download. [`step`](super::step) chooses the passes of a step.

use super::{
    attention_mode::AttentionMode,
    backend::CudaBackend,
    buffers::{Bucket, Outputs, bucket_of, capacity, changes_max},
    device::{DeviceError, Launch, Part},
    draws::{Chunk, Draws, RowDraw},
    forward::Pass,
    found::{Downloaded, InFlight, Lists, undecided},
    plan::{self, AllWanted, AttentionLimits, Piece, Wanted},
};
use crate::backend::{self, cpu::screen::copies::SCREEN_SHARE};

/// Above one candidate per this many tokens, candidates cost more than a second digit.
const ONE_DIGIT_SHARE: usize = 64;

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
    /// Returns whether the screen finds the tokens that a draw needs, or the drawn one. It keeps nothing for further questions.
    pub(super) fn screens(&self, draw: &RowDraw) -> bool {
        // The device makes the changes before a draw.
        let (count, others_follow) = match draw.filtered {
            Some(draw) => (if draw.has_filters() { draw.top_k.max(1) } else { 1 }, false),
            None => (draw.largest.count, draw.largest.others_follow),
        };
        let room = self.shape.groups().min(capacity(&self.shape) / 2);
        self.weights.tables.head.finds()
            && !others_follow
            && draw.changes <= changes_max(&self.shape)
            && count.saturating_mul(SCREEN_SHARE) <= self.shape.vocab
            && count <= room
    }

    /// Runs chunks in as many passes as they need, and waits. Writes all logits of whole rows to `all`; returns the first tokens
    /// of the others, in the order of the chunks.
    pub(super) fn run_all(
        &mut self,
        chunks: &[Chunk<'_>],
        mut all: &mut [f32],
    ) -> Result<Lists, DeviceError> {
        let mut lists = Lists::new();
        for part in &plan::cut(chunks, &self.limits) {
            let wanted = plan::wanted(part, chunks, |draw| self.screens(draw));
            let (attention, reach) = self.attention(part, chunks);
            let work = Work { part, chunks, attention, reach };
            let (here, rest) = all.split_at_mut(wanted.whole.len() * self.shape.vocab);
            self.run_part(&work, &wanted, here, &mut lists)?;
            all = rest;
        }
        Ok(lists)
    }

    /// Starts chunks that need the first token of some rows and nothing else, without a wait. The tokens are carried to
    /// later passes from index `carry` on. `None` if that takes several passes.
    pub(super) fn begin(
        &mut self,
        chunks: &[Chunk<'_>],
        carry: usize,
    ) -> Result<Option<InFlight>, DeviceError> {
        let parts = plan::cut(chunks, &self.limits);
        let [part] = &parts[..] else { return Ok(None) };
        let wanted = plan::wanted(part, chunks, |draw| self.screens(draw));
        let is_one_pass = wanted.passes(&self.limits).len() == 1;
        let AllWanted { whole, screened } = wanted;
        if !whole.is_empty() || !screened.iter().all(Wanted::is_single) || !is_one_pass {
            return Ok(None);
        }
        let (attention, reach) = self.attention(part, chunks);
        let work = Work { part, chunks, attention, reach };
        let rows = OfPass { whole: &[], screened: &screened, first: true };
        let (digits, outputs) = self.start(&work, rows, carry)?;
        let mut found = Downloaded::default();
        let (from, bytes) = found.begin(&outputs, &screened, capacity(&self.shape));
        let reading = self.device.begin_read(from, bytes)?;
        Ok(Some(InFlight { reading, found, screened, digits }))
    }

    /// Waits for a pass. Returns the first token of each screened row, none for rows that it does not decide.
    pub(super) fn finish(&mut self, pass: InFlight) -> Result<Lists, DeviceError> {
        let InFlight { reading, mut found, screened, digits } = pass;
        self.device.finish_read(reading, &mut found.bytes)?;
        self.state.unread = None;
        Ok(self.collect(&found, &screened, digits))
    }

    /// Chooses the attention kernels of a part, and the room for scores in positions.
    fn attention(&self, part: &[Piece], chunks: &[Chunk<'_>]) -> (AttentionMode, usize) {
        let multiprocessors = self.device.properties().multiprocessors as usize;
        let (tuning, has_tiles) = (&self.tuning, self.state.has_tiles);
        let limits = AttentionLimits {
            split_tasks: tuning.split_tasks.saturating_mul(multiprocessors),
            short: (tuning.short_blocks.saturating_mul(multiprocessors), tuning.short_positions),
            tile_rows: if has_tiles { tuning.attention_tile_rows } else { usize::MAX },
        };
        plan::attention(part, chunks, &self.shape, &self.buffers, limits)
    }

    /// Runs a part; writes all logits of its whole rows to `all` `(whole, vocab)`.
    fn run_part(
        &mut self,
        work: &Work<'_>,
        wanted: &AllWanted,
        mut all: &mut [f32],
        lists: &mut Lists,
    ) -> Result<(), DeviceError> {
        let mut overflowed = Vec::new();
        let mut first = true;
        for (whole, screened) in wanted.passes(&self.limits) {
            let rows = OfPass { whole, screened, first };
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
            for ((list, wanted), logits) in some.iter().zip(all.chunks_exact_mut(vocab)) {
                lists[*list] = undecided(logits, &wanted.draw);
            }
        }
        Ok(())
    }

    /// Runs one upload, the launches and one download. Adds rows that are not decided to `overflowed`, with the index of
    /// their list.
    fn pass(
        &mut self,
        work: &Work<'_>,
        rows: OfPass<'_>,
        all: &mut [f32],
        lists: &mut Lists,
        overflowed: &mut Vec<(usize, Wanted)>,
    ) -> Result<(), DeviceError> {
        let (digits, outputs) = self.start(work, rows, 0)?;
        self.download(&outputs, rows, all)?;
        let found = std::mem::take(&mut self.state.found);
        for (list, wanted) in
            self.collect(&found, rows.screened, digits).into_iter().zip(rows.screened)
        {
            if list.tokens.is_empty() {
                overflowed.push((lists.len(), *wanted));
            }
            lists.push(list);
        }
        self.state.found = found;
        Ok(())
    }

    /// Uploads the inputs of a pass and launches it; returns the digits of its screen.
    fn start(
        &mut self,
        work: &Work<'_>,
        rows: OfPass<'_>,
        carry: usize,
    ) -> Result<(usize, Outputs), DeviceError> {
        let bucket = self.bucket(work, rows.whole.len(), rows.screened);
        let (inputs, outputs) =
            (self.buffers.inputs(&bucket, &self.shape), self.buffers.outputs(&bucket));
        let image = &mut self.state.image;
        let wanted = (rows.whole, rows.screened);
        image.write((work.part, work.chunks), wanted, carry, &inputs, &bucket, &self.shape);
        self.device.write(inputs.step, image.bytes())?;
        self.launch(&bucket, &outputs, rows.first)?;
        Ok((bucket.digits, outputs))
    }

    /// Lists what the screen has found of each row; nothing of rows that it does not decide.
    fn collect(&mut self, found: &Downloaded, rows: &[Wanted], digits: usize) -> Lists {
        let candidates = |row| found.count(row).min(self.shape.vocab);
        let total: usize = (0..rows.len()).map(candidates).sum();
        self.state.candidates += total;
        if digits == 1 && total > rows.len() * self.shape.vocab / ONE_DIGIT_SHARE {
            self.state.coarse = true;
        }
        found.lists(rows)
    }

    fn bucket(&self, work: &Work<'_>, whole: usize, screened: &[Wanted]) -> Bucket {
        let filters = screened.iter().any(Wanted::has_filters);
        let changes = screened.iter().any(|wanted| wanted.draw.changes > 0);
        let reported = screened.iter().filter(|wanted| wanted.is_reported()).count();
        let screened = screened.len();
        let one_digit = screened >= self.tuning.one_digit_rows && !self.state.coarse;
        Bucket {
            rows: bucket_of(work.part.iter().map(|piece| piece.len).sum()).min(self.limits.rows),
            whole: bucket_of(whole + reported).min(self.limits.whole),
            reported: bucket_of(reported).min(self.limits.whole),
            screened: bucket_of(screened).min(self.limits.screened),
            reach: work.reach,
            attention: work.attention,
            digits: if one_digit { 1 } else { 2 },
            filters,
            changes,
        }
    }

    /// Returns the launches of a step of one pass. Their inputs are those of the last step.
    pub(super) fn launches(&self, chunks: &[backend::Chunk<'_>]) -> Vec<Launch> {
        let mut draws = Draws::default();
        draws.list(chunks);
        let chunks = &draws.chunks(chunks)[..];
        let parts = plan::cut(chunks, &self.limits);
        let [part] = &parts[..] else { panic!("the step is of {} passes", parts.len()) };
        let wanted = plan::wanted(part, chunks, |draw| self.screens(draw));
        let (attention, reach) = self.attention(part, chunks);
        let work = Work { part, chunks, attention, reach };
        let bucket = self.bucket(&work, wanted.whole.len(), &wanted.screened);
        let pass = self.pass_of(&bucket);
        [pass.body(), pass.head(&self.buffers.outputs(&bucket))].concat()
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
            has_warpgroups: self.state.has_warpgroups,
            many: None,
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
        self.device.let_overlap(bucket.rows <= self.tuning.overlap_rows);
        let launches = |backend: &Self| {
            let pass = backend.pass_of(bucket);
            let mut launches = if first { pass.body() } else { Vec::new() };
            launches.extend(pass.head(outputs));
            launches
        };
        if first && bucket.rows <= self.limits.recorded {
            return self.replay(bucket, launches);
        }
        self.launch_all(&launches(self))
    }

    /// Waits for the pass and downloads its outputs. Does not wait for a pass without outputs, but for one before it, so that the
    /// device has work while the host prepares the next pass.
    fn download(
        &mut self,
        outputs: &Outputs,
        rows: OfPass<'_>,
        all: &mut [f32],
    ) -> Result<(), DeviceError> {
        let mut parts = Vec::new();
        let (_, bytes) = self.state.found.begin(outputs, rows.screened, capacity(&self.shape));
        if bytes > 0 {
            parts.push(self.state.found.part(bytes));
        }
        if !all.is_empty() {
            parts.push(Part { from: outputs.logits, to: bytemuck::cast_slice_mut(all) });
        }
        if parts.is_empty() && !self.state.alone {
            let reading = self.device.begin_read(outputs.found_counts, 0)?;
            let waited = self.finish_unread();
            self.state.unread = Some(reading);
            return waited;
        }
        self.state.unread = None;
        self.device.read(&mut parts)
    }
}
