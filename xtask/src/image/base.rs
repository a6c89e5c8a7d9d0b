//! The base images of the Dockerfile, made on this machine: Debian by debootstrap, and for the stage that
//! compiles the same with a C compiler and the Rust toolchain that runs this program.
//!
//! They are made once; to make them again, delete `target/image`.

use std::{fs, path::Path, process::Command};

use anyhow::{Context as _, ensure};

use super::Buildah;
use crate::process::{self, read};

const MIRROR: &str = "http://deb.debian.org";
/// What `rust:…-slim` has besides Debian and Rust.
const PACKAGES: [&str; 3] = ["ca-certificates", "gcc", "libc6-dev"];
/// Certificate authorities of this machine, which the compiling stage downloads crates with.
const AUTHORITIES: &str = "etc/ssl/certs/ca-certificates.crt";
/// Settings with which `debian:…-slim` leaves out documentation and translations.
const SLIM: &str = "path-exclude /usr/share/doc/*
path-include /usr/share/doc/*/copyright
path-exclude /usr/share/man/*
path-exclude /usr/share/info/*
path-exclude /usr/share/locale/*
";
/// Settings with which Debian's images keep no caches of apt.
const CLEAN: &str = r#"DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb /var/cache/apt/*.bin || true"; };
APT::Update::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb /var/cache/apt/*.bin || true"; };
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
"#;
const DOCUMENTATION: [&str; 4] = ["doc", "info", "locale", "man"];
/// Settings of the Rust images.
const RUST_SETTINGS: [&str; 4] = [
    "--env",
    "CARGO_HOME=/usr/local/cargo",
    "--env",
    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
];

/// The images that the Dockerfile begins its stages with.
#[derive(Debug, PartialEq, Eq)]
pub struct Bases {
    debian: String,
    /// Code name of the Debian release.
    release: String,
    rust: String,
    /// Version of Rust, as the image's name has it.
    version: String,
}

impl Bases {
    /// Reads the names from the Dockerfile.
    pub fn from_dockerfile(dockerfile: &str) -> anyhow::Result<Self> {
        let named = |name: &str| {
            let images = dockerfile.lines().filter_map(|line| line.strip_prefix("FROM "));
            let image = images.filter_map(|rest| rest.split(' ').next()).find_map(|image| {
                let tag = image.strip_prefix(name)?.strip_prefix(':')?;
                let tag = tag.strip_suffix("-slim").unwrap_or(tag);
                Some((format!("docker.io/library/{image}"), tag.to_owned()))
            });
            image.with_context(|| format!("the Dockerfile has no stage from {name}"))
        };
        let (debian, release) = named("debian")?;
        let (rust, tag) = named("rust")?;
        let version = tag.split('-').next().unwrap_or_default().to_owned();
        Ok(Self { debian, release, rust, version })
    }

    /// Makes the images that are not in the storage.
    pub fn make(&self, buildah: &Buildah) -> anyhow::Result<()> {
        if !buildah.has_image(&self.debian) {
            let fill = |_: &str, folder: &Path| debian(&self.release, folder);
            buildah.make(("scratch", &self.debian), &["--cmd", "bash"], fill)?;
        }
        if !buildah.has_image(&self.rust) {
            let toolchain = self.toolchain()?;
            let fill = |container: &str, folder: &Path| {
                add_packages(buildah, container)?;
                add_toolchain(Path::new(&toolchain), folder)
            };
            buildah.make((&self.debian, &self.rust), &RUST_SETTINGS, fill)?;
        }
        Ok(())
    }

    /// Returns the folder of the toolchain that runs this program, if it is the Dockerfile's.
    fn toolchain(&self) -> anyhow::Result<String> {
        let rustc = || Command::new("rustc");
        let (own, wanted) = (read(rustc().arg("--version"))?, &self.version);
        let fits = own.starts_with(&format!("rustc {wanted}."));
        ensure!(fits, "the Dockerfile compiles with Rust {wanted}, and this is {own}");
        read(rustc().args(["--print", "sysroot"]))
    }
}

/// Makes a minimal Debian like the image `debian:…-slim`.
fn debian(release: &str, folder: &Path) -> anyhow::Result<()> {
    let mut debootstrap = Command::new("debootstrap");
    debootstrap.args(["--variant=minbase", release]).arg(folder).arg(format!("{MIRROR}/debian"));
    process::run(&mut debootstrap)?;
    let sources = format!(
        "deb {MIRROR}/debian {release} main\n\
         deb {MIRROR}/debian {release}-updates main\n\
         deb {MIRROR}/debian-security {release}-security main\n"
    );
    fs::write(folder.join("etc/apt/sources.list"), sources)?;
    fs::write(folder.join("etc/dpkg/dpkg.cfg.d/docker"), SLIM)?;
    fs::write(folder.join("etc/apt/apt.conf.d/docker-clean"), CLEAN)?;
    for name in DOCUMENTATION {
        remove_files(&folder.join("usr/share").join(name), "copyright")?;
    }
    for place in ["var/lib/apt/lists", "var/cache/apt"] {
        remove_files(&folder.join(place), "")?;
    }
    Ok(())
}

/// Deletes the files below a folder, except those with this name.
fn remove_files(folder: &Path, kept: &str) -> anyhow::Result<()> {
    let mut find = Command::new("find");
    find.arg(folder).args(["-not", "-type", "d", "-not", "-name", kept, "-delete"]);
    process::run(&mut find)
}

fn add_packages(buildah: &Buildah, container: &str) -> anyhow::Result<()> {
    let install = ["apt-get", "install", "-y", "-q", "--no-install-recommends"];
    let commands = [&["apt-get", "update", "-q"][..], &[&install[..], &PACKAGES].concat()];
    for command in commands {
        process::run(buildah.command(&["run", container, "--"]).args(command))?;
    }
    Ok(())
}

/// Copies what compiles: not the documentation and not the sources of the standard library.
fn add_toolchain(toolchain: &Path, folder: &Path) -> anyhow::Result<()> {
    let local = folder.join("usr/local");
    for program in ["cargo", "rustc"] {
        fs::copy(toolchain.join("bin").join(program), local.join("bin").join(program))
            .with_context(|| format!("cannot copy {program}"))?;
    }
    process::run(Command::new("cp").arg("-a").arg(toolchain.join("lib")).arg(&local))?;
    let sources = local.join("lib/rustlib/src");
    if sources.exists() {
        fs::remove_dir_all(sources).context("cannot remove the sources")?;
    }
    let authorities = Path::new("/").join(AUTHORITIES);
    if authorities.exists() {
        fs::copy(authorities, folder.join(AUTHORITIES)).context("cannot copy the authorities")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bases_are_read_from_the_dockerfile() {
        let bases = Bases::from_dockerfile(&super::super::dockerfile().expect("it is there"));
        let bases = bases.expect("it has a stage of each");
        assert!(bases.debian.starts_with("docker.io/library/debian:"), "{bases:?}");
        assert!(bases.release.chars().all(|c| c.is_ascii_lowercase()), "{bases:?}");
        assert!(bases.version.starts_with("1."), "{bases:?}");
        assert_eq!(
            bases.debian.strip_suffix("-slim").and_then(|d| d.split(':').nth(1)),
            Some(&*bases.release)
        );
        assert!(Bases::from_dockerfile("FROM debian:bookworm-slim").is_err());
    }
}
