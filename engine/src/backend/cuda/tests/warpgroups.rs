//! Devices on which the kernels with products of warpgroups fail.

use std::sync::{Arc, Mutex};

use super::{
    super::{
        args::LinearArgs,
        device::{
            Address, Device, DeviceError, Launch, Part as Read, Properties, Reading, Recording,
        },
        modules::EXTRAS,
        warpgroups,
    },
    HeadMode, KvType, load, model, options, small,
};

/// What happens at the launch of a kernel.
#[derive(Debug, Clone, Copy)]
enum Fault {
    /// One output is wrong.
    Output,
    /// Nothing is computed.
    Nothing,
    /// The driver refuses the launch.
    Refusal,
    /// The kernel ends with an error that stays.
    Sticky,
}

/// A kernel and its fault.
type InKernel = (&'static str, Fault);

/// A device with a fault in one kernel.
struct Faulty {
    real: Box<dyn Device>,
    fault: Arc<Mutex<InKernel>>,
}

impl Device for Faulty {
    fn properties(&self) -> &Properties {
        self.real.properties()
    }
    fn shared_bytes(&self, kernel: &str) -> u32 {
        self.real.shared_bytes(kernel)
    }
    fn allocate(&mut self, bytes: usize) -> Result<Address, DeviceError> {
        self.real.allocate(bytes)
    }
    fn write(&mut self, to: Address, bytes: &[u8]) -> Result<(), DeviceError> {
        self.real.write(to, bytes)
    }
    fn read(&mut self, parts: &mut [Read<'_>]) -> Result<(), DeviceError> {
        self.real.read(parts)
    }
    fn begin_read(&mut self, from: Address, bytes: usize) -> Result<Reading, DeviceError> {
        self.real.begin_read(from, bytes)
    }
    fn finish_read(&mut self, reading: Reading, to: &mut Vec<u8>) -> Result<(), DeviceError> {
        self.real.finish_read(reading, to)
    }
    fn copy(&mut self, from: Address, to: Address, bytes: usize) -> Result<(), DeviceError> {
        self.real.copy(from, to, bytes)
    }
    fn launch(&mut self, launch: &Launch) -> Result<(), DeviceError> {
        let (doing, code) = ("launching a kernel", "CUDA_ERROR".to_owned());
        let (kernel, fault) = *self.fault.lock().expect("no thread panicked");
        match fault {
            _ if launch.kernel != kernel => self.real.launch(launch),
            Fault::Output => {
                self.real.launch(launch)?;
                let out = launch.args.get::<LinearArgs>().segments[0].out;
                self.real.write(out + 4, &1e9f32.to_le_bytes())
            }
            Fault::Nothing => Ok(()),
            Fault::Refusal => Err(DeviceError::Call { doing, code }),
            Fault::Sticky => Err(DeviceError::Sticky { doing, code }),
        }
    }
    fn let_overlap(&mut self, allowed: bool) {
        self.real.let_overlap(allowed);
    }
    fn record(&mut self, launches: &[Launch]) -> Result<Recording, DeviceError> {
        self.real.record(launches)
    }
    fn replay(&mut self, recording: Recording) -> Result<(), DeviceError> {
        self.real.replay(recording)
    }
    fn forget_recordings(&mut self) -> Result<(), DeviceError> {
        self.real.forget_recordings()
    }
}

#[test]
fn wrong_or_refused_products_of_warpgroups_are_not_used() {
    let model = model("bitnet-tiny");
    let Some(mut cuda) = load(&model, options(KvType::F16, HeadMode::Exact), small()) else {
        return;
    };
    if !cuda.state.has_warpgroups {
        return;
    }
    let fault = Arc::new(Mutex::new(("none", Fault::Nothing)));
    cuda.device = Box::new(Faulty { real: cuda.device, fault: fault.clone() });
    let mut chosen_with = |in_kernel: InKernel| {
        *fault.lock().expect("no thread panicked") = in_kernel;
        warpgroups::choose(&mut cuda).map(|()| cuda.state.has_warpgroups)
    };
    for kernel in EXTRAS.iter().flat_map(|extra| extra.kernels) {
        for fault in [Fault::Output, Fault::Nothing, Fault::Refusal] {
            let chosen = chosen_with((kernel, fault));
            assert!(matches!(chosen, Ok(false)), "{kernel}, {fault:?}: {chosen:?}");
        }
    }
    let chosen = chosen_with(("none", Fault::Sticky));
    assert!(matches!(chosen, Ok(true)), "{chosen:?}");
    let lost = chosen_with(("linear_wgmma64", Fault::Sticky));
    assert!(matches!(lost, Err(DeviceError::Sticky { .. })), "{lost:?}");
}
