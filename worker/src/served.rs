//! The model that a worker serves: its name, and how prompts become tokens.

use std::{
    fmt,
    sync::{Arc, OnceLock},
};

use tritmill_engine::{
    Constraint, GrammarError,
    chat::{self, AnswerLayout, ChatTemplate},
    embed,
    files::Model,
    load,
};
use tritmill_grammar::Compiler;
use tritmill_queue::{
    Choice, Completion, Conversation, ErrorKind, FinishReason, Grammar, JobError, LengthLimit,
    Message, Outcome, Prompt, Role, Sampling, Tokenized, Usage,
};

use crate::conversation::{self, TemplateInput};

/// What the engine gets for a prompt.
#[derive(Debug, Clone)]
pub(crate) struct PreparedPrompt {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// What an answer must match.
    pub constraint: Option<Constraint>,
    /// How an answer is divided.
    pub layout: AnswerLayout,
}

/// What an operator sets for the prompts and answers of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ServedLimits {
    /// Whether names of control tokens in the texts of conversations become these tokens; they are text otherwise.
    pub allow_control_tokens: bool,
    /// Most tokens of an answer to a request without `max_tokens`; `None`: up to the end of the context.
    pub answer_tokens_max: Option<u32>,
}

impl fmt::Display for ServedLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { allow_control_tokens, answer_tokens_max } = self;
        match answer_tokens_max {
            Some(most) => write!(f, "--answer-tokens-max {most}")?,
            None => write!(f, "no --answer-tokens-max")?,
        }
        write!(f, " and {}--control-tokens", if *allow_control_tokens { "" } else { "no " })
    }
}

/// A model under the name that jobs use for it.
#[derive(Debug, Clone)]
pub struct ServedModel {
    model: Arc<Model>,
    name: String,
    numerics_class: String,
    limits: ServedLimits,
    /// Grammars for the model's tokens; made by the first job with one.
    grammars: Arc<OnceLock<Result<Compiler, GrammarError>>>,
}

impl ServedModel {
    /// Serves `model` under `name` on a backend with this numerics class.
    pub fn new(model: Arc<Model>, name: String, numerics_class: String) -> Self {
        let limits = ServedLimits::default();
        Self { model, name, numerics_class, limits, grammars: Arc::default() }
    }

    /// Sets what the operator set.
    #[must_use]
    pub fn with_limits(self, limits: ServedLimits) -> Self {
        Self { limits, ..self }
    }

    /// Returns what the operator set.
    pub fn limits(&self) -> ServedLimits {
        self.limits
    }

    /// Returns the name that jobs use.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns whether the model embeds texts, and generates none.
    pub fn embeds(&self) -> bool {
        self.model.config().pooling.is_some()
    }

    /// Returns the numerics class: what a token depends on besides the job.
    pub fn numerics_class(&self) -> &str {
        &self.numerics_class
    }

    /// Returns what the engine gets for one prompt, with what its answer must match.
    ///
    /// # Errors
    /// If the model cannot take the prompt or the grammar; the message is for the author of the request.
    pub(crate) fn prepare(
        &self,
        prompt: &Prompt,
        grammar: Option<&Grammar>,
    ) -> Result<PreparedPrompt, JobError> {
        let (conversation, (tokens, layout)) = match (prompt, self.model.chat_template()) {
            (Prompt::Several(_), _) => {
                return Err(refused(
                    "unsupported_value",
                    "prompt",
                    "has lists in lists".to_owned(),
                ));
            }
            (Prompt::Tokens(tokens), _) => (None, (tokens.clone(), AnswerLayout::default())),
            (Prompt::Text(text), _) | (Prompt::Question(text), None) => {
                (None, (self.encode(text, true)?, AnswerLayout::default()))
            }
            (Prompt::Question(text), Some(template)) => {
                let question = Conversation::new(vec![Message::new(Role::User, text.clone())]);
                (None, self.conversation(template, &question, ("prompt", true))?)
            }
            (Prompt::Messages(conversation), Some(template)) => {
                (Some(conversation), self.conversation(template, conversation, ("messages", true))?)
            }
            (Prompt::Messages(_), None) => return Err(self.no_template()),
        };
        let grammar = conversation::grammar(&layout, conversation, grammar);
        let constraint = grammar.map(|(grammar, before)| {
            self.constraint(&grammar).map(|constraint| constraint.after(&before))
        });
        Ok(PreparedPrompt { tokens, constraint: constraint.transpose()?, layout })
    }

    fn constraint(&self, grammar: &Grammar) -> Result<Constraint, JobError> {
        let compiler = self.grammars.get_or_init(|| load::grammars(&self.model));
        let compiled = compiler.as_ref().map_err(Clone::clone).and_then(|c| c.compile(grammar));
        compiled.map_err(|error| {
            let problem = format!("the {} cannot be used: {error}", grammar.kind());
            refused("unsupported_value", "response_format", problem)
        })
    }

    fn conversation(
        &self,
        template: &ChatTemplate,
        conversation: &Conversation,
        (field, is_answered): (&'static str, bool),
    ) -> Result<(Vec<u32>, AnswerLayout), JobError> {
        let TemplateInput { messages, options } = TemplateInput::new(template, conversation);
        let (tokenizer, input) = (self.model.tokenizer(), (&messages[..], &options));
        let allowed = self.limits.allow_control_tokens;
        let encoded = chat::encode(template, tokenizer, input, is_answered, allowed);
        let encoded = encoded.map_err(|error| match error {
            chat::ConversationError::Template(error) => {
                let problem = format!("refused by the model's chat template: {}", chain(&error));
                refused("chat_template", field, problem)
            }
            error => not_tokenized(&error),
        })?;
        let layout = conversation::layout(template, Some(conversation), &encoded.text);
        Ok((encoded.tokens, layout))
    }

    fn no_template(&self) -> JobError {
        let problem = format!("model '{}' has no chat template; use /v1/completions", self.name);
        refused("no_chat_template", "messages", problem)
    }

    /// Returns the most tokens of an answer to a prompt of this length, one of `prompts` of its request, and what would cut it.
    pub(crate) fn longest(
        &self,
        sampling: &Sampling,
        prompt_tokens: usize,
        prompts: usize,
    ) -> (usize, LengthLimit) {
        let context = self.model.config().context_length.saturating_sub(prompt_tokens);
        // What an answer without a limit of its own may have: a result has room for so many.
        let room = usize::try_from(sampling.longest_choice(prompts)).unwrap_or(usize::MAX);
        let (most, limit) = match (sampling.max_tokens, self.limits.answer_tokens_max) {
            (Some(most), _) => (most as usize, LengthLimit::MaxTokens),
            (None, Some(most)) => ((most as usize).min(room), LengthLimit::Worker),
            (None, None) => (room, LengthLimit::Worker),
        };
        (most.max(1), if most >= context { LengthLimit::Context } else { limit })
    }

    /// Returns the length in bytes of a token's text in an answer.
    pub(crate) fn text_length(&self, token: u32) -> usize {
        let tokenizer = self.model.tokenizer();
        let is_shown = !tokenizer.is_special(token);
        tokenizer.token_bytes(token).filter(|_| is_shown).map_or(0, <[u8]>::len)
    }

    /// Returns the tokens of a prompt.
    pub(crate) fn tokenize(
        &self,
        prompt: &Prompt,
        special: bool,
        is_answered: bool,
    ) -> Result<Vec<u32>, JobError> {
        match (prompt, self.model.chat_template()) {
            (Prompt::Messages(conversation), Some(template)) => {
                Ok(self.conversation(template, conversation, ("messages", is_answered))?.0)
            }
            (Prompt::Messages(_), None) => Err(self.no_template()),
            (Prompt::Text(text) | Prompt::Question(text), _) => self.encode(text, special),
            (Prompt::Tokens(tokens), _) => Ok(tokens.clone()),
            (Prompt::Several(_), _) => {
                let problem = "is supported as one text only".to_owned();
                Err(refused("unsupported_value", "prompt", problem))
            }
        }
    }

    /// Returns the tokens of a text to embed: with the end token, of which the model pools the hidden row. Tokens are taken as they
    /// are.
    pub(crate) fn tokens_to_embed(&self, prompt: &Prompt) -> Result<Vec<u32>, JobError> {
        match prompt {
            Prompt::Text(text) | Prompt::Question(text) => {
                embed::tokens(&self.model, text).map_err(|error| not_tokenized(&error))
            }
            Prompt::Tokens(tokens) => Ok(tokens.clone()),
            Prompt::Messages(_) | Prompt::Several(_) => {
                let problem = "must be texts or lists of token ids".to_owned();
                Err(refused("invalid_type", "input", problem))
            }
        }
    }

    /// Returns the error of a job that another kind of model answers.
    pub(crate) fn other_kind(&self) -> JobError {
        let name = &self.name;
        let problem = match self.embeds() {
            true => format!("'{name}' is an embedding model: use /v1/embeddings"),
            false => format!("'{name}' generates text and is not an embedding model"),
        };
        refused("unsupported_value", "model", problem)
    }

    /// Returns the outcome of a job that asks for tokens.
    pub(crate) fn tokenized(&self, tokens: Vec<u32>) -> Outcome {
        let tokenizer = self.model.tokenizer();
        let text = |token: &u32| {
            let bytes = tokenizer.token_bytes(*token).unwrap_or_default();
            String::from_utf8_lossy(bytes).into_owned()
        };
        let texts = tokens.iter().map(text).collect();
        let context_length = self.model.config().context_length as u64;
        let usage = Usage { prompt_tokens: tokens.len() as u64, ..Usage::default() };
        let tokenized = Some(Tokenized { tokens, texts, context_length });
        Outcome::Completed(Completion { tokenized, usage, ..self.empty_completion() })
    }

    /// Returns the outcome of a job that asks for the text of tokens.
    pub(crate) fn detokenize(&self, prompt: &Prompt) -> Result<Outcome, JobError> {
        let Prompt::Tokens(tokens) = prompt else {
            return Err(refused("invalid_type", "tokens", "must be token ids".to_owned()));
        };
        let tokenizer = self.model.tokenizer();
        if let Some(token) = tokens.iter().find(|token| tokenizer.token_bytes(**token).is_none()) {
            let problem = format!("has {token}, which is not in the vocabulary");
            return Err(refused("invalid_value", "tokens", problem));
        }
        let choice = Choice::new(0, tokenizer.decode(tokens, false), FinishReason::Stop);
        let completion = Completion { choices: vec![choice], ..self.empty_completion() };
        Ok(Outcome::Completed(completion))
    }

    fn empty_completion(&self) -> Completion {
        Completion {
            model: self.name.clone(),
            fingerprint: self.numerics_class.clone(),
            ..Completion::default()
        }
    }

    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, JobError> {
        self.model.tokenizer().encode(text, add_special).map_err(|error| not_tokenized(&error))
    }
}

fn not_tokenized(error: &dyn std::error::Error) -> JobError {
    refused("tokenizer", "prompt", format!("cannot be tokenized: {}", chain(error)))
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
