//! [`StoreError`], and how errors of the databases become one.

use crate::job::{JobId, QueueName};

/// A store operation failed; nothing was written unless the operation says otherwise.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The database refused the call or cannot be reached. Transient: the call may be repeated.
    #[error("store unavailable: {0}")]
    Unavailable(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The database's schema cannot be migrated, or is missing or too old.
    #[error("store cannot be migrated: {0}")]
    Migrate(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A job belongs to a queue other than the store's.
    #[error("job {job} is not of queue {queue}, the only queue of this store")]
    OtherQueue {
        /// The job.
        job: JobId,
        /// The store's queue.
        queue: QueueName,
    },
    /// The store cannot hold a value. Permanent: the call fails again with the same value.
    #[error("{what} cannot be stored: {problem}")]
    InvalidValue {
        /// The field.
        what: &'static str,
        /// The reason.
        problem: String,
    },
    /// A stored value cannot be read. Permanent: the value stays as it is.
    #[error("stored {what} is damaged: {detail}")]
    Damaged {
        /// The column.
        what: &'static str,
        /// The reason.
        detail: String,
    },
}

/// An error that the database server reported. The driver adds a line number of the server's source,
/// which readers would mistake for a line of this program.
#[derive(Debug, thiserror::Error)]
#[error("the database says: {message} (SQLSTATE {code})")]
struct ServerError {
    message: String,
    code: String,
}

impl StoreError {
    /// Returns whether the server takes no writes: it is a standby, perhaps since a failover.
    pub(super) fn is_read_only(&self) -> bool {
        let Self::Unavailable(source) = self else { return false };
        let reported = source.downcast_ref::<ServerError>();
        reported.is_some_and(|reported| reported.code == READ_ONLY)
    }
}

/// SQLSTATE `read_only_sql_transaction`.
const READ_ONLY: &str = "25006";

/// Returns an error of Postgres without the line number of the server's source.
pub(super) fn without_source_line(error: sqlx::Error) -> Box<dyn std::error::Error + Send + Sync> {
    let reported = error.as_database_error();
    match reported.and_then(|error| error.try_downcast_ref::<sqlx::postgres::PgDatabaseError>()) {
        Some(reported) => Box::new(ServerError {
            message: reported.message().to_owned(),
            code: reported.code().to_owned(),
        }),
        None => Box::new(error),
    }
}

impl From<sqlx::Error> for StoreError {
    /// A value of the wrong type becomes [`StoreError::Damaged`], any other error becomes
    /// [`StoreError::Unavailable`].
    fn from(error: sqlx::Error) -> Self {
        match error {
            sqlx::Error::ColumnDecode { index, source } => {
                Self::Damaged { what: "column", detail: format!("{index}: {source}") }
            }
            error => Self::Unavailable(without_source_line(error)),
        }
    }
}
