//! Whether a new job would wait too long: what is before it, divided by the rate at which the workers take tokens
//! off the backlog, against its deadline and the queue's longest wait. Pure: no clock, no I/O.
//!
//! A job of *c* tokens takes *c* × slots ÷ rate in a busy worker, because all slots share the rate. It fits if
//! its wait and this time end before its deadline. Once a limit has refused a job, it admits the next one only
//! when the wait is a fifth below the limit, so that a full queue does not switch with every answer.

use std::time::Duration;

use tritmill_queue::{
    Job, Priority, Timestamp,
    dispatch::{BacklogByPriority, Cause, Limit},
    store::Serving,
};

/// Share of the time to a deadline that may be used: predictions are not exact. With 0.8, 1.35 % of the jobs admitted
/// during an overload of ten times the capacity were late (`bench e2e --overload`).
const DEADLINE_SHARE: f64 = 0.64;
/// Share of a limit below which it admits jobs again.
const RESUME_SHARE: f64 = 0.8;
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
    pub fn by_priority<'a>(jobs: impl IntoIterator<Item = &'a Job>, now: Timestamp) -> Vec<Self> {
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

/// The load of a queue when jobs arrive.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QueueLoad {
    pub backlog: BacklogByPriority,
    /// Tokens of admitted jobs that are not in the backlog yet, by priority.
    pub reserved: [u64; 3],
    pub serving: Serving,
    /// The time on the clock of deadlines.
    pub now: Timestamp,
    /// The longest wait that the operator allows, as far as it applies to these jobs.
    pub max_wait: Option<Duration>,
}

/// Decides about jobs of one queue and priority, and remembers which limits are reached.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct WaitLimiter {
    /// Limits up to this one, in seconds, are reached: they admit jobs only a fifth below their value. Includes limits
    /// that are longer than the one that refused a job by less than this fifth.
    reached_up_to_s: f64,
}

impl WaitLimiter {
    /// Checks that the jobs exceed no limit; returns the one that they would exceed.
    pub fn check(&mut self, group: &Group, load: &QueueLoad) -> Result<(), Refused> {
        let Some(rate) = load.serving.drain_tokens_per_s else { return Ok(()) };
        let reserved: u64 = load.reserved[..=group.priority as usize].iter().sum();
        let before = load.backlog.tokens_before(group.priority) + reserved as f64;
        let is_one = group.tokens == group.largest;
        if is_one && before < 1.0 && load.serving.has_free_slots() {
            // It starts at once, and faster than in a busy worker.
            return Ok(());
        }
        let wait_s = (before + (group.tokens - group.largest) as f64) / rate;
        let own_s = group.largest as f64 * load.serving.slots as f64 / rate;
        let Some((limit, limit_s)) = strictest(group, load, own_s) else { return Ok(()) };
        let is_reached = limit_s <= self.reached_up_to_s;
        let allowed_s = if is_reached { RESUME_SHARE * limit_s } else { limit_s };
        if wait_s <= allowed_s {
            if is_reached {
                self.reached_up_to_s = limit_s.next_down();
            }
            return Ok(());
        }
        self.reached_up_to_s = self.reached_up_to_s.max(limit_s / RESUME_SHARE);
        let retry_s = if limit_s > 0.0 {
            wait_s - RESUME_SHARE * limit_s
        } else {
            // An empty queue does not help; fewer jobs in the workers may.
            wait_s.max(own_s).max(RETRY_MIN_LATE.as_secs_f64())
        };
        let retry_after = Duration::try_from_secs_f64(retry_s);
        let retry_after = retry_after.unwrap_or(RETRY_MAX).clamp(RETRY_MIN, RETRY_MAX);
        Err(Refused { limit, cause: load.serving.cause(), retry_after })
    }
}

/// Returns the limit that leaves the least time to wait, and this time in seconds, negative for a job that would be
/// late without any wait; `None` without any limit.
fn strictest(group: &Group, load: &QueueLoad, own_s: f64) -> Option<(Limit, f64)> {
    let deadline = group.expires_at.map(|at| {
        let left_s = DEADLINE_SHARE * at.since(load.now).as_secs_f64() - own_s;
        (Limit::Deadline(Duration::from_secs_f64(left_s.max(0.0))), left_s)
    });
    let longest = load.max_wait.map(|wait| (Limit::MaxWait(wait), wait.as_secs_f64()));
    deadline.into_iter().chain(longest).min_by(|(_, a), (_, b)| a.total_cmp(b))
}

#[cfg(test)]
mod tests {
    use tritmill_queue::dispatch::PriorityBacklog;

    use super::*;

    const NOW: Timestamp = Timestamp(1_000_000);

    /// A queue of 100 tokens/s in 10 slots with this many waiting tokens of priority high.
    fn waiting(tokens: u64) -> QueueLoad {
        let mut backlog = BacklogByPriority::default();
        *backlog.part_mut(Priority::High) =
            PriorityBacklog { entries: tokens / 10, tokens, before: tokens };
        let serving = Serving {
            now: NOW,
            workers: 1,
            slots: 10,
            running: 10,
            drain_tokens_per_s: Some(100.0),
            ..Serving::default()
        };
        QueueLoad { backlog, reserved: [0; 3], serving, now: NOW, max_wait: None }
    }

    /// A job that may use four fifths of this many seconds.
    fn job(tokens: u64, within: Option<u64>) -> Group {
        let deadline =
            |seconds: u64| NOW.after(Duration::from_secs(seconds).mul_f64(0.8 / DEADLINE_SHARE));
        let expires_at = within.map(deadline);
        Group { priority: Priority::High, tokens, largest: tokens, expires_at }
    }

    fn admits(group: &Group, load: &QueueLoad) -> bool {
        WaitLimiter::default().check(group, load).is_ok()
    }

    #[test]
    fn job_that_would_miss_its_deadline_is_refused() {
        // It needs 2 s itself, and may use 16 of 20 s: 14 s of waiting are 1400 tokens.
        assert!(admits(&job(20, Some(20)), &waiting(1400)));
        assert!(!admits(&job(20, Some(20)), &waiting(1410)));
        assert!(admits(&job(20, None), &waiting(1_000_000)));
        let Refused { limit, cause, retry_after } = WaitLimiter::default()
            .check(&job(20, Some(20)), &waiting(2600))
            .expect_err("it is late");
        assert_eq!((limit, cause), (Limit::Deadline(Duration::from_secs(14)), Cause::Cpu));
        // 26 s are before it; at 11.2 s the limit admits jobs again.
        assert_eq!(retry_after, Duration::from_millis(14_800));
    }

    #[test]
    fn job_that_does_not_fit_at_all_is_not_to_be_tried_again_at_once() {
        let retry_after = |tokens, within, waiting_tokens| {
            let refused =
                WaitLimiter::default().check(&job(tokens, Some(within)), &waiting(waiting_tokens));
            refused.expect_err("it is late").retry_after
        };
        assert_eq!(retry_after(100, 10, 0), Duration::from_secs(10), "its own time");
        assert_eq!(retry_after(100, 10, 2500), Duration::from_secs(25), "the wait");
        let mut fast = waiting(0);
        fast.serving.drain_tokens_per_s = Some(1e4);
        let none = Group { expires_at: Some(Timestamp(NOW.0 + 10)), ..job(20, None) };
        let refused = WaitLimiter::default().check(&none, &fast).expect_err("it is late");
        assert_eq!(refused.retry_after, RETRY_MIN_LATE);
    }

    #[test]
    fn unknown_rate_and_free_slots_admit_every_job() {
        let mut unknown = waiting(1_000_000);
        unknown.serving.drain_tokens_per_s = None;
        assert!(admits(&job(20, Some(1)), &unknown));
        let mut idle = waiting(0);
        assert!(!admits(&job(100, Some(10)), &idle), "it needs 10 s in a full worker");
        idle.serving.running = 7;
        assert!(admits(&job(100, Some(10)), &idle));
        let two = Group { tokens: 200, ..job(100, Some(10)) };
        assert!(!admits(&two, &idle), "only one of them starts at once");
        idle.reserved[Priority::High as usize] = 100;
        assert!(!admits(&job(100, Some(10)), &idle), "another took the slot");
    }

    #[test]
    fn longest_wait_of_the_queue_applies_to_all_jobs() {
        let mut load = waiting(600);
        load.max_wait = Some(Duration::from_secs(5));
        let refused =
            WaitLimiter::default().check(&job(1, None), &load).expect_err("it waits longer");
        assert_eq!(refused.limit, Limit::MaxWait(Duration::from_secs(5)));
        load.backlog.part_mut(Priority::High).before = 500;
        assert!(admits(&job(1, None), &load));
        load.reserved[Priority::Low as usize] = 500;
        assert!(admits(&job(1, None), &load), "lower priorities do not go first");
        load.reserved[Priority::High as usize] = 10;
        assert!(!admits(&job(1, None), &load));
    }

    #[test]
    fn reached_limit_admits_jobs_again_a_fifth_below_it() {
        // A limit of 16 s.
        let (mut limiter, job) = (WaitLimiter::default(), job(40, Some(25)));
        let mut admits = |tokens| limiter.check(&job, &waiting(tokens)).is_ok();
        assert!(admits(1600) && !admits(1700));
        assert!(!admits(1500) && !admits(1290), "still reached");
        assert!(admits(1280) && admits(1600), "not reached any more");
        assert!(!admits(1610) && !admits(1600));
        // One answer at a time does not switch it with every answer.
        let decisions: Vec<bool> = (0..40).map(|n| admits(1600 - 10 * n)).collect();
        assert_eq!(decisions.windows(2).filter(|two| two[0] != two[1]).count(), 1);
    }

    #[test]
    fn short_deadlines_do_not_keep_out_jobs_with_time() {
        let (mut limiter, load) = (WaitLimiter::default(), waiting(1500));
        assert!(limiter.check(&job(20, Some(20)), &load).is_err());
        assert!(limiter.check(&job(20, Some(60)), &load).is_ok());
        assert!(
            limiter.check(&job(20, Some(20)), &waiting(1300)).is_err(),
            "still reached for these"
        );
        assert!(
            limiter.check(&job(20, Some(10)), &waiting(400)).is_ok(),
            "ends it for all longer ones"
        );
        assert!(limiter.check(&job(20, Some(20)), &waiting(1300)).is_ok());
        // A job that has some milliseconds more than the refused one is no exception.
        assert!(limiter.check(&job(20, Some(20)), &waiting(1500)).is_err());
        assert!(limiter.check(&job(19, Some(20)), &waiting(1400)).is_err());
    }

    #[test]
    fn jobs_are_grouped_by_priority() {
        let of = |priority, max_tokens, seconds: Option<u64>| {
            let expires_at = seconds.map(|seconds| NOW.after(Duration::from_secs(seconds)));
            let mut job = crate::JobBuilder::tokens("m@i2_s", vec![1; 10]).build().expect("valid");
            (job.priority, job.expires_at) = (priority, expires_at);
            job.sampling.max_tokens = Some(max_tokens);
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
        assert_eq!(Group::by_priority(&jobs, NOW), [low, high]);
        let later = NOW.after(Duration::from_secs(3));
        let high = Group { expires_at: jobs[1].expires_at, ..high };
        assert_eq!(Group::by_priority(&jobs, later), [low, high], "one deadline has passed");
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
