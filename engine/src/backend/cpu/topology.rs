//! The memory nodes (NUMA) of this machine, and threads that stay on the cores of one.
//!
//! A core reads the memory of its own node at full speed, that of others at a fraction. An engine on one node has its
//! threads there, and Linux places what they write first, its weights and KV blocks, in the node's memory. Threads
//! may move between the cores of their node: to fix each to one core would let any other program on that core hold
//! up every step.
//!
//! The nodes come from `/sys/devices/system/node`; a machine without this folder has one node.

use std::{cell::Cell, fs, path::Path, sync::LazyLock};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

const NODES: &str = "/sys/devices/system/node";

/// Cores of one memory node that this process may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryNode {
    /// Number of the node in the system.
    pub number: usize,
    /// Numbers of its cores, ascending; at least one.
    pub cores: Vec<usize>,
}

/// Returns the nodes that have cores for this process, as they are at the first call; at least one.
pub fn memory_nodes() -> &'static [MemoryNode] {
    static FOUND: LazyLock<Vec<MemoryNode>> =
        LazyLock::new(|| nodes_below(Path::new(NODES), &allowed()));
    &FOUND
}

/// Returns how many cores this process may use at once: a control group may allow less time than its cores have.
pub fn core_limit() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Returns the cores of a node, if this process may use some.
pub fn cores_of(node: usize) -> Option<&'static [usize]> {
    memory_nodes().iter().find(|found| found.number == node).map(|found| &found.cores[..])
}

/// Returns the cores that this process may use.
fn allowed() -> Vec<usize> {
    match sched_getaffinity(None) {
        Ok(set) => (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect(),
        Err(_) => (0..core_limit()).collect(),
    }
}

/// Reads the nodes from a folder like `/sys/devices/system/node`. Everything is one node, number 0, if it cannot be
/// read or does not name all allowed cores.
fn nodes_below(folder: &Path, allowed: &[usize]) -> Vec<MemoryNode> {
    let mut nodes = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("node")?.parse().ok());
        let Some(number) = number else { continue };
        let list = fs::read_to_string(entry.path().join("cpulist")).unwrap_or_default();
        let mut cores = cores_in(&list).unwrap_or_default();
        cores.retain(|core| allowed.contains(core));
        // A node without cores has memory only.
        if !cores.is_empty() {
            nodes.push(MemoryNode { number, cores });
        }
    }
    nodes.sort_by_key(|node| node.number);
    if nodes.iter().map(|node| node.cores.len()).sum::<usize>() != allowed.len() {
        return vec![MemoryNode { number: 0, cores: allowed.to_vec() }];
    }
    nodes
}

/// Parses a list of cores as the kernel writes it: `0-3,8,10-11`.
fn cores_in(list: &str) -> Option<Vec<usize>> {
    let mut cores = Vec::new();
    for part in list.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
        cores.extend(first..=last.min(CpuSet::MAX_CPU));
    }
    Some(cores)
}

thread_local! {
    /// The node that this thread stays on.
    static STAYS_ON: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Keeps the calling thread on the cores of a node from now on. Costs nothing if it already stays there. A system
/// that refuses makes steps slower and not wrong, so that is a warning.
pub fn stay_on(node: Option<usize>) {
    let Some(number) = node.filter(|_| STAYS_ON.get() != node) else { return };
    STAYS_ON.set(node);
    let mut set = CpuSet::new();
    for &core in cores_of(number).unwrap_or_default() {
        set.set(core);
    }
    if let Err(error) = sched_setaffinity(None, &set) {
        tracing::warn!(node = number, %error, "a thread cannot be kept on its memory node");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a folder with the lists of cores of nodes.
    fn machine(nodes: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, list) in nodes {
            fs::create_dir(folder.path().join(name)).expect("a node");
            fs::write(folder.path().join(name).join("cpulist"), list).expect("its cores");
        }
        folder
    }

    fn check(nodes: &[(&str, &str)], allowed: &[usize], expected: &[(usize, &[usize])]) {
        let folder = machine(nodes);
        let expected: Vec<MemoryNode> = expected
            .iter()
            .map(|&(number, cores)| MemoryNode { number, cores: cores.to_vec() })
            .collect();
        assert_eq!(nodes_below(folder.path(), allowed), expected);
    }

    #[test]
    fn nodes_have_the_cores_that_the_process_may_use() {
        let two = [("node0", "0-3,8-11\n"), ("node1", "4-7,12-15\n"), ("has_cpu", "")];
        let all: Vec<usize> = (0..16).collect();
        check(&two, &all, &[(0, &[0, 1, 2, 3, 8, 9, 10, 11]), (1, &[4, 5, 6, 7, 12, 13, 14, 15])]);
        // A container with some cores: nodes without any do not count.
        check(&two, &[4, 5], &[(1, &[4, 5])]);
        check(&two, &[3, 4], &[(0, &[3]), (1, &[4])]);
        let memory_only = [("node10", "1\n"), ("node2", "0\n"), ("node3", "\n")];
        check(&memory_only, &[0, 1], &[(2, &[0]), (10, &[1])]);
    }

    #[test]
    fn machine_that_does_not_tell_has_one_node() {
        check(&[], &[0, 1], &[(0, &[0, 1])]);
        check(&[("node0", "0-x\n")], &[0, 1], &[(0, &[0, 1])]);
        check(&[("node0", "0\n")], &[0, 1], &[(0, &[0, 1])]);
        check(&[("node0", "0-99999999999\n")], &[0, 1], &[(0, &[0, 1])]);
        assert_eq!(nodes_below(Path::new("/no/such/folder"), &[5])[0].cores, [5]);
    }

    #[test]
    fn thread_stays_on_the_cores_of_its_node() {
        let node = &memory_nodes()[0];
        std::thread::spawn(|| {
            stay_on(None);
            stay_on(Some(node.number));
            assert_eq!(allowed(), node.cores);
        })
        .join()
        .expect("a thread on its node");
    }
}
