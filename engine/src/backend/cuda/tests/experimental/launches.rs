//! The kernels that steps of all sizes launch.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
};

use super::{
    super::super::{
        backend::CudaBackend,
        device::{
            Address, Device, DeviceError, Launch, Part as Read, Properties, Reading, Recording,
        },
        features::Features,
        forward::WGMMA,
        load::start,
        modules::{EXTRAS, MODULES, kernels_of},
        tuning::Tuning,
    },
    super::attention::with_heads,
    BLOCKS, CudaOptions, HeadMode, KvType, Limits, LogitsFor, Part, changed_draw, device,
    emulated_device, load, model, options, ordinals, part, run, tokens,
};
use crate::{files::Model, kernels::Digits};

/// Kernels that no step launches: they measure peaks.
const UNUSED: [&str; 3] = ["peak_read", "peak_mma_s8", "peak_fma_f32"];

/// A device that records the names of launched kernels, computes nothing, and fails on request.
struct Listener {
    /// The device that provides the limits of launches.
    real: Box<dyn Device>,
    launched: Arc<Mutex<BTreeSet<&'static str>>>,
    fails: Arc<Mutex<Option<DeviceError>>>,
}

/// Sequences of some tokens each, as one step.
fn prompts(count: usize, tokens_of: usize) -> Vec<Part> {
    (0..count as u32).map(|i| part(&tokens(tokens_of, i), 0, i * 20, LogitsFor::Last)).collect()
}

impl Device for Listener {
    fn properties(&self) -> &Properties {
        self.real.properties()
    }
    fn features(&self) -> &Features {
        self.real.features()
    }
    fn features_mut(&mut self) -> &mut Features {
        self.real.features_mut()
    }
    fn shared_bytes(&self, kernel: &str) -> u32 {
        self.real.shared_bytes(kernel)
    }
    fn allocate(&mut self, _: usize) -> Result<Address, DeviceError> {
        unreachable!("the backend allocates at load only")
    }
    fn write(&mut self, _: Address, _: &[u8]) -> Result<(), DeviceError> {
        Ok(())
    }
    fn read(&mut self, parts: &mut [Read<'_>]) -> Result<(), DeviceError> {
        parts.iter_mut().for_each(|part| part.to.fill(0));
        self.fails.lock().expect("no test panics with it").take().map_or(Ok(()), Err)
    }
    fn begin_read(&mut self, _: Address, bytes: usize) -> Result<Reading, DeviceError> {
        Ok(Reading { slot: 0, bytes })
    }
    fn finish_read(&mut self, reading: Reading, to: &mut Vec<u8>) -> Result<(), DeviceError> {
        to.clear();
        to.resize(reading.bytes, 0);
        self.read(&mut [])
    }
    fn copy(&mut self, _: Address, _: Address, _: usize) -> Result<(), DeviceError> {
        Ok(())
    }
    fn let_overlap(&mut self, _: bool) {}
    fn overlaps(&self) -> bool {
        false
    }
    fn end_overlap(&mut self) {}
    fn prefer_shared(&mut self, _: usize) -> Result<(), DeviceError> {
        Ok(())
    }
    fn launch(&mut self, launch: &Launch) -> Result<(), DeviceError> {
        assert!(launch.threads > 0 && launch.threads.is_multiple_of(32), "{launch:?}");
        assert!(launch.shared_bytes <= self.shared_bytes(launch.kernel), "{launch:?}");
        self.launched.lock().expect("no test panics with it").insert(launch.kernel);
        Ok(())
    }
    fn record(&mut self, launches: &[Launch]) -> Result<Recording, DeviceError> {
        launches.iter().try_for_each(|launch| self.launch(launch))?;
        Ok(Recording(0))
    }
    fn replay(&mut self, _: Recording) -> Result<(), DeviceError> {
        Ok(())
    }
    fn recorded_launch_bytes(&self) -> u64 {
        1
    }
    fn forget(&mut self, _: &[Recording]) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// Puts a [`Listener`] in the place of a backend's device.
fn listen(
    backend: &mut CudaBackend,
    launched: Arc<Mutex<BTreeSet<&'static str>>>,
    fails: Arc<Mutex<Option<DeviceError>>>,
) {
    let real = device().expect("the backend has one, too");
    backend.device = Box::new(Listener { real, launched, fails });
}

fn launched_by(model: &Model, options: CudaOptions) -> Option<BTreeSet<&'static str>> {
    let limits = Limits { rows: 700, whole: 16, screened: 80, ..Limits::default() };
    let mut backend = load(model, options, limits)?;
    let launched = Arc::<Mutex<BTreeSet<_>>>::default();
    listen(&mut backend, launched.clone(), Arc::default());
    for count in [1, 2, 7, 13, 30, 60, 80] {
        let decodes: Vec<_> =
            (0..count).map(|i| part(&[1], 0, (i % BLOCKS) as u32, LogitsFor::largest(2))).collect();
        run(&mut backend, &decodes);
        run(&mut backend, &[part(&tokens(count, 1), 0, 0, LogitsFor::All)]);
    }
    run(&mut backend, &[part(&[1], 0, 0, changed_draw())]);
    // Each kind of attention, whatever the device's number of multiprocessors.
    for (short_blocks, split_tasks) in [(1 << 20, 0), (0, 1 << 20), (0, 0)] {
        let tuning = Tuning { short_blocks, split_tasks, ..Tuning::EXPERIMENTAL };
        backend.set_tuning(tuning).expect("the device works");
        run(&mut backend, &[part(&[1], 0, 0, LogitsFor::largest(1))]);
    }
    // 600 rows, and 100.
    run(&mut backend, &prompts(2, 300));
    for wgmma_rows in [0, 1 << 20] {
        backend
            .set_tuning(Tuning { wgmma_rows, large_tile_rows: 512, ..Tuning::EXPERIMENTAL })
            .expect("nothing is recorded");
        run(&mut backend, &prompts(2, 50));
        run(&mut backend, &prompts(2, 300));
    }
    let launched = launched.lock().expect("no thread panicked").clone();
    Some(launched)
}

#[test]
fn launched_kernels_are_the_carried_ones() {
    let extras = EXTRAS.iter().flat_map(|extra| extra.kernels).copied();
    let carried: BTreeSet<&str> =
        MODULES.iter().flat_map(|module| kernels_of(module.ptx)).chain(extras).collect();
    let mut launched: BTreeSet<&str> = UNUSED.into();
    for (name, kv, head) in [
        ("bitnet-online-tiny", KvType::F16, HeadMode::Exact),
        ("llama-norm-tiny", KvType::F32, HeadMode::Exact),
        ("gguf/synth-i2_s.gguf", KvType::F16, HeadMode::Exact),
        ("gguf/synth-i2_s-q6k.gguf", KvType::F16, HeadMode::Exact),
        ("bitnet-tiny", KvType::Q8, HeadMode::Q8),
    ] {
        let Some(some) = launched_by(&model(name), options(kv, head)) else { return };
        launched.extend(some);
    }
    let (_folder, wide) = with_heads(2, 1, 256);
    launched.extend(launched_by(&wide, options(KvType::Q8, HeadMode::Q8)).expect("as before"));
    for digits in Digits::ALL {
        let options = options(KvType::F16, HeadMode::Exact);
        let options = CudaOptions { activations: Some(digits), ..options };
        launched.extend(
            launched_by(&model("qwen3-group-tiny"), options).expect("it was emulated before"),
        );
    }
    // A head in int8 is not screened: it is as small as the copy.
    launched.insert("rescore_i8");
    // Whether large or small blocks fill the device depends on its number of multiprocessors; the test at load runs both.
    for sizes in [["linear_wgmma", "linear_wgmma64"], ["gate_wgmma", "gate_wgmma64"]] {
        assert!(sizes.iter().any(|kernel| launched.contains(kernel)), "{sizes:?}");
        launched.extend(sizes);
    }
    assert_eq!(launched, carried);
}

/// A device of capability 9.0 has them if its driver takes the machine code; others do without.
#[test]
fn steps_of_many_rows_use_warpgroups_where_the_device_has_them() {
    let (model, options) = (model("bitnet-tiny"), options(KvType::F16, HeadMode::Exact));
    for (ordinal, has) in
        [(ordinals::SM_90, true), (ordinals::SM_80, false), (ordinals::WITHOUT_CUBINS, false)]
    {
        let Some(device) = emulated_device(ordinal) else { return };
        let limits = Limits { rows: 700, ..Limits::default() };
        let mut backend = start(&model, Box::new(device), options, limits).expect("it starts");
        assert_eq!(backend.state.has_warpgroups, has);
        let tuning = Tuning { large_tile_rows: 512, ..Tuning::EXPERIMENTAL };
        backend.set_tuning(tuning).expect("the device works");
        let launched = Arc::<Mutex<BTreeSet<_>>>::default();
        listen(&mut backend, launched.clone(), Arc::default());
        let mut many_rows = |count, tokens| {
            run(&mut backend, &prompts(count, tokens));
            let launched = std::mem::take(&mut *launched.lock().expect("no thread panicked"));
            [WGMMA.linear, "gate_wgmma", "linear_tile", "gate_tile"]
                .map(|name| launched.contains(name))
        };
        assert_eq!(many_rows(2, 300), [has, has, !has, !has]);
        assert_eq!(many_rows(2, 200), [false; 4], "fewer rows");
    }
}

#[test]
fn lost_devices_and_failed_calls_are_different_errors() {
    use crate::backend::{Backend as _, Logits, StepError};
    let options = options(KvType::F16, HeadMode::Exact);
    let Some(mut backend) = load(&model("bitnet-tiny"), options, Limits::default()) else { return };
    let fails = Arc::<Mutex<Option<DeviceError>>>::default();
    listen(&mut backend, Arc::default(), fails.clone());
    let one = part(&[1], 0, 0, LogitsFor::Last);
    let mut step = |error| {
        *fails.lock().expect("no thread panicked") = error;
        backend.step(&[one.chunk()], &mut Logits::default())
    };
    let (doing, code) = ("waiting", "CUDA_ERROR".to_owned());
    let call = DeviceError::Call { doing, code: code.clone() };
    assert!(matches!(step(Some(call)), Err(StepError::Device(_))));
    assert!(step(None).is_ok(), "the backend keeps working");
    let sticky = DeviceError::Sticky { doing, code: code.clone() };
    assert!(matches!(step(Some(sticky)), Err(StepError::DeviceLost(_))));
    let lost = DeviceError::Lost { doing, code };
    assert!(matches!(step(Some(lost)), Err(StepError::DeviceLost(_))));
}
