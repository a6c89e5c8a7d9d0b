//! `tokenizer_config.json` and `special_tokens_map.json`: special and added tokens, and chat templates.

use std::collections::BTreeMap;

use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value};

use super::TokenizerError;
use crate::{
    chat::SpecialTokens,
    files::{shorten, without_literals},
};

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

const CONFIG: &str = "tokenizer_config.json";
const MAP: &str = "special_tokens_map.json";
/// Names that transformers has for special tokens. Others that end in `_token` may be something else.
const TOKEN_NAMES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
/// Names of lists of special tokens.
const LIST_NAMES: [&str; 2] = ["additional_special_tokens", "extra_special_tokens"];

/// Returns the text of a token, which may be described.
fn token_text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Object(described) => described.get("content")?.as_str().map(str::to_owned),
        _ => None,
    }
}

fn bad_key(file: &'static str, key: &str, value: &Value, expected: &'static str) -> TokenizerError {
    TokenizerError::BadKey { file, key: shorten(key), value: shorten(value), expected }
}

/// Returns the template named `default`, or the only one.
fn chat_template(value: &Value) -> Result<Option<String>, TokenizerError> {
    let bad = || bad_key(CONFIG, "chat_template", value, "a text, or a list of named templates");
    let list = match value {
        Value::Null => return Ok(None),
        Value::String(template) => return Ok(Some(template.clone())),
        Value::Array(list) => list,
        _ => return Err(bad()),
    };
    let mut chosen = None;
    for named in list {
        let (name, template) = (named["name"].as_str(), named["template"].as_str());
        let (Some(name), Some(template)) = (name, template) else { return Err(bad()) };
        if chosen.is_none() && (list.len() == 1 || name == "default") {
            chosen = Some(template.to_owned());
        }
    }
    Ok(chosen)
}

/// Returns the first text in a value that `is_wanted`.
fn find_text<'a>(value: &'a Value, is_wanted: &dyn Fn(&str) -> bool) -> Option<&'a str> {
    match value {
        Value::String(text) => is_wanted(text).then_some(text.as_str()),
        Value::Array(list) => list.iter().find_map(|inner| find_text(inner, is_wanted)),
        Value::Object(map) => map.values().find_map(|inner| find_text(inner, is_wanted)),
        _ => None,
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
            #[serde(flatten)]
            others: Map<String, Value>,
        }
        let raw: Raw = parse(CONFIG, config)?;
        let template = raw.others.get("chat_template").map(chat_template).transpose()?;
        let mut parsed = Self { chat_template: template.flatten(), ..Self::default() };
        if raw.others.get("split_special_tokens") == Some(&Value::Bool(true)) {
            return Err(TokenizerError::Unsupported {
                key: "split_special_tokens (of tokenizer_config.json)".to_owned(),
                value: "true".to_owned(),
                why: "names of special tokens in a text always become these tokens",
            });
        }
        parsed.name_tokens(CONFIG, &raw.others)?;
        match raw.added_tokens_decoder {
            Some(added) => parsed.added_tokens = added,
            None => parsed.name_tokens(MAP, &parse(MAP, map)?)?,
        }
        Ok(parsed)
    }

    /// Takes the special tokens of a file: `bos_token` and other names that end so, and lists of more.
    fn name_tokens(
        &mut self,
        file: &'static str,
        values: &Map<String, Value>,
    ) -> Result<(), TokenizerError> {
        const TOKEN: &str = "a text, or an object with a text as content";
        for (name, value) in values {
            let is_list = LIST_NAMES.contains(&name.as_str());
            match value {
                Value::Null => {}
                // Other values of such names are no tokens: `add_bos_token` is a truth value.
                Value::String(_) | Value::Object(_) if name.ends_with("_token") => {
                    let text =
                        token_text(value).ok_or_else(|| bad_key(file, name, value, TOKEN))?;
                    self.special_tokens.insert(name.clone(), text);
                }
                _ if TOKEN_NAMES.contains(&name.as_str()) => {
                    return Err(bad_key(file, name, value, TOKEN));
                }
                Value::Array(list) if is_list => {
                    let texts: Option<Vec<String>> = list.iter().map(token_text).collect();
                    self.extra_special_tokens =
                        texts.ok_or_else(|| bad_key(file, name, value, "a list of tokens"))?;
                }
                Value::Object(named) if is_list => self.name_tokens(file, named)?,
                _ if is_list => return Err(bad_key(file, name, value, "a list of tokens")),
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns the error of the first special token in the files that `is_unknown`.
    pub(crate) fn unknown_token(
        config: Option<&[u8]>,
        map: Option<&[u8]>,
        is_unknown: &dyn Fn(&str) -> bool,
    ) -> Option<TokenizerError> {
        for (file, bytes) in [(CONFIG, config), (MAP, map)] {
            let values: Map<String, Value> = parse(file, bytes).ok()?;
            let is_of_tokens = |name: &str| name.ends_with("_token") || LIST_NAMES.contains(&name);
            for (name, value) in values.iter().filter(|(name, _)| is_of_tokens(name)) {
                if let Some(token) = find_text(value, is_unknown) {
                    let (key, token) = (shorten(name), shorten(token));
                    return Some(TokenizerError::UnknownToken { file, key, token });
                }
            }
        }
        None
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
