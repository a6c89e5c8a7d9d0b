//! The models of a worker process: opened, checked against the memory budget, and ready to be loaded.

use std::{collections::HashSet, sync::Arc};

use anyhow::{Context as _, bail};
use tritmill_engine::{
    files::Model,
    kv::disk::BlockTiers,
    load::{self, Devices, EngineOptions},
};
use tritmill_queue::QueueName;
use tritmill_worker::{Loader, ServedLimits, ServedModel};

use crate::{
    engines::Engines,
    memory::{Budget, Candidate},
    options::{self, CapacityOptions, MemoryOption, NamedModel, RunOptions},
};

/// A model on the devices of one kind.
pub struct Unit {
    pub queue: QueueName,
    pub served: Arc<ServedModel>,
    /// Kind of its devices, if there are several kinds.
    pub kind: Option<String>,
    /// Instruction set of its kernels, empty on GPUs.
    pub isa: String,
    pub memory_bytes: u64,
    pub load: Loader,
}

/// The models of a process.
pub struct Units {
    pub units: Vec<Unit>,
    /// The memory that they may take together, if it is limited.
    pub memory_bytes: Option<u64>,
}

/// A model whose files are open.
struct Opened {
    path: String,
    name: String,
    model: Arc<Model>,
}

/// The options that choose the models of a process and how they run.
pub struct Choice<'a> {
    pub models: &'a [NamedModel],
    /// Name of the only model's queue, if it is not the model's own.
    pub name: Option<&'a String>,
    pub run: &'a RunOptions,
    pub capacity: &'a CapacityOptions,
    pub memory: &'a MemoryOption,
}

/// Opens the models, and computes their numerics classes, for which each file is read once.
///
/// # Errors
/// If a model cannot be used, two have one name, or one does not fit the memory budget alone.
pub fn open(choice: &Choice<'_>) -> anyhow::Result<Units> {
    let Choice { models, name, run, capacity, memory } = choice;
    let models = open_models(models, *name)?;
    let (kinds, options) = (run.device.kinds(), capacity.apply(run.engine()));
    let mut plans = Vec::new();
    for opened in &models {
        for devices in &kinds {
            plans.push(Plan::new(opened, devices, options, capacity.limits())?);
        }
    }
    let mut budget = Budget::from_option(memory);
    let on_gpu = run.device.has_gpu();
    let host_bytes = capacity.tiers.host_bytes(on_gpu, budget.bytes);
    let disk = capacity.tiers.open(host_bytes)?;
    budget.bytes = budget.bytes.map(|bytes| bytes.saturating_sub(host_bytes));
    let candidates: Vec<Candidate<'_>> = plans.iter().map(Plan::candidate).collect();
    let fitted = budget.fit(&candidates)?;
    let unit = |(plan, (options, memory_bytes)): (&Plan<'_>, _)| {
        let kind = (kinds.len() > 1).then_some(plan.kind());
        Plan { options, ..*plan }.unit(kind, disk.as_ref(), memory_bytes)
    };
    let units = plans.iter().zip(fitted).map(unit).collect::<anyhow::Result<_>>()?;
    Ok(Units { units, memory_bytes: budget.bytes })
}

fn open_models(models: &[NamedModel], name: Option<&String>) -> anyhow::Result<Vec<Opened>> {
    if name.is_some() && (models.len() > 1 || models.iter().any(|model| model.name.is_some())) {
        bail!("--name names the only model: with several, give --model NAME=PATH");
    }
    let mut names = HashSet::new();
    let mut all = Vec::new();
    for NamedModel { name: own, model: path } in models {
        let model = options::open(path)?;
        let name = own.as_ref().or(name).map_or(model.name(), String::as_str).to_owned();
        if !names.insert(name.clone()) {
            bail!("two models are named {name}: give --model NAME=PATH");
        }
        all.push(Opened { path: path.clone(), name, model });
    }
    Ok(all)
}

/// A model on the devices of one kind, and how it is run there.
#[derive(Clone, Copy)]
struct Plan<'a> {
    opened: &'a Opened,
    devices: &'a Devices,
    device_count: usize,
    options: EngineOptions,
    limits: ServedLimits,
}

impl<'a> Plan<'a> {
    fn new(
        opened: &'a Opened,
        devices: &'a Devices,
        options: EngineOptions,
        limits: ServedLimits,
    ) -> anyhow::Result<Self> {
        let resolved = devices.resolved(options.threads);
        let resolved = resolved.with_context(|| format!("cannot load model {}", opened.path))?;
        let device = *resolved.first().context("no device")?;
        let options = EngineOptions { device, ..options };
        Ok(Self { opened, devices, device_count: resolved.len(), options, limits })
    }

    fn candidate(&self) -> Candidate<'a> {
        let Opened { name, model, .. } = self.opened;
        Candidate { name, model, options: self.options, device_count: self.device_count }
    }

    fn kind(&self) -> &'static str {
        if self.options.device.is_cpu() { "cpu" } else { "cuda" }
    }

    /// Computes the numerics class.
    fn unit(
        &self,
        kind: Option<&str>,
        disk: Option<&BlockTiers>,
        memory_bytes: u64,
    ) -> anyhow::Result<Unit> {
        let Opened { path, name, model } = self.opened;
        let options = self.options;
        let class = load::numerics_class(model, &options);
        let class = class.with_context(|| format!("cannot load model {path}"))?;
        model.release_pages();
        let isa = if self.kind() == "cpu" { options.isa().to_string() } else { String::new() };
        let load = {
            let (model, devices) = (Arc::clone(model), self.devices.clone());
            let (path, disk) = (path.clone(), disk.cloned());
            move || {
                let engines = Engines::load(&model, &options, &devices, disk.as_ref());
                let engines = engines.with_context(|| format!("cannot load model {path}"))?;
                Ok(engines.devices)
            }
        };
        Ok(Unit {
            queue: QueueName { model: name.clone(), format: options.format.to_string() },
            served: Arc::new(
                ServedModel::new(Arc::clone(model), name.clone(), class).with_limits(self.limits),
            ),
            kind: kind.map(str::to_owned),
            isa,
            memory_bytes,
            load: Arc::new(load),
        })
    }
}
