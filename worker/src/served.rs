//! The model that a worker serves: its name, and how prompts become tokens.

use std::sync::{Arc, OnceLock};

use tritmill_engine::{
    Constraint, GrammarError,
    chat::{self, ChatTemplate},
    files::Model,
    load,
};
use tritmill_grammar::Compiler;
use tritmill_queue::{Content, ErrorKind, Grammar, JobError, Message, Prompt, Role};

/// A model under the name that jobs use for it.
#[derive(Debug, Clone)]
pub struct ServedModel {
    model: Arc<Model>,
    name: String,
    numerics_class: String,
    /// Grammars for the model's tokens; made by the first job with one.
    grammars: Arc<OnceLock<Result<Compiler, GrammarError>>>,
}

impl ServedModel {
    /// Serves `model` under `name` on a backend with this numerics class.
    pub fn new(model: Arc<Model>, name: String, numerics_class: String) -> Self {
        Self { model, name, numerics_class, grammars: Arc::default() }
    }

    /// Returns the name that jobs use.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the numerics class: what a token depends on besides the job.
    pub fn numerics_class(&self) -> &str {
        &self.numerics_class
    }

    /// Returns the start of an answer that a grammar describes.
    ///
    /// # Errors
    /// If the grammar cannot be used with the model's tokens; the message is for the author of the request.
    pub fn constraint(&self, grammar: &Grammar) -> Result<Constraint, JobError> {
        let compiler = self.grammars.get_or_init(|| load::grammars(&self.model));
        let compiled = compiler.as_ref().map_err(Clone::clone).and_then(|c| c.compile(grammar));
        compiled.map_err(|error| {
            let problem = format!("the {} cannot be used: {error}", grammar.kind());
            refused("unsupported_value", "response_format", problem)
        })
    }

    /// Returns the tokens of one prompt.
    ///
    /// # Errors
    /// If the model cannot take the prompt; the message is for the author of the request.
    pub fn tokens(&self, prompt: &Prompt) -> Result<Vec<u32>, JobError> {
        match (prompt, self.model.chat_template()) {
            (Prompt::Several(_), _) => {
                Err(refused("unsupported_value", "prompt", "has lists in lists".to_owned()))
            }
            (Prompt::Tokens(tokens), _) => Ok(tokens.clone()),
            (Prompt::Text(text), _) | (Prompt::Question(text), None) => self.encode(text, true),
            (Prompt::Question(text), Some(template)) => {
                let question = Message::new(Role::User, text.clone());
                self.conversation(template, &[question], "prompt")
            }
            (Prompt::Messages(messages), Some(template)) => {
                self.conversation(template, messages, "messages")
            }
            (Prompt::Messages(_), None) => Err(refused(
                "no_chat_template",
                "messages",
                format!("model '{}' has no chat template; use /v1/completions", self.name),
            )),
        }
    }

    fn conversation(
        &self,
        template: &ChatTemplate,
        messages: &[Message],
        field: &'static str,
    ) -> Result<Vec<u32>, JobError> {
        let text = template.render(&template_messages(messages), true).map_err(|error| {
            let problem = format!("refused by the model's chat template: {}", chain(&error));
            refused("chat_template", field, problem)
        })?;
        // The template wrote the special tokens itself.
        self.encode(&text, false)
    }

    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, JobError> {
        self.model.tokenizer().encode(text, add_special).map_err(|error| {
            refused("tokenizer", "prompt", format!("cannot be tokenized: {}", chain(&error)))
        })
    }
}

/// Returns messages as chat templates get them.
pub fn template_messages(messages: &[Message]) -> Vec<chat::Message> {
    let template_message = |message: &Message| chat::Message {
        role: message.role.as_str().to_owned(),
        content: match &message.content {
            Content::Text(text) => chat::Content::Text(text.clone()),
            Content::Parts(texts) => chat::Content::Parts(texts.clone()),
        },
        name: message.name.clone(),
        tool_call_id: message.tool_call_id.clone(),
    };
    messages.iter().map(template_message).collect()
}

/// Returns the error for a request that this model can never answer.
pub(crate) fn refused(code: &str, param: &str, message: String) -> JobError {
    JobError {
        kind: ErrorKind::InvalidRequest,
        code: code.to_owned(),
        message,
        param: Some(param.to_owned()),
    }
}

/// Returns an error and its causes on one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let message = error.to_string();
        if !text.ends_with(&message) {
            text = format!("{text}: {message}");
        }
        cause = error.source();
    }
    text
}
