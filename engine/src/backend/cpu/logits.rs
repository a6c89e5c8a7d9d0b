//! The last part of a step: the final norm and the head, for the rows that the chunks request. The largest logits of a row
//! come from the head's [screen](super::screen), where there is one.

use std::sync::Arc;

use super::{
    backend::CpuBackend,
    buffers::{Buffers, HeadNeeds, HeadRow, Scratch, resized, with_scratch},
    disjoint::Disjoint,
    head::{HEAD_ROWS, Head},
    screen::ScreenInput,
    tiles::{StepRows, TileTask, tile_tasks},
};
use crate::{
    backend::{Chunk, Logits, LogitsFor, ScreenedRow, logits::ScreenedRows},
    formats::{PackedMatrix, TILE_ROWS},
    kernels::{
        self, Digits, GroupShape,
        float::{KvElement, Values},
    },
    sampling::{AllowedTokens, FirstQuestion, Largest, Remainder, Threshold, TokenLogit},
};

impl<E: KvElement + bytemuck::Pod> CpuBackend<E> {
    /// Computes the final norm and the head for the rows that the chunks request.
    pub(super) fn head(&mut self, chunks: &[Chunk<'_>], logits: &mut Logits) {
        let weights = Arc::clone(&self.weights);
        let (config, head) = (weights.config(), &weights.head);
        let (hidden, vocab) = (config.hidden_size, config.vocab_size);
        let Buffers { residual, head_rows, questions, head_rows_all, head_rows_some, .. } =
            &mut self.buffers;
        head_rows.clear();
        questions.clear();
        // Takes memory only for answers that a grammar describes.
        let mut allowed: Vec<(usize, &AllowedTokens)> = Vec::new();
        let mut given: Vec<&[u32]> = Vec::new();
        let (mut first, mut whole) = (0, 0);
        for chunk in chunks {
            let last = first + chunk.tokens.len();
            let pays = |count: usize| head.screen().is_some_and(|screen| screen.pays_for(count));
            for (row, question) in chunk.logits.wanted(first..last) {
                let (needs, place) = match question {
                    FirstQuestion::Largest(largest) if pays(largest.of_allowed().count) => {
                        let mask = chunk.logits.allowed(row - first, chunk.tokens);
                        allowed.extend(mask.map(|mask| (questions.len(), mask)));
                        questions.push(largest.of_allowed());
                        (HeadNeeds::Largest, questions.len() - 1)
                    }
                    FirstQuestion::Tokens(tokens) if pays(tokens.len()) => {
                        given.push(tokens);
                        (HeadNeeds::Tokens, given.len() - 1)
                    }
                    FirstQuestion::All | FirstQuestion::Largest(_) | FirstQuestion::Tokens(_) => {
                        whole += 1;
                        (HeadNeeds::All, whole - 1)
                    }
                };
                head_rows.push(HeadRow { row, needs, place });
            }
            first = last;
        }
        head_rows_all.resize(whole * hidden, 0.0);
        head_rows_some.resize((questions.len() + given.len()) * hidden, 0.0);
        let (all_out, some_out) = (Disjoint::new(head_rows_all), Disjoint::new(head_rows_some));
        let kernels = self.kernels;
        // The place of a row without all logits among these.
        let place_of = |row: &HeadRow| match row.needs {
            HeadNeeds::Tokens => questions.len() + row.place,
            HeadNeeds::All | HeadNeeds::Largest => row.place,
        };
        let needs_all = |row: &HeadRow| row.needs == HeadNeeds::All;
        self.pool.run(head_rows.len(), &|task| {
            let head_row = &head_rows[task];
            let (row, place) = (head_row.row, place_of(head_row));
            let out = if needs_all(head_row) { all_out } else { some_out };
            // SAFETY: each task has a different place.
            let out = unsafe { out.part(place * hidden..(place + 1) * hidden) };
            let x = &residual[row * hidden..(row + 1) * hidden];
            kernels.rms_norm(x, &weights.final_norm, config.stream_norm_eps(), out);
            if let Some(rotation) = &config.rotation {
                kernels.rotate(out, rotation);
            }
        });
        logits.clear(vocab);
        logits.lay_out(head_rows.iter().map(needs_all));
        if let Some(screen) = head.screen() {
            let (kernels, isa, xs) = (self.kernels, self.isa, &head_rows_some[..]);
            let (allowed, given) = (&allowed[..], &given[..]);
            let input = ScreenInput { head, kernels, isa, xs, questions, given, allowed };
            let some = || head_rows.iter().filter(|row| !needs_all(row));
            let keeps = |row: &HeadRow| {
                row.needs == HeadNeeds::Largest && questions[row.place].others_follow
            };
            let kept = logits.keep(some().map(keeps));
            screen.largest(&input, kept, &mut self.pool, &mut self.screen_state);
            logits.set_largest(some().map(|row| self.screen_state.list(place_of(row))));
        }
        self.whole_head(head, vocab, logits.all_mut());
    }

    /// Computes the final norm of the last rows of chunks with [`LogitsFor::Last`]. // (chunks, hidden)
    pub(super) fn last_hidden(&mut self, chunks: &[Chunk<'_>], out: &mut Vec<f32>) {
        let weights = Arc::clone(&self.weights);
        let config = weights.config();
        let hidden = config.hidden_size;
        let mut end = 0;
        out.clear();
        for chunk in chunks {
            end += chunk.tokens.len();
            if !matches!(chunk.logits, LogitsFor::Last) {
                continue;
            }
            let (row, at) = (end - 1, out.len());
            out.resize(at + hidden, 0.0);
            let x = &self.buffers.residual[row * hidden..(row + 1) * hidden];
            let eps = config.stream_norm_eps();
            self.kernels.rms_norm(x, &weights.final_norm, eps, &mut out[at..]);
        }
    }

    /// Finds the tokens of a row with at least a logit: see [`Screening::at_least`](crate::backend::Screening).
    pub(super) fn find_at_least(
        &mut self,
        kept: ScreenedRow<'_>,
        threshold: Threshold,
        found: &mut Vec<TokenLogit>,
    ) -> Option<Remainder> {
        let weights = Arc::clone(&self.weights);
        let (head, kernels) = (&weights.head, self.kernels);
        let screen = head.screen()?;
        let (isa, xs, questions) = (self.isa, kept.hidden, &[Largest::logits(1)][..]);
        let input = ScreenInput { head, kernels, isa, xs, questions, given: &[], allowed: &[] };
        let rest =
            screen.at_least(&input, kept, threshold, &mut self.pool, &mut self.screen_state)?;
        found.clear();
        found.extend(self.screen_state.found().flatten());
        Some(rest)
    }

    /// Computes the logits of some tokens: see [`Screening::logits_of`](crate::backend::Screening).
    pub(super) fn logits_of_tokens(
        &mut self,
        kept: ScreenedRow<'_>,
        tokens: &[u32],
        found: &mut Vec<TokenLogit>,
    ) {
        let weights = Arc::clone(&self.weights);
        let (head, kernels) = (&weights.head, self.kernels);
        let screen = head.screen().expect("positions are kept by screens only");
        let (isa, xs, given) = (self.isa, kept.hidden, &[tokens][..]);
        let input = ScreenInput { head, kernels, isa, xs, questions: &[], given, allowed: &[] };
        let kept = &mut ScreenedRows::default();
        screen.largest(&input, kept, &mut self.pool, &mut self.screen_state);
        found.extend(self.screen_state.found().flatten());
    }

    /// Computes all logits of one hidden row, after the norm. // (vocab,)
    pub(super) fn all_logits_of(&mut self, hidden: &[f32], logits: &mut Vec<f32>) {
        let weights = Arc::clone(&self.weights);
        let vocab = weights.config().vocab_size;
        self.buffers.head_rows_all.clear();
        self.buffers.head_rows_all.extend_from_slice(hidden);
        logits.resize(vocab, 0.0);
        self.whole_head(&weights.head, vocab, logits);
    }

    /// Computes all logits of `head_rows_all`. // (rows, vocab)
    fn whole_head(&mut self, head: &Head, vocab: usize, logits: &mut [f32]) {
        if let Some(matrix) = head.ternary() {
            return self.ternary_head(matrix, logits);
        }
        let n = logits.len() / vocab;
        let out = Disjoint::new(logits);
        let (kernels, xs) = (self.kernels, &self.buffers.head_rows_all);
        let tasks = if n == 0 { 0 } else { vocab.div_ceil(HEAD_ROWS) };
        self.pool.run(tasks, &|task| {
            let first = task * HEAD_ROWS;
            let count = HEAD_ROWS.min(vocab - first);
            with_scratch(|scratch| {
                let Scratch { floats, more_floats, .. } = scratch;
                let floats = resized(floats, n * count);
                head.logits(kernels, first, count, xs, more_floats, floats);
                for (row, part) in floats.chunks_exact(count).enumerate() {
                    let start = row * vocab + first;
                    // SAFETY: each task writes its own columns.
                    unsafe { out.part(start..start + count) }.copy_from_slice(part);
                }
            });
        });
    }

    /// Computes all logits of `head_rows_all` with a ternary head, a linear with scales of groups. Its input always has two
    /// digits. // (rows, vocab)
    fn ternary_head(&mut self, head: &PackedMatrix, logits: &mut [f32]) {
        let (vocab, hidden) = (head.rows(), head.cols());
        let rows = logits.len() / vocab;
        let Some(group) = head.group().filter(|_| rows > 0) else { return };
        let (isa, kernels, digits) = (self.isa, self.kernels, Digits::Two);
        let Buffers { head_rows_all, head_input, tile_tasks: tasks, .. } = &mut self.buffers;
        let shape = GroupShape { format: head.format(), digits, cols: hidden, group };
        head_input.reset(shape, rows);
        let writer = head_input.writer();
        self.pool.run(rows, &|r| {
            with_scratch(|scratch| {
                let Scratch { bytes, scales, .. } = scratch;
                let bytes = resized(bytes, digits.count() * hidden);
                let scales = resized(scales, shape.scales());
                let row = &head_rows_all[r * hidden..(r + 1) * hidden];
                kernels.quantize_groups(row, digits, bytes, scales);
                // SAFETY: each task writes its own row.
                unsafe { writer.set_row(r, bytes, scales) };
            });
        });
        let rows = StepRows::of(head, rows, digits);
        tile_tasks(isa, &[head], rows, self.pool.threads(), tasks);
        let (tasks, input, out) = (&tasks[..], &*head_input, Disjoint::new(logits));
        self.pool.run(tasks.len(), &|task| {
            let TileTask { tiles, rows, .. } = tasks[task].clone();
            let (start, stride) = (tiles.start * TILE_ROWS, tiles.len() * TILE_ROWS);
            with_scratch(|scratch| {
                let values = resized(&mut scratch.values, rows.len() * stride);
                kernels::gemm_groups(isa, head, tiles, input.part(rows.clone()), values);
                let out = out.within(rows.start * vocab..rows.end * vocab);
                // SAFETY: each task writes its own columns of its rows.
                let columns = unsafe { out.columns(vocab, start..(start + stride).min(vocab)) };
                kernels.set_values(&Values { values, stride }, columns);
            });
        });
    }
}
