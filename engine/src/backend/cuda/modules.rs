//! The compiled kernels in the program, made from `kernels/cuda` by `cargo xtask ptx` (`engine/generated/cuda`): PTX, which the driver
//! compiles for any device, and machine code (cubins) for compute capability 9.0, which loads without compilation. Some
//! kernels exist as machine code alone.

use crate::formats::memory::AlignedBytes;

/// Compute capability that the cubins are for; they run on no other.
const CUBIN_CAPABILITY: (u32, u32) = (9, 0);
/// Kind of the images with kernels that wait for earlier ones by themselves.
pub const CUBIN: &str = "cubin";

/// One file of kernels, compiled.
#[derive(Debug)]
pub struct Module {
    /// File name without extension.
    pub name: &'static str,
    /// PTX, for compute capability 8.0 and above.
    pub ptx: &'static str,
    /// Machine code, for [`CUBIN_CAPABILITY`].
    pub cubin: &'static [u8],
}

/// Embeds the compiled form of each file of kernels.
macro_rules! modules {
    ($($name:literal),* $(,)?) => {
        /// Every file of kernels.
        pub const MODULES: &[Module] = &[
            $(Module {
                name: $name,
                ptx: include_str!(concat!("../../../generated/cuda/ptx/", $name, ".ptx")),
                cubin: include_bytes!(concat!("../../../generated/cuda/sm_90/", $name, ".cubin")),
            }),*
        ];
    };
}

modules![
    "activate",
    "attend",
    "attend_short",
    "attend_split",
    "attend_tile",
    "digits",
    "distribution",
    "embed",
    "embed_ternary",
    "filtered_draw",
    "final_norm",
    "group_few",
    "group_quantize",
    "group_tile",
    "head",
    "linear_few",
    "linear_one",
    "linear_tile",
    "norm_heads",
    "norm_quantize",
    "peaks",
    "rotate_store",
    "screen",
    "screen_select",
    "screen_tile",
];

/// A file of kernels with instructions that [`CUBIN_CAPABILITY`] alone has. Steps use other kernels on other devices, and
/// where the driver refuses the machine code.
#[derive(Debug)]
pub struct Extra {
    /// File name without extension.
    pub name: &'static str,
    /// The kernels.
    pub kernels: &'static [&'static str],
    /// Machine code, for [`CUBIN_CAPABILITY`].
    pub cubin: &'static [u8],
}

/// Every such file.
pub const EXTRAS: &[Extra] = &[Extra {
    name: "linear_wgmma",
    kernels: &["linear_wgmma", "gate_wgmma", "linear_wgmma64", "gate_wgmma64"],
    cubin: include_bytes!("../../../generated/cuda/sm_90a/linear_wgmma.cubin"),
}];

/// An image that a driver loads, with its kind.
pub type Image = (&'static str, AlignedBytes);

impl Extra {
    /// Returns the image that a device of a compute capability may load.
    pub fn images(&self, capability: (u32, u32)) -> Vec<Image> {
        let loads = capability == CUBIN_CAPABILITY;
        loads.then(|| ("cubin", aligned(self.cubin, 0))).into_iter().collect()
    }
}

impl Module {
    /// Returns the images that a device of a compute capability may load, the best first, with their kinds; cubins
    /// only where they are allowed. PTX ends with a zero byte.
    pub fn images(&self, capability: (u32, u32), has_cubins: bool) -> Vec<Image> {
        let mut images = Vec::new();
        if capability == CUBIN_CAPABILITY && has_cubins {
            images.push((CUBIN, aligned(self.cubin, 0)));
        }
        images.push(("ptx", aligned(self.ptx.as_bytes(), 1)));
        images
    }
}

/// Copies bytes to aligned memory, followed by zeros.
fn aligned(bytes: &[u8], zeros: usize) -> AlignedBytes {
    let mut copy = AlignedBytes::zeroed((bytes.len() + zeros).next_multiple_of(64));
    copy[..bytes.len()].copy_from_slice(bytes);
    copy
}

/// Returns the names of the kernels in PTX.
pub fn kernels_of(ptx: &str) -> impl Iterator<Item = &str> {
    let entries = ptx.lines().filter_map(|line| line.trim().strip_prefix(".visible .entry "));
    entries.map(|entry| entry.trim_end_matches('('))
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, path::PathBuf};

    use super::{super::tests::package, *};

    /// Files in git stay below this size.
    const FILE_BYTES_MAX: usize = 3 << 20;

    fn sources() -> PathBuf {
        package().join("src/kernels/cuda")
    }

    /// Returns the files with an extension, experimental ones included, as paths below the folder of kernels.
    fn files(extension: &str) -> Vec<PathBuf> {
        let mut paths: Vec<PathBuf> = [sources(), sources().join("experimental")]
            .iter()
            .flat_map(|folder| std::fs::read_dir(folder).expect("the folder of kernels exists"))
            .map(|entry| entry.expect("a folder can be read").path())
            .filter(|path| path.extension().is_some_and(|e| e == extension))
            .map(|path| path.strip_prefix(sources()).expect("it lies there").to_owned())
            .collect();
        paths.sort();
        paths
    }

    fn sha256(bytes: &[u8]) -> String {
        use sha2::Digest as _;
        sha2::Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn modules_are_the_files_of_kernels() {
        let extras = EXTRAS.iter().map(|extra| extra.name);
        let mut names: Vec<&str> = MODULES.iter().map(|module| module.name).chain(extras).collect();
        names.sort_unstable();
        let stem =
            |path: &PathBuf| path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
        let mut of_files: Vec<String> = files("cu").iter().filter_map(stem).collect();
        of_files.sort_unstable();
        assert_eq!(of_files, names);
    }

    #[test]
    fn compiled_kernels_match_their_sources() {
        let listed = std::fs::read_to_string(package().join("generated/cuda/SOURCES"));
        let listed = listed.expect("the file is committed");
        for path in files("cu").into_iter().chain(files("cuh")) {
            let bytes = std::fs::read(sources().join(&path)).expect("a file that was listed");
            let line = format!("{}  {}", sha256(&bytes), path.display());
            assert!(
                listed.lines().any(|listed| listed == line),
                "{} changed: run cargo xtask ptx",
                path.display()
            );
        }
        let sources_listed =
            listed.lines().filter(|line| line.ends_with(".cu") || line.ends_with(".cuh"));
        assert_eq!(sources_listed.count(), files("cu").len() + files("cuh").len());
        let of_module = |module: &Module| {
            let Module { name, ptx, cubin } = module;
            [(format!("ptx/{name}.ptx"), ptx.as_bytes()), (format!("sm_90/{name}.cubin"), *cubin)]
        };
        let extras =
            EXTRAS.iter().map(|extra| (format!("sm_90a/{}.cubin", extra.name), extra.cubin));
        for (file, bytes) in MODULES.iter().flat_map(of_module).chain(extras) {
            let line = format!("{}  {file}", sha256(bytes));
            assert!(
                listed.lines().any(|listed| listed == line),
                "{file} was not compiled by xtask"
            );
            assert!(bytes.len() < FILE_BYTES_MAX, "{file} has {} bytes", bytes.len());
        }
    }

    #[test]
    fn each_kernel_is_in_one_module() {
        let mut seen = BTreeSet::new();
        for module in MODULES {
            let kernels: Vec<&str> = kernels_of(module.ptx).collect();
            assert!(!kernels.is_empty(), "{}", module.name);
            for kernel in kernels {
                assert!(seen.insert(kernel.to_owned()), "{kernel}");
            }
        }
        for kernel in EXTRAS.iter().flat_map(|extra| extra.kernels) {
            assert!(seen.insert((*kernel).to_owned()), "{kernel}");
        }
        assert!(seen.contains("embed") && seen.contains("attend8_f32"), "{seen:?}");
    }
}
