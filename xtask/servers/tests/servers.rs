//! The servers start, restart after a kill, and end when they are dropped.

use tritmill_servers::{Postgres, Redis, Signal};

#[test]
fn durable_redis_restarts_at_the_same_url() -> anyhow::Result<()> {
    let mut redis = Redis::start_durable()?;
    let url = redis.url();
    redis.kill();
    assert!(redis.signal(Signal::Stop).is_err());
    redis.restart()?;
    assert_eq!(redis.url(), url);
    Ok(())
}

#[test]
fn postgres_restarts_after_a_kill() -> anyhow::Result<()> {
    let mut postgres = Postgres::start()?;
    let url = postgres.url();
    postgres.kill();
    postgres.restart()?;
    assert_eq!(postgres.url(), url);
    Ok(())
}

#[test]
fn two_servers_have_different_ports_and_end_when_dropped() -> anyhow::Result<()> {
    let (one, two) = (Redis::start()?, Redis::start()?);
    assert_ne!(one.port(), two.port());
    let pid = one.pid().ok_or_else(|| anyhow::anyhow!("it does not run"))?;
    drop(one);
    assert!(Signal::Continue.send(pid).is_err(), "a dropped server has exited");
    Ok(())
}
