//! Whether a new job would wait too long: what is before it, divided by the rate at which the workers take tokens
//! off the backlog, against its deadline and the queue's longest wait. Pure: no clock, no I/O.
//!
//! A job of *c* tokens takes *c* × slots ÷ rate in a busy worker, because all slots share the rate. It fits if
//! its wait and this time end before its deadline. Once a limit has refused a job, it lets the next one in only
//! when the wait is a fifth below the limit, so that a full queue does not switch with every answer.

use std::time::Duration;

use tritmill_queue::{
    Job, Priority, Timestamp,
    dispatch::{Cause, Limit, Line},
    store::Serving,
};

/// Share of the time to a deadline that may be used: predictions are not exact. With 0.8, 1.35 % of the jobs let in
/// during an overload of ten times the capacity were late (`bench e2e --overload`).
const DEADLINE_SHARE: f64 = 0.64;
/// Share of a limit below which it lets jobs in again.
const REOPEN_SHARE: f64 = 0.8;
/// Bounds of the time after which to try again.
const RETRY_MIN: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(60);
/// Least time after which to try a job again that would be late without any wait.
const RETRY_MIN_LATE: Duration = Duration::from_secs(1);
/// Time after which to try again if no worker serves the queue: about the start of one.
const RETRY_NO_WORKER: Duration = Duration::from_secs(15);

/// Why jobs were not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Refused {
    pub limit: Limit,
    pub cause: Cause,
    pub retry_after: Duration,
}

impl Refused {
    /// Returns the refusal of a dispatcher's limit, with what is known of the workers.
    pub fn by_dispatcher(limit: Limit, retry_after: Duration, serving: Option<&Serving>) -> Self {
        let is_unserved = serving.is_some_and(|serving| serving.workers == 0);
        match limit.cause() {
            Cause::Backlog if is_unserved => {
                let retry_after = retry_after.max(RETRY_NO_WORKER);
                Self { limit, cause: Cause::NoWorker, retry_after }
            }
            cause => Self { limit, cause, retry_after },
        }
    }
}

/// Jobs of one queue and one priority.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Group {
    pub priority: Priority,
    /// Tokens of all jobs, and of the largest.
    pub tokens: u64,
    pub largest: u64,
    /// The earliest deadline that has not passed.
    pub expires_at: Option<Timestamp>,
}

impl Group {
    /// Returns the groups of jobs of one queue. Deadlines that have passed do not count: the store ends these jobs.
    pub fn of<'a>(jobs: impl IntoIterator<Item = &'a Job>, now: Timestamp) -> Vec<Self> {
        let mut groups: Vec<Self> = Vec::new();
        for job in jobs {
            let cost = u64::from(job.cost());
            let at = groups.iter().position(|group| group.priority == job.priority);
            let at = at.unwrap_or_else(|| {
                let priority = job.priority;
                groups.push(Self { priority, tokens: 0, largest: 0, expires_at: None });
                groups.len() - 1
            });
            let group = &mut groups[at];
            group.tokens += cost;
            group.largest = group.largest.max(cost);
            let deadline = job.expires_at.filter(|at| *at > now);
            group.expires_at = group.expires_at.into_iter().chain(deadline).min();
        }
        groups
    }
}

/// What a queue is like when jobs arrive.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Situation {
    pub line: Line,
    /// Tokens that were let in and are not in the line yet, by priority.
    pub let_in: [u64; 3],
    pub serving: Serving,
    /// The time on the clock of deadlines.
    pub now: Timestamp,
    /// The longest wait that the operator allows, as far as it applies to these jobs.
    pub max_wait: Option<Duration>,
}

/// Decides about jobs of one queue and priority, and remembers which limits are reached.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Gate {
    /// Limits up to this one, in seconds, let jobs in only a fifth below their value. Includes limits that are
    /// longer than the one that refused a job by less than this fifth.
    shut_up_to_s: f64,
}

impl Gate {
    /// Lets the jobs in, or returns the limit that they would exceed.
    pub fn pass(&mut self, group: &Group, now: &Situation) -> Result<(), Refused> {
        let Some(rate) = now.serving.drain_tokens_per_s else { return Ok(()) };
        let let_in: u64 = now.let_in[..=group.priority as usize].iter().sum();
        let before = now.line.tokens_before(group.priority) + let_in as f64;
        let is_one = group.tokens == group.largest;
        if is_one && before < 1.0 && now.serving.has_free_slots() {
            // It starts at once, and faster than in a busy worker.
            return Ok(());
        }
        let wait_s = (before + (group.tokens - group.largest) as f64) / rate;
        let own_s = group.largest as f64 * now.serving.slots as f64 / rate;
        let Some((limit, limit_s)) = strictest(group, now, own_s) else { return Ok(()) };
        let is_shut = limit_s <= self.shut_up_to_s;
        let allowed_s = if is_shut { REOPEN_SHARE * limit_s } else { limit_s };
        if wait_s <= allowed_s {
            if is_shut {
                self.shut_up_to_s = limit_s.next_down();
            }
            return Ok(());
        }
        self.shut_up_to_s = self.shut_up_to_s.max(limit_s / REOPEN_SHARE);
        let retry_s = if limit_s > 0.0 {
            wait_s - REOPEN_SHARE * limit_s
        } else {
            // An empty line does not help; fewer jobs in the workers may.
            wait_s.max(own_s).max(RETRY_MIN_LATE.as_secs_f64())
        };
        let retry_after = Duration::try_from_secs_f64(retry_s);
        let retry_after = retry_after.unwrap_or(RETRY_MAX).clamp(RETRY_MIN, RETRY_MAX);
        Err(Refused { limit, cause: now.serving.cause(), retry_after })
    }
}

/// Returns the limit that leaves the least time to wait, and this time in seconds, negative for a job that would be
/// late without any wait; `None` without any limit.
fn strictest(group: &Group, now: &Situation, own_s: f64) -> Option<(Limit, f64)> {
    let deadline = group.expires_at.map(|at| {
        let left_s = DEADLINE_SHARE * at.since(now.now).as_secs_f64() - own_s;
        (Limit::Deadline(Duration::from_secs_f64(left_s.max(0.0))), left_s)
    });
    let longest = now.max_wait.map(|wait| (Limit::MaxWait(wait), wait.as_secs_f64()));
    deadline.into_iter().chain(longest).min_by(|(_, a), (_, b)| a.total_cmp(b))
}

#[cfg(test)]
mod tests {
    use tritmill_queue::dispatch::LinePart;

    use super::*;

    const NOW: Timestamp = Timestamp(1_000_000);

    /// A queue of 100 tokens/s in 10 slots with this many waiting tokens of priority high.
    fn waiting(tokens: u64) -> Situation {
        let mut line = Line::default();
        *line.of(Priority::High) = LinePart { entries: tokens / 10, tokens, before: tokens };
        let serving = Serving {
            now: NOW,
            workers: 1,
            slots: 10,
            running: 10,
            drain_tokens_per_s: Some(100.0),
            ..Serving::default()
        };
        Situation { line, let_in: [0; 3], serving, now: NOW, max_wait: None }
    }

    /// A job that may use four fifths of this many seconds.
    fn job(tokens: u64, within: Option<u64>) -> Group {
        let deadline =
            |seconds: u64| NOW.after(Duration::from_secs(seconds).mul_f64(0.8 / DEADLINE_SHARE));
        let expires_at = within.map(deadline);
        Group { priority: Priority::High, tokens, largest: tokens, expires_at }
    }

    fn passes(group: &Group, now: &Situation) -> bool {
        Gate::default().pass(group, now).is_ok()
    }

    #[test]
    fn job_that_would_miss_its_deadline_is_refused() {
        // It needs 2 s itself, and may use 16 of 20 s: 14 s of waiting are 1400 tokens.
        assert!(passes(&job(20, Some(20)), &waiting(1400)));
        assert!(!passes(&job(20, Some(20)), &waiting(1410)));
        assert!(passes(&job(20, None), &waiting(1_000_000)));
        let Refused { limit, cause, retry_after } =
            Gate::default().pass(&job(20, Some(20)), &waiting(2600)).expect_err("it is late");
        assert_eq!((limit, cause), (Limit::Deadline(Duration::from_secs(14)), Cause::Cpu));
        // 26 s are before it; at 11.2 s the limit lets jobs in again.
        assert_eq!(retry_after, Duration::from_millis(14_800));
    }

    #[test]
    fn job_that_does_not_fit_at_all_is_not_to_be_tried_again_at_once() {
        let retry_after = |tokens, within, waiting_tokens| {
            let refused =
                Gate::default().pass(&job(tokens, Some(within)), &waiting(waiting_tokens));
            refused.expect_err("it is late").retry_after
        };
        assert_eq!(retry_after(100, 10, 0), Duration::from_secs(10), "its own time");
        assert_eq!(retry_after(100, 10, 2500), Duration::from_secs(25), "the wait");
        let mut fast = waiting(0);
        fast.serving.drain_tokens_per_s = Some(1e4);
        let none = Group { expires_at: Some(Timestamp(NOW.0 + 10)), ..job(20, None) };
        let refused = Gate::default().pass(&none, &fast).expect_err("it is late");
        assert_eq!(refused.retry_after, RETRY_MIN_LATE);
    }

    #[test]
    fn unknown_rate_and_free_slots_let_every_job_in() {
        let mut unknown = waiting(1_000_000);
        unknown.serving.drain_tokens_per_s = None;
        assert!(passes(&job(20, Some(1)), &unknown));
        let mut idle = waiting(0);
        assert!(!passes(&job(100, Some(10)), &idle), "it needs 10 s in a full worker");
        idle.serving.running = 7;
        assert!(passes(&job(100, Some(10)), &idle));
        let two = Group { tokens: 200, ..job(100, Some(10)) };
        assert!(!passes(&two, &idle), "only one of them starts at once");
        idle.let_in[Priority::High as usize] = 100;
        assert!(!passes(&job(100, Some(10)), &idle), "another took the slot");
    }

    #[test]
    fn longest_wait_of_the_queue_applies_to_all_jobs() {
        let mut now = waiting(600);
        now.max_wait = Some(Duration::from_secs(5));
        let refused = Gate::default().pass(&job(1, None), &now).expect_err("it waits longer");
        assert_eq!(refused.limit, Limit::MaxWait(Duration::from_secs(5)));
        now.line.of(Priority::High).before = 500;
        assert!(passes(&job(1, None), &now));
        now.let_in[Priority::Low as usize] = 500;
        assert!(passes(&job(1, None), &now), "lower priorities do not go first");
        now.let_in[Priority::High as usize] = 10;
        assert!(!passes(&job(1, None), &now));
    }

    #[test]
    fn full_limit_lets_jobs_in_again_a_fifth_below_it() {
        // A limit of 16 s.
        let (mut gate, job) = (Gate::default(), job(40, Some(25)));
        let mut pass = |tokens| gate.pass(&job, &waiting(tokens)).is_ok();
        assert!(pass(1600) && !pass(1700));
        assert!(!pass(1500) && !pass(1290), "still shut");
        assert!(pass(1280) && pass(1600), "open again");
        assert!(!pass(1610) && !pass(1600));
        // One answer at a time does not switch it with every answer.
        let decisions: Vec<bool> = (0..40).map(|n| pass(1600 - 10 * n)).collect();
        assert_eq!(decisions.windows(2).filter(|two| two[0] != two[1]).count(), 1);
    }

    #[test]
    fn short_deadlines_do_not_keep_out_jobs_with_time() {
        let (mut gate, now) = (Gate::default(), waiting(1500));
        assert!(gate.pass(&job(20, Some(20)), &now).is_err());
        assert!(gate.pass(&job(20, Some(60)), &now).is_ok());
        assert!(gate.pass(&job(20, Some(20)), &waiting(1300)).is_err(), "still shut for these");
        assert!(gate.pass(&job(20, Some(10)), &waiting(400)).is_ok(), "opens for all longer ones");
        assert!(gate.pass(&job(20, Some(20)), &waiting(1300)).is_ok());
        // A job that has some milliseconds more than the refused one is no exception.
        assert!(gate.pass(&job(20, Some(20)), &waiting(1500)).is_err());
        assert!(gate.pass(&job(19, Some(20)), &waiting(1400)).is_err());
    }

    #[test]
    fn jobs_are_grouped_by_priority() {
        let of = |priority, max_tokens, seconds: Option<u64>| {
            let expires_at = seconds.map(|seconds| NOW.after(Duration::from_secs(seconds)));
            let mut job = crate::JobBuilder::tokens("m@i2_s", vec![1; 10]).build().expect("valid");
            (job.priority, job.expires_at) = (priority, expires_at);
            job.sampling.max_tokens = max_tokens;
            job
        };
        let jobs = [
            of(Priority::Low, 10, None),
            of(Priority::High, 90, Some(9)),
            of(Priority::High, 40, Some(3)),
        ];
        let low = Group { priority: Priority::Low, tokens: 20, largest: 20, expires_at: None };
        let three = Some(NOW.after(Duration::from_secs(3)));
        let high = Group { tokens: 150, largest: 100, expires_at: three, ..job(0, None) };
        assert_eq!(Group::of(&jobs, NOW), [low, high]);
        let later = NOW.after(Duration::from_secs(3));
        let high = Group { expires_at: jobs[1].expires_at, ..high };
        assert_eq!(Group::of(&jobs, later), [low, high], "one deadline has passed");
    }

    #[test]
    fn refusal_without_workers_says_so() {
        let (limit, second) = (Limit::Tokens(5), Duration::from_secs(1));
        let refused = |serving: Option<&Serving>| {
            let Refused { cause, retry_after, .. } = Refused::by_dispatcher(limit, second, serving);
            (cause, retry_after)
        };
        assert_eq!(refused(None), (Cause::Backlog, second));
        assert_eq!(refused(Some(&waiting(1).serving)), (Cause::Backlog, second));
        assert_eq!(refused(Some(&Serving::default())), (Cause::NoWorker, RETRY_NO_WORKER));
        let memory = Refused::by_dispatcher(Limit::Memory, second, Some(&Serving::default()));
        assert_eq!(memory.cause, Cause::Memory);
    }
}
