//! What the screen has found, as downloaded from the device.

use super::{
    args::Found,
    buffers::Outputs,
    device::{Address, Part},
    plan::Wanted,
};
use crate::backend::TokenLogit;

/// Tokens and logits of each screened position, by ascending token.
pub type Lists = Vec<Vec<TokenLogit>>;

/// The outputs of the screen of one pass. Reused between passes.
#[derive(Debug, Default)]
pub struct Downloaded {
    pub bytes: Vec<u8>,
    from: Address,
    /// Offsets of the drawn tokens and of the candidates.
    drawn: usize,
    found: usize,
    capacity: usize,
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
        (self.from, self.capacity) = (outputs.found_counts, capacity);
        let len = match rows.iter().all(Wanted::is_single) {
            true => self.drawn + rows.len() * size_of::<Found>(),
            false => self.found + rows.len() * capacity * size_of::<Found>(),
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

    /// Returns the candidates of a row, or its first token only; nothing if its logits are not known.
    pub fn of_row(&self, row: usize, is_single: bool) -> Vec<TokenLogit> {
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
