//! Keys, sessions and the audit log, which are in the first database, and queries about jobs.

use std::time::Duration;

use async_trait::async_trait;
use uuid::Uuid;

use super::{Databases, merge};
use crate::{
    job::{JobId, QueueName},
    store::{
        ApiKey, Audit, JobFilter, JobQueries, Keys, Page, Sessions, StoreError,
        audit::AuditEntry,
        job_queries::{Count, DeadLetterGroups, JobHistory, JobPage, SCAN_MAX},
        keys::KeyHash,
    },
};

#[async_trait]
impl Keys for Databases {
    async fn add_key(&self, key: &ApiKey, hash: &KeyHash) -> Result<(), StoreError> {
        self.first().add_key(key, hash).await
    }

    async fn add_first_key(&self, key: &ApiKey, hash: &KeyHash) -> Result<bool, StoreError> {
        self.first().add_first_key(key, hash).await
    }

    async fn key(&self, hash: &KeyHash) -> Result<Option<ApiKey>, StoreError> {
        self.first().key(hash).await
    }

    async fn keys(&self) -> Result<Vec<ApiKey>, StoreError> {
        self.first().keys().await
    }

    async fn revoke_key(&self, id: Uuid) -> Result<bool, StoreError> {
        self.first().revoke_key(id).await
    }
}

#[async_trait]
impl Sessions for Databases {
    async fn add_session(
        &self,
        hash: &KeyHash,
        key: Uuid,
        lifetime: Duration,
    ) -> Result<(), StoreError> {
        self.first().add_session(hash, key, lifetime).await
    }

    async fn session(&self, hash: &KeyHash) -> Result<Option<ApiKey>, StoreError> {
        self.first().session(hash).await
    }

    async fn end_session(&self, hash: &KeyHash) -> Result<(), StoreError> {
        self.first().end_session(hash).await
    }
}

#[async_trait]
impl Audit for Databases {
    async fn record_audit(&self, entry: &AuditEntry) -> Result<(), StoreError> {
        self.first().record_audit(entry).await
    }

    async fn audit_log(&self, page: Page<Uuid>) -> Result<Vec<AuditEntry>, StoreError> {
        self.first().audit_log(page).await
    }
}

#[async_trait]
impl JobQueries for Databases {
    async fn jobs(&self, filter: &JobFilter, page: Page<JobId>) -> Result<JobPage, StoreError> {
        let pages = self.each(|store| store.jobs(filter, page)).await?;
        Ok(merge::jobs(pages, page.limit))
    }

    async fn count_jobs(&self, filter: &JobFilter) -> Result<Count, StoreError> {
        let counts = self.each(|store| store.count_jobs(filter)).await?;
        let jobs = counts.iter().map(|count| count.jobs).sum::<u64>();
        let most = u64::from(SCAN_MAX);
        let or_more = jobs > most || counts.iter().any(|count| count.or_more);
        Ok(Count { jobs: jobs.min(most), or_more })
    }

    async fn job_history(&self, id: JobId) -> Result<Option<JobHistory>, StoreError> {
        match self.get(id.database()) {
            Some(store) => store.job_history(id).await,
            None => Ok(None),
        }
    }

    async fn dead_letter_groups(
        &self,
        queue: Option<&QueueName>,
    ) -> Result<DeadLetterGroups, StoreError> {
        Ok(merge::groups(self.each(|store| store.dead_letter_groups(queue)).await?))
    }
}
