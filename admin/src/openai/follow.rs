//! Follows the answer to a job while it is generated.
//!
//! Text comes from the job's events, which are not durable: they may be late, come twice (a second
//! attempt starts over, with the same tokens) or not at all. Each has the offset of its text. The follower counts what it passed on
//! of each part: of an event it takes what goes beyond that, and after a gap nothing more of that part. When the job finishes, the
//! store's result provides the rest.

use std::{collections::BTreeMap, time::Duration};

use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};
use tritmill_queue::{
    Choice, Completion, EventId, FinishedJob, JobEvent, JobId, NewLogprobs, Part, TokenLogprob,
};

use super::answer::{AwaitedJob, completion};
use crate::{ApiError, App};

/// Minimum pause per streaming answer, so that all of them together read 5,000 times per second.
const POLL_EACH: Duration = Duration::from_micros(200);

/// News of an answer. Before an answer is complete, all of it was in earlier news.
#[derive(Debug)]
pub(crate) enum Update {
    /// A call of a tool begins.
    Call { choice: u32, call: u32, name: String },
    /// Text to append to a part, and the log probabilities of its tokens.
    Text { choice: u32, part: Part, text: String, logprobs: Vec<TokenLogprob> },
    /// The answer is complete.
    Completed(Completion),
    /// The answer failed.
    Failed(ApiError),
}

impl Update {
    /// Returns whether nothing follows.
    pub fn is_last(&self) -> bool {
        matches!(self, Self::Completed(_) | Self::Failed(_))
    }
}

/// A job with an answer that is followed.
pub(crate) struct Follower {
    pub app: App,
    pub awaited: AwaitedJob,
    pub id: JobId,
    /// Number of requested choices.
    pub choices: u32,
    /// Receives the job's result.
    pub end: oneshot::Receiver<FinishedJob>,
    /// Time limit of the answer.
    pub limit: Duration,
}

impl Follower {
    /// Sends news until the answer is complete or the receiver is dropped, which cancels the job.
    pub async fn run(mut self, sender: mpsc::Sender<Update>) {
        let until = Instant::now() + self.limit;
        let mut sent = Sent::default();
        let mut events = self.app.client.follow(self.id, EventId::default());
        loop {
            let streams = u32::try_from(self.app.metrics.streams.get()).unwrap_or_default();
            let updates = tokio::select! {
                biased;
                () = sender.closed() => return,
                ended = &mut self.end => {
                    self.awaited.is_finished = true;
                    match ended.map_err(|_| ApiError::answer_timeout()).and_then(completion) {
                        Ok(completion) => sent.rest(completion),
                        Err(error) => vec![Update::Failed(error)],
                    }
                }
                events = events.next(POLL_EACH * streams) => {
                    let events = events.into_iter().map(|(_, event)| event);
                    events.filter_map(|event| sent.event(event, self.choices)).collect()
                }
                () = tokio::time::sleep_until(until) => vec![Update::Failed(ApiError::answer_timeout())],
            };
            for update in updates {
                let is_last = update.is_last();
                if sender.send(update).await.is_err() || is_last {
                    return;
                }
            }
        }
    }
}

/// How much of an answer was passed on.
#[derive(Debug, Default)]
struct Sent {
    /// Bytes of each part of each choice.
    parts: BTreeMap<(u32, Part), usize>,
    /// Calls that began, of each choice.
    calls: BTreeMap<u32, u32>,
    /// Tokens with log probabilities, of each choice.
    tokens: BTreeMap<u32, usize>,
}

impl Sent {
    /// Returns what is new in an event.
    fn event(&mut self, event: JobEvent, choices: u32) -> Option<Update> {
        match event {
            JobEvent::Call { choice, call, name } if choice < choices => {
                let begun = self.calls.entry(choice).or_default();
                if call != *begun {
                    return None;
                }
                *begun += 1;
                Some(Update::Call { choice, call, name })
            }
            JobEvent::Delta { choice, part, offset, text, logprobs } if choice < choices => {
                let logprobs = self.new_tokens(choice, logprobs);
                let text = self.new_text(choice, part, offset, &text).to_owned();
                let is_new = !text.is_empty() || !logprobs.is_empty();
                is_new.then_some(Update::Text { choice, part, text, logprobs })
            }
            _ => None,
        }
    }

    fn new_text<'a>(&mut self, choice: u32, part: Part, offset: u64, text: &'a str) -> &'a str {
        if let Part::Arguments(call) = part
            && self.calls.get(&choice).is_none_or(|begun| call >= *begun)
        {
            return "";
        }
        let sent = self.parts.entry((choice, part)).or_default();
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        let new = sent.checked_sub(offset).and_then(|known| text.get(known..)).unwrap_or_default();
        *sent += new.len();
        new
    }

    fn new_tokens(&mut self, choice: u32, new: Option<NewLogprobs>) -> Vec<TokenLogprob> {
        let Some(NewLogprobs { offset, mut tokens }) = new else { return Vec::new() };
        let sent = self.tokens.entry(choice).or_default();
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        let Some(known) = sent.checked_sub(offset).filter(|known| *known < tokens.len()) else {
            return Vec::new();
        };
        let new = tokens.split_off(known);
        *sent += new.len();
        new
    }

    /// Returns all that was not passed on, and the end.
    fn rest(&mut self, completion: Completion) -> Vec<Update> {
        let mut updates = Vec::new();
        for choice in &completion.choices {
            self.rest_of_choice(choice, &mut updates);
        }
        updates.push(Update::Completed(completion));
        updates
    }

    fn rest_of_choice(&mut self, choice: &Choice, updates: &mut Vec<Update>) {
        let index = choice.index;
        let tokens = choice.logprobs.as_deref().unwrap_or_default();
        let known = self.tokens.get(&index).copied().unwrap_or_default();
        let mut logprobs = tokens.get(known..).unwrap_or_default().to_vec();
        let mut add = |part, text: &str| {
            let sent = self.parts.get(&(index, part)).copied().unwrap_or_default();
            let text = text.get(sent..).unwrap_or_default().to_owned();
            if !text.is_empty() || !logprobs.is_empty() {
                let logprobs = std::mem::take(&mut logprobs);
                updates.push(Update::Text { choice: index, part, text, logprobs });
            }
        };
        add(Part::Reasoning, choice.reasoning.as_deref().unwrap_or_default());
        add(Part::Content, &choice.text);
        let begun = self.calls.get(&index).copied().unwrap_or_default();
        for (number, call) in (0..).zip(&choice.tool_calls) {
            if number >= begun {
                let name = call.name.clone();
                updates.push(Update::Call { choice: index, call: number, name });
            }
            let sent = self.parts.get(&(index, Part::Arguments(number))).copied();
            let text = call.arguments.get(sent.unwrap_or_default()..).unwrap_or_default();
            if !text.is_empty() {
                let part = Part::Arguments(number);
                let text = text.to_owned();
                updates.push(Update::Text { choice: index, part, text, logprobs: Vec::new() });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tritmill_queue::{FinishReason, ToolCall};

    use super::*;

    fn delta(part: Part, offset: u64, text: &str) -> JobEvent {
        JobEvent::Delta { choice: 0, part, offset, text: text.to_owned(), logprobs: None }
    }

    fn texts(updates: impl IntoIterator<Item = Update>) -> Vec<(Part, String)> {
        let text = |update| match update {
            Update::Text { part, text, .. } => Some((part, text)),
            Update::Call { call, name, .. } => Some((Part::Arguments(call), format!("{name}:"))),
            Update::Completed(_) | Update::Failed(_) => None,
        };
        updates.into_iter().filter_map(text).collect()
    }

    fn answer() -> Completion {
        let call =
            ToolCall { id: String::new(), name: "look".to_owned(), arguments: "{}".to_owned() };
        let choice = Choice {
            reasoning: Some("so".to_owned()),
            tool_calls: vec![call],
            ..Choice::new(0, "2024-03-03", FinishReason::ToolCalls)
        };
        let (model, fingerprint) = ("m".to_owned(), "f".to_owned());
        let choices = vec![choice];
        Completion { model, fingerprint, choices, ..Completion::default() }
    }

    #[test]
    fn repeated_text_is_passed_on_once_and_a_gap_is_filled_at_the_end() {
        let mut sent = Sent::default();
        let mut updates = Vec::new();
        for event in [
            delta(Part::Reasoning, 0, "so"),
            delta(Part::Content, 0, "2024-"),
            // Another attempt, which starts over.
            delta(Part::Content, 0, "20"),
            delta(Part::Content, 2, "24-03"),
            // The event before this one was lost.
            delta(Part::Content, 9, "3"),
        ] {
            updates.extend(sent.event(event, 1));
        }
        let passed = [(Part::Reasoning, "so"), (Part::Content, "2024-"), (Part::Content, "03")];
        assert_eq!(texts(updates), passed.map(|(part, text)| (part, text.to_owned())));
        let rest =
            [(Part::Content, "-03"), (Part::Arguments(0), "look:"), (Part::Arguments(0), "{}")];
        assert_eq!(texts(sent.rest(answer())), rest.map(|(part, text)| (part, text.to_owned())));
    }

    #[test]
    fn arguments_wait_for_the_name_of_their_call() {
        let mut sent = Sent::default();
        assert!(sent.event(delta(Part::Arguments(0), 0, "{"), 1).is_none(), "its begin was lost");
        let name = "look".to_owned();
        assert!(sent.event(JobEvent::Call { choice: 0, call: 0, name }, 1).is_some());
        assert!(sent.event(delta(Part::Arguments(0), 1, "}"), 1).is_none(), "there is a gap");
        assert!(sent.event(delta(Part::Arguments(0), 0, "{}"), 1).is_some());
        assert!(sent.event(delta(Part::Content, 0, "x"), 0).is_none(), "no such choice");
    }

    #[test]
    fn log_probabilities_are_passed_on_once() {
        let token = |token| TokenLogprob { token, bytes: vec![65], logprob: -1.0, top: Vec::new() };
        let event = |offset, tokens: &[u32]| JobEvent::Delta {
            choice: 0,
            part: Part::Content,
            offset: 0,
            text: String::new(),
            logprobs: Some(NewLogprobs {
                offset,
                tokens: tokens.iter().copied().map(token).collect(),
            }),
        };
        let mut sent = Sent::default();
        let mut new = |event| match sent.event(event, 1) {
            Some(Update::Text { logprobs, .. }) => {
                logprobs.iter().map(|token| token.token).collect()
            }
            _ => Vec::new(),
        };
        assert_eq!(new(event(0, &[7, 8])), [7, 8]);
        assert_eq!(new(event(1, &[8, 9])), [9]);
        assert_eq!(new(event(5, &[3])), [0; 0]);
    }
}
