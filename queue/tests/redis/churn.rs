//! Random operations of several consumers: the counts stay correct and nothing is lost.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use tritmill_queue::{Delivery, Dispatcher, Entry, JobId, Priority};
use tritmill_servers::Redis;

use crate::rig::{command, dispatcher, entry, pull, queue, reclaim};

/// Xorshift: the same steps for the same seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % sides as u64).unwrap()
    }
}

/// The expected content of the dispatcher.
#[derive(Default)]
struct Model {
    waiting: HashMap<JobId, Entry>,
    /// By consumer.
    held: [Vec<Delivery>; 3],
    done: HashSet<JobId>,
    all: HashMap<JobId, Entry>,
}

impl Model {
    fn deliver(&mut self, consumer: usize, taken: Vec<Delivery>) {
        for delivery in &taken {
            assert!(!self.done.contains(&delivery.id), "acknowledged and delivered again");
            self.waiting.remove(&delivery.id).expect("delivered once");
        }
        self.held[consumer].extend(taken);
    }

    fn some(&mut self, consumer: usize, dice: &mut Dice) -> Vec<Delivery> {
        let held = &mut self.held[consumer];
        let count = dice.roll(held.len() + 1);
        held.drain(..count).collect()
    }
}

const NAMES: [&str; 3] = ["a", "b", "c:{d}"];

async fn churn(seed: u64) {
    let redis = Redis::start().unwrap();
    let dispatcher = dispatcher(&redis);
    let (mut dice, mut model) = (Dice(seed), Model::default());
    for step in 0..400 {
        let consumer = dice.roll(3);
        let name = NAMES[consumer];
        match dice.roll(6) {
            0 | 1 => {
                let one = |dice: &mut Dice| {
                    let (priority, cost) = (Priority::ALL[dice.roll(3)], dice.roll(50));
                    entry(priority, ["t", "", "u:{}"][dice.roll(3)], u32::try_from(cost).unwrap())
                };
                let count = dice.roll(12);
                let mut fed: Vec<Entry> = (0..count).map(|_| one(&mut dice)).collect();
                for entry in &fed {
                    model.waiting.insert(entry.id, entry.clone());
                    model.all.insert(entry.id, entry.clone());
                }
                // Some are already known.
                fed.extend(model.waiting.values().take(3).cloned());
                let held = model.held.iter().flatten().take(3);
                fed.extend(held.map(|delivery| model.all[&delivery.id].clone()));
                match dice.roll(3) {
                    0 => dispatcher.requeue(&fed).await.unwrap(),
                    _ => dispatcher.enqueue(&fed).await.unwrap(),
                };
            }
            2 => {
                let taken = pull(&dispatcher, name, dice.roll(12)).await;
                model.deliver(consumer, taken);
            }
            3 => {
                let some = model.some(consumer, &mut dice);
                assert_eq!(dispatcher.acknowledge(name, &some).await.unwrap(), some.len());
                model.done.extend(some.iter().map(|delivery| delivery.id));
            }
            4 => {
                let some = model.some(consumer, &mut dice);
                assert_eq!(dispatcher.hand_back(name, &some).await.unwrap(), some.len());
                for delivery in some {
                    model.waiting.insert(delivery.id, model.all[&delivery.id].clone());
                }
            }
            _ => {
                let taken = reclaim(&dispatcher, name, dice.roll(5), Duration::ZERO).await;
                for delivery in taken {
                    for held in &mut model.held {
                        held.retain(|theirs| theirs.id != delivery.id);
                    }
                    model.held[consumer].push(delivery);
                }
            }
        }
        let backlog = dispatcher.backlog(&queue()).await.unwrap();
        let tokens: u64 = model.waiting.values().map(|entry| u64::from(entry.cost)).sum();
        let expected = (model.waiting.len(), tokens);
        assert_eq!((backlog.entries, backlog.tokens), expected, "seed {seed}, step {step}");
    }
    finish(&redis, &dispatcher, model).await;
}

/// Delivers and acknowledges everything; no keys remain.
async fn finish(redis: &Redis, dispatcher: &dyn Dispatcher, mut model: Model) {
    for (name, held) in NAMES.into_iter().zip(std::mem::take(&mut model.held)) {
        assert!(dispatcher.renew(name, &held).await.unwrap().is_empty());
        assert_eq!(dispatcher.acknowledge(name, &held).await.unwrap(), held.len());
        model.done.extend(held.iter().map(|delivery| delivery.id));
    }
    let queue = queue();
    let wait = Duration::ZERO;
    let request =
        tritmill_queue::Pull { queue: &queue, consumer: "last", max: 10_000, wait, only: None };
    loop {
        let taken = dispatcher.pull(request.clone()).await.unwrap();
        if taken.is_empty() {
            break;
        }
        assert_eq!(dispatcher.acknowledge("last", &taken).await.unwrap(), taken.len());
        model.deliver(0, taken.clone());
        model.done.extend(taken.iter().map(|delivery| delivery.id));
    }
    assert_eq!(model.done.len(), model.all.len());
    let keys: Vec<String> = command(redis, &["KEYS", "tm:*"]).await;
    assert!(keys.len() <= 2, "{keys:?}");
}

#[tokio::test]
async fn counts_stay_correct_after_random_operations() {
    for seed in 1..=8 {
        churn(seed).await;
    }
}
