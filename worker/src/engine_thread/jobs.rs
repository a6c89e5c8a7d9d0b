//! The jobs in an engine. A job has a request for each of its prompts; the choices of all of them are those of the job.

use std::{
    collections::{HashMap, VecDeque},
    time::Instant,
};

use tritmill_engine::{Choice, Engine, FinishReason, Output, Request, RequestId, SubmitError};
use tritmill_queue::ClaimRef;

use super::End;

/// A job in the engine.
pub(super) struct ActiveJob {
    /// Its tokens, if it can be resumed from them.
    pub tokens: Option<Vec<u32>>,
    /// Number of tokens in the last progress report.
    pub reported: usize,
    pub stream: bool,
    pub has_token: bool,
    /// Time of its arrival, until its first step.
    pub waits_since: Option<Instant>,
    /// Choices of each prompt.
    choices: u32,
    /// Requests that the engine has no room for, with the number of their prompt.
    waiting: VecDeque<(usize, Request)>,
    /// Requests in the engine.
    running: Vec<RequestId>,
    /// The answers to the prompts, in their order.
    outputs: Vec<Option<Output>>,
    /// Why the job ends before its requests do.
    failure: Option<End>,
}

/// The jobs, and the requests that they have in the engine.
#[derive(Default)]
pub(super) struct Jobs {
    jobs: HashMap<ClaimRef, ActiveJob>,
    requests: HashMap<RequestId, (ClaimRef, usize)>,
}

impl Jobs {
    /// Adds a job and gives the engine what it has room for. Returns its end if nothing could be started.
    pub fn start(
        &mut self,
        engine: &mut Engine,
        held: ClaimRef,
        requests: Vec<Request>,
        stream: bool,
    ) -> Option<End> {
        let only = match requests.as_slice() {
            [only] => Some(only),
            _ => None,
        };
        let resumable =
            |request: &&Request| request.sampling.n == 1 && request.sampling.logprobs.is_none();
        let tokens = only.filter(resumable).map(|request| request.resume.clone());
        let job = ActiveJob {
            reported: tokens.as_ref().map_or(0, Vec::len),
            tokens,
            stream,
            has_token: false,
            waits_since: Some(Instant::now()),
            choices: requests.first().map_or(1, |request| request.sampling.n as u32),
            outputs: vec![None; requests.len()],
            waiting: requests.into_iter().enumerate().collect(),
            running: Vec::new(),
            failure: None,
        };
        self.jobs.insert(held, job);
        self.fill(engine, held)
    }

    /// Gives the engine waiting requests of a job. Returns the job's end, if that is its end.
    fn fill(&mut self, engine: &mut Engine, held: ClaimRef) -> Option<End> {
        let job = self.jobs.get_mut(&held)?;
        while let Some((part, request)) = job.waiting.pop_front() {
            // An engine without room keeps nothing of the request.
            match engine.submit(request.clone()) {
                Ok(id) => {
                    job.running.push(id);
                    self.requests.insert(id, (held, part));
                }
                Err(SubmitError::Full { .. }) if job.outputs.len() > 1 => {
                    job.waiting.push_front((part, request));
                    break;
                }
                Err(error) => {
                    job.fail(engine, End::Refused(error));
                    break;
                }
            }
        }
        self.take_ended(held)
    }

    /// Returns the job that a request belongs to, and the index of one of the request's choices in it.
    pub fn find(&mut self, id: RequestId, choice: u32) -> Option<(ClaimRef, u32, &mut ActiveJob)> {
        let &(held, part) = self.requests.get(&id)?;
        let job = self.jobs.get_mut(&held)?;
        let choice = part as u32 * job.choices + choice;
        Some((held, choice, job))
    }

    /// Takes the end of a request; returns the job's end, if it has ended.
    pub fn finish(&mut self, id: RequestId, end: End) -> Option<(ClaimRef, End)> {
        let (held, part) = self.requests.remove(&id)?;
        let job = self.jobs.get_mut(&held)?;
        job.running.retain(|running| *running != id);
        match end {
            End::Finished(output) => job.outputs[part] = Some(output),
            other => job.failure = Some(job.failure.take().unwrap_or(other)),
        }
        self.take_ended(held).map(|end| (held, end))
    }

    /// Gives the engine what it has room for now. Returns jobs that ended by it.
    pub fn refill(&mut self, engine: &mut Engine) -> Vec<(ClaimRef, End)> {
        let mut waiting: Vec<ClaimRef> = self
            .jobs
            .iter()
            .filter(|(_, job)| !job.waiting.is_empty())
            .map(|(held, _)| *held)
            .collect();
        waiting.sort_unstable();
        let ended = |held| self.fill(engine, held).map(|end| (held, end));
        waiting.into_iter().filter_map(ended).collect()
    }

    /// Cancels the requests of a job. Returns its end, if it has none in the engine.
    pub fn cancel(&mut self, engine: &mut Engine, held: ClaimRef) -> Option<End> {
        let job = self.jobs.get_mut(&held)?;
        for (part, _) in job.waiting.drain(..) {
            job.outputs[part] = Some(cancelled());
        }
        job.running.iter().for_each(|id| engine.cancel(*id));
        self.take_ended(held)
    }

    /// Removes a job that has nothing in the engine or before it; returns its end.
    fn take_ended(&mut self, held: ClaimRef) -> Option<End> {
        let job = self.jobs.get(&held)?;
        if !job.running.is_empty() || (job.failure.is_none() && !job.waiting.is_empty()) {
            return None;
        }
        let job = self.jobs.remove(&held)?;
        Some(job.failure.unwrap_or_else(|| End::Finished(joined(job.outputs, job.choices))))
    }
}

impl ActiveJob {
    /// Ends the job with its other requests.
    fn fail(&mut self, engine: &mut Engine, end: End) {
        self.waiting.clear();
        self.running.iter().for_each(|id| engine.cancel(*id));
        self.failure = Some(end);
    }
}

/// The output of a request that was cancelled before it was given to the engine.
fn cancelled() -> Output {
    let choice = Choice {
        index: 0,
        tokens: Vec::new(),
        text: String::new(),
        finish_reason: FinishReason::Cancelled,
        stop_string: None,
        logprobs: None,
        vector: None,
    };
    Output { choices: vec![choice], ..Output::default() }
}

/// Joins the answers to all prompts: the choices count on.
fn joined(outputs: Vec<Option<Output>>, choices: u32) -> Output {
    let mut all = Output::default();
    for (part, output) in (0u32..).zip(outputs.into_iter().flatten()) {
        all.prompt_tokens += output.prompt_tokens;
        all.completion_tokens += output.completion_tokens;
        all.cached_tokens += output.cached_tokens;
        all.choices.extend(
            output
                .choices
                .into_iter()
                .map(|choice| Choice { index: part * choices + choice.index, ..choice }),
        );
    }
    all
}
