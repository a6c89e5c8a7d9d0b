//! Direct access to servers, and what these tests read from the program.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::Value;
use tempfile::TempDir;

use crate::fleet::Fleet;

/// A line that the demo model answers with `2024-03-03`.
pub const LINE: &str = "{\"prompt\": \"Paid on the 3rd of March, 2024\", \"temperature\": 0}\n";

/// Returns a temporary folder that servers of another user can read.
pub fn folder() -> TempDir {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    folder
}

/// Writes a file and returns its path.
pub fn file(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, text).unwrap();
    path
}

/// Runs SQL; returns the values without decoration.
pub fn sql(fleet: &Fleet, statement: &str) -> String {
    let mut command = Command::new("psql");
    command.args(["-v", "ON_ERROR_STOP=1", "-Atqc", statement, &fleet.postgres.url()]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// Runs a shell line, without single quotes, as the server's user in its data folder.
pub fn beside_postgres(fleet: &Fleet, line: &str) {
    // The program must read its input, or COPY may fail with a broken pipe.
    sql(fleet, &format!("COPY (SELECT 1) TO PROGRAM 'cat > /dev/null && {line}'"));
}

/// Sends Redis a line; returns the first line of the answer.
pub fn redis(fleet: &Fleet, line: &str) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", fleet.redis.port())).unwrap();
    stream.write_all(format!("{line}\r\n").as_bytes()).unwrap();
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).unwrap();
    answer.trim().to_owned()
}

/// Submits lines; returns the job ids and standard error.
pub fn submit(fleet: &Fleet, lines: &str, arguments: &[&str]) -> (Vec<String>, String) {
    submit_with(fleet.command(&["submit", "-"]), lines, arguments)
}

/// As [`submit`], with this command.
pub fn submit_with(mut command: Command, lines: &str, arguments: &[&str]) -> (Vec<String>, String) {
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(matches!(output.status.code(), Some(0 | 2)), "{said}");
    let ids = String::from_utf8(output.stdout).unwrap();
    (ids.lines().map(id).collect(), said)
}

/// Returns the id in a line that `submit` prints.
pub fn id(line: &str) -> String {
    json(line)["id"].as_str().unwrap().to_owned()
}

/// Waits for jobs; returns the exit code and the output of `watch`.
pub fn watch(fleet: &Fleet, ids: &[String]) -> (Option<i32>, String, String) {
    let mut words = vec!["watch", "--timeout", "60"];
    words.extend(ids.iter().map(String::as_str));
    fleet.run(&words)
}

pub fn json(line: &str) -> Value {
    serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))
}

/// Returns the states of jobs, as `results` prints them.
pub fn states(fleet: &Fleet, ids: &[String]) -> Vec<String> {
    let mut words = vec!["results"];
    words.extend(ids.iter().map(String::as_str));
    let (_, stdout, _) = fleet.run(&words);
    stdout.lines().map(|line| json(line)["state"].to_string().replace('"', "")).collect()
}

/// Returns a job with its attempts, as `dlq show` prints it.
pub fn history(fleet: &Fleet, id: &str) -> Value {
    let (code, stdout, stderr) = fleet.run(&["dlq", "show", id]);
    assert_eq!(code, Some(0), "{stderr}");
    json(stdout.trim())
}

/// Returns a queue as `queue list --json` shows it.
pub fn queue(fleet: &Fleet, name: &str) -> Value {
    let (code, stdout, stderr) = fleet.run(&["queue", "list", "--json"]);
    assert_eq!(code, Some(0), "{stderr}");
    stdout.lines().map(json).find(|queue| queue["queue"] == name).unwrap_or_default()
}

/// Returns the content of a file that another process may still write.
pub fn text(path: &Path) -> String {
    let mut text = String::new();
    fs::File::open(path).unwrap().read_to_string(&mut text).unwrap();
    text
}

/// Returns whether standard error is one line `error: …` without a panic.
pub fn is_one_error_line(stderr: &str) -> bool {
    stderr.lines().count() == 1 && stderr.starts_with("error: ") && !stderr.contains("panicked")
}
