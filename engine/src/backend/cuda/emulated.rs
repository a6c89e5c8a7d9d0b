//! The emulated CUDA driver of `kernels/cuda/emulate`: compiled once, and loaded before the real driver would be. Also the
//! program that compares the kernels with their definitions.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    fs::File,
    os::{fd::AsRawFd as _, unix::ffi::OsStrExt as _},
    path::PathBuf,
    process::Command,
    sync::OnceLock,
};

use super::tests::package;

const SKIPPED: &str = "SKIPPED: this test needs g++ and a processor with AVX2";

/// Returns the folder of the kernels' sources.
fn sources() -> PathBuf {
    package().join("src/kernels/cuda")
}

/// Hashes all files that the emulator is compiled from.
fn fingerprint() -> String {
    let mut hasher = blake3::Hasher::new();
    let emulator = sources().join("emulate");
    for folder in [sources(), sources().join("experimental"), emulator.join("tests"), emulator] {
        let mut paths: Vec<PathBuf> = std::fs::read_dir(folder)
            .expect("the folder of sources exists")
            .map(|entry| entry.expect("the folder is readable").path())
            .filter(|path| path.is_file())
            .collect();
        paths.sort();
        for path in paths {
            hasher.update(path.as_os_str().as_bytes());
            hasher.update(&std::fs::read(path).expect("the file was listed"));
        }
    }
    hasher.finalize().to_hex()[..16].to_owned()
}

/// Runs a script that compiles to a file beside the test's program, once for all processes. Returns `None` without a compiler,
/// or if the processor lacks the instructions that are compiled for.
fn compiled(script: &str, prefix: &str, suffix: &str) -> Option<PathBuf> {
    if !processor_suffices() {
        return None;
    }
    let program = std::env::current_exe().expect("a process knows its program");
    let folder = program.parent().expect("a program lies in a folder");
    let path = folder.join(format!("{prefix}-{}{suffix}", fingerprint()));
    let lock = folder.join(format!("{prefix}.lock"));
    let lock = File::create(lock).expect("the folder is writable");
    // SAFETY: the descriptor is of an open file, and closing it unlocks.
    let locked = unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX) };
    assert_eq!(locked, 0, "the file can be locked");
    if !path.exists() {
        if let Err(error) = Command::new("g++").arg("--version").output() {
            let required = std::env::var_os("TRITMILL_REQUIRE_ALL").is_some_and(|v| v == "1");
            assert!(!required, "TRITMILL_REQUIRE_ALL=1, and g++ does not start: {error}");
            return None;
        }
        let output = path.with_extension("tmp");
        let mut compile = Command::new("sh");
        compile.arg(sources().join("emulate").join(script)).arg(&output);
        let result = compile.output().expect("a shell exists");
        let message = String::from_utf8_lossy(&result.stderr).into_owned();
        assert!(result.status.success(), "{script} does not compile: {message}");
        std::fs::rename(&output, &path).expect("the folder is writable");
    }
    Some(path)
}

/// Returns whether the processor has the instructions that the emulator is compiled for.
fn processor_suffices() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Loads the emulated driver. Later searches for `libcuda.so` in this process find it, because the dynamic loader
/// compares names with those of loaded libraries first. Returns `false`, and prints why, where it cannot be built.
pub fn load() -> bool {
    library().is_some()
}

/// Returns the address of the emulated driver's handle.
fn library() -> Option<usize> {
    static LOADED: OnceLock<Option<usize>> = OnceLock::new();
    *LOADED.get_or_init(|| {
        let Some(path) = compiled("build.sh", "emulated-libcuda", ".so") else {
            eprintln!("{SKIPPED}");
            return None;
        };
        let path = CString::new(path.as_os_str().as_bytes()).expect("paths have no zeros");
        // SAFETY: the library was built by this file, has no initialisers with effects, and is never unloaded.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!handle.is_null(), "the emulated driver does not load");
        Some(handle.expose_provenance())
    })
}

/// Finds a function of the emulated driver that CUDA does not have.
fn symbol(name: &CStr) -> *mut c_void {
    let handle = library().expect("callers have loaded the driver");
    // SAFETY: the handle is of a library that is never unloaded.
    let found =
        unsafe { libc::dlsym(std::ptr::with_exposed_provenance_mut(handle), name.as_ptr()) };
    assert!(!found.is_null(), "{name:?}");
    found
}

/// Changes the version of the driver that this thread sees.
pub fn set_driver_version(version: c_int) {
    type Set = extern "C" fn(c_int) -> c_int;
    // SAFETY: `driver.cpp` defines the function like this.
    let set = unsafe { std::mem::transmute::<*mut c_void, Set>(symbol(c"emulate_driver_version")) };
    set(version);
}

/// Returns how many launches of a kernel that may start early this thread has made.
pub fn early_launches(kernel: &str) -> c_int {
    type Count = extern "C" fn(*const c_char) -> c_int;
    // SAFETY: `driver.cpp` defines the function like this.
    let count =
        unsafe { std::mem::transmute::<*mut c_void, Count>(symbol(c"emulate_early_launches")) };
    let kernel = CString::new(kernel).expect("names have no zeros");
    count(kernel.as_ptr())
}

#[test]
fn kernels_equal_their_definitions() {
    let Some(program) = compiled("build_tests.sh", "emulated-kernels", "") else {
        eprintln!("{SKIPPED}");
        return;
    };
    let result = Command::new(program).output().expect("the program was just compiled");
    let printed = String::from_utf8_lossy(&result.stdout);
    assert!(result.status.success(), "{printed}");
    assert!(printed.lines().count() >= 8, "every test ran: {printed}");
}
