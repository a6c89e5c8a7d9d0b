//! Parses and validates request parameters; errors name the parameter.

use std::{ops::RangeInclusive, str::FromStr};

use serde::Deserialize;
use serde_json::{Map, Value};
use tritmill_queue::{JobId, JobState, QueueName, Tenant, Timestamp, store::JobFilter};
use utoipa::ToSchema;

use super::metadata;
use crate::{
    ApiError, App, Caller,
    extract::from_query,
    store::{BatchId, KeyRole},
};

/// Items of a list by default, and at most.
pub(super) const LIST_DEFAULT: u64 = 50;
pub(super) const LIST_MAX: u64 = 200;

/// Parses a parameter.
pub(crate) fn parsed<T: FromStr>(
    param: &'static str,
    expected: &str,
    text: Option<&str>,
) -> Result<Option<T>, ApiError> {
    let invalid = |_| ApiError::invalid_value(param, format!("{param} must be {expected}"));
    text.map(|text| text.parse().map_err(invalid)).transpose()
}

/// Checks a number against its bounds.
pub(super) fn bounded(
    param: &'static str,
    value: Option<u64>,
    default: u64,
    max: u64,
) -> Result<u64, ApiError> {
    match value.unwrap_or(default) {
        value if (1..=max).contains(&value) => Ok(value),
        _ => Err(ApiError::invalid_value(param, format!("{param} must be between 1 and {max}"))),
    }
}

/// Parses a number and checks it against its bounds.
pub(super) fn number(
    param: &'static str,
    text: Option<&str>,
    default: u64,
    max: u64,
) -> Result<u64, ApiError> {
    let value = parsed(param, &format!("between 1 and {max}"), text)?;
    bounded(param, value, default, max)
}

/// Parses the name of a queue.
pub(crate) fn queue(text: &str) -> Result<QueueName, ApiError> {
    let invalid = || ApiError::invalid_value("queue", "queue must be MODEL@FORMAT");
    let (model, format) = text.rsplit_once('@').ok_or_else(invalid)?;
    for part in [model, format] {
        QueueName::check_part(part).map_err(|_| invalid())?;
    }
    Ok(QueueName { model: model.to_owned(), format: format.to_owned() })
}

/// Checks the name of a tenant.
pub(crate) fn tenant(name: &str) -> Result<Tenant, ApiError> {
    if name.is_empty() || name.contains('\0') {
        let message = "tenant must be a non-empty name without NUL characters";
        return Err(ApiError::invalid_value("tenant", message));
    }
    Ok(Tenant(name.to_owned()))
}

/// Parses a job id; a malformed one is treated as unknown.
pub(crate) fn job(text: &str) -> Result<JobId, ApiError> {
    text.parse().map_err(|_| ApiError::not_found("job", text))
}

/// Parses the beginning of a job id into the range of ids that begin with it.
pub(crate) fn job_prefix(text: &str) -> Result<RangeInclusive<JobId>, ApiError> {
    let message = "id_prefix must be 1 to 32 hexadecimal digits";
    JobId::with_prefix(text).ok_or_else(|| ApiError::invalid_value("id_prefix", message))
}

/// Conditions on jobs. All given conditions must hold.
#[derive(Debug, Clone, Default, Deserialize, utoipa::IntoParams, ToSchema)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Filter {
    /// Tenant of the job. Only operators may name another tenant.
    #[param(nullable = false)]
    tenant: Option<String>,
    /// Model of the job.
    #[param(nullable = false)]
    model: Option<String>,
    /// Weight format of the job.
    #[param(nullable = false)]
    format: Option<String>,
    /// `scheduled`, `queued`, `running`, `retrying`, `completed`, `failed`, `cancelled` or `expired`.
    #[param(nullable = false)]
    state: Option<String>,
    /// Error code of a dead letter.
    #[param(nullable = false)]
    error_code: Option<String>,
    /// Error message of a dead letter, without numbers and ids.
    #[param(nullable = false)]
    error_signature: Option<String>,
    /// `custom_id` of a batch line.
    #[param(nullable = false)]
    custom_id: Option<String>,
    /// Beginning of the `custom_id`. A page tests the jobs that it scans, so that it may have none although later
    /// pages have some: add a range of time.
    #[param(nullable = false)]
    custom_id_prefix: Option<String>,
    /// A pair of the caller's metadata, `NAME=VALUE`, of the job or of its batch. Of jobs with metadata, a page tests
    /// those that it scans; of batches, the latest 10,000 are searched, and at most 20 may match.
    #[param(nullable = false)]
    metadata: Option<String>,
    /// Beginning of the job's id: hexadecimal digits.
    #[param(nullable = false)]
    id_prefix: Option<String>,
    /// Worker that claimed the job last.
    #[param(nullable = false)]
    worker: Option<String>,
    /// Batch of the job.
    #[param(nullable = false)]
    batch: Option<String>,
    /// Earliest creation time, in milliseconds since 1970.
    #[param(nullable = false)]
    from_ms: Option<i64>,
    /// End of the creation times (exclusive), in milliseconds since 1970.
    #[param(nullable = false)]
    to_ms: Option<i64>,
}

impl Filter {
    /// Reads a filter from a query string, beside the parameters of a page.
    pub fn from_query(mut query: Map<String, Value>) -> Result<Self, ApiError> {
        query.retain(|param, _| !["limit", "after"].contains(&param.as_str()));
        for param in ["from_ms", "to_ms"] {
            if let Some(value) = query.get_mut(param) {
                let ms: Option<i64> = parsed(param, "milliseconds", value.as_str())?;
                *value = ms.into();
            }
        }
        from_query(query)
    }

    /// Converts it for the store. Callers other than operators are limited to their own tenant.
    pub async fn for_caller(self, app: &App, caller: &Caller) -> Result<JobFilter, ApiError> {
        let texts = [
            ("tenant", &self.tenant),
            ("model", &self.model),
            ("format", &self.format),
            ("error_code", &self.error_code),
            ("error_signature", &self.error_signature),
            ("custom_id", &self.custom_id),
            ("custom_id_prefix", &self.custom_id_prefix),
            ("worker", &self.worker),
        ];
        for (param, text) in texts {
            if text.as_ref().is_some_and(|text| text.contains('\0')) {
                let message = format!("{param} must not contain NUL characters");
                return Err(ApiError::invalid_value(param, message));
            }
        }
        let tenant = match self.tenant.map(Tenant) {
            tenant if caller.may_operate() => tenant,
            Some(tenant) if tenant != caller.tenant => {
                return Err(ApiError::forbidden(KeyRole::Operate));
            }
            _ => Some(caller.tenant.clone()),
        };
        let state: Option<JobState> = parsed("state", "a job state", self.state.as_deref())?;
        let prefix = self.id_prefix.as_deref().map(job_prefix).transpose()?;
        let filter = JobFilter {
            tenant,
            model: self.model,
            format: self.format,
            state,
            error_code: self.error_code,
            error_signature: self.error_signature,
            custom_id: self.custom_id,
            custom_id_prefix: self.custom_id_prefix,
            metadata: self.metadata.as_deref().map(metadata::condition).transpose()?,
            owner: self.worker,
            ids: parsed("batch", "a batch id", self.batch.as_deref())?.map(BatchId::all_jobs),
            from: self.from_ms.map(Timestamp),
            to: self.to_ms.map(Timestamp),
        };
        metadata::with_batches(app, filter.within(prefix)).await
    }
}
