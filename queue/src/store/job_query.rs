//! [`JobFilter`] as SQL.
//!
//! A list scans one index downwards in the order of ids, at most [`SCAN_MAX`] jobs, and tests the other
//! conditions on each job. So the inner query has only conditions that one index answers, and the rest
//! is outside: a filter that matches little costs a page of jobs, never a scan of all. States are
//! literals, because the planner uses a partial index only for a literal.
//!
//! A search by metadata scans the jobs that have any, and the ids of each batch that has the pair.

use std::{marker::PhantomData, ops::RangeInclusive};

use sqlx::{Database, Encode, QueryBuilder, Type};
use uuid::Uuid;

use super::job_queries::{JobFilter, MetadataFilter, RANGES_MAX, SCAN_MAX};
use crate::job::{JobId, JobState};

/// States in the partial index `jobs_set_apart`.
const SET_APART: [JobState; 5] = [
    JobState::Scheduled,
    JobState::Retrying,
    JobState::Failed,
    JobState::Cancelled,
    JobState::Expired,
];

/// The columns of a list.
const COLUMNS: &str = "id, tenant, model, format, priority, state, attempts, submitted_at, \
                       started_at, owner, custom_id, error_code, error_signature";

/// Maximum number of groups of dead letters in a list.
const GROUPS_MAX: u32 = 200;

/// A condition on a job.
#[derive(Debug, Clone, PartialEq)]
enum Condition<'a> {
    /// The column has this value.
    Is(&'static str, &'a str),
    /// The column begins with this text.
    Begins(&'static str, &'a str),
    /// The job is in this state.
    State(JobState),
    /// The id is this or greater.
    From(JobId),
    /// The id is less.
    Below(JobId),
    /// The id is this or less.
    UpTo(JobId),
    /// The job has metadata and is in none of the filter's batches.
    WithMetadata(&'a MetadataFilter),
    /// The job has the pair, or is in one of the filter's batches.
    Metadata(&'a MetadataFilter),
}

/// A filter for one database, in two parts.
pub(super) struct JobQuery<'a, DB> {
    /// For each scan, which finds jobs that the others don't: conditions that an index answers.
    scans: Vec<Vec<Condition<'a>>>,
    /// Conditions that are tested on each job.
    rest: Vec<Condition<'a>>,
    /// The tables with jobs that may match.
    tables: &'a [&'a str],
    /// The database's test of metadata, around the parameters of name and value.
    metadata_has: [&'static str; 3],
    database: PhantomData<DB>,
}

impl<'a, DB: Database> JobQuery<'a, DB>
where
    String: for<'q> Encode<'q, DB> + Type<DB>,
    Uuid: for<'q> Encode<'q, DB> + Type<DB>,
{
    /// Returns jobs of the tables that match the filter and have ids below `before`.
    pub fn new(
        filter: &'a JobFilter,
        before: Option<JobId>,
        tables: &'a [&'a str],
        metadata_has: [&'static str; 3],
    ) -> Self {
        let JobFilter {
            tenant, model, format, error_code, error_signature, custom_id, owner, ..
        } = filter;
        let metadata = filter.metadata.as_ref();
        let is = |column, value: &'a Option<String>| {
            value.as_deref().map(|value| Condition::Is(column, value))
        };
        let tenant = tenant.as_ref().map(|tenant| Condition::Is("tenant", &tenant.0));
        let (model, format) = (is("model", model), is("format", format));
        let (code, signature) =
            (is("error_code", error_code), is("error_signature", error_signature));
        let custom_id = is("custom_id", custom_id);
        let prefix = filter.custom_id_prefix.as_deref();
        let prefix = prefix.map(|prefix| Condition::Begins("custom_id", prefix));
        let owner = is("owner", owner);
        let state = filter.queried_state();
        let by_queue = matches!(state, Some(JobState::Queued | JobState::Failed))
            && model.is_some()
            && format.is_some();
        let by_state =
            state.is_some_and(|state| state == JobState::Running || SET_APART.contains(&state));
        let state = state.map(Condition::State);
        let pair = metadata.map(Condition::Metadata);
        let all = [
            &custom_id, &code, &signature, &state, &model, &format, &tenant, &owner, &prefix, &pair,
        ];
        let chosen: Vec<&Option<Condition<'a>>> = if custom_id.is_some() {
            vec![&custom_id]
        } else if code.is_some() && filter.state.is_none_or(|state| state == JobState::Failed) {
            vec![&code, &state]
        } else if metadata.is_some() {
            Vec::new()
        } else if by_queue {
            vec![&model, &format, &state]
        } else if by_state {
            vec![&state]
        } else {
            vec![&tenant]
        };
        let by_pair = metadata.filter(|_| chosen.is_empty());
        let indexed: Vec<Condition<'a>> = chosen.iter().copied().flatten().cloned().collect();
        let rest =
            all.into_iter().flatten().filter(|one| !indexed.contains(*one)).cloned().collect();
        let limits = range(filter, before);
        let scans = match by_pair {
            None => vec![indexed.into_iter().chain(limits).collect()],
            Some(pair) => {
                let own = std::iter::once(Condition::WithMetadata(pair)).chain(limits.clone());
                let of = |ids: &RangeInclusive<JobId>| {
                    let of_batch = [Condition::From(*ids.start()), Condition::UpTo(*ids.end())];
                    of_batch.into_iter().chain(limits.clone()).collect()
                };
                std::iter::once(own.collect()).chain(ranges(pair).map(of)).collect()
            }
        };
        Self { scans, rest, tables, metadata_has, database: PhantomData }
    }

    /// The columns that the conditions need beside those of a list.
    fn columns(&self) -> String {
        let is_searched = self.rest.iter().any(|one| matches!(one, Condition::Metadata(_)));
        format!("{COLUMNS}{}", if is_searched { ", metadata" } else { "" })
    }

    /// Returns up to `limit` jobs, the newest first.
    pub fn page(&self, limit: u32) -> QueryBuilder<DB> {
        let mut query = QueryBuilder::new("SELECT * FROM (");
        self.scan(&mut query, &self.columns(), SCAN_MAX);
        query.push(") AS scanned");
        self.conditions(&mut query, &self.rest);
        query.push(format_args!(" ORDER BY id DESC LIMIT {limit}"));
        query
    }

    /// Returns the last job that a page scans, if there may be more jobs.
    pub fn scan_end(&self) -> QueryBuilder<DB> {
        let mut query = QueryBuilder::new("SELECT id FROM (");
        self.scan(&mut query, "id", SCAN_MAX);
        query.push(format_args!(") AS scanned ORDER BY id DESC LIMIT 1 OFFSET {}", SCAN_MAX - 1));
        query
    }

    /// One row: the number of `scanned` jobs ([`SCAN_MAX`] + 1 if there are more) and of matching `jobs`
    /// among them.
    pub fn count(&self) -> QueryBuilder<DB> {
        let mut query = QueryBuilder::new("SELECT count(*) AS scanned, count(*) FILTER (");
        match self.rest.is_empty() {
            true => {
                query.push("WHERE true");
            }
            false => self.conditions(&mut query, &self.rest),
        }
        query.push(") AS jobs FROM (");
        self.scan(&mut query, &self.columns(), SCAN_MAX + 1);
        query.push(") AS scanned");
        query
    }

    /// Dead letters by queue and error, the most frequent first; `id` is an expression for the id as
    /// text, in the same order.
    pub fn groups(&self, id: &str) -> QueryBuilder<DB> {
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

    /// The scan along the indexes.
    fn scan(&self, query: &mut QueryBuilder<DB>, columns: &str, limit: u32) {
        let one = |query: &mut QueryBuilder<DB>, (table, conditions): (&str, &[Condition<'_>])| {
            query.push(format_args!("SELECT {columns} FROM {table}"));
            self.conditions(query, conditions);
            query.push(format_args!(" ORDER BY id DESC LIMIT {limit}"));
        };
        let each =
            self.scans.iter().flat_map(|scan| self.tables.iter().map(|table| (*table, &**scan)));
        let mut each = each.collect::<Vec<_>>().into_iter();
        let Some(first) = each.next() else { return };
        if each.len() == 0 {
            return one(query, first);
        }
        // SQLite takes no parentheses around the parts of a union.
        query.push("SELECT * FROM (SELECT * FROM (");
        one(query, first);
        for other in each {
            query.push(") AS part UNION ALL SELECT * FROM (");
            one(query, other);
        }
        query.push(format_args!(") AS part) AS tables ORDER BY id DESC LIMIT {limit}"));
    }

    fn conditions(&self, query: &mut QueryBuilder<DB>, conditions: &[Condition<'_>]) {
        for (index, condition) in conditions.iter().enumerate() {
            query.push(if index == 0 { " WHERE " } else { " AND " });
            match condition {
                Condition::Is(column, value) => {
                    if *column == "custom_id" {
                        // Needed for the partial index.
                        query.push("custom_id IS NOT NULL AND ");
                    }
                    query.push(format_args!("{column} = ")).push_bind((*value).to_owned());
                }
                Condition::Begins(column, prefix) => {
                    query.push(format_args!("{column} >= ")).push_bind((*prefix).to_owned());
                    if let Some(end) = after_prefix(prefix) {
                        query.push(format_args!(" AND {column} < ")).push_bind(end);
                    }
                }
                Condition::State(state) => {
                    query.push(format_args!("state = '{}'", state.as_str()));
                    if SET_APART.contains(state) {
                        let states = SET_APART.map(|state| format!("'{}'", state.as_str()));
                        query.push(format_args!(" AND state IN ({})", states.join(", ")));
                    }
                }
                Condition::From(id) => {
                    query.push("id >= ").push_bind(Uuid::from(*id));
                }
                Condition::Below(id) => {
                    query.push("id < ").push_bind(Uuid::from(*id));
                }
                Condition::UpTo(id) => {
                    query.push("id <= ").push_bind(Uuid::from(*id));
                }
                Condition::WithMetadata(pair) => {
                    query.push("metadata IS NOT NULL");
                    for ids in ranges(pair) {
                        query.push(" AND NOT ");
                        between(query, ids);
                    }
                }
                Condition::Metadata(pair) => {
                    let [before, between_them, after] = self.metadata_has;
                    query.push(format_args!("(metadata IS NOT NULL AND {before}"));
                    query.push_bind(pair.name.clone()).push(between_them);
                    query.push_bind(pair.value.clone()).push(after);
                    for ids in ranges(pair) {
                        query.push(" OR ");
                        between(query, ids);
                    }
                    query.push(")");
                }
            }
        }
    }
}

/// Returns the ranges of ids of a filter that are searched.
fn ranges(pair: &MetadataFilter) -> impl Iterator<Item = &RangeInclusive<JobId>> {
    pair.batches.iter().take(RANGES_MAX)
}

fn between<DB: Database>(query: &mut QueryBuilder<DB>, ids: &RangeInclusive<JobId>)
where
    Uuid: for<'q> Encode<'q, DB> + Type<DB>,
{
    query.push("(id BETWEEN ").push_bind(Uuid::from(*ids.start()));
    query.push(" AND ").push_bind(Uuid::from(*ids.end())).push(")");
}

/// Returns the least text, in the order of bytes, that is greater than all that begin with `prefix`; `None` if every greater text does.
fn after_prefix(prefix: &str) -> Option<String> {
    let mut chars: Vec<char> = prefix.chars().collect();
    while let Some(last) = chars.pop() {
        // A range of characters steps over the surrogates.
        if let Some(next) = (last..=char::MAX).nth(1) {
            chars.push(next);
            return Some(chars.into_iter().collect());
        }
    }
    None
}

/// Returns the range of ids that match a filter and the position in a list.
fn range<'a>(filter: &JobFilter, before: Option<JobId>) -> Vec<Condition<'a>> {
    let (first, end) = filter.ids.as_ref().map_or((None, None), |ids| {
        let after_last = Uuid::from(*ids.end()).as_u128().saturating_add(1);
        (Some(*ids.start()), Some(JobId::from(Uuid::from_u128(after_last))))
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
        let has = ["has(", ", ", ")"];
        let sql = JobQuery::<Sqlite>::new(filter, None, &["jobs"], has).page(7).into_string();
        let (scan, rest) = sql.split_once(") AS scanned").expect("a scan");
        let end = format!("ORDER BY id DESC LIMIT {SCAN_MAX}");
        assert!(scan.ends_with(&format!("FROM jobs{inner} {end}")), "{sql}");
        assert_eq!(rest, format!("{outer} ORDER BY id DESC LIMIT 7"), "{sql}");
    }

    #[test]
    fn texts_with_a_prefix_are_a_range() {
        for (prefix, end) in [
            ("line-", Some("line.")),
            ("a\u{d7ff}", Some("a\u{e000}")),
            ("a\u{10ffff}", Some("b")),
            ("\u{10ffff}", None),
            ("", None),
        ] {
            assert_eq!(after_prefix(prefix).as_deref(), end, "{prefix:?}");
        }
    }

    #[test]
    fn scan_uses_one_index_and_other_conditions_are_tested_outside() {
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
        let of_queue = JobFilter { format, state: Some(JobState::Failed), ..of_model.clone() };
        let inner = format!(" WHERE model = ? AND format = ? AND {failed}");
        check(&of_queue, &inner, " WHERE tenant = ?");
        let named = JobFilter { custom_id: Some("a".to_owned()), ..of_queue.clone() };
        let outer = format!(" WHERE {failed} AND model = ? AND format = ? AND tenant = ?");
        check(&named, " WHERE custom_id IS NOT NULL AND custom_id = ?", &outer);
        let custom_id_prefix = Some("a".to_owned());
        let begun = JobFilter { custom_id_prefix, ..all.clone() };
        check(&begun, "", " WHERE custom_id >= ? AND custom_id < ?");
        let (name, value) = ("k".to_owned(), "v".to_owned());
        let own = MetadataFilter { name, value, batches: Vec::new() };
        let marked = JobFilter { metadata: Some(own), ..of_model };
        let has = "(metadata IS NOT NULL AND has(?, ?))";
        let outer = format!(" WHERE state = 'running' AND model = ? AND tenant = ? AND {has}");
        check(&marked, " WHERE metadata IS NOT NULL", &outer);
        let error_code = Some("lease_lost".to_owned());
        let erred = JobFilter { error_code, ..all };
        check(&erred, &format!(" WHERE error_code = ? AND {failed}"), "");
    }
}
