//! What these tests say to servers and processes besides running the program.

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

/// A folder that servers of another user may read, too.
pub fn folder() -> TempDir {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    folder
}

/// A file with this text.
pub fn file(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, text).unwrap();
    path
}

/// Says loudly that a test has nothing to run with, and why.
pub fn skip(why: &str) {
    eprintln!("SKIPPED: {why}");
}

/// What SQL returns, bare.
pub fn sql(fleet: &Fleet, statement: &str) -> String {
    let mut command = Command::new("psql");
    command.args(["-v", "ON_ERROR_STOP=1", "-Atqc", statement, &fleet.postgres.url()]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// Runs a line of shell, without single quotes, as Postgres and in its folder.
pub fn beside_postgres(fleet: &Fleet, line: &str) {
    // What is copied to a program must be read, or the pipe may break.
    sql(fleet, &format!("COPY (SELECT 1) TO PROGRAM 'cat > /dev/null && {line}'"));
}

/// Sends Redis a line; the first line of its answer.
pub fn redis(fleet: &Fleet, line: &str) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", fleet.redis.port())).unwrap();
    stream.write_all(format!("{line}\r\n").as_bytes()).unwrap();
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).unwrap();
    answer.trim().to_owned()
}

/// Submits lines; the ids, and what was said.
pub fn submit(fleet: &Fleet, lines: &str, arguments: &[&str]) -> (Vec<String>, String) {
    submit_with(fleet.command(&["submit", "-"]), lines, arguments)
}

/// Submits lines by this command.
pub fn submit_with(mut command: Command, lines: &str, arguments: &[&str]) -> (Vec<String>, String) {
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(matches!(output.status.code(), Some(0 | 2)), "{said}");
    let ids = String::from_utf8(output.stdout).unwrap();
    (ids.lines().map(|line| json(line)["id"].as_str().unwrap().to_owned()).collect(), said)
}

pub fn json(line: &str) -> Value {
    serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))
}

/// The states of jobs, as `results` prints them.
pub fn states(fleet: &Fleet, ids: &[String]) -> Vec<String> {
    let mut words = vec!["results"];
    words.extend(ids.iter().map(String::as_str));
    let (_, stdout, _) = fleet.run(&words);
    stdout.lines().map(|line| json(line)["state"].to_string().replace('"', "")).collect()
}

/// The whole of a job, as `dlq show` prints it.
pub fn story(fleet: &Fleet, id: &str) -> Value {
    let (code, stdout, stderr) = fleet.run(&["dlq", "show", id]);
    assert_eq!(code, Some(0), "{stderr}");
    json(stdout.trim())
}

/// A queue as `queue list --json` shows it.
pub fn queue(fleet: &Fleet, name: &str) -> Value {
    let (code, stdout, stderr) = fleet.run(&["queue", "list", "--json"]);
    assert_eq!(code, Some(0), "{stderr}");
    stdout.lines().map(json).find(|queue| queue["queue"] == name).unwrap_or_default()
}

/// A metric of a worker's page.
pub fn metric(page: &str, name: &str) -> u64 {
    let line = page.lines().find(|line| line.split(' ').next() == Some(name));
    line.and_then(|line| line.split(' ').nth(1)?.parse().ok()).unwrap_or_else(|| panic!("{page}"))
}

/// Everything a file holds so far.
pub fn text(path: &Path) -> String {
    let mut text = String::new();
    fs::File::open(path).unwrap().read_to_string(&mut text).unwrap();
    text
}

/// One line that says `error: …`, and no panic.
pub fn is_one_clear_line(stderr: &str) -> bool {
    stderr.lines().count() == 1 && stderr.starts_with("error: ") && !stderr.contains("panicked")
}
