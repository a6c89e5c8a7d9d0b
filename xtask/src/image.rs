//! `cargo xtask image`: builds the container images with buildah, which needs no daemon, and tests them.
//!
//! Everything lies below `target/image`: buildah's storage, the caches of the build, and the two base
//! images of the Dockerfile. By default the base images are made here: Debian with debootstrap, and the
//! same with this machine's Rust. Commands run in a chroot, so neither user namespaces nor control groups
//! are needed; what only a container runtime does (a read-only root, dropped capabilities, limits) is not
//! tested.

mod base;
mod containers;
mod fleet;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, bail, ensure};

use self::base::Bases;
use super::{
    process::{self, read, root, succeeds},
    test,
};

/// Programs that build images, with their Debian packages.
const PROGRAMS: [(&str, &str); 2] = [("buildah", "buildah"), ("debootstrap", "debootstrap")];
/// Servers that the test starts.
const SERVERS: [&str; 2] = ["redis-server", "postgresql"];
const DOCKERFILE: &str = "docker/Dockerfile";

/// An image and the target of the Dockerfile that makes it.
#[derive(Debug, Clone, Copy)]
struct Image {
    name: &'static str,
    target: Option<&'static str>,
}

/// The default target: for CPUs.
const CPU: Image = Image { name: "tritmill", target: None };
const CUDA: Image = Image { name: "tritmill-cuda", target: Some("cuda") };

#[derive(Debug, Default, PartialEq, Eq)]
struct Options {
    /// Whether to test the images.
    test: bool,
    /// Whether to pull the base images.
    pull: bool,
}

pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    let options = parse(arguments)?;
    install(options.test)?;
    let buildah = Buildah::open()?;
    // Left by a run that was killed.
    buildah.remove_containers()?;
    if !options.pull {
        Bases::from_dockerfile(&dockerfile()?)?.make(&buildah)?;
    }
    for image in [CPU, CUDA] {
        buildah.build(image, options.pull)?;
    }
    let tested = if options.test { fleet::run(&buildah) } else { Ok(()) };
    let removed = buildah.remove_containers();
    tested.and(removed)?;
    for image in [CPU, CUDA] {
        println!("image {}: {:.1} MB", image.name, buildah.size_mb(image)?);
    }
    Ok(())
}

fn parse(arguments: &[String]) -> anyhow::Result<Options> {
    let mut options = Options::default();
    for argument in arguments {
        match argument.as_str() {
            "--test" => options.test = true,
            "--pull" => options.pull = true,
            _ => bail!("unknown option {argument} (--test, --pull)"),
        }
    }
    Ok(options)
}

/// Installs the programs that are missing, as root.
fn install(with_servers: bool) -> anyhow::Result<()> {
    let user = read(Command::new("id").arg("-u"))?;
    ensure!(user == "0", "building images needs root");
    let is_missing = |program: &str| !succeeds(Command::new(program).arg("--version"));
    let missing = PROGRAMS.iter().filter(|(program, _)| is_missing(program));
    let mut packages: Vec<&str> = missing.map(|(_, package)| *package).collect();
    if with_servers {
        let missing = tritmill_servers::missing_packages();
        packages.extend(missing.iter().filter(|package| SERVERS.contains(package)));
    }
    test::install_packages(&packages).into_iter().try_for_each(|outcome| outcome)
}

fn dockerfile() -> anyhow::Result<String> {
    fs::read_to_string(root().join(DOCKERFILE)).context(DOCKERFILE)
}

/// Buildah with a storage of its own.
struct Buildah {
    folder: PathBuf,
}

impl Buildah {
    fn open() -> anyhow::Result<Self> {
        let folder = root().join("target").join("image");
        fs::create_dir_all(folder.join("tmp")).context("cannot write to target")?;
        Ok(Self { folder })
    }

    /// Returns a buildah command.
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("buildah");
        command.arg("--root").arg(self.folder.join("storage"));
        command.arg("--runroot").arg(self.folder.join("run"));
        // `vfs` works on every file system; it copies, so a layer costs its full size.
        command.args(["--storage-driver", "vfs"]).args(arguments);
        // The caches of `RUN --mount=type=cache` lie in its temporary folder.
        command.env("TMPDIR", self.folder.join("tmp")).env("BUILDAH_ISOLATION", "chroot");
        command.current_dir(root());
        command
    }

    /// Builds an image. Without layers, the storage keeps only results.
    fn build(&self, image: Image, pull: bool) -> anyhow::Result<()> {
        let mut build = self.command(&["build", "--format", "docker", "--layers=false"]);
        build.arg(if pull { "--pull" } else { "--pull=never" });
        build.args(["--file", DOCKERFILE, "--ignorefile", "docker/Dockerfile.dockerignore"]);
        if let Some(target) = image.target {
            build.args(["--target", target]);
        }
        process::run(build.args(["--tag", image.name, "."]))?;
        // The image that had this name before.
        process::run(&mut self.command(&["rmi", "--prune"]))
    }

    fn has_image(&self, name: &str) -> bool {
        succeeds(&mut self.command(&["inspect", "--type", "image", name]))
    }

    /// Returns the size of an image's files.
    fn size_mb(&self, image: Image) -> anyhow::Result<f64> {
        let container = read(&mut self.command(&["from", "--pull=never", image.name]))?;
        let folder = read(&mut self.command(&["mount", &container]))?;
        let counted = read(Command::new("du").args(["-sb", "--apparent-size"]).arg(&folder));
        process::run(&mut self.command(&["rm", &container]))?;
        let counted = counted?;
        let bytes: u64 = counted.split_whitespace().next().unwrap_or_default().parse()?;
        Ok(bytes as f64 / 1e6)
    }

    fn remove_containers(&self) -> anyhow::Result<()> {
        process::run(&mut self.command(&["rm", "--all"]))
    }

    /// Makes an image from the files that `fill` adds to another one (`scratch`: to nothing), with these
    /// settings of `buildah config`.
    fn make(
        &self,
        (from, name): (&str, &str),
        settings: &[&str],
        fill: impl FnOnce(&str, &Path) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let container = read(&mut self.command(&["from", "--pull=never", from]))?;
        let folder = read(&mut self.command(&["mount", &container]))?;
        fill(&container, Path::new(&folder))?;
        process::run(self.command(&["config"]).args(settings).arg(&container))?;
        process::run(&mut self.command(&["umount", &container]))?;
        let commit = ["commit", "--quiet", "--format", "docker", "--rm", &container, name];
        process::run(&mut self.command(&commit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_parsed() {
        let words = |text: &str| -> Vec<String> { text.split(' ').map(str::to_owned).collect() };
        let both = Options { test: true, pull: true };
        assert_eq!(parse(&words("--pull --test")).expect("both are known"), both);
        assert_eq!(parse(&[]).expect("none is needed"), Options::default());
        assert!(parse(&words("--push")).is_err());
    }
}
