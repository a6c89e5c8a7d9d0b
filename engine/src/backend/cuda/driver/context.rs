//! A device's primary context. Everything that a process allocates on a device belongs to it.

use cudarc::driver::{
    DriverError,
    result::{self, ctx, device, primary_ctx},
    sys::{self, CUdevice_attribute_enum as Attribute},
};

use crate::backend::cuda::device::Properties;

/// A retained primary context. Dropping the last one of a device destroys the context.
pub struct Context {
    device: sys::CUdevice,
    handle: sys::CUcontext,
}

impl Context {
    /// Retains a device's primary context and makes it current.
    pub fn new(ordinal: usize) -> Result<Self, DriverError> {
        let device = device::get(ordinal as i32)?;
        // SAFETY: the device was just looked up; the context is released when the value is dropped.
        let handle = unsafe { primary_ctx::retain(device) }?;
        let context = Self { device, handle };
        context.make_current()?;
        Ok(context)
    }

    /// Makes the context current on the calling thread.
    ///
    /// It does not compare with the current context first: a primary context that was destroyed and created
    /// again may have the same handle as the old one, which may still be current on a thread.
    pub fn make_current(&self) -> Result<(), DriverError> {
        // SAFETY: the context is retained.
        unsafe { ctx::set_current(self.handle) }
    }

    /// Queries the device's properties.
    pub fn properties(&self) -> Result<Properties, DriverError> {
        let number = |attribute| number(self.device, attribute);
        let (free, all) = result::mem_get_info()?;
        Ok(Properties {
            name: device::get_name(self.device)?,
            capability: capability(self.device)?,
            multiprocessors: number(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_bytes: number(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            memory_bytes: all as u64,
            memory_free_bytes: free as u64,
        })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the context was retained once by this value. No thread keeps using the handle: this one
        // unbinds it, others set their context before every call.
        unsafe {
            let _ = primary_ctx::release(self.device);
            let _ = ctx::set_current(std::ptr::null_mut());
        }
    }
}

/// Returns the device's compute capability.
pub fn capability(device: sys::CUdevice) -> Result<(u32, u32), DriverError> {
    let major = number(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = number(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    Ok((major, minor))
}

fn number(device: sys::CUdevice, attribute: Attribute) -> Result<u32, DriverError> {
    // SAFETY: devices are numbers that the driver handed out; they are never freed.
    let value = unsafe { device::get_attribute(device, attribute) }?;
    Ok(value.max(0) as u32)
}
