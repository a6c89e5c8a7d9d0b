//! Addresses of a step's buffers, and the layout of its inputs and outputs.

use super::{
    args::{
        AttentionTask, Distribution, Found, InputBlock, LogitChange, Rest, RowFilter, RowQuestion,
        Step,
    },
    attention_mode::{AttentionMode, TASK_QUERIES, tasks_of_row},
    device::{Address, Properties},
    layout::{K_BLOCK, TILE_ROWS, k_blocks},
    shape::{Arena, Shape, stride},
};

/// Rows of the largest pass. Prompts fill it: with 512 rows, an H200 has two thirds of the speed.
const STEP_ROWS: usize = 4096;
/// Most memory for attention scores, in bytes.
const SCORES_BYTES: usize = 512 << 20;
/// Most changed logits of a row. Few requests have more different tokens in prompt and answer.
const CHANGES_MAX: usize = 4096 + 512;
/// Attention warps that a multiprocessor runs at once.
const WARPS: usize = 16;
/// Parts of the vocabulary that blocks weigh one by one.
pub const REST_PARTS: usize = 16;
/// Largest sizes of one pass; a larger step is split into several passes.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Tokens.
    pub rows: usize,
    /// Rows that need all logits, on the host or for their distributions.
    pub whole: usize,
    /// Rows that need only the largest logits.
    pub screened: usize,
    /// Entries of block tables; one sequence may have more.
    pub blocks: usize,
    /// Largest number of tokens of a pass with recorded launches.
    pub recorded: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { rows: STEP_ROWS, whole: 256, screened: 512, blocks: 1 << 18, recorded: 512 }
    }
}

/// Returns the number of candidates that fit for a row. For a row with more candidates, all logits
/// are computed.
pub fn capacity(shape: &Shape) -> usize {
    (shape.vocab / 128).max(64)
}

/// Returns the largest number of changed logits of a row. For a row with more, all logits are computed.
pub fn changes_max(shape: &Shape) -> usize {
    CHANGES_MAX.min(shape.vocab)
}

/// Sizes that grids and layouts of a pass are made for; the pass may have fewer rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Bucket {
    pub rows: usize,
    pub whole: usize,
    pub screened: usize,
    /// Rows with distributions, among those with all logits.
    pub reported: usize,
    /// Positions that a query's scores have room for, or that the kernel for short contexts is launched for.
    pub reach: usize,
    pub attention: AttentionMode,
    /// Digits of the screen.
    pub digits: usize,
    /// Whether a screened row has filters.
    pub filters: bool,
    /// Whether logits of a screened row are changed.
    pub changes: bool,
}

/// Rounds a count up, so that there are few different recordings.
pub fn bucket_of(count: usize) -> usize {
    match count {
        0..=2 => count,
        3..=8 => count.next_power_of_two(),
        9..=64 => count.next_multiple_of(8),
        65..=256 => count.next_multiple_of(32),
        _ => count.next_multiple_of(64),
    }
}

/// Returns a function that takes ranges one after another, each aligned to 16 bytes.
fn consecutive(start: Address) -> impl FnMut(usize) -> Address {
    let mut next = start;
    move |bytes| {
        let at = next;
        next += bytes.next_multiple_of(16) as u64;
        at
    }
}

/// Addresses of a pass's inputs, which are uploaded together.
#[derive(Debug, Clone, Copy)]
pub struct Inputs {
    pub step: Address,
    pub tokens: Address,    // (rows)
    pub positions: Address, // (rows)
    pub tables: Address,    // (rows)
    pub whole: Address,     // (whole)
    pub tops: Address,      // (whole)
    pub screened: Address,  // (screened)
    pub questions: Address, // (screened)
    pub filters: Address,   // (screened), if a row has some
    pub tasks: Address,     // (tasks)
    pub blocks: Address,    // the rest, with the changes of logits after the tables
    start: Address,
}

impl Inputs {
    fn place(start: Address, bucket: &Bucket, shape: &Shape) -> Self {
        // Rows that share tasks need fewer tasks.
        let of_row = tasks_of_row(shape, bucket.attention);
        let mut take = consecutive(start);
        Self {
            step: take(size_of::<Step>()),
            tokens: take(bucket.rows * 4),
            positions: take(bucket.rows * 4),
            tables: take(bucket.rows * 4),
            whole: take(bucket.whole * 4),
            tops: take(bucket.whole * 4),
            screened: take(bucket.screened * 4),
            questions: take(bucket.screened * size_of::<RowQuestion>()),
            filters: take(if bucket.filters {
                bucket.screened * size_of::<RowFilter>()
            } else {
                0
            }),
            tasks: take(bucket.rows * of_row * size_of::<AttentionTask>()),
            blocks: take(0),
            start,
        }
    }

    /// Returns an address's offset from the start of the inputs.
    pub fn offset(&self, at: Address) -> usize {
        (at - self.start) as usize
    }
}

/// Addresses of a pass's outputs, one after another.
#[derive(Debug, Clone, Copy)]
pub struct Outputs {
    pub found_counts: Address,  // (screened)
    pub drawn: Address,         // (screened)
    pub distributions: Address, // (reported)
    pub found: Address,         // (screened, capacity)
    pub logits: Address,        // (whole, vocab)
}

/// Addresses of all buffers.
#[derive(Debug, Clone, Copy)]
pub struct Buffers {
    inputs: Address,
    outputs: Address,
    pub residual: Address,  // (rows, hidden)
    pub queries: Address,   // (rows, heads * head_dim)
    pub keys: Address,      // (rows, kv_heads * head_dim)
    pub values: Address,    // (rows, kv_heads * head_dim)
    pub attended: Address,  // (rows, heads * head_dim)
    pub gate: Address,      // (rows, intermediate)
    pub up: Address,        // (rows, intermediate), for models with `activate`
    pub quantized: Address, // (rows, digits, stride)
    pub blocks: Address,    // (rows, stride / 128), with scales of groups
    pub scales: Address,    // (rows)
    pub sums: Address,      // (rows)
    pub scores: Address,
    pub maxima: Address,
    pub whole_x: Address,        // (whole, hidden)
    pub screened_x: Address,     // (screened, hidden)
    pub digits: Address,         // (screened, 2, stride)
    pub digit_rows: Address,     // (screened)
    pub estimates: Address,      // (screened, padded vocab)
    pub lowest: Address,         // (screened, groups)
    pub highest: Address,        // (screened, groups)
    pub carried: Address,        // (2, 2 * screened): tokens for later passes
    pub some_counts: Address,    // (screened): candidates of filters
    pub some: Address,           // (screened, capacity)
    pub thresholds: Address,     // (screened)
    pub rests: Address,          // (screened, REST_PARTS)
    pub firsts: Address,         // (screened): first tokens of the questions
    pub changed_counts: Address, // (screened)
    pub changed: Address,        // (screened, changes_max): tokens with changes
    scores_bytes: usize,
    warps_max: usize,
    capacity: usize,
}

impl Buffers {
    /// Assigns an address to every buffer.
    pub fn place(
        shape: &Shape,
        limits: &Limits,
        properties: &Properties,
        arena: &mut Arena,
    ) -> Self {
        let Limits { rows, whole, screened, .. } = *limits;
        let warps_max = WARPS * properties.multiprocessors as usize;
        let longest = shape.context.next_multiple_of(128);
        // The longest possible sequences still get four warps.
        let wanted = warps_max * TASK_QUERIES * longest * 4;
        let scores_bytes = wanted.min(SCORES_BYTES).max(4 * TASK_QUERIES * longest * 4);
        let largest = Bucket {
            rows,
            whole,
            screened,
            reported: whole,
            reach: longest,
            attention: AttentionMode::Split,
            digits: 2,
            filters: true,
            changes: true,
        };
        let tables = limits.blocks.max(shape.context.div_ceil(16));
        let changes = screened * changes_max(shape);
        let input_bytes = Inputs::place(0, &largest, shape).blocks as usize
            + (tables * 4).next_multiple_of(size_of::<LogitChange>())
            + changes * size_of::<LogitChange>();
        let capacity = capacity(shape);
        let of_screened = 4 + (1 + capacity) * size_of::<Found>();
        let of_whole = shape.vocab * 4 + size_of::<Distribution>();
        let output_bytes = screened * of_screened + whole * of_whole + 64;
        let up = if shape.joins_gate() { 0 } else { rows * shape.intermediate };
        let groups = if shape.group_scales { rows * k_blocks(shape.stride_max) } else { 0 };
        // The input of a ternary head has two digits.
        let of_head =
            if shape.group_scales { whole.max(screened) * 2 * stride(shape.hidden) } else { 0 };
        Self {
            inputs: arena.take(input_bytes),
            outputs: arena.take(output_bytes),
            residual: arena.words(rows * shape.hidden),
            queries: arena.words(rows * shape.query_width()),
            keys: arena.words(rows * shape.kv_width()),
            values: arena.words(rows * shape.kv_width()),
            attended: arena.words(rows * shape.query_width()),
            gate: arena.words(rows * shape.intermediate),
            up: arena.words(up),
            quantized: arena.take((rows * shape.digits * shape.stride_max).max(of_head)),
            blocks: arena.take(groups.max(of_head / K_BLOCK) * size_of::<InputBlock>()),
            scales: arena.words(rows),
            sums: arena.words(rows),
            scores: arena.take(scores_bytes),
            maxima: arena.take(scores_bytes / 32),
            whole_x: arena.words(whole * shape.hidden),
            screened_x: arena.words(screened * shape.hidden),
            digits: arena.take(screened * 2 * stride(shape.hidden)),
            digit_rows: arena.take(screened * 16),
            estimates: arena.words(screened * shape.groups() * TILE_ROWS),
            lowest: arena.words(screened * shape.groups()),
            highest: arena.words(screened * shape.groups()),
            carried: arena.words(4 * screened),
            some_counts: arena.words(screened),
            some: arena.take(screened * capacity * size_of::<Found>()),
            thresholds: arena.words(screened),
            rests: arena.take(screened * REST_PARTS * size_of::<Rest>()),
            firsts: arena.take(screened * size_of::<Found>()),
            changed_counts: arena.words(screened),
            changed: arena.take(changes * size_of::<Found>()),
            scores_bytes,
            warps_max,
            capacity,
        }
    }

    /// Returns the addresses of a pass's inputs.
    pub fn inputs(&self, bucket: &Bucket, shape: &Shape) -> Inputs {
        Inputs::place(self.inputs, bucket, shape)
    }

    /// Returns the addresses of a pass's outputs.
    pub fn outputs(&self, bucket: &Bucket) -> Outputs {
        let mut take = consecutive(self.outputs);
        Outputs {
            found_counts: take(bucket.screened * 4),
            drawn: take(bucket.screened * size_of::<Found>()),
            distributions: take(bucket.reported * size_of::<Distribution>()),
            found: take(bucket.screened * self.capacity * size_of::<Found>()),
            logits: take(0),
        }
    }

    /// Returns the number of warps for which the scores fit the memory, at least 4.
    pub fn warps(&self, bucket: &Bucket) -> usize {
        let room = self.scores_bytes / (bucket.attention.queries() * bucket.reach * 4);
        room.min(self.warps_max).max(4) / 4 * 4
    }

    /// Returns whether the scores of `tasks` tasks that are split over blocks fit the memory.
    pub fn may_split(&self, tasks: usize, reach: usize) -> bool {
        tasks * 4 * reach * 4 <= self.scores_bytes
    }
}

/// Returns the number of k blocks of a row of the screen's head.
pub fn screen_blocks(shape: &Shape) -> u32 {
    k_blocks(shape.hidden) as u32
}
