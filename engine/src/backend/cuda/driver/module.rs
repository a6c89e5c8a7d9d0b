//! A file of kernels on the device, with the shared memory that each kernel may have; and their launches.

use std::ffi::{CString, c_void};

use cudarc::driver::{
    DriverError,
    result::{function, module},
    sys::{self, CUfunction_attribute_enum as Attribute, CUjit_option_enum as JitOption},
};

use super::super::{
    device::Launch,
    features::{Feature, Features},
    modules::{CUBIN, Image},
};
use crate::formats::memory::AlignedBytes;

/// Bytes of the compiler's messages that are kept.
const LOG_BYTES: usize = 4 << 10;

/// A kernel of a loaded module.
#[derive(Debug, Clone, Copy)]
pub struct Kernel {
    pub function: sys::CUfunction,
    /// Most dynamic shared memory of a block.
    pub dynamic_shared_bytes: u32,
    /// Whether it waits for earlier kernels by itself, so that its launch may start while they run.
    pub overlaps: bool,
}

impl Kernel {
    /// Launches the kernel. With `overlapped`, it starts when all blocks of the kernel before it have started.
    ///
    /// # Safety
    /// The context must be current, the stream must be of it, and the kernel must be the launch's. The addresses in
    /// the kernel's parameter must be valid until the kernel has run. Only a kernel that overlaps may be overlapped.
    pub unsafe fn launch(
        &self,
        launch: &Launch,
        stream: sys::CUstream,
        overlapped: bool,
    ) -> Result<(), DriverError> {
        let mut attributes = [sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        }];
        let [x, y, z] = launch.grid;
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: launch.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared_bytes,
            hStream: stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: overlapped.into(),
        };
        let mut parameters = [launch.args.as_ptr().cast_mut().cast::<c_void>()];
        let (parameters, extra) = (parameters.as_mut_ptr(), std::ptr::null_mut());
        // SAFETY: the caller guarantees handles and addresses. The kernel takes one struct, and `args` is at least as large
        // as the largest one; the driver copies it before it returns.
        unsafe { sys::cuLaunchKernelEx(&raw const config, self.function, parameters, extra) }
            .result()
    }
}

impl Kernel {
    /// Sets the share of a multiprocessor's cache that is shared memory, in percent; 0: the driver chooses.
    ///
    /// # Safety
    /// The context must be current, and the kernel's module loaded.
    pub unsafe fn prefer_shared(&self, percent: usize) -> Result<(), DriverError> {
        const DRIVER_CHOOSES: i32 = -1;
        let percent = if percent == 0 { DRIVER_CHOOSES } else { percent.min(100) as i32 };
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        // SAFETY: guaranteed by the caller.
        unsafe { function::set_function_attribute(self.function, attribute, percent) }
    }
}

/// Loads the first of a module's images that loads; reports the last error. A refused cubin is given up.
///
/// # Safety
/// A context must be current.
pub unsafe fn load(
    module: &str,
    images: Vec<Image>,
    features: &mut Features,
) -> Result<(sys::CUmodule, &'static str), DriverError> {
    let mut result = Err(DriverError(sys::CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU));
    for (kind, image) in images {
        // SAFETY: images are complete cubins, or PTX that ends with a zero; a context is current.
        result =
            unsafe { load_image(&image) }.map(|loaded| (loaded, kind)).map_err(|(error, log)| {
                tracing::warn!(module, kind, error = ?error.0, log, "an image of kernels does not load");
                if kind == CUBIN {
                    features.give_up(Feature::Cubin, format!("{module}: {:?} {log}", error.0));
                }
                error
            });
        if result.is_ok() {
            break;
        }
    }
    result
}

/// Loads one image; returns the compiler's messages with an error.
///
/// # Safety
/// A context must be current; the image must be a cubin, or PTX that ends with a zero.
unsafe fn load_image(image: &AlignedBytes) -> Result<sys::CUmodule, (DriverError, String)> {
    let mut log = vec![0u8; LOG_BYTES];
    let mut options =
        [JitOption::CU_JIT_ERROR_LOG_BUFFER, JitOption::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    // The driver takes numbers as pointers.
    let mut values =
        [log.as_mut_ptr().cast::<c_void>(), std::ptr::without_provenance_mut(LOG_BYTES)];
    let mut loaded = std::ptr::null_mut();
    // SAFETY: guaranteed by the caller; the buffer has as many bytes as the options say.
    let result = unsafe {
        sys::cuModuleLoadDataEx(
            &raw mut loaded,
            image.as_ptr().cast(),
            options.len() as u32,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    };
    result.result().map(|()| loaded).map_err(|error| {
        let text = String::from_utf8_lossy(&log);
        (error, text.trim_end_matches('\0').to_owned())
    })
}

/// Finds kernels of a loaded module, and lets each use all dynamic shared memory that its static part
/// leaves free. `overlaps`: see [`Kernel`].
///
/// # Safety
/// The module must be loaded, and its context current.
pub unsafe fn kernels(
    names: impl Iterator<Item = &'static str>,
    loaded: sys::CUmodule,
    shared_bytes: u32,
    overlaps: bool,
) -> Result<Vec<(&'static str, Kernel)>, DriverError> {
    let kernel_of = |name: &'static str| {
        let terminated = CString::new(name).expect("names have no zeros");
        // SAFETY: the caller guarantees that the module is loaded; the function belongs to it.
        unsafe {
            let function = module::get_function(loaded, terminated)?;
            let attribute = Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
            let used = function::get_function_attribute(function, attribute)?;
            let dynamic_shared_bytes = shared_bytes.saturating_sub(used.max(0) as u32);
            let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let value = dynamic_shared_bytes as i32;
            function::set_function_attribute(function, attribute, value)?;
            Ok((name, Kernel { function, dynamic_shared_bytes, overlaps }))
        }
    };
    names.map(kernel_of).collect()
}
