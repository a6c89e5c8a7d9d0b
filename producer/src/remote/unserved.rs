//! Lines with a model that the server does not have: each gets an error, and the others are answered.

use std::{
    fs::File,
    io::{self, BufReader, BufWriter, Write as _},
};

use super::state::Folder;
use crate::{
    answer,
    lines::LineReader,
    request::{parse_request, unserved_model},
};

/// Writes the errors of the lines of a part, as the server writes errors.
pub(super) fn refuse(folder: &Folder, index: usize) -> io::Result<()> {
    let mut lines = LineReader::new(BufReader::new(File::open(folder.part(index))?));
    let mut errors = BufWriter::new(File::create(folder.downloaded(index, "errors"))?);
    while let Some(line) = lines.next_line()? {
        let refused = match parse_request(&line) {
            Ok(request) => unserved_model(&request),
            Err(refused) => *refused,
        };
        let text =
            answer::refusal_line(&refused.key, refused.custom_id.as_deref(), &refused.refusal);
        writeln!(errors, "{text}")?;
    }
    errors.flush()
}
