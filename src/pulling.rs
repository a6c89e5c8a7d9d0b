//! Models of the Hugging Face Hub: pulls them, with progress on standard error.

use std::{
    io::IsTerminal as _,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use indicatif::{HumanBytes, ProgressBar, ProgressDrawTarget, ProgressStyle};
use tritmill_engine::files::{Model, ModelError};
use tritmill_hub::{Event, PREFIX, Pulled, Reference, Settings, pull};

/// Time between two lines of progress without a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// Most files that are listed with the reason why another one was chosen.
const PASSED_OVER_MAX: usize = 8;

/// Pulls and opens a model of the hub, `hf:ORG/NAME[@REVISION][:FILE]`, under the name `NAME`. `None` if the text is a
/// path instead.
pub fn open(text: &str) -> anyhow::Result<Option<Result<Model, ModelError>>> {
    if !text.starts_with(PREFIX) {
        return Ok(None);
    }
    let reference: Reference = text.parse().with_context(|| format!("--model {text}"))?;
    let pulled = with_progress(&Settings::from_env()?, &reference, true)?;
    Ok(Some(Model::open(&pulled.path).map(|model| model.with_name(reference.name()))))
}

/// Pulls a model. Notes are printed in any case, progress if it `is_shown`.
pub fn with_progress(
    settings: &Settings,
    reference: &Reference,
    is_shown: bool,
) -> anyhow::Result<Pulled> {
    let mut display = Display::new(is_shown);
    let pulled = pull(settings, reference, &mut |event| display.show(&event));
    display.bar.finish_and_clear();
    Ok(pulled?)
}

/// A bar on a terminal, else a line at intervals.
struct Display {
    bar: ProgressBar,
    has_bar: bool,
    has_lines: bool,
    size: u64,
    last_line: Instant,
}

impl Display {
    fn new(is_shown: bool) -> Self {
        let is_terminal = std::io::stderr().is_terminal();
        let has_bar = is_shown && is_terminal;
        let target = match has_bar {
            true => ProgressDrawTarget::stderr(),
            false => ProgressDrawTarget::hidden(),
        };
        let bar = ProgressBar::with_draw_target(None, target);
        let template = "{bar:32} {bytes}/{total_bytes} {binary_bytes_per_sec} {msg}, {eta} left";
        bar.set_style(ProgressStyle::with_template(template).expect("a template with known keys"));
        let has_lines = is_shown && !is_terminal;
        Self { bar, has_bar, has_lines, size: 0, last_line: Instant::now() }
    }

    fn show(&mut self, event: &Event<'_>) {
        match event {
            Event::FromCache { cause } => {
                self.note(format_args!("{cause}: the model is used as it is in the cache"));
            }
            Event::Chosen { file, passed_over } => {
                self.note(format_args!("{file} is chosen"));
                for other in passed_over.iter().take(PASSED_OVER_MAX) {
                    self.note(format_args!("not {other}"));
                }
                match passed_over.len().saturating_sub(PASSED_OVER_MAX) {
                    0 => {}
                    more => self.note(format_args!("nor {more} more")),
                }
            }
            Event::Waiting { file } => {
                self.note(format_args!("waits for another process that downloads {file}"));
            }
            Event::Retrying { file, cause, delay } => {
                let seconds = delay.as_secs_f64();
                self.note(format_args!("{file}: {cause}; goes on in {seconds:.1} s"));
            }
            Event::Starting { file, size, received } => {
                self.size = *size;
                self.bar.set_length(*size);
                self.bar.set_message((*file).to_owned());
                self.bar.set_position(*received);
                // The speed is that of this download.
                self.bar.reset_eta();
                if self.has_lines {
                    note!("pulling {file}, {}", HumanBytes(*size));
                }
            }
            Event::Received { file, received } => {
                self.bar.set_position(*received);
                if self.has_lines && self.last_line.elapsed() >= LINE_INTERVAL {
                    self.last_line = Instant::now();
                    note!("{file}: {} of {}", HumanBytes(*received), HumanBytes(self.size));
                }
            }
            _ => {}
        }
    }

    fn note(&self, text: std::fmt::Arguments<'_>) {
        if self.has_bar {
            self.bar.suspend(|| note!("note: {text}"));
        } else {
            note!("note: {text}");
        }
    }
}
