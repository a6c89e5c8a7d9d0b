//! Output of the program: log, results and errors.

use std::{
    fmt,
    io::{self, IsTerminal as _, Write as _},
};

use tracing_subscriber::{
    EnvFilter, Layer as _, layer::SubscriberExt as _, util::SubscriberInitExt as _,
};

use crate::traces::Traces;

/// Starts the log on standard error; `RUST_LOG` filters it, the default is warnings. Spans also go to the
/// export of traces, if there is one.
pub fn start_log(traces: Option<&Traces>) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    let is_terminal = io::stderr().is_terminal();
    let log = tracing_subscriber::fmt::layer().with_ansi(is_terminal).with_writer(io::stderr);
    let log = log.with_filter(filter);
    tracing_subscriber::registry().with(log).with(traces.map(Traces::layer)).init();
}

/// Prints a formatted line that is no result, on standard error.
macro_rules! note {
    ($($text:tt)*) => {
        $crate::output::note_line(format_args!($($text)*))
    };
}

/// See [`note`]. A reader that went away, or a full disk, must not end the program.
pub fn note_line(text: fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Prints a part of such a line.
pub fn note_part(text: &str) {
    let _ = write!(io::stderr().lock(), "{text}");
}

/// Prints one line of a result.
pub fn line(text: impl fmt::Display) -> io::Result<()> {
    let written = writeln!(io::stdout().lock(), "{text}");
    written.map_err(|error| io::Error::new(error.kind(), format!("standard output: {error}")))
}

/// Prints one line of JSON.
pub fn json(value: serde_json::Value) -> io::Result<()> {
    line(tritmill_client::json_line(&value))
}

/// Returns whether the reader of standard output closed it, which is not a failure.
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let io_error = error.downcast_ref::<io::Error>();
    io_error.is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// Returns an error with its causes on one line. A cause is left out if the text before it ends with
/// it.
pub fn one_line(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        if text.is_empty() {
            text = cause;
        } else if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Formats bytes as `1.18 GiB`.
pub fn bytes(count: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} B") } else { format!("{value:.2} {}", units[unit]) }
}

#[cfg(test)]
mod tests {
    use anyhow::Context as _;

    use super::*;

    #[test]
    fn causes_are_on_one_line_without_repetition() {
        let cause = || Err::<(), _>(anyhow::anyhow!("no such\nfile"));
        let check = |error: anyhow::Error, expect: &str| assert_eq!(one_line(&error), expect);
        check(cause().expect_err("made above"), "no such file");
        check(cause().context("cannot open").expect_err("made above"), "cannot open: no such file");
        let twice = cause().context("x: no such\nfile").expect_err("made above");
        check(twice, "x: no such file");
    }

    #[test]
    fn bytes_have_a_binary_unit() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.50 KiB");
        assert_eq!(bytes(5 << 30), "5.00 GiB");
    }
}
