//! Tells subscribers what happens to jobs that stream.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use tokio::{sync::mpsc, time::sleep};
use tritmill_queue::{JobEvent, JobId, events::Events};

/// Events of one job that come within this time travel together.
const COALESCE: Duration = Duration::from_millis(25);
/// Events sent after one wait.
const TOGETHER: usize = 4096;

/// Publishes until the other side is dropped. Events are no record: what cannot be published is
/// dropped, and subscribers find the end in the store.
pub(super) async fn run(
    events: Arc<dyn Events>,
    mut told: mpsc::UnboundedReceiver<(JobId, JobEvent)>,
) {
    let mut batch = Vec::new();
    while told.recv_many(&mut batch, TOGETHER).await > 0 {
        sleep(COALESCE).await;
        while let Ok(next) = told.try_recv() {
            batch.push(next);
        }
        for (job, events_of) in by_job(batch.drain(..)) {
            if let Err(error) = events.publish(job, &events_of).await {
                tracing::warn!(%job, %error, "events not published");
            }
        }
    }
}

/// Events of each job in their order, text that follows text of the same choice joined to it.
fn by_job(told: impl Iterator<Item = (JobId, JobEvent)>) -> VecDeque<(JobId, Vec<JobEvent>)> {
    let mut jobs: VecDeque<(JobId, Vec<JobEvent>)> = VecDeque::new();
    for (job, event) in told {
        let place = jobs.iter().position(|(known, _)| *known == job);
        let place = place.unwrap_or_else(|| {
            jobs.push_back((job, Vec::new()));
            jobs.len() - 1
        });
        let events = &mut jobs[place].1;
        match (events.last_mut(), event) {
            (
                Some(JobEvent::Delta { choice: last, text }),
                JobEvent::Delta { choice, text: more },
            ) if *last == choice => text.push_str(&more),
            (_, event) => events.push(event),
        }
    }
    jobs
}

#[cfg(test)]
mod tests {
    use tritmill_queue::JobState;

    use super::*;

    #[test]
    fn text_of_one_choice_is_joined_and_order_is_kept() {
        let (one, two) = (JobId::generate(), JobId::generate());
        let delta = |choice, text: &str| JobEvent::Delta { choice, text: text.to_owned() };
        let done = JobEvent::Finished { state: JobState::Completed };
        let told = [
            (one, JobEvent::Started),
            (one, delta(0, "a")),
            (two, delta(0, "x")),
            (one, delta(0, "b")),
            (one, delta(1, "c")),
            (one, done.clone()),
        ];
        let jobs = by_job(told.into_iter());
        let expected = vec![JobEvent::Started, delta(0, "ab"), delta(1, "c"), done];
        assert_eq!(jobs[0], (one, expected));
        assert_eq!(jobs[1], (two, vec![delta(0, "x")]));
    }
}
