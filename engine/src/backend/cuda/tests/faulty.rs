//! Devices with a fault in one kernel.

use std::sync::{Arc, Mutex};

use super::super::{
    args::{AttentionArgs, LinearArgs},
    backend::CudaBackend,
    device::{Address, Device, DeviceError, Launch, Part as Read, Properties, Reading, Recording},
    features::Features,
};

/// What happens at the launch of a kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fault {
    /// One output is wrong.
    Output,
    /// Nothing is computed.
    Nothing,
    /// The driver refuses the launch.
    Refusal,
    /// The kernel ends with an error that stays.
    Sticky,
}

/// A fault in a kernel.
#[derive(Debug, Clone, Copy)]
pub struct InKernel {
    pub kernel: &'static str,
    pub fault: Fault,
    /// Whether the kernel has it only where kernels overlap.
    pub in_overlap: bool,
}

/// The fault of a device, which tests change.
pub type Shared = Arc<Mutex<InKernel>>;

/// A device with a fault in one kernel.
pub struct Faulty {
    real: Box<dyn Device>,
    fault: Shared,
    may_overlap: bool,
}

impl Faulty {
    /// Puts a device without faults in the place of a backend's.
    pub fn replace(backend: &mut CudaBackend) -> Shared {
        let none = InKernel { kernel: "none", fault: Fault::Nothing, in_overlap: false };
        let fault: Shared = Arc::new(Mutex::new(none));
        let other = super::device().expect("the backend has one, too");
        let real = std::mem::replace(&mut backend.device, other);
        backend.device = Box::new(Self { real, fault: fault.clone(), may_overlap: false });
        fault
    }

    /// Returns the fault of a launch.
    fn fault(&self, launch: &Launch) -> Option<Fault> {
        let in_kernel = *self.fault.lock().expect("no thread panicked");
        let is_it = launch.kernel == in_kernel.kernel;
        (is_it && (self.may_overlap || !in_kernel.in_overlap)).then_some(in_kernel.fault)
    }
}

impl Device for Faulty {
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
        match self.fault(launch) {
            None => self.real.launch(launch),
            Some(Fault::Output) => {
                self.real.launch(launch)?;
                let out = match launch.kernel.starts_with("attend") {
                    true => launch.args.get::<AttentionArgs>().attended,
                    false => launch.args.get::<LinearArgs>().segments[0].out,
                };
                self.real.write(out + 4, &1e9f32.to_le_bytes())
            }
            Some(Fault::Nothing) => Ok(()),
            Some(Fault::Refusal) => Err(DeviceError::Call { doing, code }),
            Some(Fault::Sticky) => Err(DeviceError::Sticky { doing, code }),
        }
    }
    fn let_overlap(&mut self, allowed: bool) {
        self.may_overlap = allowed;
        self.real.let_overlap(allowed);
    }
    fn overlaps(&self) -> bool {
        self.real.overlaps()
    }
    fn end_overlap(&mut self) {
        self.real.end_overlap();
    }
    fn prefer_shared(&mut self, percent: usize) -> Result<(), DeviceError> {
        self.real.prefer_shared(percent)
    }
    fn record(&mut self, launches: &[Launch]) -> Result<Recording, DeviceError> {
        let (doing, code) = ("recording", "CUDA_ERROR".to_owned());
        let faults: Vec<Fault> = launches.iter().filter_map(|launch| self.fault(launch)).collect();
        match faults.first() {
            None | Some(Fault::Output) => self.real.record(launches),
            Some(Fault::Nothing) => {
                let without = launches.iter().filter(|launch| self.fault(launch).is_none());
                let without: Vec<Launch> = without.copied().collect();
                self.real.record(&without)
            }
            Some(Fault::Refusal) => Err(DeviceError::Call { doing, code }),
            Some(Fault::Sticky) => Err(DeviceError::Sticky { doing, code }),
        }
    }
    fn replay(&mut self, recording: Recording) -> Result<(), DeviceError> {
        self.real.replay(recording)
    }
    fn recorded_launch_bytes(&self) -> u64 {
        self.real.recorded_launch_bytes()
    }
    fn forget(&mut self, recordings: &[Recording]) -> Result<(), DeviceError> {
        self.real.forget(recordings)
    }
}
