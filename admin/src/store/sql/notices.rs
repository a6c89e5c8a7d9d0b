//! Notices: written beside a change, claimed in turn, and ended under their epoch.

use async_trait::async_trait;
use tritmill_queue::{
    JobId, Store, StoreError, Tenant, Timestamp,
    store::{Claimant, Page},
};
use uuid::Uuid;

use super::{Connection, Row, SqlStore, batch_claims, id_list, query, rows, storable, text_list};
use crate::store::{
    BatchId,
    batch_steps::CLAIM_WINDOW,
    events::Event,
    notices::{
        Channel, Delivery, FAILURES_KEPT, FailingReceiver, KEPT, KEPT_WITH_BATCH, Notice,
        NoticeBounds, NoticeClaim, NoticeCounts, NoticeFilter, NoticeId, Notices, Outcome,
        RETRY_FOR, Receiver, rest_after,
    },
    webhooks::WebhookSecret,
};

/// Notices that one statement of the sweep deletes.
const SWEEP_CHUNK: i64 = 10_000;
/// The error of a notice that nothing delivered: its channel is switched off.
const UNTRIED: &str = "not sent within a day: is this channel switched on?";

/// The columns of a notice.
macro_rules! columns {
    () => {
        "id, event, tenant, batch_id, kind, channel, receiver, secret, CAST(subject AS text) AS subject,
         created_at, retry_until, attempts, due_at, ended_at, error"
    };
}

/// A due notice that nothing keeps from being delivered.
macro_rules! claimable {
    () => {
        concat!(
            "channel = $10 AND due_at <= ",
            now!(),
            " AND (lease_until IS NULL OR lease_until <= ",
            now!(),
            ") AND NOT (host ",
            any_text!("$6"),
            ") AND NOT (tenant ",
            any_text!("$7"),
            ")"
        )
    };
}

/// Claims by tenants' turns, with a maximum per host and per tenant; parameters: clock, owner, lease, maximum, window, busy
/// hosts, busy tenants, maximum per host, maximum per tenant, channel.
const CLAIM: &str = concat!(
    "WITH due AS MATERIALIZED (
         SELECT id AS due_id, tenant AS due_tenant, host AS due_host, due_at AS due_since
         FROM notices WHERE ",
    claimable!(),
    " ORDER BY due_at LIMIT $5),
     of_hosts AS MATERIALIZED (
         SELECT due_id, due_tenant, due_since,
                row_number() OVER (PARTITION BY due_host ORDER BY due_since, due_id) AS host_turn
         FROM due),
     ranked AS MATERIALIZED (
         SELECT due_id, coalesce(called_at, 0) AS turn_at,
                row_number() OVER (PARTITION BY due_tenant ORDER BY due_since, due_id) AS turn
         FROM of_hosts LEFT JOIN batch_turns ON tenant = due_tenant WHERE host_turn <= $8),
     picked AS MATERIALIZED (
         SELECT notices.id AS picked_id FROM ranked JOIN notices ON notices.id = due_id
         WHERE turn <= $9 AND ",
    claimable!(),
    " ORDER BY turn, turn_at, due_id LIMIT $4",
    skip_locked!(),
    ") UPDATE notices SET epoch = epoch + 1, owner = $2, lease_until = ",
    now!(),
    " + $3 FROM picked WHERE id = picked_id RETURNING epoch, ",
    columns!()
);

fn notice(row: &Row) -> Result<Notice, StoreError> {
    let address: String = rows::get(row, "receiver")?;
    let to = match rows::get::<Option<String>>(row, "secret")? {
        Some(secret) => Receiver::Webhook { url: address, secret: WebhookSecret(secret) },
        None => Receiver::Mail(address),
    };
    let batch: Option<Uuid> = rows::get(row, "batch_id")?;
    Ok(Notice {
        id: NoticeId(rows::get(row, "id")?),
        event: rows::get(row, "event")?,
        tenant: Tenant(rows::get(row, "tenant")?),
        batch: batch.map(BatchId::of_column),
        kind: rows::word(row, "kind")?,
        created_at: rows::time(row, "created_at")?,
        to,
        subject: rows::document(row, "subject")?,
        retry_until: rows::time(row, "retry_until")?,
        delivery: Delivery {
            attempts: rows::small(row, "attempts")?,
            due_at: rows::time_or_none(row, "due_at")?,
            ended_at: rows::time_or_none(row, "ended_at")?,
            error: rows::get(row, "error")?,
        },
    })
}

fn failing(row: &Row) -> Result<FailingReceiver, StoreError> {
    Ok(FailingReceiver {
        failures: rows::small(row, "failures")?,
        failed_at: rows::time(row, "failed_at")?,
        error: rows::get(row, "error")?,
        rests_until: rows::time_or_none(row, "rests_until")?,
        gone_at: rows::time_or_none(row, "gone_at")?,
    })
}

/// Finds a receiver that failed; parameters: tenant, receiver.
const FIND_FAILING: &str =
    "SELECT failures, failed_at, error, rests_until, gone_at FROM notice_receivers
     WHERE tenant = $1 AND receiver = $2";

/// Whether so many notices of a tenant wait.
async fn has_waiting(tx: &mut Connection, tenant: &Tenant, max: u32) -> Result<bool, StoreError> {
    let count = query(
        "SELECT count(*) AS waiting FROM (
             SELECT 1 FROM notices WHERE tenant = $1 AND due_at IS NOT NULL LIMIT $2) AS found",
    );
    let found = count.bind(&tenant.0).bind(i64::from(max)).fetch_one(tx).await?;
    Ok(rows::small(&found, "waiting")? >= max)
}

/// Writes an event for its receivers, in the transaction of the change that it tells of.
pub(super) async fn add(
    store: &SqlStore,
    tx: &mut Connection,
    event: &Event,
    to: &[Receiver],
) -> Result<(), StoreError> {
    if to.is_empty() {
        return Ok(());
    }
    if let Some(max) = event.waiting_max()
        && has_waiting(&mut *tx, &event.tenant, max).await?
    {
        tracing::warn!(
            event = event.kind.as_str(),
            "too many notices of a tenant wait for this one"
        );
        return Ok(());
    }
    for receiver in to {
        add_one(store, &mut *tx, event, receiver).await?;
    }
    match event.batch() {
        Some(batch) => forget_old(tx, batch).await,
        None => Ok(()),
    }
}

/// Deletes the ended notices of a batch but for the latest.
async fn forget_old(tx: &mut Connection, batch: BatchId) -> Result<(), StoreError> {
    let forget = query(
        "DELETE FROM notices WHERE batch_id = $1 AND ended_at IS NOT NULL AND id <= (
             SELECT id FROM notices WHERE batch_id = $1 ORDER BY id DESC LIMIT 1 OFFSET $2)",
    );
    let forget = forget.bind(Uuid::from(batch)).bind(i64::from(KEPT_WITH_BATCH));
    forget.execute(tx).await.map(drop)?;
    Ok(())
}

/// Deletes the ended notices of a batch that is deleted. The others are delivered yet, as those of no batch.
pub(super) async fn leave_batch(tx: &mut Connection, batch: BatchId) -> Result<(), StoreError> {
    for statement in [
        "DELETE FROM notices WHERE batch_id = $1 AND ended_at IS NOT NULL",
        "UPDATE notices SET batch_id = NULL WHERE batch_id = $1",
    ] {
        query(statement).bind(Uuid::from(batch)).execute(&mut *tx).await?;
    }
    Ok(())
}

async fn add_one(
    store: &SqlStore,
    tx: &mut Connection,
    event: &Event,
    to: &Receiver,
) -> Result<(), StoreError> {
    let insert = concat!(
        "INSERT INTO notices (id, event, tenant, batch_id, kind, channel, receiver, host, secret,
                              subject, created_at, retry_until, due_at, ended_at, error)
         SELECT $2, $3, $4, $5, $6, $7, $8, $9, $10, ",
        as_json!("$11"),
        ", $12, ",
        now!(),
        " + $13, CASE WHEN $15 THEN NULL ELSE coalesce(CAST($14 AS bigint), 0) END,
          CASE WHEN $15 THEN ",
        now!(),
        " END, $16 WHERE true ON CONFLICT (event, receiver) DO NOTHING"
    );
    let known = query(FIND_FAILING).bind(&event.tenant.0).bind(to.address());
    let known = known.fetch_optional(&mut *tx).await?.as_ref().map(failing).transpose()?;
    let is_gone = known.as_ref().is_some_and(|known| known.gone_at.is_some());
    let secret = match to {
        Receiver::Webhook { secret, .. } => Some(secret.0.as_str()),
        Receiver::Mail(_) => None,
    };
    query(insert)
        .bind(store.clock_parameter())
        .bind(NoticeId::generate().0)
        .bind(&event.id)
        .bind(&event.tenant.0)
        .bind(event.batch().map(Uuid::from))
        .bind(event.kind.as_str())
        .bind(to.channel().as_str())
        .bind(to.address())
        .bind(to.host())
        .bind(secret)
        .bind(rows::to_json(&event.subject))
        .bind(event.at.0)
        .bind(rows::milliseconds(RETRY_FOR))
        .bind(known.as_ref().and_then(|known| known.rests_until).map(|at| at.0))
        .bind(is_gone)
        .bind(known.filter(|_| is_gone).map(|known| format!("not sent: it {}", known.error)))
        .execute(tx)
        .await?;
    Ok(())
}

/// What the result of an attempt changes for what else waits for its receiver.
enum Rest {
    /// Nothing.
    Unchanged,
    /// It is due now: the receiver is back.
    Due,
    /// It is not due before.
    Until(Timestamp),
    /// It ends with this error: the receiver is gone.
    Ended(String),
}

/// Writes what a result says of the receiver. This locks the receiver, before any notice of it is.
async fn judge(
    tx: &mut Connection,
    notice: &Notice,
    outcome: &Outcome,
    now: Timestamp,
) -> Result<Rest, StoreError> {
    let (tenant, address) = (&notice.tenant.0, notice.to.address());
    let Some(error) = outcome.error() else {
        let forget =
            "DELETE FROM notice_receivers WHERE tenant = $1 AND receiver = $2 RETURNING failures";
        let known = query(forget).bind(tenant).bind(address).fetch_optional(tx).await?;
        return Ok(if known.is_some() { Rest::Due } else { Rest::Unchanged });
    };
    let count = "INSERT INTO notice_receivers (tenant, receiver, failures, failed_at, error)
                 VALUES ($1, $2, 1, $3, $4) ON CONFLICT (tenant, receiver) DO UPDATE SET
                     failures = notice_receivers.failures + 1, failed_at = excluded.failed_at,
                     error = excluded.error RETURNING failures";
    let count = query(count).bind(tenant).bind(address).bind(now.0).bind(error);
    let failures = rows::small(&count.fetch_one(&mut *tx).await?, "failures")?;
    let (set, at, rest) = match (outcome, rest_after(failures)) {
        (Outcome::Gone(_), _) => (
            "UPDATE notice_receivers SET gone_at = $3 WHERE tenant = $1 AND receiver = $2",
            now,
            Rest::Ended(format!("not sent: it {error}")),
        ),
        (_, Some(rest)) => (
            "UPDATE notice_receivers SET rests_until = $3 WHERE tenant = $1 AND receiver = $2",
            now.after(rest),
            Rest::Until(now.after(rest)),
        ),
        (_, None) => return Ok(Rest::Unchanged),
    };
    query(set).bind(tenant).bind(address).bind(at.0).execute(tx).await?;
    Ok(rest)
}

/// Changes what else waits for the receiver of a notice.
async fn change_waiting(
    tx: &mut Connection,
    notice: &Notice,
    rest: Rest,
    now: Timestamp,
) -> Result<(), StoreError> {
    let (statement, at, error) = match rest {
        Rest::Unchanged => return Ok(()),
        Rest::Due => (
            "UPDATE notices SET due_at = $3 WHERE tenant = $1 AND receiver = $2 AND due_at > $3",
            now,
            None,
        ),
        Rest::Until(at) => (
            "UPDATE notices SET due_at = $3 WHERE tenant = $1 AND receiver = $2 AND due_at < $3",
            at,
            None,
        ),
        Rest::Ended(error) => (
            "UPDATE notices SET due_at = NULL, ended_at = $3, error = $4
             WHERE tenant = $1 AND receiver = $2 AND due_at IS NOT NULL",
            now,
            Some(error),
        ),
    };
    let change = query(statement).bind(&notice.tenant.0).bind(notice.to.address()).bind(at.0);
    let change = if error.is_some() { change.bind(error) } else { change };
    change.execute(tx).await?;
    Ok(())
}

/// Forgets the failures of a receiver.
pub(super) async fn forget_failures(
    store: &SqlStore,
    tenant: &Tenant,
    address: &str,
) -> Result<(), StoreError> {
    let forget = query("DELETE FROM notice_receivers WHERE tenant = $1 AND receiver = $2");
    store.execute(forget.bind(&tenant.0).bind(address)).await.map(drop)
}

#[async_trait]
impl Notices for SqlStore {
    async fn add_event(&self, event: &Event, to: &[Receiver]) -> Result<(), StoreError> {
        storable("tenant", &event.tenant.0)?;
        self.within(async {
            let mut tx = self.begin().await?;
            add(self, &mut tx, event, to).await?;
            tx.commit().await?;
            Ok(())
        })
        .await
    }

    async fn claim_notices(
        &self,
        channel: Channel,
        by: Claimant<'_>,
        bounds: NoticeBounds<'_>,
    ) -> Result<Vec<NoticeClaim>, StoreError> {
        let name = |tenant: &Tenant| tenant.0.clone();
        let tenants: Vec<String> = bounds.busy_tenants.iter().map(name).collect();
        let claim = query(CLAIM)
            .bind(self.clock_parameter())
            .bind(by.owner)
            .bind(rows::milliseconds(by.lease))
            .bind(i64::from(bounds.max))
            .bind(i64::from(CLAIM_WINDOW))
            .bind(text_list(bounds.busy_hosts))
            .bind(text_list(&tenants))
            .bind(i64::from(bounds.per_host))
            .bind(i64::from(bounds.per_tenant))
            .bind(channel.as_str());
        let claimed = self.fetch_all(claim).await?;
        if claimed.is_empty() {
            return Ok(Vec::new());
        }
        let ids: Vec<JobId> = rows::ids(&claimed)?;
        let turn =
            query(batch_claims::NOTICE_TURNS).bind(self.clock_parameter()).bind(id_list(ids));
        // Only the order of the next claims depends on it.
        if let Err(error) = self.execute(turn).await {
            tracing::debug!(%error, "cannot record the turns of tenants");
        }
        let mut claims = Vec::with_capacity(claimed.len());
        for row in &claimed {
            match notice(row) {
                Ok(notice) => {
                    claims.push(NoticeClaim { notice, epoch: rows::integer(row, "epoch")? });
                }
                // Of a later release, which may read it: it is claimed again when its lease is over.
                Err(error) => tracing::error!(%error, "a claimed notice cannot be read"),
            }
        }
        Ok(claims)
    }

    async fn end_attempt(
        &self,
        claim: &NoticeClaim,
        outcome: &Outcome,
    ) -> Result<bool, StoreError> {
        let now = Store::now(self).await?;
        let outcome = &outcome.clone().storable();
        let notice = claim.notice.clone().after(outcome, now);
        let end = "UPDATE notices SET attempts = $3, due_at = $4, ended_at = $5, error = $6, owner = NULL,
                          lease_until = NULL, epoch = epoch + 1 WHERE id = $1 AND epoch = $2";
        self.within(async {
            let mut tx = self.begin().await?;
            let rest = judge(&mut tx, &notice, outcome, now).await?;
            let Delivery { attempts, due_at, ended_at, error } = &notice.delivery;
            let ended = query(end)
                .bind(notice.id.0)
                .bind(claim.epoch)
                .bind(i64::from(*attempts))
                .bind(due_at.map(|at| at.0))
                .bind(ended_at.map(|at| at.0))
                .bind(error.as_deref())
                .execute(&mut *tx)
                .await?;
            if ended.rows_affected() == 0 {
                return Ok(false);
            }
            change_waiting(&mut tx, &notice, rest, now).await?;
            tx.commit().await?;
            Ok(true)
        })
        .await
    }

    async fn notices(
        &self,
        filter: &NoticeFilter,
        page: Page<NoticeId>,
    ) -> Result<Vec<Notice>, StoreError> {
        /// The statement that lists in one direction.
        macro_rules! listed {
            ($beyond:literal, $order:literal) => {
                concat!(
                    "SELECT ",
                    columns!(),
                    " FROM notices WHERE ($1 IS NULL OR tenant = $1) AND ($2 IS NULL OR batch_id = $2)
                       AND ($3 IS NULL OR id ",
                    $beyond,
                    " $3) ORDER BY id ",
                    $order,
                    " LIMIT $4"
                )
            };
        }
        let found = query(match page.ascending {
            true => listed!(">", "ASC"),
            false => listed!("<", "DESC"),
        });
        let found = found
            .bind(filter.tenant.as_ref().map(|tenant| &tenant.0))
            .bind(filter.batch.map(Uuid::from))
            .bind(page.after.map(Uuid::from))
            .bind(i64::from(page.limit));
        self.fetch_all(found).await?.iter().map(notice).collect()
    }

    async fn redeliver_notice(
        &self,
        tenant: Option<&Tenant>,
        id: NoticeId,
    ) -> Result<Option<Notice>, StoreError> {
        let again = concat!(
            "UPDATE notices SET attempts = 0, due_at = ",
            now!(),
            ", ended_at = NULL, error = NULL, owner = NULL, lease_until = NULL, epoch = epoch + 1,
               retry_until = ",
            now!(),
            " + $4 WHERE id = $2 AND ($3 IS NULL OR tenant = $3) RETURNING ",
            columns!()
        );
        let again = query(again)
            .bind(self.clock_parameter())
            .bind(id.0)
            .bind(tenant.map(|tenant| &tenant.0))
            .bind(rows::milliseconds(RETRY_FOR));
        let Some(row) = self.fetch_optional(again).await? else { return Ok(None) };
        let notice = notice(&row)?;
        forget_failures(self, &notice.tenant, notice.to.address()).await?;
        Ok(Some(notice))
    }

    async fn failing_receiver(
        &self,
        tenant: &Tenant,
        address: &str,
    ) -> Result<Option<FailingReceiver>, StoreError> {
        let found = query(FIND_FAILING).bind(&tenant.0).bind(address);
        self.fetch_optional(found).await?.as_ref().map(failing).transpose()
    }

    async fn count_notices(&self) -> Result<NoticeCounts, StoreError> {
        let counted = query(concat!(
            "SELECT count(*) AS pending, min(created_at) AS oldest,
                    (SELECT count(*) FROM notice_receivers) AS failing,
                    (SELECT count(*) FROM notice_receivers
                     WHERE gone_at IS NOT NULL OR rests_until > ",
            now!(),
            ") AS resting FROM notices WHERE due_at IS NOT NULL"
        ));
        let counted = counted.bind(self.clock_parameter());
        let row = self.fetch_one(counted).await?;
        Ok(NoticeCounts {
            pending: rows::count(&row, "pending")?,
            oldest: rows::time_or_none(&row, "oldest")?,
            failing: rows::count(&row, "failing")?,
            resting: rows::count(&row, "resting")?,
        })
    }

    async fn sweep_notices(&self) -> Result<(), StoreError> {
        let untried = concat!(
            "UPDATE notices SET due_at = NULL, ended_at = ",
            now!(),
            ", error = coalesce(error, $2) WHERE due_at IS NOT NULL AND retry_until < ",
            now!(),
            " - $3"
        );
        let untried = query(untried).bind(self.clock_parameter()).bind(UNTRIED);
        self.execute(untried.bind(rows::milliseconds(RETRY_FOR))).await?;
        /// Deletes old rows; parameters: clock, age, number.
        macro_rules! delete_old {
            ($table:literal, $key:literal, $since:literal) => {
                concat!(
                    "DELETE FROM ",
                    $table,
                    " WHERE (",
                    $key,
                    ") IN (SELECT ",
                    $key,
                    " FROM ",
                    $table,
                    " WHERE ",
                    $since,
                    " < ",
                    now!(),
                    " - $2 LIMIT $3)"
                )
            };
        }
        for (old, kept) in [
            (delete_old!("notices", "id", "batch_id IS NULL AND ended_at"), KEPT),
            (delete_old!("notice_receivers", "tenant, receiver", "failed_at"), FAILURES_KEPT),
        ] {
            let old = || {
                let old = query(old).bind(self.clock_parameter());
                self.execute(old.bind(rows::milliseconds(kept)).bind(SWEEP_CHUNK))
            };
            while old().await? > 0 {}
        }
        Ok(())
    }
}
