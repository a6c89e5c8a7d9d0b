//! `tokenizer_config.json`: special tokens and chat templates.

use serde::Deserialize;

use super::TokenizerError;

/// The used parts of `tokenizer_config.json`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenizerConfig {
    /// Text of the BOS token, for chat templates.
    pub bos_token: Option<String>,
    /// Text of the EOS token, for chat templates.
    pub eos_token: Option<String>,
    /// The template named `default`, or the only one.
    pub chat_template: Option<String>,
}

impl TokenizerConfig {
    /// Parses `tokenizer_config.json`.
    ///
    /// # Errors
    /// If the file does not have the expected form.
    pub fn parse(bytes: &[u8]) -> Result<Self, TokenizerError> {
        #[derive(Deserialize)]
        struct Raw {
            #[serde(default)]
            bos_token: Option<TokenText>,
            #[serde(default)]
            eos_token: Option<TokenText>,
            #[serde(default)]
            chat_template: Option<Templates>,
        }
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum TokenText {
            Plain(String),
            Described { content: String },
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
        let raw: Raw = serde_json::from_slice(bytes)
            .map_err(|source| TokenizerError::Json { file: "tokenizer_config.json", source })?;
        let text = |token| match token {
            TokenText::Plain(text) | TokenText::Described { content: text } => text,
        };
        let chat_template = match raw.chat_template {
            None => None,
            Some(Templates::One(template)) => Some(template),
            Some(Templates::Named(list)) => {
                let only = list.len() == 1;
                let wanted = |named: &Named| only || named.name == "default";
                list.into_iter().find(wanted).map(|named| named.template)
            }
        };
        Ok(Self {
            bos_token: raw.bos_token.map(text),
            eos_token: raw.eos_token.map(text),
            chat_template,
        })
    }
}
