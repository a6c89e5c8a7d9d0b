//! The engines of a command that answers jobs: one per device.

use std::sync::Arc;

use anyhow::Context as _;
use tritmill_engine::{
    Engine,
    files::Model,
    kv::disk::BlockTiers,
    load::{self, DeviceChoice, Devices, EngineOptions},
};
use tritmill_worker::Device;

/// Engines of one numerics class.
pub struct Engines {
    pub devices: Vec<Device>,
    /// Numerics class of all engines.
    pub numerics_class: String,
}

impl Engines {
    /// Loads the model on every device. The engines share KV blocks on disk, if there are any.
    pub fn load(
        model: &Arc<Model>,
        options: &EngineOptions,
        devices: &Devices,
        disk: Option<&BlockTiers>,
    ) -> anyhow::Result<Self> {
        let devices = devices.one_kind().context("--device")?;
        let engines = load::engines(model, options, devices)?;
        let (_, first) = engines.first().context("no device")?;
        let numerics_class = first.backend().numerics_class().to_owned();
        let named = |(device, mut engine): (DeviceChoice, Engine)| {
            if let Some(disk) = disk {
                engine.use_disk(disk.clone());
            }
            Device { name: device.to_string(), engine }
        };
        Ok(Self { devices: engines.into_iter().map(named).collect(), numerics_class })
    }
}
