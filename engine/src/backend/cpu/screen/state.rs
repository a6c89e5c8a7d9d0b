//! Buffers and results of a screen.

use std::{ops::Range, sync::Mutex};

use super::search::Search;
use crate::{backend::cpu::head::HEAD_ROWS, kernels::screen::Digits, sampling::TokenLogit};

/// Candidates that few rows exceed: the lists have room for them from the start.
const FOUND_MOST: usize = 64;
/// Candidates per task; a neighbourhood with more candidates is not divided.
const TASK_CANDIDATES: usize = 8;

/// Buffers and results of a screen, kept between steps.
#[derive(Default)]
pub struct ScreenState {
    pub(super) digits: Digits,
    pub(super) searches: Vec<Search>,
    pub(super) tasks: Vec<CandidateTask>,
    pub(super) found: Vec<TokenLogit>,
    ranges: Vec<Range<usize>>,                // of `found`, per row
    pub(super) kept_rows: Vec<Option<usize>>, // (rows)
    pub(super) at_least: Mutex<FoundAtLeast>,
}

/// Candidates of a row for which one task computes the logits.
#[derive(Debug, Clone)]
pub(super) struct CandidateTask {
    pub row: usize,
    pub found: Range<usize>,
}

impl ScreenState {
    /// Returns the results of the last [`Screen::largest`] or [`Screen::at_least`]: a list for each row, by ascending token.
    pub fn found(&self) -> impl Iterator<Item = &[TokenLogit]> {
        (0..self.ranges.len()).map(|row| self.list(row))
    }

    /// Returns the list of a row.
    pub fn list(&self, row: usize) -> &[TokenLogit] {
        &self.found[self.ranges[row].clone()]
    }

    /// Removes the lists.
    pub(super) fn clear(&mut self) {
        self.tasks.clear();
        self.found.clear();
        self.ranges.clear();
    }

    /// Lists the candidates of all searches, of so many rows, and then the given tokens of others.
    pub(super) fn collect(&mut self, rows: usize, given: &[&[u32]]) {
        self.clear();
        self.found.reserve(rows * FOUND_MOST);
        self.tasks.reserve(rows * FOUND_MOST);
        let mut searches = std::mem::take(&mut self.searches);
        for search in &mut searches[..rows] {
            self.push_list(search.finish());
        }
        self.searches = searches;
        for tokens in given {
            self.push_list(tokens.iter().copied());
        }
    }

    /// Adds the list of the next row, by ascending token, and cuts it into tasks, between neighbourhoods of [`HEAD_ROWS`].
    pub(super) fn push_list(&mut self, tokens: impl Iterator<Item = u32>) {
        let Self { tasks, found, ranges, .. } = self;
        let (row, start) = (ranges.len(), found.len());
        found.extend(tokens.map(|id| TokenLogit { id, logit: 0.0 }));
        ranges.push(start..found.len());
        let mut from = start;
        for at in start..found.len() {
            let end = found.get(at + 1).is_none_or(|next| {
                next.id as usize / HEAD_ROWS != found[at].id as usize / HEAD_ROWS
            });
            if at + 1 == found.len() || end && at + 1 - from >= TASK_CANDIDATES {
                tasks.push(CandidateTask { row, found: from..at + 1 });
                from = at + 1;
            }
        }
    }
}

/// What the tasks have found.
#[derive(Default)]
pub struct FoundAtLeast {
    pub tokens: Vec<u32>,
    /// The weight of the other tokens, relative to that of the lowest logit that is estimated again.
    pub far: f64,
    /// The weight of the tokens that were estimated again, relative to that of the lowest logit to find.
    pub close: f64,
}
