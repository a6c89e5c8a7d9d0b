//! Forks: the clone of an engine's state, and of one request.
//!
//! A fork has the configuration, the requests in their states, the kernels and the measured times of its original. Its
//! counters start at zero. Weights are never copied. Both go on independently, on any threads; as tokens depend on the
//! request alone, both draw the same ones.

use super::{DeltaBuffers, Engine, EngineStats};
use crate::{
    backend::{Backend, CopyError, Logits, StepError},
    request::RequestId,
    sampling::{SamplingMetadata, Scratch},
    scheduler::{Fork, ForkCopy, Plan},
};

/// A fork was not made. The original goes on as before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForkError {
    /// The KV storage cannot be copied, or the device failed.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// The request has finished, or never existed.
    #[error("there is no unfinished request {}", .id.0)]
    UnknownRequest {
        /// Its id.
        id: RequestId,
    },
    /// The engine is full. Try again when a request has finished.
    #[error("engine already holds {requests} requests")]
    Full {
        /// Requests in the engine.
        requests: usize,
    },
}

impl From<StepError> for ForkError {
    fn from(error: StepError) -> Self {
        Self::Copy(error.into())
    }
}

impl Engine {
    /// Returns a second engine that goes on from the same state. Requests have the same ids there; events that were
    /// already reported are not reported again.
    ///
    /// [`Fork::Shared`]: both engines use the same KV blocks, and take turns in the same backend: their steps exclude each
    /// other. A fork takes no KV blocks; an engine that writes to a block that both use copies it first. A request that
    /// lacks blocks waits while the other engine holds them, so drop an engine that is not used any more. States of recurrent
    /// layers are copied: they change with every token.
    ///
    /// [`Fork::Deep`]: the fork has KV storage, threads and buffers of its own, and copies of all blocks with contents and of all
    /// states of recurrent layers.
    ///
    /// # Errors
    /// [`ForkError::Copy`]: a deep fork on a GPU is not supported.
    pub fn fork(&self, kind: Fork) -> Result<Self, ForkError> {
        let (scheduler, backend) = match kind {
            Fork::Shared => {
                let backend = self.backend.shared(&self.scheduler.slots_with_states())?;
                (self.scheduler.fork_shared(), backend)
            }
            Fork::Deep => {
                self.scheduler.fork_deep(|blocks, states| self.backend.copied(blocks, states))?
            }
        };
        Ok(Self {
            backend,
            vocabulary: self.vocabulary.clone(),
            eos_tokens: self.eos_tokens.clone(),
            config: self.config,
            scheduler,
            plan: Plan::default(),
            pace: self.pace.clone(),
            called_at: self.called_at,
            full_steps: self.full_steps.clone(),
            drafts: self.drafts.clone(),
            stored: self.stored.as_ref().map(super::Stored::fork),
            active: self.active.clone(),
            next_request: self.next_request,
            resumed: self.resumed.clone(),
            cancelled: self.cancelled.clone(),
            deadlines: self.deadlines.clone(),
            logits: Logits::default(),
            hidden: Vec::new(),
            scratch: Scratch::default(),
            undecided: Vec::new(),
            untimed: Default::default(),
            metadata: SamplingMetadata::default(),
            chunks: Vec::new(),
            spare: DeltaBuffers::default(),
            counters: EngineStats::default(),
        })
    }

    /// Adds a request that goes on from where another one is: with its tokens, text, parameters and deadline. Its answer
    /// is equal to the other's. The next step reports what it has; from then on its deltas are its own.
    ///
    /// With [`Fork::Shared`] both use the same KV blocks, with [`Fork::Deep`] the new one has copies. If the engine runs as
    /// many sequences as it may, or has too few blocks for copies, the new request waits and computes its tokens again.
    ///
    /// # Errors
    /// If the request is unknown, the engine is full, or the device fails.
    pub fn fork_request(&mut self, id: RequestId, kind: Fork) -> Result<RequestId, ForkError> {
        let original = self.active.get(&id).ok_or(ForkError::UnknownRequest { id })?;
        if self.active.len() >= self.config.max_requests {
            return Err(ForkError::Full { requests: self.active.len() });
        }
        let id = RequestId(self.next_request);
        let (active, events) = original.fork(id);
        let pair = |choice| (original.sequence(choice), active.sequence(choice));
        let (pairs, mut copied) = ((0..original.started()).map(pair), Ok(()));
        for (parent, child) in pairs.clone() {
            self.scheduler.fork(parent, child, kind, |copy| {
                if copied.is_ok() {
                    copied = copy_in(&mut self.backend, copy);
                }
            });
        }
        if let Err(error) = copied {
            pairs.for_each(|(_, child)| self.scheduler.remove(child));
            return Err(error.into());
        }
        if let Some(stored) = &mut self.stored {
            stored.fork_request(original.sequence(0), active.sequence(0));
        }
        self.next_request += 1;
        self.deadlines.extend(active.deadline.map(|deadline| (deadline, id)));
        self.resumed.extend(events);
        self.active.insert(id, active);
        Ok(id)
    }
}

/// Makes a copy in a backend.
pub(super) fn copy_in(backend: &mut dyn Backend, copy: ForkCopy) -> Result<(), StepError> {
    match (copy, backend.as_recurrent()) {
        (ForkCopy::Block(from, to), _) => backend.copy_block(from, to),
        (ForkCopy::State(from, to), Some(backend)) => backend.copy_state(from, to),
        (ForkCopy::State(..), None) => Ok(()),
    }
}
