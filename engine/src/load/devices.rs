//! The devices a model runs on: one, or several of a worker.

use std::{fmt, num::NonZeroUsize, str::FromStr, sync::OnceLock};

use crate::backend::{
    cpu::topology::{self, MemoryNode},
    cuda::{self, CudaLoadError},
};

/// A device to run a model on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceChoice {
    /// The processor, all its cores.
    #[default]
    Cpu,
    /// The cores and the memory of the processor's memory node (NUMA) with this number.
    CpuNode(usize),
    /// The GPU with this number; an error if it cannot be used.
    Cuda(usize),
    /// The first GPU if it can run the kernels, else the processor.
    Auto,
}

impl DeviceChoice {
    /// Returns whether it is the processor or a part of it, once [`Self::Auto`] is resolved.
    pub fn is_cpu(self) -> bool {
        !matches!(self.resolved(), Self::Cuda(_))
    }

    /// Returns the memory node, if only one of the processor's is chosen.
    pub fn memory_node(self) -> Option<usize> {
        if let Self::CpuNode(node) = self { Some(node) } else { None }
    }

    /// Resolves [`Self::Auto`], once per process, with a warning if no GPU can be used.
    pub fn resolved(self) -> Self {
        static FOUND: OnceLock<bool> = OnceLock::new();
        if self != Self::Auto {
            return self;
        }
        let found = *FOUND.get_or_init(|| match cuda::usable(0) {
            Ok(()) => true,
            Err(why) => {
                tracing::warn!(%why, "no usable GPU: running on the CPU");
                false
            }
        });
        if found { Self::Cuda(0) } else { Self::Cpu }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::CpuNode(node) => write!(f, "cpu:{node}"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            Self::Auto => f.write_str("auto"),
        }
    }
}

/// An invalid choice of devices.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DevicesError {
    /// An unknown name.
    #[error(
        "unknown device '{0}' (expected cpu, cpu:0 for its first memory node, auto, cuda:0, cuda:1, …, several as in \
         cuda:0,cuda:1, or cuda:all)"
    )]
    Unknown(String),
    /// `auto` among several devices.
    #[error("auto chooses one device: name the others instead, as in cpu,cuda:0")]
    AutoAmong,
    /// Devices of several kinds where one is needed.
    #[error(
        "{0} are devices of two kinds, whose answers may differ (another numerics class): only a worker can use both"
    )]
    Mixed(Devices),
    /// A device is named twice, or a part of it beside the whole.
    #[error("{0} is named twice")]
    Twice(DeviceChoice),
    /// Several devices where one is needed.
    #[error("expected one device, not {0}")]
    Several(Devices),
}

impl FromStr for DeviceChoice {
    type Err = DevicesError;

    fn from_str(name: &str) -> Result<Self, DevicesError> {
        match name {
            "cpu" => Ok(Self::Cpu),
            "auto" => Ok(Self::Auto),
            "cuda" => Ok(Self::Cuda(0)),
            other => {
                let number = |prefix| other.strip_prefix(prefix)?.parse::<u16>().ok();
                let gpu = number("cuda:").map(|ordinal| Self::Cuda(ordinal.into()));
                gpu.or_else(|| number("cpu:").map(|node| Self::CpuNode(node.into())))
                    .ok_or_else(|| DevicesError::Unknown(other.to_owned()))
            }
        }
    }
}

/// The devices of a worker: each has an engine with its own weights and KV blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Devices {
    /// One device, or several: the CPU and GPUs.
    List(Vec<DeviceChoice>),
    /// Every GPU that can run the kernels.
    AllGpus,
}

impl Devices {
    /// Resolves [`Self::AllGpus`] and [`DeviceChoice::Auto`]. The processor becomes a device for each of its memory
    /// nodes, unless the number of threads is given or a control group allows less than all cores: then it is one
    /// device. Returns at least one device.
    ///
    /// # Errors
    /// If all GPUs are requested and none can be used.
    pub fn resolved(
        &self,
        threads: Option<NonZeroUsize>,
    ) -> Result<Vec<DeviceChoice>, CudaLoadError> {
        let Self::List(devices) = self else {
            return usable(cuda::count()?, cuda::usable);
        };
        let nodes = if threads.is_some() { &[] } else { topology::memory_nodes() };
        let limit = topology::core_limit();
        Ok(devices.iter().flat_map(|device| by_node(device.resolved(), nodes, limit)).collect())
    }

    /// Returns whether one of the devices is a GPU.
    pub fn has_gpu(&self) -> bool {
        let is_gpu = |device: &DeviceChoice| matches!(device.resolved(), DeviceChoice::Cuda(_));
        match self {
            Self::List(devices) => devices.iter().any(is_gpu),
            Self::AllGpus => true,
        }
    }

    /// Returns the devices by kind, the CPU first: each kind has its own numerics class.
    pub fn kinds(&self) -> Vec<Self> {
        let Self::List(devices) = self else { return vec![self.clone()] };
        let (cpu, rest): (Vec<_>, Vec<_>) = devices
            .iter()
            .partition(|device| matches!(device, DeviceChoice::Cpu | DeviceChoice::CpuNode(_)));
        [cpu, rest].into_iter().filter(|kind| !kind.is_empty()).map(Self::List).collect()
    }

    /// Returns the devices, if they are of one kind.
    ///
    /// # Errors
    /// If the CPU and GPUs are mixed.
    pub fn one_kind(&self) -> Result<&Self, DevicesError> {
        if self.kinds().len() > 1 { Err(DevicesError::Mixed(self.clone())) } else { Ok(self) }
    }

    /// Returns the device, if there is only one.
    ///
    /// # Errors
    /// If there are several devices.
    pub fn one(&self) -> Result<DeviceChoice, DevicesError> {
        match self {
            Self::List(devices) if devices.len() == 1 => Ok(devices[0]),
            several => Err(DevicesError::Several(several.clone())),
        }
    }
}

/// Returns a device for each memory node, if the device is a processor with several and all their cores may be used.
fn by_node(device: DeviceChoice, nodes: &[MemoryNode], core_limit: usize) -> Vec<DeviceChoice> {
    let cores: usize = nodes.iter().map(|node| node.cores.len()).sum();
    match device {
        DeviceChoice::Cpu if nodes.len() > 1 && cores <= core_limit => {
            nodes.iter().map(|node| DeviceChoice::CpuNode(node.number)).collect()
        }
        device => vec![device],
    }
}

/// Returns the GPUs among the first `count` that can run the kernels. Logs a warning for each that
/// cannot.
fn usable(
    count: usize,
    check: impl Fn(usize) -> Result<(), CudaLoadError>,
) -> Result<Vec<DeviceChoice>, CudaLoadError> {
    let mut found = Vec::new();
    let mut refused = CudaLoadError::NoDevice { ordinal: 0, count };
    for ordinal in 0..count {
        match check(ordinal) {
            Ok(()) => found.push(DeviceChoice::Cuda(ordinal)),
            Err(why) => {
                tracing::warn!(ordinal, %why, "GPU cannot be used");
                refused = why;
            }
        }
    }
    if found.is_empty() { Err(refused) } else { Ok(found) }
}

impl fmt::Display for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::List(devices) = self else { return f.write_str("cuda:all") };
        let names: Vec<String> = devices.iter().map(ToString::to_string).collect();
        f.write_str(&names.join(","))
    }
}

impl FromStr for Devices {
    type Err = DevicesError;

    fn from_str(names: &str) -> Result<Self, DevicesError> {
        if names == "cuda:all" {
            return Ok(Self::AllGpus);
        }
        let devices: Vec<DeviceChoice> =
            names.split(',').map(str::parse).collect::<Result<_, _>>()?;
        for (index, device) in devices.iter().enumerate() {
            if devices.len() > 1 && *device == DeviceChoice::Auto {
                return Err(DevicesError::AutoAmong);
            }
            let overlaps = |other: &DeviceChoice| {
                use DeviceChoice::{Cpu, CpuNode};
                device == other || matches!((device, other), (Cpu, CpuNode(_)) | (CpuNode(_), Cpu))
            };
            if devices[..index].iter().any(overlaps) {
                return Err(DevicesError::Twice(*device));
            }
        }
        Ok(Self::List(devices))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_parsed_as_they_are_displayed() {
        let all = [
            DeviceChoice::Cpu,
            DeviceChoice::CpuNode(1),
            DeviceChoice::Auto,
            DeviceChoice::Cuda(3),
        ];
        for device in all {
            assert_eq!(device.to_string().parse(), Ok(device));
            assert_eq!(device.to_string().parse::<Devices>().expect("one").one(), Ok(device));
        }
        for several in ["cuda:0,cuda:1", "cuda:all", "cpu:0,cpu:2"] {
            let devices: Devices = several.parse().expect("a worker can have several GPUs");
            assert_eq!(devices.to_string(), several);
            let refused = devices.one().expect_err("there are several").to_string();
            assert_eq!(refused, format!("expected one device, not {several}"));
        }
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
        for wrong in [
            "",
            "gpu",
            "cpu:",
            "cpu:-1",
            "cpu:99999",
            "cuda:",
            "cuda:-1",
            "cuda:x",
            "cuda:99999",
            "CPU",
            "cuda:0,",
        ] {
            assert!(matches!(wrong.parse::<Devices>(), Err(DevicesError::Unknown(_))), "{wrong}");
        }
        let refused = |names: &str| names.parse::<Devices>().expect_err("the choice is invalid");
        assert_eq!(refused("auto,cuda:0"), DevicesError::AutoAmong);
        assert_eq!(refused("cuda,cuda:1,cuda:0"), DevicesError::Twice(DeviceChoice::Cuda(0)));
        assert_eq!(refused("cpu:1,cpu"), DevicesError::Twice(DeviceChoice::Cpu));
        assert_eq!(refused("cpu,cpu:1"), DevicesError::Twice(DeviceChoice::CpuNode(1)));
    }

    #[test]
    fn processor_with_several_memory_nodes_is_a_device_for_each() {
        let node = |number| MemoryNode { number, cores: vec![number] };
        let two = [node(0), node(3)];
        let each = [DeviceChoice::CpuNode(0), DeviceChoice::CpuNode(3)];
        assert_eq!(by_node(DeviceChoice::Cpu, &two, 2), each);
        for (device, nodes, core_limit) in [
            (DeviceChoice::Cpu, &two[..1], 2),
            (DeviceChoice::Cpu, &[], 2),
            // A control group allows the time of one core.
            (DeviceChoice::Cpu, &two, 1),
            (DeviceChoice::CpuNode(3), &two, 2),
            (DeviceChoice::Cuda(0), &two, 2),
        ] {
            assert_eq!(by_node(device, nodes, core_limit), [device]);
        }
        let threads = NonZeroUsize::new(2);
        let devices: Devices = "cpu".parse().expect("the processor");
        assert_eq!(devices.resolved(threads).expect("no GPU is needed"), [DeviceChoice::Cpu]);
    }

    #[test]
    fn devices_of_two_kinds_are_two_groups() {
        let devices = |names: &str| names.parse::<Devices>().expect("a valid choice");
        let kinds =
            |names| devices(names).kinds().iter().map(Devices::to_string).collect::<Vec<_>>();
        assert_eq!(kinds("cuda:1,cpu,cuda:0"), ["cpu", "cuda:1,cuda:0"]);
        assert_eq!(kinds("cpu:0,cuda,cpu:1"), ["cpu:0,cpu:1", "cuda:0"]);
        for one in ["cpu", "cpu:0,cpu:1", "auto", "cuda:0,cuda:1", "cuda:all"] {
            assert_eq!(kinds(one), [one]);
            assert!(devices(one).one_kind().is_ok(), "{one}");
        }
        assert!(matches!(devices("cpu,cuda:0").one_kind(), Err(DevicesError::Mixed(_))));
    }

    #[test]
    fn all_gpus_are_those_that_can_be_used() {
        let too_old = || CudaLoadError::TooOld { name: "old".to_owned(), capability: (7, 5) };
        let second = |ordinal| if ordinal == 1 { Ok(()) } else { Err(too_old()) };
        assert_eq!(usable(3, second).expect("one can be used"), [DeviceChoice::Cuda(1)]);
        let none = usable(1, second).expect_err("none can be used");
        assert!(matches!(none, CudaLoadError::TooOld { .. }), "{none}");
        let none = usable(0, second).expect_err("there is no GPU");
        assert!(matches!(none, CudaLoadError::NoDevice { count: 0, .. }), "{none}");
    }
}
