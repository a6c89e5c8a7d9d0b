//! [`RemoteRun`]: answers a file of lines through a server. Every step is recorded before and after.

use std::{
    fs::{self, File},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::mpsc,
    task::spawn_blocking,
    time::{MissedTickBehavior, interval, sleep},
};
use tritmill_queue::Backoff;
use uuid::Uuid;

use super::{
    answers::RemoteError,
    api::{Api, NewBatch},
    split::{Split, SplitFailure, split},
    state::{Folder, Part, PartResult, State, Written},
    terms::{RemoteRunError, RemoteSettings, RemoteUpdate},
};
use crate::{
    batch_file::{BatchFileError, Input, Place, open_and_lock, remove_file},
    progress::BatchProgress,
};

/// Time between two tries of a failed call: grows from the first to the last.
const RETRY_FIRST: Duration = Duration::from_millis(500);
const RETRY_LAST: Duration = Duration::from_secs(30);
/// Time between two reports of an upload.
const REPORT_EVERY: Duration = Duration::from_millis(250);
/// How often a part is uploaded again after the server lost its file.
const TRIES_MAX: u32 = 5;

/// A run over a batch file that a server answers.
pub struct RemoteRun<T> {
    pub(super) settings: RemoteSettings,
    api: Api,
    pub(super) place: Place,
    pub(super) folder: Folder,
    pub(super) state: State,
    pub(super) report: T,
    pub(super) progress: BatchProgress,
    /// Held until the run ends. The system releases it when the process dies.
    _lock: File,
}

impl<T: FnMut(RemoteUpdate)> RemoteRun<T> {
    /// Answers the file and calls `report` with updates. If the future is dropped, a later run
    /// continues.
    ///
    /// # Errors
    /// [`RemoteRunError`]; a later run continues then, too.
    pub async fn answer(
        settings: RemoteSettings,
        api: Api,
        report: T,
    ) -> Result<BatchProgress, RemoteRunError> {
        let place = Place::choose(&settings.input, &settings.output, settings.state.as_deref())?;
        let (input, lock) = open_and_lock(&settings.input, &place)?;
        let folder = Folder::of(&place);
        let progress = BatchProgress::default();
        let state = State::default();
        let mut run = Self { settings, api, place, folder, state, report, progress, _lock: lock };
        run.begin(input).await?;
        if run.is_written() {
            run.folder.clean().map_err(run.failed())?;
            return Ok(run.progress);
        }
        run.check_models().await?;
        while run.state.parts.iter().any(Part::is_unsent) {
            for index in 0..run.state.parts.len() {
                run.submit(index).await?;
            }
        }
        run.wait().await?;
        run.write().await
    }

    pub(super) fn notice(&mut self, text: impl Into<String>) {
        (self.report)(RemoteUpdate::Notice(text.into()));
    }

    /// Returns a function that adds the path of the run's files to an error.
    pub(super) fn failed(&self) -> impl Fn(std::io::Error) -> BatchFileError + use<T> {
        let path = self.folder.path().to_owned();
        move |source| BatchFileError::Output { path: path.clone(), source }
    }

    pub(super) fn save(&self) -> Result<(), RemoteRunError> {
        Ok(self.folder.save(&self.state).map_err(self.failed())?)
    }

    /// Reads the input and the state of an earlier run over it.
    async fn begin(&mut self, input: Input) -> Result<(), RemoteRunError> {
        if self.settings.restart && self.folder.remove().map_err(self.failed())? {
            let output = self.settings.output.clone();
            let failed = |source| BatchFileError::Output { path: output.clone(), source };
            self.place.file().map_or(Ok(()), remove_file).map_err(failed)?;
            self.notice("the earlier run is discarded; its batches stay on the server");
        }
        fs::create_dir_all(self.folder.path()).map_err(self.failed())?;
        let earlier = self.folder.load().map_err(self.failed())?;
        let split = self.split(input).await?;
        self.state = match earlier {
            Some(earlier) if earlier.input == split.hash => earlier,
            Some(_) => return Err(RemoteRunError::InputChanged(self.settings.input.clone())),
            None => {
                let (run, input) = (Uuid::now_v7(), split.hash);
                State { run, input, parts: split.parts, written: None }
            }
        };
        self.save()?;
        (self.progress.lines, self.progress.failed) = (split.lines, split.refused);
        let results = self.state.parts.iter().filter_map(|part| part.result.as_ref());
        self.progress.resumed = results.map(|result| result.completed + result.failed).sum();
        self.count(&[]);
        Ok(())
    }

    async fn split(&mut self, input: Input) -> Result<Split, RemoteRunError> {
        let (folder, model) = (self.folder.clone(), self.settings.model.clone());
        let (sender, mut reading) = mpsc::channel(1);
        // It stops when the receiver is dropped.
        let mut splitting = spawn_blocking(move || {
            let report = |lines, bytes| sender.blocking_send((lines, bytes)).is_ok();
            split(input, &folder, &model, report)
        });
        let done = loop {
            tokio::select! {
                Some((lines, bytes)) = reading.recv() => {
                    (self.report)(RemoteUpdate::Reading(lines, bytes));
                }
                done = &mut splitting => break done,
            }
        };
        match done {
            Ok(Ok(Some(split))) => Ok(split),
            Ok(Err(SplitFailure::Input(source))) => {
                Err(BatchFileError::Input { path: self.settings.input.clone(), source }.into())
            }
            Ok(Err(SplitFailure::Parts(source))) => Err(self.failed()(source).into()),
            Ok(Ok(None)) | Err(_) => {
                Err(self.failed()(std::io::Error::other("interrupted")).into())
            }
        }
    }

    /// Returns whether the output file is as it was written.
    fn is_written(&mut self) -> bool {
        let Some(written) = self.state.written.clone() else { return false };
        // A stream has nothing of an earlier run.
        let Some(output) = self.place.file() else { return false };
        let mut hasher = blake3::Hasher::new();
        let read = File::open(output).and_then(|mut file| std::io::copy(&mut file, &mut hasher));
        if read.is_err() || hasher.finalize().to_hex().as_str() != written.hash {
            self.notice("the output file is gone or was changed: fetching it again");
            return false;
        }
        let Written { completed, failed, .. } = written;
        (self.progress.completed, self.progress.failed) = (completed, failed);
        self.progress.resumed = self.progress.lines;
        true
    }

    /// Checks that the server has the model of the run, or one that lines name. Lines with another model have an error each. This is
    /// the first call: a bad URL or key shows here.
    async fn check_models(&mut self) -> Result<(), RemoteRunError> {
        let served = self.api.models().await?;
        let is_missing = |part: &Part| part.is_unsent() && !served.contains(&part.model);
        let parts = &mut self.state.parts;
        let own = parts.iter().find(|part| part.model == self.settings.model && is_missing(part));
        let all = parts.first().filter(|_| parts.iter().all(is_missing));
        if let Some(part) = own.or(all) {
            return Err(RemoteRunError::NotServed {
                model: part.model.clone(),
                served: if served.is_empty() { "none".to_owned() } else { served.join(", ") },
            });
        }
        for part in parts.iter_mut().filter(|part| is_missing(part)) {
            part.result = Some(PartResult { failed: part.lines, ..PartResult::default() });
        }
        self.save()
    }

    /// Repeats a call until it succeeds or fails with a permanent error.
    pub(super) async fn retrying<R>(
        &mut self,
        mut call: impl AsyncFnMut(&Api) -> Result<R, RemoteError>,
    ) -> Result<R, RemoteError> {
        let mut backoff = Backoff::new(RETRY_FIRST, RETRY_LAST);
        let mut is_first = true;
        loop {
            match call(&self.api).await {
                Err(error) if error.is_transient() => {
                    let requested = match &error {
                        RemoteError::Refused { retry_after, .. } => *retry_after,
                        _ => None,
                    };
                    if std::mem::take(&mut is_first) {
                        self.notice(format!("{error}: trying again until it works"));
                    }
                    let wait = backoff.record_failure();
                    sleep(requested.unwrap_or(wait).min(RETRY_LAST)).await;
                }
                done => return done,
            }
        }
    }

    /// Uploads a part and creates its batch, unless that is done.
    async fn submit(&mut self, index: usize) -> Result<(), RemoteRunError> {
        if !self.state.parts[index].is_unsent() {
            return Ok(());
        }
        let file = match self.state.parts[index].file.clone() {
            Some(file) => file,
            None => self.upload(index).await?,
        };
        let part = self.state.parts[index].clone();
        let RemoteSettings { window, priority, escalation, .. } = self.settings.clone();
        let idempotency_key = self.name(index);
        let created = self.retrying(async |api| {
            let batch = NewBatch {
                file: &file,
                endpoint: &part.endpoint,
                window: &window,
                priority: &priority,
                escalation: escalation.as_ref(),
                idempotency_key: &idempotency_key,
            };
            api.create(&batch).await
        });
        match created.await {
            Ok(batch) => self.state.parts[index].batch = Some(batch.id),
            // The file expired or was deleted before the batch was created.
            Err(error) if error.is_not_found() && part.tries < TRIES_MAX => {
                self.state.parts[index] =
                    Part { file: None, is_begun: false, tries: part.tries + 1, ..part };
            }
            Err(error) => return Err(error.into()),
        }
        self.save()
    }

    /// Returns the name of this try of a part on the server.
    fn name(&self, index: usize) -> String {
        let tries = self.state.parts[index].tries;
        format!("tritmill-{}-{index}-{tries}", self.state.run.as_simple())
    }

    async fn upload(&mut self, index: usize) -> Result<String, RemoteRunError> {
        let filename = format!("{}.jsonl", self.name(index));
        let path = self.folder.part(index);
        let size = fs::metadata(&path).map_err(self.failed())?.len();
        if !self.state.parts[index].is_begun {
            self.state.parts[index].is_begun = true;
            self.save()?;
        } else if let Some(file) =
            self.retrying(async |api| api.uploaded(&filename, size).await).await?
        {
            self.state.parts[index].file = Some(file.clone());
            self.save()?;
            return Ok(file);
        }
        let mut backoff = Backoff::new(RETRY_FIRST, RETRY_LAST);
        let file = loop {
            match self.send(&path, &filename, size).await {
                Err(error) if error.is_transient() => {
                    self.notice(format!("{error}: uploading again"));
                    sleep(backoff.record_failure()).await;
                    // The upload may have succeeded without an answer.
                    let found = self.retrying(async |api| api.uploaded(&filename, size).await);
                    if let Some(file) = found.await? {
                        break file;
                    }
                }
                done => break done?,
            }
        };
        self.state.parts[index].file = Some(file.clone());
        self.save()?;
        Ok(file)
    }

    async fn send(
        &mut self,
        path: &Path,
        filename: &str,
        size: u64,
    ) -> Result<String, RemoteError> {
        let sent = Arc::new(AtomicU64::new(0));
        let api = self.api.clone();
        let mut sending = std::pin::pin!(api.upload(path, filename, Arc::clone(&sent)));
        let mut ticks = interval(REPORT_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                done = &mut sending => return done,
                _ = ticks.tick() => {
                    (self.report)(RemoteUpdate::Uploading(sent.load(Ordering::Relaxed), size));
                }
            }
        }
    }
}
