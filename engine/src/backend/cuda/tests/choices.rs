//! What a device goes without, because a test at load fails.

use super::{
    super::{
        backend::CudaBackend,
        choices,
        device::DeviceError,
        error::CudaLoadError,
        experimental::{GpuKernels, warpgroups},
        features::Features,
        modules::EXTRAS,
    },
    CudaOptions, HeadMode, KvType, LogitsFor, device, experimental as options,
    faulty::{Fault, Faulty, InKernel},
    load, model, part, run, small, start, tokens,
};

fn loaded(kv: KvType) -> Option<CudaBackend> {
    load(&model("bitnet-tiny"), options(kv, HeadMode::Exact), small())
}

#[test]
fn wrong_or_refused_products_of_warpgroups_are_not_used() {
    let Some(mut cuda) = loaded(KvType::F16).filter(|cuda| cuda.state.has_warpgroups) else {
        return;
    };
    let in_device = Faulty::replace(&mut cuda);
    let mut chosen_with = |kernel, fault| {
        let in_kernel = InKernel { kernel, fault, in_overlap: false };
        *in_device.lock().expect("no thread panicked") = in_kernel;
        warpgroups::choose(&mut cuda).map(|()| cuda.state.has_warpgroups)
    };
    for kernel in EXTRAS.iter().flat_map(|extra| extra.kernels) {
        for fault in [Fault::Output, Fault::Nothing, Fault::Refusal] {
            let chosen = chosen_with(kernel, fault);
            assert!(matches!(chosen, Ok(false)), "{kernel}, {fault:?}: {chosen:?}");
        }
    }
    let chosen = chosen_with("none", Fault::Sticky);
    assert!(matches!(chosen, Ok(true)), "{chosen:?}");
    let lost = chosen_with("linear_wgmma64", Fault::Sticky);
    assert!(matches!(lost, Err(DeviceError::Sticky { .. })), "{lost:?}");
}

#[test]
fn wrong_or_refused_tiles_of_attention_are_not_used() {
    let Some(mut cuda) = loaded(KvType::Q8) else { return };
    assert!(cuda.state.has_tiles);
    // So that each kernel is launched by itself.
    cuda.limits.recorded = 0;
    let in_device = Faulty::replace(&mut cuda);
    let mut chosen_with = |fault| {
        let in_kernel = InKernel { kernel: "attend_tile128_q8", fault, in_overlap: false };
        *in_device.lock().expect("no thread panicked") = in_kernel;
        *cuda.device.features_mut() = Features::default();
        choices::choose(&mut cuda, GpuKernels::Experimental).map(|()| cuda.state.has_tiles)
    };
    for fault in [Fault::Output, Fault::Nothing, Fault::Refusal] {
        let chosen = chosen_with(fault);
        assert!(matches!(chosen, Ok(false)), "{fault:?}: {chosen:?}");
    }
    let lost = chosen_with(Fault::Sticky);
    let Err(CudaLoadError::KernelFault(_)) = &lost else { panic!("{lost:?}") };
    let text = lost.expect_err("as above").to_string();
    assert!(text.ends_with("--gpu-kernels standard starts without them"), "{text}");
}

#[test]
fn wrong_overlap_is_not_used() {
    for fault in [Fault::Nothing, Fault::Refusal] {
        let Some(mut cuda) = loaded(KvType::F16).filter(|cuda| cuda.device.overlaps()) else {
            return;
        };
        let prompt = [part(&tokens(1, 3), 0, 0, LogitsFor::Last)];
        let expected = run(&mut cuda, &prompt).all().to_vec();
        let in_device = Faulty::replace(&mut cuda);
        *in_device.lock().expect("no thread panicked") =
            InKernel { kernel: "gate_one", fault, in_overlap: true };
        choices::choose(&mut cuda, GpuKernels::Experimental).expect("steps go on without");
        assert!(!cuda.device.overlaps(), "{fault:?}");
        *in_device.lock().expect("no thread panicked") =
            InKernel { kernel: "none", fault, in_overlap: true };
        assert_eq!(run(&mut cuda, &prompt).all(), expected);
    }
}

#[test]
fn standard_kernels_are_without_experimental_ones() {
    let Some(device) = device() else { return };
    let options =
        CudaOptions { kernels: GpuKernels::Standard, ..options(KvType::Q8, HeadMode::Exact) };
    let cuda = start(&model("bitnet-tiny"), device, options, small()).expect("the model fits");
    assert!(!cuda.state.has_warpgroups && !cuda.state.has_tiles);
}
