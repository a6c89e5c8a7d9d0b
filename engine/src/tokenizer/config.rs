//! `tokenizer_config.json` and `special_tokens_map.json`: special and added tokens, and chat templates.

use std::collections::BTreeMap;

use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value};

use super::TokenizerError;
use crate::{chat::SpecialTokens, files::without_literals};

/// The used parts of the files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenizerConfig {
    /// Texts of the special tokens by name: variables of chat templates.
    pub special_tokens: SpecialTokens,
    /// Special tokens without a name.
    pub extra_special_tokens: Vec<String>,
    /// Added tokens by id.
    pub added_tokens: BTreeMap<u32, AddedToken>,
    /// The template named `default`, or the only one.
    pub chat_template: Option<String>,
}

/// A token of `added_tokens_decoder`, or of `added_tokens` of a `tokenizer.json`, without its id.
///
/// Source: `AddedToken` of the `tokenizers` library.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct AddedToken {
    /// Its text.
    pub content: String,
    /// Whether it is found between other characters than letters only.
    #[serde(default)]
    pub single_word: bool,
    /// Whether it takes the white space before it.
    #[serde(default)]
    pub lstrip: bool,
    /// Whether it takes the white space behind it.
    #[serde(default)]
    pub rstrip: bool,
    /// Whether it is searched in the normalized text: if absent, as of tokens that are not special.
    #[serde(default)]
    pub normalized: Option<bool>,
    /// Whether it is a control token, which is not part of a text.
    #[serde(default)]
    pub special: bool,
}

impl AddedToken {
    /// Returns a special token that takes no white space.
    pub(crate) fn special(content: String) -> Self {
        Self {
            content,
            single_word: false,
            lstrip: false,
            rstrip: false,
            normalized: Some(false),
            special: true,
        }
    }

    /// Returns the entry of a `tokenizer.json`.
    pub(crate) fn to_json(&self, id: u32) -> Value {
        serde_json::json!({
            "id": id, "content": self.content, "single_word": self.single_word, "lstrip": self.lstrip,
            "rstrip": self.rstrip, "normalized": self.is_normalized(), "special": self.special,
        })
    }

    /// Returns whether it is searched in the normalized text.
    pub(crate) fn is_normalized(&self) -> bool {
        self.normalized.unwrap_or(!self.special)
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum TokenText {
    Plain(String),
    Described { content: String },
}

impl TokenText {
    fn into_text(self) -> String {
        match self {
            Self::Plain(text) | Self::Described { content: text } => text,
        }
    }
}

impl TokenizerConfig {
    /// Parses `tokenizer_config.json`, and `special_tokens_map.json` of older folders.
    ///
    /// As in transformers, the map is read if the configuration does not describe its added tokens, and then comes
    /// before the configuration.
    ///
    /// # Errors
    /// If a file does not have the expected form.
    pub fn parse(config: Option<&[u8]>, map: Option<&[u8]>) -> Result<Self, TokenizerError> {
        #[derive(Deserialize, Default)]
        struct Raw {
            #[serde(default)]
            added_tokens_decoder: Option<BTreeMap<u32, AddedToken>>,
            #[serde(default)]
            chat_template: Option<Templates>,
            #[serde(flatten)]
            others: Map<String, Value>,
        }
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Templates {
            One(String),
            Named(Vec<Named>),
        }
        #[derive(Deserialize)]
        struct Named {
            name: String,
            template: String,
        }
        const CONFIG: &str = "tokenizer_config.json";
        const MAP: &str = "special_tokens_map.json";
        let raw: Raw = parse(CONFIG, config)?;
        let chat_template = match raw.chat_template {
            None => None,
            Some(Templates::One(template)) => Some(template),
            Some(Templates::Named(list)) => {
                let only = list.len() == 1;
                let wanted = |named: &Named| only || named.name == "default";
                list.into_iter().find(wanted).map(|named| named.template)
            }
        };
        let mut parsed = Self { chat_template, ..Self::default() };
        if raw.others.get("split_special_tokens") == Some(&Value::Bool(true)) {
            return Err(TokenizerError::Unsupported {
                key: "split_special_tokens (of tokenizer_config.json)",
                value: "true".to_owned(),
                why: "names of special tokens in a text always become these tokens",
            });
        }
        parsed.name_tokens(CONFIG, raw.others)?;
        match raw.added_tokens_decoder {
            Some(added) => parsed.added_tokens = added,
            None => parsed.name_tokens(MAP, parse(MAP, map)?)?,
        }
        Ok(parsed)
    }

    /// Takes the special tokens of a file: `bos_token` and other names that end so, and lists of more.
    fn name_tokens(
        &mut self,
        file: &'static str,
        values: Map<String, Value>,
    ) -> Result<(), TokenizerError> {
        let json = |source| TokenizerError::Json { file, source };
        for (name, value) in values {
            // Other values of such names are no tokens: `add_bos_token` is a truth value.
            if name.ends_with("_token") && (value.is_string() || value.is_object()) {
                let text: TokenText = serde_json::from_value(value).map_err(json)?;
                self.special_tokens.insert(name, text.into_text());
            } else if matches!(&*name, "additional_special_tokens" | "extra_special_tokens") {
                match value {
                    Value::Array(_) => {
                        let texts: Vec<TokenText> = serde_json::from_value(value).map_err(json)?;
                        self.extra_special_tokens =
                            texts.into_iter().map(TokenText::into_text).collect();
                    }
                    Value::Object(named) => self.name_tokens(file, named)?,
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Returns the text of a special token.
    pub(crate) fn special_token(&self, name: &str) -> Option<&str> {
        self.special_tokens.get(name).map(String::as_str)
    }
}

fn parse<T: DeserializeOwned + Default>(
    file: &'static str,
    bytes: Option<&[u8]>,
) -> Result<T, TokenizerError> {
    let Some(bytes) = bytes else { return Ok(T::default()) };
    let bytes = without_literals(bytes);
    serde_json::from_slice(&bytes).map_err(|source| TokenizerError::Json { file, source })
}
