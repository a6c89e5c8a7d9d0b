//! A device by the CUDA driver, which is looked for at run time.
//!
//! One context, one stream: calls take effect in the order in which they are made. Uploads and downloads
//! go through pinned memory of this process, so that only [`Device::read`] waits.

use std::{collections::HashMap, ffi::CString, ffi::c_void, sync::Arc};

use cudarc::driver::{
    CudaContext, DriverError,
    result::{self, device as query},
    sys::{self, CUdevice_attribute_enum as Attribute, CUresult},
};

use super::{
    device::{Address, Device, DeviceError, Launch, Part, Properties, Recording},
    error::CudaLoadError,
    modules::{MODULES, kernels_of},
};

/// The oldest driver that takes the PTX: 1000 · major + 10 · minor.
const DRIVER_MIN: i32 = 12_010;
/// The oldest devices that have what the kernels use.
const CAPABILITY_MIN: (u32, u32) = (8, 0);
/// Shared memory of a block that kernels use besides what a launch says.
const STATIC_SHARED_BYTES: u32 = 12 << 10;
/// Pinned memory for uploads and downloads.
const PINNED_BYTES: usize = 32 << 20;

/// The driver and what it drives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Devices {
    /// Version of the driver, `major.minor` of the CUDA that it speaks.
    pub driver: String,
    /// The devices, by number.
    pub devices: Vec<Properties>,
}

/// Looks for the driver and lists the devices.
///
/// # Errors
/// [`CudaLoadError`]: no driver, one that is too old, or one that does not answer.
pub fn devices() -> Result<Devices, CudaLoadError> {
    let (version, count) = start_driver()?;
    let devices = (0..count).map(|ordinal| {
        let context =
            CudaContext::new(ordinal).map_err(|error| failure("opening a device", error))?;
        properties(&context).map_err(|error| failure("asking for properties", error).into())
    });
    Ok(Devices {
        driver: format!("{}.{}", version / 1000, version % 1000 / 10),
        devices: devices.collect::<Result<_, CudaLoadError>>()?,
    })
}

/// How many devices there are, usable or not.
///
/// # Errors
/// [`CudaLoadError`]: no driver, one that is too old, or one that does not answer.
pub fn count() -> Result<usize, CudaLoadError> {
    start_driver().map(|(_, count)| count)
}

/// Loads the driver's library; returns its version and how many devices there are.
fn start_driver() -> Result<(i32, usize), CudaLoadError> {
    // SAFETY: it only tries to load the driver's library, as all that follows would.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaLoadError::NoDriver);
    }
    let mut found = 0;
    // SAFETY: the call writes one integer; every driver has it.
    let asked = unsafe { sys::cuDriverGetVersion(&raw mut found) }.result();
    asked.map_err(|error| failure("asking for the driver's version", error))?;
    if found < DRIVER_MIN {
        return Err(CudaLoadError::DriverTooOld { found, needed: DRIVER_MIN });
    }
    match result::init() {
        Ok(()) => {}
        // A driver without a device says so already here.
        Err(DriverError(CUresult::CUDA_ERROR_NO_DEVICE)) => return Ok((found, 0)),
        Err(error) => return Err(failure("starting the driver", error).into()),
    }
    let count = query::get_count().map_err(|error| failure("counting devices", error))?;
    Ok((found, count.max(0) as usize))
}

/// What the context's device is.
fn properties(context: &Arc<CudaContext>) -> Result<Properties, DriverError> {
    let number = |attribute| context.attribute(attribute).map(|value| value.max(0) as u32);
    let major = number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let shared = number(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
    let (free, all) = context.mem_get_info()?;
    Ok(Properties {
        name: context.name()?,
        capability: (major, minor),
        multiprocessors: number(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_bytes: shared.saturating_sub(STATIC_SHARED_BYTES),
        memory_bytes: all as u64,
        memory_free_bytes: free as u64,
    })
}

/// What a failed call means for what comes after it.
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
        | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED => DeviceError::Sticky { doing, code },
        CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
        | CUresult::CUDA_ERROR_NO_DEVICE
        | CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE
        | CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE
        | CUresult::CUDA_ERROR_SYSTEM_NOT_READY => DeviceError::Lost { doing, code },
        _ => DeviceError::Call { doing, code },
    }
}

/// Whether a device can run the kernels, without opening it.
///
/// # Errors
/// [`CudaLoadError`]: what is missing.
pub fn usable(ordinal: usize) -> Result<(), CudaLoadError> {
    let (_, count) = start_driver()?;
    if ordinal >= count {
        return Err(CudaLoadError::NoDevice { ordinal, count });
    }
    let asked = |error| failure("asking for properties", error);
    let device = query::get(ordinal as i32).map_err(asked)?;
    // SAFETY: the device was just got.
    let number = |attribute| unsafe { query::get_attribute(device, attribute) }.map_err(asked);
    let major = number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?.max(0) as u32;
    let minor = number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?.max(0) as u32;
    if (major, minor) < CAPABILITY_MIN {
        let name = query::get_name(device).map_err(asked)?;
        return Err(CudaLoadError::TooOld { name, capability: (major, minor) });
    }
    Ok(())
}

/// Opens a device and loads the kernels.
pub fn open(ordinal: usize) -> Result<Driver, CudaLoadError> {
    usable(ordinal)?;
    let context =
        CudaContext::new(ordinal).map_err(|error| failure("opening the device", error))?;
    let properties =
        properties(&context).map_err(|error| failure("asking for properties", error))?;
    Ok(Driver::new(context, properties)?)
}

/// A device by the driver.
pub struct Driver {
    context: Arc<CudaContext>,
    properties: Properties,
    stream: sys::CUstream,
    modules: Vec<sys::CUmodule>,
    functions: HashMap<String, sys::CUfunction>,
    allocations: Vec<sys::CUdeviceptr>,
    recordings: Vec<sys::CUgraphExec>,
    pinned: *mut u8, // PINNED_BYTES of them
    /// Of the pinned bytes, those that uploads under way still read.
    pinned_used: usize,
}

// SAFETY: the driver's handles may be used by any thread that has the context, which every call makes
// sure of; the pinned memory is this value's alone.
unsafe impl Send for Driver {}

impl Driver {
    fn new(context: Arc<CudaContext>, properties: Properties) -> Result<Self, DeviceError> {
        let bound = |doing| move |error| failure(doing, error);
        context.bind_to_thread().map_err(bound("binding the context"))?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(bound("making a stream"))?;
        let mut driver = Self {
            context,
            properties,
            stream,
            modules: Vec::new(),
            functions: HashMap::new(),
            allocations: Vec::new(),
            recordings: Vec::new(),
            pinned: std::ptr::null_mut(),
            pinned_used: 0,
        };
        // SAFETY: the context is current; the memory is freed when the value is dropped.
        let pinned = unsafe { result::malloc_host(PINNED_BYTES, 0) };
        driver.pinned = pinned.map_err(bound("pinning memory"))?.cast();
        for (name, ptx) in MODULES {
            driver.load_module(ptx).map_err(|error| {
                tracing::error!(module = name, "a module of kernels does not load");
                failure("loading kernels", error)
            })?;
        }
        Ok(driver)
    }

    fn load_module(&mut self, ptx: &str) -> Result<(), DriverError> {
        let image = CString::new(ptx).expect("PTX is text without zeros");
        // SAFETY: the image is text that ends with a zero; the context is current.
        let module = unsafe { result::module::load_data(image.as_ptr().cast()) }?;
        self.modules.push(module);
        let limit = self.properties.shared_bytes as i32;
        for kernel in kernels_of(ptx) {
            let name = CString::new(kernel).expect("names have no zeros");
            // SAFETY: the module was just loaded, and stays so.
            let function = unsafe { result::module::get_function(module, name) }?;
            let attribute =
                sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is of a loaded module.
            unsafe { result::function::set_function_attribute(function, attribute, limit) }?;
            self.functions.insert(kernel.to_owned(), function);
        }
        Ok(())
    }

    /// Calls the driver with the context current.
    fn call<T>(
        &self,
        doing: &'static str,
        f: impl FnOnce() -> Result<T, DriverError>,
    ) -> Result<T, DeviceError> {
        self.context.bind_to_thread().and_then(|()| f()).map_err(|error| failure(doing, error))
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        let stream = self.stream;
        // SAFETY: the stream lives as long as this value.
        self.call("waiting for the device", || unsafe { result::stream::synchronize(stream) })?;
        self.pinned_used = 0;
        Ok(())
    }

    /// So many pinned bytes that no copy under way uses.
    fn pinned(&mut self, bytes: usize) -> Result<&'static mut [u8], DeviceError> {
        assert!(bytes <= PINNED_BYTES, "callers cut larger copies");
        if self.pinned_used + bytes > PINNED_BYTES {
            self.synchronize()?;
        }
        let start = self.pinned_used;
        self.pinned_used += bytes.next_multiple_of(64);
        // SAFETY: the bytes are within the allocation and handed out once between two waits. The slice
        // is dropped by the callers, all in this file, before the next wait.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.pinned.add(start), bytes) })
    }
}

impl Device for Driver {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn allocate(&mut self, bytes: usize) -> Result<Address, DeviceError> {
        self.call("binding the context", || Ok(()))?;
        // SAFETY: the context is current; the memory is freed when the value is dropped.
        let allocated = unsafe { result::malloc_sync(bytes.max(1)) };
        let address = allocated.map_err(|error| match error.0 {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => DeviceError::OutOfMemory { bytes },
            _ => failure("allocating memory", error),
        })?;
        self.allocations.push(address);
        Ok(address)
    }

    fn write(&mut self, to: Address, bytes: &[u8]) -> Result<(), DeviceError> {
        let stream = self.stream;
        for (index, part) in bytes.chunks(PINNED_BYTES / 2).enumerate() {
            let pinned = self.pinned(part.len())?;
            pinned.copy_from_slice(part);
            let to = to + (index * (PINNED_BYTES / 2)) as u64;
            // SAFETY: callers write where they allocated; the pinned bytes stay as they are until the
            // next wait.
            self.call("copying to the device", || unsafe {
                result::memcpy_htod_async(to, pinned, stream)
            })?;
        }
        Ok(())
    }

    fn read(&mut self, parts: &mut [Part<'_>]) -> Result<(), DeviceError> {
        let stream = self.stream;
        let mut waiting: Vec<(&mut [u8], &[u8])> = Vec::new();
        for Part { from, to } in parts {
            for (index, to) in to.chunks_mut(PINNED_BYTES / 2).enumerate() {
                if self.pinned_used + to.len() > PINNED_BYTES {
                    self.synchronize()?;
                    waiting.drain(..).for_each(|(to, from)| to.copy_from_slice(from));
                }
                let pinned = self.pinned(to.len())?;
                let from = *from + (index * (PINNED_BYTES / 2)) as u64;
                // SAFETY: callers read what they allocated; the pinned bytes are looked at after the wait.
                self.call("copying from the device", || unsafe {
                    result::memcpy_dtoh_async(pinned, from, stream)
                })?;
                waiting.push((to, pinned));
            }
        }
        self.synchronize()?;
        waiting.into_iter().for_each(|(to, from)| to.copy_from_slice(from));
        Ok(())
    }

    fn copy(&mut self, from: Address, to: Address, bytes: usize) -> Result<(), DeviceError> {
        let stream = self.stream;
        // SAFETY: callers copy within what they allocated.
        self.call("copying on the device", || unsafe {
            result::memcpy_dtod_async(to, from, bytes, stream)
        })
    }

    fn launch(&mut self, launch: &Launch) -> Result<(), DeviceError> {
        let function =
            *self.functions.get(launch.kernel).ok_or(DeviceError::UnknownKernel(launch.kernel))?;
        let [x, y, z] = launch.grid;
        let stream = self.stream;
        let mut parameters = [launch.args.as_ptr().cast_mut().cast::<c_void>()];
        // SAFETY: the kernel takes one struct, of which `args` has at least all bytes, and the driver
        // copies it before it returns. What the struct points to is the backend's to get right.
        self.call("launching a kernel", || unsafe {
            let (block, shared) = ((launch.threads, 1, 1), launch.shared_bytes);
            result::launch_kernel(function, (x, y, z), block, shared, stream, &mut parameters)
        })
    }

    fn record(&mut self, launches: &[Launch]) -> Result<Recording, DeviceError> {
        let stream = self.stream;
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as this value.
        self.call("recording", || unsafe { result::stream::begin_capture(stream, mode) })?;
        let launched = launches.iter().try_for_each(|launch| self.launch(launch));
        // SAFETY: as above. A capture is ended also if a launch failed.
        let ended = self.call("recording", || unsafe { result::stream::end_capture(stream) });
        launched?;
        let graph = ended?;
        let flags = sys::CUgraphInstantiate_flags_enum(0);
        // SAFETY: the graph was just captured, and is destroyed once.
        let recording = self.call("recording", || unsafe {
            let made = result::graph::instantiate(graph, flags);
            result::graph::destroy(graph)?;
            made
        })?;
        self.recordings.push(recording);
        Ok(Recording(self.recordings.len() - 1))
    }

    fn replay(&mut self, recording: Recording) -> Result<(), DeviceError> {
        let (graph, stream) = (self.recordings[recording.0], self.stream);
        // SAFETY: recordings live until they are forgotten, which empties the list.
        self.call("replaying", || unsafe { result::graph::launch(graph, stream) })
    }

    fn forget_recordings(&mut self) -> Result<(), DeviceError> {
        self.synchronize()?;
        for graph in std::mem::take(&mut self.recordings) {
            // SAFETY: it is taken from the list, and nothing runs.
            self.call("forgetting recordings", || unsafe { result::graph::exec_destroy(graph) })?;
        }
        Ok(())
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // After an error of the device, nothing can be freed but with the process.
        if self.forget_recordings().is_err() {
            return;
        }
        // SAFETY: nothing runs any more, and each is freed once.
        unsafe {
            for address in self.allocations.drain(..) {
                let _ = result::free_sync(address);
            }
            for module in self.modules.drain(..) {
                let _ = result::module::unload(module);
            }
            if !self.pinned.is_null() {
                let _ = result::free_host(self.pinned.cast());
            }
            let _ = result::stream::destroy(self.stream);
        }
    }
}
