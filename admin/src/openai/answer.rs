//! What whole and streamed answers share: the job, the options of the stream, and the outcome.

use serde_json::{Map, Value};
use tokio::time::Instant;
use tritmill_client::{Endpoint, Fields};
use tritmill_queue::{Completion, FinishedJob, JobId, Outcome, QueueName, Timestamp};

use crate::{ApiError, App};

/// Options of a streamed answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Streaming {
    /// Whether a last chunk carries the token counts.
    pub include_usage: bool,
}

impl Streaming {
    /// Removes `stream` and `stream_options` from a body; `None` if the answer is not streamed.
    pub fn take(map: &mut Map<String, Value>) -> Result<Option<Self>, ApiError> {
        // The order only decides which of several unknown parameters is named first.
        let mut take = |name: &str| map.swap_remove(name).map(|value| (name.to_owned(), value));
        let taken: Map<String, Value> =
            [take("stream"), take("stream_options")].into_iter().flatten().collect();
        let mut fields = Fields::new(taken, "");
        let is_streamed = fields.boolean("stream")? == Some(true);
        let include_usage = match fields.take("stream_options") {
            None => false,
            Some(_) if !is_streamed => {
                let message = "stream_options needs stream to be true";
                return Err(ApiError::invalid_value("stream_options", message));
            }
            Some(Value::Object(options)) => {
                let mut options = Fields::new(options, "stream_options.");
                let include_usage = options.boolean("include_usage")?.unwrap_or(false);
                // Would pad chunks to hide their lengths; accepted without effect.
                options.boolean("include_obfuscation")?;
                options.finish()?;
                include_usage
            }
            Some(_) => {
                let message = "stream_options must be an object";
                return Err(ApiError::invalid("invalid_type", message).at("stream_options"));
            }
        };
        Ok(is_streamed.then_some(Self { include_usage }))
    }
}

/// A job that a caller waits for. Dropping it cancels the job unless it is finished.
pub(crate) struct AwaitedJob {
    pub app: App,
    pub id: JobId,
    /// When the job expires.
    pub expires: Instant,
    pub is_finished: bool,
}

impl Drop for AwaitedJob {
    fn drop(&mut self) {
        if !self.is_finished {
            self.app.abandoned_jobs.add(self.id, self.expires);
        }
    }
}

/// Values that every answer and every chunk contains.
pub(crate) struct AnswerHead {
    pub id: JobId,
    /// Endpoint, which decides the shape of the answer.
    pub endpoint: Endpoint,
    /// Queue that the job was submitted to.
    pub queue: QueueName,
    /// Time of the request.
    pub created: Timestamp,
}

/// Returns the completion of a finished job, or why there is none.
pub(crate) fn completion(ended: FinishedJob) -> Result<Completion, ApiError> {
    match ended.outcome {
        Some(Outcome::Completed(completion)) => Ok(completion),
        Some(Outcome::Error(error)) => Err(ApiError::job_failed(&error)),
        Some(Outcome::Expired) => Err(ApiError::answer_timeout()),
        None => Err(ApiError::conflict("cancelled", "the job was cancelled")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn taken(body: Value) -> Result<Option<Streaming>, ApiError> {
        let Value::Object(mut map) = body else { panic!("an object") };
        let streaming = Streaming::take(&mut map);
        assert!(!map.contains_key("stream") && !map.contains_key("stream_options"));
        streaming
    }

    #[test]
    fn stream_options_are_validated() {
        assert_eq!(taken(json!({})), Ok(None));
        assert_eq!(taken(json!({ "stream": false })), Ok(None));
        let plain = Some(Streaming { include_usage: false });
        assert_eq!(taken(json!({ "stream": true })), Ok(plain));
        let usage = json!({ "stream": true, "stream_options": { "include_usage": true } });
        assert_eq!(taken(usage), Ok(Some(Streaming { include_usage: true })));
        for wrong in [
            json!({ "stream": "yes" }),
            json!({ "stream_options": { "include_usage": true } }),
            json!({ "stream": true, "stream_options": [] }),
            json!({ "stream": true, "stream_options": { "shape": 1 } }),
        ] {
            assert!(taken(wrong).expect_err("invalid").param().is_some());
        }
    }
}
