//! Publishes events of streaming jobs to their subscribers.
//!
//! The event loop never waits for subscribers. Events that are not published yet are merged: no text is
//! lost, and a slow Redis causes fewer, longer events. Beyond [`JOBS_MAX`] jobs, events of further jobs
//! are dropped; their subscribers get the result from the store.

use std::{sync::Arc, time::Duration};

use tokio::time::sleep;
use tritmill_queue::{JobEvent, JobId, events::Events};

use crate::mailbox::Mailbox;

/// Time for the events of one step to arrive before they are published.
const GATHER: Duration = Duration::from_millis(2);
/// Time after that for events of a job to be merged.
const REST: Duration = Duration::from_millis(23);
/// Jobs that may have events to publish.
const JOBS_MAX: usize = 4096;

/// Events that are not published yet.
#[derive(Debug, Default)]
struct Unpublished {
    /// Events of each job in their order.
    jobs: Vec<(JobId, Vec<JobEvent>)>,
    dropped: usize,
    closed: bool,
}

impl Unpublished {
    /// Adds an event; text that follows text of the same part of a choice is appended to it.
    fn push(&mut self, job: JobId, event: JobEvent) {
        let Some((_, events)) = self.jobs.iter_mut().find(|(known, _)| *known == job) else {
            match self.jobs.len() {
                JOBS_MAX => self.dropped += 1,
                _ => self.jobs.push((job, vec![event])),
            }
            return;
        };
        match (events.last_mut(), event) {
            (
                Some(JobEvent::Delta { choice: last, part: last_part, text, logprobs, .. }),
                JobEvent::Delta { choice, part, text: more, logprobs: further, .. },
            ) if (*last, *last_part) == (choice, part) => {
                text.push_str(&more);
                match (logprobs, further) {
                    (Some(known), Some(more)) => known.tokens.extend(more.tokens),
                    (known, more) => *known = known.take().or(more),
                }
            }
            (_, event) => events.push(event),
        }
    }
}

/// Sends events to the publisher; dropping it ends the publisher after the last event.
pub(super) struct EventSender(Arc<Mailbox<Unpublished>>);

impl EventSender {
    pub fn send(&self, job: JobId, event: JobEvent) {
        self.0.update(|unpublished| unpublished.push(job, event));
    }
}

impl Drop for EventSender {
    fn drop(&mut self) {
        self.0.update(|unpublished| unpublished.closed = true);
    }
}

/// Starts the publisher's task. Events that cannot be published are dropped: subscribers get the
/// result from the store.
pub(super) fn start(events: Arc<dyn Events>) -> EventSender {
    let mailbox = Arc::<Mailbox<Unpublished>>::default();
    let sender = EventSender(Arc::clone(&mailbox));
    tokio::spawn(async move {
        loop {
            mailbox.changed().await;
            sleep(GATHER).await;
            let Unpublished { jobs, dropped, closed } = mailbox.take();
            if dropped > 0 {
                tracing::warn!(dropped, "events dropped: too many jobs have unpublished events");
            }
            for (job, events_of_job) in jobs {
                if let Err(error) = events.publish(job, &events_of_job).await {
                    tracing::warn!(%job, %error, "events not published");
                }
            }
            if closed {
                return;
            }
            sleep(REST).await;
        }
    });
    sender
}

#[cfg(test)]
mod tests {
    use tritmill_queue::{JobState, Part};

    use super::*;

    fn delta(choice: u32, offset: u64, text: &str) -> JobEvent {
        let (part, text) = (Part::Content, text.to_owned());
        JobEvent::Delta { choice, part, offset, text, logprobs: None }
    }

    #[test]
    fn text_of_one_choice_is_joined_in_order() {
        let (one, two) = (JobId::generate(), JobId::generate());
        let finished = JobEvent::Finished { state: JobState::Completed };
        let sent = [
            (one, JobEvent::Started),
            (one, delta(0, 0, "a")),
            (two, delta(0, 0, "x")),
            (one, delta(0, 1, "b")),
            (one, delta(1, 0, "c")),
            (one, finished.clone()),
        ];
        let mut unpublished = Unpublished::default();
        sent.into_iter().for_each(|(job, event)| unpublished.push(job, event));
        let expected = vec![JobEvent::Started, delta(0, 0, "ab"), delta(1, 0, "c"), finished];
        assert_eq!(unpublished.jobs, [(one, expected), (two, vec![delta(0, 0, "x")])]);
    }

    #[test]
    fn full_buffer_keeps_all_text_of_known_jobs_and_drops_further_jobs() {
        let mut unpublished = Unpublished::default();
        let jobs: Vec<JobId> = (0..=JOBS_MAX).map(|_| JobId::generate()).collect();
        for (offset, round) in [(0, "a"), (1, "b"), (2, "c")] {
            jobs.iter().for_each(|job| unpublished.push(*job, delta(0, offset, round)));
        }
        assert_eq!((unpublished.jobs.len(), unpublished.dropped), (JOBS_MAX, 3));
        assert!(unpublished.jobs.iter().all(|(_, events)| *events == [delta(0, 0, "abc")]));
    }
}
