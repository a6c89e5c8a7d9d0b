//! Ports that no two tests use at the same time.

use std::{
    fs::{self, File, TryLockError},
    hash::{BuildHasher as _, RandomState},
    net::{Ipv4Addr, TcpListener},
    ops::Range,
    os::unix::fs::MetadataExt as _,
    path::Path,
};

use anyhow::{Context as _, bail};

/// Below the system's ephemeral ports, so that a bind to port 0 never gets one of these.
const PORTS: Range<u16> = 20_000..32_000;

/// A port of the loopback address, claimed until this value is dropped: no other [`Port`] has the
/// same number, even while no server listens there.
#[derive(Debug)]
pub struct Port {
    number: u16,
    /// Locked file; the system releases the lock when the process exits.
    _claim: File,
}

impl Port {
    /// Claims a free port.
    ///
    /// # Errors
    /// If files cannot be locked, or every port is taken.
    pub fn claim() -> anyhow::Result<Self> {
        // One folder per user: the files of other users cannot be opened.
        let user = fs::metadata("/proc/self").map_or(0, |process| process.uid());
        let folder = std::env::temp_dir().join(format!("tritmill-ports-{user}"));
        fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        let start = RandomState::new().hash_one(()) % u64::from(PORTS.end - PORTS.start);
        let from_start = (PORTS.start + start as u16..PORTS.end).chain(PORTS.start..PORTS.end);
        for number in from_start {
            if let Some(port) = Self::try_claim(&folder, number)? {
                return Ok(port);
            }
        }
        bail!("no port of {PORTS:?} is free")
    }

    /// Claims this port; `None` if it is claimed or in use.
    fn try_claim(folder: &Path, number: u16) -> anyhow::Result<Option<Self>> {
        let file = folder.join(number.to_string());
        let claim = File::options().create(true).truncate(false).write(true).open(&file);
        let claim = claim.with_context(|| file.display().to_string())?;
        match claim.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| file.display().to_string());
            }
        }
        // A program that takes no part in the claims may listen there.
        let is_free = TcpListener::bind((Ipv4Addr::LOCALHOST, number)).is_ok();
        Ok(is_free.then_some(Self { number, _claim: claim }))
    }

    /// Returns the port's number.
    pub fn number(&self) -> u16 {
        self.number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_has_one_owner_at_a_time() {
        let folder = tempfile::tempdir().expect("a folder");
        let port = Port::claim().expect("a port");
        let number = port.number();
        drop(port);
        let claim = || Port::try_claim(folder.path(), number).expect("files can be locked");
        let port = claim();
        assert!(port.is_some());
        assert!(claim().is_none(), "the port is claimed");
        drop(port);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, number)).expect("the port is free");
        assert!(claim().is_none(), "a server listens there");
        drop(listener);
        assert_eq!(claim().map(|port| port.number()), Some(number));
    }
}
