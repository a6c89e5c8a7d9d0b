//! Splits a step into passes, and writes the inputs of each as bytes.

use bytemuck::{Pod, Zeroable};

use super::{
    args::{self, AttentionTask, RowFilter, RowQuestion, Step},
    attention_mode::{AttentionMode, SHORT_STEP, short_positions, slices, tasks_of_row},
    buffers::{Bucket, Buffers, Inputs, Limits, bucket_of},
    device::Address,
    draws::{Chunk, FilteredDraw, RowDraw},
    shape::Shape,
};
use crate::{
    backend::cpu::KvType,
    kv::BLOCK_TOKENS,
    sampling::{GumbelNoise, Largest, LogitChange},
};

/// How far below the largest logit the candidates of top-p reach, in units of the temperature: those further below weigh less
/// than 3e-6 of the most probable token each.
const REACH: f32 = 13.0;

/// Some consecutive rows of one chunk.
#[derive(Debug, Clone)]
pub struct Piece {
    /// Index of the chunk.
    pub chunk: usize,
    /// First token, within the chunk.
    pub start: usize,
    /// Number of tokens.
    pub len: usize,
}

impl Piece {
    /// Returns the number of KV blocks that the rows attend to.
    fn blocks(&self, chunks: &[Chunk<'_>]) -> usize {
        (chunks[self.chunk].position + self.start + self.len).div_ceil(BLOCK_TOKENS)
    }
}

/// Splits a step into passes within the limits, in order: earlier positions are written before later ones attend to
/// them.
pub fn cut(chunks: &[Chunk<'_>], limits: &Limits) -> Vec<Vec<Piece>> {
    let mut parts: Vec<Vec<Piece>> = Vec::new();
    let (mut rows, mut blocks) = (0, 0);
    for (index, chunk) in chunks.iter().enumerate() {
        let mut start = 0;
        while start < chunk.tokens.len() {
            let len = (chunk.tokens.len() - start).min(limits.rows);
            let mut piece = Piece { chunk: index, start, len };
            piece.len = if rows < limits.rows { len.min(limits.rows - rows) } else { len };
            let needed = piece.blocks(chunks);
            let full = rows == limits.rows || rows > 0 && blocks + needed > limits.blocks;
            if parts.is_empty() || full {
                piece.len = len;
                (rows, blocks) = (0, 0);
                parts.push(Vec::new());
            }
            rows += piece.len;
            blocks += piece.blocks(chunks);
            start += piece.len;
            parts.last_mut().expect("one was just made").push(piece);
        }
    }
    parts
}

/// A row that needs some tokens, or a draw.
#[derive(Debug, Clone, Copy)]
pub struct Wanted {
    /// Row within the part.
    pub row: usize,
    /// Index of its chunk.
    pub chunk: usize,
    /// The first of its changes among the chunk's.
    pub first_change: usize,
    /// What it needs.
    pub draw: RowDraw,
}

impl Wanted {
    /// Returns whether one token is enough.
    pub fn is_single(&self) -> bool {
        let Largest { count, within, .. } = self.draw.largest;
        self.draw.filtered.is_some() || count <= 1 && within == 0.0
    }

    /// Returns whether the device draws the token of this row with filters.
    pub fn has_filters(&self) -> bool {
        self.draw.filtered.is_some_and(|draw| draw.has_filters())
    }

    /// Returns the changes of logits before the row's draw, of tokens in the vocabulary.
    pub fn changes<'a>(&self, chunks: &[Chunk<'a>], shape: &Shape) -> &'a [LogitChange] {
        let changes = chunks[self.chunk].logits.changes();
        let changes = &changes[self.first_change..][..self.draw.changes];
        &changes[..changes.partition_point(|change| (change.token as usize) < shape.vocab)]
    }

    /// Returns whether the device computes the distribution of this row.
    pub fn is_reported(&self) -> bool {
        self.draw.report.is_some()
    }

    fn filter(&self) -> RowFilter {
        let draw = self.draw.filtered.filter(FilteredDraw::has_filters);
        let Some(FilteredDraw { noise, top_k, top_p, min_p }) = draw else {
            return RowFilter::zeroed();
        };
        // Without top-p, as far as min-p.
        let within = self.draw.largest.within;
        let reach = if top_p < 1.0 { REACH * noise.temperature } else { within };
        RowFilter { is_on: 1, top_k: top_k as u32, top_p, min_p, reach }
    }

    /// Returns the tokens to find, with changes from an index on.
    fn for_device(&self, first_change: usize, changes: usize) -> RowQuestion {
        let largest = match self.draw.filtered {
            // The first token by noise; filters decide whether it is the drawn one.
            Some(draw) => Largest { noise: Some(draw.noise), ..Largest::logits(1) },
            None => self.draw.largest,
        };
        let Largest { count, within, noise, .. } = largest;
        RowQuestion {
            count: count.max(1) as u32,
            within,
            temperature: noise.map_or(0.0, |noise| noise.temperature),
            single: self.is_single().into(),
            keys: noise.map_or([0; 4], GumbelNoise::keys),
            first_change: first_change as u32,
            changes: changes as u32,
        }
    }
}

/// Rows of a part that need all logits, and rows that need some.
#[derive(Debug, Default)]
pub struct AllWanted {
    pub whole: Vec<usize>,
    pub screened: Vec<Wanted>,
}

impl AllWanted {
    /// Splits the rows into passes within the limits, at least one.
    pub fn passes(&self, limits: &Limits) -> Vec<(&[usize], &[Wanted])> {
        let (mut whole, mut screened) = (&self.whole[..], &self.screened[..]);
        let mut passes = Vec::new();
        while passes.is_empty() || !whole.is_empty() || !screened.is_empty() {
            let mut room = limits.whole;
            let takes_room = |wanted: &&Wanted| {
                let rows = usize::from(wanted.is_reported());
                room.checked_sub(rows).map(|rest| room = rest).is_some()
            };
            let count = screened.iter().take(limits.screened).take_while(takes_room).count();
            let (of_whole, of_screened) =
                (whole.split_at(room.min(whole.len())), screened.split_at(count));
            passes.push((of_whole.0, of_screened.0));
            (whole, screened) = (of_whole.1, of_screened.1);
        }
        passes
    }
}

/// Finds the rows of a part that need logits. `screens` returns whether the screen finds what a draw needs.
pub fn wanted(
    part: &[Piece],
    chunks: &[Chunk<'_>],
    screens: impl Fn(&RowDraw) -> bool,
) -> AllWanted {
    let mut all = AllWanted::default();
    let mut first = 0;
    for piece in part {
        let chunk = &chunks[piece.chunk];
        let here = piece.start..piece.start + piece.len;
        let mut next_change = 0;
        for (row, draw) in chunk.logits.wanted(0..chunk.tokens.len()) {
            let first_change = next_change;
            next_change += draw.map_or(0, |draw| draw.changes);
            if !here.contains(&row) {
                continue;
            }
            let (row, chunk) = (row - piece.start + first, piece.chunk);
            match draw.filter(&screens) {
                Some(draw) => all.screened.push(Wanted { row, chunk, first_change, draw }),
                None => all.whole.push(row),
            }
        }
        first += piece.len;
    }
    all
}

/// Limits of the attention kernels.
#[derive(Debug, Clone, Copy)]
pub struct AttentionLimits {
    /// Decodes take one kernel for scores and values up to this number of thread blocks and this number of positions.
    pub short: (usize, usize),
    /// Other decodes are split over thread blocks up to this number of tasks.
    pub split_tasks: usize,
    /// With int8 keys and values, parts with so many rows of a sequence take tiles.
    pub tile_rows: usize,
}

/// Chooses the attention kernels of a part; also returns the room for scores, in positions.
pub fn attention(
    part: &[Piece],
    chunks: &[Chunk<'_>],
    shape: &Shape,
    buffers: &Buffers,
    limits: AttentionLimits,
) -> (AttentionMode, usize) {
    let end = |piece: &Piece| chunks[piece.chunk].position + piece.start + piece.len;
    let longest = part.iter().map(end).max().unwrap_or_default();
    let reach = shape.reach(longest);
    let decodes = part.iter().all(|piece| piece.len == 1);
    let tiles = shape.kv == KvType::Q8 && part.iter().any(|piece| piece.len >= limits.tile_rows);
    let tasks = bucket_of(part.len()) * tasks_of_row(shape, AttentionMode::Split);
    let (blocks_max, positions_max) = limits.short;
    let is_short = longest <= positions_max.min(short_positions(shape));
    if decodes && is_short && tasks * slices(shape) <= blocks_max {
        return (AttentionMode::Short, longest.next_multiple_of(SHORT_STEP));
    }
    let may_split = tasks <= limits.split_tasks && buffers.may_split(tasks, reach);
    let mode = match decodes {
        true if may_split => AttentionMode::Split,
        true => AttentionMode::Warps4,
        false if tiles => AttentionMode::Tiles,
        false => AttentionMode::Warps8,
    };
    (mode, reach)
}

/// A pass's inputs in the layout of the device. Reused between steps.
#[derive(Debug, Default)]
pub struct Image {
    bytes: Vec<u8>,
    tasks: Vec<AttentionTask>,
    blocks: Vec<u32>,
}

impl Image {
    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Writes the inputs of a part, with its rows that need logits.
    pub fn write(
        &mut self,
        (part, chunks): (&[Piece], &[Chunk<'_>]),
        (whole, screened): (&[usize], &[Wanted]),
        carry: usize,
        inputs: &Inputs,
        bucket: &Bucket,
        shape: &Shape,
    ) {
        let Self { bytes, tasks, blocks } = self;
        bytes.clear();
        bytes.resize(inputs.offset(inputs.blocks), 0);
        tasks.clear();
        blocks.clear();
        let mut row = 0;
        for piece in part {
            let (chunk, table) = (&chunks[piece.chunk], blocks.len() as u32);
            blocks.extend(chunk.blocks[..piece.blocks(chunks)].iter().map(|block| block.0));
            let tokens = &chunk.tokens[piece.start..piece.start + piece.len];
            let position = (chunk.position + piece.start) as u32;
            put(bytes, inputs, inputs.tokens, row, tokens.iter().copied());
            let positions = position..position + piece.len as u32;
            put(bytes, inputs, inputs.positions, row, positions);
            put(bytes, inputs, inputs.tables, row, std::iter::repeat_n(table, piece.len));
            let first = AttentionTask {
                first_row: row as u32,
                row_count: piece.len as u32,
                position,
                table,
                ..AttentionTask::zeroed()
            };
            add_tasks(&first, shape, bucket.attention, tasks);
            row += piece.len;
        }
        // The longest tasks first, so that short ones fill the end.
        if matches!(bucket.attention, AttentionMode::Warps8 | AttentionMode::Tiles) {
            tasks.sort_by_key(|task| std::cmp::Reverse(task.position / 256));
        }
        let reported = screened.iter().filter(|wanted| wanted.is_reported());
        let of_step = whole.iter().copied().chain(reported.clone().map(|wanted| wanted.row));
        let tops = reported.clone().filter_map(|wanted| wanted.draw.report);
        let step = Step {
            rows: row as u32,
            tasks: tasks.len() as u32,
            whole: of_step.clone().count() as u32,
            screened: screened.len() as u32,
            carry: carry as u32,
            reported: reported.clone().count() as u32,
            unused: [0; 2],
        };
        put(bytes, inputs, inputs.step, 0, [step]);
        put(bytes, inputs, inputs.whole, 0, of_step.map(|row| row as u32));
        put(bytes, inputs, inputs.tops, whole.len(), tops.map(|top| top as u32));
        put(bytes, inputs, inputs.screened, 0, screened.iter().map(|wanted| wanted.row as u32));
        if bucket.filters {
            put(bytes, inputs, inputs.filters, 0, screened.iter().map(Wanted::filter));
        }
        put(bytes, inputs, inputs.tasks, 0, tasks.iter().copied());
        bytes.extend_from_slice(bytemuck::cast_slice(blocks));
        // The changes follow, at a multiple of their size from the start of the inputs.
        let size = size_of::<args::LogitChange>();
        bytes.resize(bytes.len().next_multiple_of(size), 0);
        for (row, wanted) in screened.iter().enumerate() {
            let (first, changes) = (bytes.len() / size, wanted.changes(chunks, shape));
            for &LogitChange { token, bias, penalty, less } in changes {
                let change = args::LogitChange { token, bias, penalty, less };
                bytes.extend_from_slice(bytemuck::bytes_of(&change));
            }
            let question = wanted.for_device(first, changes.len());
            put(bytes, inputs, inputs.questions, row, [question]);
        }
    }
}

/// Writes elements of an array of the inputs, from index `first` on.
fn put<T: Pod>(
    bytes: &mut [u8],
    inputs: &Inputs,
    at: Address,
    first: usize,
    elements: impl IntoIterator<Item = T>,
) {
    let places = bytes[inputs.offset(at)..].chunks_exact_mut(size_of::<T>()).skip(first);
    for (place, element) in places.zip(elements) {
        place.copy_from_slice(bytemuck::bytes_of(&element));
    }
}

/// Splits the queries of a sequence's rows into tasks; tasks that share keys are adjacent.
fn add_tasks(
    rows: &AttentionTask,
    shape: &Shape,
    mode: AttentionMode,
    tasks: &mut Vec<AttentionTask>,
) {
    let (queries, group) = (mode.queries(), shape.heads / shape.kv_heads);
    let heads_max = group.min(queries);
    for kv_head in 0..shape.kv_heads {
        for head in (0..group).step_by(heads_max) {
            let head_count = heads_max.min(group - head);
            let rows_max = if mode.is_by_row() { 1 } else { queries / head_count };
            for row in (0..rows.row_count).step_by(rows_max) {
                tasks.push(AttentionTask {
                    first_row: rows.first_row + row,
                    row_count: (rows_max as u32).min(rows.row_count - row),
                    first_head: (kv_head * group + head) as u32,
                    head_count: head_count as u32,
                    position: rows.position + row,
                    table: rows.table,
                });
            }
        }
    }
}
