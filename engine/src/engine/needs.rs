//! The logits that the draws of a step need.

use std::collections::BTreeMap;

use super::active::ActiveRequest;
use crate::{
    backend::{LogitChange, LogitsFor, Ranking},
    request::RequestId,
    scheduler::PlannedChunk,
};

/// What the chunks of a step need, in their order. Kept between steps for its memory.
#[derive(Debug, Default)]
pub(super) struct Needs {
    /// Of each chunk: the tokens to find, `None` for all or of a chunk with drafts, and the number of its changes.
    chunks: Vec<(Option<Ranking>, usize)>,
    /// The tokens to find after each of a sequence's drafts, for all sequences with drafts.
    rankings: Vec<Ranking>,
    /// Changes of logits, for all sequences.
    changes: Vec<LogitChange>,
}

impl Needs {
    /// Lists what planned chunks need.
    pub fn list(&mut self, planned: &[PlannedChunk], active: &BTreeMap<RequestId, ActiveRequest>) {
        let Self { chunks, rankings, changes } = self;
        chunks.clear();
        rankings.clear();
        changes.clear();
        for &PlannedChunk { id, end, drafts, samples, .. } in planned {
            let (request, before) = (active.get(&RequestId(id.request)), changes.len());
            let ranking = match request.filter(|_| samples) {
                Some(request) if drafts == 0 => request.ranking(id.choice, end, changes),
                Some(request) => {
                    request.rankings(id.choice, end - drafts, drafts, rankings);
                    None
                }
                None => None,
            };
            chunks.push((ranking, changes.len() - before));
        }
    }

    /// Returns what each of the listed chunks needs, if it ends with a draw.
    pub fn of_chunks(&self, planned: &[PlannedChunk]) -> impl Iterator<Item = LogitsFor<'_>> {
        let (mut rankings, mut changes) = (&self.rankings[..], &self.changes[..]);
        let drafts = planned.iter().map(|planned| planned.drafts);
        self.chunks.iter().zip(drafts).map(move |((ranking, changed), drafts)| {
            let (of_chunk, rest) = changes.split_at(*changed);
            changes = rest;
            match *ranking {
                Some(ranking) if of_chunk.is_empty() => LogitsFor::Largest(ranking),
                Some(ranking) => LogitsFor::Changed(ranking, of_chunk),
                None if drafts == 0 => LogitsFor::Last,
                None => {
                    let (each, rest) = rankings.split_at(drafts + 1);
                    rankings = rest;
                    LogitsFor::Each(each)
                }
            }
        })
    }
}
