//! A virtual machine with another kernel: Debian's cloud kernel under qemu in software emulation, about four seconds
//! from start to the first command. For what this machine's kernel lacks, and to see felt on an older one.
//!
//! The guest's root directory is this machine's, read-only through virtiofs with a memory file system on top, so that
//! every program, felt's own included, is there under its usual path and nothing written in the guest reaches the
//! host. Only kernel and modules are the package's. Commands go over a virtio serial port, one at a time.
//!
//! ```text
//!   Vm::run("...")  -- unix socket -- virtio port -- sh in the guest
//!   /               -- virtiofsd -- virtiofs (read-only) + tmpfs -- / in the guest
//! ```

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::bins;
use crate::cmd;
use crate::netns::{Guard, Lifetime};
use crate::topology::STATE_DIR;

/// Debian's package that depends on the newest cloud kernel.
const META_PACKAGE: &str = "linux-image-cloud-amd64";
const QEMU: &str = "qemu-system-x86_64";
/// From package qemu-system-common, which qemu-system-x86 depends on.
const VIRTIOFSD: &str = "/usr/lib/qemu/virtiofsd";

/// Modules the first steps of the guest need, in the order in which they load.
const MODULES: [&str; 9] = [
    "drivers/virtio/virtio_ring",
    "drivers/virtio/virtio",
    "drivers/virtio/virtio_pci_modern_dev",
    "drivers/virtio/virtio_pci_legacy_dev",
    "drivers/virtio/virtio_pci",
    "drivers/char/virtio_console",
    "fs/fuse/fuse",
    "fs/fuse/virtiofs",
    "fs/overlayfs/overlay",
];

/// The guest's first program. `@MODULES@` and `@LIB@` are filled in.
const INIT: &str = r#"#!/bin/busybox sh
B=/bin/busybox
$B mount -t proc proc /proc; $B mount -t sysfs sys /sys; $B mount -t devtmpfs dev /dev
for m in @MODULES@; do $B insmod /mod/$m.ko; done
$B mount -t virtiofs -o ro host /host
$B mount -t tmpfs tmpfs /upper; $B mkdir /upper/up /upper/work
$B mount -t overlay -o lowerdir=/host,upperdir=/upper/up,workdir=/upper/work overlay /new
$B mount -t tmpfs tmpfs /new/run; $B mount -t tmpfs tmpfs /new/tmp
$B cat /agent > /new/agent
$B mkdir -p /new/lib/modules; $B mount --bind "/new@LIB@" /new/lib/modules
for d in proc sys dev; do $B mount --move /$d /new/$d; done
exec $B switch_root /new /bin/sh /agent
"#;

/// The guest's command loop: a base64 line in, the exit code and a base64 line out.
const AGENT: &str = r#"
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
mkdir -p /dev/pts /dev/shm /run/netns /run/lock
mount -t devpts devpts /dev/pts; mount -t tmpfs tmpfs /dev/shm; mount -t cgroup2 none /sys/fs/cgroup 2>/dev/null
ip link set lo up; modprobe -a tun br_netfilter 2>/dev/null
exec 3<>/dev/vport1p1
echo ready >&3
while read -r line <&3; do
    printf '%s' "$line" | base64 -d > /tmp/command
    sh /tmp/command > /tmp/output 2>&1 < /dev/null
    echo "$?" >&3
    base64 -w0 /tmp/output >&3
    echo >&3
done
echo o > /proc/sysrq-trigger
"#;

/// Kernel, first file system and modules, made once and kept in `target/vm`.
#[derive(Clone, Debug)]
pub struct Image {
    vmlinuz: PathBuf,
    initrd: PathBuf,
    /// For example `6.1.0-44-cloud-amd64`.
    pub release: String,
}

/// Fetches the kernel package (not installed, only unpacked) and builds the first file system, unless done before.
///
/// # Errors
/// Says what is missing: a program, the package, or the network to fetch it.
pub fn prepare() -> Result<Image> {
    for (program, package) in [
        (QEMU, "qemu-system-x86"),
        (VIRTIOFSD, "qemu-system-common"),
        ("/bin/busybox", "busybox-static"),
        ("dpkg-deb", "dpkg"),
        ("depmod", "kmod"),
    ] {
        ensure!(cmd::have(program), "{program} is missing (package {package})");
    }
    let dir = bins::dir()?.parent().context("the target directory")?.join("vm");
    fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
    let unpacked = dir.join("kernel");
    let done = dir.join("release");
    if !done.exists() {
        fetch(&dir, &unpacked)?;
    }
    let release = fs::read_to_string(&done).context("read the kernel's release")?.trim().to_owned();
    let image = Image {
        vmlinuz: unpacked.join("boot").join(format!("vmlinuz-{release}")),
        initrd: dir.join("initrd.gz"),
        release,
    };
    // Cheap, and right after the code above changes.
    build_initrd(&dir, &unpacked.join("lib/modules"), &image)?;
    Ok(image)
}

fn fetch(dir: &Path, unpacked: &Path) -> Result<()> {
    let show = |what: &str| {
        let mut c = Command::new("apt-cache");
        c.args(["depends", what]);
        cmd::run(c)
    };
    let mut text = show(META_PACKAGE).unwrap_or_default();
    if !text.contains("Depends: linux-image-") {
        let mut c = Command::new("apt-get");
        c.args(["update", "-q"]);
        cmd::run_with(c, b"", Duration::from_secs(120)).context("the package lists cannot be fetched")?;
        text = show(META_PACKAGE)?;
    }
    let package = text
        .lines()
        .find_map(|l| l.trim().strip_prefix("Depends: "))
        .filter(|p| p.starts_with("linux-image-"));
    let package = package.with_context(|| format!("package {META_PACKAGE} is not to be had"))?;
    let mut c = Command::new("apt-get");
    c.args(["download", "-q", package]).current_dir(dir);
    cmd::run_with(c, b"", Duration::from_secs(180))
        .with_context(|| format!("package {package} cannot be fetched"))?;
    let deb = fs::read_dir(dir)
        .context("list the download directory")?
        .flatten()
        .map(|e| e.path())
        .find(|p| p.extension().is_some_and(|e| e == "deb"))
        .context("the package was not downloaded")?;
    let _ = fs::remove_dir_all(unpacked);
    let mut c = Command::new("dpkg-deb");
    c.arg("-x").arg(&deb).arg(unpacked);
    cmd::run_with(c, b"", Duration::from_secs(60))?;
    let release = package.trim_start_matches("linux-image-");
    let mut c = Command::new("depmod");
    c.env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin").arg("-b").arg(unpacked).arg(release);
    cmd::run(c)?;
    let _ = fs::remove_file(deb);
    fs::write(dir.join("release"), release).context("note the kernel's release")
}

fn build_initrd(dir: &Path, modules: &Path, image: &Image) -> Result<()> {
    let tree = dir.join("initrd");
    let _ = fs::remove_dir_all(&tree);
    for d in ["bin", "mod", "proc", "sys", "dev", "host", "upper", "new"] {
        fs::create_dir_all(tree.join(d)).with_context(|| format!("create {}", tree.display()))?;
    }
    fs::copy("/bin/busybox", tree.join("bin/busybox")).context("copy busybox")?;
    let mut names = Vec::new();
    for module in MODULES {
        let name = module.rsplit('/').next().unwrap_or(module);
        let from = modules.join(&image.release).join("kernel").join(format!("{module}.ko"));
        fs::copy(&from, tree.join("mod").join(format!("{name}.ko")))
            .with_context(|| format!("copy {}", from.display()))?;
        names.push(name);
    }
    let lib = modules.to_string_lossy();
    let init = INIT.replace("@MODULES@", &names.join(" ")).replace("@LIB@", &lib);
    fs::write(tree.join("agent"), AGENT).context("write the agent")?;
    fs::write(tree.join("init"), init).context("write init")?;
    let script = "cd \"$1\" && chmod 755 init && find . | busybox cpio -o -H newc 2>/dev/null | gzip -1 > \"$2.new\" && mv \"$2.new\" \"$2\"";
    let mut c = Command::new("sh");
    c.args(["-ec", script, "sh"]).arg(&tree).arg(&image.initrd);
    cmd::run(c).map(drop)
}

/// A running virtual machine. Dropping it ends it.
#[derive(Debug)]
pub struct Vm {
    port: BufReader<UnixStream>,
    console: PathBuf,
    /// The guest kernel's release.
    pub release: String,
    _guard: Guard,
}

impl Vm {
    /// Boots it.
    ///
    /// # Errors
    /// See [`prepare`]; also when the guest does not answer within a minute, with the end of its console.
    pub fn boot() -> Result<Vm> {
        let image = prepare()?;
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let count = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let dir = Path::new(STATE_DIR).join(format!("vm-{}-{count}", std::process::id()));
        let guard = Guard::start(&dir, Lifetime::Tied)?;
        let console = dir.join("console");
        let log = fs::File::create(&console).with_context(|| format!("create {}", console.display()))?;
        let inside = |program: &str| -> Result<Command> {
            // With the guard, both programs end however this process ends.
            let mut c = Command::new("nsenter");
            c.args(["-t", &guard.init().pid.to_string(), "--pid", "--mount", "--", program]);
            c.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log.try_clone()?);
            std::os::unix::process::CommandExt::process_group(&mut c, 0);
            Ok(c)
        };
        let (files, agent) = (dir.join("files.sock"), dir.join("agent.sock"));
        let mut c = inside(VIRTIOFSD)?;
        c.arg(format!("--socket-path={}", files.display()));
        c.args(["-o", "source=/", "-o", "cache=auto", "-o", "sandbox=chroot", "-f"]);
        reap(c.spawn().context("start virtiofsd")?);
        cmd::wait_for("virtiofsd's socket", Duration::from_secs(5), || files.exists().then_some(()))?;
        let mut c = inside(QEMU)?;
        c.args(["-accel", "tcg", "-m", "1024", "-smp", "2", "-nographic", "-no-reboot", "-nic", "none"]);
        c.arg("-kernel").arg(&image.vmlinuz).arg("-initrd").arg(&image.initrd);
        c.args(["-append", "console=ttyS0 quiet panic=-1"]);
        c.args(["-object", "memory-backend-memfd,id=mem,size=1024M,share=on", "-numa", "node,memdev=mem"]);
        c.args(["-chardev", &format!("socket,id=files,path={}", files.display())]);
        c.args(["-device", "vhost-user-fs-pci,chardev=files,tag=host", "-device", "virtio-serial"]);
        c.args(["-chardev", &format!("socket,id=agent,path={},server=on,wait=off", agent.display())]);
        c.args(["-device", "virtserialport,chardev=agent,name=felt"]);
        reap(c.spawn().context("start qemu")?);
        let port =
            cmd::wait_for("qemu's socket", Duration::from_secs(10), || UnixStream::connect(&agent).ok())
                .with_context(|| tail(&console))?;
        let mut vm = Vm { port: BufReader::new(port), console, release: image.release, _guard: guard };
        vm.deadline(Duration::from_secs(60))?;
        let first = vm.line().with_context(|| format!("the guest did not start: {}", tail(&vm.console)))?;
        ensure!(first == "ready", "the guest said {first:?}");
        Ok(vm)
    }

    fn deadline(&self, deadline: Duration) -> Result<()> {
        self.port.get_ref().set_read_timeout(Some(deadline)).context("set a timeout")
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        let n = self.port.read_line(&mut line).context("read from the guest")?;
        ensure!(n > 0, "the guest has ended: {}", tail(&self.console));
        Ok(line.trim_end().to_owned())
    }

    /// Runs a shell script in the guest, returns its exit code and output (both streams).
    ///
    /// # Errors
    /// When the guest ends or is silent for `deadline`.
    pub fn output(&mut self, script: &str, deadline: Duration) -> Result<(i32, String)> {
        self.deadline(deadline)?;
        let line = format!("{}\n", encode(script.as_bytes()));
        self.port.get_mut().write_all(line.as_bytes()).context("write to the guest")?;
        let code = self.line().with_context(|| format!("in the guest: {script}"))?;
        let text = self.line()?;
        let code = code.parse().with_context(|| format!("exit code {code:?}"))?;
        Ok((code, String::from_utf8_lossy(&decode(&text)?).into_owned()))
    }

    /// Runs a shell script in the guest, returns its output.
    ///
    /// # Errors
    /// As [`Vm::output`], and when the exit code is not 0.
    pub fn run(&mut self, script: &str) -> Result<String> {
        let (code, text) = self.output(script, Duration::from_secs(180))?;
        ensure!(code == 0, "in the guest, `{script}`: exit code {code}: {text}");
        Ok(text)
    }
}

fn reap(mut child: std::process::Child) {
    std::thread::spawn(move || child.wait());
}

fn tail(console: &Path) -> String {
    let text = String::from_utf8_lossy(&fs::read(console).unwrap_or_default()).into_owned();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(15)..].join("\n")
}

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Base64 (RFC 4648): a script may hold any byte, a serial line may not.
fn encode(bytes: &[u8]) -> String {
    let mut out = String::new();
    for chunk in bytes.chunks(3) {
        let n = chunk.iter().fold(0_usize, |n, b| (n << 8) | usize::from(*b)) << (8 * (3 - chunk.len()));
        for i in 0..4 {
            let sign = ALPHABET[(n >> (18 - 6 * i)) & 63];
            out.push(if i <= chunk.len() { char::from(sign) } else { '=' });
        }
    }
    out
}

fn decode(text: &str) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    let (mut n, mut bits) = (0_u32, 0);
    for c in text.bytes().filter(|c| *c != b'=') {
        let Some(value) = ALPHABET.iter().position(|a| *a == c) else {
            bail!("bad base64 from the guest: {text:?}")
        };
        n = (n << 6) | u32::try_from(value).context("below 64")?;
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            out.push(u8::try_from((n >> bits) & 0xff).context("one byte")?);
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_follows_the_rfcs_examples() {
        for (plain, coded) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(encode(plain.as_bytes()), coded);
            assert_eq!(decode(coded).expect("valid"), plain.as_bytes());
        }
        assert!(decode("a b").is_err());
    }
}
