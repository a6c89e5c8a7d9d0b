//! The device as the backend uses it: memory, copies and kernels, all in one order.
//!
//! Calls take effect in the order in which they are made. [`Device::read`], [`Device::finish_read`] and [`Device::forget`]
//! are the only ones that wait.

use bytemuck::Pod;

use super::features::Features;

/// An address in device memory; 0 means none.
pub type Address = u64;

/// 64-bit words of the largest struct that a kernel takes.
const ARGS_WORDS: usize = 26;

/// A kernel's only parameter, as bytes.
#[derive(Debug, Clone, Copy)]
pub struct Args([u64; ARGS_WORDS]);

impl Args {
    /// Copies a struct of `args.cuh`.
    pub fn from_struct<T: Pod>(args: &T) -> Self {
        const { assert!(size_of::<T>() <= ARGS_WORDS * 8, "no kernel takes a larger struct") };
        let mut words = [0; ARGS_WORDS];
        bytemuck::cast_slice_mut(&mut words)[..size_of::<T>()]
            .copy_from_slice(bytemuck::bytes_of(args));
        Self(words)
    }

    /// Returns the struct.
    pub fn get<T: Pod>(&self) -> T {
        const { assert!(size_of::<T>() <= ARGS_WORDS * 8, "no kernel takes a larger struct") };
        bytemuck::pod_read_unaligned(&bytemuck::cast_slice(&self.0)[..size_of::<T>()])
    }

    /// Returns the address of the struct.
    pub fn as_ptr(&self) -> *const u64 {
        self.0.as_ptr()
    }
}

/// A kernel and the grid it runs on.
#[derive(Debug, Clone, Copy)]
pub struct Launch {
    /// The kernel's name.
    pub kernel: &'static str,
    /// Blocks in each dimension.
    pub grid: [u32; 3],
    /// Threads per block.
    pub threads: u32,
    /// Dynamic shared memory per block.
    pub shared_bytes: u32,
    /// The kernel's parameter.
    pub args: Args,
}

/// Index of recorded launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recording(pub usize);

/// Properties of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Properties {
    /// Name given by the vendor.
    pub name: String,
    /// Compute capability.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Most shared memory per block, static and dynamic together.
    pub shared_bytes: u32,
    /// Total memory.
    pub memory_bytes: u64,
    /// Free memory when the device was opened.
    pub memory_free_bytes: u64,
}

/// A range of device memory and the bytes it is copied to.
pub struct Part<'a> {
    /// Start of the range.
    pub from: Address,
    /// Destination; its length is the length of the range.
    pub to: &'a mut [u8],
}

/// Most readings at once: of a step's decodes that were begun, of its other rows, and of the decodes that it begins.
pub const READINGS: usize = 3;
/// Most bytes of a [`Reading`].
pub const READING_BYTES: usize = 64 << 10;

/// A copy from the device that was begun. Beginning [`READINGS`] further ones forgets it.
#[derive(Debug, Clone, Copy)]
pub struct Reading {
    pub(super) slot: usize,
    pub(super) bytes: usize,
}

/// A failed call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The device has too little memory.
    #[error("out of device memory: {doing}")]
    OutOfMemory {
        /// What needed the memory.
        doing: String,
    },
    /// A persistent error: every later call of this process fails too.
    #[error("{doing}: {code}: restart the process to use the device again")]
    Sticky {
        /// The call that reported the error; an earlier call may have caused it.
        doing: &'static str,
        /// The driver's name of the error.
        code: String,
    },
    /// The device is lost.
    #[error("{doing}: {code}: the device is lost")]
    Lost {
        /// The call that reported the error.
        doing: &'static str,
        /// The driver's name of the error.
        code: String,
    },
    /// Any other failure.
    #[error("{doing}: {code}")]
    Call {
        /// The call that failed.
        doing: &'static str,
        /// The driver's name of the error.
        code: String,
    },
    /// A kernel that no module contains.
    #[error("unknown kernel `{0}`")]
    UnknownKernel(&'static str),
}

/// A device. Addresses passed to it must lie within its allocations: kernels use them unchecked.
pub trait Device: Send {
    /// Returns the device's properties.
    fn properties(&self) -> &Properties;

    /// Returns what makes steps faster, and whether it is used.
    fn features(&self) -> &Features;

    /// Returns the same, to change it.
    fn features_mut(&mut self) -> &mut Features;

    /// Returns the most dynamic shared memory that a block of a kernel may have; 0 for unknown kernels.
    fn shared_bytes(&self, kernel: &str) -> u32;

    /// Allocates memory, aligned to 256 bytes, that lives as long as the device.
    fn allocate(&mut self, bytes: usize) -> Result<Address, DeviceError>;

    /// Copies to the device. The bytes may change as soon as the call returns.
    fn write(&mut self, to: Address, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Waits for all earlier calls and copies from the device.
    fn read(&mut self, parts: &mut [Part<'_>]) -> Result<(), DeviceError>;

    /// Begins a copy of up to [`READING_BYTES`] bytes from the device, after all earlier calls.
    fn begin_read(&mut self, from: Address, bytes: usize) -> Result<Reading, DeviceError>;

    /// Waits for a copy, and for nothing that was called after it. Replaces `to`.
    fn finish_read(&mut self, reading: Reading, to: &mut Vec<u8>) -> Result<(), DeviceError>;

    /// Copies on the device; the ranges must not overlap.
    fn copy(&mut self, from: Address, to: Address, bytes: usize) -> Result<(), DeviceError>;

    /// Lets the kernels of later launches and recordings start while the kernel before them runs, where device and driver
    /// support it. No kernel does at first.
    fn let_overlap(&mut self, allowed: bool);

    /// Sets the share of a multiprocessor's cache that is shared memory while any of the kernels run, in percent; 0: the driver chooses it
    /// for each kernel, as at first. Recordings made before must be forgotten.
    fn prefer_shared(&mut self, percent: usize) -> Result<(), DeviceError>;

    /// Returns whether any kernel may overlap the one before it.
    fn overlaps(&self) -> bool;

    /// Lets no kernel overlap from now on.
    fn end_overlap(&mut self);

    /// Launches a kernel.
    fn launch(&mut self, launch: &Launch) -> Result<(), DeviceError>;

    /// Records launches, without running them.
    fn record(&mut self, launches: &[Launch]) -> Result<Recording, DeviceError>;

    /// Runs recorded launches.
    fn replay(&mut self, recording: Recording) -> Result<(), DeviceError>;

    /// Returns the device memory that each recorded launch may take, in bytes.
    fn recorded_launch_bytes(&self) -> u64;

    /// Waits for all earlier calls and drops some recordings.
    fn forget(&mut self, recordings: &[Recording]) -> Result<(), DeviceError>;
}
