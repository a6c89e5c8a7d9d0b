//! Options of the benchmarks of a GPU's steps.

use std::{num::NonZeroUsize, sync::Arc};

use anyhow::{bail, ensure};
use clap::Args;
use tritmill_engine::{
    backend::{
        LogitsFor,
        cuda::{CudaOptions, KvBlocks},
    },
    files::Model,
    load::DeviceChoice,
    measure::Workload,
};

use crate::options::{ModelOption, RunOptions};

/// The steps to measure.
#[derive(Debug, Args)]
pub struct GpuSteps {
    #[command(flatten)]
    model: ModelOption,
    /// Sequences of a decode step; one measurement each
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "1,16,64,256")]
    batch: Vec<NonZeroUsize>,
    /// Tokens of each sequence before the step
    #[arg(long, value_name = "N", default_value = "512")]
    pub prompt: NonZeroUsize,
}

impl GpuSteps {
    /// Opens the model and returns it with the device's options and the workload. `without_gpu` is the
    /// error if the device is not one GPU.
    pub fn open(
        &self,
        run: &RunOptions,
        without_gpu: &str,
    ) -> anyhow::Result<(Arc<Model>, CudaOptions, Workload)> {
        let DeviceChoice::Cuda(ordinal) = run.engine_on_one()?.device.resolved() else {
            bail!("{without_gpu}: --device cuda:0");
        };
        let model = self.model.open()?;
        let context = model.config().context_length;
        ensure!(self.prompt.get() < context, "prompts fill the model's context of {context}");
        let workload = Workload {
            batches: self.batch.iter().map(|batch| batch.get()).collect(),
            prompt_tokens: self.prompt.get(),
            shared_tokens: 0,
            generate_tokens: 1,
            logits: LogitsFor::largest(1),
            repetitions: 1,
        };
        let RunOptions {
            kv, head, activations, gpu_kernels: kernels, gpu_disable: disabled, ..
        } = *run;
        let blocks = KvBlocks::UpTo(1);
        let options = CudaOptions { ordinal, kv, head, activations, blocks, kernels, disabled };
        Ok((model, options, workload))
    }
}
