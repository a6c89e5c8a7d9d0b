//! Reads `tokenizer.model`, the protobuf file of SentencePiece (`sentencepiece_model.proto`).
//!
//! Only fields that change tokens are read; settings that would need another computation are errors that name
//! the field. Fields that are absent have the defaults of the schema.

use super::{
    pieces::{Algorithm, Piece, PieceKind},
    protobuf::{Defect, Field, FieldValue, Fields},
};
use crate::files::error::{ModelError, Problem};

/// Name of the file in a folder.
pub(crate) const FILE: &str = "tokenizer.model";
/// Most pieces accepted.
const PIECES_MAX: usize = 1 << 21;

/// The contents of the file.
#[derive(Debug)]
pub(crate) struct SentencePieceModel<'a> {
    pub pieces: Vec<Piece<'a>>,
    pub algorithm: Algorithm,
    pub charsmap: &'a [u8],
    pub add_dummy_prefix: bool,
    pub remove_extra_whitespaces: bool,
    /// Id of the piece for the begin of a text; negative for none.
    pub bos_id: i64,
    /// Id of the piece for its end.
    pub eos_id: i64,
}

fn malformed((offset, problem): Defect) -> ModelError {
    ModelError::malformed(FILE, offset, problem)
}

fn unsupported<T>(key: &str, value: impl ToString, why: &'static str) -> Result<T, ModelError> {
    let key = format!("{FILE}: {key}");
    Err(ModelError::UnsupportedKey { key, value: value.to_string(), why })
}

/// Parses the file.
///
/// # Errors
/// Names the byte at fault, or the setting that is not supported.
pub(crate) fn parse(bytes: &[u8]) -> Result<SentencePieceModel<'_>, ModelError> {
    let mut model = SentencePieceModel {
        pieces: Vec::new(),
        algorithm: Algorithm::Unigram,
        charsmap: &[],
        add_dummy_prefix: true,
        remove_extra_whitespaces: true,
        bos_id: 1,
        eos_id: 2,
    };
    for field in Fields::new(bytes, 0) {
        let field = field.map_err(malformed)?;
        match field.number {
            1 if model.pieces.len() == PIECES_MAX => {
                let (value, limit) = (PIECES_MAX as u64 + 1, PIECES_MAX as u64);
                let problem = Problem::TooLarge { what: "number of pieces", value, limit };
                return Err(malformed((field.offset, problem)));
            }
            1 => model.pieces.push(piece(message(field).map_err(malformed)?).map_err(malformed)?),
            2 => model.read_trainer(message(field).map_err(malformed)?)?,
            3 => model.read_normalizer(message(field).map_err(malformed)?)?,
            5 => check_denormalizer(message(field).map_err(malformed)?)?,
            _ => {}
        }
    }
    if model.pieces.is_empty() {
        return Err(malformed((bytes.len() as u64, Problem::Other("the file has no pieces"))));
    }
    Ok(model)
}

fn wrong_type<T>(field: Field<'_>) -> Result<T, Defect> {
    Err((field.offset, Problem::Other("a field has the wrong wire type")))
}

fn message(field: Field<'_>) -> Result<Fields<'_>, Defect> {
    match field.value {
        FieldValue::Bytes { bytes, offset } => Ok(Fields::new(bytes, offset)),
        _ => wrong_type(field),
    }
}

fn number(field: Field<'_>) -> Result<i64, Defect> {
    match field.value {
        FieldValue::Varint(value) => Ok(value as i64),
        _ => wrong_type(field),
    }
}

fn bytes(field: Field<'_>) -> Result<&[u8], Defect> {
    match field.value {
        FieldValue::Bytes { bytes, .. } => Ok(bytes),
        _ => wrong_type(field),
    }
}

fn piece(fields: Fields<'_>) -> Result<Piece<'_>, Defect> {
    let mut piece = Piece { text: "", score: 0.0, kind: PieceKind::Normal };
    for field in fields {
        let field = field?;
        match (field.number, field.value) {
            (1, FieldValue::Bytes { bytes, offset }) => {
                piece.text = std::str::from_utf8(bytes)
                    .map_err(|error| (offset + error.valid_up_to() as u64, Problem::NotUtf8))?;
            }
            (2, FieldValue::Fixed32(bits)) => piece.score = f32::from_bits(bits),
            (3, FieldValue::Varint(value)) => {
                let Some(kind) = PieceKind::from_number(value as i64) else {
                    return Err((field.offset, Problem::Other("a piece has an unknown type")));
                };
                piece.kind = kind;
            }
            (1..=3, _) => return wrong_type(field),
            _ => {}
        }
    }
    Ok(piece)
}

impl<'a> SentencePieceModel<'a> {
    fn read_trainer(&mut self, fields: Fields<'a>) -> Result<(), ModelError> {
        for field in fields {
            let field = field.map_err(malformed)?;
            match field.number {
                3 => {
                    self.algorithm = match number(field).map_err(malformed)? {
                        1 => Algorithm::Unigram,
                        2 => Algorithm::Bpe,
                        other => {
                            let why = "only 1 (Unigram) and 2 (BPE) are supported";
                            return unsupported("trainer_spec.model_type", other, why);
                        }
                    };
                }
                24 if number(field).map_err(malformed)? != 0 => {
                    let key = "trainer_spec.treat_whitespace_as_suffix";
                    return unsupported(key, true, "spaces after words");
                }
                41 => self.bos_id = number(field).map_err(malformed)?,
                42 => self.eos_id = number(field).map_err(malformed)?,
                _ => {}
            }
        }
        Ok(())
    }

    fn read_normalizer(&mut self, fields: Fields<'a>) -> Result<(), ModelError> {
        for field in fields {
            let field = field.map_err(malformed)?;
            match field.number {
                2 => self.charsmap = bytes(field).map_err(malformed)?,
                3 => self.add_dummy_prefix = number(field).map_err(malformed)? != 0,
                4 => self.remove_extra_whitespaces = number(field).map_err(malformed)? != 0,
                5 if number(field).map_err(malformed)? == 0 => {
                    let key = "normalizer_spec.escape_whitespaces";
                    return unsupported(key, false, "pieces with plain spaces");
                }
                _ => {}
            }
        }
        Ok(())
    }
}

fn check_denormalizer(fields: Fields<'_>) -> Result<(), ModelError> {
    for field in fields {
        let field = field.map_err(malformed)?;
        if field.number == 2 && !bytes(field).map_err(malformed)?.is_empty() {
            let key = "denormalizer_spec.precompiled_charsmap";
            return unsupported(key, "present", "changes of the decoded text");
        }
    }
    Ok(())
}
