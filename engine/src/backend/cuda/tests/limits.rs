//! The emulated driver rejects every call that the real one rejects. Each limit has a test.

use bytemuck::Zeroable as _;
use cudarc::driver::{
    result,
    sys::{self, CUresult},
};

use super::{
    super::{
        args::{EmbedArgs, LinearArgs, PeakArgs, Segment, Step},
        device::{Args, Device as _, DeviceError, Launch, Part},
        driver::{self, Driver},
        features::FeatureSet,
        modules::{EXTRAS, MODULES, kernels_of},
    },
    emulated_device, ordinals,
};
use crate::backend::cuda::error::CudaLoadError;

/// `peak_fma_f32` without work: it fits everywhere and touches no memory.
fn idle() -> Launch {
    Launch {
        kernel: "peak_fma_f32",
        grid: [1, 1, 1],
        threads: 256,
        shared_bytes: 0,
        args: Args::from_struct(&PeakArgs::zeroed()),
    }
}

/// Returns the driver's name of a call's error; empty if it succeeded.
fn code<T>(result: Result<T, DeviceError>) -> String {
    match result {
        Ok(_) => String::new(),
        Err(DeviceError::Call { code, .. } | DeviceError::Sticky { code, .. }) => code,
        Err(error) => panic!("{error}"),
    }
}

fn wait(device: &mut Driver, at: u64) -> Result<(), DeviceError> {
    device.read(&mut [Part { from: at, to: &mut [0; 4] }])
}

/// Loads one module beside those of a device, and returns one of its kernels.
fn function(module: &str, kernel: &str) -> sys::CUfunction {
    let module = MODULES.iter().find(|one| one.name == module).expect("a known module");
    let (_, image) = module.images((9, 0), true).pop().expect("every module has PTX");
    let name = std::ffi::CString::new(kernel).expect("names have no zeros");
    // SAFETY: the image is PTX that ends with a zero; the tests keep a context current.
    unsafe {
        let loaded = result::module::load_data(image.as_ptr().cast()).expect("the PTX loads");
        result::module::get_function(loaded, name).expect("the module has the kernel")
    }
}

#[test]
fn dynamic_shared_memory_is_what_the_static_part_leaves() {
    for (ordinal, limit) in [(ordinals::SM_90, 227 << 10), (ordinals::SM_80, 163 << 10)] {
        let Some(mut device) = emulated_device(ordinal) else { return };
        assert_eq!(device.properties().shared_bytes, limit);
        // 40 KiB of static memory; machine code for 9.0 counts the driver's own KiB, too.
        let left = device.shared_bytes("attend_values_f16");
        assert!((limit - (42 << 10)..=limit - (40 << 10)).contains(&left), "{left}");
        assert_eq!(device.shared_bytes("peak_fma_f32"), limit);
        assert_eq!(device.shared_bytes("unknown"), 0);
        let launch = |shared_bytes| Launch { shared_bytes, ..idle() };
        assert_eq!(code(device.launch(&launch(limit))), "");
        assert_eq!(code(device.launch(&launch(limit + 1))), "CUDA_ERROR_INVALID_VALUE");
    }
}

#[test]
fn more_dynamic_shared_memory_than_left_is_refused() {
    let Some(_device) = emulated_device(ordinals::SM_90) else { return };
    let function = function("attend_split", "attend_values_f16");
    let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // SAFETY: the function's module stays loaded.
    let set =
        |bytes| unsafe { result::function::set_function_attribute(function, attribute, bytes) };
    let optin = 227 << 10;
    assert!(set(optin - (40 << 10)).is_ok());
    let refused = set(optin - (40 << 10) + 1).expect_err("static and dynamic exceed the limit");
    assert_eq!(refused.0, CUresult::CUDA_ERROR_INVALID_VALUE);
    // An earlier version of the driver code made this call for every kernel.
    assert!(set(optin - (12 << 10)).is_err());
}

#[test]
fn a_kernel_that_did_not_opt_in_has_48_kib() {
    let Some(_device) = emulated_device(ordinals::SM_90) else { return };
    let stream = result::stream::create(result::stream::StreamKind::NonBlocking);
    let stream = stream.expect("a context is current");
    let args = [0u64; 24];
    let function = function("peaks", "peak_fma_f32");
    let launch = |shared: u32| {
        let mut parameters = [args.as_ptr().cast_mut().cast()];
        let (grid, block) = ((1, 1, 1), (32, 1, 1));
        // SAFETY: the kernel takes 32 bytes and does nothing with zeros.
        unsafe { result::launch_kernel(function, grid, block, shared, stream, &mut parameters) }
    };
    assert!(launch(48 << 10).is_ok());
    let refused = launch((48 << 10) + 1).expect_err("the kernel did not opt in");
    assert_eq!(refused.0, CUresult::CUDA_ERROR_INVALID_VALUE);
}

#[test]
fn grids_and_blocks_have_limits() {
    let Some(mut device) = emulated_device(ordinals::SM_90) else { return };
    let invalid = "CUDA_ERROR_INVALID_VALUE";
    let mut grid = |grid| code(device.launch(&Launch { grid, threads: 32, ..idle() }));
    assert_eq!(grid([1, 65_535, 1]), "");
    assert_eq!(grid([1, 65_536, 1]), invalid);
    assert_eq!(grid([1, 1, 65_536]), invalid);
    assert_eq!(grid([1 << 31, 1, 1]), invalid);
    assert_eq!(grid([0, 1, 1]), invalid);
    let mut threads = |kernel, threads| code(device.launch(&Launch { kernel, threads, ..idle() }));
    assert_eq!(threads("peak_fma_f32", 288), invalid, "its launch bounds are 256");
    assert_eq!(threads("screen_select", 1056), invalid);
    assert_eq!(threads("peak_fma_f32", 0), invalid);
    let unknown = device.launch(&Launch { kernel: "nothing", ..idle() });
    assert!(matches!(unknown, Err(DeviceError::UnknownKernel("nothing"))));
}

/// Register counts are from the machine code; launch bounds keep every included kernel within the limit.
#[test]
fn every_kernel_fits_the_registers_of_a_multiprocessor() {
    let Some(_device) = emulated_device(ordinals::SM_90) else { return };
    let mut counted = 0;
    let of_modules = MODULES.iter().map(|module| {
        let kernels: Vec<&str> = kernels_of(module.ptx).collect();
        (kernels, module.images((9, 0), true))
    });
    let of_extras = EXTRAS.iter().map(|extra| (extra.kernels.to_vec(), extra.images((9, 0))));
    for (kernels, images) in of_modules.chain(of_extras) {
        for (kind, image) in images {
            // SAFETY: a context is current; images are complete.
            let loaded = unsafe { result::module::load_data(image.as_ptr().cast()) };
            let loaded = loaded.expect("the image loads");
            for &kernel in &kernels {
                let name = std::ffi::CString::new(kernel).expect("names have no zeros");
                // SAFETY: the module is loaded.
                let attribute = |attribute| unsafe {
                    let function = result::module::get_function(loaded, name.clone());
                    let function = function.expect("both images have every kernel");
                    result::function::get_function_attribute(function, attribute)
                        .expect("the attribute is known")
                };
                use sys::CUfunction_attribute_enum as A;
                let threads = attribute(A::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
                let registers = attribute(A::CU_FUNC_ATTRIBUTE_NUM_REGS);
                assert!(registers > 0 && threads >= 32, "{kernel}: {registers} × {threads}");
                let rounded = (registers as u32 * 32).next_multiple_of(256) / 32;
                assert!(
                    rounded * threads as u32 <= 65_536,
                    "{kernel} ({kind}): {registers} × {threads}"
                );
                counted += 1;
            }
        }
    }
    assert!(counted >= 100, "{counted}");
}

#[test]
fn a_launch_with_more_registers_than_there_are_is_refused() {
    let Some(mut device) = emulated_device(ordinals::SM_90) else { return };
    // PTX of a kernel with many registers, and without launch bounds that limit their number.
    let ptx = "//\n.version 8.1\n.target sm_80\n.address_size 64\n.visible .entry peak_fma_f32(\n\
               \t.param .align 8 .b8 peak_fma_f32_param_0[32]\n)\n.maxntid 64, 1, 1\n{\n}\n\0";
    let stream = result::stream::create(result::stream::StreamKind::NonBlocking);
    let stream = stream.expect("a context is current");
    // SAFETY: the image is PTX that ends with a zero; the kernel takes 32 bytes.
    let launch = |image: &str, threads: u32| unsafe {
        let loaded = result::module::load_data(image.as_ptr().cast()).expect("the PTX loads");
        let kernel = result::module::get_function(loaded, c"peak_fma_f32".to_owned());
        let args = [0u64; 24];
        let mut parameters = [args.as_ptr().cast_mut().cast()];
        let (grid, block) = ((1, 1, 1), (threads, 1, 1));
        result::launch_kernel(kernel.expect("it is there"), grid, block, 0, stream, &mut parameters)
    };
    assert!(launch(ptx, 64).is_ok(), "255 registers of 64 threads");
    let more = ptx.replace(".maxntid 64, 1, 1", ".maxntid 512, 1, 1\n.maxnreg 255");
    let refused = launch(&more, 512).expect_err("255 registers of 512 threads are 130,560");
    assert_eq!(refused.0, CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
    assert_eq!(code(device.launch(&idle())), "", "the context still works");
}

#[test]
fn copies_and_allocations_have_bounds() {
    let Some(mut device) = emulated_device(ordinals::GIBIBYTE) else { return };
    let at = device.allocate(512).expect("512 bytes are free");
    let invalid = "CUDA_ERROR_INVALID_VALUE";
    assert_eq!(code(device.write(at, &[0; 512])), "");
    assert_eq!(code(device.write(at + 1, &[0; 512])), invalid);
    assert_eq!(code(device.write(at - 1, &[0; 2])), invalid);
    assert_eq!(code(device.copy(at, at + 256, 257)), invalid);
    assert_eq!(code(device.read(&mut [Part { from: at + 510, to: &mut [0; 4] }])), invalid);
    let refused = device.allocate(1 << 30).expect_err("half a KiB is taken");
    assert!(matches!(refused, DeviceError::OutOfMemory { .. }), "{refused}");
    assert_eq!(refused.to_string(), "out of device memory: allocating 1073741824 bytes");
    assert_eq!(code(wait(&mut device, at)), "", "the context still works");
}

/// Allocates memory for kernels that read a step and write outputs; its start is a step of one row.
fn step(device: &mut Driver) -> u64 {
    let at = device.allocate(64 << 10).expect("the memory is free");
    let step = Step { rows: 1, ..Step::zeroed() };
    device.write(at, bytemuck::bytes_of(&step)).expect("it was allocated");
    at
}

#[test]
fn a_misaligned_vector_access_is_an_error_that_stays() {
    let Some(mut device) = emulated_device(ordinals::MISALIGNED) else { return };
    let at = step(&mut device);
    // Reads 16 bytes at a time, from 4 bytes after an aligned address.
    let args = PeakArgs { from: at + 4, to: at, count: 64, rounds: 1, unused: 0 };
    let launch = Launch { kernel: "peak_read", args: Args::from_struct(&args), ..idle() };
    device.launch(&launch).expect("errors of kernels are reported by later calls");
    for _ in 0..2 {
        let error = wait(&mut device, at).expect_err("the kernel failed");
        assert!(
            matches!(&error, DeviceError::Sticky { code, .. }
            if code == "CUDA_ERROR_MISALIGNED_ADDRESS"),
            "{error}"
        );
    }
    let error = device.launch(&idle()).expect_err("the error stays");
    assert!(matches!(error, DeviceError::Sticky { .. }), "{error}");
    // Releasing the context clears the error.
    drop(device);
    let mut device =
        driver::open(ordinals::MISALIGNED, FeatureSet::default()).expect("a new context works");
    let at = step(&mut device);
    // The weights of a linear, copied with cp.async.
    let mut args = LinearArgs::zeroed();
    (args.step, args.x, args.scales, args.sums) = (at, at + 1024, at + 2048, at + 2048);
    args.segments[0] = Segment {
        weights: at + 4096 + 8,
        bias: 0,
        out: at + 8192,
        scale: 1.0,
        divide: 0,
        rows: 16,
        stride: 16,
    };
    (args.segment_count, args.k_blocks) = (1, 1);
    let launch = Launch {
        kernel: "linear_n8",
        threads: 32,
        shared_bytes: 6144,
        args: Args::from_struct(&args),
        ..idle()
    };
    device.launch(&launch).expect("errors of kernels are reported by later calls");
    assert_eq!(code(wait(&mut device, at)), "CUDA_ERROR_MISALIGNED_ADDRESS");
}

#[test]
fn an_access_outside_of_allocations_is_an_error_that_stays() {
    let Some(mut device) = emulated_device(ordinals::OUT_OF_BOUNDS) else { return };
    let at = step(&mut device);
    let args = EmbedArgs {
        carried: 0,
        step: at,
        tokens: at,
        table: at + 4096,
        residual: at + (64 << 10) - 256,
        width: 128,
        dtype: 0,
        factor: 1.0,
        unused: 0,
    };
    let launch = Launch { kernel: "embed", args: Args::from_struct(&args), ..idle() };
    device.launch(&launch).expect("errors of kernels are reported by later calls");
    for _ in 0..2 {
        assert_eq!(code(wait(&mut device, at)), "CUDA_ERROR_ILLEGAL_ADDRESS");
    }
}

#[test]
fn calls_that_wait_or_allocate_end_a_capture() {
    let Some(_device) = emulated_device(ordinals::SM_90) else { return };
    let stream = result::stream::create(result::stream::StreamKind::NonBlocking);
    let stream = stream.expect("a context is current");
    let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    // SAFETY: a context is current.
    let allocate = || unsafe { result::malloc_sync(256) }.map(drop).map_err(|error| error.0);
    // SAFETY: the stream lives until the end of the test.
    let wait = || unsafe { result::stream::synchronize(stream) }.map_err(|error| error.0);
    // SAFETY: the stream lives until the end of the test.
    let begin = || unsafe { result::stream::begin_capture(stream, mode) }.map_err(|error| error.0);
    // SAFETY: the stream lives until the end of the test.
    let end = || unsafe { result::stream::end_capture(stream) }.map_err(|error| error.0);
    for forbidden in [&allocate as &dyn Fn() -> Result<(), CUresult>, &wait] {
        begin().expect("nothing captures");
        assert_eq!(begin(), Err(CUresult::CUDA_ERROR_ILLEGAL_STATE));
        assert_eq!(forbidden(), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED));
        assert_eq!(end(), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
        forbidden().expect("the call is allowed again");
    }
    assert_eq!(end(), Err(CUresult::CUDA_ERROR_ILLEGAL_STATE));
}

#[test]
fn a_recording_keeps_its_arguments_and_may_be_empty() {
    let Some(mut device) = emulated_device(ordinals::SM_90) else { return };
    let at = step(&mut device);
    let empty = device.record(&[]).expect("an empty graph is a graph");
    device.replay(empty).expect("it does nothing");
    let (from, to) = (at + 4096, at + 8192);
    device.write(from, bytemuck::cast_slice(&[7.0f32; 32])).expect("it was allocated");
    let args = EmbedArgs {
        step: at,
        tokens: at + 64,
        carried: 0,
        table: from,
        residual: to,
        width: 32,
        dtype: 0,
        factor: 1.0,
        unused: 0,
    };
    device.write(at + 64, &[0; 4]).expect("it was allocated");
    let mut launches = [Launch { kernel: "embed", args: Args::from_struct(&args), ..idle() }];
    let recording = device.record(&launches).expect("the launch is recorded");
    launches.fill(idle());
    device.replay(recording).expect("it runs");
    let mut found = [0f32; 32];
    let parts = &mut [Part { from: to, to: bytemuck::cast_slice_mut(&mut found) }];
    device.read(parts).expect("it ran");
    assert_eq!(found, [7.0; 32]);
    let failed = device.record(&[idle(), Launch { grid: [0, 1, 1], ..idle() }]);
    assert_eq!(code(failed), "CUDA_ERROR_INVALID_VALUE");
    let second = device.record(&[idle()]).expect("a failed recording leaves nothing behind");
    device.forget(&[recording]).expect("nothing runs");
    assert_eq!(device.record(&[idle()]).expect("it is recorded"), recording, "in its place");
    device.replay(second).expect("it is not forgotten");
}

#[test]
fn a_released_context_is_gone_for_every_thread() {
    let Some(device) = emulated_device(ordinals::RELEASED) else { return };
    drop(device);
    let free = result::mem_get_info().expect_err("no context is current");
    assert_eq!(free.0, CUresult::CUDA_ERROR_INVALID_CONTEXT);
    // A device that moves to a thread. Its context stays current on that thread after the last reference
    // is released here.
    let mut device =
        driver::open(ordinals::RELEASED, FeatureSet::default()).expect("the device opens");
    let at = device.allocate(256).expect("it is free");
    let (to_thread, devices) = std::sync::mpsc::channel::<Driver>();
    let (from_thread, used) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        for mut device in devices {
            let at = device.allocate(256);
            from_thread.send((device, at.is_ok())).expect("the test waits");
        }
    });
    to_thread.send(device).expect("the thread waits");
    let (mut device, _) = used.recv().expect("the thread answers");
    wait(&mut device, at).expect("both threads may use it");
    drop(device);
    to_thread
        .send(driver::open(ordinals::RELEASED, FeatureSet::default()).expect("the device opens"))
        .expect("it waits");
    assert!(used.recv().expect("the thread answers").1, "the thread uses the new context");
    drop(to_thread);
    thread.join().expect("the thread ends");
}

#[test]
fn images_are_chosen_by_device_and_ptx_replaces_a_refused_cubin() {
    let kinds = |capability| -> Vec<_> {
        MODULES[0].images(capability, true).into_iter().map(|(kind, _)| kind).collect()
    };
    assert_eq!(
        (kinds((9, 0)), kinds((8, 0)), kinds((10, 0))),
        (vec!["cubin", "ptx"], vec!["ptx"], vec!["ptx"])
    );
    let Some(device) = emulated_device(ordinals::WITHOUT_CUBINS) else { return };
    assert!(device.shared_bytes("embed") > 0, "the PTX was loaded");
    let old =
        driver::open(ordinals::SM_75, FeatureSet::default()).map(drop).expect_err("7.5 is too old");
    assert!(matches!(old, CudaLoadError::TooOld { capability: (7, 5), .. }), "{old}");
    // SAFETY: the image is PTX that ends with a zero; a context is current.
    let load = |image: &str| unsafe { result::module::load_data(image.as_ptr().cast()) };
    let text = ".version 8.1\n.target sm_80\n.visible .entry embed(\n)\n{\n}\n\0";
    assert!(load(text).is_ok());
    let code = |image: &str| load(image).expect_err("the driver refuses it").0;
    assert_eq!(code(&text.replace("8.1", "8.2")), CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
    assert_eq!(code(&text.replace("sm_80", "sm_100")), CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU);
}
