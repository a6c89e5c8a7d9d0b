//! A Redis Cluster of two nodes, each with half of the slots.

use std::time::Duration;

use tritmill_servers::{Port, Redis};

/// Two nodes, and the ports of their cluster buses.
pub struct Cluster {
    nodes: [(Redis, Port); 2],
}

fn node() -> (Redis, Port) {
    let bus = Port::claim().unwrap();
    let port = bus.number().to_string();
    let options = ["--save", "", "--cluster-enabled", "yes", "--cluster-port", &port];
    (Redis::start_with(&options).unwrap(), bus)
}

/// Sends a command to one node.
pub async fn command<T: redis::FromRedisValue>(node: &Redis, words: &[&str]) -> T {
    let client = redis::Client::open(node.url()).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    redis::cmd(words[0]).arg(&words[1..]).query_async(&mut connection).await.unwrap()
}

impl Cluster {
    /// Starts both nodes and waits until they serve all slots.
    pub async fn start() -> Self {
        let cluster = Self { nodes: [node(), node()] };
        let [(one, _), (two, bus)] = &cluster.nodes;
        let _: String = command(one, &["CLUSTER", "ADDSLOTSRANGE", "0", "8191"]).await;
        let _: String = command(two, &["CLUSTER", "ADDSLOTSRANGE", "8192", "16383"]).await;
        let (port, bus) = (two.port().to_string(), bus.number().to_string());
        let _: String = command(one, &["CLUSTER", "MEET", "127.0.0.1", &port, &bus]).await;
        for node in [one, two] {
            let is_up = async || -> bool {
                let info: String = command(node, &["CLUSTER", "INFO"]).await;
                info.contains("cluster_state:ok")
            };
            while !is_up().await {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        cluster
    }

    /// Returns the nodes.
    #[allow(dead_code, reason = "not every test that includes this module looks at single nodes")]
    pub fn nodes(&self) -> [&Redis; 2] {
        [&self.nodes[0].0, &self.nodes[1].0]
    }

    /// Returns the URL for clients.
    pub fn url(&self) -> String {
        format!("redis+cluster://127.0.0.1:{}", self.nodes[0].0.port())
    }
}
