//! Tokenizers in model files: the text of a `tokenizer.json`, and SentencePiece's vocabularies, which become one.

pub(crate) mod json;
pub(crate) mod pieces;
mod protobuf;
pub(crate) mod sentencepiece;
pub(crate) mod sentencepiece_folder;
