//! [`StoreError`], and how errors of the databases become one.

use crate::refusal::{self, Needs, Refusal};

/// A store operation failed; nothing was written unless the operation says otherwise.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The database cannot be reached, or cannot do the call now. Transient: the call may be repeated.
    #[error("store unavailable: {0}")]
    Unavailable(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The database refuses the call until an operator has changed something. Permanent.
    #[error("store refused: {0}")]
    Refused(#[source] Refusal),
    /// The database's schema cannot be migrated, or is missing or too old.
    #[error("store cannot be migrated: {0}")]
    Migrate(#[source] Box<dyn std::error::Error + Send + Sync>),
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
    /// Returns whether the same call with the same values can never succeed, unless an operator changes something.
    pub fn is_permanent(&self) -> bool {
        !matches!(self, Self::Unavailable(_))
    }

    /// Returns whether the server takes no writes: it is a standby, perhaps since a failover.
    pub(super) fn is_read_only(&self) -> bool {
        let Self::Unavailable(source) = self else { return false };
        let reported = source.downcast_ref::<ServerError>();
        reported.is_some_and(|reported| reported.code == READ_ONLY)
    }
}

/// SQLSTATE `read_only_sql_transaction`.
const READ_ONLY: &str = "25006";

/// Returns the SQLSTATE of an error that Postgres reported.
pub(super) fn sqlstate(error: &sqlx::Error) -> Option<String> {
    Some(error.as_database_error()?.code()?.into_owned())
}

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
    /// A value of the wrong type becomes [`StoreError::Damaged`]; errors of Postgres are sorted by what a retry can
    /// change, see `refusal.rs`; any other error becomes [`StoreError::Unavailable`].
    fn from(error: sqlx::Error) -> Self {
        if let sqlx::Error::ColumnDecode { index, source } = error {
            return Self::Damaged { what: "column", detail: format!("{index}: {source}") };
        }
        let said = without_source_line(error);
        let Some(reported) = said.downcast_ref::<ServerError>() else {
            return Self::Unavailable(said);
        };
        match refusal::of_postgres(&reported.code) {
            Needs::Time => Self::Unavailable(said),
            Needs::AnotherValue => {
                let problem = format!("refused: {reported}");
                Self::InvalidValue { what: "a value", problem }
            }
            Needs::Operator(remedy) => {
                Self::Refused(Refusal { said: reported.to_string(), remedy })
            }
        }
    }
}
