//! The machine: its processor and memory, and the parts of both that this process may use. A value
//! that the system does not report is `None`.

use std::{fs, num::NonZeroUsize, path::Path};

use sysinfo::{CpuRefreshKind, ProcessRefreshKind, ProcessesToUpdate, System};

/// The machine as this process sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// Name of the processor.
    pub cpu: Option<String>,
    /// Cores that this process may use.
    pub cores: usize,
    /// Memory of the machine.
    pub memory_bytes: Option<u64>,
    /// Memory that this process can still take without swapping: what is left of the machine's
    /// memory, or of its control group's limit if that is less.
    pub memory_available_bytes: Option<u64>,
    /// Limit of the control group, if it is less than the machine has.
    pub memory_limit_bytes: Option<u64>,
    /// Transparent huge pages: `always`, `madvise` or `never`.
    pub huge_pages: Option<String>,
}

impl Machine {
    /// Reads the current values.
    pub fn read() -> Self {
        let mut system = System::new();
        system.refresh_memory();
        system.refresh_cpu_list(CpuRefreshKind::nothing());
        let brand = system.cpus().first().map(|cpu| cpu.brand().trim().to_owned());
        let memory_bytes = Some(system.total_memory()).filter(|bytes| *bytes > 0);
        let group = system.cgroup_limits();
        // Cached files count as used by the group, but are dropped when memory is needed.
        let group_free =
            group.as_ref().map(|limits| limits.total_memory.saturating_sub(limits.rss));
        let huge_pages = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
        Self {
            cpu: brand.filter(|name| !name.is_empty()),
            cores: std::thread::available_parallelism().map_or(1, NonZeroUsize::get),
            memory_bytes,
            memory_available_bytes: memory_bytes
                .map(|_| system.available_memory().min(group_free.unwrap_or(u64::MAX))),
            memory_limit_bytes: group
                .map(|limits| limits.total_memory)
                .filter(|limit| memory_bytes.is_some_and(|all| *limit < all)),
            huge_pages: bracketed(&huge_pages.unwrap_or_default()),
        }
    }
}

/// Returns the host name of this machine, for display.
pub fn host_name() -> String {
    System::host_name().filter(|name| !name.is_empty()).unwrap_or_else(|| "unknown".to_owned())
}

/// Returns the memory of this process that is in RAM, including mapped files.
pub fn resident_bytes() -> Option<u64> {
    let pid = sysinfo::get_current_pid().ok()?;
    let mut system = System::new();
    let memory = ProcessRefreshKind::nothing().with_memory();
    system.refresh_processes_specifics(ProcessesToUpdate::Some(&[pid]), true, memory);
    system.process(pid).map(|process| process.memory())
}

/// Returns the free space for this user on the file system that holds `path`.
pub fn disk_free_bytes(path: &Path) -> Option<u64> {
    fs4::available_space(path).ok()
}

/// Returns the word in brackets: `always [madvise] never`.
fn bracketed(text: &str) -> Option<String> {
    Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bracketed_word_is_the_setting() {
        assert_eq!(bracketed("always [madvise] never\n"), Some("madvise".to_owned()));
        assert_eq!(bracketed(""), None);
    }

    #[test]
    fn machine_has_a_core_and_memory_that_holds_this_process() {
        let machine = Machine::read();
        assert!(machine.cores >= 1);
        let (all, available) = (machine.memory_bytes, machine.memory_available_bytes);
        assert!(available <= all, "{available:?} of {all:?}");
        assert!(resident_bytes() > Some(0) && resident_bytes() < all);
    }
}
