//! The device of the CUDA driver. The driver's library is loaded at run time.
//!
//! One context, one stream: calls take effect in the order in which they are made. Uploads and downloads
//! go through pinned memory of this process, so only reads wait for the device.
//!
//! Rules of the driver that the code follows:
//! - A kernel's dynamic shared memory is at most the device's limit less the kernel's static shared memory.
//! - While a stream captures, its thread may only launch kernels: allocating and waiting are forbidden.
//! - A kernel may overlap the one before it only if its image has the instruction to wait for it: cubins, not PTX.
//! - A launch copies as many bytes of the parameter as the kernel declares, so [`Args`] is at least as large.
//! - After a persistent error, separate calls free nothing: releasing the context frees everything.
//!
//! [`Args`]: super::device::Args

mod context;
mod graphs;
mod module;
mod system;

use std::collections::HashMap;

use cudarc::driver::{
    DriverError, result,
    sys::{self, CUresult},
};

use super::{
    device::{
        Address, Device, DeviceError, Launch, Part, Properties, READING_BYTES, READINGS, Reading,
        Recording,
    },
    error::CudaLoadError,
    features::{Feature, FeatureSet, Features},
    modules::{CUBIN, EXTRAS, MODULES, kernels_of},
};
use context::Context;
use module::Kernel;
pub use system::{Devices, count, devices, usable};

/// Pinned memory for uploads and downloads.
const PINNED_BYTES: usize = 32 << 20;

/// Classifies a failed call.
fn failure(doing: &'static str, error: DriverError) -> DeviceError {
    let code = format!("{:?}", error.0);
    match error.0 {
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
        | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
        | CUresult::CUDA_ERROR_ASSERT
        | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
        | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
        | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
        | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
        | CUresult::CUDA_ERROR_INVALID_PC
        | CUresult::CUDA_ERROR_LAUNCH_FAILED
        | CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK
        | CUresult::CUDA_ERROR_CONTAINED
        | CUresult::CUDA_ERROR_EXTERNAL_DEVICE
        | CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED
        | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
        | CUresult::CUDA_ERROR_UNKNOWN => DeviceError::Sticky { doing, code },
        CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
        | CUresult::CUDA_ERROR_NO_DEVICE
        | CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE
        | CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE
        | CUresult::CUDA_ERROR_SYSTEM_NOT_READY => DeviceError::Lost { doing, code },
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => DeviceError::OutOfMemory { doing: doing.into() },
        _ => DeviceError::Call { doing, code },
    }
}

/// Opens a device and loads the kernels; uses none of some features.
pub fn open(ordinal: usize, disabled: FeatureSet) -> Result<Driver, CudaLoadError> {
    usable(ordinal)?;
    let context = Context::new(ordinal).map_err(|error| failure("opening the device", error))?;
    let properties =
        context.properties().map_err(|error| failure("reading device properties", error))?;
    Ok(Driver::new(context, properties, Features::new(disabled))?)
}

/// An open device.
pub struct Driver {
    properties: Properties,
    features: Features,
    stream: sys::CUstream,
    modules: Vec<sys::CUmodule>,
    kernels: HashMap<&'static str, Kernel>,
    allocations: Vec<sys::CUdeviceptr>,
    recordings: Vec<Option<sys::CUgraphExec>>,
    recorded_launch_bytes: u64,
    pinned: *mut u8, // PINNED_BYTES + READINGS * READING_BYTES bytes
    /// Events after the copies to the last parts of the pinned memory, and the part of the next copy.
    readings: [sys::CUevent; READINGS],
    next_reading: usize,
    /// Pinned bytes that unfinished copies may still use.
    pinned_used: usize,
    /// Whether kernels may overlap, and whether the stream's last call was a launch that the next one may overlap.
    may_overlap: bool,
    after_kernel: bool,
    /// Whether launches are recorded.
    is_recording: bool,
    /// The context. The last field, because it is released after everything else is freed.
    context: Context,
}

// SAFETY: the driver's handles may be used by any thread with the context current, and every call makes it
// current; only this value uses the pinned memory.
unsafe impl Send for Driver {}

impl Driver {
    fn new(
        context: Context,
        properties: Properties,
        features: Features,
    ) -> Result<Self, DeviceError> {
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(|error| failure("creating a stream", error))?;
        let mut driver = Self {
            properties,
            features,
            stream,
            modules: Vec::new(),
            kernels: HashMap::new(),
            allocations: Vec::new(),
            recordings: Vec::new(),
            recorded_launch_bytes: 0,
            pinned: std::ptr::null_mut(),
            readings: [std::ptr::null_mut(); READINGS],
            next_reading: 0,
            pinned_used: 0,
            may_overlap: false,
            after_kernel: false,
            is_recording: false,
            context,
        };
        // SAFETY: the context is current; the memory is freed when the value is dropped.
        let pinned = unsafe { result::malloc_host(PINNED_BYTES + READINGS * READING_BYTES, 0) };
        driver.pinned = pinned.map_err(|error| failure("pinning memory", error))?.cast();
        for event in &mut driver.readings {
            let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
            *event = result::event::create(flags)
                .map_err(|error| failure("creating an event", error))?;
        }
        driver.load_modules().map_err(|error| failure("loading kernels", error))?;
        // The kernels have taken some memory.
        let now = driver.context.properties();
        driver.properties = now.map_err(|error| failure("reading device properties", error))?;
        Ok(driver)
    }

    fn load_modules(&mut self) -> Result<(), DriverError> {
        let Properties { capability, shared_bytes, .. } = self.properties;
        let records_overlap = system::records_overlap()?;
        if !records_overlap {
            self.features.give_up(Feature::Overlap, "the driver's graphs do not record it");
        }
        self.recorded_launch_bytes = system::recorded_launch_bytes()?;
        let has_cubins = self.features.allows(Feature::Cubin);
        for module in MODULES {
            // SAFETY: the context is current.
            let (loaded, kind) = unsafe {
                module::load(module.name, module.images(capability, has_cubins), &mut self.features)
            }?;
            self.modules.push(loaded);
            if kind == CUBIN {
                self.features.count(Feature::Cubin);
            }
            let names = kernels_of(module.ptx);
            let overlaps = self.features.allows(Feature::Overlap) && kind == CUBIN;
            // SAFETY: the module was just loaded.
            let kernels = unsafe { module::kernels(names, loaded, shared_bytes, overlaps) }?;
            self.kernels.extend(kernels);
        }
        for extra in EXTRAS {
            let images = extra.images(capability);
            if images.is_empty() {
                self.features.turn_off(Feature::Warpgroups, "off: the device has none");
            }
            if !self.features.allows(Feature::Warpgroups) {
                break;
            }
            // SAFETY: the context is current.
            let result = unsafe { module::load(extra.name, images, &mut self.features) };
            let (loaded, kind) = match result {
                Ok(loaded) => loaded,
                Err(error) => {
                    let why = format!("its kernels do not load: {:?}", error.0);
                    self.features.give_up(Feature::Warpgroups, why);
                    break;
                }
            };
            self.modules.push(loaded);
            let names = extra.kernels.iter().copied();
            let overlaps = self.features.allows(Feature::Overlap) && kind == CUBIN;
            // SAFETY: the module was just loaded.
            let kernels = unsafe { module::kernels(names, loaded, shared_bytes, overlaps) }?;
            self.kernels.extend(kernels);
        }
        Ok(())
    }

    /// Calls the driver with the context current.
    fn call<T>(
        &self,
        doing: &'static str,
        f: impl FnOnce() -> Result<T, DriverError>,
    ) -> Result<T, DeviceError> {
        self.context.make_current().and_then(|()| f()).map_err(|error| failure(doing, error))
    }

    /// Returns the first bytes of the pinned memory of a reading.
    ///
    /// # Safety
    /// No copy and no other slice uses them.
    unsafe fn reading_part(&self, slot: usize, bytes: usize) -> &'static mut [u8] {
        let start = PINNED_BYTES + slot * READING_BYTES;
        // SAFETY: every part is within the allocation.
        unsafe { std::slice::from_raw_parts_mut(self.pinned.add(start), bytes) }
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        let stream = self.stream;
        // SAFETY: the stream lives as long as this value.
        self.call("waiting for the device", || unsafe { result::stream::synchronize(stream) })?;
        self.pinned_used = 0;
        Ok(())
    }

    /// Returns pinned bytes that no unfinished copy uses; waits for the device if there are too few.
    fn pinned(&mut self, bytes: usize) -> Result<&'static mut [u8], DeviceError> {
        assert!(bytes <= PINNED_BYTES, "callers split larger copies");
        if self.pinned_used + bytes > PINNED_BYTES {
            self.synchronize()?;
        }
        let start = self.pinned_used;
        self.pinned_used += bytes.next_multiple_of(64);
        // SAFETY: the bytes are within the allocation and handed out once between two waits. The callers,
        // all in this file, drop the slice before the next wait.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.pinned.add(start), bytes) })
    }
}

impl Device for Driver {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn features(&self) -> &Features {
        &self.features
    }

    fn features_mut(&mut self) -> &mut Features {
        &mut self.features
    }

    fn shared_bytes(&self, kernel: &str) -> u32 {
        self.kernels.get(kernel).map_or(0, |kernel| kernel.dynamic_shared_bytes)
    }

    fn allocate(&mut self, bytes: usize) -> Result<Address, DeviceError> {
        // SAFETY: the memory is freed when the value is dropped.
        let allocate = || unsafe { result::malloc_sync(bytes.max(1)) };
        let allocated = self.context.make_current().and_then(|()| allocate());
        let address = allocated.map_err(|error| match error.0 {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                DeviceError::OutOfMemory { doing: format!("allocating {bytes} bytes") }
            }
            _ => failure("allocating memory", error),
        })?;
        self.allocations.push(address);
        Ok(address)
    }

    fn write(&mut self, to: Address, bytes: &[u8]) -> Result<(), DeviceError> {
        let stream = self.stream;
        self.after_kernel = false;
        for (index, part) in bytes.chunks(PINNED_BYTES / 2).enumerate() {
            let pinned = self.pinned(part.len())?;
            pinned.copy_from_slice(part);
            let to = to + (index * (PINNED_BYTES / 2)) as u64;
            // SAFETY: callers write to their allocations; the pinned bytes do not change before the next
            // wait.
            self.call("copying to the device", || unsafe {
                result::memcpy_htod_async(to, pinned, stream)
            })?;
        }
        Ok(())
    }

    fn read(&mut self, parts: &mut [Part<'_>]) -> Result<(), DeviceError> {
        let stream = self.stream;
        self.after_kernel = false;
        let mut pending: Vec<(&mut [u8], &[u8])> = Vec::new();
        for Part { from, to } in parts {
            for (index, to) in to.chunks_mut(PINNED_BYTES / 2).enumerate() {
                if self.pinned_used + to.len() > PINNED_BYTES {
                    self.synchronize()?;
                    pending.drain(..).for_each(|(to, from)| to.copy_from_slice(from));
                }
                let pinned = self.pinned(to.len())?;
                let from = *from + (index * (PINNED_BYTES / 2)) as u64;
                // SAFETY: callers read their allocations; the pinned bytes are read after the wait.
                self.call("copying from the device", || unsafe {
                    result::memcpy_dtoh_async(pinned, from, stream)
                })?;
                pending.push((to, pinned));
            }
        }
        self.synchronize()?;
        pending.into_iter().for_each(|(to, from)| to.copy_from_slice(from));
        Ok(())
    }

    fn begin_read(&mut self, from: Address, bytes: usize) -> Result<Reading, DeviceError> {
        assert!(bytes <= READING_BYTES, "callers read larger ranges by `read`");
        let (stream, slot) = (self.stream, self.next_reading);
        self.after_kernel = false;
        self.next_reading = (slot + 1) % READINGS;
        if bytes > 0 {
            // SAFETY: the bytes are a part of the allocation that nothing but readings in this slot uses.
            let to = unsafe { self.reading_part(slot, bytes) };
            // SAFETY: callers read their allocations; the pinned bytes are read after the wait.
            self.call("copying from the device", || unsafe {
                result::memcpy_dtoh_async(to, from, stream)
            })?;
        }
        let event = self.readings[slot];
        // SAFETY: event and stream live as long as this value.
        self.call("recording an event", || unsafe { result::event::record(event, stream) })?;
        Ok(Reading { slot, bytes })
    }

    fn finish_read(&mut self, reading: Reading, to: &mut Vec<u8>) -> Result<(), DeviceError> {
        let event = self.readings[reading.slot];
        // SAFETY: the event lives as long as this value.
        self.call("waiting for the device", || unsafe { result::event::synchronize(event) })?;
        to.clear();
        // SAFETY: the copy has ended, and the next one in this slot has not begun.
        to.extend_from_slice(unsafe { self.reading_part(reading.slot, reading.bytes) });
        Ok(())
    }

    fn copy(&mut self, from: Address, to: Address, bytes: usize) -> Result<(), DeviceError> {
        let stream = self.stream;
        self.after_kernel = false;
        // SAFETY: callers copy within what they allocated.
        self.call("copying on the device", || unsafe {
            result::memcpy_dtod_async(to, from, bytes, stream)
        })
    }

    fn launch(&mut self, launch: &Launch) -> Result<(), DeviceError> {
        let kernel = self.kernels.get(launch.kernel);
        let kernel = *kernel.ok_or(DeviceError::UnknownKernel(launch.kernel))?;
        let overlapped = self.may_overlap && self.after_kernel && kernel.overlaps;
        let stream = self.stream;
        let make = |overlapped| {
            // SAFETY: the context is current, and the stream lives as long as this value. The backend is responsible for the
            // addresses in the parameter.
            self.call("launching a kernel", || unsafe { kernel.launch(launch, stream, overlapped) })
        };
        match make(overlapped) {
            // A recording is made again as a whole.
            Err(error @ DeviceError::Call { .. }) if overlapped && !self.is_recording => {
                make(false)?;
                self.features.give_up(Feature::Overlap, error);
                self.end_overlap();
            }
            result => result?,
        }
        if overlapped {
            self.features.count(Feature::Overlap);
        }
        if launch.kernel.contains("wgmma") {
            self.features.count(Feature::Warpgroups);
        }
        if launch.kernel.starts_with("attend_tile") {
            self.features.count(Feature::Tiles);
        }
        self.after_kernel = true;
        Ok(())
    }

    fn let_overlap(&mut self, allowed: bool) {
        self.may_overlap = allowed;
    }

    fn prefer_shared(&mut self, percent: usize) -> Result<(), DeviceError> {
        self.call("choosing the share of shared memory", || {
            // SAFETY: the context is current, and the kernels are of loaded modules.
            self.kernels.values().try_for_each(|kernel| unsafe { kernel.prefer_shared(percent) })
        })
    }

    fn overlaps(&self) -> bool {
        self.kernels.values().any(|kernel| kernel.overlaps)
    }

    fn end_overlap(&mut self) {
        self.kernels.values_mut().for_each(|kernel| kernel.overlaps = false);
    }

    fn record(&mut self, launches: &[Launch]) -> Result<Recording, DeviceError> {
        self.record_launches(launches)
    }

    fn recorded_launch_bytes(&self) -> u64 {
        self.recorded_launch_bytes
    }

    fn replay(&mut self, recording: Recording) -> Result<(), DeviceError> {
        self.launch_recording(recording)
    }

    fn forget(&mut self, recordings: &[Recording]) -> Result<(), DeviceError> {
        self.destroy_recordings(recordings)
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // After a persistent error, only releasing the context frees anything.
        if self.destroy_all_recordings().is_err() {
            return;
        }
        // SAFETY: the device is idle, and each is freed once.
        unsafe {
            for address in self.allocations.drain(..) {
                let _ = result::free_sync(address);
            }
            for module in self.modules.drain(..) {
                let _ = result::module::unload(module);
            }
            for event in self.readings.into_iter().filter(|event| !event.is_null()) {
                let _ = result::event::destroy(event);
            }
            if !self.pinned.is_null() {
                let _ = result::free_host(self.pinned.cast());
            }
            let _ = result::stream::destroy(self.stream);
        }
    }
}
