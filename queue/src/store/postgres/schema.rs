//! The schema's version: who brings it up to date, and who refuses to run on an older one.
//!
//! Migrations expand, then contract, so a program runs on any schema that is at least its own: the
//! schema is migrated first, then the processes are replaced one by one.

use sqlx::{
    PgPool, Row as _,
    migrate::{MigrateError, Migrator},
};

use super::{rows, unavailable};
use crate::store::StoreError;

/// The schema, embedded in the program: forward only.
fn migrations() -> Migrator {
    let mut migrator = sqlx::migrate!("../migrations/postgres");
    // What a later release has run stays.
    migrator.set_ignore_missing(true);
    migrator
}

/// A schema this program cannot run on; the source of a [`StoreError::Migrate`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SchemaError {
    /// An empty database, or one of another program.
    #[error("the database has no tritmill schema: run tritmill migrate")]
    Missing,
    /// The schema of an earlier release.
    #[error("the schema lacks migration {missing} (it is at {found}): run tritmill migrate")]
    Older {
        /// The latest migration it has.
        found: i64,
        /// The first migration it lacks.
        missing: i64,
    },
}

/// Runs the migrations that have not run; waits for another process that does the same.
pub(super) async fn migrate(pool: &PgPool) -> Result<(), StoreError> {
    migrations().run(pool).await.map_err(|error| match error {
        MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _) => {
            match unavailable(error) {
                StoreError::Unavailable(said) => StoreError::Migrate(said),
                other => other,
            }
        }
        other => StoreError::Migrate(Box::new(other)),
    })
}

/// Refuses a schema that lacks a migration of this program's.
pub(super) async fn check(pool: &PgPool) -> Result<(), StoreError> {
    let refuse = |error: SchemaError| StoreError::Migrate(Box::new(error));
    let exists: bool = sqlx::query("SELECT to_regclass('_sqlx_migrations') IS NOT NULL AS there")
        .fetch_one(pool)
        .await
        .and_then(|row| row.try_get("there"))
        .map_err(unavailable)?;
    if !exists {
        return Err(refuse(SchemaError::Missing));
    }
    let applied = sqlx::query("SELECT version FROM _sqlx_migrations WHERE success")
        .fetch_all(pool)
        .await
        .map_err(unavailable)?;
    let applied: Vec<i64> =
        applied.iter().map(|row| rows::integer(row, "version")).collect::<Result<_, _>>()?;
    let Some(&found) = applied.iter().max() else { return Err(refuse(SchemaError::Missing)) };
    match migrations().iter().find(|migration| !applied.contains(&migration.version)) {
        Some(lacking) => Err(refuse(SchemaError::Older { found, missing: lacking.version })),
        None => Ok(()),
    }
}
