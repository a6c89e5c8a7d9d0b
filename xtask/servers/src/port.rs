//! Ports that two tests never have at the same time.

use std::{
    fs::{self, File, TryLockError},
    hash::{BuildHasher as _, RandomState},
    net::{Ipv4Addr, TcpListener},
    ops::Range,
    os::unix::fs::MetadataExt as _,
    path::Path,
};

use anyhow::{Context as _, bail};

/// Below the ports that the system hands out by itself, so that nothing that asks for any port gets one.
const PORTS: Range<u16> = 20_000..32_000;

/// A port of the loopback address that is one's own for as long as this lives: no other [`Port`] has
/// it, not even while nobody listens there.
#[derive(Debug)]
pub struct Port {
    number: u16,
    /// Locked; the system lets go when the process dies.
    _claim: File,
}

impl Port {
    /// Claims one.
    ///
    /// # Errors
    /// If files cannot be locked, or there is none.
    pub fn claim() -> anyhow::Result<Self> {
        // Each user has files of its own: those of others cannot be opened.
        let user = fs::metadata("/proc/self").map_or(0, |process| process.uid());
        let folder = std::env::temp_dir().join(format!("tritmill-ports-{user}"));
        fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        let start = RandomState::new().hash_one(()) % u64::from(PORTS.end - PORTS.start);
        let from_start = (PORTS.start + start as u16..PORTS.end).chain(PORTS.start..PORTS.end);
        for number in from_start {
            if let Some(port) = Self::of(&folder, number)? {
                return Ok(port);
            }
        }
        bail!("no port of {PORTS:?} is free")
    }

    /// This one, unless somebody has it.
    fn of(folder: &Path, number: u16) -> anyhow::Result<Option<Self>> {
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
        // Others may listen there who know nothing of claims.
        let is_free = TcpListener::bind((Ipv4Addr::LOCALHOST, number)).is_ok();
        Ok(is_free.then_some(Self { number, _claim: claim }))
    }

    /// Its number.
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
        let claim = || Port::of(folder.path(), number).expect("files can be locked");
        let port = claim();
        assert!(port.is_some());
        assert!(claim().is_none(), "it is claimed");
        drop(port);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, number)).expect("it is free");
        assert!(claim().is_none(), "somebody listens there");
        drop(listener);
        assert_eq!(claim().map(|port| port.number()), Some(number));
    }
}
