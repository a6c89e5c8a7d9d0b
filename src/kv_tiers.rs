//! Options of the KV blocks outside of a device: host memory, a folder, and the folders of other workers.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use reqwest::{
    Method, RequestBuilder, Response, StatusCode,
    header::{AUTHORIZATION, CONTENT_TYPE},
};
use tokio::{runtime, time::timeout};
use tritmill_client::http::{AddressPolicy, HttpClient, check_target};
use tritmill_engine::kv::disk::{BlockTiers, FolderLimits, RemoteBlocks, TierOptions};
use tritmill_worker::http::SharedBlocks;

use crate::byte_sizes;

/// Bytes of the file system that stay free.
const DISK_FREE_MIN: u64 = 1 << 30;
/// Host memory for blocks beside a GPU, in MiB.
const HOST_MIB_OF_GPU: u64 = 4096;
/// Limit of one read from another worker, beside the time for the bytes of a file.
const READ_LIMIT: Duration = Duration::from_millis(500);
/// A worker that sends more slowly is not read from.
const BYTES_PER_SECOND_MIN: f64 = 64e6;
/// Most bytes of a block or a state.
const FILE_BYTES_MAX: u64 = 1 << 30;
/// Most bytes of a list of places.
const PLACES_BYTES_MAX: u64 = 1 << 20;
/// Time without reads from a worker that failed once, and at most.
const REST: Duration = Duration::from_secs(60);
const REST_MAX: Duration = Duration::from_secs(3600);

/// Where KV blocks that several prompts begin with are kept.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "KV blocks outside of the device")]
pub struct TierArguments {
    /// Folder for KV blocks that several prompts begin with: they are computed once, also after a restart. Processes may
    /// share it
    #[arg(long, value_name = "DIR")]
    pub kv_cache_dir: Option<PathBuf>,
    /// Most bytes in --kv-cache-dir: a number, or with K, M, G or T. The blocks that were not used for longest are
    /// deleted first, and a gigabyte of the disk stays free
    #[arg(long, value_name = "BYTES", default_value = "10G", value_parser = byte_sizes::parse)]
    pub kv_cache_bytes: u64,
    /// Host memory for such blocks, in MiB [default: 0; 4096 with a GPU]
    #[arg(long, value_name = "MIB")]
    pub kv_host_memory: Option<u64>,
    /// Other workers whose folders are read when the own ones lack a block, as http://HOST:PORT of their --listen,
    /// separated by commas. The network between them must be trusted
    #[arg(long, value_name = "URLS", value_delimiter = ',', requires = "kv_peer_key")]
    pub kv_peers: Vec<String>,
    /// Secret of all workers that read each other's folders: blocks from a worker that knows it are used. A worker with
    /// it serves its --kv-cache-dir to the others
    #[arg(
        long,
        value_name = "SECRET",
        env = "TRITMILL_KV_PEER_KEY",
        hide_env_values = true,
        value_parser = clap::builder::NonEmptyStringValueParser::new()
    )]
    pub kv_peer_key: Option<String>,
}

impl TierArguments {
    /// Opens the tiers; `None` if there is none.
    ///
    /// # Errors
    /// If the folder cannot be used, or a URL is invalid.
    pub fn open(&self, host_bytes: u64) -> anyhow::Result<Option<BlockTiers>> {
        let limits = FolderLimits { bytes_max: self.kv_cache_bytes, free_min: DISK_FREE_MIN };
        let folder = self.kv_cache_dir.clone().map(|folder| (folder, limits));
        let remote = self.peers()?;
        if host_bytes == 0 && folder.is_none() && remote.is_none() {
            return Ok(None);
        }
        let tiers = BlockTiers::open(TierOptions { host_bytes, folder, remote });
        tiers.map(Some).context("--kv-cache-dir")
    }

    /// Returns the host memory for blocks, of a process with this memory budget.
    pub fn host_bytes(&self, on_gpu: bool, budget: Option<u64>) -> u64 {
        let of_gpu = (HOST_MIB_OF_GPU << 20).min(budget.unwrap_or(u64::MAX) / 4);
        let default = if on_gpu { of_gpu } else { 0 };
        self.kv_host_memory.map_or(default, |mib| mib.saturating_mul(1 << 20))
    }

    /// Returns what other workers may read.
    pub fn shared(&self) -> Option<SharedBlocks> {
        let (folder, key) = (self.kv_cache_dir.clone()?, self.kv_peer_key.clone()?);
        Some(SharedBlocks { folder, key })
    }

    fn peers(&self) -> anyhow::Result<Option<Box<dyn RemoteBlocks>>> {
        if self.kv_peers.is_empty() {
            return Ok(None);
        }
        let key = self.kv_peer_key.as_deref().context("--kv-peers needs --kv-peer-key")?;
        let mut peers = Vec::new();
        for url in &self.kv_peers {
            check_target(url, AddressPolicy::Any).with_context(|| format!("--kv-peers {url}"))?;
            peers.push(Peer {
                url: url.trim_end_matches('/').to_owned(),
                rests_until: None,
                failures: 0,
            });
        }
        let client = HttpClient::of_trusted_server().context("--kv-peers")?;
        let runtime = runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.context("cannot start the async runtime")?;
        Ok(Some(Box::new(Peers { runtime, client, authorization: format!("Bearer {key}"), peers })))
    }
}

/// Another worker.
struct Peer {
    url: String,
    /// End of a rest after a failure.
    rests_until: Option<Instant>,
    /// Failures in a row.
    failures: u32,
}

/// Other workers, which are asked one after the other.
struct Peers {
    runtime: runtime::Runtime,
    client: HttpClient,
    authorization: String,
    peers: Vec<Peer>,
}

impl Peers {
    /// Asks the workers one after the other, until `is_enough` of an answer.
    fn ask<T>(
        &mut self,
        request: impl AsyncFn(&HttpClient, &str, &str) -> anyhow::Result<Option<T>>,
        mut is_enough: impl FnMut(T) -> bool,
    ) {
        for peer in &mut self.peers {
            if peer.rests_until.is_some_and(|until| Instant::now() < until) {
                continue;
            }
            let answer = request(&self.client, &peer.url, &self.authorization);
            match self.runtime.block_on(answer) {
                Ok(answer) => {
                    peer.failures = 0;
                    if answer.is_some_and(&mut is_enough) {
                        return;
                    }
                }
                Err(error) => peer.rest(&format!("{error:#}")),
            }
        }
    }
}

impl RemoteBlocks for Peers {
    fn fetch(&mut self, hash: &str) -> Option<Vec<u8>> {
        let mut file = None;
        self.ask(
            async |client, url, key| read(client, &format!("{url}/kv/{hash}"), key).await,
            |answer| file.replace(answer).is_none(),
        );
        file
    }

    fn find(&mut self, hashes: &[String]) -> Vec<usize> {
        let mut found = Vec::new();
        self.ask(
            async |client, url, key| find(client, &format!("{url}/kv/find"), key, hashes).await,
            |places| {
                found.extend(places);
                false
            },
        );
        found
    }
}

impl Peer {
    fn rest(&mut self, why: &str) {
        let rest = REST.saturating_mul(1 << self.failures.min(6)).min(REST_MAX);
        self.failures = self.failures.saturating_add(1);
        tracing::warn!(
            peer = self.url,
            why,
            ?rest,
            "KV blocks are not read from this worker for now"
        );
        self.rests_until = Some(Instant::now() + rest);
    }
}

/// Returns the file of a block or a state; `None` if the worker does not have it.
async fn read(client: &HttpClient, url: &str, key: &str) -> anyhow::Result<Option<Vec<u8>>> {
    let request = client.request(Method::GET, url)?.header(AUTHORIZATION, key);
    let Some(answer) = send(client, request).await? else { return Ok(None) };
    let bytes = answer.content_length().unwrap_or(0);
    ensure!(bytes <= FILE_BYTES_MAX, "it sends too much");
    let within = READ_LIMIT + Duration::from_secs_f64(bytes as f64 / BYTES_PER_SECOND_MIN);
    body(answer, FILE_BYTES_MAX, within).await.map(Some)
}

/// Returns the places among the names of the blocks and states that a worker has; `None` if it cannot be asked.
async fn find(
    client: &HttpClient,
    url: &str,
    key: &str,
    names: &[String],
) -> anyhow::Result<Option<Vec<usize>>> {
    let request = client.request(Method::POST, url)?.header(AUTHORIZATION, key);
    let request = request.header(CONTENT_TYPE, "application/json");
    let request = request.body(serde_json::to_vec(names)?);
    let Some(answer) = send(client, request).await? else { return Ok(None) };
    let places = body(answer, PLACES_BYTES_MAX, READ_LIMIT).await?;
    Ok(Some(serde_json::from_slice(&places)?))
}

/// Sends a request. Returns `None` if the worker does not have what it asks for.
async fn send(client: &HttpClient, request: RequestBuilder) -> anyhow::Result<Option<Response>> {
    let answer = client.send(request, READ_LIMIT).await?;
    match answer.status() {
        StatusCode::OK => Ok(Some(answer)),
        // The latter of an older version.
        StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED => Ok(None),
        status => bail!("it answered {status}"),
    }
}

/// Reads an answer of at most so many bytes.
async fn body(mut answer: Response, bytes_max: u64, within: Duration) -> anyhow::Result<Vec<u8>> {
    let read = async {
        let mut bytes = Vec::new();
        while let Some(part) = answer.chunk().await? {
            ensure!((bytes.len() + part.len()) as u64 <= bytes_max, "it sends too much");
            bytes.extend_from_slice(&part);
        }
        Ok(bytes)
    };
    timeout(within, read).await.context("it did not send all in time")?
}
