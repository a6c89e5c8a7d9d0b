//! [`Format`]: how rows are written in a file, told by its name.

use std::{fmt, str::FromStr};

use crate::Encoding;

/// How rows are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// A JSON object per line.
    Lines,
    /// Values between commas, the names of the columns first.
    Csv,
    /// Values between tabs, the names of the columns first.
    Tsv,
    /// Apache Parquet.
    Parquet,
}

impl Format {
    const NAMES: [(&'static str, Self); 6] = [
        ("jsonl", Self::Lines),
        ("ndjson", Self::Lines),
        ("json", Self::Lines),
        ("csv", Self::Csv),
        ("tsv", Self::Tsv),
        ("parquet", Self::Parquet),
    ];

    /// Returns whether a name asks for a format or a compression that cannot be written.
    pub(crate) fn is_unsupported(name: &str) -> bool {
        const ENDS: [&str; 11] =
            ["7z", "arrow", "avro", "bz2", "feather", "lz4", "orc", "xls", "xlsx", "xz", "zip"];
        let end = name.rsplit_once('.').map(|(_, end)| end.to_ascii_lowercase());
        end.is_some_and(|end| ENDS.contains(&end.as_str()))
    }

    /// Tells the format from a file's name, without regard to how it is compressed.
    pub fn of_name(name: &str) -> Option<Self> {
        let name = name.to_ascii_lowercase();
        let (plain, _) = Encoding::of_name(&name);
        plain.rsplit_once('.').and_then(|(_, end)| end.parse().ok())
    }
}

/// The name of a format is not known.
#[derive(Debug, thiserror::Error)]
#[error("must be jsonl, csv, tsv or parquet")]
pub struct UnknownFormat;

impl FromStr for Format {
    type Err = UnknownFormat;

    fn from_str(name: &str) -> Result<Self, UnknownFormat> {
        let found = Self::NAMES.iter().find(|(known, _)| *known == name);
        found.map(|(_, format)| *format).ok_or(UnknownFormat)
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let found = Self::NAMES.iter().find(|(_, format)| format == self);
        f.write_str(found.map_or("", |(name, _)| name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn format_is_told_by_the_name() {
        let of = Format::of_name;
        assert_eq!(of("train-0.parquet"), Some(Format::Parquet));
        assert_eq!(of("A.CSV.gz"), Some(Format::Csv));
        assert_eq!(of("a.tsv.zst"), Some(Format::Tsv));
        assert_eq!(of("a.jsonl"), Some(Format::Lines));
        assert_eq!((of("a"), of("a.gz"), of("README.md")), (None, None, None));
        assert_eq!(Format::Tsv.to_string(), "tsv");
        let refused = ["a.jsonl.bz2", "B.XLSX"].map(Format::is_unsupported);
        assert_eq!((refused, Format::is_unsupported("a.out")), ([true, true], false));
    }
}
