//! Fairness among very many tenants.

use std::collections::HashMap;

use crate::rig::{dispatcher, entry, pull};
use tritmill_queue::{
    Dispatcher, Entry, JobId, Priority,
    dispatch::{Demand, Quotas},
};
use tritmill_servers::Redis;

const TENANTS: usize = 10_000;
/// Tokens after which the shares of the tenants are compared.
const SHARE: u64 = 200;
/// Jobs taken at a time.
const PULL: usize = 512;

#[tokio::test]
async fn ten_thousand_tenants_are_served_within_ten_percent() {
    let redis = Redis::start().unwrap();
    let dispatcher = dispatcher(&redis);
    // Jobs of 10 or 20 tokens; one tenant has as many jobs as a thousand others.
    let mut fed: Vec<Entry> = Vec::new();
    for tenant in 0..TENANTS {
        let (name, cost) = (format!("tenant-{tenant}"), 10 + 10 * (tenant as u32 % 2));
        let jobs = if tenant == 0 { 20_000 } else { 2 * SHARE as usize / cost as usize };
        fed.extend((0..jobs).map(|_| entry(Priority::Normal, &name, cost)));
    }
    for chunk in fed.chunks(8192) {
        dispatcher.enqueue(chunk).await.unwrap();
    }
    let of: HashMap<JobId, &Entry> = fed.iter().map(|entry| (entry.id, entry)).collect();
    let mut tokens: HashMap<&str, u64> = HashMap::new();
    let mut served = 0;
    while served < SHARE * TENANTS as u64 {
        let taken = pull(&dispatcher, "a", PULL).await;
        assert!(!taken.is_empty(), "nothing is left after {served} tokens");
        for delivery in &taken {
            let entry = of[&delivery.id];
            *tokens.entry(&entry.tenant.0).or_default() += u64::from(entry.cost);
            served += u64::from(entry.cost);
        }
        dispatcher.acknowledge("a", &taken).await.unwrap();
    }
    assert_eq!(tokens.len(), TENANTS, "every tenant is served");
    let (least, most) = (tokens.values().min().unwrap(), tokens.values().max().unwrap());
    let fair = SHARE * 9 / 10..=SHARE * 11 / 10;
    assert!(fair.contains(least) && fair.contains(most), "from {least} to {most} tokens");
}

#[tokio::test]
async fn tenant_does_not_wait_for_all_of_a_larger_one() {
    let redis = Redis::start().unwrap();
    let dispatcher = dispatcher(&redis);
    let of = |tenant, count| (0..count).map(|_| entry(Priority::Normal, tenant, 10)).collect();
    let (large, small): (Vec<Entry>, Vec<Entry>) = (of("large", 500), of("small", 3));
    dispatcher.enqueue(&large).await.unwrap();
    dispatcher.enqueue(&small).await.unwrap();
    let before = async |tenant| {
        let demand = Demand::by_queue(&[entry(Priority::Normal, tenant, 20)]).remove(0);
        let line = dispatcher.admit(&demand, &Quotas::default()).await.unwrap();
        line.parts[Priority::Normal as usize].before
    };
    assert_eq!(before("large").await, 5030);
    assert_eq!(before("small").await, 2 * (30 + 20));
    assert_eq!(before("new").await, 2 * 20);
    // As much as predicted is served before the last entry of the small tenant, or less.
    let taken = pull(&dispatcher, "a", 10).await;
    let last = taken.iter().position(|delivery| delivery.id == small[2].id).unwrap();
    assert!(10 * last <= 2 * (20 + 10), "{last} entries were served before");
}
