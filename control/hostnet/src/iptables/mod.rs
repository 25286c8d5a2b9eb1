//! iptables through its own programs.
//!
//! The kernel's xtables interface is private to the iptables programs, so they are called: one
//! `iptables-save` to see what is there, and, only if that differs from what is wanted, one
//! `iptables-restore --noflush` that applies the whole difference of a table at once. Never a run per
//! rule. Which variant (nf_tables or legacy) is the host's choice; both behave alike here.
//!
//! [`Iptables`] finds and runs the programs, [`TableState`] and [`Wanted`] are the pure part.

mod state;

use std::ffi::{OsStr, OsString};
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

pub use state::{Position, Rule, TableState, Wanted};

use crate::Error;
use crate::netlink::Family;
use crate::nft::{self, Batch, Nft};

/// Exit code of the programs when another holds the lock or the kernel was busy (`RESOURCE_PROBLEM`
/// of xtables.h).
const RESOURCE_PROBLEM: i32 = 4;
/// How long a program waits for the lock itself, seconds.
const LOCK_WAIT: &str = "5";
/// Pauses between tries while the lock is held or no process can be started.
const RETRY_PAUSES: [Duration; 12] = {
    const fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }
    [
        ms(20),
        ms(40),
        ms(80),
        ms(160),
        ms(250),
        ms(250),
        ms(500),
        ms(500),
        ms(500),
        ms(1000),
        ms(1000),
        ms(1000),
    ]
};

/// Which kernel interface the programs use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// nf_tables.
    Nft,
    /// The old xtables interface.
    Legacy,
}

/// The iptables programs of one family.
#[derive(Debug, Clone)]
pub struct Iptables {
    family: Family,
    directory: PathBuf,
    names: Names,
    path: OsString,
    version: (u32, u32, u32),
    variant: Variant,
}

#[derive(Debug, Clone)]
struct Names {
    main: String,
    save: String,
    restore: String,
}

impl Iptables {
    /// Finds `iptables` or `ip6tables` with their save and restore programs in `PATH`.
    ///
    /// # Errors
    /// [`Error::is_not_found`] when they are not installed.
    pub fn find(family: Family) -> Result<Self, Error> {
        let path =
            std::env::var_os("PATH").unwrap_or_else(|| OsString::from("/usr/sbin:/usr/bin:/sbin:/bin"));
        Self::find_in(family, &path)
    }

    /// As [`Iptables::find`], in other directories.
    pub fn find_in(family: Family, path: &OsStr) -> Result<Self, Error> {
        Self::find_variant(family, path, None)
    }

    /// As [`Iptables::find_in`], for the programs of one variant (`iptables-nft`, `iptables-legacy`).
    pub fn find_variant(family: Family, path: &OsStr, variant: Option<Variant>) -> Result<Self, Error> {
        let tool = match family {
            Family::V4 => "iptables",
            Family::V6 => "ip6tables",
        };
        let main = match variant {
            None => tool.to_owned(),
            Some(Variant::Nft) => format!("{tool}-nft"),
            Some(Variant::Legacy) => format!("{tool}-legacy"),
        };
        let names = Names { save: format!("{main}-save"), restore: format!("{main}-restore"), main };
        let here = |directory: &PathBuf| {
            [&names.main, &names.save, &names.restore].iter().all(|name| directory.join(name).is_file())
        };
        let directory = std::env::split_paths(path).find(here).ok_or_else(|| {
            let text = format!("{0} and {0}-save, {0}-restore are not in {1:?}", names.main, path);
            Error::new("find iptables", io::Error::new(io::ErrorKind::NotFound, text))
        })?;
        let mut found = Self {
            family,
            directory,
            names,
            path: path.to_owned(),
            version: (0, 0, 0),
            variant: Variant::Legacy,
        };
        let output = found.run(&found.names.main, &["--version"], "")?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        (found.version, found.variant) = parse_version(&text)
            .ok_or_else(|| Error::protocol(format!("{} --version", found.names.main), text.trim()))?;
        Ok(found)
    }

    /// The family.
    pub fn family(&self) -> Family {
        self.family
    }

    /// Version of the programs.
    pub fn version(&self) -> (u32, u32, u32) {
        self.version
    }

    /// Which kernel interface the programs use.
    pub fn variant(&self) -> Variant {
        self.variant
    }

    /// Whether MASQUERADE knows `--random-fully` (1.6.2).
    pub fn has_random_fully(&self) -> bool {
        self.version >= (1, 6, 2)
    }

    /// Whether the programs can reach the kernel's tables.
    pub fn probe(&self) -> Result<(), Error> {
        let mut arguments = vec!["-t", "filter", "-S", "INPUT", "1"];
        if self.version >= (1, 6, 0) {
            arguments.extend(["--wait", LOCK_WAIT]);
        }
        self.retried(&self.names.main, &arguments, "").map(drop)
    }

    /// Reads a table.
    pub fn save(&self, table: &str) -> Result<TableState, Error> {
        self.save_all(&[table]).map(|mut states| states.remove(0))
    }

    /// Reads some tables with one run; in the order asked for.
    pub fn save_all(&self, tables: &[&str]) -> Result<Vec<TableState>, Error> {
        let arguments: &[&str] = match tables {
            [table] => &["-t", table],
            // All the tables there are: one program instead of several.
            _ => &[],
        };
        let output = self.retried(&self.names.save, arguments, "")?;
        let text = String::from_utf8_lossy(&output.stdout);
        tables
            .iter()
            .map(|table| {
                TableState::parse(table, &text)
                    .map_err(|text| Error::protocol(format!("{} -t {table}", self.names.save), text))
            })
            .collect()
    }

    /// Applies lines in `iptables-save` form, leaving all else as it is; a table is changed whole or
    /// not at all.
    pub fn restore(&self, payload: &str) -> Result<(), Error> {
        let mut arguments = vec!["--noflush"];
        if self.version >= (1, 6, 2) {
            arguments.extend(["--wait", LOCK_WAIT]);
        }
        self.retried(&self.names.restore, &arguments, payload).map(drop)
    }

    /// Makes a table hold what is wanted. Reads first; writes only a difference, and then once.
    /// Says whether it wrote.
    pub fn ensure(&self, wanted: &Wanted) -> Result<bool, Error> {
        self.ensure_all(std::slice::from_ref(wanted))
    }

    /// Makes several tables hold what is wanted with one look and at most one change.
    pub fn ensure_all(&self, wanted: &[Wanted]) -> Result<bool, Error> {
        let tables: Vec<&str> = wanted.iter().map(|wanted| wanted.table.as_str()).collect();
        if tables.is_empty() {
            return Ok(false);
        }
        self.settle(&tables, |found| {
            wanted.iter().zip(found).filter_map(|(wanted, found)| wanted.changes(found)).collect()
        })
    }

    /// Whether a table holds what is wanted.
    pub fn holds(&self, wanted: &Wanted) -> Result<bool, Error> {
        Ok(wanted.changes(&self.save(&wanted.table)?).is_none())
    }

    /// Removes chains of ours from a table, with every jump to them. Says whether any was there.
    pub fn remove_chains(&self, table: &str, chains: &[&str]) -> Result<bool, Error> {
        if !self.has_table(table) {
            return Ok(false);
        }
        let removed = self.settle(&[table], |found| found[0].removal(chains).unwrap_or_default())?;
        if removed && self.variant == Variant::Nft {
            // Best effort: an empty table does no harm.
            let _ = self.drop_unused(table);
        }
        Ok(removed)
    }

    /// Removes the table that the nf_tables variant made for our rules, if nobody else uses it: it has
    /// built-in chains alone, without a rule and with the policy to accept.
    fn drop_unused(&self, table: &str) -> Result<(), Error> {
        const BUILT_IN: [&str; 5] = ["PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"];
        let family = match self.family {
            Family::V4 => nft::Family::Ip,
            Family::V6 => nft::Family::Ip6,
        };
        let mut nft = Nft::new()?;
        let chains = nft.chains(family, table)?;
        let untouched = chains.iter().all(|chain| {
            BUILT_IN.contains(&chain.name.as_str()) && chain.base.as_ref().is_some_and(|base| base.accept)
        });
        if !untouched {
            return Ok(());
        }
        let mut batch = Batch::new();
        // The kernel refuses it as a whole if a rule has come meanwhile.
        batch.delete_table_if_unused(family, table, &chains);
        nft.commit(batch)
    }

    /// Whether a table can hold anything. Reading a table of the old interface makes it, which a look
    /// for left-overs must not.
    fn has_table(&self, table: &str) -> bool {
        if self.variant == Variant::Nft {
            return true;
        }
        let list = match self.family {
            Family::V4 => "/proc/thread-self/net/ip_tables_names",
            Family::V6 => "/proc/thread-self/net/ip6_tables_names",
        };
        std::fs::read_to_string(list).is_ok_and(|names| names.lines().any(|name| name == table))
    }

    /// Looks at tables and applies what `plan` makes of them: nothing, or input for the restore program.
    fn settle(&self, tables: &[&str], plan: impl Fn(&[TableState]) -> String) -> Result<bool, Error> {
        // Another program may change the table between the look and the change; then a deletion
        // finds nothing and the whole is refused. Looking again is the answer.
        const TRIES: usize = 3;
        let mut failure = None;
        for _ in 0..TRIES {
            let payload = plan(&self.save_all(tables)?);
            if payload.is_empty() {
                return Ok(failure.is_some());
            }
            match self.restore(&payload) {
                Ok(()) => return Ok(true),
                Err(error) => failure = Some(error),
            }
        }
        match failure {
            Some(error) => Err(error),
            None => Ok(false),
        }
    }

    /// Runs a program until it is not held up by the lock or by a full process table.
    fn retried(&self, program: &str, arguments: &[&str], input: &str) -> Result<Output, Error> {
        let mut pauses = RETRY_PAUSES.iter();
        loop {
            let outcome = self.run(program, arguments, input);
            let again = match &outcome {
                Ok(output) => match output.status.code() {
                    Some(0) => return outcome,
                    code => code == Some(RESOURCE_PROBLEM) || code.is_none(),
                },
                Err(error) => error.is(libc::EAGAIN) || error.is(libc::ENOMEM) || error.is(libc::ETXTBSY),
            };
            match pauses.next() {
                Some(pause) if again => std::thread::sleep(*pause),
                _ => return outcome.and_then(|output| Err(self.failure(program, arguments, &output))),
            }
        }
    }

    fn failure(&self, program: &str, arguments: &[&str], output: &Output) -> Error {
        let said = String::from_utf8_lossy(&output.stderr);
        let said = said.trim();
        let text =
            if said.is_empty() { output.status.to_string() } else { format!("{said} ({})", output.status) };
        Error::new(format!("{program} {}", arguments.join(" ")), io::Error::other(text))
    }

    fn run(&self, program: &str, arguments: &[&str], input: &str) -> Result<Output, Error> {
        let what = || format!("{program} {}", arguments.join(" "));
        let mut command = Command::new(self.directory.join(program));
        command.args(arguments).env_clear().env("PATH", &self.path).env("LC_ALL", "C");
        for kept in ["XTABLES_LOCKFILE", "XTABLES_LIBDIR"] {
            if let Some(value) = std::env::var_os(kept) {
                command.env(kept, value);
            }
        }
        let stdin = if input.is_empty() { Stdio::null() } else { Stdio::piped() };
        let mut child = command
            .stdin(stdin)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|source| Error::new(what(), source))?;
        if let Some(mut pipe) = child.stdin.take() {
            // A program that stopped reading says why on its standard error.
            let _ = pipe.write_all(input.as_bytes());
        }
        child.wait_with_output().map_err(|source| Error::new(what(), source))
    }
}

/// Reads `iptables v1.8.9 (nf_tables)`.
fn parse_version(text: &str) -> Option<((u32, u32, u32), Variant)> {
    let number = text.split_whitespace().find_map(|word| word.strip_prefix('v'))?;
    let mut parts = number.split('.').map(|part| {
        let digits = part.find(|character: char| !character.is_ascii_digit()).unwrap_or(part.len());
        part[..digits].parse().ok()
    });
    let version = (parts.next()??, parts.next()??, parts.next().flatten().unwrap_or(0));
    let variant = if text.contains("nf_tables") { Variant::Nft } else { Variant::Legacy };
    Some((version, variant))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_both_variants() {
        assert_eq!(parse_version("iptables v1.8.9 (nf_tables)\n"), Some(((1, 8, 9), Variant::Nft)));
        assert_eq!(parse_version("ip6tables v1.8.10 (legacy)"), Some(((1, 8, 10), Variant::Legacy)));
        assert_eq!(parse_version("iptables v1.4.21"), Some(((1, 4, 21), Variant::Legacy)));
        assert_eq!(parse_version("iptables v1.6.2-rc1"), Some(((1, 6, 2), Variant::Legacy)));
        assert_eq!(parse_version("busybox"), None);
    }
}
