//! [`JobFilter`] as SQL, for both databases.
//!
//! A list walks down one index in the order of ids, past [`SCAN_MAX`] jobs at most, and tests what the
//! index does not know on each. So the inner query has the conditions of one index alone, and the rest
//! is outside: an unlucky filter costs as much as a page of jobs that match nothing, never a walk
//! through all. States are spelled out, since only then do partial indexes serve.

use sqlx::{Database, Encode, QueryBuilder, Type};
use uuid::Uuid;

use super::job_queries::{JobFilter, SCAN_MAX};
use crate::job::{JobId, JobState};

/// States whose jobs are listed by `jobs_set_apart`.
const SET_APART: [JobState; 5] = [
    JobState::Scheduled,
    JobState::Retrying,
    JobState::Failed,
    JobState::Cancelled,
    JobState::Expired,
];

/// What of a job is in a list.
const COLUMNS: &str = "id, tenant, model, format, priority, state, attempts, submitted_at, \
                       started_at, owner, custom_id, error_code, error_signature";

/// Groups of dead letters in a list.
const GROUPS_MAX: u32 = 200;

/// Something that must hold of a job.
#[derive(Debug, Clone, PartialEq)]
enum Condition<'a> {
    /// A column has this value.
    Is(&'static str, &'a str),
    /// It is in this state.
    State(JobState),
    /// Its id is this or greater.
    From(JobId),
    /// Its id is less.
    Below(JobId),
}

/// A filter in two parts, and what binds ids.
pub(super) struct JobQuery<'a, I> {
    indexed: Vec<Condition<'a>>,
    rest: Vec<Condition<'a>>,
    id: fn(JobId) -> I,
}

impl<'a, I> JobQuery<'a, I> {
    /// Jobs below an id; `id` says how ids are bound.
    pub fn new(filter: &'a JobFilter, before: Option<JobId>, id: fn(JobId) -> I) -> Self {
        let JobFilter { tenant, model, format, error_code, error_signature, custom_id, .. } =
            filter;
        let is = |column, value: &'a Option<String>| {
            value.as_deref().map(|value| Condition::Is(column, value))
        };
        let tenant = tenant.as_ref().map(|tenant| Condition::Is("tenant", &tenant.0));
        let (model, format) = (is("model", model), is("format", format));
        let (code, signature) =
            (is("error_code", error_code), is("error_signature", error_signature));
        let custom_id = is("custom_id", custom_id);
        // Of jobs that have an error, only dead letters are looked for by it.
        let of_errors = code.is_some() || signature.is_some();
        let state = filter.state.or(of_errors.then_some(JobState::Failed));
        let by_queue = matches!(state, Some(JobState::Queued | JobState::Failed))
            && model.is_some()
            && format.is_some();
        let by_state =
            state.is_some_and(|state| state == JobState::Running || SET_APART.contains(&state));
        let state = state.map(Condition::State);
        let all = [&custom_id, &code, &signature, &state, &model, &format, &tenant];
        let chosen: Vec<&Option<Condition<'a>>> = if custom_id.is_some() {
            vec![&custom_id]
        } else if code.is_some() && filter.state.is_none_or(|state| state == JobState::Failed) {
            vec![&code, &state]
        } else if by_queue {
            vec![&model, &format, &state]
        } else if by_state {
            vec![&state]
        } else {
            vec![&tenant]
        };
        let mut indexed: Vec<Condition<'a>> = chosen.iter().copied().flatten().cloned().collect();
        let rest =
            all.into_iter().flatten().filter(|one| !indexed.contains(*one)).cloned().collect();
        indexed.extend(range(filter, before));
        Self { indexed, rest, id }
    }

    /// Up to `limit` jobs, the latest first.
    pub fn page<DB>(&self, limit: u32) -> QueryBuilder<DB>
    where
        DB: Database,
        String: for<'q> Encode<'q, DB> + Type<DB>,
        I: for<'q> Encode<'q, DB> + Type<DB>,
    {
        let mut query = QueryBuilder::new("SELECT * FROM (");
        self.scan(&mut query, COLUMNS, SCAN_MAX);
        query.push(") AS scanned");
        self.hold(&mut query, &self.rest);
        query.push(format_args!(" ORDER BY id DESC LIMIT {limit}"));
        query
    }

    /// The last job that a page looks at, if there may be jobs beyond.
    pub fn scan_end<DB>(&self) -> QueryBuilder<DB>
    where
        DB: Database,
        String: for<'q> Encode<'q, DB> + Type<DB>,
        I: for<'q> Encode<'q, DB> + Type<DB>,
    {
        let mut query = QueryBuilder::new("SELECT id FROM (");
        self.scan(&mut query, "id", SCAN_MAX);
        query.push(format_args!(") AS scanned ORDER BY id DESC LIMIT 1 OFFSET {}", SCAN_MAX - 1));
        query
    }

    /// One row: `scanned` jobs, one more than [`SCAN_MAX`] if there are more, and `jobs` of them that
    /// match.
    pub fn count<DB>(&self) -> QueryBuilder<DB>
    where
        DB: Database,
        String: for<'q> Encode<'q, DB> + Type<DB>,
        I: for<'q> Encode<'q, DB> + Type<DB>,
    {
        let mut query = QueryBuilder::new("SELECT count(*) AS scanned, count(*) FILTER (");
        match self.rest.is_empty() {
            true => {
                query.push("WHERE true");
            }
            false => self.hold(&mut query, &self.rest),
        }
        query.push(") AS jobs FROM (");
        self.scan(&mut query, COLUMNS, SCAN_MAX + 1);
        query.push(") AS scanned");
        query
    }

    /// Dead letters by queue and error, the most frequent first; `id` is an id as text, whose order is
    /// that of ids.
    pub fn groups<DB>(&self, id: &str) -> QueryBuilder<DB>
    where
        DB: Database,
        String: for<'q> Encode<'q, DB> + Type<DB>,
        I: for<'q> Encode<'q, DB> + Type<DB>,
    {
        let mut query = QueryBuilder::new(format!(
            "SELECT model, format, coalesce(error_code, 'unknown') AS error_code,
                    coalesce(error_signature, '') AS error_signature, count(*) AS jobs,
                    min({id}) AS first, max({id}) AS last FROM ("
        ));
        self.scan(&mut query, COLUMNS, SCAN_MAX);
        query.push(") AS scanned GROUP BY 1, 2, 3, 4 ORDER BY 5 DESC, 7 DESC LIMIT ");
        query.push(GROUPS_MAX);
        query
    }

    /// The walk along the index.
    fn scan<DB>(&self, query: &mut QueryBuilder<DB>, columns: &str, limit: u32)
    where
        DB: Database,
        String: for<'q> Encode<'q, DB> + Type<DB>,
        I: for<'q> Encode<'q, DB> + Type<DB>,
    {
        query.push(format_args!("SELECT {columns} FROM jobs"));
        self.hold(query, &self.indexed);
        query.push(format_args!(" ORDER BY id DESC LIMIT {limit}"));
    }

    fn hold<DB>(&self, query: &mut QueryBuilder<DB>, conditions: &[Condition<'_>])
    where
        DB: Database,
        String: for<'q> Encode<'q, DB> + Type<DB>,
        I: for<'q> Encode<'q, DB> + Type<DB>,
    {
        for (index, condition) in conditions.iter().enumerate() {
            query.push(if index == 0 { " WHERE " } else { " AND " });
            match condition {
                Condition::Is(column, value) => {
                    if *column == "custom_id" {
                        // Spelled out for the partial index.
                        query.push("custom_id IS NOT NULL AND ");
                    }
                    query.push(format_args!("{column} = ")).push_bind((*value).to_owned());
                }
                Condition::State(state) => {
                    query.push(format_args!("state = '{}'", state.as_str()));
                    if SET_APART.contains(state) {
                        let states = SET_APART.map(|state| format!("'{}'", state.as_str()));
                        query.push(format_args!(" AND state IN ({})", states.join(", ")));
                    }
                }
                Condition::From(id) => {
                    query.push("id >= ").push_bind((self.id)(*id));
                }
                Condition::Below(id) => {
                    query.push("id < ").push_bind((self.id)(*id));
                }
            }
        }
    }
}

/// The range of ids that a filter and the place in a list leave.
fn range<'a>(filter: &JobFilter, before: Option<JobId>) -> Vec<Condition<'a>> {
    let (first, end) = filter.batch.map_or((None, None), |batch| {
        let after_last = Uuid::from(batch.job(u32::MAX)).as_u128().saturating_add(1);
        (Some(batch.job(1)), Some(JobId::from(Uuid::from_u128(after_last))))
    });
    let from = [first, filter.from.map(JobId::first_of)].into_iter().flatten().max();
    let below = [end, filter.to.map(JobId::first_of), before].into_iter().flatten().min();
    from.map(Condition::From).into_iter().chain(below.map(Condition::Below)).collect()
}

#[cfg(test)]
mod tests {
    use sqlx::Sqlite;

    use super::*;
    use crate::job::Tenant;

    fn check(filter: &JobFilter, inner: &str, outer: &str) {
        let query = JobQuery::new(filter, None, |id| id.to_string());
        let sql = query.page::<Sqlite>(7).into_string();
        let (scan, rest) = sql.split_once(") AS scanned").expect("a scan");
        let end = format!("ORDER BY id DESC LIMIT {SCAN_MAX}");
        assert!(scan.ends_with(&format!("FROM jobs{inner} {end}")), "{sql}");
        assert_eq!(rest, format!("{outer} ORDER BY id DESC LIMIT 7"), "{sql}");
    }

    #[test]
    fn the_walk_is_along_one_index_and_the_rest_is_tested_on_what_it_meets() {
        let all = JobFilter::default();
        let failed = "state = 'failed' AND state IN \
                      ('scheduled', 'retrying', 'failed', 'cancelled', 'expired')";
        check(&all, "", "");
        let tenant = Some(Tenant("t".to_owned()));
        let mine = JobFilter { tenant, ..all.clone() };
        check(&mine, " WHERE tenant = ?", "");
        let queued = JobFilter { state: Some(JobState::Queued), ..mine.clone() };
        check(&queued, " WHERE tenant = ?", " WHERE state = 'queued'");
        let model = Some("m".to_owned());
        let of_model = JobFilter { model, state: Some(JobState::Running), ..mine };
        check(&of_model, " WHERE state = 'running'", " WHERE model = ? AND tenant = ?");
        let format = Some("i2_s".to_owned());
        let of_queue = JobFilter { format, state: Some(JobState::Failed), ..of_model };
        let inner = format!(" WHERE model = ? AND format = ? AND {failed}");
        check(&of_queue, &inner, " WHERE tenant = ?");
        let named = JobFilter { custom_id: Some("a".to_owned()), ..of_queue.clone() };
        let outer = format!(" WHERE {failed} AND model = ? AND format = ? AND tenant = ?");
        check(&named, " WHERE custom_id IS NOT NULL AND custom_id = ?", &outer);
        let error_code = Some("lease_lost".to_owned());
        let erred = JobFilter { error_code, ..all };
        check(&erred, &format!(" WHERE error_code = ? AND {failed}"), "");
    }
}
