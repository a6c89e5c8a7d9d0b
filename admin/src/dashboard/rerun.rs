//! Runs a job again: as it was, or after an edit of its request.
//!
//! The new job has the tenant, the priority and the name of the old one. The edited request is read by the parser of the
//! API; what it refuses is shown above the form, with the text as it was sent.

use askama::Template;
use axum::{extract::Path, http::StatusCode};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tritmill_client::{Endpoint, parse_body};
use tritmill_queue::{Job, JobId};

use super::{Content, PageForm, PageResult, Visit};
use crate::{
    ApiError, App,
    extract::parsed,
    job_request::of_job,
    operator::{audit, job},
};

#[derive(Template)]
#[template(path = "job_edit.html")]
struct EditView<'a> {
    id: JobId,
    endpoint: Endpoint,
    request: &'a str,
    problem: Option<&'a str>,
}

impl EditView<'_> {
    fn content(&self) -> Content {
        Content::new(format!("Edit job {}", self.id), self)
    }

    /// Rows of the text area.
    fn rows(&self) -> usize {
        self.request.lines().count().clamp(8, 30) + 1
    }
}

/// Shows the request of a job in a form.
pub(crate) async fn edit(visit: Visit, Path(id): Path<String>) -> PageResult {
    visit
        .show(move |app, caller| {
            let id = id.clone();
            async move {
                let job = job::find(&app, &caller, &id).await?.record.job;
                let (endpoint, body) = of_job(&job);
                let request = pretty(&body);
                let view = EditView { id: job.id, endpoint, request: &request, problem: None };
                Ok(view.content())
            }
        })
        .await
}

fn pretty(body: &Map<String, Value>) -> String {
    serde_json::to_string_pretty(body).expect("maps have text keys")
}

/// The edited request, as JSON; empty: the job as it was.
#[derive(Deserialize)]
pub(crate) struct RerunForm {
    #[serde(default)]
    request: String,
}

/// Submits the new job and shows it.
pub(crate) async fn rerun(
    visit: Visit,
    Path(id): Path<String>,
    PageForm(form): PageForm<RerunForm>,
) -> PageResult {
    let old = job::find(&visit.app, &visit.caller, &id).await?.record.job;
    let again = Job {
        id: JobId::generate(),
        run_at: None,
        expires_at: None,
        traceparent: None,
        ..old.clone()
    };
    let is_edited = !form.request.trim().is_empty();
    let again = match is_edited {
        false => again,
        true => match edited(&visit.app, again, &form.request).await {
            Ok(job) => job,
            Err(error) if error.status().is_server_error() => return Err(error.into()),
            Err(error) => {
                let (endpoint, _) = of_job(&old);
                let (request, problem) = (form.request.as_str(), Some(error.message()));
                let view = EditView { id: old.id, endpoint, request, problem };
                return Ok(visit.page(StatusCode::BAD_REQUEST, &view.content()));
            }
        },
    };
    if visit.caller.may_operate() {
        let detail = json!({ "edited": is_edited, "job": again.id.to_string() });
        let target = old.id.to_string();
        audit::record(&visit.app, &visit.caller, "job.rerun", &target, detail).await?;
    }
    let id = visit.app.client.submit(again).await?;
    Ok(visit.done(&format!("/dashboard/jobs/{id}"), "This is the new job. The other one is kept."))
}

/// Returns the job with the prompt, parameters and model of an edited request.
async fn edited(app: &App, job: Job, request: &str) -> Result<Job, ApiError> {
    let map = match serde_json::from_str(request) {
        Ok(Value::Object(map)) => map,
        Ok(_) => {
            return Err(ApiError::invalid("invalid_type", "the request must be a JSON object"));
        }
        Err(error) => {
            let (line, column) = (error.line(), error.column());
            let message = format!("invalid JSON at line {line}, column {column}");
            return Err(ApiError::invalid("invalid_json", message));
        }
    };
    let (endpoint, _) = of_job(&job);
    let body = parsed(move || parse_body(endpoint, map)).await?;
    let queue = match &body.model {
        None => job.queue.clone(),
        Some(name) => {
            app.models.find(name).await?.ok_or_else(|| ApiError::model_not_found(name))?
        }
    };
    let seed = body.seed.unwrap_or(job.seed);
    let (task, prompt, sampling) = (body.task, body.prompt, body.sampling);
    Ok(Job { queue, task, prompt, sampling, seed, ..job })
}
