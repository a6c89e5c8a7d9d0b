//! A job: its timeline, what was asked and what came of it, and its text while it is generated.

use std::{collections::BTreeMap, time::Duration};

use askama::Template;
use axum::{extract::Path, response::Response};
use serde_json::json;
use tritmill_queue::{
    EventId, JobEvent, JobId, JobState, Message, Outcome, Prompt, Role, Timestamp,
    store::{
        KeyRole,
        job_queries::{Attempt, AttemptEnd, JobHistory},
    },
};

use super::{
    filters,
    page::{PageError, View, Visit},
    session::percent_encoded,
};
use crate::{access::Caller, app::App, error::ApiError, operator::story};

/// Characters of a text that a page shows.
const TEXT_MAX: usize = 20_000;
/// Reads of a job's events for one look: a look shows what came so far, to this bound.
const READS_MAX: usize = 64;

/// What happened, in order.
struct Step {
    at: Option<Timestamp>,
    name: String,
    detail: String,
    is_bad: bool,
}

#[derive(Template)]
#[template(path = "job.html")]
struct One {
    now: Timestamp,
    id: JobId,
    story: JobHistory,
    /// The text of each choice, as far as there is any.
    texts: Vec<String>,
    is_live: bool,
    may_cancel: bool,
    may_replay: bool,
}

impl One {
    fn queue_href(&self) -> String {
        format!("/dashboard/queues/{}", percent_encoded(&self.story.record.job.queue.to_string()))
    }

    /// What the model was given, in turns.
    fn prompt(&self) -> Vec<(&'static str, String)> {
        match &self.story.record.job.prompt {
            Prompt::Text(text) => vec![("text", shortened(text))],
            Prompt::Question(text) => vec![(Role::User.as_str(), shortened(text))],
            Prompt::Messages(messages) => {
                let turn = |message: &Message| (message.role.as_str(), shortened(&message.content));
                messages.iter().map(turn).collect()
            }
            Prompt::Tokens(tokens) => vec![("tokens", format!("{} token ids", tokens.len()))],
        }
    }

    fn usage(&self) -> Option<(u64, u64)> {
        match &self.story.record.outcome {
            Some(Outcome::Completed(answer)) => {
                Some((answer.usage.prompt_tokens, answer.usage.completion_tokens))
            }
            _ => None,
        }
    }

    /// From submission to the first claim.
    fn waited(&self) -> Option<Duration> {
        self.story.started_at.map(|started| started.since(self.story.submitted_at))
    }

    /// From the first claim to the end, or to now.
    fn took(&self) -> Option<Duration> {
        let end = self.story.record.finished_at.unwrap_or(self.now);
        self.story.started_at.map(|started| end.since(started))
    }

    /// From submission to the first token of the last attempt.
    fn first_token(&self) -> Option<Duration> {
        let attempt = self.story.attempts.last()?;
        let claimed = attempt.claimed_at?.since(self.story.submitted_at);
        attempt.first_token.map(|first| claimed + first)
    }

    fn steps(&self) -> Vec<Step> {
        let story = &self.story;
        let step = |at, name: &str, detail: String| Step {
            at,
            name: name.to_owned(),
            detail,
            is_bad: false,
        };
        let mut steps = vec![step(Some(story.submitted_at), "Submitted", String::new())];
        for (number, attempt) in story.attempts.iter().enumerate() {
            steps.extend(self.attempt(number + 1, attempt));
        }
        let record = &story.record;
        match record.state {
            JobState::Scheduled | JobState::Retrying => {
                steps.push(step(story.run_at, "Runs again", "not before".to_owned()));
            }
            JobState::Cancelled => {
                steps.push(step(record.finished_at, "Cancelled", String::new()));
            }
            JobState::Expired => {
                let late = step(record.finished_at, "Expired", "its deadline passed".to_owned());
                steps.push(Step { is_bad: true, ..late });
            }
            JobState::Failed => {
                let detail = "its attempts were used up, or it can never be answered".to_owned();
                let dead = step(record.finished_at, "Dead letter", detail);
                steps.push(Step { is_bad: true, ..dead });
            }
            JobState::Queued | JobState::Running | JobState::Completed => {}
        }
        steps
    }

    fn attempt(&self, number: usize, attempt: &Attempt) -> Vec<Step> {
        let owner = attempt.owner.as_deref().unwrap_or("a worker");
        let mut steps = vec![Step {
            at: attempt.claimed_at,
            name: format!("Attempt {number}"),
            detail: format!("claimed by {owner}, epoch {}", attempt.epoch),
            is_bad: false,
        }];
        if let (Some(claimed), Some(first)) = (attempt.claimed_at, attempt.first_token) {
            steps.push(Step {
                at: Some(claimed.after(first)),
                name: "First token".to_owned(),
                detail: format!("{} after the claim", filters::lasting(first)),
                is_bad: false,
            });
        }
        let (name, detail, is_bad) = match &attempt.end {
            AttemptEnd::Running => return steps,
            AttemptEnd::Completed => ("Answered", String::new(), false),
            AttemptEnd::Error(error) => {
                ("Failed", format!("{}: {}", error.code, shortened(&error.message)), true)
            }
            AttemptEnd::Expired => ("Stopped", "its deadline passed".to_owned(), true),
        };
        steps.push(Step { at: attempt.ended_at, name: name.to_owned(), detail, is_bad });
        steps
    }
}

impl View for One {
    fn title(&self) -> String {
        format!("Job {}", self.id)
    }
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(TEXT_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// A job.
pub(crate) async fn one(visit: Visit, Path(id): Path<String>) -> Result<Response, PageError> {
    visit.show(move |app, caller| look(app, caller, id.clone())).await
}

async fn look(app: App, caller: Caller, id: String) -> Result<One, PageError> {
    let story = story::find(&app, &caller, &id).await?;
    let record = &story.record;
    let id = record.job.id;
    let is_live = !record.state.is_terminal() && record.job.stream;
    let texts = match &record.outcome {
        Some(Outcome::Completed(answer)) => {
            answer.choices.iter().map(|choice| shortened(&choice.text)).collect()
        }
        _ if is_live => so_far(&app, id).await,
        _ => Vec::new(),
    };
    Ok(One {
        now: app.client().now().await?,
        id,
        texts,
        is_live,
        may_cancel: !record.state.is_terminal() && caller.role >= KeyRole::Submit,
        may_replay: record.state == JobState::Failed && caller.role == KeyRole::Operate,
        story,
    })
}

/// The text of each choice that was generated so far.
async fn so_far(app: &App, id: JobId) -> Vec<String> {
    let (mut texts, mut after) = (BTreeMap::<u32, String>::new(), EventId::default());
    for _ in 0..READS_MAX {
        let events = app.client().events_after(id, after).await;
        let Some((last, _)) = events.last() else { break };
        after = *last;
        for (_, event) in events {
            match event {
                JobEvent::Delta { choice, text } => {
                    texts.entry(choice).or_default().push_str(&text)
                }
                // What an earlier attempt wrote is void.
                JobEvent::Started => texts.clear(),
                _ => {}
            }
        }
    }
    texts.into_values().map(|text| shortened(&text)).collect()
}

/// Withdraws a job.
pub(crate) async fn cancel(visit: Visit, Path(id): Path<String>) -> Result<Response, PageError> {
    let job = story::find(&visit.app, &visit.caller, &id).await?.record.job.id;
    let done = match visit.app.client().cancel(&[job]).await?.is_empty() {
        true => "The job was over already.",
        false => "The job is cancelled.",
    };
    Ok(visit.done(&format!("/dashboard/jobs/{job}"), done))
}

/// Submits a dead letter again, and goes to the new job.
pub(crate) async fn replay(visit: Visit, Path(id): Path<String>) -> Result<Response, PageError> {
    let job = story::find(&visit.app, &visit.caller, &id).await?.record.job.id;
    visit.note("dead_letters.replay", &job.to_string(), json!({})).await?;
    let replays = visit.app.store().replay(&[job], None).await?;
    let Some(replay) = replays.into_iter().next() else {
        return Err(ApiError::not_found("dead letter", &id).into());
    };
    visit.app.client().announce(std::slice::from_ref(&replay.job)).await;
    let there = format!("/dashboard/jobs/{}", replay.job.id);
    Ok(visit.done(&there, "This is the new job. The dead letter stays as it was."))
}
