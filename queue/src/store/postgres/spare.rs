//! How many connections a server has left.

use std::fmt;

use sqlx::PgConnection;

/// The server keeps one connection in this many for processes that begin, and at least [`SPARE_MIN`].
const SPARE_PART: i32 = 10;
const SPARE_MIN: i32 = 2;

/// The connections of clients that a server takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Count {
    /// Those that are not open; below 0 if administrators use theirs.
    left: i32,
    max: i32,
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { left, max } = self;
        write!(f, "{left} of its {max} connections are left (max_connections)")
    }
}

impl Count {
    /// Returns whether those that are left should stay for other processes.
    pub(super) fn is_few(self) -> bool {
        self.left < (self.max / SPARE_PART).max(SPARE_MIN)
    }
}

/// Counts the connections of a server. Sessions of clients have a database and a user; all users may see these two.
pub(super) async fn count(connection: &mut PgConnection) -> Result<Count, sqlx::Error> {
    let query = sqlx::query_as(
        "SELECT current_setting('max_connections')::int,
                current_setting('max_connections')::int
                    - current_setting('superuser_reserved_connections')::int
                    - coalesce(current_setting('reserved_connections', true)::int, 0)
                    - (SELECT count(*)::int FROM pg_stat_activity
                       WHERE datid IS NOT NULL AND usesysid IS NOT NULL)",
    );
    let (max, left) = query.fetch_one(connection).await?;
    Ok(Count { left, max })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenth_stays_for_others() {
        let is_few = |left, max| Count { left, max }.is_few();
        assert_eq!((is_few(10, 100), is_few(9, 100)), (false, true));
        assert_eq!((is_few(2, 14), is_few(1, 14), is_few(-3, 14)), (false, true, true));
        let shown = Count { left: 1, max: 14 }.to_string();
        assert_eq!(shown, "1 of its 14 connections are left (max_connections)");
    }
}
