//! The servers start, come back after a kill, and do not outlive their test.

use tritmill_servers::{Postgres, Redis, Signal};

#[test]
fn a_durable_redis_comes_back_at_the_same_place() -> anyhow::Result<()> {
    let mut redis = Redis::start_durable()?;
    let url = redis.url();
    redis.kill();
    assert!(redis.signal(Signal::Stop).is_err());
    redis.restart()?;
    assert_eq!(redis.url(), url);
    Ok(())
}

#[test]
fn postgres_comes_back_after_a_kill() -> anyhow::Result<()> {
    let mut postgres = Postgres::start()?;
    let url = postgres.url();
    postgres.kill();
    postgres.restart()?;
    assert_eq!(postgres.url(), url);
    Ok(())
}

#[test]
fn two_tests_have_two_servers() -> anyhow::Result<()> {
    let (one, two) = (Redis::start()?, Redis::start()?);
    assert_ne!(one.port(), two.port());
    let pid = one.pid().ok_or_else(|| anyhow::anyhow!("it runs"))?;
    drop(one);
    assert!(Signal::Continue.send(pid).is_err(), "a dropped server is gone");
    Ok(())
}
