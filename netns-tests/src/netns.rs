//! Namespaces that vanish with their maker.
//!
//! ```text
//!   test or felt-lab process
//!     |  pipe: closes when the process ends, however it ends
//!     v
//!   Guard: first process of a PID namespace (private mounts, own /proc)
//!     |-- underlay   network + mount + UTS namespace, a sleeping holder process
//!     |-- n1         likewise, with its own /run, /etc, /var/lib, /sys and the processes of that node
//!     |    `-- /run/netns/p1-1    a pod: a named network namespace in the node's private /run
//!     `-- n2 ...
//! ```
//!
//! When the guard dies the kernel kills every process of the PID namespace, and with the last process the mounts, the
//! network namespaces, their links, routes and rules go. So a panic, Ctrl-C or `kill -9` of the maker leaves nothing
//! behind, and nothing is ever made in the host's own network namespace.
//!
//! A [`Place`] is where a command runs: a node, or a pod of a node. It is plain data (pid, start time, name), so that
//! a lab left running in the background can be entered again.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::cmd::{self, DEADLINE, Output};

/// Where, inside a node, the directory with felt's programs is mounted.
pub const NODE_BIN: &str = "/run/lab/bin";
/// Where, inside a node, the directory shared by all nodes of a lab is mounted (the file registry lives there).
pub const NODE_SHARED: &str = "/run/lab/shared";

/// A process, named so that a reused pid is not mistaken for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pid {
    /// Process id as the host sees it.
    pub pid: u32,
    /// Start time in clock ticks since boot.
    pub start: u64,
}

impl Pid {
    /// Names a living process.
    pub fn of(pid: u32) -> Option<Pid> {
        cmd::start_time(pid).map(|start| Pid { pid, start })
    }

    /// Whether exactly this process still lives.
    pub fn alive(self) -> bool {
        cmd::start_time(self.pid) == Some(self.start)
    }

    /// Sends a signal by name, if the process is still the same.
    pub fn signal(self, name: &str) {
        if self.alive() {
            cmd::signal(self.pid, name);
        }
    }
}

/// How long a lab lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lifetime {
    /// Until the guard value is dropped or this process ends.
    Tied,
    /// Until it is taken down by name.
    Detached,
}

/// The first process of a lab's PID namespace. Dropping a tied guard ends everything in the lab.
#[derive(Debug)]
pub struct Guard {
    child: Option<Child>,
    init: Pid,
    dir: PathBuf,
}

impl Guard {
    /// Starts the namespace; `dir` (created here) is removed when it ends.
    ///
    /// # Errors
    /// Without root or where the kernel refuses namespaces.
    pub fn start(dir: &Path, lifetime: Lifetime) -> Result<Guard> {
        fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
        // The shell reaps orphans while it waits. Of the two ways to end, "tied" reads a pipe that this process holds.
        // The processes go before the files: a daemon that still runs takes its lease again as soon as it is removed.
        let wait = match lifetime {
            Lifetime::Tied => "exec 3<&0; cat <&3 >/dev/null & wait $!",
            Lifetime::Detached => "sleep infinity & wait $!",
        };
        let script = format!(
            "set -e; mount -n -t proc proc /proc; echo ready; exec >/dev/null 2>&1; set +e; {wait}; \
             kill -KILL -1; for i in 1 2 3 4 5 6 7 8 9 10; do rm -rf \"$1\" && break; sleep 0.1; done"
        );
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--kill-child=KILL", "--mount", "--propagation", "private", "--"]);
        command.args(["sh", "-c", &script, "felt-lab-guard"]).arg(dir);
        command.process_group(0).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.stdin(match lifetime {
            Lifetime::Tied => Stdio::piped(),
            Lifetime::Detached => Stdio::null(),
        });
        let mut child = command.spawn().context("start unshare (package util-linux)")?;
        if let Err(e) = expect_ready(&mut child, "make a PID namespace") {
            cmd::kill_tree(&mut child);
            let _ = fs::remove_dir_all(dir);
            return Err(e);
        }
        let init = *cmd::children(child.id()).first().context("the namespace's first process is gone")?;
        let init = Pid::of(init).context("the namespace's first process is gone")?;
        Ok(Guard { child: (lifetime == Lifetime::Tied).then_some(child), init, dir: dir.to_path_buf() })
    }

    /// A guard that was left in the background, to end it or to add to it.
    ///
    /// # Errors
    /// When it has ended.
    pub fn attach(init: Pid, dir: &Path) -> Result<Guard> {
        ensure!(init.alive(), "the lab in {} has ended", dir.display());
        Ok(Guard { child: None, init, dir: dir.to_path_buf() })
    }

    /// The namespace's first process.
    pub fn init(&self) -> Pid {
        self.init
    }

    /// Ends every process of the lab and waits until they are gone.
    ///
    /// # Errors
    /// When something survives five seconds.
    pub fn end(&mut self) -> Result<()> {
        self.init.signal("KILL");
        if let Some(mut child) = self.child.take() {
            drop(child.stdin.take());
            let _ = child.wait();
        }
        cmd::wait_for("the lab's processes to end", Duration::from_secs(5), || {
            (!self.init.alive()).then_some(())
        })?;
        match fs::remove_dir_all(&self.dir) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                Err(e).with_context(|| format!("remove {}", self.dir.display()))
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.child.is_some() {
            let _ = self.end();
        }
    }
}

/// Reads the child's first line and fails with its error output when it is not "ready".
fn expect_ready(child: &mut Child, doing: &str) -> Result<()> {
    let mut line = String::new();
    let out = child.stdout.take().context("no pipe")?;
    BufReader::new(out).read_line(&mut line).context("read from the new namespace")?;
    if line.trim() == "ready" {
        return Ok(());
    }
    let mut said = String::new();
    if let Some(mut err) = child.stderr.take() {
        let _ = std::io::Read::read_to_string(&mut err, &mut said);
    }
    let hint = if said.contains("not permitted") { " (root is needed)" } else { "" };
    bail!("{doing}{hint}: {}", said.trim())
}

/// Directories of the host that a node sees.
#[derive(Clone, Debug)]
pub struct NodeMounts<'a> {
    /// Felt's programs; appears as [`NODE_BIN`].
    pub bin: &'a Path,
    /// Shared by all nodes of a lab; appears as [`NODE_SHARED`].
    pub shared: &'a Path,
    /// An empty directory to build the private mounts on; nothing of it stays visible.
    pub stage: &'a Path,
}

/// The mounts of a node: private /run, /var/lib and a private copy (overlay) of /etc. `$1` stage, `$2` bin, `$3`
/// shared, `$4` host name. `mount -n`, since mount(8) would otherwise make `/run/mount` on the machine for its bookkeeping.
const NODE_SCRIPT: &str = r#"
set -e
mount -n -t proc proc /proc
mount -n -t sysfs sysfs /sys
mount -n -t tmpfs -o mode=755 felt-lab "$1"
cd "$1"
mkdir -p run/netns run/lock run/lab/bin run/lab/shared lib/cni up work etc
mount -n --bind "$2" run/lab/bin
mount -n --bind "$3" run/lab/shared
if mount -n -t overlay -o "lowerdir=/etc,upperdir=$1/up,workdir=$1/work" felt-lab-etc etc 2>/dev/null; then :; else cp -a /etc/. etc/; fi
mkdir -p etc/cni/net.d
mount -n --bind lib /var/lib
mount -n --bind etc /etc
mount -n --rbind run /run
cd /
printf '%s\n' "$4" > /proc/sys/kernel/hostname
ip link set lo up
for f in ipv4/ip_forward ipv6/conf/all/forwarding ipv6/conf/default/forwarding; do echo 1 > /proc/sys/net/$f; done
for f in ipv6/conf/default/accept_dad ipv6/conf/all/accept_dad ipv4/conf/all/rp_filter ipv4/conf/default/rp_filter; do echo 0 > /proc/sys/net/$f; done
echo ready
exec sleep infinity >/dev/null 2>&1
"#;

/// Where commands run: the namespaces of a node, or of one of its pods.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Name for messages.
    pub name: String,
    /// A process whose namespaces they are.
    pub holder: Pid,
    /// The pod's name in the node's /run/netns; `None` = the node itself.
    pub pod: Option<String>,
}

impl Place {
    /// Makes a node's namespaces, with loopback up, forwarding on and nothing else.
    ///
    /// # Errors
    /// When the kernel refuses a namespace or mount.
    pub fn create(guard: &Guard, name: &str, mounts: &NodeMounts<'_>) -> Result<Place> {
        let mut command = Command::new("nsenter");
        command.args(["-t", &guard.init.pid.to_string(), "--pid", "--mount", "--"]);
        command.args(["unshare", "--mount", "--net", "--uts", "--propagation", "private", "--"]);
        command.args(["sh", "-c", NODE_SCRIPT, "felt-lab-node"]);
        command.arg(mounts.stage).arg(mounts.bin).arg(mounts.shared).arg(name);
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().context("start nsenter (package util-linux)")?;
        let doing = format!("make the namespaces of {name}");
        if let Err(e) = expect_ready(&mut child, &doing) {
            cmd::kill_tree(&mut child);
            return Err(e);
        }
        let holder = cmd::children(child.id()).first().and_then(|p| Pid::of(*p)).context(doing)?;
        // `nsenter` waits for the holder and ends with it; nobody needs its exit code. Reap it when that happens.
        std::thread::spawn(move || child.wait());
        Ok(Place { name: name.to_owned(), holder, pod: None })
    }

    /// A pod's place in this node; the namespace need not exist yet.
    pub fn pod(&self, pod: &str) -> Place {
        Place { name: pod.to_owned(), holder: self.holder, pod: Some(pod.to_owned()) }
    }

    /// The root directory of the node's mounts, for reading its files from outside.
    pub fn root(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root", self.holder.pid))
    }

    /// A file of the node, by its absolute path there.
    pub fn path(&self, inside: &str) -> PathBuf {
        self.root().join(inside.trim_start_matches('/'))
    }

    fn net_arg(&self) -> String {
        match &self.pod {
            Some(pod) => format!("--net=/proc/{}/root/run/netns/{pod}", self.holder.pid),
            None => "--net".to_owned(),
        }
    }

    /// A command in all namespaces of this place: its network, mounts, host name and processes.
    pub fn command(&self, program: &str) -> Command {
        let mut c = Command::new("nsenter");
        c.args([
            "-t",
            &self.holder.pid.to_string(),
            "--mount",
            "--uts",
            "--pid",
            &self.net_arg(),
            "--",
            program,
        ]);
        // Own process group: the terminal's Ctrl-C ends the lab through its guard, not each part at random.
        c.env("PATH", search_path()).process_group(0);
        c
    }

    /// A command in the network namespace only; it sees the host's files and processes. Cheaper: no fork.
    pub fn net_command(&self, program: &str) -> Command {
        let mut c = Command::new("nsenter");
        c.args(["-t", &self.holder.pid.to_string(), &self.net_arg(), "--", program]);
        c.env("PATH", search_path()).process_group(0);
        c
    }

    /// Runs a program with all namespaces, returns its output whatever the exit code.
    ///
    /// # Errors
    /// See [`cmd::output`].
    pub fn output(&self, words: &[&str]) -> Result<Output> {
        let (program, args) = words.split_first().context("empty command")?;
        let mut c = self.command(program);
        c.args(args);
        cmd::output(c, b"", DEADLINE).with_context(|| format!("on {}", self.name))
    }

    /// Runs a program with all namespaces, returns its standard output.
    ///
    /// # Errors
    /// See [`cmd::run`].
    pub fn run(&self, words: &[&str]) -> Result<String> {
        let (program, args) = words.split_first().context("empty command")?;
        let mut c = self.command(program);
        c.args(args);
        cmd::run(c).with_context(|| format!("on {}", self.name))
    }

    /// Runs `ip`, words separated by spaces.
    ///
    /// # Errors
    /// See [`cmd::run`].
    pub fn ip(&self, words: &str) -> Result<String> {
        let mut c = self.net_command("ip");
        c.args(words.split_whitespace());
        cmd::run(c).with_context(|| format!("on {}", self.name))
    }

    /// Runs several `ip` commands, one a line, in one process.
    ///
    /// # Errors
    /// See [`cmd::run`].
    pub fn ip_batch(&self, lines: &str) -> Result<()> {
        let mut c = self.net_command("ip");
        c.args(["-batch", "-"]);
        cmd::run_with(c, lines.as_bytes(), DEADLINE).with_context(|| format!("on {}: {lines}", self.name))?;
        Ok(())
    }

    /// `ip -j`: the parsed answer.
    ///
    /// # Errors
    /// See [`cmd::run`]; also when the answer is not JSON.
    pub fn ip_json(&self, words: &str) -> Result<serde_json::Value> {
        let text = self.ip(&format!("-j {words}"))?;
        if text.trim().is_empty() {
            return Ok(serde_json::Value::Array(Vec::new()));
        }
        serde_json::from_str(&text).with_context(|| format!("ip -j {words}: {text}"))
    }

    /// Runs a shell script with all namespaces.
    ///
    /// # Errors
    /// See [`cmd::run`].
    pub fn sh(&self, script: &str) -> Result<String> {
        self.run(&["sh", "-ec", script])
    }

    /// Writes a sysctl given as path below /proc/sys.
    ///
    /// # Errors
    /// When the kernel refuses it.
    pub fn sysctl(&self, path: &str, value: &str) -> Result<()> {
        self.sh(&format!("echo '{value}' > /proc/sys/{path}")).map(drop)
    }

    /// Starts a program in the background with all namespaces; output goes to `log`.
    ///
    /// # Errors
    /// When it cannot be started or ends at once without a process of its own.
    pub fn spawn(&self, mut command: Command, log: &Path) -> Result<Process> {
        let what = cmd::describe(&command);
        let file = File::options()
            .create(true)
            .append(true)
            .open(log)
            .with_context(|| format!("open {}", log.display()))?;
        command.stdin(Stdio::null()).stdout(file.try_clone().context("clone the log file")?).stderr(file);
        Process::start(command).with_context(|| format!("start `{what}` on {}", self.name))
    }
}

/// PATH for programs in a node: that of this process, with the administrator's directories.
fn search_path() -> String {
    let path = std::env::var("PATH").unwrap_or_default();
    format!("{path}:/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin")
}

/// A background program in a place. Dropping it kills the program.
#[derive(Debug)]
pub struct Process {
    front: Child,
    inner: Pid,
    detached: bool,
}

impl Process {
    /// Starts a command made by [`Place::command`] and finds the program behind `nsenter`.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(mut command: Command) -> Result<Process> {
        let mut front = command.spawn()?;
        let inner = cmd::wait_for("the program to start", Duration::from_secs(5), || {
            if let Some(pid) = cmd::children(front.id()).into_iter().find_map(Pid::of) {
                return Some(Ok(pid));
            }
            match front.try_wait() {
                Ok(Some(status)) => Some(Err(anyhow::anyhow!("it ended at once: {status}"))),
                _ => None,
            }
        });
        match inner.and_then(|found| found) {
            Ok(inner) => Ok(Process { front, inner, detached: false }),
            Err(e) => {
                cmd::kill_tree(&mut front);
                Err(e)
            }
        }
    }

    /// The program's process id as the host sees it.
    pub fn pid(&self) -> Pid {
        self.inner
    }

    /// The pipes and exit code of the program.
    pub fn front(&mut self) -> &mut Child {
        &mut self.front
    }

    /// Sends a signal to the program.
    pub fn signal(&self, name: &str) {
        self.inner.signal(name);
        if name == "CONT" {
            // `nsenter` stops itself when its child stops, and would stay so.
            cmd::signal(self.front.id(), "CONT");
        }
    }

    /// Whether the program still runs.
    pub fn alive(&self) -> bool {
        self.inner.alive()
    }

    /// Waits for the end, at most `deadline`.
    ///
    /// # Errors
    /// At the deadline.
    pub fn wait(&mut self, deadline: Duration) -> Result<std::process::ExitStatus> {
        cmd::wait_for("the program to end", deadline, || self.front.try_wait().transpose())?.context("wait")
    }

    /// Lets the program outlive this value.
    pub fn detach(&mut self) {
        self.detached = true;
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.detached {
            return;
        }
        self.inner.signal("KILL");
        let _ = self.front.kill();
        let _ = self.front.wait();
    }
}
