//! What can be wrong with a model file. Every variant names the file, tensor or key at fault, and
//! where there is one, the byte offset.

use std::{fmt, io, ops::Range, path::PathBuf};

use crate::{chat::TemplateError, tokenizer::TokenizerError};

/// A model that cannot be opened, read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The operating system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// What it said.
        #[source]
        source: io::Error,
    },
    /// The path is neither a model folder nor a `.gguf` or `.safetensors` file.
    #[error("{} is neither a model folder nor a .gguf or .safetensors file", path.display())]
    NotAModel {
        /// What was asked for.
        path: PathBuf,
    },
    /// A file that the folder must have.
    #[error("{file} is missing: {why}")]
    MissingFile {
        /// Name inside the folder.
        file: String,
        /// What it is needed for.
        why: &'static str,
    },
    /// A file whose bytes do not follow its format.
    #[error("{file} at byte {offset}: {problem}")]
    Malformed {
        /// Name of the file.
        file: String,
        /// Where in the file.
        offset: u64,
        /// What is wrong there.
        problem: Problem,
    },
    /// A JSON file that does not parse.
    #[error("{file} is not valid JSON: {source}")]
    Json {
        /// Name of the file.
        file: String,
        /// Line, column and cause.
        #[source]
        source: serde_json::Error,
    },
    /// A configuration or metadata key that must be there.
    #[error("key {key} is missing")]
    MissingKey {
        /// Dotted name.
        key: String,
    },
    /// A key whose value has the wrong type or lies outside its range.
    #[error("key {key} is {value}, expected {expected}")]
    BadKey {
        /// Dotted name.
        key: String,
        /// What the file says, shortened.
        value: String,
        /// What would be right.
        expected: &'static str,
    },
    /// A key that asks for mathematics this engine does not do.
    #[error("key {key} = {value} is not supported: {why}")]
    UnsupportedKey {
        /// Dotted name.
        key: String,
        /// What the file says, shortened.
        value: String,
        /// What it would change.
        why: &'static str,
    },
    /// A tensor that the configuration requires.
    #[error("tensor {tensor} is missing")]
    MissingTensor {
        /// Name in the file.
        tensor: String,
    },
    /// A tensor that the forward pass would have to use but does not know.
    #[error("tensor {tensor} is not part of a supported model")]
    UnexpectedTensor {
        /// Name in the file.
        tensor: String,
    },
    /// A tensor in a type that cannot be read here.
    #[error("tensor {tensor} has type {found}, expected {expected}")]
    TensorType {
        /// Name in the file.
        tensor: String,
        /// Type as the file names it.
        found: String,
        /// What would be right.
        expected: &'static str,
    },
    /// A tensor whose shape disagrees with the configuration.
    #[error("tensor {tensor} has shape {found:?}, expected {expected:?}")]
    TensorShape {
        /// Name in the file.
        tensor: String,
        /// Shape in the file.
        found: Vec<u64>,
        /// Shape by the configuration.
        expected: Vec<u64>,
    },
    /// A tensor whose bytes cannot be right.
    #[error("tensor {tensor} at byte {offset}: {problem}")]
    BadTensor {
        /// Name in the file.
        tensor: String,
        /// Where in the file.
        offset: u64,
        /// What is wrong there.
        problem: Problem,
    },
    /// The tokenizer cannot be used.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The chat template cannot be used.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// A conversion that the target format cannot hold.
    #[error("tensor {tensor} cannot become {target}: {problem}")]
    Unconvertible {
        /// Name in the source model.
        tensor: String,
        /// The target format.
        target: &'static str,
        /// Which rule it breaks.
        problem: Problem,
    },
}

/// A defect at a known place of a file.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Problem {
    /// The file ends before what it announces.
    Truncated {
        /// Bytes announced from the offset on.
        needed: u64,
        /// Bytes there are.
        available: u64,
    },
    /// A count, length or size beyond what the file or this reader can hold.
    TooLarge {
        /// What is counted.
        what: &'static str,
        /// The announced number.
        value: u64,
        /// The largest accepted one.
        limit: u64,
    },
    /// A size that disagrees with another one.
    SizeMismatch {
        /// Bytes announced.
        found: u64,
        /// Bytes that type and shape need.
        expected: u64,
    },
    /// The first bytes are not the format's.
    BadMagic,
    /// A version this reader does not know.
    Version(u32),
    /// An unknown type id.
    UnknownType(u32),
    /// A name that occurs twice.
    Duplicate(String),
    /// Text that is not UTF-8.
    NotUtf8,
    /// An offset that is not a multiple of the file's alignment.
    Misaligned {
        /// The offset.
        value: u64,
        /// The alignment.
        alignment: u64,
    },
    /// A ternary code that means nothing.
    BadCode {
        /// The code.
        code: u8,
    },
    /// A scale that is zero, negative, infinite or not a number.
    BadScale(f32),
    /// Blocks of one tensor with different scales.
    MixedScales(f32, f32),
    /// A dimension that is not a multiple of the format's block.
    NotAMultiple {
        /// What is counted.
        what: &'static str,
        /// The number.
        value: u64,
        /// The block.
        of: u64,
    },
    /// A value that is not a number or infinite where the model needs a number.
    NotFinite,
    /// Anything said best in words.
    Other(&'static str),
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Truncated { needed, available } => {
                write!(f, "needs {needed} bytes, the file has {available}")
            }
            Self::TooLarge { what, value, limit } => {
                write!(f, "{what} {value} is over the limit of {limit}")
            }
            Self::SizeMismatch { found, expected } => {
                write!(f, "has {found} bytes, type and shape need {expected}")
            }
            Self::BadMagic => f.write_str("the first bytes are not the format's"),
            Self::Version(version) => write!(f, "version {version} is not supported"),
            Self::UnknownType(id) => write!(f, "unknown type id {id}"),
            Self::Duplicate(name) => write!(f, "{name} occurs twice"),
            Self::NotUtf8 => f.write_str("text is not UTF-8"),
            Self::Misaligned { value, alignment } => {
                write!(f, "offset {value} is not a multiple of the alignment {alignment}")
            }
            Self::BadCode { code } => write!(f, "code {code} is not a ternary value"),
            Self::BadScale(scale) => write!(f, "scale {scale} is not a positive number"),
            Self::MixedScales(a, b) => {
                write!(f, "blocks have different scales ({a} and {b}), one per tensor is supported")
            }
            Self::NotAMultiple { what, value, of } => {
                write!(f, "{what} {value} is not a multiple of {of}")
            }
            Self::NotFinite => f.write_str("a value is infinite or not a number"),
            Self::Other(text) => f.write_str(text),
        }
    }
}

impl ModelError {
    pub(crate) fn io(path: &std::path::Path, source: io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }

    pub(crate) fn malformed(file: &str, offset: u64, problem: Problem) -> Self {
        Self::Malformed { file: file.to_owned(), offset, problem }
    }

    pub(crate) fn bad_tensor(tensor: &str, offset: u64, problem: Problem) -> Self {
        Self::BadTensor { tensor: tensor.to_owned(), offset, problem }
    }
}

/// A value for an error message, shortened so that a hostile file cannot fill the log.
pub(crate) fn shorten(value: impl fmt::Display) -> String {
    const LIMIT: usize = 80;
    let text = value.to_string();
    match text.char_indices().nth(LIMIT) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// Refuses tensors that share bytes; gaps between them are allowed.
pub(crate) fn check_overlaps(mut tensors: Vec<(Range<usize>, &str)>) -> Result<(), ModelError> {
    tensors.retain(|(range, _)| !range.is_empty());
    tensors.sort_by_key(|(range, _)| range.start);
    for pair in tensors.windows(2) {
        let ((first, _), (second, name)) = (&pair[0], &pair[1]);
        if second.start < first.end {
            let problem = Problem::Other("its bytes overlap another tensor's");
            return Err(ModelError::bad_tensor(name, second.start as u64, problem));
        }
    }
    Ok(())
}
