//! Kernels that start before the kernel before them has ended. The emulated device `CHECKS_WAITS` ends a step with an error
//! if a thread of such a kernel, before its wait, writes anything or reads what any kernel has ever written.

use std::{collections::BTreeSet, sync::Arc};

use bytemuck::Zeroable as _;
use cudarc::driver::{
    result::{module, stream},
    sys::{self, CUresult},
};

use super::{
    super::{
        args::{LinearArgs, PeakArgs, Segment, Step},
        backend::CudaBackend,
        device::{Args, Device as _, Launch, Part as Read},
        emulated,
        experimental::warpgroups,
        load::start,
        modules::{CUBIN, EXTRAS, MODULES, kernels_of},
        tuning::Tuning,
    },
    CudaOptions, GpuKernels, HeadMode, KvType, Limits, LogitsFor, Part,
    attention::with_heads,
    changed_draw, emulated_device,
    equality::{check, on_cpu},
    experimental as options,
    groups::with_digits,
    model, ordinals, part, run, tokens_of,
};
use crate::{backend::Backend, files::Model, kernels::Digits};

/// More rows than any step has.
const ALL: usize = 1 << 20;

/// Tunings that together launch the kernels of every number of rows.
const TUNINGS: [fn(Tuning) -> Tuning; 3] = [
    |default| Tuning { short_blocks: 0, ..default },
    |default| Tuning { few_rows: 0, large_tile_rows: 0, short_blocks: ALL, ..default },
    |default| Tuning {
        few_rows: 0,
        large_tile_rows: ALL,
        split_tasks: 0,
        short_blocks: 0,
        attention_tile_rows: ALL,
        ..default
    },
];

fn load(model: &Model, options: CudaOptions, ordinal: usize) -> Option<CudaBackend> {
    let limits = Limits { rows: 80, whole: 16, screened: 48, ..Limits::default() };
    let device = Box::new(emulated_device(ordinal)?);
    Some(start(model, device, options, limits).expect("the model fits"))
}

/// Runs a prompt, decodes of one row, then decodes of so many sequences, on both.
fn check_steps(
    what: &str,
    model: &Model,
    counts: &[u32],
    cpu: &mut dyn Backend,
    cuda: &mut CudaBackend,
) {
    let all = tokens_of(model, 24, 1);
    for (range, logits) in [
        (0..21, LogitsFor::All),
        (21..22, LogitsFor::largest(1)),
        (22..23, LogitsFor::Last),
        (23..24, LogitsFor::largest(3)),
    ] {
        let parts = [part(&all[range.clone()], range.start, 0, logits)];
        check(&format!("{what}: {range:?}"), cpu, cuda, &parts);
    }
    for &count in counts {
        let prompts: Vec<Part> =
            (0..count).map(|i| part(&[i], 0, 2 + 2 * i, LogitsFor::Nothing)).collect();
        check(&format!("{what}: {count} prompts"), cpu, cuda, &prompts);
        let logits = |i| if i == 5 { LogitsFor::Last } else { LogitsFor::largest(1 + i % 2) };
        let decodes: Vec<Part> =
            (0..count).map(|i| part(&[7 + i], 1, 2 + 2 * i, logits(i as usize))).collect();
        check(&format!("{what}: {count} decodes"), cpu, cuda, &decodes);
    }
    run(cuda, &[part(&all[..1], 0, 0, changed_draw())]);
}

/// Runs a model with every tuning; returns the kernels that have started early.
fn check_model(model: &Arc<Model>, options: CudaOptions) -> Option<BTreeSet<&'static str>> {
    let mut cuda = load(model, options, ordinals::CHECKS_WAITS)?;
    let mut cpu = on_cpu(model, options);
    for (index, of) in TUNINGS.into_iter().enumerate() {
        let tuning = of(Tuning { overlap_rows: ALL, ..Tuning::EXPERIMENTAL });
        cuda.set_tuning(tuning).expect("the device works");
        // It compares all products of warpgroups, which overlap here, too.
        warpgroups::choose(&mut cuda).expect("the device works");
        let what = format!("{}, {options:?}, tuning {index}", model.name());
        let counts: &[u32] = if index == 0 { &[8, 12, 24, 40] } else { &[8] };
        check_steps(&what, model, counts, cpu.as_mut(), &mut cuda);
    }
    Some(carried().filter(|kernel| emulated::early_launches(kernel) > 0).collect())
}

fn carried() -> impl Iterator<Item = &'static str> {
    let extras = EXTRAS.iter().flat_map(|extra| extra.kernels.iter().copied());
    MODULES.iter().flat_map(|module| kernels_of(module.ptx)).chain(extras)
}

#[test]
fn every_kernel_waits_before_it_touches_what_earlier_ones_do() {
    let mut early = BTreeSet::new();
    for (name, kv, head) in [
        ("bitnet-online-tiny", KvType::F16, HeadMode::Exact),
        ("bitnet-tiny", KvType::Q8, HeadMode::Q8),
        ("llama-norm-tiny", KvType::F32, HeadMode::Exact),
        ("gguf/synth-i2_s.gguf", KvType::F16, HeadMode::Exact),
        ("gguf/synth-i2_s-q6k.gguf", KvType::Q8, HeadMode::Exact),
    ] {
        let Some(some) = check_model(&model(name), options(kv, head)) else { return };
        early.extend(some);
    }
    for digits in Digits::ALL {
        let kernels = GpuKernels::Experimental;
        let options = CudaOptions { kernels, ..with_digits(digits, KvType::F16) };
        early.extend(check_model(&model("qwen3-group-tiny"), options).expect("it was emulated"));
    }
    let (_folder, wide) = with_heads(2, 1, 256);
    let options = options(KvType::Q8, HeadMode::Exact);
    early.extend(check_model(&wide, options).expect("it was emulated"));
    // The first kernel of a pass, and those that no step launches.
    early.extend(["embed", "embed_ternary", "peak_read", "peak_mma_s8", "peak_fma_f32"]);
    // A head in int8 is not screened: it is as small as the copy.
    early.insert("rescore_i8");
    assert_eq!(early, carried().collect());
}

#[test]
fn passes_of_few_rows_overlap_where_images_and_driver_support_it() {
    const OLD: i32 = 12_010;
    const NEW: i32 = 12_030;
    let (model, options) = (model("bitnet-tiny"), options(KvType::F16, HeadMode::Exact));
    let mut seen = 0;
    for (ordinal, version, overlaps) in [
        (ordinals::SM_90, OLD, false),
        (ordinals::SM_80, NEW, false),
        (ordinals::WITHOUT_CUBINS, NEW, false),
        (ordinals::SM_90, NEW, true),
    ] {
        if !emulated::load() {
            return;
        }
        emulated::set_driver_version(version);
        let Some(mut cuda) = load(&model, options, ordinal) else { return };
        let mut cpu = on_cpu(&model, options);
        let mut early = |parts: &[Part]| {
            check("a step", cpu.as_mut(), &mut cuda, parts);
            let all = carried().map(emulated::early_launches).sum::<i32>();
            all - std::mem::replace(&mut seen, all)
        };
        // The test at load overlaps, too.
        early(&[part(&[3], 0, 20, LogitsFor::Last)]);
        let many = early(&[0, 5].map(|block| part(&[3; 35], 0, block, LogitsFor::Last)));
        assert_eq!(many, 0, "70 rows");
        let one = early(&[part(&[4], 35, 0, LogitsFor::largest(1))]);
        // Two layers of six kernels, and the head's five.
        assert_eq!(one > 10, overlaps, "{version}: {one}");
    }
}

/// `peak_fma_f32` without work.
fn idle() -> Launch {
    Launch {
        kernel: "peak_fma_f32",
        grid: [2, 1, 1],
        threads: 32,
        shared_bytes: 0,
        args: Args::from_struct(&PeakArgs::zeroed()),
    }
}

#[test]
fn a_kernel_overlaps_a_kernel_and_nothing_else() {
    let Some(mut device) = emulated_device(ordinals::CHECKS_WAITS) else { return };
    let at = device.allocate(512).expect("the memory is free");
    let before = emulated::early_launches(idle().kernel);
    let early = || emulated::early_launches(idle().kernel) - before;
    (0..3).for_each(|_| device.launch(&idle()).expect("it is launched"));
    assert_eq!(early(), 0, "no kernel does at first");
    device.let_overlap(true);
    (0..2).for_each(|_| device.launch(&idle()).expect("it is launched"));
    assert_eq!(early(), 2);
    device.write(at, &[0; 4]).expect("it is allocated");
    device.launch(&idle()).expect("it is launched");
    device.copy(at, at + 256, 256).expect("it is allocated");
    device.launch(&idle()).expect("it is launched");
    let reading = device.begin_read(at, 4).expect("it is allocated");
    device.launch(&idle()).expect("it is launched");
    device.finish_read(reading, &mut Vec::new()).expect("kernels run");
    device.read(&mut [Read { from: at, to: &mut [0; 4] }]).expect("kernels run");
    assert_eq!(early(), 2, "after copies");
    let recording = device.record(&[idle(); 3]).expect("it is recorded");
    assert_eq!(early(), 4, "two of a recording of three");
    device.launch(&idle()).expect("it is launched");
    device.replay(recording).expect("it runs");
    device.launch(&idle()).expect("it is launched");
    assert_eq!(early(), 4, "around recordings");
    device.read(&mut [Read { from: at, to: &mut [0; 4] }]).expect("kernels run");
}

#[test]
fn a_driver_that_records_no_overlap_runs_the_pass_without() {
    let Some(mut device) = emulated_device(ordinals::SM_90) else { return };
    let before = emulated::early_launches(idle().kernel);
    let early = || emulated::early_launches(idle().kernel) - before;
    device.let_overlap(true);
    // The driver was newer when the device was opened.
    emulated::set_driver_version(12_020);
    let recording = device.record(&[idle(); 3]).expect("it is recorded at the second attempt");
    device.replay(recording).expect("it runs");
    (0..2).for_each(|_| device.launch(&idle()).expect("it is launched"));
    assert_eq!(early(), 0);
    let failed = device.record(&[Launch { threads: 0, ..idle() }]);
    assert!(failed.is_err(), "other errors are reported");
}

/// `linear_n8` requests its weights before it waits. Here, a kernel has written them.
#[test]
fn an_access_before_the_wait_is_an_error() {
    let Some(mut device) = emulated_device(ordinals::EARLY_ACCESS) else { return };
    let (inputs, outputs) = (device.allocate(8192), device.allocate(8192));
    let (inputs, outputs) = (inputs.expect("it is free"), outputs.expect("it is free"));
    let step = Step { rows: 1, ..Step::zeroed() };
    device.write(inputs, bytemuck::bytes_of(&step)).expect("it is allocated");
    let launch = |weights, out| {
        let mut args = LinearArgs::zeroed();
        (args.step, args.x, args.scales, args.sums) = (inputs, inputs, inputs, inputs);
        let of_rows =
            Segment { weights, out, scale: 1.0, rows: 16, stride: 16, ..Segment::zeroed() };
        (args.segments[0], args.segment_count, args.k_blocks) = (of_rows, 1, 1);
        let (shared_bytes, args) = (6144, Args::from_struct(&args));
        Launch { kernel: "linear_n8", grid: [1, 1, 1], shared_bytes, args, ..idle() }
    };
    device.let_overlap(true);
    let mut run = |weights, out| {
        device.launch(&launch(weights, out)).expect("errors of kernels are reported later");
        device.launch(&launch(weights, out)).expect("errors of kernels are reported later");
        let read = device.read(&mut [Read { from: inputs, to: &mut [0; 4] }]);
        read.map_err(|error| error.to_string())
    };
    assert_eq!(run(inputs + 4096, outputs), Ok(()));
    let error = run(outputs + 4096, outputs).expect_err("the first has written there");
    assert!(error.contains("CUDA_ERROR_LAUNCH_FAILED"), "{error}");
}

#[test]
fn launches_that_could_not_wait_are_refused() {
    let Some(_device) = emulated_device(ordinals::SM_90) else { return };
    let stream = stream::create(stream::StreamKind::NonBlocking).expect("a context is current");
    let module = MODULES.iter().find(|module| module.name == "peaks").expect("a known module");
    let function = |kind| {
        let images = module.images((9, 0), true);
        let (_, image) = images.iter().find(|image| image.0 == kind).expect("there are both");
        // SAFETY: the images are complete, PTX ends with a zero, and a context is current.
        unsafe {
            let loaded = module::load_data(image.as_ptr().cast()).expect("the image loads");
            module::get_function(loaded, c"peak_fma_f32".to_owned()).expect("both images have it")
        }
    };
    let (cubin, ptx) = (function(CUBIN), function("ptx"));
    let launch = |function, id, allowed| {
        let value = sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: allowed };
        let mut attribute = sys::CUlaunchAttribute { id, pad: [0; 4], value };
        let config = sys::CUlaunchConfig {
            gridDimX: 1,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: 32,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            hStream: stream,
            attrs: &raw mut attribute,
            numAttrs: 1,
        };
        let args = PeakArgs::zeroed();
        let mut parameters = [(&raw const args).cast_mut().cast()];
        let (parameters, extra) = (parameters.as_mut_ptr(), std::ptr::null_mut());
        // SAFETY: the handles are valid; the kernel takes this struct and does nothing with zeros.
        unsafe { sys::cuLaunchKernelEx(&raw const config, function, parameters, extra) }
    };
    use sys::CUlaunchAttributeID as Id;
    let early = Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    let priority = Id::CU_LAUNCH_ATTRIBUTE_PRIORITY;
    assert_eq!(launch(cubin, early, 1), CUresult::CUDA_SUCCESS);
    assert_eq!(launch(cubin, early, 2), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(launch(cubin, priority, 1), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(launch(ptx, early, 0), CUresult::CUDA_SUCCESS);
    assert_eq!(launch(ptx, early, 1), CUresult::CUDA_ERROR_NOT_SUPPORTED);
    let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    // SAFETY: the stream lives until the end of the test.
    let begin = || unsafe { stream::begin_capture(stream, mode) }.expect("no stream captures");
    // SAFETY: the stream lives until the end of the test.
    let end = || unsafe { stream::end_capture(stream) }.expect("the stream captures");
    for (version, result) in
        [(12_030, CUresult::CUDA_SUCCESS), (12_020, CUresult::CUDA_ERROR_NOT_SUPPORTED)]
    {
        emulated::set_driver_version(version);
        begin();
        assert_eq!(launch(cubin, early, 1), result, "{version}");
        end();
    }
    assert_eq!(launch(cubin, early, 1), CUresult::CUDA_SUCCESS, "outside of captures");
}

/// The wait in machine code of 9.0, and instructions that access memory: opcodes without the bits of their form.
const WAIT: u64 = 0x2e;
const LOAD: u64 = 0x181;
const COPY_ASYNC: u64 = 0x1ae;
const OTHERS: [u64; 6] = [0x180, 0x185, 0x186, 0x18a, 0x18e, 0x1a8];
/// Leaves a kernel; with the bits of its form.
const EXIT: u64 = 0x94d;

/// Returns the machine code of each kernel in a cubin, as pairs of words.
fn code_of(cubin: &'static [u8]) -> impl Iterator<Item = (&'static str, &'static [u8])> {
    let number = |at: usize, bytes: usize| {
        cubin[at..at + bytes].iter().rev().fold(0, |n, byte| n << 8 | usize::from(*byte))
    };
    let section = move |index: usize| number(0x28, 8) + 64 * index;
    let contents = move |index: usize| number(section(index) + 0x18, 8);
    let names = contents(number(0x3e, 2));
    (0..number(0x3c, 2)).filter_map(move |index| {
        let name = &cubin[names + number(section(index), 4)..];
        let name = name.split(|byte| *byte == 0).next().and_then(|n| str::from_utf8(n).ok())?;
        let size = number(section(index) + 0x20, 8);
        Some((name.strip_prefix(".text.")?, &cubin[contents(index)..][..size]))
    })
}

/// The compiler has left the wait where the source has it: ahead of everything but requests of weights.
#[test]
fn machine_code_waits_before_it_accesses_memory() {
    let mut kernels = 0;
    let cubins = MODULES.iter().map(|module| module.cubin);
    let cubins = cubins.chain(EXTRAS.iter().map(|extra| extra.cubin));
    for (kernel, code) in cubins.flat_map(code_of) {
        let words = code.chunks_exact(16).map(|instruction| {
            u64::from_le_bytes(instruction[..8].try_into().expect("eight of sixteen bytes"))
        });
        let words: Vec<u64> = words.collect();
        let is_wait = |word: &u64| word & 0x1ff == WAIT;
        let at = words.iter().position(is_wait).unwrap_or_else(|| panic!("{kernel} never waits"));
        assert_eq!(words[at] >> 12 & 0xf, 7, "{kernel}: the wait has no condition");
        let before = |opcode| words[..at].iter().filter(|word| *word & 0x1ff == opcode).count();
        assert!(OTHERS.iter().all(|opcode| before(*opcode) == 0), "{kernel}");
        assert!(words[..at].iter().all(|word| word & 0xfff != EXIT), "{kernel}");
        let few = ["linear_n", "gate_n", "linear_one", "gate_one", "screen_n"];
        let copies = few.iter().any(|prefix| kernel.starts_with(prefix));
        assert_eq!(before(COPY_ASYNC) > 0, copies, "{kernel}");
        let loads = ["group_n", "linear_one", "gate_one", "norm_quantize"];
        let loads = loads.iter().any(|prefix| kernel.starts_with(prefix));
        assert_eq!(before(LOAD) > 0, loads, "{kernel}");
        kernels += 1;
    }
    assert_eq!(kernels, carried().count());
}
