//! Claims by turns, lost leases, limits, and what a step writes.

use tritmill_admin::store::batch_steps::BatchStart;

use super::*;

#[tokio::test]
async fn claims_go_round_the_tenants_and_take_the_oldest_batch() {
    all(async |rig: Rig| {
        let (store, tick) = (&rig.store, Duration::from_millis(1));
        let [busy, quiet, late] = ["busy", "quiet", "late"].map(tenant);
        let mut of_busy = Vec::new();
        for _ in 0..20 {
            of_busy.push(create(store, &busy).await.id);
        }
        let of_quiet = create(store, &quiet).await.id;
        let next = async || {
            rig.advance(tick);
            let claim = claim_of(store, Claimable::Released, 1).await.pop().unwrap();
            release(store, &claim).await;
            claim.batch.id
        };
        assert_eq!(next().await, of_busy[0], "the oldest");
        let turns = [next().await, next().await, next().await, next().await];
        assert_eq!(turns, [of_quiet, of_busy[0], of_quiet, of_busy[0]], "each tenant in turn");
        let of_late = create(store, &late).await.id;
        assert_eq!(next().await, of_late, "a tenant that was never served is first");
        // Several at once: one of each tenant before the second of any.
        let claims = claim_of(store, Claimable::Released, 4).await;
        let mut ids: Vec<BatchId> = claims.iter().map(|claim| claim.batch.id).collect();
        ids.sort_unstable();
        assert_eq!(ids, [of_busy[0], of_busy[1], of_quiet, of_late]);
    })
    .await;
}

#[tokio::test]
async fn released_batch_is_claimed_again_when_its_next_step_is_due() {
    all(async |rig: Rig| {
        let (store, minute) = (&rig.store, Duration::from_secs(60));
        let (new, other) =
            (create(store, &tenant("acme")).await, create(store, &tenant("acme")).await);
        let held = claim(store).await.unwrap();
        assert_eq!(held.batch.id, new.id);
        store.release_batch(new.id, held.epoch, minute).await.unwrap();
        let next = claim(store).await.unwrap();
        assert_eq!(next.batch.id, other.id, "a batch that waits is passed over");
        store.release_batch(other.id, next.epoch, minute * 2).await.unwrap();
        assert!(claim(store).await.is_none());
        rig.advance(minute);
        assert_eq!(claim(store).await.unwrap().batch.id, new.id);
        assert!(claim(store).await.is_none());
        cancel(store, &other.tenant, other.id).await;
        assert_eq!(claim(store).await.unwrap().batch.id, other.id, "a cancel is due at once");
    })
    .await;
}

#[tokio::test]
async fn batch_with_a_lost_lease_is_suspect_until_a_step_is_saved() {
    all(async |rig: Rig| {
        let store = &rig.store;
        let new = create(store, &tenant("acme")).await;
        let released = async || claim_of(store, Claimable::Released, 9).await;
        let suspect = async || claim_of(store, Claimable::Suspect, 9).await;
        assert!(!store.has_suspect_batches().await.unwrap());
        assert_eq!(released().await[0].failures, 0);
        for failures in 1..=2 {
            rig.advance(LEASE);
            assert!(store.has_suspect_batches().await.unwrap());
            assert!(released().await.is_empty());
            let claims = suspect().await;
            assert_eq!((claims.len(), claims[0].failures), (1, failures));
        }
        rig.advance(LEASE);
        let held = suspect().await.pop().unwrap();
        release(store, &held).await;
        assert!(released().await.is_empty(), "a release alone proves nothing");
        let held = suspect().await.pop().unwrap();
        assert_eq!(held.failures, 3, "a release is not a failure");
        assert!(store.save_batch(&held, BatchWrites::default()).await.unwrap());
        release(store, &held).await;
        let held = released().await.pop().unwrap();
        assert_eq!(held.failures, 0);
        store.charge_batch(new.id, held.epoch, Duration::ZERO).await.unwrap();
        let held = released().await.pop().unwrap();
        assert_eq!(held.failures, 1, "a step that hangs endangers no other batch");
    })
    .await;
}

#[tokio::test]
async fn tenant_has_a_maximum_of_unfinished_batches() {
    all(async |Rig { store, .. }| {
        let (acme, other) = (tenant("acme"), tenant("other"));
        create(&store, &acme).await;
        create(&store, &acme).await;
        let more = |of: &Tenant| batch(of, FileId::generate());
        assert_eq!(store.create_batch(&more(&acme), 2).await.unwrap(), Creation::Full);
        assert_eq!(store.create_batch(&more(&other), 2).await.unwrap(), Creation::New);
        let mut of_acme = claim_of(&store, Claimable::Released, 3).await;
        assert_eq!(of_acme.len(), 3);
        of_acme.retain(|claim| claim.batch.tenant == acme);
        let [mut held, mut next] = of_acme.try_into().unwrap();
        held.batch.enter(BatchState::InProgress, Timestamp(5));
        assert_eq!(store.start_batch(&held, 1).await.unwrap(), BatchStart::Started);
        next.batch.enter(BatchState::InProgress, Timestamp(5));
        assert_eq!(store.start_batch(&next, 1).await.unwrap(), BatchStart::Full);
        let stale = BatchClaim { epoch: next.epoch - 1, ..next.clone() };
        assert_eq!(store.start_batch(&stale, 2).await.unwrap(), BatchStart::Fenced);
        held.batch.enter(BatchState::Failed, Timestamp(6));
        assert!(store.save_batch(&held, BatchWrites::default()).await.unwrap());
        assert_eq!(store.start_batch(&next, 1).await.unwrap(), BatchStart::Started);
        assert_eq!(store.create_batch(&more(&acme), 2).await.unwrap(), Creation::New);
    })
    .await;
}

#[tokio::test]
async fn operators_find_batches_of_all_tenants_in_pages() {
    all(async |Rig { store, .. }| {
        let (acme, other) = (tenant("acme"), tenant("other"));
        let mut ids = Vec::new();
        for owner in [&acme, &other, &acme] {
            ids.push(create(&store, owner).await.id);
        }
        cancel(&store, &acme, ids[0]).await;
        let find = async |tenant: Option<&Tenant>, state, after, limit| {
            let filter = BatchFilter { tenant: tenant.cloned(), state, ..BatchFilter::default() };
            let page = Page { after, limit, ascending: false };
            let found = store.find_batches(&filter, page).await.unwrap();
            found.iter().map(|batch| batch.id).collect::<Vec<_>>()
        };
        assert_eq!(find(None, None, None, 2).await, [ids[2], ids[1]]);
        assert_eq!(find(None, None, Some(ids[1]), 2).await, [ids[0]]);
        assert_eq!(find(Some(&acme), None, None, 9).await, [ids[2], ids[0]]);
        assert_eq!(find(None, Some(BatchState::Cancelling), None, 9).await, [ids[0]]);
        assert!(find(Some(&other), Some(BatchState::Cancelling), None, 9).await.is_empty());
        let found = store.batch_of_any_tenant(ids[1]).await.unwrap().unwrap();
        assert_eq!(found.tenant, other);
        assert_eq!(store.batch_of_any_tenant(BatchId::generate()).await.unwrap(), None);
    })
    .await;
}

#[tokio::test]
async fn output_and_custom_ids_are_written_under_the_epoch() {
    all(async |rig: Rig| {
        let (store, acme) = (&rig.store, tenant("acme"));
        let new = create(store, &acme).await;
        let output = file(&acme);
        store.create_file(&output).await.unwrap();
        let stale = claim(store).await.unwrap();
        rig.advance(LEASE);
        let held = claim(store).await.unwrap();
        let chunk = |bytes: &'static [u8]| {
            let content = ChunkContent::Bytes(bytes);
            FileChunk { file: output.id, number: 0, content }
        };
        let named = |line: u8| NamedLine { name: [line; 16], line: line.into(), key: None };
        let custom_ids = [named(1), named(2)];
        let chunks = [chunk(b"one two")];
        let writes =
            BatchWrites { chunks: &chunks, custom_ids: &custom_ids, ..BatchWrites::default() };
        assert!(!store.save_batch(&stale, writes).await.unwrap());
        assert_eq!(store.chunk(output.id, 0).await.unwrap(), None);
        assert!(store.known_custom_ids(new.id, &[[1; 16]]).await.unwrap().is_empty());
        for _ in 0..2 {
            // Repeated, as after a lost response.
            assert!(store.save_batch(&held, writes).await.unwrap());
        }
        assert_eq!(
            store.chunk(output.id, 0).await.unwrap().unwrap(),
            StoredChunk::Bytes(b"one two".to_vec())
        );
        let known = store.known_custom_ids(new.id, &[[2; 16], [3; 16]]).await.unwrap();
        assert_eq!(known, [([2; 16], 2)]);
        assert!(store.known_custom_ids(BatchId::generate(), &[[2; 16]]).await.unwrap().is_empty());
        assert_eq!(store.forget_custom_ids(new.id, 1).await.unwrap(), 1);
        store.sweep_batches().await.unwrap();
        assert_eq!(store.forget_custom_ids(new.id, 9).await.unwrap(), 1, "it is still validating");
        assert!(store.save_batch(&held, writes).await.unwrap());
        cancel(store, &acme, new.id).await;
        store.sweep_batches().await.unwrap();
        assert_eq!(store.forget_custom_ids(new.id, 9).await.unwrap(), 0, "swept");
        // A file that was swept fails the whole write.
        store.abandon_file(output.id).await.unwrap();
        let mut held = claim(store).await.unwrap();
        held.batch.enter(BatchState::Cancelled, Timestamp(9));
        assert!(store.save_batch(&held, writes).await.is_err());
        let known = store.batch(&acme, new.id).await.unwrap().unwrap();
        assert_eq!(known.state, BatchState::Cancelling);
    })
    .await;
}
