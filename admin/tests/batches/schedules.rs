//! Batches that are created at the times of a schedule.

use serde_json::{Value, json};
use tritmill_admin::{
    App, Models, Scheduler, Settings,
    store::schedules::{Schedule, ScheduleId, ScheduleRecord},
};
use tritmill_client::Client;
use tritmill_queue::{dispatch::MemoryDispatcher, events::MemoryEvents};
use uuid::Uuid;

use super::*;

const HOUR: Duration = Duration::from_secs(3600);

fn scheduler(rig: &Rig) -> Scheduler {
    let dispatcher = Arc::new(MemoryDispatcher::new(10));
    let client = Client::embedded(rig.store.clone(), dispatcher, Arc::new(MemoryEvents::default()));
    let models = Models::fixed(Vec::new());
    Scheduler::new(App::new(client, rig.store.clone(), models, Settings::default()))
}

/// Adds a schedule of every full hour, of which the first run is due in an hour.
async fn every_hour(rig: &Rig, owner: &Tenant, input: FileId) -> Schedule {
    let Value::Object(batch) = json!({
        "input_file_id": input.to_string(), "endpoint": "/v1/completions", "completion_window": "1h",
    }) else {
        unreachable!("an object")
    };
    let now = rig.store.now().await.unwrap();
    let record = ScheduleRecord::new("0 * * * *".into(), "Asia/Tokyo".into(), batch, now);
    let schedule = Schedule {
        id: ScheduleId::generate(),
        tenant: owner.clone(),
        key: Uuid::now_v7(),
        next_at: Some(now.after(HOUR)),
        record,
    };
    assert!(rig.store.add_schedule(&schedule, 1).await.unwrap());
    assert!(!rig.store.add_schedule(&schedule, 1).await.unwrap(), "the tenant has one");
    schedule
}

#[tokio::test]
async fn each_run_creates_one_batch_and_missed_runs_are_counted() {
    all(async |rig| {
        let store = &rig.store;
        let owner = Tenant("acme".into());
        let input = file(&owner);
        store.create_file(&input).await.unwrap();
        store.put_chunk(input.id, 0, ChunkContent::Bytes(b"{}\n")).await.unwrap();
        store.complete_file(input.id, 3, None).await.unwrap();
        let schedule = every_hour(&rig, &owner, input.id).await;
        let (one, two) = (scheduler(&rig), scheduler(&rig));
        let look = async || {
            let (first, second) = tokio::join!(one.run_due(), two.run_due());
            first.unwrap();
            second.unwrap();
            let found = store.schedule(&owner, schedule.id).await.unwrap().unwrap();
            let page = Page { after: None, limit: 100, ascending: true };
            (found, store.find_batches(&of(&owner), page).await.unwrap())
        };
        let (same, batches) = look().await;
        assert_eq!((&same, batches.len()), (&schedule, 0), "nothing is due");
        rig.advance(HOUR);
        let (after, batches) = look().await;
        let batch = &batches[0];
        assert_eq!((batches.len(), batch.input, batch.key), (1, input.id, Some(schedule.key)));
        assert_eq!((after.record.last_batch, after.record.missed), (Some(batch.id), 0));
        assert!(after.next_at > schedule.next_at);
        // Down for hours: one run makes up for all.
        rig.advance(HOUR * 5);
        let (late, batches) = look().await;
        assert_eq!((batches.len(), late.record.error.as_deref()), (2, None));
        assert!((4..=5).contains(&late.record.missed), "{late:?}");
        assert_eq!(look().await.1.len(), 2, "the next run is in the future");
        // A run that cannot create a batch says why, and the next one tries again.
        let mut broken = late.clone();
        broken.record.batch.insert("input_file_id".into(), json!("file-0"));
        assert!(!store.save_schedule(&broken, schedule.next_at).await.unwrap(), "it has moved on");
        assert!(store.save_schedule(&broken, late.next_at).await.unwrap());
        rig.advance(HOUR);
        let (failed, batches) = look().await;
        assert_eq!(batches.len(), 2);
        let error = failed.record.error.unwrap();
        assert!(error.contains("file-0"), "{error}");
        assert!(failed.next_at > late.next_at);
        assert!(store.delete_schedule(&owner, schedule.id).await.unwrap());
        assert!(!store.delete_schedule(&owner, schedule.id).await.unwrap());
    })
    .await;
}
