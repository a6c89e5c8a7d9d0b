//! An active request: its choices, their tokens and text.

use std::time::Instant;

use tritmill_grammar::GrammarError;

use super::{
    constrained::Constrained,
    drafts::{ChoiceDrafts, Drafts, Expected},
    report::DeltaBuffers,
};
use crate::{
    kv::BlockHash,
    request::{Choice, Event, FinishReason, Output, Request, RequestId, TokenLogprob},
    sampling::{AllowedTokens, Drawn, Logprobs, RowMetadata, SamplingParams, TokenCounts},
    scheduler::{Priority, SequenceId},
    text::{TextAssembler, TokenText},
};

/// Most tokens of an answer that a choice has room for at once.
const RESERVED_TOKENS_MAX: usize = 4096;
/// Bytes of text that there is room for per token; long texts get more room when they need it.
const TOKEN_BYTES: usize = 6;

/// A choice with tokens that may come next, which are still to be found.
pub(super) struct StaleMask<'a> {
    pub id: RequestId,
    constrained: &'a mut Constrained,
    vocab_size: usize,
    end_tokens: &'a [u32],
    pub result: Result<(), GrammarError>,
}

impl StaleMask<'_> {
    /// Finds them. Choices are independent of each other.
    pub fn find(&mut self) {
        self.result = self.constrained.constraint.find_allowed();
        self.constrained.find_masks(self.vocab_size, self.end_tokens);
    }
}

/// A choice while it is generated.
#[derive(Debug, Clone)]
struct Generation {
    constrained: Option<Constrained>,
    tokens: Vec<u32>,
    text: TextAssembler,
    counts: TokenCounts,
    logprobs: Option<Vec<TokenLogprob>>,
    finish_reason: Option<FinishReason>,
    /// The prompt's vector, if the request asks for it and it is computed.
    vector: Option<Vec<f32>>,
    drafts: ChoiceDrafts,
}

/// A request that has not finished.
#[derive(Debug, Clone)]
pub(super) struct ActiveRequest {
    id: RequestId,
    priority: Priority,
    /// Start of the hash chains of the request's tenant.
    root: BlockHash,
    pub sampling: SamplingParams,
    pub deadline: Option<Instant>,
    prompt_tokens: usize,
    /// `max_tokens`, limited by the context.
    max_tokens: usize,
    /// Prompt tokens found in the prefix cache; set at the first admission.
    cached_tokens: Option<usize>,
    vocab_size: usize,
    /// Tokens that end a choice: stop tokens, and end-of-sequence tokens unless these are ignored.
    end_tokens: Vec<u32>,
    /// All others, for `min_tokens`; `None` if every token may be drawn.
    before_end: Option<AllowedTokens>,
    /// State of each of the `n` choices.
    choices: Vec<Generation>,
    /// Number of choices with a sequence: one until the prompt is computed, then all.
    started: u32,
}

impl ActiveRequest {
    pub fn new(
        id: RequestId,
        request: &Request,
        root: BlockHash,
        (context_length, vocab_size): (usize, usize),
        eos_tokens: &[u32],
    ) -> Self {
        let sampling = request.sampling.clone();
        let mut end_tokens = sampling.stop_tokens.clone();
        if !sampling.ignore_eos {
            end_tokens.extend(eos_tokens);
        }
        let before_end = (sampling.min_tokens > 0)
            .then(|| AllowedTokens::all_but(vocab_size, end_tokens.iter().copied()))
            .filter(|allowed| allowed.refused_count() > 0);
        let constrained = |constraint| Constrained::new(constraint, vocab_size, &end_tokens);
        let constrained = request.constraint.clone().map(constrained);
        let choices = (0..sampling.n).map(|_| Generation {
            constrained: constrained.clone(),
            tokens: Vec::new(),
            text: TextAssembler::new(&sampling.stop),
            counts: TokenCounts::new(&sampling, &request.prompt),
            logprobs: sampling.logprobs.map(|_| Vec::new()),
            finish_reason: None,
            vector: None,
            drafts: ChoiceDrafts::default(),
        });
        let choices = choices.collect();
        Self {
            id,
            priority: request.priority,
            vocab_size,
            root,
            deadline: request.deadline,
            prompt_tokens: request.prompt.len(),
            max_tokens: sampling.max_tokens.min(context_length - request.prompt.len()),
            cached_tokens: None,
            end_tokens,
            before_end,
            choices,
            sampling,
            started: 1,
        }
    }

    /// Leaves out the space that the text of a choice begins with.
    pub fn strip_leading_space(mut self) -> Self {
        for choice in &mut self.choices {
            choice.text = std::mem::take(&mut choice.text).strip_leading_space();
        }
        self
    }

    /// Adds the tokens of an earlier attempt; returns the part of their text that cannot change any
    /// more. `None` if the tokens already finish the choice or cannot be resumed from; `self` must not
    /// be used then.
    pub fn resume(&mut self, tokens: &[u32], vocabulary: &dyn TokenText) -> Option<String> {
        let resumable = self.choices.len() == 1 && self.sampling.logprobs.is_none();
        let mut events = Vec::new();
        let mut continues = |token: &u32| {
            let drawn = Drawn { token: *token, logprobs: None };
            let pushed =
                self.push(0, drawn, vocabulary, (&mut events, &mut DeltaBuffers::default()));
            pushed == Ok(false)
        };
        let resumed = resumable && tokens.iter().all(&mut continues);
        let resumed = resumed
            && self.stale_masks().all(|mut mask| {
                mask.find();
                mask.result.is_ok()
            });
        let text = |event| match event {
            Event::Delta { text, .. } => text,
            Event::Finished { .. } | Event::Failed { .. } => String::new(),
        };
        resumed.then(|| events.into_iter().map(text).collect())
    }

    /// Returns a request that goes on from the same tokens under another id, and events with what its choices have.
    pub fn fork(&self, id: RequestId) -> (Self, Vec<Event>) {
        let so_far = |(choice, generation): (usize, &Generation)| {
            let (tokens, text) = (generation.tokens.clone(), generation.text.returned().to_owned());
            let has_any = !tokens.is_empty();
            let logprobs = generation.logprobs.clone().unwrap_or_default();
            let choice = choice as u32;
            has_any.then_some(Event::Delta { id, choice, text, tokens, logprobs })
        };
        let events = self.choices.iter().enumerate().filter_map(so_far).collect();
        (Self { id, ..self.clone() }, events)
    }

    /// Returns the identifier of a choice's sequence.
    pub fn sequence(&self, choice: u32) -> SequenceId {
        SequenceId { priority: self.priority, request: self.id.0, choice }
    }

    /// Returns the number of choices with a sequence: the choices with a smaller index.
    pub fn started(&self) -> u32 {
        self.started
    }

    /// Starts all choices, once the prompt is computed. Returns the choices that had no sequence.
    pub fn start_choices(&mut self) -> std::ops::Range<u32> {
        let first = std::mem::replace(&mut self.started, self.choices.len() as u32);
        first..self.started
    }

    /// Records the tokens that an admission found in the prefix cache. Only the first admission counts:
    /// a later one follows a preemption, or is of a choice that shares the prompt.
    pub fn record_cached(&mut self, tokens: usize) {
        self.cached_tokens.get_or_insert(tokens);
    }

    /// Returns what the draw of a choice's token at `position` depends on besides the logits, after these drafts.
    pub fn metadata<'a>(
        &'a self,
        choice: u32,
        position: usize,
        drafts: &'a [u32],
    ) -> RowMetadata<'a> {
        let generation = &self.choices[choice as usize];
        let is_early = generation.tokens.len() + drafts.len() < self.sampling.min_tokens;
        let allowed = match &generation.constrained {
            Some(constrained) => constrained.masks(drafts.len()).allowed(is_early),
            None => self.before_end.as_ref().filter(|_| is_early),
        };
        RowMetadata {
            params: &self.sampling,
            counts: &generation.counts,
            drafts,
            allowed,
            choice,
            position,
            choices: 1 + (self.choices.len() as u32 - self.started),
        }
    }

    /// Returns how many drafts a choice may have, with `position` tokens: none if its draws need all logits, which a
    /// backend that draws does not.
    fn most_drafts(
        &self,
        choice: u32,
        position: usize,
        (most, backend_draws): (usize, bool),
    ) -> usize {
        let generated = self.choices[choice as usize].tokens.len();
        // The last token needs none after it.
        let most = most.min(self.max_tokens.saturating_sub(generated + 1));
        match most > 0 && self.metadata(choice, position, &[]).needs_all(backend_draws) {
            true => 0,
            false => most,
        }
    }

    /// Proposes tokens that may follow `tokens` of a choice.
    pub fn propose(
        &mut self,
        (choice, tokens): (u32, &[u32]),
        drafts: &mut Drafts,
        limits: (usize, bool),
        proposed: &mut Vec<u32>,
    ) {
        let most = self.most_drafts(choice, tokens.len(), limits);
        let of = &mut self.choices[choice as usize].drafts;
        let tokens = (tokens, self.prompt_tokens);
        drafts.propose(&self.root, of, tokens, (most, &self.end_tokens), proposed);
    }

    /// Keeps those of the proposed tokens that the step computes. Of a choice that a grammar describes, these are tokens that it
    /// allows, and those that must come.
    pub fn keep_chosen(
        &mut self,
        (choice, position): (u32, usize),
        drafts: &mut Drafts,
        limits: (usize, bool),
        proposed: &mut Vec<u32>,
    ) {
        drafts.keep_chosen(&mut self.choices[choice as usize].drafts, proposed);
        if self.choices[choice as usize].constrained.is_none() {
            return;
        }
        let most = self.most_drafts(choice, position, limits);
        let (vocab_size, end_tokens) = (self.vocab_size, &self.end_tokens[..]);
        let generation = &mut self.choices[choice as usize];
        if let Some(constrained) = generation.constrained.as_mut().filter(|_| most > 0) {
            drafts.look_ahead(|until| {
                constrained.look_ahead(proposed, most, (vocab_size, end_tokens), until);
            });
            let kept = constrained.write_ahead(most, proposed);
            generation.drafts.keep_first(kept);
        }
    }

    /// Takes what is known of a choice's drafts before they are drawn.
    pub fn take_expected(&mut self, choice: u32) -> Expected {
        self.choices[choice as usize].drafts.take_expected()
    }

    /// Returns what is known of a choice's drafts, and whether it has ended.
    pub fn drafts_mut(&mut self, choice: u32) -> (&mut ChoiceDrafts, bool) {
        let Generation { drafts, finish_reason, .. } = &mut self.choices[choice as usize];
        (drafts, finish_reason.is_some())
    }

    /// Keeps the answer of a choice for drafts of later ones.
    pub fn keep(&self, choice: u32, tokens: &[u32], drafts: &mut Drafts) {
        let of = &self.choices[choice as usize].drafts;
        drafts.keep(&self.root, of, (tokens, self.prompt_tokens));
    }

    /// Makes room for the next tokens of a choice if it has none left: for all that it may get, or for a part of a long
    /// answer. Returns the number of tokens that there is new room for.
    pub fn reserve(&mut self, choice: u32) -> Option<usize> {
        let Generation { tokens, text, .. } = &mut self.choices[choice as usize];
        if tokens.len() < tokens.capacity() {
            return None;
        }
        let left = self.max_tokens.saturating_sub(tokens.len());
        let more = left.clamp(1, RESERVED_TOKENS_MAX);
        tokens.reserve_exact(more);
        text.reserve(more * TOKEN_BYTES);
        Some(more)
    }

    /// Adds a drawn token and an event with it. True if it finished the choice.
    ///
    /// # Errors
    /// What may follow cannot be found. The token is added.
    pub fn push(
        &mut self,
        choice: u32,
        drawn: Drawn,
        vocabulary: &dyn TokenText,
        (events, spare): (&mut Vec<Event>, &mut DeltaBuffers),
    ) -> Result<bool, GrammarError> {
        let generation = &mut self.choices[choice as usize];
        let token = drawn.token;
        generation.tokens.push(token);
        generation.counts.add(token);
        let mut logprobs = Vec::new();
        if let (Some(list), Some(drawn)) = (&mut generation.logprobs, drawn.logprobs) {
            let logprob = token_logprob(token, drawn, vocabulary);
            logprobs.push(logprob.clone());
            list.push(logprob);
        }
        let may_stop = generation.tokens.len() >= self.sampling.min_tokens;
        let mut advanced = Ok(());
        let stopped = if self.end_tokens.contains(&token) {
            true
        } else {
            let special = vocabulary.is_special(token);
            let bytes = if special { &[] } else { vocabulary.bytes(token) };
            let stopped = generation.text.push(bytes, may_stop);
            match &mut generation.constrained {
                Some(constrained) if !stopped => {
                    constrained.advance(token).unwrap_or_else(|error| {
                        advanced = Err(error);
                        false
                    })
                }
                _ => stopped,
            }
        };
        if stopped {
            generation.finish_reason = Some(FinishReason::Stop);
        } else if generation.tokens.len() >= self.max_tokens {
            generation.finish_reason = Some(FinishReason::Length);
        }
        let (mut text, mut tokens) = spare.take();
        tokens.push(token);
        match &mut generation.finish_reason {
            None => generation.text.take_certain(&mut text),
            Some(reason) => {
                if generation.text.finish(may_stop) {
                    *reason = FinishReason::Stop;
                }
                generation.text.take_rest(&mut text);
            }
        }
        events.push(Event::Delta { id: self.id, choice, text, tokens, logprobs });
        advanced.map(|()| generation.finish_reason.is_some())
    }

    /// Returns the choices with tokens that may come next, which are still to be found.
    pub fn stale_masks(&mut self) -> impl Iterator<Item = StaleMask<'_>> {
        let Self { id, choices, vocab_size, end_tokens, .. } = self;
        let (id, vocab_size, end_tokens) = (*id, *vocab_size, &end_tokens[..]);
        let unfinished = choices.iter_mut().filter(|choice| choice.finish_reason.is_none());
        let stale = unfinished.filter_map(|choice| choice.constrained.as_mut());
        let stale = stale.filter(|constrained| constrained.constraint.is_stale());
        stale.map(move |constrained| StaleMask {
            id,
            constrained,
            vocab_size,
            end_tokens,
            result: Ok(()),
        })
    }

    /// Returns whether every choice has finished.
    pub fn is_finished(&self) -> bool {
        self.choices.iter().all(|generation| generation.finish_reason.is_some())
    }

    /// Finishes the unfinished choices, and emits the text they held back.
    pub fn finish_choices(&mut self, reason: FinishReason, events: &mut Vec<Event>) {
        for (choice, generation) in self.choices.iter_mut().enumerate() {
            if generation.finish_reason.is_some() {
                continue;
            }
            generation.finish_reason = Some(reason);
            generation.text.finish(false);
            let mut text = String::new();
            generation.text.take_rest(&mut text);
            if !text.is_empty() {
                let (choice, tokens) = (choice as u32, Vec::new());
                let logprobs = Vec::new();
                events.push(Event::Delta { id: self.id, choice, text, tokens, logprobs });
            }
        }
    }

    /// Takes the vector of the prompt, which is the answer.
    pub fn set_vector(&mut self, vector: &[f32]) {
        for generation in &mut self.choices {
            generation.vector = Some(vector.to_vec());
        }
    }

    /// Converts the request into its output.
    pub fn into_output(self) -> Output {
        let completion_tokens = self.choices.iter().map(|generation| generation.tokens.len()).sum();
        let choices = self.choices.into_iter().enumerate().map(|(index, generation)| Choice {
            index: index as u32,
            tokens: generation.tokens,
            stop_string: generation.text.stop_string().map(str::to_owned),
            text: generation.text.into_text(),
            finish_reason: generation.finish_reason.unwrap_or(FinishReason::Failed),
            logprobs: generation.logprobs,
            vector: generation.vector,
        });
        Output {
            choices: choices.collect(),
            prompt_tokens: self.prompt_tokens,
            completion_tokens,
            cached_tokens: self.cached_tokens.unwrap_or(0),
        }
    }
}

fn token_logprob(token: u32, logprobs: Logprobs, vocabulary: &dyn TokenText) -> TokenLogprob {
    let entry = |token, logprob, top| {
        let bytes = vocabulary.bytes(token).to_vec();
        TokenLogprob { token, bytes, logprob, top }
    };
    let top = logprobs.top.into_iter().map(|(token, logprob)| entry(token, logprob, Vec::new()));
    entry(token, logprobs.logprob, top.collect())
}
