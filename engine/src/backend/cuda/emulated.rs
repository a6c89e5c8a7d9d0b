//! A device that is this machine's processor: the kernels compiled as C++ (`kernels/cuda/emulate`),
//! device memory that is host memory. For tests of everything but the driver.

use std::{
    ffi::{CString, c_char, c_int, c_void},
    fs::File,
    os::{fd::AsRawFd as _, unix::ffi::OsStrExt as _},
    path::PathBuf,
    process::Command,
    sync::OnceLock,
};

use super::{
    device::{Address, Device, DeviceError, Launch, Part, Properties, Recording},
    tests::package,
};
use crate::formats::memory::AlignedBytes;

type LaunchFn =
    unsafe extern "C" fn(*const c_char, *const u32, *const u32, u32, *mut *mut c_void) -> c_int;

/// The kernels' sources.
fn sources() -> PathBuf {
    package().join("src/kernels/cuda")
}

/// A hash of all that the library is made of.
fn fingerprint() -> String {
    let mut hasher = blake3::Hasher::new();
    for folder in [sources(), sources().join("emulate")] {
        let mut paths: Vec<PathBuf> = std::fs::read_dir(folder)
            .expect("the sources are there")
            .map(|entry| entry.expect("a folder can be read").path())
            .filter(|path| path.is_file())
            .collect();
        paths.sort();
        for path in paths {
            hasher.update(path.as_os_str().as_bytes());
            hasher.update(&std::fs::read(path).expect("a file that was listed"));
        }
    }
    hasher.finalize().to_hex()[..16].to_owned()
}

/// Compiles the library beside the test's program, once for all processes. `None` without a compiler.
fn library() -> Option<PathBuf> {
    let program = std::env::current_exe().expect("a process knows its program");
    let folder = program.parent().expect("a program lies in a folder");
    let path = folder.join(format!("libcuda-emulation-{}.so", fingerprint()));
    let lock = File::create(folder.join("cuda-emulation.lock")).expect("the folder is writable");
    // SAFETY: the descriptor is of an open file, and closing it unlocks.
    assert_eq!(unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX) }, 0, "a lock is to be had");
    if !path.exists() {
        let made = path.with_extension("tmp");
        let flags = "-O2 -std=c++17 -mavx2 -mfma -mf16c -ffp-contract=off -fno-strict-aliasing \
                     -DEMULATE -fPIC -shared -I. emulate/emulate.cpp -o";
        let mut compile = Command::new("g++");
        compile.current_dir(sources()).args(flags.split_whitespace()).arg(&made);
        let output = match compile.output() {
            Ok(output) => output,
            Err(error) => {
                let required = std::env::var_os("TRITMILL_REQUIRE_ALL").is_some_and(|v| v == "1");
                assert!(!required, "TRITMILL_REQUIRE_ALL=1, and g++ does not start: {error}");
                return None;
            }
        };
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "the emulation does not compile: {said}");
        std::fs::rename(&made, &path).expect("the folder is writable");
    }
    Some(path)
}

/// The library's entry. `None` on machines that cannot have it.
fn entry() -> Option<LaunchFn> {
    static ENTRY: OnceLock<Option<LaunchFn>> = OnceLock::new();
    *ENTRY.get_or_init(|| {
        #[cfg(target_arch = "x86_64")]
        let runs = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        #[cfg(not(target_arch = "x86_64"))]
        let runs = false;
        if !runs {
            return None;
        }
        let path = CString::new(library()?.as_os_str().as_bytes()).expect("paths have no zeros");
        // SAFETY: the library was made by this file, has no initialisers, and is never unloaded.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!handle.is_null(), "the emulation does not load");
        // SAFETY: the handle is of a loaded library.
        let symbol = unsafe { libc::dlsym(handle, c"launch".as_ptr()) };
        assert!(!symbol.is_null(), "the emulation has an entry");
        // SAFETY: `emulate.cpp` defines it with this signature.
        Some(unsafe { std::mem::transmute::<*mut c_void, LaunchFn>(symbol) })
    })
}

/// The processor as a device.
pub struct Emulated {
    launch: LaunchFn,
    properties: Properties,
    memory: Vec<AlignedBytes>,
    recordings: Vec<Vec<Launch>>,
}

impl Emulated {
    /// `None`, and a line that says so, where no C++ compiler is installed.
    pub fn new() -> Option<Self> {
        let Some(launch) = entry() else {
            eprintln!("SKIPPED: this test needs g++ and a processor with AVX2");
            return None;
        };
        let properties = Properties {
            name: "emulation".to_owned(),
            capability: (8, 0),
            multiprocessors: 2,
            shared_bytes: 150 << 10,
            memory_bytes: 4 << 30,
            memory_free_bytes: 4 << 30,
        };
        Some(Self { launch, properties, memory: Vec::new(), recordings: Vec::new() })
    }

    /// With so much free memory.
    pub fn with_memory(bytes: u64) -> Option<Self> {
        let mut device = Self::new()?;
        device.properties.memory_free_bytes = bytes;
        Some(device)
    }

    /// Whether so many bytes were allocated.
    fn check(&self, at: Address, bytes: usize) {
        let inside = self.memory.iter().any(|memory| {
            let start = memory.as_ptr() as u64;
            start <= at && at + bytes as u64 <= start + memory.len() as u64
        });
        assert!(inside, "{bytes} bytes at {at:x} are not the device's");
    }
}

impl Device for Emulated {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn allocate(&mut self, bytes: usize) -> Result<Address, DeviceError> {
        let mut memory = AlignedBytes::zeroed((bytes + 256).next_multiple_of(256));
        // What was never written is no number.
        memory.fill(0xff);
        let start = memory.as_ptr() as u64;
        self.memory.push(memory);
        Ok(start.next_multiple_of(256))
    }

    fn write(&mut self, to: Address, bytes: &[u8]) -> Result<(), DeviceError> {
        self.check(to, bytes.len());
        // SAFETY: the bytes are within an allocation, as was just checked, and nobody else's.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, bytes.len()) };
        Ok(())
    }

    fn read(&mut self, parts: &mut [Part<'_>]) -> Result<(), DeviceError> {
        for Part { from, to } in parts {
            self.check(*from, to.len());
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(*from as *const u8, to.as_mut_ptr(), to.len()) };
        }
        Ok(())
    }

    fn copy(&mut self, from: Address, to: Address, bytes: usize) -> Result<(), DeviceError> {
        self.check(from, bytes);
        self.check(to, bytes);
        // SAFETY: as above.
        unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
        Ok(())
    }

    fn launch(&mut self, launch: &Launch) -> Result<(), DeviceError> {
        assert!(launch.grid.iter().all(|n| *n > 0), "{}: an empty grid", launch.kernel);
        assert!(launch.shared_bytes <= self.properties.shared_bytes, "{}", launch.kernel);
        let name = CString::new(launch.kernel).expect("names have no zeros");
        let (grid, block) = (launch.grid, [launch.threads, 1, 1]);
        let mut args = [launch.args.as_ptr().cast_mut().cast::<c_void>()];
        // SAFETY: the struct is the kernel's, and points into this device's memory.
        let code = unsafe {
            let (grid, block) = (grid.as_ptr(), block.as_ptr());
            (self.launch)(name.as_ptr(), grid, block, launch.shared_bytes, args.as_mut_ptr())
        };
        match code {
            0 => Ok(()),
            1 => Err(DeviceError::UnknownKernel(launch.kernel)),
            _ => panic!("{} does not run as {launch:?}", launch.kernel),
        }
    }

    fn record(&mut self, launches: &[Launch]) -> Result<Recording, DeviceError> {
        self.recordings.push(launches.to_vec());
        Ok(Recording(self.recordings.len() - 1))
    }

    fn replay(&mut self, recording: Recording) -> Result<(), DeviceError> {
        for launch in self.recordings[recording.0].clone() {
            self.launch(&launch)?;
        }
        Ok(())
    }

    fn forget_recordings(&mut self) -> Result<(), DeviceError> {
        self.recordings.clear();
        Ok(())
    }
}
