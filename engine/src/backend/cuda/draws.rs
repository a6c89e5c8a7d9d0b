//! What the device computes for the rows of a step with logits, from their [`SamplingMetadata`](crate::sampling).

use std::ops::Range;

use crate::{
    backend::{self, LogitsFor},
    kv::BlockId,
    sampling::{GumbelNoise, Largest, LogitChange, RowMetadata, SamplingParams, logit_changes},
};

/// What the device finds for a row: the first tokens, or the drawn one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowDraw {
    /// The tokens that the draw asks for first.
    pub largest: Largest,
    /// The draw, if it has filters or changes: the device makes it.
    pub filtered: Option<FilteredDraw>,
    /// Number of changes of logits before the draw.
    pub changes: usize,
    /// Whether the changes before the next draw depend on the token of this one.
    pub counts_token: bool,
    /// The device also computes the row's distribution, with so many most probable tokens.
    pub report: Option<usize>,
}

/// A draw from the tokens that top-k, top-p and min-p leave.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FilteredDraw {
    /// The noise of tokens; with a temperature of 0, the most probable token is drawn.
    pub noise: GumbelNoise,
    /// As in [`SamplingParams`], like the others.
    pub top_k: usize,
    /// Below 1 if it leaves out tokens.
    pub top_p: f32,
    /// Above 0 if it leaves out tokens.
    pub min_p: f32,
}

impl FilteredDraw {
    fn new(row: &RowMetadata<'_>) -> Self {
        let SamplingParams { top_k, top_p, min_p, .. } = *row.params;
        Self { noise: row.noise(), top_k, top_p, min_p }
    }

    /// Returns whether filters decide it, too, and not only logits and noise.
    pub fn has_filters(&self) -> bool {
        let leaves_out = self.top_k > 0 || self.top_p < 1.0 || self.min_p > 0.0;
        leaves_out && self.noise.temperature > 0.0
    }
}

impl From<Largest> for RowDraw {
    /// Finds tokens and draws none.
    fn from(largest: Largest) -> Self {
        Self { largest, filtered: None, changes: 0, counts_token: false, report: None }
    }
}

impl RowDraw {
    /// Returns what a draw needs; `None` if it needs all logits. Adds the changes of logits to `changes`, by ascending token.
    pub fn new(row: &RowMetadata<'_>, changes: &mut Vec<LogitChange>) -> Option<Self> {
        if row.needs_all(true) {
            return None;
        }
        let found = Self { report: row.params.logprobs, ..Self::from(row.largest()) };
        if row.choices > 1 {
            // Each choice draws on the host.
            return Some(found);
        }
        let before = changes.len();
        logit_changes::list(row, changes);
        let changes = changes.len() - before;
        let counts_token = row.counts.counts_output();
        let is_filtered = row.params.temperature > 0.0 && row.params.has_filters();
        let filtered = (is_filtered || changes > 0).then(|| FilteredDraw::new(row));
        // The device has the filters, and what is raised is among the changes.
        let largest = Largest { others_follow: false, ..found.largest };
        Some(Self { largest, filtered, changes, counts_token, ..found })
    }

    /// Returns the draw of the same choice at the next position.
    pub fn next(self) -> Self {
        let noise = self.largest.noise.map(GumbelNoise::next);
        let next = |draw: FilteredDraw| FilteredDraw { noise: draw.noise.next(), ..draw };
        Self {
            largest: Largest { noise, ..self.largest },
            filtered: self.filtered.map(next),
            ..self
        }
    }
}

/// The rows of a chunk that logits are requested for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rows<'a> {
    /// No row.
    Nothing,
    /// All logits of the last one.
    Last,
    /// All logits of every one.
    All,
    /// The last rows, one for each draw, `None` for one that needs all logits; and the changes of all draws, one's after
    /// another's.
    Draws(&'a [Option<RowDraw>], &'a [LogitChange]),
}

impl<'a> Rows<'a> {
    /// Returns the draw of the last row, if that one alone is requested, and the changes before it.
    pub fn of_last(self) -> Option<(RowDraw, &'a [LogitChange])> {
        match self {
            Self::Draws(&[Some(draw)], changes) => Some((draw, changes)),
            Self::Nothing | Self::Last | Self::All | Self::Draws(..) => None,
        }
    }

    /// Returns the changes of all draws.
    pub fn changes(self) -> &'a [LogitChange] {
        if let Self::Draws(_, changes) = self { changes } else { &[] }
    }

    /// Returns the requested rows, each with its draw; `None` for all logits.
    pub fn wanted(self, rows: Range<usize>) -> impl Iterator<Item = (usize, Option<RowDraw>)> + 'a {
        let last = rows.end;
        let first = match self {
            Self::Nothing => last,
            Self::Last => last - 1,
            Self::All => rows.start,
            Self::Draws(draws, _) => last - draws.len(),
        };
        (first..last).map(move |row| match self {
            Self::Draws(draws, _) => (row, draws[row - first]),
            Self::Nothing | Self::Last | Self::All => (row, None),
        })
    }
}

/// A chunk as the device sees it: see [`backend::Chunk`].
#[derive(Debug, Clone, Copy)]
pub struct Chunk<'a> {
    pub tokens: &'a [u32],
    pub position: usize,
    pub blocks: &'a [BlockId],
    pub logits: Rows<'a>,
}

/// The draws of a step. Kept between steps for its memory.
#[derive(Debug, Default)]
pub struct Draws {
    draws: Vec<Option<RowDraw>>,
    changes: Vec<LogitChange>,
    /// Numbers of draws and changes of each chunk.
    counts: Vec<(usize, usize)>,
}

impl Draws {
    /// Lists the draws of a step.
    pub fn list(&mut self, chunks: &[backend::Chunk<'_>]) {
        let Self { draws, changes, counts } = self;
        draws.clear();
        changes.clear();
        counts.clear();
        for chunk in chunks {
            let before = (draws.len(), changes.len());
            match chunk.logits {
                LogitsFor::Largest(largest) => draws.push(Some(largest.into())),
                LogitsFor::Draws(rows) => {
                    draws.extend(rows.iter().map(|row| RowDraw::new(row, changes)));
                }
                LogitsFor::Nothing | LogitsFor::Last | LogitsFor::All => {}
            }
            counts.push((draws.len() - before.0, changes.len() - before.1));
        }
    }

    /// Returns the listed step's chunks as the device sees them.
    pub fn chunks<'a>(&'a self, chunks: &[backend::Chunk<'a>]) -> Vec<Chunk<'a>> {
        let (mut draws, mut changes) = (&self.draws[..], &self.changes[..]);
        let of_chunk = |(chunk, count): (&backend::Chunk<'a>, &(usize, usize))| {
            let (of_chunk, rest) = draws.split_at(count.0);
            draws = rest;
            let (changed, rest) = changes.split_at(count.1);
            changes = rest;
            let backend::Chunk { tokens, position, blocks, logits, .. } = *chunk;
            let logits = match logits {
                LogitsFor::Nothing => Rows::Nothing,
                LogitsFor::Last => Rows::Last,
                LogitsFor::All => Rows::All,
                LogitsFor::Largest(_) | LogitsFor::Draws(_) => Rows::Draws(of_chunk, changed),
            };
            Chunk { tokens, position, blocks, logits }
        };
        chunks.iter().zip(&self.counts).map(of_chunk).collect()
    }
}
