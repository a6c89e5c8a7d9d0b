//! [`StoreClock`]: the time on the store's clock, without asking the store each time.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use tritmill_queue::{StoreError, Timestamp};

/// Time after which the store's clock is read again.
const FRESH_FOR: Duration = Duration::from_secs(1);

/// The store's clock as it was read, advanced by this process's clock. Off by at most the time that an answer of the
/// store takes.
#[derive(Debug, Default)]
pub(super) struct StoreClock(Mutex<Option<(Timestamp, Instant)>>);

impl StoreClock {
    /// Returns the time, and reads it if it is not fresh.
    pub async fn now(
        &self,
        read: impl Future<Output = Result<Timestamp, StoreError>>,
    ) -> Result<Timestamp, StoreError> {
        if let Some((time, read_at)) = *self.lock()
            && read_at.elapsed() < FRESH_FOR
        {
            return Ok(time.after(read_at.elapsed()));
        }
        let time = read.await?;
        *self.lock() = Some((time, Instant::now()));
        Ok(time)
    }

    fn lock(&self) -> MutexGuard<'_, Option<(Timestamp, Instant)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;

    use super::*;

    #[tokio::test]
    async fn time_is_read_again_when_it_is_old() {
        let clock = StoreClock::default();
        let unavailable = || ready(Err(StoreError::Unavailable("down".into())));
        assert!(clock.now(unavailable()).await.is_err());
        assert_eq!(clock.now(ready(Ok(Timestamp(1000)))).await.ok(), Some(Timestamp(1000)));
        let before_next_read = Timestamp(1000)..Timestamp(1000).after(FRESH_FOR);
        let fresh = clock.now(ready(Ok(Timestamp(9000)))).await.expect("a time");
        // A slow test reads the clock again.
        assert!(before_next_read.contains(&fresh) || fresh == Timestamp(9000));
        let long_ago =
            Instant::now().checked_sub(FRESH_FOR).expect("the machine runs for a minute");
        *clock.lock() = Some((Timestamp(1000), long_ago));
        assert_eq!(clock.now(ready(Ok(Timestamp(5000)))).await.ok(), Some(Timestamp(5000)));
    }
}
