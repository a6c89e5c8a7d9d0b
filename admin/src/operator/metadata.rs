//! Search by metadata: pairs of names and values that callers gave a job or a batch.
//!
//! A job has the pairs of its own request. Those of a batch are in the batch alone: its lines are found by the range of
//! their ids.

use tritmill_queue::store::{
    Page,
    job_queries::{JobFilter, MetadataFilter, RANGES_MAX},
};

use crate::{
    ApiError, App,
    store::{
        BatchId,
        batches::{BatchFilter, BatchSearch},
    },
};

/// Parses a pair, `NAME=VALUE`.
pub(crate) fn pair(text: &str) -> Result<(String, String), ApiError> {
    let expected = "metadata must be NAME=VALUE, without NUL characters";
    let invalid = || ApiError::invalid_value("metadata", expected);
    let (name, value) = text.split_once('=').ok_or_else(invalid)?;
    if name.is_empty() || text.contains('\0') {
        return Err(invalid());
    }
    Ok((name.to_owned(), value.to_owned()))
}

/// Parses a pair into a condition on jobs, without the batches that have it.
pub(crate) fn condition(text: &str) -> Result<MetadataFilter, ApiError> {
    let (name, value) = pair(text)?;
    Ok(MetadataFilter { name, value, batches: Vec::new() })
}

/// Adds the batches that have the filter's pair, among those of its tenant and time.
///
/// # Errors
/// If there are more than a search looks into: an action on a part of them would look like one on all.
pub(crate) async fn with_batches(app: &App, mut filter: JobFilter) -> Result<JobFilter, ApiError> {
    let Some(wanted) = &mut filter.metadata else { return Ok(filter) };
    let (tenant, pair) = (filter.tenant.clone(), (wanted.name.clone(), wanted.value.clone()));
    let search = BatchSearch { metadata: vec![pair], ..BatchSearch::default() };
    let batches = BatchFilter { tenant, search, ..BatchFilter::default() };
    let after = filter.to.map(BatchId::first_of);
    let page = Page { after, limit: RANGES_MAX as u32 + 1, ascending: false };
    let mut found = app.store.find_batches(&batches, page).await?;
    // As for jobs, the time of the id counts.
    let from = filter.from.map(BatchId::first_of);
    found.retain(|batch| from.is_none_or(|from| batch.id >= from));
    if found.len() > RANGES_MAX {
        let message = format!(
            "more than {RANGES_MAX} batches have this metadata: search by batch, or add a range of time"
        );
        return Err(ApiError::invalid_value("metadata", message));
    }
    wanted.batches = found.iter().map(|batch| batch.id.all_jobs()).collect();
    Ok(filter)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pair_ends_its_name_at_the_first_sign() {
        for (text, expect) in [
            ("run=7", Some(("run", "7"))),
            ("run=", Some(("run", ""))),
            ("a=b=c", Some(("a", "b=c"))),
            ("run", None),
            ("=7", None),
            ("run=\0", None),
        ] {
            let expect = expect.map(|(name, value)| (name.to_owned(), value.to_owned()));
            assert_eq!(pair(text).ok(), expect, "{text:?}");
        }
    }
}
