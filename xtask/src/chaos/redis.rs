//! The Redis of a run: one server, a cluster, or a master with a replica and a Sentinel.
//!
//! Every node is behind a proxy and announces the proxy's port, so that clients, the Sentinel and the
//! replication all go through it.

use std::{
    slice::{from_mut, from_ref},
    str::FromStr,
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use tritmill_servers::{Redis, RedisCluster, Sentinel, SlotMove};

use super::proxy::Proxy;

const DURABLE: [&str; 6] = ["--save", "", "--appendonly", "yes", "--appendfsync", "always"];
/// A master that does not answer for this time is replaced.
const DOWN_AFTER: Duration = Duration::from_secs(1);
/// Longest time until a new replica has a copy.
const COPY_LIMIT: Duration = Duration::from_secs(60);
/// Longest time until there is one master at the end.
const SETTLE_LIMIT: Duration = Duration::from_secs(90);
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Keys of a slot that move at once: few, so that a slot is shared by both nodes for a while.
const KEYS_AT_ONCE: usize = 2;
/// Shards of the queues in a cluster.
const SHARDS: u16 = 4;

/// How Redis is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setup {
    /// One server.
    Server,
    /// A cluster of two nodes.
    Cluster,
    /// A master with a replica, and a Sentinel.
    Sentinel,
}

impl Setup {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Cluster => "cluster",
            Self::Sentinel => "sentinel",
        }
    }
}

impl FromStr for Setup {
    type Err = anyhow::Error;

    fn from_str(word: &str) -> anyhow::Result<Self> {
        let setups = [Self::Server, Self::Cluster, Self::Sentinel];
        let setup = setups.into_iter().find(|setup| setup.as_str() == word);
        setup.with_context(|| format!("--redis is server, cluster or sentinel, not {word}"))
    }
}

enum Nodes {
    Server(Redis),
    Cluster(RedisCluster),
    Replicated([Redis; 2], Sentinel),
}

/// The nodes of a run's Redis with their proxies.
pub struct RedisNodes {
    nodes: Nodes,
    proxies: Vec<Proxy>,
    /// The slot that moves at present.
    moving: Option<SlotMove>,
    /// Bytes of writes that promoted replicas lacked.
    lacking_bytes: u64,
}

impl RedisNodes {
    pub fn start(setup: Setup) -> anyhow::Result<Self> {
        let count = if setup == Setup::Server { 1 } else { 2 };
        let proxies = (0..count).map(|_| Proxy::start()).collect::<anyhow::Result<Vec<_>>>()?;
        let ports: Vec<String> = proxies.iter().map(|proxy| proxy.port().to_string()).collect();
        let nodes = match setup {
            Setup::Server => Nodes::Server(Redis::start_with(&DURABLE)?),
            Setup::Cluster => {
                let options = |index: usize| {
                    [&DURABLE[..], &["--cluster-announce-port", &ports[index]]].concat()
                };
                Nodes::Cluster(RedisCluster::start_with([&options(0), &options(1)])?)
            }
            Setup::Sentinel => {
                let node = |index: usize| {
                    let announced = ["--replica-announce-port", &ports[index]];
                    let at_once = ["--repl-diskless-sync-delay", "0"];
                    Redis::start_with(&[&DURABLE[..], &announced, &at_once].concat())
                };
                let (nodes, port) = ([node(0)?, node(1)?], proxies[0].port());
                proxies[0].forward_to(nodes[0].port());
                nodes[1].command(&["REPLICAOF", "127.0.0.1", &ports[0]])?;
                let started = Instant::now();
                while !has_copy(&nodes[1]) {
                    ensure!(started.elapsed() < COPY_LIMIT, "the replica has no copy");
                    sleep(POLL_INTERVAL);
                }
                Nodes::Replicated(nodes, Sentinel::start(port, DOWN_AFTER)?)
            }
        };
        let redis = Self { nodes, proxies, moving: None, lacking_bytes: 0 };
        for (node, proxy) in redis.nodes().iter().zip(&redis.proxies) {
            proxy.forward_to(node.port());
        }
        Ok(redis)
    }

    pub fn nodes(&self) -> &[Redis] {
        match &self.nodes {
            Nodes::Server(redis) => from_ref(redis),
            Nodes::Cluster(cluster) => cluster.nodes(),
            Nodes::Replicated(nodes, _) => nodes,
        }
    }

    fn nodes_mut(&mut self) -> &mut [Redis] {
        match &mut self.nodes {
            Nodes::Server(redis) => from_mut(redis),
            Nodes::Cluster(cluster) => cluster.nodes_mut(),
            Nodes::Replicated(nodes, _) => nodes,
        }
    }

    /// Returns the proxies in front of the nodes.
    pub fn proxies(&self) -> &[Proxy] {
        &self.proxies
    }

    /// Returns the URL for clients, which leads through the proxies.
    pub fn url(&self) -> String {
        let hosts = self.proxies.iter().map(|proxy| format!("127.0.0.1:{}", proxy.port()));
        let hosts = hosts.collect::<Vec<_>>().join(",");
        match &self.nodes {
            Nodes::Server(_) => format!("redis://{hosts}/0"),
            Nodes::Cluster(_) => format!("redis+cluster://{hosts}?shards={SHARDS}"),
            Nodes::Replicated(_, sentinel) => sentinel.url(),
        }
    }

    /// Kills a node.
    pub fn kill(&mut self, index: usize) {
        self.nodes_mut()[index].kill();
    }

    /// Kills a node and deletes its files.
    pub fn kill_and_empty(&mut self, index: usize) -> anyhow::Result<()> {
        self.kill(index);
        self.nodes()[index].delete_data()
    }

    /// Starts a node again; as a replica, if another one is the master now.
    pub fn restart(&mut self, index: usize) -> anyhow::Result<()> {
        if let Nodes::Replicated(nodes, sentinel) = &mut self.nodes {
            let master = sentinel.master()?;
            let follow = ["127.0.0.1", &master.to_string()];
            if master != self.proxies[index].port() {
                return nodes[index].restart_with(&[&["--replicaof"], &follow[..]].concat());
            }
            // The other one was not promoted, and may have been cut off by `kill_master`.
            let other = &nodes[1 - index];
            if field(other, "role").is_ok_and(|role| role == "slave") {
                other.command(&[&["REPLICAOF"], &follow[..]].concat())?;
            }
        }
        self.nodes_mut()[index].restart()
    }

    /// Kills the master while its replica has not received the writes of the last moment; returns its
    /// index, or `None` if the replica has no copy at present. All nodes run.
    pub fn kill_master(&mut self, moment: Duration) -> anyhow::Result<Option<usize>> {
        let Nodes::Replicated(nodes, sentinel) = &mut self.nodes else { return Ok(None) };
        let master = sentinel.master()?;
        let master = usize::from(master != self.proxies[0].port());
        let replica = &nodes[1 - master];
        if !has_copy(replica) {
            return Ok(None);
        }
        // No server listens there, so the replica keeps what it has.
        replica.command(&["REPLICAOF", "127.0.0.1", "1"])?;
        sleep(moment);
        let lacking = offset(&nodes[master])?.saturating_sub(offset(replica)?);
        nodes[master].kill();
        self.lacking_bytes += lacking;
        Ok(Some(master))
    }

    /// Waits until the Sentinel has made a replica of every former master, which takes it about 20 s;
    /// returns whether there is a Sentinel.
    pub fn settle(&self) -> anyhow::Result<bool> {
        let Nodes::Replicated(nodes, sentinel) = &self.nodes else { return Ok(false) };
        let started = Instant::now();
        loop {
            let port = sentinel.master()?;
            let other = &nodes[usize::from(port == self.proxies[0].port())];
            let follows =
                field(other, "master_port").is_ok_and(|master| master == port.to_string());
            if follows && has_copy(other) {
                return Ok(true);
            }
            ensure!(started.elapsed() < SETTLE_LIMIT, "two masters after {SETTLE_LIMIT:?}");
            sleep(POLL_INTERVAL);
        }
    }

    /// Starts to move the slot of a queue, chosen by `pick` below their number; returns whether it did.
    pub fn open_slot(&mut self, pick: impl FnOnce(usize) -> usize) -> anyhow::Result<bool> {
        let Nodes::Cluster(cluster) = &self.nodes else { return Ok(false) };
        if self.moving.is_some() || !cluster.is_up() {
            return Ok(false);
        }
        let mut queues = Vec::new();
        for node in cluster.nodes() {
            queues.extend(node.command(&["KEYS", "tm:{*}:meta"])?);
        }
        queues.sort();
        if !queues.is_empty() {
            self.moving = Some(cluster.open_slot(&queues[pick(queues.len())])?);
        }
        Ok(self.moving.is_some())
    }

    /// Moves some keys of the slot that moves, if any, and ends the move when none are left; returns
    /// whether the move goes on.
    pub fn move_keys(&mut self) -> anyhow::Result<bool> {
        let (Nodes::Cluster(cluster), Some(moving)) = (&self.nodes, &self.moving) else {
            return Ok(false);
        };
        // Goes on when both nodes serve again.
        if cluster.is_up() && cluster.move_keys(moving, KEYS_AT_ONCE)? == 0 {
            cluster.close_slot(moving)?;
            self.moving = None;
        }
        Ok(self.moving.is_some())
    }

    /// Returns what only this setup can tell about the faults.
    pub fn summary(&self) -> anyhow::Result<Option<String>> {
        let Nodes::Replicated(_, sentinel) = &self.nodes else { return Ok(None) };
        let (promotions, bytes) = (sentinel.promotions()?, self.lacking_bytes);
        Ok(Some(format!(
            "{promotions} promotions of a replica; replicas of killed masters lacked {bytes} bytes \
             of the last writes"
        )))
    }
}

/// Returns whether a replica follows its master.
fn has_copy(replica: &Redis) -> bool {
    field(replica, "master_link_status").is_ok_and(|status| status == "up")
}

/// Returns how many bytes of writes a node has seen.
fn offset(node: &Redis) -> anyhow::Result<u64> {
    field(node, "master_repl_offset")?.parse().context("an offset of the replication")
}

/// Returns one field of what a node says about its replication.
fn field(node: &Redis, name: &str) -> anyhow::Result<String> {
    for line in node.command(&["INFO", "replication"])? {
        if let Some((key, value)) = line.split_once(':')
            && key == name
        {
            return Ok(value.trim().to_owned());
        }
    }
    bail!("a node says no {name}")
}
