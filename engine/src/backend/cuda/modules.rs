//! The kernels as the program carries them: PTX, made from `kernels/cuda` by `cargo xtask ptx`.

/// Names one file of PTX for each file of kernels.
macro_rules! modules {
    ($($name:literal),* $(,)?) => {
        /// The PTX of every file of kernels.
        pub const MODULES: &[(&str, &str)] = &[
            $(($name, include_str!(concat!("../../kernels/cuda/ptx/", $name, ".ptx")))),*
        ];
    };
}

modules![
    "activate",
    "attend",
    "attend_split",
    "digits",
    "embed",
    "final_norm",
    "head",
    "linear_few",
    "linear_one",
    "linear_tile",
    "norm_quantize",
    "peaks",
    "rotate_store",
    "screen",
    "screen_select",
    "screen_tile",
];

/// Names of a module's kernels.
pub fn kernels_of(ptx: &str) -> impl Iterator<Item = &str> {
    let entries = ptx.lines().filter_map(|line| line.trim().strip_prefix(".visible .entry "));
    entries.map(|entry| entry.trim_end_matches('('))
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, path::PathBuf};

    use super::{super::tests::package, *};

    fn sources() -> PathBuf {
        package().join("src/kernels/cuda")
    }

    /// Names of files with an extension, without it.
    fn files(extension: &str) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(sources())
            .expect("the kernels are there")
            .map(|entry| entry.expect("a folder can be read").path())
            .filter(|path| path.extension().is_some_and(|e| e == extension))
            .map(|path| path.file_stem().expect("a name").to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    fn sha256(bytes: &[u8]) -> String {
        use sha2::Digest as _;
        sha2::Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn every_file_of_kernels_has_its_ptx_and_no_other() {
        let names: Vec<&str> = MODULES.iter().map(|(name, _)| *name).collect();
        assert_eq!(files("cu"), names);
    }

    #[test]
    fn the_ptx_is_of_the_sources_as_they_are() {
        let said = std::fs::read_to_string(sources().join("ptx/SOURCES")).expect("it is committed");
        let names = files("cu").into_iter().map(|name| name + ".cu");
        for name in names.chain(files("cuh").into_iter().map(|name| name + ".cuh")) {
            let bytes = std::fs::read(sources().join(&name)).expect("a file that was listed");
            let line = format!("{}  {name}", sha256(&bytes));
            assert!(said.lines().any(|said| said == line), "{name} changed: run cargo xtask ptx");
        }
        let listed = said.lines().filter(|line| line.ends_with(".cu") || line.ends_with(".cuh"));
        assert_eq!(listed.count(), files("cu").len() + files("cuh").len());
        for (name, ptx) in MODULES {
            let line = format!("{}  ptx/{name}.ptx", sha256(ptx.as_bytes()));
            assert!(said.lines().any(|said| said == line), "{name}.ptx is not what was compiled");
        }
    }

    #[test]
    fn kernels_are_in_one_module_each() {
        let mut seen = BTreeSet::new();
        for (module, ptx) in MODULES {
            let kernels: Vec<&str> = kernels_of(ptx).collect();
            assert!(!kernels.is_empty(), "{module}");
            for kernel in kernels {
                assert!(seen.insert(kernel.to_owned()), "{kernel}");
            }
        }
        assert!(seen.contains("embed") && seen.contains("attend8_f32"), "{seen:?}");
    }
}
