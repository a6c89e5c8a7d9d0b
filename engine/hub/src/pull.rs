//! [`pull`]: a model from the hub, or from the cache if that has it.

use std::{io, panic, path::PathBuf, thread};

use tokio::runtime::Builder;

use crate::{
    Reference, Settings,
    cache::{Cache, Found},
    choice::{Choice, RemoteFile, choose},
    client::{Client, Place},
    error::PullError,
    progress::{Event, Progress},
    transfer::Transfer,
    variants::PassedOver,
};

/// A model that is in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pulled {
    /// The GGUF file, or the folder of a safetensors model.
    pub path: PathBuf,
    /// The commit of the repository.
    pub commit: String,
    /// The files of the model.
    pub files: Vec<RemoteFile>,
    /// Files of the repository that were passed over, if it has several GGUF files.
    pub passed_over: Vec<PassedOver>,
    /// Bytes that were downloaded now.
    pub downloaded_bytes: u64,
}

/// Downloads what the cache lacks of a model, and reports to `progress` meanwhile. A commit that is complete in the
/// cache is used without asking the hub; so is a branch or tag if the hub is away.
///
/// # Errors
/// [`PullError`]. What arrived of a file stays, for the next call.
pub fn pull(
    settings: &Settings,
    reference: &Reference,
    progress: &mut (dyn FnMut(Event<'_>) + Send),
) -> Result<Pulled, PullError> {
    // On a thread of its own: the caller's may have an async runtime, which must not be blocked.
    let work = || {
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|source| no_runtime(settings, source))?;
        runtime.block_on(run(settings, reference, progress))
    };
    let ended = thread::scope(|scope| scope.spawn(work).join());
    ended.unwrap_or_else(|panic| panic::resume_unwind(panic))
}

/// Returns the path of a model if it is completely in the cache.
pub fn cached(settings: &Settings, reference: &Reference) -> Option<PathBuf> {
    let cache = Cache::new(&settings.cache, reference);
    let found = cache.find(reference)?;
    Some(cache.path(&found.commit, &found.choice))
}

fn no_runtime(settings: &Settings, source: io::Error) -> PullError {
    PullError::cache(&settings.cache)(source)
}

async fn run(
    settings: &Settings,
    reference: &Reference,
    progress: &mut Progress<'_>,
) -> Result<Pulled, PullError> {
    let cache = Cache::new(&settings.cache, reference);
    let is_enough = settings.offline || reference.is_pinned();
    if let Some(found) = cache.find(reference).filter(|_| is_enough) {
        return Ok(of_cache(&cache, found));
    }
    if settings.offline {
        let (reference, cache) = (reference.to_string(), settings.cache.clone());
        return Err(PullError::NotCached { reference, cache });
    }
    let client = Client::new(settings);
    let listing = match client.listing(reference).await {
        Ok(listing) => listing,
        Err(cause) if cause.is_outage() => {
            let found = cache.find(reference);
            let Some(found) = found else { return Err(cause) };
            progress(Event::FromCache { cause: &cause });
            return Ok(of_cache(&cache, found));
        }
        Err(error) => return Err(error),
    };
    let choice = choose(&listing.files, reference)?;
    let mut pulled = Pulled {
        path: cache.path(&listing.commit, &choice),
        commit: listing.commit,
        files: Vec::new(),
        passed_over: choice.passed_over().to_vec(),
        downloaded_bytes: 0,
    };
    if let (Choice::Gguf(file, passed_over), false) = (&choice, choice.passed_over().is_empty()) {
        progress(Event::Chosen { file: &file.name, passed_over });
    }
    for file in choice.files() {
        let place = Place { reference, commit: &pulled.commit, file: &file.name };
        let (file, arrived) = one(&client, &cache, place, file, settings, progress).await?;
        pulled.files.push(file);
        pulled.downloaded_bytes += arrived;
    }
    // Last, so that the revision always means a complete model.
    cache.set_commit(&pulled.commit)?;
    Ok(pulled)
}

fn of_cache(cache: &Cache, found: Found) -> Pulled {
    Pulled {
        path: cache.path(&found.commit, &found.choice),
        files: found.choice.files().to_vec(),
        passed_over: found.choice.passed_over().to_vec(),
        commit: found.commit,
        downloaded_bytes: 0,
    }
}

/// Downloads one file if the cache lacks it. Returns it with its size, and the bytes that arrived.
async fn one(
    client: &Client<'_>,
    cache: &Cache,
    place: Place<'_>,
    file: &RemoteFile,
    settings: &Settings,
    progress: &mut Progress<'_>,
) -> Result<(RemoteFile, u64), PullError> {
    let head = client.head(place).await?;
    let lacks = |what: &str| PullError::Answer {
        url: format!("{}/{}", place.reference.repository(), place.file),
        problem: format!("it states no {what}"),
    };
    let digest = head.digest.or_else(|| file.digest.clone()).ok_or_else(|| lacks("hash"))?;
    let size = head.size.or(file.size).ok_or_else(|| lacks("size"))?;
    let attempts_max = settings.attempts_max.max(1);
    let transfer = Transfer { client, cache, place, digest, size, attempts_max };
    let arrived = transfer.run(progress).await?;
    cache.link(place.commit, place.file, &transfer.digest)?;
    Ok((RemoteFile { size: Some(size), ..file.clone() }, arrived))
}
