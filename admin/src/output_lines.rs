//! Lines of the output of a batch: those of its files, and of its results while it runs.

use serde_json::{Map, Value};
use tritmill_client::{Endpoint, RefusedLine, answer};
use tritmill_queue::{
    ErrorKind, Job, JobError, Outcome, Timestamp,
    store::{AnsweredLine, EndedJob},
};

use crate::{shown_errors::outcome_for_tenant, store::Batch};

/// A valid line of a batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked<'a> {
    /// The line in the input, from 1.
    pub number: u64,
    pub custom_id: &'a str,
    /// Hash of the request.
    pub key: &'a [u8],
    /// Shape of its answer.
    pub shape: &'a str,
    /// What its answer repeats of the request.
    pub repeated: &'a Map<String, Value>,
}

impl Asked<'_> {
    /// Returns the line of an outcome.
    pub fn ended(self, outcome: Outcome, finished_at: Timestamp) -> String {
        if outcome == Outcome::Expired {
            return self.expired();
        }
        answer::line(&AnsweredLine {
            seq: 0,
            number: self.number,
            custom_id: Some(self.custom_id.to_owned()),
            key: self.key.to_vec(),
            shape: self.shape.to_owned(),
            outcome: Some(outcome_for_tenant(outcome)),
            finished_at,
            repeated: self.repeated.clone(),
        })
    }

    /// Returns the line of a request that the batch had no time for.
    pub fn expired(self) -> String {
        let message = "the batch expired before the request was answered";
        answer::unanswered_line(self.key, self.custom_id, "batch_expired", message)
    }

    /// Returns the line of a cancelled request.
    pub fn cancelled(self) -> String {
        let message = "the request was cancelled";
        answer::unanswered_line(self.key, self.custom_id, "batch_cancelled", message)
    }

    /// Returns the line of a request that the database refuses.
    pub fn not_storable(self, batch: &Batch, why: &str) -> String {
        let refused = JobError::new(ErrorKind::InvalidRequest, "not_storable", why);
        self.ended(Outcome::Error(refused), batch.created_at)
    }
}

/// Returns the shape of answers of a batch of lines for one endpoint.
fn shape_of(batch: &Batch) -> &'static str {
    Endpoint::of_batch(&batch.endpoint).unwrap_or(Endpoint::Plain).shape()
}

/// Returns the line of a refused line.
pub(crate) fn refused(line: &RefusedLine) -> String {
    answer::refusal_line(&line.key, line.custom_id.as_deref(), &line.refusal)
}

/// Returns the line of a job that the database refuses.
pub(crate) fn not_storable(batch: &Batch, job: &Job, why: &str) -> String {
    let number = batch.id.line(job.id).unwrap_or_default().into();
    let custom_id = job.custom_id.as_deref().unwrap_or_default();
    let key = job.line_key.unwrap_or_default();
    let shape = job.line_shape.unwrap_or_else(|| shape_of(batch));
    Asked { number, custom_id, key: &key, shape, repeated: &job.echo }.not_storable(batch, why)
}

/// Returns the line of a job that ended; `None` if it was cancelled.
pub(crate) fn of_job(batch: &Batch, job: EndedJob) -> Option<String> {
    let outcome = job.outcome?;
    // Jobs of an earlier release have no key.
    let key = job.line_key.as_ref().map_or(job.id.as_bytes().as_slice(), |key| key.as_slice());
    let number = batch.id.line(job.id)?.into();
    let custom_id = job.custom_id.as_deref().unwrap_or_default();
    let shape = job.line_shape.as_deref().unwrap_or_else(|| shape_of(batch));
    let repeated = &job.repeated;
    Some(Asked { number, custom_id, key, shape, repeated }.ended(outcome, job.finished_at))
}
