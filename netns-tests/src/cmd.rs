//! Running a program to its end with a deadline, and finding and signalling processes.
//!
//! Everything the lab does to the kernel goes through programs (`ip`, `nsenter`, `nft`), which makes it an oracle
//! that shares no code with what is being tested. Signals are sent by the shell's `kill`, so that this crate needs no
//! unsafe code.
//!
//! Invariant: nothing here waits without a deadline.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// How long a command may take unless the caller says otherwise.
pub const DEADLINE: Duration = Duration::from_secs(30);

/// What a finished program left behind.
#[derive(Debug)]
pub struct Output {
    /// Exit code or signal.
    pub status: ExitStatus,
    /// Standard output, invalid UTF-8 replaced.
    pub stdout: String,
    /// Standard error, invalid UTF-8 replaced.
    pub stderr: String,
}

impl Output {
    /// Whether the program exited with 0.
    pub fn ok(&self) -> bool {
        self.status.success()
    }
}

/// The command as one line, for messages. The `nsenter` part is left out: the reader wants to know what ran, and the
/// caller says where.
pub fn describe(cmd: &Command) -> String {
    let mut words: Vec<&OsStr> = vec![cmd.get_program()];
    words.extend(cmd.get_args());
    if words.first().is_some_and(|w| *w == "nsenter")
        && let Some(at) = words.iter().position(|w| *w == "--")
    {
        words.drain(..=at);
    }
    let mut line = String::new();
    for w in words {
        let _ = write!(line, "{}{}", if line.is_empty() { "" } else { " " }, w.to_string_lossy());
    }
    match line.char_indices().nth(200) {
        Some((at, _)) => format!("{} ...", &line[..at]),
        None => line,
    }
}

/// Runs `cmd` with `stdin`, whatever its exit code.
///
/// # Errors
/// When it cannot be started or is still running at the deadline (it is killed then).
pub fn output(mut cmd: Command, stdin: &[u8], deadline: Duration) -> Result<Output> {
    let what = describe(&cmd);
    cmd.stdin(if stdin.is_empty() { Stdio::null() } else { Stdio::piped() });
    cmd.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = cmd.spawn().with_context(|| format!("start `{what}`"))?;
    let feeder = child.stdin.take().map(|mut pipe| {
        let bytes = stdin.to_vec();
        // A program that does not read its input closes the pipe: that is its affair, its exit code tells.
        thread::spawn(move || drop(pipe.write_all(&bytes)))
    });
    let out = child.stdout.take().map(drain);
    let err = child.stderr.take().map(drain);
    let end = Instant::now() + deadline;
    let status = loop {
        if let Some(status) = child.try_wait().with_context(|| format!("wait for `{what}`"))? {
            break status;
        }
        if Instant::now() >= end {
            kill_tree(&mut child);
            bail!("`{what}` did not end within {deadline:?}");
        }
        thread::sleep(Duration::from_millis(1));
    };
    if let Some(f) = feeder {
        let _ = f.join();
    }
    let text = |h: Option<thread::JoinHandle<Vec<u8>>>| {
        h.and_then(|h| h.join().ok()).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default()
    };
    Ok(Output { status, stdout: text(out), stderr: text(err) })
}

/// Runs `cmd`, returns its standard output.
///
/// # Errors
/// As [`output`], and when the exit code is not 0; the message carries the program's own words.
pub fn run(cmd: Command) -> Result<String> {
    run_with(cmd, b"", DEADLINE)
}

/// [`run`] with standard input and a deadline.
///
/// # Errors
/// As [`run`].
pub fn run_with(cmd: Command, stdin: &[u8], deadline: Duration) -> Result<String> {
    let what = describe(&cmd);
    let out = output(cmd, stdin, deadline)?;
    if !out.ok() {
        let said = if out.stderr.trim().is_empty() { out.stdout.trim() } else { out.stderr.trim() };
        bail!("`{what}`: {}: {said}", out.status);
    }
    Ok(out.stdout)
}

fn drain<R: Read + Send + 'static>(mut pipe: R) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut all = Vec::new();
        let _ = pipe.read_to_end(&mut all);
        all
    })
}

/// Kills a child and what it forked (`nsenter --pid` stays in front of the real program), and reaps it.
pub fn kill_tree(child: &mut Child) {
    for pid in children(child.id()) {
        signal(pid, "KILL");
    }
    let _ = child.kill();
    let _ = child.wait();
}

/// Sends a signal by name (`TERM`, `KILL`, `STOP`, `CONT`). A process that is gone already is not an error.
pub fn signal(pid: u32, name: &str) {
    let _ = Command::new("sh")
        .args(["-c", "kill -s \"$1\" \"$2\"", "sh", name, &pid.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
}

/// Parent and start time of a process (`/proc/PID/stat` fields 4 and 22), `None` when it is gone or a zombie.
fn stat(pid: u32) -> Option<(u32, u64)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything; fields count from behind its end.
    let fields: Vec<&str> = text.get(text.rfind(')')? + 2..)?.split(' ').collect();
    if *fields.first()? == "Z" {
        return None;
    }
    Some((fields.get(1)?.parse().ok()?, fields.get(19)?.parse().ok()?))
}

/// Clock ticks since boot when the process started: with the pid, a name for a process that is never reused.
pub fn start_time(pid: u32) -> Option<u64> {
    stat(pid).map(|(_, start)| start)
}

/// Living children of a process, in no order.
pub fn children(pid: u32) -> Vec<u32> {
    let Ok(dir) = std::fs::read_dir("/proc") else { return Vec::new() };
    dir.flatten()
        .filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok())
        .filter(|p| stat(*p).is_some_and(|(parent, _)| parent == pid))
        .collect()
}

/// Asks `probe` every few milliseconds until it answers, at most `deadline`.
///
/// # Errors
/// At the deadline, naming `what` was waited for.
pub fn wait_for<T>(what: &str, deadline: Duration, mut probe: impl FnMut() -> Option<T>) -> Result<T> {
    let end = Instant::now() + deadline;
    loop {
        if let Some(found) = probe() {
            return Ok(found);
        }
        if Instant::now() >= end {
            bail!("waited {deadline:?} for {what}");
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a program is found in PATH (or is an existing path).
pub fn have(program: &str) -> bool {
    if program.contains('/') {
        return Path::new(program).exists();
    }
    let path = std::env::var("PATH").unwrap_or_default();
    path.split(':').chain(["/usr/sbin", "/sbin"]).any(|d| Path::new(d).join(program).is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_and_exit_code_are_told() {
        let mut cmd = Command::new("sh");
        cmd.args(["-c", "cat; echo oops >&2; exit 3"]);
        let out = output(cmd, b"abc", DEADLINE).expect("sh runs");
        assert_eq!((out.stdout.as_str(), out.stderr.as_str(), out.status.code()), ("abc", "oops\n", Some(3)));
    }

    #[test]
    fn failing_command_names_itself_and_its_message() {
        let mut cmd = Command::new("sh");
        cmd.args(["-c", "echo no such thing >&2; exit 1"]);
        let text = run(cmd).expect_err("exit 1").to_string();
        assert!(text.contains("no such thing") && text.starts_with("`sh -c"), "{text}");
    }

    #[test]
    fn deadline_kills() {
        let mut cmd = Command::new("sleep");
        cmd.arg("60");
        let begun = Instant::now();
        let text = output(cmd, b"", Duration::from_millis(50)).expect_err("too slow").to_string();
        assert!(text.contains("did not end"), "{text}");
        assert!(begun.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn children_are_found_by_parent() {
        let mut child = Command::new("sleep").arg("60").spawn().expect("sleep starts");
        assert!(children(std::process::id()).contains(&child.id()));
        assert!(start_time(child.id()).is_some());
        kill_tree(&mut child);
        assert_eq!(start_time(child.id()), None);
    }
}
