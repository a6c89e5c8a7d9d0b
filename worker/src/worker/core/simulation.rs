//! Simulated lives of workers. Every promise about a worker that fails is checked here: a life has some
//! workers, a store, a dispatcher and jobs, and a seed decides what goes wrong and when. A failure prints
//! the seed; `TRITMILL_SEED=N` runs that life alone, and `TRITMILL_LIVES=N` changes the number of lives.

mod calls;
mod engine;
mod servers;
mod world;

use std::time::Duration;

use tritmill_queue::{Job, JobId, JobState, Priority, Prompt, QueueName, Sampling, Tenant};
use uuid::Uuid;

use self::{
    engine::Behaviour,
    world::{Event, Health, World},
};
use super::io::Input;

/// Faults end after this time.
const FAULTS_UNTIL: u64 = 120_000;
/// All jobs are finished by this time.
const LIFE_MAX: u64 = 1_800_000;

/// What is different from one life to the next.
#[derive(Debug, Clone)]
struct Life {
    seed: u64,
    workers: usize,
    jobs: Vec<Behaviour>,
    /// The chance of a call to fail, or to be executed without an answer.
    loss: f64,
}

fn queue() -> QueueName {
    QueueName { model: "tiny".to_owned(), format: "i2_s".to_owned() }
}

fn job(number: u128) -> Job {
    Job {
        id: JobId::from(Uuid::from_u128(number)),
        tenant: Tenant::default(),
        queue: queue(),
        priority: Priority::Normal,
        prompt: Prompt::Text("once".to_owned()),
        sampling: Sampling::default(),
        seed: 1,
        attempts_max: 3,
        run_at: None,
        expires_at: None,
        stream: false,
        traceparent: None,
        task: tritmill_queue::Task::Generate,
        echo: serde_json::Map::new(),
        line_key: None,
        billing: tritmill_queue::Billing::default(),
        line_shape: None,
        custom_id: None,
    }
}

/// Prints the seed of a life that fails.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("this life failed: TRITMILL_SEED={}", self.0);
        }
    }
}

/// Runs a life to its end and checks the promises; returns the world at its end.
fn live(life: &Life, faults: impl FnOnce(&mut World)) -> World {
    let mut world = World::new(life);
    faults(&mut world);
    while !world.store.is_finished() || world.now < FAULTS_UNTIL {
        world.advance();
        if world.now > FAULTS_UNTIL {
            world.loss = 0.0;
        }
        assert!(world.now < LIFE_MAX, "a job is stuck: {:#?}\n{:?}", world.store, world.dispatcher);
    }
    for ((id, row), behaviour) in world.store.rows.iter().zip(&life.jobs) {
        let charged = world.store.charged.get(id).copied().unwrap_or(0);
        match behaviour {
            // Chance may end a worker while a healthy job runs alone.
            Behaviour::Answers(_) if charged < 3 => {
                let found = (row.state, row.attempts);
                assert_eq!(found, (JobState::Completed, charged), "a healthy job: {row:?}");
            }
            Behaviour::Answers(_) => {}
            Behaviour::Hangs | Behaviour::Kills => {
                assert_eq!((row.state, row.attempts), (JobState::Failed, 3), "{row:?}");
            }
        }
    }
    // What the dispatcher still has is refused and acknowledged.
    let end = world.now + 120_000;
    while !world.dispatcher.is_empty() {
        world.advance();
        assert!(world.now < end, "entries stay: {:?}", world.dispatcher);
    }
    world
}

/// Runs a life for each seed, and checks the world at its end.
fn lives(
    count: u64,
    of: impl Fn(u64) -> Life,
    faults: impl Fn(&mut World),
    check: impl Fn(&World),
) {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let seeds = match number("TRITMILL_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("TRITMILL_LIVES").unwrap_or(count),
    };
    for seed in seeds {
        let _seed = Seed(seed);
        check(&live(&of(seed), &faults));
    }
}

fn healthy(count: u64, seconds: u64) -> Vec<Behaviour> {
    (0..count)
        .map(|n| Behaviour::Answers(Duration::from_millis(300 + n * 997 % (seconds * 1000))))
        .collect()
}

/// A moment before the faults end.
fn moment(world: &mut World) -> u64 {
    world.rng.u64(..FAULTS_UNTIL - 60_000)
}

#[test]
fn healthy_jobs_are_answered_at_the_first_attempt() {
    let of = |seed| Life { seed, workers: 2, jobs: healthy(60, 40), loss: 0.0 };
    let check = |world: &World| {
        assert!(world.dispatcher.deliveries.values().all(|times| *times == 1), "delivered again");
        assert_eq!(world.flaws(), (0, 0, 0));
    };
    lives(20, of, |_| {}, check);
}

#[test]
fn drained_and_paused_workers_give_back_what_they_hold() {
    let of = |seed| {
        let workers = 1 + (seed % 2) as usize;
        Life { seed, workers, jobs: healthy(60, 60), loss: 0.0 }
    };
    let faults = |world: &mut World| {
        for worker in [0, world.lives.len() - 1, 0] {
            let at = moment(world);
            world.at(at, Event::Drain(worker));
        }
        let at = moment(world);
        world.at(at, Event::Pause(true));
        world.at(at + 5_000, Event::Pause(false));
    };
    lives(100, of, faults, |world| assert_eq!(world.flaws(), (0, 0, 0)));
}

#[test]
fn deliveries_of_a_cancelled_pull_are_released() {
    let of = |seed| Life { seed, workers: 1, jobs: healthy(200, 1), loss: 0.0 };
    let faults = |world: &mut World| {
        for _ in 0..200 {
            let at = moment(world);
            world.at(at, Event::Pause(true));
            world.at(at + 100, Event::Pause(false));
        }
    };
    lives(20, of, faults, |world| assert_eq!(world.flaws(), (0, 0, 0)));
}

#[test]
fn worker_told_to_stop_saves_running_answers_at_once() {
    let jobs = vec![Behaviour::Answers(Duration::from_secs(60))];
    let mut world = World::new(&Life { seed: 1, workers: 1, jobs, loss: 0.0 });
    let row = |world: &World| world.store.rows.values().next().expect("one job").clone();
    // Answers are saved after three seconds, and the drain lasts for thirty.
    while world.now < 2_400 {
        world.advance();
    }
    assert_eq!((row(&world).state, row(&world).checkpoint), (JobState::Running, None));
    world.input(0, Input::Drain);
    while world.now < 2_700 {
        world.advance();
    }
    assert_eq!(row(&world).state, JobState::Running);
    assert!(row(&world).checkpoint.is_some());
}

#[test]
fn job_of_priority_high_starts_while_all_slots_are_taken() {
    let jobs = vec![Behaviour::Answers(Duration::from_secs(60)); 9];
    let mut world = World::new(&Life { seed: 1, workers: 1, jobs, loss: 0.0 });
    let high = *world.store.rows.keys().next_back().expect("nine jobs");
    world.dispatcher.high.insert(high);
    while world.now < 3_000 {
        world.advance();
    }
    let delivered: Vec<JobId> = world.dispatcher.deliveries.keys().copied().collect();
    assert_eq!(delivered.len(), 5, "four slots, and one for priority high");
    assert_eq!(delivered.last(), Some(&high));
    assert_eq!(world.store.rows[&high].state, JobState::Running);
}

#[test]
fn worker_that_makes_room_ends_after_its_jobs() {
    let jobs = vec![Behaviour::Answers(Duration::from_secs(100)); 3];
    let mut world = World::new(&Life { seed: 1, workers: 1, jobs, loss: 0.0 });
    while world.now < 5_000 {
        world.advance();
    }
    world.input(0, Input::Finish);
    // A drain ends after thirty seconds.
    while world.now < 120_000 {
        world.advance();
    }
    assert!(world.store.is_finished());
    assert!(world.dispatcher.deliveries.values().all(|times| *times == 1), "handed back");
}

#[test]
fn lost_answers_and_late_calls_cost_nothing() {
    let of = |seed| Life { seed, workers: 3, jobs: healthy(60, 8), loss: 0.05 };
    lives(100, of, |_| {}, |world| assert_eq!(world.overlaps, 0));
}

#[test]
fn both_servers_lost_after_a_pull_leave_nothing_held() {
    let of = |seed| Life { seed, workers: 1, jobs: healthy(40, 5), loss: 0.0 };
    let faults = |world: &mut World| {
        let at = moment(world) / 10;
        let health = if world.rng.bool() { Health::Refuses } else { Health::Hangs };
        world.at(at, Event::Store(health));
        world.at(at, Event::Dispatcher(health));
        world.at(at + 20_000, Event::Store(Health::Up));
        let later = world.rng.u64(..15_000);
        world.at(at + 20_000 + later, Event::Dispatcher(Health::Up));
    };
    lives(100, of, faults, |world| assert_eq!(world.flaws(), (0, 0, 0)));
}

#[test]
fn outage_longer_than_a_lease_spends_no_attempt() {
    let of = |seed| Life { seed, workers: 2, jobs: healthy(40, 20), loss: 0.0 };
    let faults = |world: &mut World| {
        let (at, length) = (moment(world) / 4, world.rng.u64(16_000..40_000));
        let health = if world.rng.bool() { Health::Refuses } else { Health::Hangs };
        world.at(at, Event::Store(health));
        world.at(at + length, Event::Store(Health::Up));
    };
    lives(100, of, faults, |world| assert_eq!(world.flaws(), (0, 0, 0)));
}

#[test]
fn worker_that_is_cut_off_stops_before_another_has_its_jobs() {
    let of = |seed| Life { seed, workers: 3, jobs: healthy(60, 60), loss: 0.0 };
    let faults = |world: &mut World| {
        let (at, length) = (moment(world) / 2, world.rng.u64(1_000..60_000));
        world.at(at, Event::CutOff(0, true));
        world.at(at + length, Event::CutOff(0, false));
    };
    lives(60, of, faults, |world| {
        assert_eq!((world.overlaps, world.dispatcher.restored), (0, 0));
    });
}

#[test]
fn poison_jobs_fail_alone() {
    let of = |seed| {
        let mut jobs = healthy(30, 8);
        let at = (seed % 29) as usize;
        jobs[at] = if seed % 2 == 0 { Behaviour::Hangs } else { Behaviour::Kills };
        Life { seed, workers: 2, jobs, loss: 0.0 }
    };
    lives(60, of, |_| {}, |world| assert_eq!((world.overlaps, world.dispatcher.restored), (0, 0)));
}

#[test]
fn device_that_fails_gets_one_job_after_another_until_it_works_again() {
    const REPAIRED: u64 = 50_000;
    let of = |seed| Life { seed, workers: 2, jobs: healthy(120, 20), loss: 0.0 };
    let faults = |world: &mut World| {
        let at = world.rng.u64(..30_000);
        world.at(at, Event::Device(0, true));
        world.at(REPAIRED, Event::Device(0, false));
    };
    let check = |world: &World| {
        let failed: Vec<_> = world.first_steps.iter().filter(|(.., failed)| *failed).collect();
        // Three in a row open the breaker, its waits double from half a second to a second on.
        assert!((4..=12).contains(&failed.len()), "{failed:?}");
        assert!(failed[3..].iter().all(|(_, jobs, _)| *jobs == 1), "{failed:?}");
        let waits: Vec<u64> = failed[2..].windows(2).map(|two| two[1].0 - two[0].0).collect();
        assert!(waits.iter().zip(0..).all(|(wait, n)| *wait >= 500 << n.min(6)), "{waits:?}");
        let later = world.first_steps.iter().filter(|(at, ..)| *at >= REPAIRED);
        let most = later.map(|(_, jobs, _)| *jobs).max();
        assert!(most > Some(1), "the breaker did not close: {most:?}");
        assert_eq!((world.overlaps, world.dispatcher.restored), (0, 0));
    };
    lives(60, of, faults, check);
}

#[test]
fn every_job_ends_once_whatever_fails() {
    let of = |seed| {
        let mut jobs = healthy(50, 15);
        if seed % 3 == 0 {
            jobs[7] = Behaviour::Hangs;
        }
        if seed % 5 == 0 {
            jobs[23] = Behaviour::Kills;
        }
        let loss = if seed % 2 == 0 { 0.0 } else { 0.02 };
        Life { seed, workers: 1 + (seed % 4) as usize, jobs, loss }
    };
    let faults = |world: &mut World| {
        for _ in 0..world.rng.u32(..6) {
            let (at, length) = (moment(world), world.rng.u64(100..50_000));
            let health = if world.rng.bool() { Health::Refuses } else { Health::Hangs };
            match world.rng.u32(..7) {
                0 => {
                    world.at(at, Event::Store(health));
                    world.at(at + length, Event::Store(Health::Up));
                }
                1 => {
                    world.at(at, Event::Dispatcher(health));
                    world.at(at + length, Event::Dispatcher(Health::Up));
                }
                2 => world.at(at, Event::Lose),
                3 => {
                    let by = world.rng.i64(-600_000..600_000);
                    world.at(at, Event::Jump(by));
                }
                4 => {
                    world.at(at, Event::Pause(true));
                    world.at(at + length, Event::Pause(false));
                }
                5 => world.at(at, Event::Drain(0)),
                _ => world.at(at, Event::Crash(0)),
            }
        }
    };
    lives(300, of, faults, |_| {});
}
