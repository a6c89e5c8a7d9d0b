//! The schema's version: migration to the latest, and the check at connection.
//!
//! Migrations expand, then contract, so a program runs on any schema that is at least its own: migrate
//! the schema first, then replace the processes one by one.

use sqlx::{
    PgConnection,
    migrate::{MigrateError, Migrator},
    postgres::{PgConnectOptions, PgPoolOptions},
};

use crate::store::{StoreError, error::without_source_line};

/// Returns the schema, embedded in the program: forward only.
fn migrations() -> Migrator {
    let mut migrator = sqlx_macros::migrate!("migrations/postgres");
    // Migrations of a later release are left alone.
    migrator.set_ignore_missing(true);
    migrator
}

/// The schema is missing or too old, or the database cannot hold all texts; the source of a [`StoreError::Migrate`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
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
    /// The database has an encoding other than UTF8 and SQL_ASCII.
    #[error(
        "the database has the encoding {0}, which cannot hold all texts: use another one, made by CREATE DATABASE \
         tritmill ENCODING 'UTF8' TEMPLATE template0 (with LC_COLLATE and LC_CTYPE 'C' or a UTF-8 locale)"
    )]
    Encoding(String),
}

/// Runs the migrations that have not run; waits for another process that does the same.
pub(super) async fn migrate(server: PgConnectOptions) -> Result<(), StoreError> {
    // The migrator wants a pool of the driver.
    let pool = PgPoolOptions::new().max_connections(1).connect_lazy_with(server);
    let migrated = migrations().run(&pool).await;
    pool.close().await;
    migrated.map_err(|error| match error {
        MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _) => {
            StoreError::Migrate(without_source_line(error))
        }
        other => StoreError::Migrate(Box::new(other)),
    })
}

/// Returns an error if the database cannot hold all texts.
pub(super) async fn check_encoding(connection: &mut PgConnection) -> Result<(), StoreError> {
    let encoding: String =
        sqlx::query_scalar("SHOW server_encoding").fetch_one(&mut *connection).await?;
    // SQL_ASCII keeps all bytes as they come.
    match encoding.as_str() {
        "UTF8" | "SQL_ASCII" => Ok(()),
        _ => Err(StoreError::Migrate(Box::new(SchemaError::Encoding(encoding)))),
    }
}

/// Returns an error if the database has another encoding, or if its schema lacks a migration of this program.
pub(super) async fn check(connection: &mut PgConnection) -> Result<(), StoreError> {
    check_encoding(connection).await?;
    let refuse = |error: SchemaError| StoreError::Migrate(Box::new(error));
    let exists: bool = sqlx::query_scalar("SELECT to_regclass('_sqlx_migrations') IS NOT NULL")
        .fetch_one(&mut *connection)
        .await?;
    if !exists {
        return Err(refuse(SchemaError::Missing));
    }
    let applied: Vec<i64> =
        sqlx::query_scalar("SELECT version FROM _sqlx_migrations WHERE success")
            .fetch_all(&mut *connection)
            .await?;
    let Some(&found) = applied.iter().max() else { return Err(refuse(SchemaError::Missing)) };
    match migrations().iter().find(|migration| !applied.contains(&migration.version)) {
        Some(lacking) => Err(refuse(SchemaError::Older { found, missing: lacking.version })),
        None => Ok(()),
    }
}
