//! What the machine is: processor, memory, what this process may use of them. Read from `/proc`,
//! `/sys` and the control group; on other systems than Linux most of it is unknown, which is said
//! as `None` and never guessed.

use std::{fs, num::NonZeroUsize, path::Path};

/// The machine as this process sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// Name of the processor.
    pub cpu: Option<String>,
    /// Cores that this process may use.
    pub cores: usize,
    /// Memory of the machine.
    pub memory_bytes: Option<u64>,
    /// Memory that can still be used without swapping.
    pub memory_available_bytes: Option<u64>,
    /// What the control group allows, if that is less than the machine has.
    pub memory_limit_bytes: Option<u64>,
    /// Transparent huge pages: `always`, `madvise` or `never`.
    pub huge_pages: Option<String>,
}

/// Name of this machine, for people.
pub fn host_name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "unknown".to_owned() } else { name.to_owned() }
}

impl Machine {
    /// Memory that this process may still take.
    pub fn available(&self) -> Option<u64> {
        self.memory_limit_bytes.or(self.memory_available_bytes)
    }

    /// Reads it now.
    pub fn read() -> Self {
        let file = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let meminfo = file("/proc/meminfo");
        let memory_bytes = kib_field(&meminfo, "MemTotal");
        let limit = file("/sys/fs/cgroup/memory.max").trim().parse().ok();
        Self {
            cpu: cpu_name(&file("/proc/cpuinfo")),
            cores: std::thread::available_parallelism().map_or(1, NonZeroUsize::get),
            memory_bytes,
            memory_available_bytes: kib_field(&meminfo, "MemAvailable"),
            memory_limit_bytes: limit.filter(|&limit| memory_bytes.is_none_or(|all| limit < all)),
            huge_pages: chosen(&file("/sys/kernel/mm/transparent_hugepage/enabled")),
        }
    }
}

/// Memory of this process that is in RAM, mapped files included.
pub fn resident_bytes() -> Option<u64> {
    kib_field(&fs::read_to_string("/proc/self/status").ok()?, "VmRSS")
}

/// Free space of the file system that holds `path`, for this user.
pub fn disk_free_bytes(path: &Path) -> Option<u64> {
    fs4::available_space(path).ok()
}

/// The value of a `Name:  123 kB` line, in bytes.
fn kib_field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

fn cpu_name(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// The word in brackets: `always [madvise] never`.
fn chosen(text: &str) -> Option<String> {
    Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_bytes() {
        let text = "MemTotal:       16 kB\nMemAvailable:  7 kB\nHugePages_Total:   0\n";
        assert_eq!(kib_field(text, "MemTotal"), Some(16 * 1024));
        assert_eq!(kib_field(text, "MemAvailable"), Some(7 * 1024));
        assert_eq!(kib_field(text, "HugePages_Total"), None);
        assert_eq!(kib_field(text, "Mem"), None);
        assert_eq!(kib_field("", "MemTotal"), None);
    }

    #[test]
    fn the_first_processor_gives_the_name() {
        let text = "processor : 0\nmodel name\t: AMD EPYC 9R14\nflags : avx2\nmodel name : x\n";
        assert_eq!(cpu_name(text), Some("AMD EPYC 9R14".to_owned()));
        assert_eq!(cpu_name("processor : 0\n"), None);
    }

    #[test]
    fn the_bracketed_choice_is_the_setting() {
        assert_eq!(chosen("always [madvise] never\n"), Some("madvise".to_owned()));
        assert_eq!(chosen(""), None);
    }

    #[test]
    fn this_machine_has_a_core() {
        assert!(Machine::read().cores >= 1);
    }
}
