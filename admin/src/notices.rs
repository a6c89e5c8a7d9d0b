//! [`Notifier`]: delivers notices of events by webhook and by mail, and looks for budgets that were reached.
//!
//! Due notices are claimed from the store with a lease, round the tenants, for one attempt each; the result is
//! written under the claim's epoch, with the time of the next attempt. A host or a tenant has a few attempts at once, so
//! that one that does not answer delays no others, and each channel has its own. If a process dies in between, the
//! attempt is made again, by this process or another: a receiver is told at least once, each time under the same id.

mod budgets;
pub(crate) mod mail;
mod payload;
pub(crate) mod signature;
mod webhooks;

use std::{collections::HashMap, time::Duration};

use tokio::{
    sync::watch,
    task::{Id, JoinError, JoinSet},
    time::{Instant, sleep},
};
use tritmill_client::http::{BadCertificates, HttpClient};
use tritmill_queue::{Tenant, store::Claimant};

use self::{budgets::BudgetLook, mail::Mailer};
use crate::{
    App,
    store::notices::{Channel, Notice, NoticeBounds, NoticeClaim, Outcome},
};

/// Most notices for a host that are claimed while none of its attempts runs.
const HOST_MAX: u32 = 2;
/// Most notices of a tenant that are claimed at once, while fewer of its attempts run.
const TENANT_MAX: u32 = 4;
/// Pause between two claims.
const POLL: Duration = Duration::from_secs(1);
/// Pause between two looks at the budgets.
const LOOK: Duration = Duration::from_secs(5);
/// Pause between two sweeps of ended notices.
const SWEEP: Duration = Duration::from_secs(3600);

/// How a channel delivers.
#[derive(Clone)]
enum Means {
    Webhook(HttpClient),
    Mail(Box<Mailer>),
}

impl Means {
    fn channel(&self) -> Channel {
        match self {
            Self::Webhook(_) => Channel::Webhook,
            Self::Mail(_) => Channel::Mail,
        }
    }

    /// Most attempts at once.
    fn attempts_max(&self) -> usize {
        match self {
            Self::Webhook(_) => 32,
            Self::Mail(_) => 4,
        }
    }

    /// Time limit of an attempt, including the connection. A mail server may keep strangers waiting.
    fn within(&self) -> Duration {
        match self {
            Self::Webhook(_) => Duration::from_secs(5),
            Self::Mail(_) => Duration::from_secs(30),
        }
    }

    /// Lease of a claimed notice: longer than an attempt and its two calls of the store.
    fn lease(&self) -> Duration {
        self.within() + Duration::from_secs(10)
    }

    async fn attempt(&self, app: &App, notice: &Notice) -> Outcome {
        match self {
            Self::Webhook(client) => webhooks::call(app, client, notice, self.within()).await,
            Self::Mail(mailer) => mailer.send(app, notice, self.within()).await,
        }
    }
}

/// Tells receivers what happened.
pub struct Notifier {
    app: App,
    owner: String,
    client: HttpClient,
}

impl Notifier {
    /// A notifier of a service; `owner` names its process, for people.
    ///
    /// # Errors
    /// If the system's root certificates cannot be loaded.
    pub fn new(app: App, owner: String) -> Result<Self, BadCertificates> {
        let client = HttpClient::new(app.limits.webhook_addresses, None)?;
        Ok(Self { app, owner, client })
    }

    /// Runs until `stop` is true or its sender is dropped.
    pub async fn run(self, stop: watch::Receiver<bool>) {
        let Self { app, owner, client } = self;
        let sender = |means| Sender {
            app: app.clone(),
            owner: owner.clone(),
            means,
            attempts: JoinSet::new(),
            running: HashMap::new(),
        };
        let webhooks = sender(Means::Webhook(client)).run(stop.clone());
        let mails = app.mailer.clone().map(|mailer| sender(Means::Mail(Box::new(mailer))));
        let mails = async {
            if let Some(mails) = mails {
                mails.run(stop.clone()).await;
            }
        };
        tokio::join!(webhooks, mails, keep_house(app.clone(), stop.clone()));
    }
}

/// Looks for budgets that were reached, and deletes old notices.
async fn keep_house(app: App, mut stop: watch::Receiver<bool>) {
    let (mut look, mut sweep_at) = (BudgetLook::default(), Instant::now());
    loop {
        if let Err(error) = look.tell(&app).await {
            tracing::warn!(%error, "cannot look at the budgets, trying again");
        }
        if sweep_at <= Instant::now() {
            sweep_at = Instant::now() + SWEEP;
            if let Err(error) = app.store.sweep_notices().await {
                tracing::warn!(%error, "cannot sweep notices, trying again in an hour");
            }
        }
        tokio::select! {
            _ = stop.wait_for(|stop| *stop) => return,
            () = sleep(LOOK) => {}
        }
    }
}

/// Delivers the notices of a channel.
struct Sender {
    app: App,
    owner: String,
    means: Means,
    attempts: JoinSet<()>,
    /// Host and tenant of each running attempt.
    running: HashMap<Id, (String, Tenant)>,
}

impl Sender {
    async fn run(mut self, mut stop: watch::Receiver<bool>) {
        let app = self.app.clone();
        loop {
            while let Some(ended) = self.attempts.try_join_next_with_id() {
                self.attempt_ended(ended);
            }
            let claimed = self.begin_attempts().await;
            tokio::select! {
                _ = stop.wait_for(|stop| *stop) => break,
                // The host and the tenant of an ended attempt may have more.
                Some(ended) = self.attempts.join_next_with_id() => self.attempt_ended(ended),
                () = app.notice_due.notified() => {}
                () = sleep(POLL), if claimed == 0 => {}
                // Excluding what runs now, there may be others.
                () = std::future::ready(()), if claimed > 0 => {}
            }
        }
        // Attempts are bounded in time; one without a written result is repeated.
        while self.attempts.join_next().await.is_some() {}
    }

    fn attempt_ended(&mut self, ended: Result<(Id, ()), JoinError>) {
        let id = ended.map_or_else(|error| error.id(), |(id, ())| id);
        self.running.remove(&id);
    }

    /// Claims due notices and begins their attempts; returns how many.
    async fn begin_attempts(&mut self) -> usize {
        let room = self.means.attempts_max().saturating_sub(self.attempts.len());
        if room == 0 {
            return 0;
        }
        let busy_hosts: Vec<String> = self.running.values().map(|(host, _)| host.clone()).collect();
        let of = |tenant: &Tenant| self.running.values().filter(|(_, one)| one == tenant).count();
        let mut busy_tenants: Vec<Tenant> =
            self.running.values().map(|(_, one)| one.clone()).collect();
        busy_tenants.retain(|tenant| of(tenant) >= TENANT_MAX as usize);
        let bounds = NoticeBounds {
            max: room as u32,
            per_host: HOST_MAX,
            per_tenant: TENANT_MAX,
            busy_hosts: &busy_hosts,
            busy_tenants: &busy_tenants,
        };
        let by = Claimant::new(&self.owner, self.means.lease());
        let claimed = self.app.store.claim_notices(self.means.channel(), by, bounds).await;
        let claimed = claimed.unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot claim notices, trying again");
            Vec::new()
        });
        let count = claimed.len();
        for claim in claimed {
            let (host, tenant) = (claim.notice.to.host(), claim.notice.tenant.clone());
            let attempt = deliver(self.app.clone(), self.means.clone(), claim);
            let attempt = self.attempts.spawn(attempt);
            self.running.insert(attempt.id(), (host, tenant));
        }
        count
    }
}

/// Tells a receiver once and records the result.
async fn deliver(app: App, means: Means, claim: NoticeClaim) {
    let outcome = means.attempt(&app, &claim.notice).await;
    app.metrics.count_notice(means.channel(), &outcome);
    let (notice, event) = (claim.notice.id, claim.notice.kind.as_str());
    match outcome {
        Outcome::Delivered => tracing::info!(%notice, event, "notice delivered"),
        // Without the error: it may quote the URL, which may contain a password.
        _ => tracing::info!(%notice, event, "an attempt to deliver a notice failed"),
    }
    match app.store.end_attempt(&claim, &outcome).await {
        Ok(true) => {}
        Ok(false) => tracing::info!(%notice, "the notice was claimed by another process"),
        Err(error) => {
            tracing::warn!(%notice, %error, "cannot record an attempt, it is made again later");
        }
    }
}
