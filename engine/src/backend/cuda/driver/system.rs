//! The driver's library, its version, and the devices it lists.

use cudarc::driver::{
    DriverError,
    result::{self, device},
    sys::{self, CUresult},
};

use super::{
    super::{
        device::{DeviceError, Properties},
        error::CudaLoadError,
    },
    context::{self, Context},
    failure,
};

/// Oldest driver that accepts the PTX: 1000 · major + 10 · minor. A symbol of the driver is looked up at its
/// first call; this version has all symbols that are called here.
const DRIVER_MIN: i32 = 12_010;
/// Oldest driver whose graphs record which kernels may overlap; with older ones, none does.
const OVERLAP_DRIVER_MIN: i32 = 12_030;
/// Oldest driver with small recordings.
const SMALL_RECORDINGS_DRIVER_MIN: i32 = 12_040;
/// Lowest compute capability that has the instructions of the kernels.
const CAPABILITY_MIN: (u32, u32) = (8, 0);

/// The driver and its devices.
#[derive(Debug)]
pub struct Devices {
    /// Version of CUDA that the driver supports, `major.minor`.
    pub driver: String,
    /// Devices, by ordinal; an error for one that cannot be opened, as when another process has it for itself.
    pub devices: Vec<Result<Properties, DeviceError>>,
}

/// Loads the driver and lists the devices.
///
/// # Errors
/// [`CudaLoadError`]: the driver is missing or too old, or does not start.
pub fn devices() -> Result<Devices, CudaLoadError> {
    let (version, count) = start_driver()?;
    let devices = (0..count).map(|ordinal| {
        let context = Context::new(ordinal).map_err(|error| failure("opening a device", error))?;
        let properties = context.properties();
        properties.map_err(|error| failure("reading device properties", error))
    });
    Ok(Devices {
        driver: format!("{}.{}", version / 1000, version % 1000 / 10),
        devices: devices.collect(),
    })
}

/// Returns the number of devices, usable or not.
///
/// # Errors
/// [`CudaLoadError`]: the driver is missing or too old, or a call failed.
pub fn count() -> Result<usize, CudaLoadError> {
    start_driver().map(|(_, count)| count)
}

/// Checks that a device can run the kernels, without opening it.
///
/// # Errors
/// [`CudaLoadError`]: the requirement that is not met.
pub fn usable(ordinal: usize) -> Result<(), CudaLoadError> {
    let (_, count) = start_driver()?;
    if ordinal >= count {
        return Err(CudaLoadError::NoDevice { ordinal, count });
    }
    let failed = |error| failure("reading device properties", error);
    let device = device::get(ordinal as i32).map_err(failed)?;
    let capability = context::capability(device).map_err(failed)?;
    if capability < CAPABILITY_MIN {
        let name = device::get_name(device).map_err(failed)?;
        return Err(CudaLoadError::TooOld { name, capability });
    }
    Ok(())
}

/// Loads the driver's library; returns its version and the number of devices.
fn start_driver() -> Result<(i32, usize), CudaLoadError> {
    // SAFETY: the call only tries to load the driver's library, which every later call needs.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaLoadError::NoDriver);
    }
    let found = version().map_err(|error| failure("reading the driver's version", error))?;
    if found < DRIVER_MIN {
        return Err(CudaLoadError::DriverTooOld { found, needed: DRIVER_MIN });
    }
    match result::init() {
        Ok(()) => {}
        // A driver without a device reports it here.
        Err(DriverError(CUresult::CUDA_ERROR_NO_DEVICE)) => return Ok((found, 0)),
        Err(error) => return Err(failure("starting the driver", error).into()),
    }
    let count = device::get_count().map_err(|error| failure("counting devices", error))?;
    Ok((found, count.max(0) as usize))
}

/// Returns whether the driver's graphs record which kernels may overlap.
pub fn records_overlap() -> Result<bool, DriverError> {
    version().map(|version| version >= OVERLAP_DRIVER_MIN)
}

/// Returns the device memory that a recorded launch may take, in bytes. Up to CUDA 12.3 it is 64 KiB (PyTorch's notes on
/// CUDA graph trees); later drivers take some 10 KB.
pub fn recorded_launch_bytes() -> Result<u64, DriverError> {
    version().map(|version| if version < SMALL_RECORDINGS_DRIVER_MIN { 64 << 10 } else { 16 << 10 })
}

fn version() -> Result<i32, DriverError> {
    let mut found = 0;
    // SAFETY: the call writes one integer; every driver has it.
    unsafe { sys::cuDriverGetVersion(&raw mut found) }.result().map(|()| found)
}
