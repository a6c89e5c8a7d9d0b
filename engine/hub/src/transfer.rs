//! The download of one file into its blob.
//!
//! ```text
//! lock ─► is the blob there? ─► hash what HASH.incomplete has ─► GET from there on, hash and append
//!                                      ▲                              │ connection lost: wait, again
//!                                      └── wrong hash, and an earlier └─► all there, hash right: rename to HASH
//!                                          process wrote a part: empty
//! ```

use std::{
    fs::{self, File},
    io::{self, ErrorKind, Read as _, Write as _},
    path::PathBuf,
};

use reqwest::{Response, StatusCode, header};

use crate::{
    cache::{Cache, make_folder},
    client::{Client, Place, unreachable},
    digest::{Digest, Hasher},
    error::{PullError, Unreachable},
    progress::{Event, Progress},
};

/// Bytes after which a lost connection counts as a good one.
const PROGRESS_MIN: u64 = 1 << 20;
/// Bytes read at a time from a partial file.
const READ_BYTES: usize = 1 << 20;

/// A file to download.
pub(crate) struct Transfer<'a> {
    pub client: &'a Client<'a>,
    pub cache: &'a Cache,
    pub place: Place<'a>,
    pub digest: Digest,
    pub size: u64,
    pub attempts_max: u32,
}

/// As much of a file as has arrived.
struct Partial {
    path: PathBuf,
    file: File,
    /// Of the bytes in the file.
    hasher: Hasher,
    received: u64,
}

impl Transfer<'_> {
    /// Downloads the file, unless another process just did. Returns the bytes that arrived.
    pub async fn run(&self, progress: &mut Progress<'_>) -> Result<u64, PullError> {
        make_folder(&self.cache.blobs())?;
        let name = self.place.file;
        let _lock = self.cache.lock(&self.digest, || progress(Event::Waiting { file: name }))?;
        let blob = self.cache.blob(&self.digest);
        if fs::metadata(&blob).is_ok_and(|found| found.len() == self.size) {
            return Ok(0);
        }
        let mut partial = self.open()?;
        let had = partial.received;
        progress(Event::Starting { file: name, size: self.size, received: had });
        self.fill(&mut partial, progress).await?;
        let mut arrived = self.size - had;
        let mut found = self.take_hash(&mut partial);
        if found != self.digest && had > 0 {
            // The first part may be the fault of an earlier process.
            self.empty(&mut partial)?;
            self.fill(&mut partial, progress).await?;
            arrived += self.size;
            found = self.take_hash(&mut partial);
        }
        if found != self.digest {
            self.discard(&partial);
            return Err(PullError::WrongHash {
                file: name.to_owned(),
                expected: self.digest.to_string(),
                found: found.to_string(),
            });
        }
        let synced = partial.file.sync_all().and_then(|()| fs::rename(&partial.path, &blob));
        synced.map_err(|error| self.failed(error, &partial))?;
        progress(Event::Finished { file: name });
        Ok(arrived)
    }

    /// Opens the partial file and hashes its content.
    fn open(&self) -> Result<Partial, PullError> {
        let path = self.cache.blobs().join(format!("{}.incomplete", self.digest.hex()));
        let opened = File::options().create(true).append(true).read(true).open(&path);
        let mut file = opened.map_err(PullError::cache(&path))?;
        let mut hasher = self.digest.hasher(self.size);
        let mut received = 0;
        let mut buffer = vec![0; READ_BYTES];
        loop {
            match file.read(&mut buffer).map_err(PullError::cache(&path))? {
                0 => break,
                count => {
                    hasher.update(&buffer[..count]);
                    received += count as u64;
                }
            }
        }
        let mut partial = Partial { path, file, hasher, received };
        if received > self.size {
            self.empty(&mut partial)?;
        }
        Ok(partial)
    }

    fn empty(&self, partial: &mut Partial) -> Result<(), PullError> {
        partial.file.set_len(0).map_err(PullError::cache(&partial.path))?;
        partial.hasher = self.digest.hasher(self.size);
        partial.received = 0;
        Ok(())
    }

    /// Removes a partial file that no download can complete.
    fn discard(&self, partial: &Partial) {
        // If that fails, the next download notices the wrong hash and starts again.
        let _ = fs::remove_file(&partial.path);
    }

    fn take_hash(&self, partial: &mut Partial) -> Digest {
        std::mem::replace(&mut partial.hasher, self.digest.hasher(self.size)).finish()
    }

    /// Requests the rest of the file until all of it is there.
    async fn fill(
        &self,
        partial: &mut Partial,
        progress: &mut Progress<'_>,
    ) -> Result<(), PullError> {
        let (mut attempts, mut best) = (0, partial.received);
        while partial.received < self.size {
            self.check_room(partial)?;
            let cause = match self.receive(partial, progress).await {
                Ok(()) => continue,
                Err(PullError::Unreachable(cause)) => cause,
                Err(error) => return Err(error),
            };
            if partial.received >= best.saturating_add(PROGRESS_MIN) {
                attempts = 0;
            }
            best = best.max(partial.received);
            attempts += 1;
            if attempts >= self.attempts_max {
                return Err(PullError::Interrupted {
                    file: self.place.file.to_owned(),
                    received: partial.received,
                    size: self.size,
                    attempts,
                    cause,
                });
            }
            let delay = self.client.delay(attempts, &cause);
            progress(Event::Retrying { file: self.place.file, cause: &cause, delay });
            tokio::time::sleep(delay).await;
        }
        Ok(())
    }

    /// Appends what one request brings.
    async fn receive(
        &self,
        partial: &mut Partial,
        progress: &mut Progress<'_>,
    ) -> Result<(), PullError> {
        let mut response = self.client.get(self.place, partial.received).await?;
        if response.status() == StatusCode::RANGE_NOT_SATISFIABLE {
            // Without a range, the next request cannot end here.
            return self.empty(partial);
        }
        if partial.received > 0 && !continues(&response, partial.received) {
            self.empty(partial)?;
        }
        while let Some(bytes) = response.chunk().await.map_err(unreachable)? {
            if partial.received + bytes.len() as u64 > self.size {
                self.discard(partial);
                let file = self.place.file.to_owned();
                return Err(PullError::TooLong { file, size: self.size });
            }
            partial.file.write_all(&bytes).map_err(|error| self.failed(error, partial))?;
            partial.hasher.update(&bytes);
            partial.received += bytes.len() as u64;
            progress(Event::Received { file: self.place.file, received: partial.received });
        }
        if partial.received < self.size {
            let host = response.url().host_str().unwrap_or_default().to_owned();
            return Err(PullError::Unreachable(Unreachable::Closed { host }));
        }
        Ok(())
    }

    /// Fails before the download if the rest of the file has no room.
    fn check_room(&self, partial: &Partial) -> Result<(), PullError> {
        let free = fs4::available_space(self.cache.blobs()).unwrap_or(u64::MAX);
        if self.size - partial.received > free { Err(self.disk_full(partial)) } else { Ok(()) }
    }

    fn disk_full(&self, partial: &Partial) -> PullError {
        PullError::DiskFull {
            file: self.place.file.to_owned(),
            folder: self.cache.blobs(),
            needed: self.size.saturating_sub(partial.received),
        }
    }

    fn failed(&self, error: io::Error, partial: &Partial) -> PullError {
        match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
                self.disk_full(partial)
            }
            _ => PullError::cache(&partial.path)(error),
        }
    }
}

/// Returns whether the answer begins where the partial file ends.
fn continues(response: &Response, received: u64) -> bool {
    let range = response.headers().get(header::CONTENT_RANGE).and_then(|range| range.to_str().ok());
    let start = range.and_then(|range| range.strip_prefix("bytes ")?.split('-').next());
    response.status() == StatusCode::PARTIAL_CONTENT
        && start.and_then(|start| start.parse().ok()) == Some(received)
}
