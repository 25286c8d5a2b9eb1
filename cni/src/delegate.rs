//! Calling another plugin: found over CNI_PATH, run in this process when it is this same file,
//! executed otherwise.
//!
//! The delegate sees the variables of the call with CNI_COMMAND replaced and the bytes given as its
//! standard input. An in-process delegate takes the same way through the protocol, so that its
//! errors and results are those an executed one would have printed.

use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command as Process, Stdio};
use std::time::Duration;

use crate::json::Value;
use crate::plugins;
use crate::skel::{self, Call, Command};
use crate::trace;
use crate::types::error::{Error, Result};
use crate::types::result::CniResult;

/// Runs delegate `kind` for ADD and reads its result.
///
/// # Errors
/// Not found, not runnable, its own error, or a result that cannot be read.
pub fn add(call: &Call<'_>, kind: &str, stdin: &[u8]) -> Result<CniResult> {
    let value = run(call, Command::Add, kind, stdin)?.ok_or_else(|| {
        Error::internal(format!("plugin {kind:?} printed no result: unexpected end of JSON input"))
    })?;
    CniResult::from_json(&value, call.conf.version)
}

/// Runs delegate `kind` for a command without a result.
///
/// # Errors
/// Not found, not runnable, or its own error.
pub fn call(call: &Call<'_>, command: Command, kind: &str, stdin: &[u8]) -> Result<()> {
    run(call, command, kind, stdin).map(drop)
}

fn run(call: &Call<'_>, command: Command, kind: &str, stdin: &[u8]) -> Result<Option<Value>> {
    let path = find(kind, &call.env.path)?;
    if let Some(plugin) = is_this_file(&path).then(|| plugins::find(kind)).flatten() {
        trace::step(|| format!("delegate {kind} {} in process", command.as_str()));
        let out = skel::dispatch(plugin, &call.env.for_command(command), stdin);
        trace::step(|| format!("delegate {kind} returned"));
        return out;
    }
    trace::step(|| format!("delegate {kind} {} as {}", command.as_str(), path.display()));
    execute(&path, command, stdin)
}

/// The first regular file named `kind` in the directories of `cni_path`.
///
/// # Errors
/// The reference's texts.
pub fn find(kind: &str, cni_path: &str) -> Result<PathBuf> {
    if kind.is_empty() {
        return Err(Error::internal("no plugin name provided"));
    }
    if kind.contains('/') {
        return Err(Error::internal(format!("invalid plugin name: {kind}")));
    }
    if cni_path.is_empty() {
        return Err(Error::internal("no paths provided"));
    }
    let dirs: Vec<&str> = cni_path.split(':').collect();
    dirs.iter()
        .map(|dir| Path::new(dir).join(kind))
        .find(|path| std::fs::metadata(path).is_ok_and(|m| m.is_file()))
        .ok_or_else(|| {
            Error::internal(format!("failed to find plugin {kind:?} in path [{}]", dirs.join(" ")))
        })
}

/// Whether delegate `kind` would run in this process.
pub fn is_own(call: &Call<'_>, kind: &str) -> bool {
    find(kind, &call.env.path).is_ok_and(|path| is_this_file(&path)) && plugins::find(kind).is_some()
}

fn is_this_file(path: &Path) -> bool {
    let id = |m: std::fs::Metadata| (m.dev(), m.ino());
    match (std::fs::metadata("/proc/self/exe"), std::fs::metadata(path)) {
        (Ok(own), Ok(other)) => id(own) == id(other),
        _ => false,
    }
}

/// Attempts to start a file that is still being written ("text file busy"), one second apart.
const BUSY_TRIES: u32 = 6;

fn execute(path: &Path, command: Command, stdin: &[u8]) -> Result<Option<Value>> {
    let mut tries = 0;
    let mut child = loop {
        tries += 1;
        let spawned = Process::new(path)
            .env("CNI_COMMAND", command.as_str())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        match spawned {
            Ok(child) => break child,
            Err(err) if err.kind() == std::io::ErrorKind::ExecutableFileBusy && tries < BUSY_TRIES => {
                std::thread::sleep(Duration::from_secs(1));
            }
            Err(err) => return Err(Error::from(err).context(format!("fork/exec {}", path.display()))),
        }
    };
    if let Some(mut pipe) = child.stdin.take() {
        // A plugin that fails before reading closes the pipe; its answer tells more than EPIPE.
        let _ = pipe.write_all(stdin);
    }
    let output = child.wait_with_output()?;
    if output.status.success() {
        let _ = std::io::stderr().write_all(&output.stderr);
        if output.stdout.iter().all(u8::is_ascii_whitespace) {
            return Ok(None);
        }
        return Value::parse(&output.stdout).map(Some).map_err(Error::internal);
    }
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    if stdout.trim().is_empty() {
        return Err(Error::internal(if stderr.is_empty() {
            format!("netplugin failed with no error message: {}", output.status)
        } else {
            format!("netplugin failed: {stderr:?}")
        }));
    }
    let parsed = Value::parse(&output.stdout);
    Err(match parsed.as_ref().ok().and_then(Error::from_json) {
        Some(err) => err,
        None => Error::internal(format!(
            "netplugin failed but error parsing its diagnostic message {stdout:?}: {}",
            parsed.err().unwrap_or_else(|| "not an error object".into())
        )),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn script(dir: &Path, name: &str, body: &str) -> PathBuf {
        let path = dir.join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn finds_the_first_regular_file() {
        let dir = tempfile::tempdir().unwrap();
        let text = dir.path().to_str().unwrap();
        std::fs::create_dir(dir.path().join("a")).unwrap();
        assert_eq!(
            find("a", &format!("/nonexistent:{text}")).unwrap_err().msg,
            format!("failed to find plugin \"a\" in path [/nonexistent {text}]")
        );
        std::fs::write(dir.path().join("b"), "").unwrap();
        assert_eq!(find("b", &format!("/nonexistent:{text}")).unwrap(), dir.path().join("b"));
        assert_eq!(find("", "/x").unwrap_err().msg, "no plugin name provided");
        assert_eq!(find("../b", "/x").unwrap_err().msg, "invalid plugin name: ../b");
        assert_eq!(find("b", "").unwrap_err().msg, "no paths provided");
    }

    #[test]
    fn reads_results_and_errors_of_an_executed_plugin() {
        let dir = tempfile::tempdir().unwrap();
        let echo = script(dir.path(), "echo", "cat; echo note >&2");
        let got = execute(&echo, Command::Add, b"{\"a\":1}").unwrap().unwrap();
        assert_eq!(got.to_compact(), "{\"a\":1}");
        let typed =
            script(dir.path(), "typed", "echo '{\"code\":11,\"msg\":\"later\",\"details\":\"d\"}'; exit 1");
        assert_eq!(execute(&typed, Command::Add, b"").unwrap_err(), Error::new(11, "later", "d"));
        let words = script(dir.path(), "words", "echo oops >&2; exit 2");
        assert_eq!(execute(&words, Command::Del, b"").unwrap_err().msg, "netplugin failed: \"oops\\n\"");
        let junk = script(dir.path(), "junk", "echo junk; exit 1");
        assert!(
            execute(&junk, Command::Del, b"")
                .unwrap_err()
                .msg
                .starts_with("netplugin failed but error parsing its diagnostic message \"junk\\n\"")
        );
        let quiet = script(dir.path(), "quiet", "[ \"$CNI_COMMAND\" = DEL ]");
        assert_eq!(execute(&quiet, Command::Del, b"").unwrap(), None);
        assert!(
            execute(&quiet, Command::Add, b"").unwrap_err().msg.starts_with("netplugin failed with no error")
        );
    }
}
