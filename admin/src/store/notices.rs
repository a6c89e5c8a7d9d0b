//! Notices: events that receivers are told of, and how far each is delivered.
//!
//! This is an outbox. A notice is written in the transaction of the change that it tells of, once for each receiver, so it
//! is neither lost nor made up. Its event has an id that no other event has and a second writer gives it too, so a
//! repeated write adds nothing. The process that delivers it claims it with a lease and an epoch, calls the receiver once,
//! and writes the result with the time of the next attempt: delivered at least once, under one id.
//!
//! Attempts go on for a day, at growing distances. A receiver that failed [`REST_FROM`] times in a row rests: for a while that
//! doubles with each further failure, none of its tenant's notices is due. One that answered 410 Gone gets no
//! more, until its notice is [delivered again](Notices::redeliver_notice) on request or its URL is set anew.

use std::{fmt, str::FromStr, time::Duration};

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use tritmill_queue::{Claimant, StoreError, Tenant, Timestamp, job::UnknownWord, store::Page};
use uuid::Uuid;

use super::{
    batches::{Batch, BatchId},
    events::{Event, NoticeKind, Subject},
    files::prefixed,
    webhooks::{WebhookSecret, host_of},
};

/// How long delivery of an event is tried.
pub const RETRY_FOR: Duration = Duration::from_secs(86_400);
/// Delays before the second attempt and the following ones, in seconds; the last one goes on.
pub const RETRY_DELAYS_S: [u64; 9] = [1, 5, 30, 120, 600, 1800, 3600, 7200, 14_400];
/// Failures in a row from which a receiver rests.
pub const REST_FROM: u32 = 5;
/// The first rest, and the longest.
const REST_S: (u64, u64) = (60, 3600);
/// Most letters of an error that are kept.
const ERROR_LETTERS_MAX: usize = 500;
/// Ended notices of a batch that are kept with it, the latest.
pub const KEPT_WITH_BATCH: u32 = 100;
/// How long an ended notice of no batch is kept: it says that its receiver was told of a budget, in this month or the one
/// before.
pub const KEPT: Duration = Duration::from_secs(70 * 86_400);
/// How long after the last failure of a receiver it is known.
pub const FAILURES_KEPT: Duration = Duration::from_secs(30 * 86_400);

/// Identifier of a notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NoticeId(pub(super) Uuid);

impl NoticeId {
    /// Generates a new id.
    pub fn generate() -> Self {
        Self(Uuid::now_v7())
    }
}

impl From<NoticeId> for Uuid {
    fn from(id: NoticeId) -> Self {
        id.0
    }
}

impl fmt::Display for NoticeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "notice_{}", self.0.as_simple())
    }
}

impl FromStr for NoticeId {
    type Err = UnknownWord;

    fn from_str(text: &str) -> Result<Self, UnknownWord> {
        let found = prefixed(text, "notice_").map(Self);
        found.ok_or_else(|| UnknownWord { what: "notice", word: text.to_owned() })
    }
}

/// Who is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Receiver {
    /// A webhook.
    Webhook {
        /// URL to call.
        url: String,
        /// Key of the signatures.
        secret: WebhookSecret,
    },
    /// A mail address.
    Mail(String),
}

/// The two ways of delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Channel {
    /// A signed call.
    Webhook,
    /// A mail.
    Mail,
}

impl Channel {
    /// Returns the name in stores and on the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Webhook => "webhook",
            Self::Mail => "mail",
        }
    }
}

impl Receiver {
    /// Returns the way of delivery.
    pub fn channel(&self) -> Channel {
        match self {
            Self::Webhook { .. } => Channel::Webhook,
            Self::Mail(_) => Channel::Mail,
        }
    }

    /// Returns the URL or the mail address.
    pub fn address(&self) -> &str {
        match self {
            Self::Webhook { url, .. } => url,
            Self::Mail(address) => address,
        }
    }

    /// Returns the host, by which calls are shared out.
    pub fn host(&self) -> String {
        match self {
            Self::Webhook { url, .. } => host_of(url),
            Self::Mail(address) => {
                address.rsplit_once('@').map_or("", |(_, host)| host).to_lowercase()
            }
        }
    }
}

/// How far a notice is delivered.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Delivery {
    /// Attempts so far.
    pub attempts: u32,
    /// Time of the next attempt; `None` when delivery has ended.
    pub due_at: Option<Timestamp>,
    /// Time at which it ended, successfully or not.
    pub ended_at: Option<Timestamp>,
    /// Error of the last attempt.
    pub error: Option<String>,
}

impl Delivery {
    /// Returns the state as the API says it.
    pub fn state(&self) -> &'static str {
        match (self.ended_at, &self.error) {
            (None, _) => "pending",
            (Some(_), None) => "delivered",
            (Some(_), Some(_)) => "failed",
        }
    }

    /// Returns it after an attempt. `delay` is that of the next one.
    fn after(&self, outcome: &Outcome, (now, retry_until): (Timestamp, Timestamp)) -> Self {
        let delay = RETRY_DELAYS_S.get(self.attempts as usize);
        let delay = delay.unwrap_or(&RETRY_DELAYS_S[RETRY_DELAYS_S.len() - 1]);
        let attempts = self.attempts.saturating_add(1);
        let ended = |error| Self { attempts, due_at: None, ended_at: Some(now), error };
        match outcome {
            Outcome::Delivered => ended(None),
            Outcome::Gone(error) | Outcome::Refused(error) => ended(Some(error.clone())),
            Outcome::Failed(error) if now >= retry_until => ended(Some(error.clone())),
            Outcome::Failed(error) => {
                let due = now.after(jittered(*delay)).min(retry_until);
                Self { attempts, due_at: Some(due), ended_at: None, error: Some(error.clone()) }
            }
        }
    }
}

/// Result of an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The receiver has it.
    Delivered,
    /// It may succeed later.
    Failed(String),
    /// It never succeeds; other notices may.
    Refused(String),
    /// The receiver wants no more.
    Gone(String),
}

impl Outcome {
    /// Returns it with an error that every store can keep: a server may send any text.
    pub(super) fn storable(self) -> Self {
        let kept = |error: String| {
            let letters = error.chars().take(ERROR_LETTERS_MAX);
            letters.map(|letter| if letter.is_control() { ' ' } else { letter }).collect()
        };
        match self {
            Self::Delivered => Self::Delivered,
            Self::Failed(error) => Self::Failed(kept(error)),
            Self::Refused(error) => Self::Refused(kept(error)),
            Self::Gone(error) => Self::Gone(kept(error)),
        }
    }

    /// Returns the error.
    pub fn error(&self) -> Option<&str> {
        match self {
            Self::Delivered => None,
            Self::Failed(error) | Self::Refused(error) | Self::Gone(error) => Some(error),
        }
    }
}

/// Returns a time within a fifth of this one, at random.
fn jittered(seconds: u64) -> Duration {
    let mut random = [0_u8; 2];
    // Without it, receivers are called at the same distances.
    let _ = getrandom::fill(&mut random);
    let part = f64::from(u16::from_le_bytes(random)) / f64::from(u16::MAX);
    Duration::from_secs(seconds).mul_f64(0.8 + 0.4 * part)
}

/// Returns how long a receiver rests after so many failures in a row.
pub(super) fn rest_after(failures: u32) -> Option<Duration> {
    let doublings = failures.checked_sub(REST_FROM)?;
    let seconds = REST_S.0.saturating_mul(1 << doublings.min(16)).min(REST_S.1);
    Some(jittered(seconds))
}

/// An event for a receiver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// Its identifier.
    pub id: NoticeId,
    /// Identifier of the event: the same for every receiver and attempt.
    pub event: String,
    /// Its tenant.
    pub tenant: Tenant,
    /// The batch that it is about.
    pub batch: Option<BatchId>,
    /// What happened.
    pub kind: NoticeKind,
    /// Time of the event.
    pub created_at: Timestamp,
    /// Who is told.
    pub to: Receiver,
    /// What it is about.
    pub subject: Subject,
    /// Time from which no further attempt is made.
    pub retry_until: Timestamp,
    /// How far it is delivered.
    pub delivery: Delivery,
}

impl Notice {
    /// Returns it after an attempt.
    pub(super) fn after(self, outcome: &Outcome, now: Timestamp) -> Self {
        let delivery = self.delivery.after(outcome, (now, self.retry_until));
        Self { delivery, ..self }
    }
}

impl Batch {
    /// Returns who is told of an event of it.
    pub fn receivers(&self, kind: NoticeKind) -> Vec<Receiver> {
        let webhook = self.webhook.iter().filter(|webhook| webhook.wants(kind));
        let webhook = webhook.map(|webhook| Receiver::Webhook {
            url: webhook.url.clone(),
            secret: webhook.secret.clone(),
        });
        webhook.chain(self.mail_to.iter().cloned().map(Receiver::Mail)).collect()
    }
}

/// A claimed notice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NoticeClaim {
    /// The notice as it was claimed.
    pub notice: Notice,
    /// The epoch of the claim.
    pub epoch: i64,
}

/// Bounds of a claim of notices.
#[derive(Debug, Clone, Copy)]
pub struct NoticeBounds<'a> {
    /// Maximum number of notices.
    pub max: u32,
    /// Maximum number of notices for the same host.
    pub per_host: u32,
    /// Maximum number of notices of the same tenant.
    pub per_tenant: u32,
    /// Hosts for which no notice is claimed.
    pub busy_hosts: &'a [String],
    /// Tenants of which no notice is claimed.
    pub busy_tenants: &'a [Tenant],
}

/// Conditions on notices. All given conditions must hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NoticeFilter {
    /// Their tenant.
    pub tenant: Option<Tenant>,
    /// The batch that they are about.
    pub batch: Option<BatchId>,
}

/// A receiver that failed at the last attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailingReceiver {
    /// Failures in a row.
    pub failures: u32,
    /// Time of the last one.
    pub failed_at: Timestamp,
    /// The last error.
    pub error: String,
    /// Time until which it is left alone.
    pub rests_until: Option<Timestamp>,
    /// Since when it wants no more.
    pub gone_at: Option<Timestamp>,
}

/// Numbers for the metrics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NoticeCounts {
    /// Notices that wait for an attempt.
    pub pending: u64,
    /// The earliest event of these.
    pub oldest: Option<Timestamp>,
    /// Receivers that failed at the last attempt.
    pub failing: u64,
    /// Those of them that are left alone or want no more.
    pub resting: u64,
}

/// Notices in a store.
#[async_trait]
pub trait Notices: Send + Sync {
    /// Writes an event for its receivers. Those that know it are not told again.
    async fn add_event(&self, event: &Event, to: &[Receiver]) -> Result<(), StoreError>;

    /// Claims due notices of a channel. The tenant that was served least recently comes first; of a tenant's notices,
    /// the earliest due.
    async fn claim_notices(
        &self,
        channel: Channel,
        by: Claimant<'_>,
        bounds: NoticeBounds<'_>,
    ) -> Result<Vec<NoticeClaim>, StoreError>;

    /// Writes the result of an attempt and ends the claim; with a failure, it counts against the receiver, which may rest from
    /// then on. Returns false and writes nothing if the claim has ended.
    async fn end_attempt(&self, claim: &NoticeClaim, outcome: &Outcome)
    -> Result<bool, StoreError>;

    /// Returns notices, the latest first unless the page says otherwise.
    async fn notices(
        &self,
        filter: &NoticeFilter,
        page: Page<NoticeId>,
    ) -> Result<Vec<Notice>, StoreError>;

    /// Makes a notice due now, for another day, and lets its receiver rest no more, though it was gone. Returns
    /// `None` if the tenant (with `None` any tenant) has no such notice.
    async fn redeliver_notice(
        &self,
        tenant: Option<&Tenant>,
        id: NoticeId,
    ) -> Result<Option<Notice>, StoreError>;

    /// Returns what is known of a receiver that failed at the last attempt.
    async fn failing_receiver(
        &self,
        tenant: &Tenant,
        address: &str,
    ) -> Result<Option<FailingReceiver>, StoreError>;

    /// Counts what waits and who fails.
    async fn count_notices(&self) -> Result<NoticeCounts, StoreError>;

    /// Deletes notices of no batch that ended [long ago](KEPT), and ends those that nothing delivers any more.
    async fn sweep_notices(&self) -> Result<(), StoreError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp(1_000_000);

    fn failed() -> Outcome {
        Outcome::Failed("answered 500".to_owned())
    }

    #[test]
    fn failed_attempts_are_repeated_at_growing_distances_for_a_day() {
        let until = NOW.after(RETRY_FOR);
        let (mut delivery, mut now, mut waits) = (Delivery::default(), NOW, Vec::new());
        while delivery.ended_at.is_none() {
            delivery = delivery.after(&failed(), (now, until));
            assert_eq!(delivery.error.as_deref(), Some("answered 500"));
            let Some(due) = delivery.due_at else { break };
            waits.push(due.since(now).as_secs_f64());
            now = due;
        }
        assert_eq!(now, until, "the last attempt is a day after the event");
        assert_eq!((delivery.ended_at, delivery.state()), (Some(until), "failed"));
        for (wait, delay) in waits.iter().zip(RETRY_DELAYS_S) {
            let range = delay as f64 * 0.79..delay as f64 * 1.21;
            assert!(range.contains(wait), "{wait} s instead of {delay} s");
        }
        assert!(waits.len() > RETRY_DELAYS_S.len() && waits.len() < 20, "{waits:?}");
    }

    #[test]
    fn delivered_refused_and_unwanted_notices_end_at_once() {
        let end = |outcome| Delivery::default().after(&outcome, (NOW, NOW.after(RETRY_FOR)));
        let delivered = end(Outcome::Delivered);
        assert_eq!(
            (delivered.state(), delivered.attempts, delivered.due_at),
            ("delivered", 1, None)
        );
        for outcome in [Outcome::Gone("answered 410".into()), Outcome::Refused("no".into())] {
            assert_eq!(end(outcome).state(), "failed");
        }
    }

    #[test]
    fn errors_have_no_letters_that_a_store_refuses() {
        let outcome = Outcome::Failed(format!("550\0no\r\n{}", "x".repeat(1000))).storable();
        let error = outcome.error().expect("an error");
        assert!(error.starts_with("550 no  x") && error.len() == ERROR_LETTERS_MAX, "{error}");
    }

    #[test]
    fn receiver_rests_longer_with_each_failure_up_to_an_hour() {
        assert_eq!(rest_after(REST_FROM - 1), None);
        for (failures, seconds) in [(5, 60.0), (6, 120.0), (7, 240.0), (11, 3600.0), (4000, 3600.0)]
        {
            let rest = rest_after(failures).expect("it rests").as_secs_f64();
            assert!((seconds * 0.79..seconds * 1.21).contains(&rest), "{failures}: {rest} s");
        }
    }

    #[test]
    fn id_of_a_notice_has_one_form() {
        let id = NoticeId::generate();
        assert_eq!(id.to_string().parse::<NoticeId>().expect("its own text"), id);
        assert!("notice_".parse::<NoticeId>().is_err());
    }
}
