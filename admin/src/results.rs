//! Results of a batch while it runs and after: pages of the lines that ended, in the order of completion or of the input.
//!
//! A page begins after a [`Cursor`] and says where the next one begins. A cursor is a number of the store
//! ([`batch_ends`](crate::store::batch_ends)), so it is valid for as long as the batch is, at every process of the service.
//! In the order of completion a line comes as soon as it has a number. In the order of the input it comes when all lines
//! before it have ended, because a cursor that has passed a line does not come back to it.
//!
//! A page is bounded by lines, bytes and work: with a search it may be empty although there are more lines.

use std::{collections::HashMap, fmt, str::FromStr};

use tritmill_client::answer;
use tritmill_queue::{JobId, JobState, Outcome, StoreError, job::UnknownWord, store::EndedJob};

use crate::{
    output_lines,
    store::{
        Batch, BatchId, FrontStore,
        batch_ends::{EndOrder, EndsPage, LineEnd},
    },
};

/// Most bytes of a page, which may be exceeded by the lines that are read at once.
const PAGE_BYTES: usize = 4 << 20;
/// Most lines of a batch that a page looks at.
const SCAN_MAX: usize = 20_000;
/// Lines that are read at once, at first and at most. Between them the number depends on the size of the results, which
/// should fit `SLICE_BYTES`.
const SLICE_FIRST: usize = 64;
const SLICE_MAX: usize = 1000;
const SLICE_BYTES: usize = 1 << 20;

/// A place in the results of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cursor {
    /// The batch.
    pub batch: BatchId,
    /// The order of the results.
    pub order: EndOrder,
    /// Number of the last result before it: in the order of completion, or of the line.
    pub position: u64,
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let order = match self.order {
            EndOrder::Completion => 'c',
            EndOrder::Lines => 'l',
        };
        write!(f, "{}-{order}{}", self.batch, self.position)
    }
}

impl FromStr for Cursor {
    type Err = UnknownWord;

    fn from_str(text: &str) -> Result<Self, UnknownWord> {
        let unknown = || UnknownWord { what: "cursor", word: text.to_owned() };
        let (batch, place) = text.rsplit_once('-').ok_or_else(unknown)?;
        let (order, digits) = match (place.strip_prefix('c'), place.strip_prefix('l')) {
            (Some(digits), _) => (EndOrder::Completion, digits),
            (_, Some(digits)) => (EndOrder::Lines, digits),
            (None, None) => return Err(unknown()),
        };
        let is_number = digits.bytes().all(|digit| digit.is_ascii_digit());
        let position = digits.parse().ok().filter(|_| is_number).ok_or_else(unknown)?;
        Ok(Self { batch: batch.parse()?, order, position })
    }
}

/// Which results to read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResultFilter {
    /// Their order.
    pub order: EndOrder,
    /// Those in these states; without a state, all.
    pub states: Vec<JobState>,
    /// Those with this text in their `custom_id`, answer or error, whatever the case of its letters.
    pub search: Option<String>,
}

/// A result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResultLine {
    /// Its place.
    pub cursor: Cursor,
    /// Its line of output, as in the files of the batch.
    pub text: String,
}

impl ResultLine {
    /// Returns the line with the cursor as its last field.
    pub fn with_cursor(&self) -> String {
        // A line of output is a JSON object with fields.
        let fields = self.text.strip_suffix('}').unwrap_or(&self.text);
        format!("{fields},\"cursor\":\"{}\"}}", self.cursor)
    }
}

/// Results of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResultPage {
    /// The results.
    pub lines: Vec<ResultLine>,
    /// Where the next page begins.
    pub next: Cursor,
    /// Whether there may be more results now.
    pub has_more: bool,
}

/// Whether the results of a batch can be read. Of batches that an earlier release ended, only the files are kept.
pub fn are_numbered(batch: &Batch) -> bool {
    let is_earlier = batch.last_end == 0 && batch.completed + batch.failed > 0;
    !(batch.state.is_terminal() && is_earlier)
}

/// Reads up to `lines_max` results of a batch after a place. `batch` must have been read before.
///
/// # Errors
/// If the store fails.
pub async fn read(
    store: &dyn FrontStore,
    batch: &Batch,
    filter: &ResultFilter,
    after: u64,
    lines_max: usize,
) -> Result<ResultPage, StoreError> {
    let mut reader = Reader { store, batch, filter, position: after };
    let (mut lines, mut bytes, mut seen, mut slice) = (Vec::new(), 0, 0, SLICE_FIRST);
    let mut has_more = true;
    while has_more && lines.len() < lines_max && bytes < PAGE_BYTES && seen < SCAN_MAX {
        let limit = slice.min(lines_max - lines.len());
        let before = bytes;
        let found = reader.slice(limit).await?;
        (has_more, seen) = (found.has_more, seen + limit);
        bytes += found.lines.iter().map(|line| line.text.len()).sum::<usize>();
        lines.extend(found.lines);
        slice = match bytes - before {
            large if large > SLICE_BYTES => (slice / 2).max(1),
            small if small < SLICE_BYTES / 4 => (slice * 2).min(SLICE_MAX),
            _ => slice,
        };
    }
    Ok(ResultPage { lines, next: reader.cursor(reader.position), has_more })
}

/// Reads results slice by slice.
struct Reader<'a> {
    store: &'a dyn FrontStore,
    batch: &'a Batch,
    filter: &'a ResultFilter,
    position: u64,
}

/// Some results.
struct Slice {
    lines: Vec<ResultLine>,
    has_more: bool,
}

impl Reader<'_> {
    fn cursor(&self, position: u64) -> Cursor {
        Cursor { batch: self.batch.id, order: self.filter.order, position }
    }

    /// Whether lines that did not end may be followed by lines that did.
    fn may_have_gaps(&self) -> bool {
        self.filter.order == EndOrder::Lines && !self.batch.state.is_terminal()
    }

    /// Reads up to `limit` ends, and the results of those that match.
    async fn slice(&mut self, limit: usize) -> Result<Slice, StoreError> {
        let until = match self.filter.order {
            EndOrder::Completion => self.batch.last_end,
            EndOrder::Lines if self.may_have_gaps() => self.batch.submitted.line,
            EndOrder::Lines => u64::from(u32::MAX),
        };
        // Lines of other states close gaps.
        let states = if self.may_have_gaps() { &[] } else { self.filter.states.as_slice() };
        let page = EndsPage {
            order: self.filter.order,
            after: self.position,
            until,
            states,
            limit: u32::try_from(limit).unwrap_or(u32::MAX),
        };
        let mut found = self.store.ends(self.batch.id, page).await?;
        let mut has_more = found.len() >= limit;
        if self.may_have_gaps() {
            has_more &= self.cut_at_gap(&mut found, until, limit).await?;
        }
        let lines = match self.results(found).await? {
            (lines, true) => lines,
            (lines, false) => return Ok(Slice { lines, has_more: false }),
        };
        if !has_more && self.filter.order == EndOrder::Completion {
            self.position = self.position.max(until);
        }
        Ok(Slice { lines, has_more })
    }

    /// Removes the ends behind the first line that did not end. Returns whether all lines before the last end did.
    async fn cut_at_gap(
        &self,
        found: &mut Vec<(u64, LineEnd)>,
        until: u64,
        limit: usize,
    ) -> Result<bool, StoreError> {
        let line = |line: u64| u32::try_from(line).unwrap_or(u32::MAX);
        let ids = self.batch.id.jobs(line(self.position + 1), line(until));
        if ids.is_empty() {
            return Ok(true);
        }
        let jobs = self.store.ids_in_range(ids, u32::try_from(limit).unwrap_or(u32::MAX)).await?;
        let jobs: Vec<u32> = jobs.into_iter().filter_map(|id| self.batch.id.line(id)).collect();
        if let Some(last) = jobs.last().filter(|_| jobs.len() >= limit) {
            found.retain(|(_, end)| end.line <= *last);
        }
        let read = if found.len() >= limit { found.last().map(|(_, end)| end.line) } else { None };
        let has_ended = |job: &u32| found.binary_search_by_key(job, |(_, end)| end.line).is_ok();
        let gap = jobs.iter().find(|job| read.is_none_or(|read| **job <= read) && !has_ended(job));
        if let Some(gap) = gap.copied() {
            found.retain(|(_, end)| end.line < gap);
        }
        Ok(gap.is_none())
    }

    /// Returns the results of ends that match, and whether reading may go on behind them.
    async fn results(
        &mut self,
        found: Vec<(u64, LineEnd)>,
    ) -> Result<(Vec<ResultLine>, bool), StoreError> {
        let of_job = found.iter().filter(|(_, end)| end.output.is_none() && self.has_state(end));
        let ids: Vec<JobId> = of_job.map(|(_, end)| self.batch.id.job(end.line)).collect();
        let jobs = if ids.is_empty() { Vec::new() } else { self.store.ended(&ids).await? };
        let mut jobs: HashMap<JobId, EndedJob> =
            jobs.into_iter().map(|job| (job.id, job)).collect();
        let mut lines = Vec::with_capacity(found.len());
        for (seq, end) in found {
            let id = self.batch.id.job(end.line);
            let text = match (end.output.as_ref(), jobs.remove(&id)) {
                _ if !self.has_state(&end) => None,
                (Some(text), _) => Some(text.clone()).filter(|text| self.has_text(&[text])),
                (None, Some(job)) if !self.matches(&job) => None,
                (None, Some(job)) => output_lines::of_job(self.batch, job),
                (None, None) if self.batch.state.is_terminal() => Some(deleted(id)),
                // It runs again. In the order of lines, those behind it wait for it.
                (None, None) if self.filter.order == EndOrder::Lines => return Ok((lines, false)),
                (None, None) => None,
            };
            self.position = match self.filter.order {
                EndOrder::Completion => seq,
                EndOrder::Lines => end.line.into(),
            };
            let cursor = self.cursor(self.position);
            lines.extend(text.map(|text| ResultLine { cursor, text }));
        }
        Ok((lines, true))
    }

    fn has_state(&self, end: &LineEnd) -> bool {
        self.filter.states.is_empty() || self.filter.states.contains(&end.state)
    }

    fn has_text(&self, texts: &[&str]) -> bool {
        let Some(wanted) = &self.filter.search else { return true };
        let wanted = wanted.to_lowercase();
        texts.iter().any(|text| text.to_lowercase().contains(&wanted))
    }

    /// Whether a job has the searched text.
    fn matches(&self, job: &EndedJob) -> bool {
        let mut texts: Vec<&str> = job.custom_id.as_deref().into_iter().collect();
        match &job.outcome {
            Some(Outcome::Completed(answer)) => {
                texts.extend(answer.choices.iter().map(|choice| choice.text.as_str()));
            }
            Some(Outcome::Error(error)) => texts.extend([&*error.message, &*error.code]),
            Some(Outcome::Expired) | None => {}
        }
        self.has_text(&texts)
    }
}

/// Returns the line of a result that was deleted before the batch was.
fn deleted(id: JobId) -> String {
    let message = "the result was deleted: the files of the batch have it";
    answer::unanswered_line(id.as_bytes(), "", "result_deleted", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cursor_has_one_form() {
        let batch = BatchId::generate();
        for order in [EndOrder::Completion, EndOrder::Lines] {
            let cursor = Cursor { batch, order, position: 17 };
            assert_eq!(cursor.to_string().parse::<Cursor>().ok(), Some(cursor));
        }
        let batch = batch.to_string();
        for wrong in ["", "-", "17", "c17", "batch_0-c1", &batch, &format!("{batch}-17")] {
            assert!(wrong.parse::<Cursor>().is_err(), "{wrong}");
        }
        for wrong in ["c", "c-1", "c+1", "x1", "c1.5", "c99999999999999999999"] {
            assert!(format!("{batch}-{wrong}").parse::<Cursor>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn cursor_is_the_last_field_of_a_line() {
        let batch = BatchId::generate();
        let cursor = Cursor { batch, order: EndOrder::Completion, position: 2 };
        for text in [r#"{"id":"a","error":{"code":"x"}}"#, r#"{"id":"}}"}"#] {
            let line = ResultLine { cursor, text: text.to_owned() }.with_cursor();
            let mut read: serde_json::Value = serde_json::from_str(&line).expect("JSON");
            let found = read.as_object_mut().and_then(|fields| fields.remove("cursor"));
            assert_eq!(found, Some(serde_json::json!(cursor.to_string())));
            assert_eq!(read.to_string(), text);
        }
    }
}
