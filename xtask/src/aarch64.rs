//! `cargo xtask aarch64`: builds for aarch64 Linux and runs the engine's tests under emulation (qemu-user).
//!
//! Compiler, standard library and emulator come from Debian, in a root folder of its own below `target/aarch64`, which
//! is made once: to make it again, delete that folder. Commands run in it by chroot, in a mount namespace that ends with
//! them. The crates are those of this machine's cargo, mounted read-only.
//!
//! Emulation shows that results are right, and says nothing about speed.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, ensure};

use super::{
    process::{self, cargo, read, root, succeeds},
    test,
};

const TARGET: &str = "aarch64-unknown-linux-gnu";
/// This machine's target: for the build scripts and macros.
const HOST: &str = "x86_64-unknown-linux-gnu";
const MIRROR: &str = "http://deb.debian.org/debian";
const RELEASE: &str = "trixie";
/// The release's own Rust is older than `rust-version` in Cargo.toml.
const BACKPORTS: &str = "trixie-backports";
const PACKAGES: [&str; 8] = [
    "rustc",
    "cargo",
    "libstd-rust-dev:arm64",
    "gcc",
    "libc6-dev",
    "gcc-aarch64-linux-gnu",
    "libc6-dev-arm64-cross",
    "qemu-user",
];
/// Environment of the commands in Debian. The tests fail unless they select these kernels.
const ENVIRONMENT: [&str; 9] = [
    "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME=/tmp",
    "CARGO_HOME=/cargo",
    "CARGO_TARGET_DIR=/src/target/aarch64/build",
    "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc",
    "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER=qemu-aarch64",
    // Every extension that the emulator knows.
    "QEMU_CPU=max",
    "TRITMILL_TEST_ISA=neon",
    // Its files would take as much space as the rest.
    "CARGO_INCREMENTAL=0",
];
/// Mounts what the commands need below `$1`: the repository `$2` and the crates `$3`. Then runs the rest in it.
const ENTER: &str = r#"set -e
debian=$1 source=$2 crates=$3
shift 3
mkdir -p "$debian/src" "$debian/cargo/registry"
mount --bind "$source" "$debian/src"
mount --bind "$crates" "$debian/cargo/registry"
mount -o remount,bind,ro "$debian/cargo/registry"
mount -t proc proc "$debian/proc"
mount --rbind /dev "$debian/dev"
exec chroot "$debian" env -i --chdir=/src "$@"
"#;

pub fn run(filters: &[String]) -> anyhow::Result<()> {
    let user = read(Command::new("id").arg("-u"))?;
    ensure!(user == "0", "this task makes a Debian and mounts folders, which needs root");
    let machine = read(Command::new("uname").arg("-m"))?;
    ensure!(machine == "x86_64", "this task emulates aarch64 on x86-64, and this is {machine}");
    let debian = Debian::open()?;
    process::run(cargo().args(["fetch", "--locked", "--target", TARGET, "--target", HOST]))?;
    let mut tests = debian.cargo(&["test", "--package", "tritmill-engine", "--no-fail-fast"])?;
    tests.args(["--target", TARGET, "--lib", "--tests", "--"]).args(filters);
    process::run(&mut tests)?;
    if filters.is_empty() {
        let check = ["check", "--workspace", "--all-targets", "--target", TARGET];
        process::run(&mut debian.cargo(&check)?)?;
    }
    Ok(())
}

/// A root folder with Debian for x86-64, and the libraries of arm64 beside its own.
struct Debian {
    folder: PathBuf,
}

impl Debian {
    /// Makes the folder unless it is there.
    fn open() -> anyhow::Result<Self> {
        let folder = root().join("target/aarch64/debian");
        let (debian, done) = (Self { folder }, root().join("target/aarch64/packages"));
        let packages = PACKAGES.join("\n");
        if fs::read_to_string(&done).is_ok_and(|made| made == packages) {
            return Ok(debian);
        }
        if !succeeds(Command::new("debootstrap").arg("--version")) {
            test::install_packages(&["debootstrap"]).into_iter().collect::<Result<(), _>>()?;
        }
        debian.make().with_context(|| format!("cannot install Debian {RELEASE} from {MIRROR}"))?;
        fs::write(done, packages).context("cannot write to target")?;
        Ok(debian)
    }

    fn make(&self) -> anyhow::Result<()> {
        if self.folder.exists() {
            fs::remove_dir_all(&self.folder).context("cannot remove the old Debian")?;
        }
        fs::create_dir_all(&self.folder).context("cannot write to target")?;
        let mut debootstrap = Command::new("debootstrap");
        debootstrap.args(["--variant=minbase", RELEASE]).arg(&self.folder).arg(MIRROR);
        process::run(&mut debootstrap)?;
        let sources = format!("deb {MIRROR} {RELEASE} main\ndeb {MIRROR} {BACKPORTS} main\n");
        fs::write(self.folder.join("etc/apt/sources.list"), sources)?;
        process::run(self.chroot().args(["dpkg", "--add-architecture", "arm64"]))?;
        process::run(self.chroot().args(["apt-get", "update", "-q"]))?;
        let install = ["apt-get", "install", "-y", "-q", "--no-install-recommends"];
        process::run(self.chroot().args(install).args(["-t", BACKPORTS]).args(PACKAGES))?;
        // 300 MB that are not needed again.
        process::run(self.chroot().args(["apt-get", "clean"]))?;
        process::run(self.chroot().args(["find", "/var/lib/apt/lists", "-type", "f", "-delete"]))
    }

    /// Returns a command that runs its arguments in the folder.
    fn chroot(&self) -> Command {
        let mut command = Command::new("chroot");
        command.arg(&self.folder).env("DEBIAN_FRONTEND", "noninteractive").env("LC_ALL", "C");
        command
    }

    /// Returns a cargo command of Debian's cargo on the repository.
    fn cargo(&self, arguments: &[&str]) -> anyhow::Result<Command> {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-c", ENTER, "sh"]);
        command.arg(&self.folder).arg(root()).arg(crates()?);
        command.args(ENVIRONMENT).arg("cargo");
        let (name, rest) = arguments.split_first().context("a cargo command has a name")?;
        command.args([name, "--offline", "--locked"]).args(rest);
        Ok(command)
    }
}

/// Returns the folder where this machine's cargo keeps crates.
fn crates() -> anyhow::Result<PathBuf> {
    let home = std::env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cargo")));
    let crates = home.context("neither CARGO_HOME nor HOME is set")?.join("registry");
    ensure!(crates.is_dir(), "cargo keeps no crates in {}", crates.display());
    Ok(crates)
}
