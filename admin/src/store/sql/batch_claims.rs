//! Statements that claim and release batches. A claim looks at the batches that have been due the longest, ranks
//! them by their tenants' turns, and takes the first.

/// An unfinished batch with a due step.
macro_rules! due {
    () => {
        concat!(unfinished!(), " AND next_at <= ", now!())
    };
}

macro_rules! released {
    () => {
        concat!(due!(), " AND lease_until IS NULL AND lost_leases = 0")
    };
}

macro_rules! suspect {
    () => {
        concat!(
            due!(),
            " AND (lease_until <= ",
            now!(),
            " OR (lease_until IS NULL AND lost_leases > 0))"
        )
    };
}

/// Claims batches by tenants' turns; `which` is their condition, checked again when their rows are locked.
macro_rules! claim_step_sql {
    ($which:expr) => {
        concat!(
            "WITH due AS MATERIALIZED (
                 SELECT id AS due_id, tenant AS due_tenant FROM batches WHERE ",
            $which,
            " ORDER BY next_at, id LIMIT $5),
             ranked AS MATERIALIZED (
                 SELECT due_id, coalesce(served_at, 0) AS turn_at,
                        row_number() OVER (PARTITION BY due_tenant ORDER BY due_id) AS turn
                 FROM due LEFT JOIN batch_turns ON tenant = due_tenant),
             picked AS MATERIALIZED (
                 SELECT batches.id AS picked_id FROM ranked JOIN batches ON batches.id = due_id
                 WHERE ",
            $which,
            " ORDER BY turn, turn_at, due_id LIMIT $4",
            skip_locked!(),
            ") UPDATE batches SET epoch = epoch + 1, owner = $2, lease_until = ",
            now!(),
            " + $3, lost_leases = lost_leases + CASE WHEN lease_until IS NULL THEN 0 ELSE 1 END
             FROM picked WHERE id = picked_id
             RETURNING id, epoch, lost_leases + hung_steps AS failures, added_lines,
                       CAST(batch AS text) AS batch"
        )
    };
}

/// Records that the tenants of claimed rows of a table were served now, in a column of their turns.
macro_rules! turn_sql {
    ($table:literal, $column:literal) => {
        concat!(
            "INSERT INTO batch_turns (tenant, ",
            $column,
            ") SELECT tenant, ",
            now!(),
            " FROM ",
            $table,
            " WHERE id ",
            any_of!("$2"),
            " GROUP BY tenant ORDER BY tenant ON CONFLICT (tenant) DO UPDATE SET ",
            $column,
            " = excluded.",
            $column
        )
    };
}

/// Releases a claim.
macro_rules! release_sql {
    ($also:literal) => {
        concat!(
            "UPDATE batches SET owner = NULL, lease_until = NULL, epoch = epoch + 1, next_at = ",
            now!(),
            " + $4",
            $also,
            " WHERE id = $2 AND epoch = $3"
        )
    };
}

/// Claims steps; parameters: clock, owner, lease, maximum, window.
pub(super) const CLAIM_RELEASED: &str = claim_step_sql!(released!());
pub(super) const CLAIM_SUSPECT: &str = claim_step_sql!(suspect!());
/// Finds a suspect batch; parameter: clock.
pub(super) const FIND_SUSPECT: &str =
    concat!("SELECT 1 FROM batches WHERE ", suspect!(), " LIMIT 1");

/// Record turns; parameters: clock, batches or notices.
pub(super) const STEP_TURNS: &str = turn_sql!("batches", "served_at");
pub(super) const NOTICE_TURNS: &str = turn_sql!("notices", "called_at");

/// Releases a claim; parameters: clock, batch, epoch, delay of the next step.
pub(super) const RELEASE: &str = release_sql!("");
/// Releases a claim, and counts a step that did not end in time.
pub(super) const CHARGE: &str = release_sql!(", hung_steps = hung_steps + 1");
