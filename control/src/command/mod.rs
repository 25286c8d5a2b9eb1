//! The operator's command `felt`: asks a running daemon, reads the registry, cleans up.
//!
//! Exit codes: 0 done, 1 it failed, 2 the command line is wrong, 3 the answer is no (the node is not ready, there is no
//! such lease). Every command prints a table for people or, with `-o json`, the document of [`crate::api`].

mod args;
mod cleanup;
mod client;
mod lease;
mod show;
mod table;

use std::io::Write as _;
use std::process::ExitCode;

use clap::Parser as _;

use self::args::{Args, LeaseVerb, Output, Verb};
pub(crate) use self::client::Client;
use crate::api;

/// Why a command did not do what it was asked.
#[derive(Debug)]
pub(crate) enum Failure {
    /// It could not be done; code 1.
    Failed(String),
    /// It was done and the answer is no; code 3. The text may be empty when the output says it all.
    No(String),
}

impl Failure {
    fn failed(error: impl std::fmt::Display) -> Self {
        Self::Failed(error.to_string())
    }
}

/// Runs the command of this process's command line.
pub fn main() -> ExitCode {
    let args = Args::parse();
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&format!("start the runtime: {error}"), 1),
    };
    match runtime.block_on(run(&args)) {
        Ok(text) => match print(&text) {
            Ok(()) => ExitCode::SUCCESS,
            // The reader went away, as with `felt peers | head`.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
            Err(error) => fail(&format!("write the output: {error}"), 1),
        },
        Err((text, Failure::Failed(reason))) => {
            let _ = print(&text);
            fail(&reason, 1)
        }
        Err((text, Failure::No(reason))) => {
            let _ = print(&text);
            fail(&reason, 3)
        }
    }
}

/// Writes what is meant for programs and pagers.
fn print(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

#[expect(clippy::print_stderr, reason = "the place where the command speaks to its user")]
fn fail(reason: &str, code: u8) -> ExitCode {
    if !reason.is_empty() {
        eprintln!("felt: {reason}");
    }
    ExitCode::from(code)
}

/// Output so far with the failure that ended it.
type Outcome = Result<String, (String, Failure)>;

async fn run(args: &Args) -> Outcome {
    let client = Client::new(&args.admin_socket);
    let bare = |failure| (String::new(), failure);
    let json = args.output == Output::Json;
    match &args.verb {
        Verb::Status => {
            let status: api::Status = client.get("/v1/status").await.map_err(bare)?;
            let text = if json { to_json(&status) } else { show::status(&status) };
            if status.ready { Ok(text) } else { Err((text, Failure::No(String::new()))) }
        }
        Verb::Peers => {
            let peers: api::Peers = client.get("/v1/peers").await.map_err(bare)?;
            Ok(if json { to_json(&peers) } else { show::peers(&peers) })
        }
        Verb::Counters => {
            let counters: api::Counters = client.get("/v1/counters").await.map_err(bare)?;
            Ok(if json { to_json(&counters) } else { show::counters(&counters) })
        }
        Verb::Config => {
            let config: api::Config = client.get("/v1/config").await.map_err(bare)?;
            Ok(if json { to_json(&config) } else { show::config(&config) })
        }
        Verb::Lease { verb: LeaseVerb::List { registry } } => {
            let leases = lease::list(&client, registry).await.map_err(bare)?;
            Ok(if json { to_json(&leases) } else { show::leases(&leases) })
        }
        Verb::Lease { verb: LeaseVerb::Rm { subnet, force, registry } } => {
            let removed = lease::remove(&client, registry, subnet, *force).await.map_err(bare)?;
            Ok(if json { to_json(&removed) } else { show::removed(&removed) })
        }
        Verb::Cleanup(options) => {
            let done = cleanup::run(options).map_err(bare)?;
            let text = if json { to_json(&done) } else { show::cleanup(&done) };
            match done.failed.len() {
                0 => Ok(text),
                count => Err((text, Failure::Failed(format!("{count} things could not be removed")))),
            }
        }
    }
}

fn to_json(value: &impl serde::Serialize) -> String {
    serde_json::to_string_pretty(value).map_or_else(|error| format!("\"{error}\"\n"), |text| text + "\n")
}
