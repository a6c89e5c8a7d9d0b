//! What the backend needs of a device: memory, copies and kernels, all in one order.
//!
//! Calls take effect in the order in which they are made. [`Device::read`] is the only one that waits.

use bytemuck::Pod;

/// An address in device memory; 0 is none.
pub type Address = u64;

/// Words of the largest struct a kernel takes.
const ARGS_WORDS: usize = 24;

/// A kernel's only parameter, as bytes.
#[derive(Debug, Clone, Copy)]
pub struct Args([u64; ARGS_WORDS]);

impl Args {
    /// Copies a struct of `args.cuh`.
    pub fn of<T: Pod>(args: &T) -> Self {
        const { assert!(size_of::<T>() <= ARGS_WORDS * 8, "no kernel takes a larger struct") };
        let mut words = [0; ARGS_WORDS];
        bytemuck::cast_slice_mut(&mut words)[..size_of::<T>()]
            .copy_from_slice(bytemuck::bytes_of(args));
        Self(words)
    }

    /// The struct that was copied.
    pub fn get<T: Pod>(&self) -> T {
        const { assert!(size_of::<T>() <= ARGS_WORDS * 8, "no kernel takes a larger struct") };
        bytemuck::pod_read_unaligned(&bytemuck::cast_slice(&self.0)[..size_of::<T>()])
    }

    /// Where the struct starts.
    pub fn as_ptr(&self) -> *const u64 {
        self.0.as_ptr()
    }
}

/// A kernel and the grid it runs on.
#[derive(Debug, Clone, Copy)]
pub struct Launch {
    /// The kernel's name.
    pub kernel: &'static str,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// The kernel's struct.
    pub args: Args,
}

/// Launches that are replayed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recording(pub usize);

/// What is known of a device before anything is loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Properties {
    /// What the maker calls it.
    pub name: String,
    /// Compute capability.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Dynamic shared memory that every kernel may be given.
    pub shared_bytes: u32,
    /// Memory.
    pub memory_bytes: u64,
    /// Memory that nobody holds.
    pub memory_free_bytes: u64,
}

/// Bytes that a read fills.
pub struct Part<'a> {
    /// Where they are.
    pub from: Address,
    /// Where they go.
    pub to: &'a mut [u8],
}

/// A call that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// Memory was refused.
    #[error("the device has no {bytes} bytes of memory left")]
    OutOfMemory {
        /// What was asked for.
        bytes: usize,
    },
    /// A kernel went wrong: nothing works any more in this process.
    #[error("{doing}: {code}: the device works again in a new process only")]
    Sticky {
        /// The call that reported it; an earlier one may be the cause.
        doing: &'static str,
        /// The driver's name for it.
        code: String,
    },
    /// The device is gone.
    #[error("{doing}: {code}: the device is lost")]
    Lost {
        /// The call that reported it.
        doing: &'static str,
        /// The driver's name for it.
        code: String,
    },
    /// Any other failure.
    #[error("{doing}: {code}")]
    Call {
        /// The call.
        doing: &'static str,
        /// The driver's name for it.
        code: String,
    },
    /// A kernel that is in no module.
    #[error("there is no kernel {0}")]
    UnknownKernel(&'static str),
}

/// A device. Addresses that it is given must lie in what it allocated: kernels follow them unchecked.
pub trait Device: Send {
    /// What it is.
    fn properties(&self) -> &Properties;

    /// Memory that lives as long as the device, aligned to 256 bytes.
    fn allocate(&mut self, bytes: usize) -> Result<Address, DeviceError>;

    /// Copies to the device. The bytes may be reused at once.
    fn write(&mut self, to: Address, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Copies from the device, after all that was asked for before.
    fn read(&mut self, parts: &mut [Part<'_>]) -> Result<(), DeviceError>;

    /// Copies on the device; the two do not overlap.
    fn copy(&mut self, from: Address, to: Address, bytes: usize) -> Result<(), DeviceError>;

    /// Runs a kernel.
    fn launch(&mut self, launch: &Launch) -> Result<(), DeviceError>;

    /// Keeps launches, without running them.
    fn record(&mut self, launches: &[Launch]) -> Result<Recording, DeviceError>;

    /// Runs what was kept.
    fn replay(&mut self, recording: Recording) -> Result<(), DeviceError>;

    /// Forgets everything that was kept.
    fn forget_recordings(&mut self) -> Result<(), DeviceError>;
}
