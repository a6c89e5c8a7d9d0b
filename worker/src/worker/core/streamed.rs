//! The text of a choice as events, each part with the offset of its text.

use std::collections::BTreeMap;

use tritmill_engine::{
    TokenLogprob as EngineLogprob,
    chat::{AnswerLayout, AnswerParser, Piece},
};
use tritmill_queue::{JobEvent, NewLogprobs, Part};

use crate::translate;

/// A choice that is streamed.
#[derive(Debug)]
pub(super) struct StreamedChoice {
    choice: u32,
    parser: AnswerParser,
    /// Bytes published of each part.
    lengths: BTreeMap<Part, u64>,
    calls: u32,
    /// Tokens published with log probabilities.
    tokens: u64,
}

impl StreamedChoice {
    /// Begins a choice.
    pub fn new(choice: u32, layout: &AnswerLayout) -> Self {
        let parser = AnswerParser::new(layout.clone());
        Self { choice, parser, lengths: BTreeMap::new(), calls: 0, tokens: 0 }
    }

    /// Returns the events of further text, and of the log probabilities of its tokens, if requested. Text that is not certain comes
    /// with later text, or with the result.
    pub fn push(&mut self, text: &str, logprobs: Vec<EngineLogprob>) -> Vec<JobEvent> {
        let pieces = self.parser.push(text);
        let mut events: Vec<JobEvent> = pieces.into_iter().map(|piece| self.event(piece)).collect();
        if !logprobs.is_empty() {
            let offset = self.tokens;
            self.tokens += logprobs.len() as u64;
            let tokens = logprobs.into_iter().map(translate::logprob).collect();
            let all = Some(NewLogprobs { offset, tokens });
            match events.iter_mut().find(|event| matches!(event, JobEvent::Delta { .. })) {
                Some(JobEvent::Delta { logprobs, .. }) => *logprobs = all,
                _ => {
                    let offset = self.lengths.get(&Part::Content).copied().unwrap_or_default();
                    events.push(JobEvent::Delta {
                        choice: self.choice,
                        part: Part::Content,
                        offset,
                        text: String::new(),
                        logprobs: all,
                    });
                }
            }
        }
        events
    }

    fn event(&mut self, piece: Piece) -> JobEvent {
        let choice = self.choice;
        let (part, text) = match piece {
            Piece::Content(text) => (Part::Content, text),
            Piece::Reasoning(text) => (Part::Reasoning, text),
            Piece::Arguments(text) => (Part::Arguments(self.calls.saturating_sub(1)), text),
            Piece::Call(name) => {
                let call = self.calls;
                self.calls += 1;
                return JobEvent::Call { choice, call, name };
            }
        };
        let length = self.lengths.entry(part).or_default();
        let offset = *length;
        *length += text.len() as u64;
        JobEvent::Delta { choice, part, offset, text, logprobs: None }
    }
}
