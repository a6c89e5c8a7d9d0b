//! The schema's version: migration to the latest, and the check at connection.
//!
//! Migrations expand, then contract, so a program runs on any schema that is at least its own: migrate
//! the schema first, then replace the processes one by one.

use sqlx::{
    PgPool,
    migrate::{MigrateError, Migrator},
};

use crate::store::StoreError;

/// Returns the schema, embedded in the program: forward only.
fn migrations() -> Migrator {
    let mut migrator = sqlx::migrate!("migrations/postgres");
    // Migrations of a later release are left alone.
    migrator.set_ignore_missing(true);
    migrator
}

/// The schema is missing or too old; the source of a [`StoreError::Migrate`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SchemaError {
    /// The database is empty or belongs to another program.
    #[error("the database has no tritmill schema: run tritmill migrate")]
    Missing,
    /// The schema is of an earlier release.
    #[error("the schema lacks migration {missing} (it is at {found}): run tritmill migrate")]
    Older {
        /// The latest migration that the database has.
        found: i64,
        /// The first migration that the database lacks.
        missing: i64,
    },
}

/// Runs the migrations that have not run; waits for another process that does the same.
pub(super) async fn migrate(pool: &PgPool) -> Result<(), StoreError> {
    migrations().run(pool).await.map_err(|error| match error {
        MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _) => {
            match StoreError::from(error) {
                StoreError::Unavailable(said) => StoreError::Migrate(said),
                other => other,
            }
        }
        other => StoreError::Migrate(Box::new(other)),
    })
}

/// Returns an error if the schema lacks a migration of this program.
pub(super) async fn check(pool: &PgPool) -> Result<(), StoreError> {
    let refuse = |error: SchemaError| StoreError::Migrate(Box::new(error));
    let exists: bool = sqlx::query_scalar("SELECT to_regclass('_sqlx_migrations') IS NOT NULL")
        .fetch_one(pool)
        .await?;
    if !exists {
        return Err(refuse(SchemaError::Missing));
    }
    let applied: Vec<i64> =
        sqlx::query_scalar("SELECT version FROM _sqlx_migrations WHERE success")
            .fetch_all(pool)
            .await?;
    let Some(&found) = applied.iter().max() else { return Err(refuse(SchemaError::Missing)) };
    match migrations().iter().find(|migration| !applied.contains(&migration.version)) {
        Some(lacking) => Err(refuse(SchemaError::Older { found, missing: lacking.version })),
        None => Ok(()),
    }
}
