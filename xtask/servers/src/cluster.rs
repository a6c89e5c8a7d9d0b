//! A Redis Cluster of two nodes for one test.

use std::{
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};

use crate::{Port, Redis};

/// Longest time until the nodes of a cluster that was just started know each other.
const MEET_LIMIT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(20);
const SLOTS: [(&str, &str); 2] = [("0", "8191"), ("8192", "16383")];

/// Two nodes; each starts with half of the slots.
pub struct RedisCluster {
    nodes: [Redis; 2],
    /// Where the nodes talk to each other.
    _buses: [Port; 2],
}

/// A slot that moves from one node to the other, as `redis-cli --cluster reshard` moves it.
#[derive(Debug)]
pub struct SlotMove {
    slot: String,
    from: usize,
    to: usize,
}

impl RedisCluster {
    /// Starts nodes that keep nothing on disk, and waits until they serve all slots.
    pub fn start() -> anyhow::Result<Self> {
        Self::start_with([&["--save", ""], &["--save", ""]])
    }

    /// Starts each node with its own command-line options, and waits until they serve all slots.
    pub fn start_with(options: [&[&str]; 2]) -> anyhow::Result<Self> {
        let buses = [Port::claim()?, Port::claim()?];
        let node = |index: usize| {
            let bus = buses[index].number().to_string();
            let settings = ["--cluster-enabled", "yes", "--cluster-port", &bus];
            Redis::start_with(&[options[index], &settings].concat())
        };
        let cluster = Self { nodes: [node(0)?, node(1)?], _buses: buses };
        for (node, (first, last)) in cluster.nodes.iter().zip(SLOTS) {
            node.command(&["CLUSTER", "ADDSLOTSRANGE", first, last])?;
        }
        let [one, two] = &cluster.nodes;
        let (port, bus) = (two.port().to_string(), cluster._buses[1].number().to_string());
        one.command(&["CLUSTER", "MEET", "127.0.0.1", &port, &bus])?;
        let started = Instant::now();
        while !cluster.is_up() {
            ensure!(started.elapsed() < MEET_LIMIT, "the nodes of a cluster have not met");
            sleep(POLL_INTERVAL);
        }
        Ok(cluster)
    }

    /// Returns the nodes.
    pub fn nodes(&self) -> &[Redis; 2] {
        &self.nodes
    }

    /// Returns the nodes, to kill or restart them.
    pub fn nodes_mut(&mut self) -> &mut [Redis; 2] {
        &mut self.nodes
    }

    /// Returns the URL for clients.
    pub fn url(&self) -> String {
        format!("redis+cluster://127.0.0.1:{}", self.nodes[0].port())
    }

    /// Returns whether both nodes run and serve all slots.
    pub fn is_up(&self) -> bool {
        let is_up = |node: &Redis| {
            let info = node.command(&["CLUSTER", "INFO"]);
            info.is_ok_and(|lines| lines.iter().any(|line| line == "cluster_state:ok"))
        };
        self.nodes.iter().all(is_up)
    }

    /// Marks the slot of a key as moving to the node that does not have it.
    pub fn open_slot(&self, key: &str) -> anyhow::Result<SlotMove> {
        let slot = self.nodes[0].command(&["CLUSTER", "KEYSLOT", key])?.concat();
        let from = usize::from(!self.has(0, &slot)?);
        let moving = SlotMove { slot, from, to: 1 - from };
        for (node, word, other) in
            [(moving.to, "IMPORTING", moving.from), (moving.from, "MIGRATING", moving.to)]
        {
            let other = self.id(other)?;
            self.nodes[node].command(&["CLUSTER", "SETSLOT", &moving.slot, word, &other])?;
        }
        Ok(moving)
    }

    /// Moves at most this number of keys; returns how many it moved, 0 when none are left.
    ///
    /// # Errors
    /// Also if the new node has one of the keys already: a script has run there.
    pub fn move_keys(&self, moving: &SlotMove, count: usize) -> anyhow::Result<usize> {
        let (from, to) = (&self.nodes[moving.from], &self.nodes[moving.to]);
        let count = count.to_string();
        let keys = from.command(&["CLUSTER", "GETKEYSINSLOT", &moving.slot, &count])?;
        if keys.is_empty() {
            return Ok(0);
        }
        let port = to.port().to_string();
        let mut words = vec!["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS"];
        words.extend(keys.iter().map(String::as_str));
        let answer = from.command(&words)?.concat();
        // NOKEY: they expired meanwhile.
        ensure!(["OK", "NOKEY"].contains(&answer.as_str()), "MIGRATE answers {answer}");
        Ok(keys.len())
    }

    /// Gives the slot to its new node; no keys are left on the old one.
    pub fn close_slot(&self, moving: &SlotMove) -> anyhow::Result<()> {
        let to = self.id(moving.to)?;
        for node in [moving.to, moving.from] {
            self.nodes[node].command(&["CLUSTER", "SETSLOT", &moving.slot, "NODE", &to])?;
        }
        Ok(())
    }

    /// Returns the numbers of the slot's keys on its old and on its new node.
    pub fn keys(&self, moving: &SlotMove) -> anyhow::Result<(usize, usize)> {
        let count = |node: usize| -> anyhow::Result<usize> {
            let count =
                self.nodes[node].command(&["CLUSTER", "COUNTKEYSINSLOT", &moving.slot])?.concat();
            count.parse().with_context(|| format!("{count} keys in a slot"))
        };
        Ok((count(moving.from)?, count(moving.to)?))
    }

    fn id(&self, node: usize) -> anyhow::Result<String> {
        Ok(self.nodes[node].command(&["CLUSTER", "MYID"])?.concat())
    }

    /// Returns whether the node serves the slot.
    fn has(&self, node: usize, slot: &str) -> anyhow::Result<bool> {
        let slot: u16 = slot.parse().with_context(|| format!("slot {slot}"))?;
        let nodes = self.nodes[node].command(&["CLUSTER", "NODES"])?;
        let Some(line) = nodes.iter().find(|line| line.contains("myself")) else {
            bail!("a node does not list itself: {nodes:?}");
        };
        // Ranges follow eight other columns; `[SLOT->-NODE]` is a slot that moves.
        let mut ranges = line.split(' ').skip(8).filter(|range| !range.starts_with('['));
        Ok(ranges.any(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let bounds = first.parse::<u16>().ok().zip(last.parse().ok());
            bounds.is_some_and(|(first, last)| (first..=last).contains(&slot))
        }))
    }
}
