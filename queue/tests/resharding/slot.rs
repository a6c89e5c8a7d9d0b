//! Moves a slot as `redis-cli --cluster reshard` does, one key at a time.

use std::time::Duration;

use tritmill_servers::Redis;

use crate::clusters::{Cluster, command};

/// A slot with its present and its future node.
pub struct Slot<'a> {
    slot: String,
    from: &'a Redis,
    to: &'a Redis,
}

impl<'a> Slot<'a> {
    /// Returns the slot of a key.
    pub async fn of(cluster: &'a Cluster, key: &str) -> Self {
        let [one, two] = cluster.nodes();
        let slot: u16 = command(one, &["CLUSTER", "KEYSLOT", key]).await;
        let (from, to) = if slot < 8192 { (one, two) } else { (two, one) };
        Self { slot: slot.to_string(), from, to }
    }

    /// Marks the slot as migrating.
    pub async fn open(&self) {
        let (from, to) = (id(self.from).await, id(self.to).await);
        let _: String =
            command(self.to, &["CLUSTER", "SETSLOT", &self.slot, "IMPORTING", &from]).await;
        let _: String =
            command(self.from, &["CLUSTER", "SETSLOT", &self.slot, "MIGRATING", &to]).await;
    }

    /// Moves all keys, with a pause after each; returns their number.
    ///
    /// Fails if the other node has a key already: a script has run there.
    pub async fn move_keys(&self, pause: Duration) -> usize {
        let (port, mut moved) = (self.to.port().to_string(), 0);
        loop {
            let keys: Vec<String> =
                command(self.from, &["CLUSTER", "GETKEYSINSLOT", &self.slot, "1"]).await;
            let Some(key) = keys.first() else { return moved };
            let words = ["MIGRATE", "127.0.0.1", &port, key, "0", "5000"];
            let answer: String = command(self.from, &words).await;
            assert!(["OK", "NOKEY"].contains(&answer.as_str()), "{answer}");
            moved += 1;
            tokio::time::sleep(pause).await;
        }
    }

    /// Gives the slot to its new node.
    pub async fn close(&self) {
        let to = id(self.to).await;
        for node in [self.to, self.from] {
            let _: String = command(node, &["CLUSTER", "SETSLOT", &self.slot, "NODE", &to]).await;
        }
    }

    /// Returns the numbers of keys on the old and on the new node.
    pub async fn keys(&self) -> (usize, usize) {
        let count = async |node| command(node, &["CLUSTER", "COUNTKEYSINSLOT", &self.slot]).await;
        (count(self.from).await, count(self.to).await)
    }
}

async fn id(node: &Redis) -> String {
    command(node, &["CLUSTER", "MYID"]).await
}
