//! Jobs in several databases, each on a server of its own.

use tritmill_queue::{
    DatabaseIndex,
    store::{Databases, MembershipError, Workers as _},
};

use super::*;

/// Two servers with one installation.
struct Rig {
    servers: [Postgres; 2],
    store: Databases,
}

impl Rig {
    async fn start() -> Self {
        let servers = [Postgres::start().unwrap(), Postgres::start().unwrap()];
        Databases::migrate(&urls(&servers)).await.unwrap();
        let store = Databases::connect(&urls(&servers)).await.unwrap();
        Self { servers, store }
    }
}

fn urls(servers: &[Postgres]) -> String {
    servers.iter().map(Postgres::url).collect::<Vec<_>>().join(" ")
}

fn job_in(number: usize) -> Job {
    Job { id: JobId::generate_in(DatabaseIndex::new(number).unwrap()), ..job() }
}

/// Returns why a list of databases is refused.
fn refusal<T>(result: Result<T, StoreError>) -> MembershipError {
    let Err(StoreError::Migrate(source)) = result else { panic!("it is not refused") };
    *source.downcast_ref().unwrap()
}

#[tokio::test]
async fn jobs_are_spread_and_each_is_in_one_database() {
    let Rig { servers, store } = Rig::start().await;
    let numbers: Vec<usize> = (0..4).map(|_| store.next_database().number()).collect();
    assert_eq!(numbers[0], 1 - numbers[1], "in turn: {numbers:?}");
    assert_eq!(numbers[..2], numbers[2..]);
    let jobs: Vec<Job> = (0..6).map(|at| job_in(at % 3 / 2)).collect();
    store.submit(&jobs).await.unwrap();
    store.submit(&jobs).await.unwrap();
    for (server, expected) in servers.iter().zip([4, 2]) {
        assert_eq!(number(server, "SELECT count(*) FROM open_jobs").await, expected);
    }
    let ids: Vec<JobId> = jobs.iter().rev().map(|job| job.id).collect();
    let claims = store.claim(&ids, by("a")).await.unwrap();
    let claimed: Vec<JobId> = claims.iter().map(|claim| claim.job.id).collect();
    assert_eq!(claimed, ids, "in the order of the call");
    let held: Vec<ClaimRef> = claims.iter().map(Claim::claim_ref).collect();
    assert!(store.renew(&held, LEASE).await.unwrap().is_empty());
    let done: Vec<_> = held.iter().map(|held| finished(*held, answer("x"))).collect();
    assert_eq!(store.finish(&done).await.unwrap().len(), 6);
    assert_eq!(store.finished(&ids).await.unwrap().len(), 6);
    assert_eq!(store.progress(Some(&queue())).await.unwrap().completed, 6);
    let unknown = job_in(2);
    assert_eq!(store.job(unknown.id).await.unwrap(), None);
    assert!(store.cancel(&[unknown.id]).await.unwrap().is_empty());
    let refused = store.submit(&[unknown]).await.unwrap_err().to_string();
    assert!(refused.contains("database 3 of 2"), "{refused}");
}

#[tokio::test]
async fn list_of_databases_must_fit_the_installation() {
    let servers = [Postgres::start().unwrap(), Postgres::start().unwrap()];
    let [first, second] = [servers[0].url(), servers[1].url()];
    let third = servers[1].create_database("third").unwrap();
    Databases::migrate(&first).await.unwrap();
    let both = format!("{first}\n{second}");
    PostgresStore::migrate(&second).await.unwrap();
    assert_eq!(
        refusal(Databases::connect(&both).await),
        MembershipError::NotAdded { named: 2, known: 1 }
    );
    Databases::migrate(&both).await.unwrap();
    Databases::migrate(&both).await.unwrap();
    assert_eq!(Databases::connect(&both).await.unwrap().count(), 2);
    assert_eq!(
        refusal(Databases::connect(&first).await),
        MembershipError::Incomplete { named: 1, known: 2 }
    );
    assert_eq!(
        refusal(Databases::migrate(&first).await),
        MembershipError::Incomplete { named: 1, known: 2 }
    );
    let reversed = format!("{second} {first}");
    let other_place = MembershipError::OtherPlace { number: 1, found: 2 };
    assert_eq!(refusal(Databases::connect(&reversed).await), other_place);
    assert_eq!(refusal(Databases::migrate(&reversed).await), other_place);
    // A database with jobs of its own, and one of another installation.
    Databases::migrate(&third).await.unwrap();
    let own = Databases::connect(&third).await.unwrap();
    let own_job = job();
    own.submit(std::slice::from_ref(&own_job)).await.unwrap();
    let three = format!("{both} {third}");
    assert_eq!(refusal(Databases::migrate(&three).await), MembershipError::NotEmpty { number: 3 });
    let fourth = servers[1].create_database("fourth").unwrap();
    Databases::migrate(&format!("{third} {fourth}")).await.unwrap();
    assert_eq!(
        refusal(Databases::connect(&format!("{first} {fourth}")).await),
        MembershipError::OtherInstallation { number: 2 }
    );
    assert_eq!(
        refusal(Databases::migrate(&format!("{first} {second} {fourth}")).await),
        MembershipError::OtherPlace { number: 3, found: 2 }
    );
    for wrong in ["", &"postgres://h/d ".repeat(65)] {
        assert!(matches!(Databases::connect(wrong).await, Err(StoreError::InvalidValue { .. })));
    }
}

#[tokio::test]
async fn jobs_and_keys_are_found_when_databases_were_added() {
    let servers = [Postgres::start().unwrap(), Postgres::start().unwrap()];
    Databases::migrate(&servers[0].url()).await.unwrap();
    let alone = Databases::connect(&servers[0].url()).await.unwrap();
    let tenant = Tenant::default();
    let mut first_ids = Vec::new();
    for key in 0..8 {
        let mut jobs = [job_in(0)];
        let new = alone.submit_idempotent(&tenant, &key.to_string(), b"r", &mut jobs).await;
        assert_eq!(new.unwrap(), Submission::New);
        first_ids.push(jobs[0].id);
    }
    Databases::migrate(&urls(&servers)).await.unwrap();
    let store = Databases::connect(&urls(&servers)).await.unwrap();
    for (key, id) in first_ids.iter().enumerate() {
        let (key, mut jobs) = (key.to_string(), [job_in(1)]);
        let again = store.submit_idempotent(&tenant, &key, b"r", &mut jobs).await.unwrap();
        assert_eq!(again, Submission::Known(vec![*id]), "key {key}");
        assert!(store.job(*id).await.unwrap().is_some());
    }
    let other = store.submit_idempotent(&tenant, "0", b"another", &mut [job()]).await;
    assert!(matches!(other, Err(SubmitError::Conflict(_))), "{other:?}");
    // A process that has not been restarted goes on.
    alone.submit(&[job_in(0)]).await.unwrap();
    assert_eq!(store.unfinished(&queue()).await.unwrap(), 9);
    let mut homes = HashSet::new();
    for key in 0..32 {
        let mut jobs = [job_in(0), job_in(1)];
        let key = format!("new {key}");
        let new = store.submit_idempotent(&tenant, &key, b"r", &mut jobs).await.unwrap();
        assert_eq!(new, Submission::New);
        assert_eq!(jobs[0].id.database(), jobs[1].id.database(), "one transaction");
        homes.insert(jobs[0].id.database());
        let known = store.submit_idempotent(&tenant, &key, b"r", &mut [job()]).await.unwrap();
        assert_eq!(known, Submission::Known(vec![jobs[0].id, jobs[1].id]));
    }
    assert_eq!(homes.len(), 2);
}

#[tokio::test]
async fn work_in_one_database_goes_on_without_the_other() {
    let Rig { mut servers, store } = Rig::start().await;
    let jobs = [job_in(0), job_in(1)];
    let ids = jobs.each_ref().map(|job| job.id);
    let soon = store.now().await.unwrap().after(Duration::from_millis(500));
    let due = Job { run_at: Some(soon), ..job_in(0) };
    store.submit(&jobs).await.unwrap();
    let held = store.claim(&ids, by("a")).await.unwrap();
    store.submit(std::slice::from_ref(&due)).await.unwrap();
    servers[1].kill();
    let done: Vec<_> = held.iter().map(|c| finished(c.claim_ref(), answer("x"))).collect();
    let error = store.finish(&done).await.unwrap_err().to_string();
    assert!(error.contains("database 2"), "{error}");
    assert_eq!(store.state(ids[0]).await.unwrap(), Some(JobState::Completed));
    let queued =
        eventually("the job that is due", async || store.reconcile().await.unwrap().queued.pop());
    assert_eq!(queued.await.id, due.id);
    assert_eq!(store.claim(&[due.id], by("a")).await.unwrap().len(), 1);
    let homes: HashSet<_> = (0..4).map(|_| store.next_database()).collect();
    assert_eq!(homes, HashSet::from([DatabaseIndex::FIRST]), "the other one gets no jobs now");
    store.heartbeat(&beat()).await.unwrap();
    servers[1].restart().unwrap();
    // The whole call is repeated; what was done before counts once.
    let settled = eventually("the second server", async || store.finish(&done).await.ok()).await;
    assert_eq!(settled.len(), 2);
    assert_eq!(store.progress(None).await.unwrap().completed, 2);
}

#[tokio::test]
async fn heartbeats_show_every_database_that_it_is_reached() {
    let Rig { servers: _running, store } = Rig::start().await;
    let now = Arc::new(AtomicI64::new(store.now().await.unwrap().0));
    let clock = Arc::clone(&now);
    let clock: tritmill_queue::store::Clock =
        Arc::new(move || Timestamp(clock.load(Ordering::SeqCst)));
    let store = store.with_clock(&clock);
    let jobs = [job_in(0), job_in(1)];
    store.submit(&jobs).await.unwrap();
    assert_eq!(store.claim(&jobs.each_ref().map(|job| job.id), by("a")).await.unwrap().len(), 2);
    store.reconcile().await.unwrap();
    for _ in 0..=LEASE.as_secs() {
        now.fetch_add(1000, Ordering::SeqCst);
        store.heartbeat(&beat()).await.unwrap();
    }
    // Nothing reconciled for longer than an outage lasts, but workers reached both databases.
    assert_eq!(store.reconcile().await.unwrap().lapsed, 2);
}
