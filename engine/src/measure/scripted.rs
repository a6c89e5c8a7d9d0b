//! A backend that computes everything and then answers from a script, so that a model with random weights takes the time
//! of a real one for the answers of a real one.

use std::collections::HashMap;

use crate::{
    backend::{Asynchronous, Backend, Chunk, Logits, LogitsFor, StepError},
    kv::{BlockId, LayerGroups},
    sampling::TokenLogit,
};

/// A prompt and its answer, as tokens. The first [`Scripted::KEY`] tokens of each prompt differ from all others'.
#[derive(Debug, Clone)]
pub struct Script {
    /// The prompt.
    pub prompt: Vec<u32>,
    /// The answer.
    pub answer: Vec<u32>,
}

/// A backend with scripted answers. The engine must not reuse blocks by content.
pub struct Scripted {
    inner: Box<dyn Backend>,
    scripts: Vec<Vec<u32>>,
    by_key: HashMap<Vec<u32>, usize>,
    /// The script of the sequence that a block is the first one of.
    running: HashMap<BlockId, usize>,
}

impl Scripted {
    /// Tokens that tell prompts apart.
    pub const KEY: usize = 2;

    /// Wraps a backend.
    pub fn new(inner: Box<dyn Backend>, scripts: &[Script]) -> Self {
        let keys = scripts.iter().map(|script| script.prompt[..Self::KEY].to_vec());
        let by_key = keys.zip(0..).collect();
        let whole = |script: &Script| [&script.prompt[..], &script.answer].concat();
        let scripts = scripts.iter().map(whole).collect();
        Self { inner, scripts, by_key, running: HashMap::new() }
    }

    fn script(&mut self, chunk: &Chunk<'_>) -> Option<&[u32]> {
        let block = *chunk.blocks.first()?;
        if chunk.position == 0 {
            let script = self.by_key.get(chunk.tokens.get(..Self::KEY)?)?;
            self.running.insert(block, *script);
        }
        Some(&self.scripts[*self.running.get(&block)?])
    }
}

impl Backend for Scripted {
    fn vocab_size(&self) -> usize {
        self.inner.vocab_size()
    }

    fn block_count(&self) -> usize {
        self.inner.block_count()
    }

    fn layer_groups(&self) -> LayerGroups {
        self.inner.layer_groups()
    }

    fn numerics_class(&self) -> &str {
        self.inner.numerics_class()
    }

    fn step(&mut self, chunks: &[Chunk<'_>], logits: &mut Logits) -> Result<(), StepError> {
        self.inner.step(chunks, logits)?;
        let mut lists = Vec::new();
        for chunk in chunks {
            let positions = match chunk.logits {
                LogitsFor::Nothing => 0,
                LogitsFor::Last | LogitsFor::Largest(_) => 1,
                LogitsFor::Draws(draws) => draws.len(),
                LogitsFor::All => chunk.tokens.len(),
            };
            let end = chunk.position + chunk.tokens.len();
            let script = self.script(chunk).unwrap_or_default();
            let next = (end - positions + 1..=end).map(|at| script.get(at).copied().unwrap_or(0));
            lists.extend(next.map(|id| [TokenLogit { id, logit: 0.0 }]));
        }
        logits.clear(self.vocab_size());
        logits.lay_out(lists.iter().map(|_| false));
        logits.set_largest(lists.iter().map(|list| &list[..]));
        Ok(())
    }

    fn as_asynchronous(&mut self) -> Option<&mut dyn Asynchronous> {
        if self.inner.as_asynchronous().is_some() { Some(self) } else { None }
    }

    fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<(), StepError> {
        self.inner.copy_block(from, to)
    }

    fn block_bytes(&self) -> usize {
        self.inner.block_bytes()
    }

    fn read_block(&mut self, block: BlockId, content: &mut Vec<u8>) -> Result<(), StepError> {
        self.inner.read_block(block, content)
    }

    fn write_block(&mut self, block: BlockId, content: &[u8]) -> Result<(), StepError> {
        self.inner.write_block(block, content)
    }
}

impl Asynchronous for Scripted {
    /// The tokens that the device would go on with are not the script's.
    fn decodes_ahead(&self) -> bool {
        false
    }

    fn is_running(&mut self) -> bool {
        self.inner.as_asynchronous().is_some_and(|inner| inner.is_running())
    }

    fn wait(&mut self) -> Result<(), StepError> {
        self.inner.as_asynchronous().map_or(Ok(()), |inner| inner.wait())
    }
}
