//! Parts that run one after another on a rented device, each with a time limit.

use std::time::{Duration, Instant};

use anyhow::ensure;

use super::{checks, place::Place};

/// What a part runs. Reports are in Markdown.
#[derive(Clone, Copy)]
pub enum Run {
    /// A measurement, which returns its report.
    Measurement(fn(&Place) -> anyhow::Result<String>),
    /// The engine's tests in a module of `backend::cuda::tests`.
    Tests(&'static str),
}

/// A part of a chain.
#[derive(Clone, Copy)]
pub struct Part {
    pub name: &'static str,
    /// Time after which its programs are ended.
    limit: Duration,
    /// Time since the start of the chain at which they are ended, so that what follows has its time.
    pub ends_by: Duration,
    pub run: Run,
}

/// Creates a part; times in seconds.
pub const fn part(
    name: &'static str,
    limit: u64,
    ends_by: u64,
    run: fn(&Place) -> anyhow::Result<String>,
) -> Part {
    let (limit, ends_by) = (Duration::from_secs(limit), Duration::from_secs(ends_by));
    Part { name, limit, ends_by, run: Run::Measurement(run) }
}

/// Creates a part that runs tests; its name is that of the module.
pub const fn tests(module: &'static str, limit: u64, ends_by: u64) -> Part {
    let (limit, ends_by) = (Duration::from_secs(limit), Duration::from_secs(ends_by));
    Part { name: module, limit, ends_by, run: Run::Tests(module) }
}

/// Parts, in the order in which they run: what the rest depends on comes first.
#[derive(Clone, Copy)]
pub struct Chain {
    pub name: &'static str,
    pub parts: &'static [Part],
}

impl Chain {
    /// Runs the parts one after another, and writes each report when it is there.
    ///
    /// # Errors
    /// Parts failed, after all have run; or the reports cannot be written.
    pub fn run(&self, mut place: Place, is_wanted: impl Fn(&Part) -> bool) -> anyhow::Result<()> {
        let began = Instant::now();
        let mut model = place.make_model()?;
        let mut failed = Vec::new();
        for part in self.parts.iter().filter(|part| is_wanted(part)) {
            let left = part.ends_by.saturating_sub(began.elapsed());
            let limit = if place.is_rehearsal { 20 * part.limit } else { part.limit.min(left) };
            place.programs.limit(limit);
            let start = Instant::now();
            let result = match part.run {
                Run::Measurement(run) => run(&place),
                Run::Tests(module) => checks::run(&place, module),
            };
            let (took, at) = (start.elapsed().as_secs_f64(), began.elapsed().as_secs());
            let report = result.unwrap_or_else(|error| {
                failed.push(part.name);
                format!("**Failed**: {error:#}\n")
            });
            let name = part.name;
            place.write(&format!("## {name}\n\n{took:.1} s, until second {at}\n\n{report}\n"))?;
        }
        if let Some(model) = &mut model {
            let _ = model.kill();
            let _ = model.wait();
        }
        println!("Reports: {}", place.results.display());
        ensure!(failed.is_empty(), "failed: {}", failed.join(", "));
        Ok(())
    }
}
