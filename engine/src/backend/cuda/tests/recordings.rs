//! Passes on devices without memory for recordings.

use super::{
    HeadMode, KvType, LogitsFor, Part, emulated_device,
    equality::{check, on_cpu},
    model, options, ordinals, part, small, start, tokens,
};
use crate::backend::cuda::backend::CudaBackend;

/// Decodes of so many sequences, alone in a step each.
fn decodes(count: u32) -> Vec<Part> {
    (0..count).map(|row| part(&tokens(1, row), 0, row, LogitsFor::largest(1))).collect()
}

/// Takes all memory that is left.
fn fill(cuda: &mut CudaBackend) {
    let mut bytes = 1 << 30;
    while bytes >= 256 {
        if cuda.device.allocate(bytes).is_err() {
            bytes /= 2;
        }
    }
}

#[test]
fn passes_that_cannot_be_recorded_are_launched_kernel_by_kernel() {
    let (model, options) = (model("bitnet-tiny"), options(KvType::F16, HeadMode::Exact));
    let Some(device) = emulated_device(ordinals::GIBIBYTE) else { return };
    let mut cuda = start(&model, Box::new(device), options, small()).expect("the model fits");
    let mut cpu = on_cpu(&model, options);
    fill(&mut cuda);
    for count in [1, 5, 1, 5] {
        check(&format!("{count} decodes"), cpu.as_mut(), &mut cuda, &decodes(count));
        assert_eq!(cuda.state.recordings.count(), 0);
    }
}

#[test]
fn recordings_make_room_for_others() {
    let (model, options) = (model("bitnet-tiny"), options(KvType::F16, HeadMode::Exact));
    let Some(device) = emulated_device(ordinals::GIBIBYTE) else { return };
    let mut cuda = start(&model, Box::new(device), options, small()).expect("the model fits");
    let mut cpu = on_cpu(&model, options);
    // It has more launches than the pass of one row: its room is enough for either.
    check("the first", cpu.as_mut(), &mut cuda, &decodes(5));
    fill(&mut cuda);
    for count in [1, 1, 5, 5, 1] {
        check(&format!("{count} decodes"), cpu.as_mut(), &mut cuda, &decodes(count));
        assert_eq!(cuda.state.recordings.count(), 1, "{count} decodes");
    }
}
