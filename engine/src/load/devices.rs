//! Which devices a model runs on: one, or several GPUs of a worker.

use std::{fmt, str::FromStr, sync::OnceLock};

use crate::backend::cuda::{self, CudaLoadError};

/// Where a model runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceChoice {
    /// On the processor.
    #[default]
    Cpu,
    /// On the GPU of that number, or not at all.
    Cuda(usize),
    /// On the first GPU, if there is one that can run the kernels, else on the processor.
    Auto,
}

impl DeviceChoice {
    /// Looks for a GPU where that is left open, once in a process, and says if there is none.
    pub fn resolved(self) -> Self {
        static FOUND: OnceLock<bool> = OnceLock::new();
        if self != Self::Auto {
            return self;
        }
        let found = *FOUND.get_or_init(|| match cuda::usable(0) {
            Ok(()) => true,
            Err(why) => {
                tracing::warn!(%why, "no GPU to run on: running on the CPU");
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
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            Self::Auto => f.write_str("auto"),
        }
    }
}

/// A choice of devices that cannot be meant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DevicesError {
    /// None of the known names.
    #[error(
        "unknown device '{0}' (expected cpu, auto, cuda:0, cuda:1, …, several as in cuda:0,cuda:1, or \
         cuda:all)"
    )]
    Unknown(String),
    /// The processor beside GPUs.
    #[error(
        "{0} is no GPU, and only GPUs go together: the others' answers may differ (another numerics \
         class), so start a worker for each"
    )]
    Mixed(DeviceChoice),
    /// The same device again.
    #[error("{0} is named twice")]
    Twice(DeviceChoice),
    /// More than one where one is needed.
    #[error("one device is needed here, not {0}")]
    Several(Devices),
}

impl FromStr for DeviceChoice {
    type Err = DevicesError;

    fn from_str(name: &str) -> Result<Self, DevicesError> {
        match name {
            "cpu" => Ok(Self::Cpu),
            "auto" => Ok(Self::Auto),
            "cuda" => Ok(Self::Cuda(0)),
            other => other
                .strip_prefix("cuda:")
                .and_then(|ordinal| ordinal.parse::<u16>().ok())
                .map(|ordinal| Self::Cuda(ordinal.into()))
                .ok_or_else(|| DevicesError::Unknown(other.to_owned())),
        }
    }
}

/// The devices of a worker: an engine for each, with weights and KV blocks of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Devices {
    /// These: any one, or several GPUs.
    These(Vec<DeviceChoice>),
    /// Every GPU that can run the kernels.
    AllGpus,
}

impl Devices {
    /// The devices' names, at least one. Looks for GPUs where that is left open.
    ///
    /// # Errors
    /// [`CudaLoadError`] when all GPUs are wanted and there is none that will do.
    pub fn resolved(&self) -> Result<Vec<DeviceChoice>, CudaLoadError> {
        let Self::These(devices) = self else {
            return usable(cuda::count()?, cuda::usable);
        };
        Ok(devices.iter().map(|device| device.resolved()).collect())
    }

    /// The only device.
    ///
    /// # Errors
    /// [`DevicesError::Several`].
    pub fn one(&self) -> Result<DeviceChoice, DevicesError> {
        match self {
            Self::These(devices) if devices.len() == 1 => Ok(devices[0]),
            several => Err(DevicesError::Several(several.clone())),
        }
    }
}

/// Of so many GPUs, those that can run the kernels; those that cannot are told of.
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
                tracing::warn!(ordinal, %why, "a GPU that will not do");
                refused = why;
            }
        }
    }
    if found.is_empty() { Err(refused) } else { Ok(found) }
}

impl fmt::Display for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::These(devices) = self else { return f.write_str("cuda:all") };
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
            if devices.len() > 1 && !matches!(device, DeviceChoice::Cuda(_)) {
                return Err(DevicesError::Mixed(*device));
            }
            if devices[..index].contains(device) {
                return Err(DevicesError::Twice(*device));
            }
        }
        Ok(Self::These(devices))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_as_they_are_written() {
        for device in [DeviceChoice::Cpu, DeviceChoice::Auto, DeviceChoice::Cuda(3)] {
            assert_eq!(device.to_string().parse(), Ok(device));
            assert_eq!(device.to_string().parse::<Devices>().expect("one").one(), Ok(device));
        }
        for several in ["cuda:0,cuda:1", "cuda:all"] {
            let devices: Devices = several.parse().expect("a worker may have them");
            assert_eq!(devices.to_string(), several);
            let refused = devices.one().expect_err("it is more than one").to_string();
            assert_eq!(refused, format!("one device is needed here, not {several}"));
        }
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
        for wrong in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:99999", "CPU", "cuda:0,"] {
            assert!(matches!(wrong.parse::<Devices>(), Err(DevicesError::Unknown(_))), "{wrong}");
        }
        let refused = |names: &str| names.parse::<Devices>().expect_err("it cannot be meant");
        assert_eq!(refused("cuda:0,cpu"), DevicesError::Mixed(DeviceChoice::Cpu));
        assert_eq!(refused("auto,cuda:0"), DevicesError::Mixed(DeviceChoice::Auto));
        assert_eq!(refused("cuda,cuda:1,cuda:0"), DevicesError::Twice(DeviceChoice::Cuda(0)));
    }

    #[test]
    fn all_gpus_are_those_that_will_do() {
        let too_old = || CudaLoadError::TooOld { name: "old".to_owned(), capability: (7, 5) };
        let second = |ordinal| if ordinal == 1 { Ok(()) } else { Err(too_old()) };
        assert_eq!(usable(3, second).expect("one will do"), [DeviceChoice::Cuda(1)]);
        let none = usable(1, second).expect_err("none will do");
        assert!(matches!(none, CudaLoadError::TooOld { .. }), "{none}");
        let none = usable(0, second).expect_err("there is none");
        assert!(matches!(none, CudaLoadError::NoDevice { count: 0, .. }), "{none}");
    }
}
