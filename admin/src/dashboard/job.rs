//! Page of a job: timeline, request, result, and its text while it is generated.

use std::{collections::BTreeMap, time::Duration};

use askama::Template;
use axum::extract::Path;
use serde::Deserialize;
use serde_json::{Value, json};
use tritmill_queue::{
    EventId, JobEvent, JobId, JobState, Message, Outcome, Part, Priority, Prompt, Role, Timestamp,
    Vector,
    store::job_queries::{Attempt, AttemptEnd, JobHistory},
};

use super::{Content, PageError, PageForm, PageResult, Visit, filters, percent_encoded};
use crate::{
    ApiError, App, Caller,
    operator::{audit, job},
};

/// Most characters of a text that the page shows.
const TEXT_MAX: usize = 20_000;
/// Most vectors that the page shows, and most elements of each.
const VECTORS_MAX: usize = 20;
const ELEMENTS_MAX: usize = 32;
/// Most reads of a job's events for one rendering.
const READS_MAX: usize = 64;

/// A step of the timeline.
struct Step {
    at: Option<Timestamp>,
    name: String,
    detail: String,
    is_bad: bool,
}

impl Step {
    fn new(at: Option<Timestamp>, name: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { at, name: name.into(), detail: detail.into(), is_bad: false }
    }

    fn bad(at: Option<Timestamp>, name: &str, detail: impl Into<String>) -> Self {
        Self { is_bad: true, ..Self::new(at, name, detail) }
    }
}

#[derive(Template)]
#[template(path = "job.html")]
struct JobView {
    now: Timestamp,
    id: JobId,
    history: JobHistory,
    /// Text of each choice, so far.
    texts: Vec<String>,
    is_live: bool,
    may_cancel: bool,
    may_replay: bool,
    may_rerun: bool,
    /// Whether its time and priority may be changed.
    may_hasten: bool,
    is_operator: bool,
}

impl JobView {
    fn queue_href(&self) -> String {
        format!("/dashboard/queues/{}", percent_encoded(&self.history.record.job.queue.to_string()))
    }

    /// The pairs that the caller gave it.
    fn metadata(&self) -> Vec<(&str, &str)> {
        let pairs = self.history.record.job.echo.get("metadata").and_then(Value::as_object);
        let text = |(name, value)| Some((String::as_str(name), Value::as_str(value)?));
        pairs.into_iter().flatten().filter_map(text).collect()
    }

    /// URL of the list of jobs with a pair.
    fn metadata_href(name: &str, value: &str) -> String {
        format!("/dashboard/jobs?metadata={}", percent_encoded(&format!("{name}={value}")))
    }

    /// The prompt as messages: role and text.
    fn prompt(&self) -> Vec<(&'static str, String)> {
        let part = |prompt: &Prompt| match prompt {
            Prompt::Text(text) => vec![("text", truncated(text))],
            Prompt::Question(text) => vec![(Role::User.as_str(), truncated(text))],
            Prompt::Messages(conversation) => {
                let turn = |message: &Message| {
                    (message.role.as_str(), truncated(&message.content.texts().concat()))
                };
                conversation.messages.iter().map(turn).collect()
            }
            Prompt::Tokens(tokens) => vec![("tokens", format!("{} token ids", tokens.len()))],
            Prompt::Several(parts) => vec![("prompts", parts.len().to_string())],
        };
        self.history.record.job.prompt.parts().iter().flat_map(part).collect()
    }

    fn usage(&self) -> Option<(u64, u64)> {
        match &self.history.record.outcome {
            Some(Outcome::Completed(answer)) => {
                Some((answer.usage.prompt_tokens, answer.usage.completion_tokens))
            }
            _ => None,
        }
    }

    /// Time from submission to the first claim.
    fn waited(&self) -> Option<Duration> {
        self.history.started_at.map(|started| started.since(self.history.submitted_at))
    }

    /// Time from the first claim to the end, or until now.
    fn took(&self) -> Option<Duration> {
        let end = self.history.record.finished_at.unwrap_or(self.now);
        self.history.started_at.map(|started| end.since(started))
    }

    /// Time from submission to the first token of the last attempt.
    fn first_token(&self) -> Option<Duration> {
        let attempt = self.history.attempts.last()?;
        let claimed = attempt.claimed_at?.since(self.history.submitted_at);
        attempt.first_token.map(|first| claimed + first)
    }

    fn steps(&self) -> Vec<Step> {
        let (history, record) = (&self.history, &self.history.record);
        let mut steps = vec![Step::new(Some(history.submitted_at), "Submitted", "")];
        for (number, attempt) in history.attempts.iter().enumerate() {
            steps.extend(attempt_steps(number + 1, attempt));
        }
        let at = record.finished_at;
        steps.extend(match record.state {
            JobState::Scheduled | JobState::Retrying => {
                Some(Step::new(history.run_at, "Starts", "at this time at the earliest"))
            }
            JobState::Cancelled => Some(Step::new(at, "Cancelled", "")),
            JobState::Expired => Some(Step::bad(at, "Expired", "its deadline passed")),
            JobState::Failed => {
                let detail = "no attempts left, or an error that cannot be retried";
                Some(Step::bad(at, "Dead letter", detail))
            }
            JobState::Queued | JobState::Running | JobState::Completed => None,
        });
        steps
    }
}

fn attempt_steps(number: usize, attempt: &Attempt) -> Vec<Step> {
    let owner = attempt.owner.as_deref().unwrap_or("a worker");
    let detail = format!("claimed by {owner}, epoch {}", attempt.epoch);
    let mut steps = vec![Step::new(attempt.claimed_at, format!("Attempt {number}"), detail)];
    if let (Some(claimed), Some(first)) = (attempt.claimed_at, attempt.first_token) {
        let detail = format!("{} after the claim", filters::duration_text(first));
        steps.push(Step::new(Some(claimed.after(first)), "First token", detail));
    }
    let at = attempt.ended_at;
    steps.extend(match &attempt.end {
        AttemptEnd::Running => None,
        AttemptEnd::Completed => Some(Step::new(at, "Answered", "")),
        AttemptEnd::Error(error) => {
            let detail = format!("{}: {}", error.code, truncated(&error.message));
            Some(Step::bad(at, "Failed", detail))
        }
        AttemptEnd::Expired => Some(Step::bad(at, "Stopped", "its deadline passed")),
    });
    steps
}

/// Shows the begin of a vector.
fn vector_text(Vector(vector): &Vector) -> String {
    let elements = vector.iter().take(ELEMENTS_MAX).map(|x| format!("{x:.6}"));
    let elements = elements.collect::<Vec<_>>().join(", ");
    let more = if vector.len() > ELEMENTS_MAX { ", …" } else { "" };
    format!("{} dimensions\n[{elements}{more}]", vector.len())
}

fn truncated(text: &str) -> String {
    match text.char_indices().nth(TEXT_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Shows a job.
pub(crate) async fn one(visit: Visit, Path(id): Path<String>) -> PageResult {
    visit.show(move |app, caller| load(app, caller, id.clone())).await
}

async fn load(app: App, caller: Caller, id: String) -> Result<Content, PageError> {
    let history = job::find(&app, &caller, &id).await?;
    let record = &history.record;
    let id = record.job.id;
    let is_live = !record.state.is_terminal() && record.job.stream;
    let texts = match &record.outcome {
        Some(Outcome::Completed(answer)) => {
            let texts = answer.choices.iter().map(|choice| truncated(&choice.text));
            let vectors = answer.embedded.iter().flat_map(|embedded| &embedded.vectors);
            texts.chain(vectors.take(VECTORS_MAX).map(vector_text)).collect()
        }
        _ if is_live => text_so_far(&app, id).await,
        _ => Vec::new(),
    };
    let view = JobView {
        now: app.client.now().await?,
        id,
        texts,
        is_live,
        may_cancel: !record.state.is_terminal() && caller.may_submit(),
        may_replay: record.state == JobState::Failed && caller.may_operate(),
        may_rerun: caller.may_submit(),
        may_hasten: matches!(record.state, JobState::Scheduled | JobState::Retrying)
            && caller.may_operate(),
        is_operator: caller.may_operate(),
        history,
    };
    Ok(Content::new(format!("Job {id}"), &view))
}

/// Returns the text of each choice that was generated so far.
async fn text_so_far(app: &App, id: JobId) -> Vec<String> {
    let (mut texts, mut after) = (BTreeMap::<u32, String>::new(), EventId::default());
    for _ in 0..READS_MAX {
        let events = app.client.events_after(id, after).await;
        let Some((last, _)) = events.last() else { break };
        after = *last;
        for (_, event) in events {
            match event {
                JobEvent::Delta { choice, part: Part::Content, text, .. } => {
                    texts.entry(choice).or_default().push_str(&text)
                }
                // Discards the text of an earlier attempt.
                JobEvent::Started => texts.clear(),
                _ => {}
            }
        }
    }
    texts.into_values().map(|text| truncated(&text)).collect()
}

/// Cancels a job.
pub(crate) async fn cancel(visit: Visit, Path(id): Path<String>) -> PageResult {
    let job = job::find(&visit.app, &visit.caller, &id).await?.record.job.id;
    let notice = match visit.app.client.cancel(&[job]).await?.is_empty() {
        true => "The job was already finished.",
        false => "The job is cancelled.",
    };
    Ok(visit.done(&format!("/dashboard/jobs/{job}"), notice))
}

/// Makes a scheduled or retrying job due now.
pub(crate) async fn run_now(visit: Visit, Path(id): Path<String>) -> PageResult {
    let job = job::hasten(&visit.app, &visit.caller, &id).await?;
    let notice = "The job is due: it runs as soon as a worker has room.";
    Ok(visit.done(&format!("/dashboard/jobs/{job}"), notice))
}

/// The form to change a priority.
#[derive(Deserialize)]
pub(crate) struct PriorityForm {
    #[serde(default)]
    priority: String,
}

/// Changes the priority of a scheduled or retrying job.
pub(crate) async fn set_priority(
    visit: Visit,
    Path(id): Path<String>,
    PageForm(PriorityForm { priority }): PageForm<PriorityForm>,
) -> PageResult {
    let job = job::set_priority(&visit.app, &visit.caller, &id, &priority).await?;
    Ok(visit.done(&format!("/dashboard/jobs/{job}"), "The priority is changed."))
}

/// Replays a dead letter and shows the new job.
pub(crate) async fn replay(visit: Visit, Path(id): Path<String>) -> PageResult {
    let job = job::find(&visit.app, &visit.caller, &id).await?.record.job.id;
    let (app, caller) = (&visit.app, &visit.caller);
    audit::record(app, caller, "dead_letters.replay", &job.to_string(), json!({})).await?;
    let replays = visit.app.store.replay(&[job], None).await?;
    let Some(replay) = replays.into_iter().next() else {
        return Err(ApiError::not_found("dead letter", &id).into());
    };
    visit.app.client.announce(std::slice::from_ref(&replay.job)).await;
    let page = format!("/dashboard/jobs/{}", replay.job.id);
    Ok(visit.done(&page, "This is the new job. The dead letter is kept."))
}
