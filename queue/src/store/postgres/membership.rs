//! What one of several databases knows of its installation, and what the others ask it.
//!
//! A single database has no such rows until another one is added.

use std::collections::HashMap;

use super::{PostgresStore, Submission, SubmitError, calls::query, idempotency, rows};
use crate::{
    job::Tenant,
    store::{Batch, StoreError},
};

/// A list of databases does not fit the installation; the source of a [`StoreError::Migrate`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MembershipError {
    /// A database has another place in the list than in the installation.
    #[error(
        "URL {number} is of database {found} of the installation: keep the order of the URLs, and add new \
         ones at the end"
    )]
    OtherPlace {
        /// Number of the URL, from 1.
        number: usize,
        /// Number of the database in its installation, from 1.
        found: i64,
    },
    /// A database belongs to another installation than the first one.
    #[error("URL {number} is of a database of another installation")]
    OtherInstallation {
        /// Number of the URL, from 1.
        number: usize,
    },
    /// A new database has jobs from its time as the only one of an installation.
    #[error("URL {number} is of a database that has jobs: only an empty one can be added")]
    NotEmpty {
        /// Number of the URL, from 1.
        number: usize,
    },
    /// The list is shorter than the installation.
    #[error("{named} of {known} URLs are given: name all databases of the installation")]
    Incomplete {
        /// Number of URLs.
        named: usize,
        /// Number of databases of the installation.
        known: i64,
    },
    /// The list has databases that are not in the installation yet.
    #[error(
        "{named} URLs are given, the installation has {known}: run tritmill migrate to add databases"
    )]
    NotAdded {
        /// Number of URLs.
        named: usize,
        /// Number of databases of the installation.
        known: i64,
    },
}

impl From<MembershipError> for StoreError {
    fn from(error: MembershipError) -> Self {
        Self::Migrate(Box::new(error))
    }
}

/// Names of settings.
const INSTALLATION: &str = "installation";
const INDEX: &str = "database_index";
const COUNT: &str = "databases";

/// The settings of a database that concern the installation.
#[derive(Default)]
struct Membership {
    installation: Option<i64>,
    index: Option<i64>,
    /// In the first database only.
    count: Option<i64>,
}

impl PostgresStore {
    /// Checks that these are all databases of an installation, in order.
    pub(in crate::store) async fn check_members(stores: &[Self]) -> Result<(), StoreError> {
        let mut installation = None;
        for (index, store) in stores.iter().enumerate() {
            let found = store.membership().await?;
            found.check_place(index)?;
            if index == 0 {
                let (named, known) = (stores.len(), found.count.unwrap_or(1));
                match named as i64 {
                    count if count < known => {
                        return Err(MembershipError::Incomplete { named, known }.into());
                    }
                    count if count > known => {
                        return Err(MembershipError::NotAdded { named, known }.into());
                    }
                    _ => installation = found.installation,
                }
            } else if found.installation != installation {
                return Err(MembershipError::OtherInstallation { number: index + 1 }.into());
            }
        }
        Ok(())
    }

    /// Adds databases to the installation of the first one that are not in it yet.
    pub(in crate::store) async fn join(stores: &[Self]) -> Result<(), StoreError> {
        let Some((first, others)) = stores.split_first() else { return Ok(()) };
        let found = first.membership().await?;
        found.check_place(0)?;
        let (named, known) = (stores.len(), found.count.unwrap_or(1));
        if (named as i64) < known {
            return Err(MembershipError::Incomplete { named, known }.into());
        }
        if others.is_empty() {
            return Ok(());
        }
        // All checks come before the first change.
        for (index, store) in others.iter().enumerate().map(|(index, store)| (index + 1, store)) {
            let (member, number) = (store.membership().await?, index + 1);
            member.check_place(index)?;
            if member.installation.is_some() && member.installation != found.installation {
                return Err(MembershipError::OtherInstallation { number }.into());
            }
            if member.index.is_none() && store.has_jobs().await? {
                return Err(MembershipError::NotEmpty { number }.into());
            }
        }
        // Another process that does the same may be first.
        first.add_setting(INSTALLATION, fastrand::i64(..)).await?;
        let installation = first.membership().await?.installation.unwrap_or_default();
        for (index, store) in stores.iter().enumerate() {
            store.add_setting(INDEX, index as i64).await?;
            store.add_setting(INSTALLATION, installation).await?;
        }
        let count = query(
            "INSERT INTO settings (name, value) VALUES ($1, $2)
             ON CONFLICT (name) DO UPDATE SET value = greatest(settings.value, excluded.value)",
        );
        first.execute(count.bind(COUNT).bind(named as i64)).await.map(drop)
    }

    async fn membership(&self) -> Result<Membership, StoreError> {
        let found = query("SELECT name, value FROM settings");
        let mut settings = HashMap::new();
        for row in &self.fetch_all(found).await? {
            settings.insert(rows::get::<String>(row, "name")?, rows::integer(row, "value")?);
        }
        let mut take = |name| settings.remove(name);
        Ok(Membership { installation: take(INSTALLATION), index: take(INDEX), count: take(COUNT) })
    }

    async fn add_setting(&self, name: &'static str, value: i64) -> Result<(), StoreError> {
        let add = query(
            "INSERT INTO settings (name, value) VALUES ($1, $2) ON CONFLICT (name) DO NOTHING",
        );
        self.execute(add.bind(name).bind(value)).await.map(drop)
    }

    async fn has_jobs(&self) -> Result<bool, StoreError> {
        let found = query("SELECT EXISTS (SELECT FROM all_jobs) AS found");
        rows::get(&self.fetch_one(found).await?, "found")
    }

    /// Returns the result of an earlier submission under a key.
    pub(in crate::store) async fn known_submission(
        &self,
        tenant: &Tenant,
        key: &str,
        request_hash: &[u8],
    ) -> Result<Option<Submission>, SubmitError> {
        let found = query(idempotency::FIND).bind(&tenant.0).bind(key);
        let found = self.fetch_optional(found).await?;
        found.map(|first| idempotency::known(&first, key, request_hash)).transpose()
    }

    /// Returns the batch that a tenant created under an idempotency key.
    pub(in crate::store) async fn batch_of_key(
        &self,
        tenant: &Tenant,
        key: &str,
    ) -> Result<Option<Batch>, StoreError> {
        let found = query(
            "SELECT batch::text AS batch FROM batches WHERE tenant = $1 AND idempotency_key = $2",
        );
        let found = self.fetch_optional(found.bind(&tenant.0).bind(key)).await?;
        found.as_ref().map(|row| rows::document(row, "batch")).transpose()
    }

    /// Returns how many unfinished batches a tenant has.
    pub(in crate::store) async fn open_batches(&self, tenant: &Tenant) -> Result<u32, StoreError> {
        let states = ["validating", "in_progress", "finalizing", "cancelling"];
        self.count_batches(tenant, &states).await
    }

    /// Returns how many batches of a tenant are in progress.
    pub(in crate::store) async fn active_batches(
        &self,
        tenant: &Tenant,
    ) -> Result<u32, StoreError> {
        self.count_batches(tenant, &["in_progress"]).await
    }

    async fn count_batches(&self, tenant: &Tenant, states: &[&str]) -> Result<u32, StoreError> {
        let count =
            query("SELECT count(*) AS batches FROM batches WHERE tenant = $1 AND state = ANY($2)");
        let row = self.fetch_one(count.bind(&tenant.0).bind(states)).await?;
        rows::small(&row, "batches")
    }
}

impl Membership {
    /// Checks the place of the database in the list.
    fn check_place(&self, index: usize) -> Result<(), MembershipError> {
        match self.index {
            Some(found) if found != index as i64 => {
                Err(MembershipError::OtherPlace { number: index + 1, found: found + 1 })
            }
            _ => Ok(()),
        }
    }
}
