//! What the screen has found, as downloaded from the device.

use super::{
    args::{self, Found},
    buffers::Outputs,
    device::{Address, Part, Reading},
    draws::RowDraw,
    plan::Wanted,
};
use crate::sampling::{Distribution, LogitsRow as _, TokenLogit, row::every};

/// In place of a token where a vocabulary has fewer tokens than a distribution asks for.
const NONE: u32 = u32::MAX;

/// What is found of screened positions.
pub type Lists = Vec<List>;

/// What is found of a screened position.
#[derive(Debug, Clone, Default)]
pub struct List {
    /// Tokens and logits, by ascending token; none if the device has not decided.
    pub tokens: Vec<TokenLogit>,
    /// The distribution, if it is asked for and decided.
    pub distribution: Option<Distribution>,
}

/// The outputs of the screen of one pass. Reused between passes.
#[derive(Debug, Default)]
pub struct Downloaded {
    pub bytes: Vec<u8>,
    from: Address,
    /// Offsets of the drawn tokens, of the distributions and of the candidates.
    drawn: usize,
    distributions: usize,
    found: usize,
    capacity: usize,
}

/// A pass without a wait, and its outputs.
#[derive(Debug)]
pub struct InFlight {
    pub reading: Reading,
    pub found: Downloaded,
    pub screened: Vec<Wanted>,
    pub digits: usize,
}

impl Downloaded {
    /// Takes the outputs of these rows; returns the range to download: with the candidates only if a row needs more than its
    /// first token.
    pub fn begin(
        &mut self,
        outputs: &Outputs,
        rows: &[Wanted],
        capacity: usize,
    ) -> (Address, usize) {
        let offset = |at| (at - outputs.found_counts) as usize;
        (self.drawn, self.found) = (offset(outputs.drawn), offset(outputs.found));
        self.distributions = offset(outputs.distributions);
        (self.from, self.capacity) = (outputs.found_counts, capacity);
        let reported = rows.iter().filter(|wanted| wanted.is_reported()).count();
        let len = match (rows.iter().all(Wanted::is_single), reported) {
            (true, 0) => self.drawn + rows.len() * size_of::<Found>(),
            (true, _) => self.distributions + reported * size_of::<args::Distribution>(),
            (false, _) => self.found + rows.len() * capacity * size_of::<Found>(),
        };
        (self.from, if rows.is_empty() { 0 } else { len })
    }

    /// Returns the part to download, for [`begin`](Self::begin)'s length.
    pub fn part(&mut self, len: usize) -> Part<'_> {
        self.bytes.resize(len, 0);
        Part { from: self.from, to: &mut self.bytes }
    }

    /// Returns the number of candidates of a row; above the capacity, its logits are not known.
    pub fn count(&self, row: usize) -> usize {
        let count: u32 = bytemuck::pod_read_unaligned(&self.bytes[row * 4..row * 4 + 4]);
        count as usize
    }

    /// Returns what is found of each row: its candidates, or its first token only, and its distribution; nothing if one of them is
    /// not known.
    pub fn lists(&self, rows: &[Wanted]) -> Lists {
        let mut reported = 0;
        let list = |(row, wanted): (usize, &Wanted)| {
            let tokens = self.of_row(row, wanted.is_single());
            let Some(top) = wanted.draw.report else {
                return List { tokens, distribution: None };
            };
            reported += 1;
            match self.distribution(reported - 1, top) {
                None => List::default(),
                distribution => List { tokens, distribution },
            }
        };
        rows.iter().enumerate().map(list).collect()
    }

    /// Returns the distribution of a row, counted among those that have one, if it is known.
    fn distribution(&self, row: usize, top: usize) -> Option<Distribution> {
        let size = size_of::<args::Distribution>();
        let bytes = &self.bytes[self.distributions + row * size..][..size];
        let args::Distribution { largest, is_known, sum, top: found } =
            bytemuck::pod_read_unaligned(bytes);
        let token = |Found { token, logit }| TokenLogit { id: token, logit };
        let is_there = |found: &Found| found.token != NONE;
        let top = found.into_iter().take(top).take_while(is_there).map(token).collect();
        (is_known == 1).then_some(Distribution { largest, sum, top })
    }

    /// Returns the candidates of a row, or its first token only; nothing if its logits are not known.
    fn of_row(&self, row: usize, is_single: bool) -> Vec<TokenLogit> {
        let count = self.count(row);
        let (start, len) = match is_single {
            _ if count > self.capacity => return Vec::new(),
            true => (self.drawn + row * size_of::<Found>(), 1),
            false => (self.found + row * self.capacity * size_of::<Found>(), count),
        };
        let found = self.bytes[start..].chunks_exact(size_of::<Found>()).take(len);
        let mut list: Vec<TokenLogit> = found
            .map(|bytes| {
                let Found { token, logit } = bytemuck::pod_read_unaligned(bytes);
                TokenLogit { id: token, logit }
            })
            .collect();
        list.sort_unstable_by_key(|found| found.id);
        list
    }
}

/// Returns the list of a row that the device did not decide: the logits that it asks for; for a draw or a distribution,
/// every token's.
pub fn undecided(all: &mut [f32], draw: &RowDraw) -> List {
    let mut tokens = Vec::new();
    match (draw.filtered, draw.report) {
        (None, None) => {
            let Ok(()) = all.largest(&draw.largest, &mut tokens);
        }
        _ => tokens.extend(every(all)),
    }
    List { tokens, distribution: None }
}
