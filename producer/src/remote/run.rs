//! [`RemoteRun`]: takes a file of lines through a server, step by step, each remembered.

use std::{
    fs::{self, File},
    io::Write as _,
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
use uuid::Uuid;

use super::{
    answers::{RemoteBatch, RemoteError},
    api::{Api, NewBatch},
    merge::merge,
    split::{Split, SplitFailure, split},
    state::{Folder, Part, PartResult, State, Written},
    terms::{RemoteRunError, RemoteSettings, RemoteUpdate},
};
use crate::{
    batch_file::{BatchFileError, Input, open_and_lock, remove_output, rename_to_old, with_suffix},
    progress::BatchProgress,
};

/// Between two looks at batches: grows from the first to the last while nothing changes.
const LOOK_FIRST: Duration = Duration::from_millis(250);
const LOOK_LAST: Duration = Duration::from_secs(5);
/// Between two tries of a call that failed: grows likewise.
const RETRY_FIRST: Duration = Duration::from_millis(500);
const RETRY_LAST: Duration = Duration::from_secs(30);
/// Between two reports of an upload.
const TELL_EVERY: Duration = Duration::from_millis(250);
/// How often a part is uploaded again because the server lost its file.
const TRIES_MAX: u32 = 5;

/// A run.
pub struct RemoteRun<T> {
    settings: RemoteSettings,
    api: Api,
    folder: Folder,
    state: State,
    tell: T,
    progress: BatchProgress,
    /// Held until the run ends; the system lets go when the process dies.
    _lock: File,
}

impl<T: FnMut(RemoteUpdate)> RemoteRun<T> {
    /// Answers the file; dropping the future leaves everything as a later run needs it.
    ///
    /// # Errors
    /// [`RemoteRunError`].
    pub async fn answer(
        settings: RemoteSettings,
        api: Api,
        tell: T,
    ) -> Result<BatchProgress, RemoteRunError> {
        let (input, lock) = open_and_lock(&settings.input, &settings.output)?;
        let folder = Folder::of(&settings.output);
        let progress = BatchProgress::default();
        let state = State::default();
        let mut run = Self { settings, api, folder, state, tell, progress, _lock: lock };
        run.begin(input).await?;
        if run.is_written() {
            run.folder.tidy().map_err(run.failed())?;
            return Ok(run.progress);
        }
        run.check_models().await?;
        while run.state.parts.iter().any(|part| part.batch.is_none()) {
            for index in 0..run.state.parts.len() {
                run.submit(index).await?;
            }
        }
        run.wait().await?;
        run.write().await
    }

    fn notice(&mut self, text: impl Into<String>) {
        (self.tell)(RemoteUpdate::Notice(text.into()));
    }

    fn failed(&self) -> impl Fn(std::io::Error) -> BatchFileError + use<T> {
        let path = self.folder.path().to_owned();
        move |source| BatchFileError::Output { path: path.clone(), source }
    }

    fn save(&self) -> Result<(), RemoteRunError> {
        Ok(self.folder.save(&self.state).map_err(self.failed())?)
    }

    /// Reads the input, and what is remembered of it.
    async fn begin(&mut self, input: Input) -> Result<(), RemoteRunError> {
        if self.settings.restart && self.folder.remove().map_err(self.failed())? {
            let output = self.settings.output.clone();
            let failed = |source| BatchFileError::Output { path: output.clone(), source };
            remove_output(&output).map_err(failed)?;
            self.notice("the earlier run is forgotten; its batches stay at the server");
        }
        fs::create_dir_all(self.folder.path()).map_err(self.failed())?;
        let known = self.folder.load().map_err(self.failed())?;
        let split = self.split(input).await?;
        self.state = match known {
            Some(known) if known.input == split.hash => known,
            Some(_) => return Err(RemoteRunError::InputChanged(self.settings.input.clone())),
            None => {
                let (run, input) = (Uuid::now_v7(), split.hash);
                State { run, input, parts: split.parts, written: None }
            }
        };
        self.save()?;
        (self.progress.lines, self.progress.failed) = (split.lines, split.refused);
        let over = self.state.parts.iter().filter_map(|part| part.result.as_ref());
        self.progress.resumed = over.map(|over| over.completed + over.failed).sum();
        self.count(&[]);
        Ok(())
    }

    async fn split(&mut self, input: Input) -> Result<Split, RemoteRunError> {
        let (folder, model) = (self.folder.clone(), self.settings.model.clone());
        let (said, mut hear) = mpsc::channel(1);
        // It stops when nobody listens.
        let mut splitting = spawn_blocking(move || {
            split(input, &folder, &model, |lines, bytes| said.blocking_send((lines, bytes)).is_ok())
        });
        let done = loop {
            tokio::select! {
                Some((lines, bytes)) = hear.recv() => {
                    (self.tell)(RemoteUpdate::Reading(lines, bytes));
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
            Ok(Ok(None)) | Err(_) => Err(self.failed()(std::io::Error::other("cut short")).into()),
        }
    }

    /// Whether the output is there as it was written.
    fn is_written(&mut self) -> bool {
        let Some(written) = self.state.written.clone() else { return false };
        let mut hasher = blake3::Hasher::new();
        let read = File::open(&self.settings.output)
            .and_then(|mut file| std::io::copy(&mut file, &mut hasher));
        if read.is_err() || hasher.finalize().to_hex().as_str() != written.hash {
            self.notice("the output file is gone or was changed: fetching it again");
            return false;
        }
        let Written { completed, failed, .. } = written;
        (self.progress.completed, self.progress.failed) = (completed, failed);
        self.progress.resumed = self.progress.lines;
        true
    }

    /// The first call: what is wrong with the address or the key shows here.
    async fn check_models(&mut self) -> Result<(), RemoteRunError> {
        let served = self.api.models().await?;
        let unmade = self
            .state
            .parts
            .iter()
            .find(|part| part.batch.is_none() && !served.contains(&part.model));
        match unmade {
            None => Ok(()),
            Some(part) => Err(RemoteRunError::NotServed {
                model: part.model.clone(),
                served: if served.is_empty() { "none".to_owned() } else { served.join(", ") },
            }),
        }
    }

    /// Repeats a call until it succeeds, or fails for good.
    async fn patiently<R>(
        &mut self,
        mut call: impl AsyncFnMut(&Api) -> Result<R, RemoteError>,
    ) -> Result<R, RemoteError> {
        let mut wait = RETRY_FIRST;
        loop {
            match call(&self.api).await {
                Err(error) if error.is_transient() => {
                    let asked = match &error {
                        RemoteError::Refused { retry_after, .. } => *retry_after,
                        _ => None,
                    };
                    if wait == RETRY_FIRST {
                        self.notice(format!("{error}: trying again until it works"));
                    }
                    sleep(asked.unwrap_or(wait).min(RETRY_LAST)).await;
                    wait = (wait * 2).min(RETRY_LAST);
                }
                done => return done,
            }
        }
    }

    /// Uploads a part and has its batch made, if that is still to be done.
    async fn submit(&mut self, index: usize) -> Result<(), RemoteRunError> {
        if self.state.parts[index].batch.is_some() {
            return Ok(());
        }
        let file = match self.state.parts[index].file.clone() {
            Some(file) => file,
            None => self.upload(index).await?,
        };
        let part = self.state.parts[index].clone();
        let RemoteSettings { window, priority, .. } = self.settings.clone();
        let idempotency_key = self.name(index);
        let made = self.patiently(async |api| {
            let batch = NewBatch {
                file: &file,
                endpoint: &part.endpoint,
                window: &window,
                priority: &priority,
                idempotency_key: &idempotency_key,
            };
            api.create(&batch).await
        });
        match made.await {
            Ok(batch) => self.state.parts[index].batch = Some(batch.id),
            // It expired or was deleted before the batch was made.
            Err(error) if error.is_not_found() && part.tries < TRIES_MAX => {
                self.state.parts[index] =
                    Part { file: None, is_begun: false, tries: part.tries + 1, ..part };
            }
            Err(error) => return Err(error.into()),
        }
        self.save()
    }

    /// What the server is to call this try of a part.
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
            self.patiently(async |api| api.uploaded(&filename, size).await).await?
        {
            self.state.parts[index].file = Some(file.clone());
            self.save()?;
            return Ok(file);
        }
        let mut wait = RETRY_FIRST;
        let file = loop {
            match self.send(&path, &filename, size).await {
                Err(error) if error.is_transient() => {
                    self.notice(format!("{error}: uploading again"));
                    sleep(wait).await;
                    wait = (wait * 2).min(RETRY_LAST);
                    // It may have come all the same.
                    let found = self.patiently(async |api| api.uploaded(&filename, size).await);
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
        let mut ticks = interval(TELL_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                done = &mut sending => return done,
                _ = ticks.tick() => {
                    (self.tell)(RemoteUpdate::Uploading(sent.load(Ordering::Relaxed), size));
                }
            }
        }
    }

    /// Looks until every batch is over.
    async fn wait(&mut self) -> Result<(), RemoteRunError> {
        let mut wait = LOOK_FIRST;
        let mut seen: Vec<(u64, u64)> = vec![(0, 0); self.state.parts.len()];
        loop {
            let (mut is_over, mut changed) = (true, false);
            for (index, seen) in seen.iter_mut().enumerate() {
                let part = &self.state.parts[index];
                let (None, Some(id)) = (&part.result, part.batch.clone()) else { continue };
                let found = self.patiently(async |api| api.batch(&id).await).await;
                let batch = found.map_err(|error| match error.is_not_found() {
                    true => RemoteRunError::Gone(id.clone()),
                    false => error.into(),
                })?;
                let counts = (batch.request_counts.completed, batch.request_counts.failed);
                changed |= std::mem::replace(seen, counts) != counts;
                is_over &= self.note(index, batch)?;
            }
            self.count(&seen);
            if is_over {
                return Ok(());
            }
            wait = if changed { LOOK_FIRST } else { (wait * 3 / 2).min(LOOK_LAST) };
            sleep(wait).await;
        }
    }

    /// Notes what a batch has come to; whether it is over.
    fn note(&mut self, index: usize, batch: RemoteBatch) -> Result<bool, RemoteRunError> {
        match batch.status.as_str() {
            "completed" | "expired" | "cancelled" => {
                self.state.parts[index].result = Some(PartResult {
                    output: batch.output_file_id,
                    errors: batch.error_file_id,
                    completed: batch.request_counts.completed,
                    failed: batch.request_counts.failed,
                });
                if batch.status != "completed" {
                    self.notice(format!("{} is {}", batch.id, batch.status));
                }
                self.save()?;
                Ok(true)
            }
            "failed" => {
                let errors = batch.errors.map(|errors| errors.data).unwrap_or_default();
                let first = errors.first().map_or("it does not say why", |error| &error.message);
                let problem = match errors.len() {
                    0 | 1 => first.to_owned(),
                    more => format!("{first} (and {} more)", more - 1),
                };
                // The next run makes another one.
                let part = &mut self.state.parts[index];
                (part.batch, part.file, part.is_begun) = (None, None, false);
                part.tries += 1;
                self.save()?;
                Err(RemoteRunError::NoBatch { batch: batch.id, problem })
            }
            _ => Ok(false),
        }
    }

    /// Tells how many lines are over: of batches that are, and of others as they were `seen`.
    fn count(&mut self, seen: &[(u64, u64)]) {
        let refused =
            self.progress.lines - self.state.parts.iter().map(|part| part.lines).sum::<u64>();
        (self.progress.completed, self.progress.failed) = (0, refused);
        for (index, part) in self.state.parts.iter().enumerate() {
            let now = seen.get(index).copied().unwrap_or_default();
            let (completed, failed) =
                part.result.as_ref().map_or(now, |over| (over.completed, over.failed));
            self.progress.completed += completed;
            self.progress.failed += failed;
        }
        (self.tell)(RemoteUpdate::Progress(self.progress));
    }

    /// Fetches what came and puts the output in its place.
    async fn write(mut self) -> Result<BatchProgress, RemoteRunError> {
        for index in 0..self.state.parts.len() {
            let PartResult { output, errors, .. } =
                self.state.parts[index].result.clone().unwrap_or_default();
            for (file, what) in [(output, "output"), (errors, "errors")] {
                let path = self.folder.fetched(index, what);
                match file {
                    Some(file) => self.fetch(&file, &path).await?,
                    None => remove_output(&path).map_err(self.failed())?,
                }
            }
        }
        let output = self.settings.output.clone();
        let failed = |source| BatchFileError::Output { path: output.clone(), source };
        let temporary = with_suffix(&output, ".tritmill-tmp");
        let (folder, parts, to) = (self.folder.clone(), self.state.parts.len(), temporary.clone());
        let merged = spawn_blocking(move || merge(&folder, parts, &to)).await;
        let merged = merged.map_err(std::io::Error::other).and_then(|merged| merged);
        let written = merged.map_err(failed)?;
        if self.state.written.is_none() && fs::metadata(&output).is_ok_and(|meta| meta.len() > 0) {
            let kept_as = rename_to_old(&output).map_err(failed)?;
            self.notice(format!("the old output is kept as {}", kept_as.display()));
        }
        fs::rename(&temporary, &output).map_err(failed)?;
        self.state.written = Some(written.clone());
        self.save()?;
        self.folder.tidy().map_err(self.failed())?;
        let Written { completed, failed, tokens, .. } = written;
        self.progress = BatchProgress { completed, failed, tokens, ..self.progress };
        (self.tell)(RemoteUpdate::Progress(self.progress));
        Ok(self.progress)
    }

    /// Fetches a file, from its start if it breaks off.
    async fn fetch(&mut self, file: &str, to: &Path) -> Result<(), RemoteRunError> {
        let fetched = self.patiently(async |api| {
            let failed = |error| RemoteError::file(to, error);
            let mut content = api.content(file).await?;
            let mut into = File::create(to).map_err(failed)?;
            while let Some(piece) = content.next().await? {
                into.write_all(&piece).map_err(failed)?;
            }
            Ok(())
        });
        fetched.await.map_err(|error| match error.is_not_found() {
            true => RemoteRunError::Gone(file.to_owned()),
            false => error.into(),
        })
    }
}
