//! Progress on standard error: a bar on a terminal, else a line at intervals.

use std::{
    io::IsTerminal as _,
    time::{Duration, Instant},
};

use indicatif::{HumanBytes, ProgressBar, ProgressDrawTarget, ProgressStyle};
use tritmill_client::{BatchProgress, remote::RemoteUpdate};

use crate::answering::Update;

/// Time between two lines of progress without a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// The progress display.
pub struct Display {
    bar: ProgressBar,
    terminal: bool,
    /// Unknown for a pipe.
    input_bytes: Option<u64>,
    /// Time of the first progress, and the lines finished then.
    started: Option<(Instant, u64)>,
    last_line: Instant,
}

impl Display {
    /// Creates a display for an input of this size, if known.
    pub fn new(input_bytes: Option<u64>) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let target = match terminal {
            true => ProgressDrawTarget::stderr(),
            false => ProgressDrawTarget::hidden(),
        };
        let bar = ProgressBar::with_draw_target(None, target);
        let template = "{bar:32} {pos}/{len} {msg}";
        bar.set_style(ProgressStyle::with_template(template).expect("a template with known keys"));
        Self { bar, terminal, input_bytes, started: None, last_line: Instant::now() }
    }

    /// Shows an update of a local run or a run through a queue.
    pub fn show(&mut self, update: Update) {
        match update {
            Update::Notice(notice) => self.notice(&notice.to_string()),
            Update::Reading(lines, bytes) => self.reading(lines, bytes),
            Update::Progress(progress) => self.progress(&progress, |_, seconds| {
                let rate = progress.tokens as f64 / seconds;
                format!("{rate:.0} tokens/s")
            }),
        }
    }

    /// Shows an update of a run through a server.
    pub fn show_remote(&mut self, update: RemoteUpdate) {
        match update {
            RemoteUpdate::Notice(notice) => self.notice(&notice),
            RemoteUpdate::Reading(lines, bytes) => self.reading(lines, bytes),
            RemoteUpdate::Uploading(sent, size) => {
                self.bar.set_length(size);
                self.bar.set_position(sent.min(size));
                self.bar.set_message("bytes uploaded");
                self.line(|| format!("uploading: {} of {}", HumanBytes(sent), HumanBytes(size)));
            }
            RemoteUpdate::Progress(progress) => self.progress(&progress, |lines, seconds| {
                let rate = lines as f64 / seconds;
                format!("{rate:.1} lines/s")
            }),
            _ => {}
        }
    }

    fn notice(&self, notice: &str) {
        self.bar.suspend(|| note!("note: {notice}"));
    }

    /// Shows the rows read so far of a source that is not a local file of lines.
    pub fn rows(&mut self, rows: u64) {
        self.bar.set_message(format!("{rows} rows read"));
        self.line(|| format!("reading: {rows} rows"));
    }

    fn reading(&mut self, lines: u64, bytes: u64) {
        let known = self.input_bytes;
        let length = known.unwrap_or(bytes);
        self.bar.set_length(length);
        self.bar.set_position(bytes);
        self.bar.set_message(format!("bytes read, {lines} lines"));
        let percent = bytes.saturating_mul(100) / length.max(1);
        self.line(|| match known {
            Some(_) => format!("reading: {lines} lines, {percent} %"),
            None => format!("reading: {lines} lines"),
        });
    }

    /// Shows the progress. `rate` returns the speed, from the lines and the seconds since the first
    /// progress.
    fn progress(&mut self, progress: &BatchProgress, rate: impl FnOnce(u64, f64) -> String) {
        let (started, finished_before) =
            *self.started.get_or_insert((Instant::now(), progress.finished()));
        let seconds = started.elapsed().as_secs_f64().max(1e-3);
        let lines = progress.finished().saturating_sub(finished_before);
        let left = progress.lines.saturating_sub(progress.finished());
        let eta = seconds * left as f64 / lines.max(1) as f64;
        let eta = match lines {
            0 => "unknown".to_owned(),
            _ => indicatif::HumanDuration(Duration::from_secs_f64(eta)).to_string(),
        };
        let rate = rate(lines, seconds);
        let message = format!("{rate}, {} failed, {eta} left", progress.failed);
        self.bar.set_length(progress.lines);
        self.bar.set_position(progress.finished());
        self.bar.set_message(message.clone());
        self.line(|| format!("{}/{} lines, {message}", progress.finished(), progress.lines));
    }

    /// Prints a line of progress, if it is due and there is no terminal.
    fn line(&mut self, text: impl FnOnce() -> String) {
        if !self.terminal && self.last_line.elapsed() >= LINE_INTERVAL {
            self.last_line = Instant::now();
            note!("{}", text());
        }
    }

    /// Clears the bar.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
