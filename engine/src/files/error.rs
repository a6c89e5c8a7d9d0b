//! Errors of model files. Every variant names the file, tensor or key at fault, and the byte offset
//! if there is one.

use std::{fmt, io, ops::Range, path::PathBuf};

use super::needs;
use crate::tokenizer::TokenizerError;

/// A model cannot be opened, read, converted or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A file operation failed.
    #[error("{}: {source}", path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The file to write is not called a GGUF file.
    #[error("{}: the name of a GGUF file ends in .gguf", path.display())]
    NotNamedGguf {
        /// The given path.
        path: PathBuf,
    },
    /// The path is neither a model folder nor a `.gguf` or `.safetensors` file.
    #[error("{} is neither a model folder nor a .gguf or .safetensors file", path.display())]
    NotAModel {
        /// The given path.
        path: PathBuf,
    },
    /// A required file of the folder is missing.
    #[error("{file} is missing: {why}")]
    MissingFile {
        /// Name inside the folder.
        file: String,
        /// The purpose of the file, or why it is missing.
        why: &'static str,
    },
    /// The bytes of a file do not follow its format.
    #[error("{file} at byte {offset}: {problem}")]
    Malformed {
        /// Name of the file.
        file: String,
        /// Offset in the file, in bytes.
        offset: u64,
        /// The defect at that offset.
        problem: Problem,
    },
    /// A JSON file does not parse.
    #[error("{file} is not valid JSON: {source}")]
    Json {
        /// Name of the file.
        file: String,
        /// Line, column and cause.
        #[source]
        source: serde_json::Error,
    },
    /// A required configuration or metadata key is missing.
    #[error("key {key} is missing")]
    MissingKey {
        /// Dotted name.
        key: String,
    },
    /// The value of a key has the wrong type or is out of range.
    #[error("key {key} is {value}, expected {expected}")]
    BadKey {
        /// Dotted name.
        key: String,
        /// The value in the file, shortened.
        value: String,
        /// A description of valid values.
        expected: &'static str,
    },
    /// A key requires a computation that the engine does not support.
    #[error("key {key} = {value} is not supported: {why}")]
    UnsupportedKey {
        /// Dotted name.
        key: String,
        /// The value in the file, shortened.
        value: String,
        /// The unsupported feature.
        why: &'static str,
    },
    /// A tensor that the configuration requires is missing.
    #[error("tensor {tensor} is missing")]
    MissingTensor {
        /// Name in the file.
        tensor: String,
    },
    /// A file of the folder changes how the others are to be read, in a way that the engine does not support.
    #[error("{file} is not supported: {why}")]
    UnsupportedFile {
        /// Name inside the folder.
        file: String,
        /// The unsupported feature.
        why: &'static str,
    },
    /// A tensor has no role in the forward pass, so the model would compute something else without it.
    #[error("tensor {tensor} {}is not part of a supported model: it would need {needs}", and_others(*others))]
    UnexpectedTensor {
        /// Name in the file, the first in alphabetical order.
        tensor: String,
        /// Further tensors without a role.
        others: usize,
        /// The unsupported feature, as its name tells.
        needs: &'static str,
    },
    /// The type of a tensor is not supported for its role.
    #[error("tensor {tensor} has type {found}, expected {expected}")]
    TensorType {
        /// Name in the file.
        tensor: String,
        /// Type name in the file.
        found: String,
        /// Names of the supported types.
        expected: &'static str,
    },
    /// The shape of a tensor disagrees with the configuration.
    #[error("tensor {tensor} has shape {found:?}, expected {expected:?}")]
    TensorShape {
        /// Name in the file.
        tensor: String,
        /// Shape in the file.
        found: Vec<u64>,
        /// Shape that follows from the configuration.
        expected: Vec<u64>,
    },
    /// The bytes of a tensor are invalid.
    #[error("tensor {tensor} at byte {offset}: {problem}")]
    BadTensor {
        /// Name in the file.
        tensor: String,
        /// Offset in the file, in bytes.
        offset: u64,
        /// The defect at that offset.
        problem: Problem,
    },
    /// The tensors of a model in one file are invalid.
    #[error("{}: {source}", path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// The error, with the tensor and the offset.
        #[source]
        source: Box<ModelError>,
    },
    /// A folder to write to has a file that the written model does not have.
    #[error("{} has {file}, which is not of the model to write: use an empty folder", folder.display())]
    OtherFile {
        /// The folder.
        folder: PathBuf,
        /// Name of the file.
        file: String,
    },
    /// The tokenizer is invalid or not supported.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The target format of a conversion cannot hold a tensor.
    #[error("tensor {tensor} cannot become {target}: {problem}")]
    Unconvertible {
        /// Name in the source model.
        tensor: String,
        /// The target format.
        target: &'static str,
        /// The reason.
        problem: Problem,
    },
}

/// A defect in a file.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Problem {
    /// The file is shorter than it says.
    Truncated {
        /// Bytes that should follow the offset.
        needed: u64,
        /// Bytes that follow it.
        available: u64,
    },
    /// A count, length or size exceeds the file or a limit of the reader.
    TooLarge {
        /// Name of the count, length or size.
        what: &'static str,
        /// The number in the file.
        value: u64,
        /// The largest accepted number.
        limit: u64,
    },
    /// A tensor size disagrees with its type and shape.
    SizeMismatch {
        /// Size in the file, in bytes.
        found: u64,
        /// Size by type and shape, in bytes.
        expected: u64,
    },
    /// The file does not start with the magic bytes of its format.
    BadMagic,
    /// The format version is not supported.
    Version(u32),
    /// A type id is unknown.
    UnknownType(u32),
    /// A name occurs twice.
    Duplicate(String),
    /// A text is not UTF-8.
    NotUtf8,
    /// An offset is not a multiple of the file's alignment.
    Misaligned {
        /// The offset.
        value: u64,
        /// The alignment.
        alignment: u64,
    },
    /// A code does not stand for a trit.
    BadCode {
        /// The code.
        code: u8,
    },
    /// A byte does not stand for base-3 digits.
    BadDigits {
        /// The byte.
        byte: u8,
    },
    /// A scale is zero, negative, infinite or not a number.
    BadScale(f32),
    /// The scale of a group is negative, infinite or not a number.
    BadGroupScale(f32),
    /// The rate of a decay is positive: the state would grow.
    Growth(f32),
    /// A weight is not −s, 0 or s, where s is the largest magnitude of its group of inputs.
    NotTernary {
        /// The weight.
        weight: f32,
        /// The largest magnitude of the group.
        scale: f32,
        /// Inputs of the group.
        group: usize,
    },
    /// The bytes of a tensor fit two layouts that share a type id.
    AmbiguousLayout {
        /// Bytes up to the next tensor or the end of the file.
        available: u64,
    },
    /// Blocks of one tensor have different scales.
    MixedScales(f32, f32),
    /// A dimension is not a multiple of the format's block.
    NotAMultiple {
        /// The dimension.
        what: &'static str,
        /// Size of the dimension.
        value: u64,
        /// The block size.
        of: u64,
    },
    /// A value is infinite or not a number.
    NotFinite,
    /// Any other defect, in words.
    Other(&'static str),
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Truncated { needed, available } => {
                write!(f, "needs {needed} bytes, but the file has {available}")
            }
            Self::TooLarge { what, value, limit } => {
                write!(f, "{what} {value} exceeds the limit of {limit}")
            }
            Self::SizeMismatch { found, expected } => {
                write!(f, "has {found} bytes, but type and shape need {expected}")
            }
            Self::BadMagic => f.write_str("wrong magic bytes"),
            Self::Version(version) => write!(f, "version {version} is not supported"),
            Self::UnknownType(id) => write!(f, "unknown type id {id}"),
            Self::Duplicate(name) => write!(f, "{name} occurs twice"),
            Self::NotUtf8 => f.write_str("text is not UTF-8"),
            Self::Misaligned { value, alignment } => {
                write!(f, "offset {value} is not a multiple of the alignment {alignment}")
            }
            Self::BadCode { code } => write!(f, "code {code} is not a ternary value"),
            Self::BadDigits { byte } => write!(f, "byte {byte} does not hold ternary digits"),
            Self::BadScale(scale) => write!(f, "scale {scale} is not a positive number"),
            Self::BadGroupScale(scale) => {
                write!(f, "scale {scale} of a group is not a finite number of at least 0")
            }
            Self::Growth(rate) => write!(f, "rate {rate} of a decay is above 0"),
            Self::NotTernary { weight, scale, group } => write!(
                f,
                "weight {weight} is neither 0 nor ±{scale}, the largest of its group of {group}: the model is not ternary"
            ),
            Self::AmbiguousLayout { available } => write!(
                f,
                "its {available} bytes fit both layouts of type 42, groups of 64 and of 128: convert the file to type 142"
            ),
            Self::MixedScales(a, b) => {
                write!(
                    f,
                    "blocks have different scales ({a} and {b}), only one scale per tensor is supported"
                )
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

    /// Returns the error of tensors that no code reads, if there are some.
    pub(crate) fn refuse_left_over<'a>(
        names: impl Iterator<Item = &'a str> + Clone,
    ) -> Result<(), Self> {
        let Some(first) = names.clone().min() else { return Ok(()) };
        let others = names.count() - 1;
        let (tensor, needs) = (shorten(first), needs::of(first));
        Err(Self::UnexpectedTensor { tensor, others, needs })
    }
}

/// Returns how many tensors there are beside the named one, for a message.
fn and_others(others: usize) -> String {
    match others {
        0 => String::new(),
        others => format!("(and {others} more) "),
    }
}

/// Shortens a value for an error message, so that a hostile file cannot fill the log.
pub(crate) fn shorten(value: impl fmt::Display) -> String {
    const LIMIT: usize = 80;
    let text = value.to_string();
    match text.char_indices().nth(LIMIT) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// Rejects tensors that share bytes; gaps between them are allowed.
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
