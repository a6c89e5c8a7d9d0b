//! How operators' requests are read, and refused by the name of the field.

use std::str::FromStr;

use axum::extract::{Query, rejection::QueryRejection};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value};
use tritmill_queue::{JobId, JobState, QueueName, Tenant, Timestamp, store::JobFilter};
use utoipa::ToSchema;

use crate::{access::Caller, error::ApiError};

/// A query, or which parameter cannot be understood.
pub(super) fn query<T>(query: Result<Query<T>, QueryRejection>) -> Result<T, ApiError> {
    query
        .map(|query| query.0)
        .map_err(|rejection| ApiError::invalid("invalid_query", rejection.body_text()))
}

/// A body, or what is wrong with it.
pub(super) fn body<T: DeserializeOwned>(map: Map<String, Value>) -> Result<T, ApiError> {
    serde_json::from_value(Value::Object(map))
        .map_err(|error| ApiError::invalid("invalid_value", format!("the body: {error}")))
}

/// A field that is spelled, parsed.
pub(super) fn parsed<T: FromStr>(
    param: &'static str,
    expected: &str,
    text: Option<&str>,
) -> Result<Option<T>, ApiError> {
    let bad =
        |_| ApiError::invalid("invalid_value", format!("{param} must be {expected}")).at(param);
    text.map(|text| text.parse().map_err(bad)).transpose()
}

/// A number within bounds.
pub(super) fn bounded(
    param: &'static str,
    value: Option<u64>,
    default: u64,
    most: u64,
) -> Result<u64, ApiError> {
    match value.unwrap_or(default) {
        value if (1..=most).contains(&value) => Ok(value),
        _ => {
            let message = format!("{param} must be between 1 and {most}");
            Err(ApiError::invalid("invalid_value", message).at(param))
        }
    }
}

/// A queue's name.
pub(crate) fn queue(text: &str) -> Result<QueueName, ApiError> {
    let bad = || ApiError::invalid("invalid_value", "queue must be MODEL@FORMAT").at("queue");
    let (model, format) = text.rsplit_once('@').ok_or_else(bad)?;
    for part in [model, format] {
        QueueName::check_part(part).map_err(|_| bad())?;
    }
    Ok(QueueName { model: model.to_owned(), format: format.to_owned() })
}

/// A tenant's name.
pub(super) fn tenant(name: &str) -> Result<Tenant, ApiError> {
    if name.is_empty() || name.contains('\0') {
        let message = "tenant must be a name, without NUL characters";
        return Err(ApiError::invalid("invalid_value", message).at("tenant"));
    }
    Ok(Tenant(name.to_owned()))
}

/// Which jobs. All that is given must hold.
#[derive(Debug, Clone, Default, Deserialize, utoipa::IntoParams, ToSchema)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Filter {
    /// Whose; another tenant's are for operators.
    #[param(nullable = false)]
    pub tenant: Option<String>,
    /// Of this model.
    #[param(nullable = false)]
    pub model: Option<String>,
    /// In this format.
    #[param(nullable = false)]
    pub format: Option<String>,
    /// `scheduled`, `queued`, `running`, `retrying`, `completed`, `failed`, `cancelled` or `expired`.
    #[param(nullable = false)]
    pub state: Option<String>,
    /// Dead letters with this code.
    #[param(nullable = false)]
    pub error_code: Option<String>,
    /// Dead letters whose error reads so, numbers and ids aside.
    #[param(nullable = false)]
    pub error_signature: Option<String>,
    /// Lines of batches of this name.
    #[param(nullable = false)]
    pub custom_id: Option<String>,
    /// Of this batch.
    #[param(nullable = false)]
    pub batch: Option<String>,
    /// Named at this time or later, in milliseconds.
    #[param(nullable = false)]
    pub from_ms: Option<i64>,
    /// Named before this time, in milliseconds.
    #[param(nullable = false)]
    pub to_ms: Option<i64>,
}

impl Filter {
    /// As the store has it, for this caller: who does not operate sees its own tenant's.
    pub fn of(self, caller: &Caller) -> Result<JobFilter, ApiError> {
        let texts = [
            ("tenant", &self.tenant),
            ("model", &self.model),
            ("format", &self.format),
            ("error_code", &self.error_code),
            ("error_signature", &self.error_signature),
            ("custom_id", &self.custom_id),
        ];
        for (param, text) in texts {
            if text.as_ref().is_some_and(|text| text.contains('\0')) {
                let message = format!("{param} must not have NUL characters");
                return Err(ApiError::invalid("invalid_value", message).at(param));
            }
        }
        let asked = self.tenant.map(Tenant);
        let tenant = match caller.operates() {
            true => asked,
            false if asked.as_ref().is_none_or(|asked| *asked == caller.tenant) => {
                Some(caller.tenant.clone())
            }
            false => return Err(ApiError::forbidden("operate")),
        };
        let state: Option<JobState> = parsed("state", "a job's state", self.state.as_deref())?;
        Ok(JobFilter {
            tenant,
            model: self.model,
            format: self.format,
            state,
            error_code: self.error_code,
            error_signature: self.error_signature,
            custom_id: self.custom_id,
            batch: parsed("batch", "a batch's id", self.batch.as_deref())?,
            from: self.from_ms.map(Timestamp),
            to: self.to_ms.map(Timestamp),
        })
    }
}

/// A job's id, or that there is none.
pub(crate) fn job(text: &str) -> Result<JobId, ApiError> {
    text.parse().map_err(|_| ApiError::not_found("job", text))
}
