//! apalis-redis: `push_bulk` pushes a thousand jobs at a time; one worker fetches a hundred at a time
//! and runs each in a separate task. Arguments: submit|work URL JOBS.

use std::time::Instant;

use apalis::prelude::*;
use apalis_redis::{Config, RedisStorage};
use serde::{Deserialize, Serialize};

const BULK: usize = 1000;
const FETCH: usize = 100;

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Ask {
    prompt: String,
    max_tokens: u32,
}

async fn answer(_: Ask) -> Result<String, BoxDynError> {
    Ok("an answer of a few words".to_owned())
}

#[tokio::main]
async fn main() -> Result<(), BoxDynError> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [what, url, jobs] = words.as_slice() else { return Err("submit|work URL JOBS".into()) };
    let connection = apalis_redis::connect(url.as_str()).await?;
    let config = Config::default().queue("peer").batch_size(FETCH);
    let mut storage = RedisStorage::<Ask>::new(connection).with_config(config);
    if what == "submit" {
        let ask = |i: usize| {
            let prompt = format!("Invoice {i} was paid on the {} of March", 1 + i % 28);
            Ask { prompt, max_tokens: 16 }
        };
        let all: Vec<Ask> = (0..jobs.parse()?).map(ask).collect();
        let started = Instant::now();
        for bulk in all.chunks(BULK) {
            storage.push_bulk(bulk.to_vec()).await?;
        }
        println!("{{\"seconds\": {}}}", started.elapsed().as_secs_f64());
        return Ok(());
    }
    let worker = WorkerBuilder::new("peer-1").backend(storage).parallelize(tokio::spawn).build(answer);
    worker.run().await?;
    Ok(())
}
