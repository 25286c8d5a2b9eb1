//! Where felt's programs are: the tests run `feltd`, `felt`, `felt-cni` and `felt-lab` as processes, as a node would.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// The directory with felt's programs: `FELT_BIN_DIR`, else the directory of the running program, or for a test
/// binary (which lies in `deps/`) the one above.
///
/// # Errors
/// When the running program's own path is unknown.
pub fn dir() -> Result<PathBuf> {
    if let Some(dir) = std::env::var_os("FELT_BIN_DIR") {
        return Ok(PathBuf::from(dir));
    }
    let exe = std::env::current_exe().context("find the running program")?;
    let dir = exe.parent().context("the running program has no directory")?;
    Ok(if dir.ends_with("deps") { dir.parent().unwrap_or(dir).to_path_buf() } else { dir.to_path_buf() })
}

/// Fails with one clear line when a program is missing.
///
/// # Errors
/// Names the program and how to build it.
pub fn require(dir: &Path, programs: &[&str]) -> Result<()> {
    for p in programs {
        if !dir.join(p).is_file() {
            bail!("{} is missing: build it with `make build`", dir.join(p).display());
        }
    }
    Ok(())
}
