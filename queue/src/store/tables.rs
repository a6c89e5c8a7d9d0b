//! For a crate with tables of its own beside the jobs: statements on the store's connections and in its transactions, and
//! the conversion of rows. The stores' methods are `begin`, `within`, `execute`, `fetch_one`, `fetch_optional`, `fetch_all`,
//! `clock_parameter`, `insert_jobs` and `delete_ended`.

/// Statements and rows of Postgres.
pub mod postgres {
    pub use crate::store::postgres::{
        calls::{Connection, Query, Row, query},
        dialect::{id_list, storable, text_list},
        rows,
    };
}

/// Statements and rows of SQLite.
pub mod sqlite {
    pub use crate::store::sqlite::{
        calls::{Connection, Query, Row, query},
        dialect::{id_list, storable, text_list},
        rows,
    };
}
