//! The second half of a [`RemoteRun`]: waits for the batches and writes the output.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::Path,
    time::Duration,
};

use tokio::{task::spawn_blocking, time::sleep};

use super::{
    answers::{RemoteBatch, RemoteError, RequestCounts},
    merge::merge,
    run::RemoteRun,
    state::{PartResult, Written},
    terms::{RemoteRunError, RemoteUpdate},
    unserved::refuse,
};
use crate::{
    batch_file::{BatchFileError, Target, remove_file, rename_to_old, with_suffix},
    progress::BatchProgress,
};

/// Time between two reads of the batches: grows from the first to the last while nothing changes.
const POLL_FIRST: Duration = Duration::from_millis(250);
const POLL_LAST: Duration = Duration::from_secs(5);

impl<T: FnMut(RemoteUpdate)> RemoteRun<T> {
    /// Waits until every batch is finished.
    pub(super) async fn wait(&mut self) -> Result<(), RemoteRunError> {
        let mut wait = POLL_FIRST;
        let mut seen = vec![RequestCounts::default(); self.state.parts.len()];
        loop {
            let (mut is_finished, mut changed) = (true, false);
            for (index, seen) in seen.iter_mut().enumerate() {
                let part = &self.state.parts[index];
                let (None, Some(id)) = (&part.result, part.batch.clone()) else { continue };
                let found = self.retrying(async |api| api.batch(&id).await).await;
                let batch = found.map_err(|error| match error.is_not_found() {
                    true => RemoteRunError::Gone(id.clone()),
                    false => error.into(),
                })?;
                let counts = batch.request_counts;
                changed |= std::mem::replace(seen, counts) != counts;
                is_finished &= self.record(index, batch)?;
            }
            self.count(&seen);
            if is_finished {
                return Ok(());
            }
            wait = if changed { POLL_FIRST } else { (wait * 3 / 2).min(POLL_LAST) };
            sleep(wait).await;
        }
    }

    /// Records the state of a batch. Returns whether the batch is finished.
    fn record(&mut self, index: usize, batch: RemoteBatch) -> Result<bool, RemoteRunError> {
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
                let first = errors.first().map_or("without a reason", |error| &error.message);
                let problem = match errors.len() {
                    0 | 1 => first.to_owned(),
                    more => format!("{first} (and {} more)", more - 1),
                };
                // The next run creates another batch.
                let part = &mut self.state.parts[index];
                (part.batch, part.file, part.is_begun) = (None, None, false);
                part.tries += 1;
                self.save()?;
                Err(RemoteRunError::BatchRefused { batch: batch.id, problem })
            }
            _ => Ok(false),
        }
    }

    /// Reports the finished lines: all lines of finished batches, and the lines of other batches as
    /// last `seen`.
    pub(super) fn count(&mut self, seen: &[RequestCounts]) {
        let refused =
            self.progress.lines - self.state.parts.iter().map(|part| part.lines).sum::<u64>();
        (self.progress.completed, self.progress.failed) = (0, refused);
        for (index, part) in self.state.parts.iter().enumerate() {
            let now = seen.get(index).copied().unwrap_or_default();
            let counts = part
                .result
                .as_ref()
                .map_or((now.completed, now.failed), |result| (result.completed, result.failed));
            self.progress.completed += counts.0;
            self.progress.failed += counts.1;
        }
        (self.report)(RemoteUpdate::Progress(self.progress));
    }

    /// Downloads answers and errors and writes the output.
    pub(super) async fn write(mut self) -> Result<BatchProgress, RemoteRunError> {
        for index in 0..self.state.parts.len() {
            if self.state.parts[index].batch.is_none() {
                let folder = self.folder.clone();
                let refused = spawn_blocking(move || refuse(&folder, index)).await;
                refused.map_err(io::Error::other).flatten().map_err(self.failed())?;
                continue;
            }
            let PartResult { output, errors, .. } =
                self.state.parts[index].result.clone().unwrap_or_default();
            for (file, what) in [(output, "output"), (errors, "errors")] {
                let path = self.folder.downloaded(index, what);
                match file {
                    Some(file) => self.download(&file, &path).await?,
                    None => remove_file(&path).map_err(self.failed())?,
                }
            }
        }
        let output = self.settings.output.clone();
        let failed = |source| BatchFileError::Output { path: output.clone(), source };
        let temporary = match self.place.file() {
            Some(file) => with_suffix(file, ".tritmill-tmp"),
            None => self.folder.merged(),
        };
        let (folder, parts, to) = (self.folder.clone(), self.state.parts.len(), temporary.clone());
        let merged = spawn_blocking(move || merge(&folder, parts, &to)).await;
        let merged = merged.map_err(io::Error::other).and_then(|merged| merged);
        let written = merged.map_err(failed)?;
        match self.place.target.clone() {
            Target::File(file) => {
                let has_bytes = fs::metadata(&file).is_ok_and(|meta| meta.len() > 0);
                if self.state.written.is_none() && has_bytes {
                    let kept_as = rename_to_old(&file).map_err(failed)?;
                    self.notice(format!("the old output is kept as {}", kept_as.display()));
                }
                fs::rename(&temporary, &file).map_err(failed)?;
            }
            Target::Stream(stream) => {
                let copied = spawn_blocking(move || {
                    let mut stream = Target::open_stream(&stream)?;
                    io::copy(&mut File::open(&temporary)?, &mut stream)?;
                    stream.flush()
                });
                copied.await.map_err(io::Error::other).and_then(|copied| copied).map_err(failed)?;
            }
        }
        self.state.written = Some(written.clone());
        self.save()?;
        self.folder.clean().map_err(self.failed())?;
        let Written { completed, failed, tokens, prompt_tokens, cached_tokens, .. } = written;
        let counted = BatchProgress { completed, failed, ..self.progress };
        self.progress = BatchProgress { tokens, prompt_tokens, cached_tokens, ..counted };
        (self.report)(RemoteUpdate::Progress(self.progress));
        Ok(self.progress)
    }

    /// Downloads a file, and starts over if the connection breaks.
    async fn download(&mut self, file: &str, to: &Path) -> Result<(), RemoteRunError> {
        let downloaded = self.retrying(async |api| {
            let failed = |error| RemoteError::file(to, error);
            let mut content = api.content(file).await?;
            let mut into = File::create(to).map_err(failed)?;
            while let Some(piece) = content.next().await? {
                into.write_all(&piece).map_err(failed)?;
            }
            Ok(())
        });
        downloaded.await.map_err(|error| match error.is_not_found() {
            true => RemoteRunError::Gone(file.to_owned()),
            false => error.into(),
        })
    }
}
