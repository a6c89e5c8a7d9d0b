//! File descriptors: how many connections the process has room for.

use tritmill_admin::SLACK;

/// Open files besides connections: those of databases, models, and the worker's pages.
const OTHER_FILES: u64 = 640;
/// Fewest connections.
pub const CONNECTIONS_MIN: usize = 16;

/// Raises the limit of open files for this many connections, as far as the system allows. Returns the
/// connections that the limit has room for, at most `wanted`.
pub fn room_for(wanted: usize) -> usize {
    let needed = (wanted + SLACK) as u64 + OTHER_FILES;
    let files = rlimit::increase_nofile_limit(needed).or_else(|error| {
        tracing::warn!(%error, "cannot raise the limit of open files");
        rlimit::getrlimit(rlimit::Resource::NOFILE).map(|(soft, _)| soft)
    });
    // Without a known limit, the system says when there is no room.
    let Ok(files) = files else { return wanted };
    let room = connections(files, wanted);
    if room < wanted {
        tracing::warn!(
            "this process may open {files} files, so it serves {room} connections at once instead of \
             {wanted}: raise the hard limit (ulimit -Hn) to {needed}"
        );
    }
    room
}

/// Returns the connections that this many files have room for. With very few files, connections take a
/// quarter and may lack files at times, which the server survives.
fn connections(files: u64, wanted: usize) -> usize {
    let room = files.saturating_sub(OTHER_FILES + SLACK as u64).max(files / 4);
    usize::try_from(room).unwrap_or(usize::MAX).clamp(CONNECTIONS_MIN, wanted.max(CONNECTIONS_MIN))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_room_for_other_files() {
        assert_eq!(connections(1 << 20, 8192), 8192);
        assert_eq!(connections(8192 + 704, 8192), 8192);
        assert_eq!(connections(4096, 8192), 4096 - 704);
        assert_eq!(connections(128, 8192), 32);
        assert_eq!(connections(10, 8192), CONNECTIONS_MIN);
    }
}
