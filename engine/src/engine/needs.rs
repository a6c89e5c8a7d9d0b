//! The logits that the draws of a step need.

use std::collections::BTreeMap;

use super::active::ActiveRequest;
use crate::{
    backend::{Chunk, LogitChange, LogitsFor, Ranking},
    request::RequestId,
    scheduler::PlannedChunk,
};

/// What the chunks of a step need, in their order. Kept between steps for its memory.
#[derive(Debug, Default)]
pub(super) struct Needs {
    /// Numbers of rankings of the chunks; 0 for one that needs all logits or none.
    chunks: Vec<usize>,
    /// The tokens to find at the end of each chunk, and after each of its drafts.
    rankings: Vec<Ranking>,
    /// Changes of logits before all draws.
    changes: Vec<LogitChange>,
}

impl Needs {
    /// Lists what planned chunks need. `chunk` returns the backend's view of one.
    pub fn list<'a>(
        &mut self,
        planned: &[PlannedChunk],
        active: &BTreeMap<RequestId, ActiveRequest>,
        chunk: impl Fn(&PlannedChunk) -> Chunk<'a>,
    ) {
        let Self { chunks, rankings, changes } = self;
        chunks.clear();
        rankings.clear();
        changes.clear();
        for planned in planned {
            let PlannedChunk { id, end, drafts, samples, .. } = *planned;
            let before = rankings.len();
            match active.get(&RequestId(id.request)).filter(|_| samples) {
                Some(request) if drafts == 0 => {
                    rankings.extend(request.ranking(id.choice, end, changes));
                }
                Some(request) => {
                    let tokens = chunk(planned).tokens;
                    let (_, drafts) = tokens.split_at(tokens.len() - drafts);
                    let position = end - drafts.len();
                    request.rankings_with_drafts(id.choice, position, drafts, rankings, changes);
                }
                None => {}
            }
            chunks.push(rankings.len() - before);
        }
    }

    /// Returns what each of the listed chunks needs, if it ends with a draw.
    pub fn of_chunks(&self) -> impl Iterator<Item = LogitsFor<'_>> {
        let (mut rankings, mut changes) = (&self.rankings[..], &self.changes[..]);
        self.chunks.iter().map(move |count| {
            let (of_chunk, rest) = rankings.split_at(*count);
            rankings = rest;
            let changed = of_chunk.iter().map(|ranking| ranking.changes).sum();
            let (of_draws, rest) = changes.split_at(changed);
            changes = rest;
            match of_chunk {
                [] => LogitsFor::Last,
                [ranking] if changed == 0 => LogitsFor::Largest(*ranking),
                _ => LogitsFor::Each(of_chunk, of_draws),
            }
        })
    }
}
