//! Devices on which the kernels with products of warpgroups fail.

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

/// A device with a fault in one kernel.
struct Faulty {
    real: Box<dyn Device>,
    kernel: &'static str,
    fault: Fault,
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
        match self.fault {
            _ if launch.kernel != self.kernel => self.real.launch(launch),
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

/// Returns whether later steps use the kernels, after a test at load in which one has a fault.
fn chosen_with(kernel: &'static str, fault: Fault) -> Option<Result<bool, DeviceError>> {
    let mut cuda = load(&model("bitnet-tiny"), options(KvType::F16, HeadMode::Exact), small())?;
    if !cuda.state.has_warpgroups {
        return None;
    }
    let real = cuda.device;
    cuda.device = Box::new(Faulty { real, kernel, fault });
    Some(warpgroups::choose(&mut cuda).map(|()| cuda.state.has_warpgroups))
}

#[test]
fn wrong_or_refused_products_of_warpgroups_are_not_used() {
    for kernel in EXTRAS.iter().flat_map(|extra| extra.kernels) {
        for fault in [Fault::Output, Fault::Nothing, Fault::Refusal] {
            let Some(chosen) = chosen_with(kernel, fault) else { return };
            assert!(matches!(chosen, Ok(false)), "{kernel}, {fault:?}: {chosen:?}");
        }
    }
    let chosen = chosen_with("none of them", Fault::Sticky).expect("there was a device");
    assert!(matches!(chosen, Ok(true)), "{chosen:?}");
    let lost = chosen_with("linear_wgmma64", Fault::Sticky).expect("there was a device");
    assert!(matches!(lost, Err(DeviceError::Sticky { .. })), "{lost:?}");
}
