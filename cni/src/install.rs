//! `felt-cni install --dir DIR [--force]`: one hard link per plugin name.
//!
//! The binary is copied to `DIR/felt-cni` (unless it is that file already) and every plugin name
//! becomes a hard link to it, so that a delegate is recognised as this same file. A file of another
//! origin in the way is left alone without `--force` and kept as `NAME.felt-backup` with it. Each
//! name is replaced by a rename: a runtime starting a plugin meanwhile finds the old or the new one.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::plugins;

/// Runs the command; the text goes to standard output.
///
/// # Errors
/// A text for standard error. Without `--force`, foreign files in the way are an error before
/// anything is changed.
pub fn run(args: &[String]) -> Result<String, String> {
    let mut dir = None;
    let mut force = false;
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--force" => force = true,
            "--dir" => dir = args.next().map(PathBuf::from),
            other => match other.strip_prefix("--dir=") {
                Some(path) => dir = Some(path.into()),
                None => return Err(format!("install: unknown argument {other:?}")),
            },
        }
    }
    let dir = dir.ok_or("install: --dir DIR is needed, for example --dir /opt/cni/bin")?;
    let exe = fs::read_link("/proc/self/exe").map_err(|err| format!("install: find own file: {err}"))?;
    install(&exe, &dir, force)
}

fn install(exe: &Path, dir: &Path, force: bool) -> Result<String, String> {
    let fail = |what: &str, path: &Path, err: io::Error| format!("install: {what} {}: {err}", path.display());
    fs::create_dir_all(dir).map_err(|err| fail("make", dir, err))?;
    let target = dir.join("felt-cni");
    let before = identity(&target);
    let names: Vec<&str> = plugins::ALL.iter().map(|p| p.name).collect();
    if !force {
        let foreign: Vec<&str> = names
            .iter()
            .copied()
            .filter(|name| {
                let there = identity(&dir.join(name));
                there.is_some() && there != before && !is_felt(&dir.join(name))
            })
            .collect();
        if !foreign.is_empty() {
            return Err(format!(
                "install: {} holds other files named {}; --force replaces them and keeps each as NAME.felt-backup",
                dir.display(),
                foreign.join(", ")
            ));
        }
    }
    if identity(exe) != before || before.is_none() {
        let temp = dir.join(".felt-cni.new");
        fs::copy(exe, &temp).map_err(|err| fail("write", &temp, err))?;
        fs::set_permissions(&temp, fs::Permissions::from_mode(0o755))
            .map_err(|err| fail("chmod", &temp, err))?;
        fs::rename(&temp, &target).map_err(|err| fail("replace", &target, err))?;
    }
    let own = identity(&target);
    let mut linked = 0;
    let mut kept = Vec::new();
    for name in names {
        let path = dir.join(name);
        let there = identity(&path);
        if there == own {
            continue;
        }
        if there.is_some() && there != before && !is_felt(&path) {
            let backup = dir.join(format!("{name}.felt-backup"));
            // An earlier backup is the older original: it stays.
            if identity(&backup).is_none() {
                fs::hard_link(&path, &backup)
                    .or_else(|_| fs::copy(&path, &backup).map(drop))
                    .map_err(|err| fail("keep", &backup, err))?;
                kept.push(format!("{name}.felt-backup"));
            }
        }
        let temp = dir.join(format!(".{name}.felt-new"));
        let _ = fs::remove_file(&temp);
        fs::hard_link(&target, &temp).map_err(|err| fail("link", &temp, err))?;
        fs::rename(&temp, &path).map_err(|err| fail("replace", &path, err))?;
        linked += 1;
    }
    let mut text = format!("{linked} plugins linked in {}\n", dir.display());
    if !kept.is_empty() {
        text.push_str(&format!("kept: {}\n", kept.join(", ")));
    }
    Ok(text)
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::metadata(path).ok().map(|m| (m.dev(), m.ino()))
}

/// A text every build of this binary carries, so that an older felt file is recognised as ours.
const MARK: &str = "felt-cni multi-call binary, mark 5d1f0c7e";

fn is_felt(path: &Path) -> bool {
    let needle = MARK.as_bytes();
    fs::read(path).is_ok_and(|bytes| bytes.windows(needle.len()).any(|w| w == needle))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_every_name_and_keeps_replaced_files_once() {
        let dir = tempfile::tempdir().unwrap();
        let exe = dir.path().join("exe");
        fs::write(&exe, format!("one {MARK}")).unwrap();
        let bin = dir.path().join("bin");
        fs::create_dir(&bin).unwrap();
        fs::write(bin.join("bridge"), "reference").unwrap();

        let refused = install(&exe, &bin, false).unwrap_err();
        assert!(refused.contains("bridge") && refused.contains("--force"), "{refused}");
        assert_eq!(fs::read_dir(&bin).unwrap().count(), 1, "a refusal changes nothing");

        install(&exe, &bin, true).unwrap();
        assert_eq!(fs::read_to_string(bin.join("bridge.felt-backup")).unwrap(), "reference");
        for plugin in plugins::ALL {
            assert_eq!(identity(&bin.join(plugin.name)), identity(&bin.join("felt-cni")), "{}", plugin.name);
        }

        // A new version replaces the old one without --force and without touching the backup.
        fs::write(&exe, format!("two {MARK}")).unwrap();
        install(&exe, &bin, false).unwrap();
        assert!(fs::read_to_string(bin.join("host-local")).unwrap().starts_with("two"));
        assert_eq!(fs::read_to_string(bin.join("bridge.felt-backup")).unwrap(), "reference");
        assert!(install(&bin.join("felt-cni"), &bin, false).unwrap().starts_with("0 plugins"));
    }
}
