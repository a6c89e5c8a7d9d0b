//! Files and batches over several databases.

use async_trait::async_trait;

use super::{Databases, merge};
use crate::{
    job::{Tenant, Timestamp},
    store::{
        Batch, BatchId, Batches, FileId, Files, Page, PostgresStore, Progress, StoreError,
        batches::{BatchFilter, CancelledJobs, Creation, FinishedLine},
        files::{FileDeletion, FilePurpose, StoredFile},
    },
};

impl Databases {
    /// Returns the number of a tenant's batches that the databases other than one count.
    pub(super) async fn batches_elsewhere<'a, F>(
        &'a self,
        home: &'a PostgresStore,
        count: impl Fn(&'a PostgresStore) -> F + Send + Sync,
    ) -> Result<u32, StoreError>
    where
        F: Future<Output = Result<u32, StoreError>> + Send,
    {
        let count = &count;
        let counts = self.each(|store| async move {
            if std::ptr::eq(store, home) { Ok(0) } else { count(store).await }
        });
        Ok(counts.await?.into_iter().fold(0, u32::saturating_add))
    }
}

#[async_trait]
impl Files for Databases {
    async fn create_file(&self, file: &StoredFile) -> Result<StoredFile, StoreError> {
        self.need(file.id.database())?.create_file(file).await
    }

    async fn put_chunk(&self, id: FileId, number: u32, bytes: &[u8]) -> Result<(), StoreError> {
        self.need(id.database())?.put_chunk(id, number, bytes).await
    }

    async fn complete_file(
        &self,
        id: FileId,
        size_bytes: u64,
        expires_at: Option<Timestamp>,
    ) -> Result<(), StoreError> {
        self.need(id.database())?.complete_file(id, size_bytes, expires_at).await
    }

    async fn file(&self, tenant: &Tenant, id: FileId) -> Result<Option<StoredFile>, StoreError> {
        match self.get(id.database()) {
            Some(store) => store.file(tenant, id).await,
            None => Ok(None),
        }
    }

    async fn files(
        &self,
        tenant: &Tenant,
        purpose: Option<FilePurpose>,
        page: Page<FileId>,
    ) -> Result<Vec<StoredFile>, StoreError> {
        let pages = self.each(|store| store.files(tenant, purpose, page)).await?;
        Ok(merge::page(pages, page, |file| file.id))
    }

    async fn chunk(&self, id: FileId, number: u32) -> Result<Option<Vec<u8>>, StoreError> {
        match self.get(id.database()) {
            Some(store) => store.chunk(id, number).await,
            None => Ok(None),
        }
    }

    async fn delete_file(&self, tenant: &Tenant, id: FileId) -> Result<FileDeletion, StoreError> {
        match self.get(id.database()) {
            Some(store) => store.delete_file(tenant, id).await,
            None => Ok(FileDeletion::NotFound),
        }
    }

    async fn abandon_file(&self, id: FileId) -> Result<(), StoreError> {
        self.need(id.database())?.abandon_file(id).await
    }

    async fn sweep_files(&self) -> Result<u64, StoreError> {
        Ok(self.each(|store| store.sweep_files()).await?.into_iter().sum())
    }
}

#[async_trait]
impl Batches for Databases {
    /// Calls at the same moment for different databases may each find a tenant's last free place.
    async fn create_batch(&self, batch: &Batch, open_max: u32) -> Result<Creation, StoreError> {
        let home = self.need(batch.id.database())?;
        if let Some(key) = &batch.idempotency_key {
            let known = self.each(|store| store.batch_of_key(&batch.tenant, key)).await?;
            if let Some(known) = known.into_iter().flatten().next() {
                return Ok(Creation::Known(Box::new(known)));
            }
        }
        let elsewhere = self.batches_elsewhere(home, |store| store.open_batches(&batch.tenant));
        home.create_batch(batch, open_max.saturating_sub(elsewhere.await?)).await
    }

    async fn batch(&self, tenant: &Tenant, id: BatchId) -> Result<Option<Batch>, StoreError> {
        match self.get(id.database()) {
            Some(store) => store.batch(tenant, id).await,
            None => Ok(None),
        }
    }

    async fn batch_of_any_tenant(&self, id: BatchId) -> Result<Option<Batch>, StoreError> {
        match self.get(id.database()) {
            Some(store) => store.batch_of_any_tenant(id).await,
            None => Ok(None),
        }
    }

    async fn batches(
        &self,
        tenant: &Tenant,
        page: Page<BatchId>,
    ) -> Result<Vec<Batch>, StoreError> {
        let pages = self.each(|store| store.batches(tenant, page)).await?;
        Ok(merge::page(pages, page, |batch| batch.id))
    }

    async fn find_batches(
        &self,
        filter: &BatchFilter,
        page: Page<BatchId>,
    ) -> Result<Vec<Batch>, StoreError> {
        let pages = self.each(|store| store.find_batches(filter, page)).await?;
        Ok(merge::page(pages, Page { ascending: false, ..page }, |batch| batch.id))
    }

    async fn cancel_batch(
        &self,
        tenant: &Tenant,
        id: BatchId,
    ) -> Result<Option<Batch>, StoreError> {
        match self.get(id.database()) {
            Some(store) => store.cancel_batch(tenant, id).await,
            None => Ok(None),
        }
    }

    async fn batch_progress(&self, id: BatchId) -> Result<Progress, StoreError> {
        self.need(id.database())?.batch_progress(id).await
    }

    async fn cancel_batch_jobs(&self, id: BatchId, max: u32) -> Result<CancelledJobs, StoreError> {
        self.need(id.database())?.cancel_batch_jobs(id, max).await
    }

    async fn finished_lines(
        &self,
        id: BatchId,
        first: u32,
        last: u32,
    ) -> Result<Vec<FinishedLine>, StoreError> {
        self.need(id.database())?.finished_lines(id, first, last).await
    }
}
