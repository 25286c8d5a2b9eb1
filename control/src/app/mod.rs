//! The daemon: wiring, order of start, order of leaving.
//!
//! ```text
//!   signals -> cancel                     (from the first moment; any phase may be left with exit 0)
//!   registry, admin socket, health server
//!   network config --retry--> interface --> backend --> lease --> watch, first snapshot
//!   devices, engine (or those of a running daemon, see crate::handover)
//!   subnet.env --> READY=1 --> watch -> LeaseSet -> backend thread -> tables
//!                              keep  -> own lease renewed
//! ```
//!
//! Invariants: `subnet.env` is written only when packets can flow; what the kernel does for packets (devices, addresses,
//! routes) survives the daemon; the backend is touched by one thread at a time.

mod exit;
mod registry;
mod runner;
mod start;
mod takeover;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

pub use exit::Exit;
pub use registry::open as open_registry;

use crate::cli::{Command, Options, ProcessEnv, Strings};
use crate::view::View;
use crate::{cli, logging};

/// How long leaving may take before the process ends anyway.
const LEAVE_LIMIT: Duration = Duration::from_secs(5);

/// Runs the daemon for the command line `words`, the program's name first; returns its exit code.
pub fn main(mut words: impl Iterator<Item = String>) -> ExitCode {
    let program = words.next().unwrap_or_else(|| "feltd".to_owned());
    match cli::parse(words, &ProcessEnv) {
        Command::Version => say(&format!("v{}", env!("CARGO_PKG_VERSION"))),
        Command::Usage { error } => {
            let error = error.map(|error| error + "\n").unwrap_or_default();
            say(&(error + cli::usage(&program).trim_end()));
        }
        Command::Run { options, env_errors } => return daemon(Arc::new(*options), &env_errors),
    }
    ExitCode::SUCCESS
}

#[expect(clippy::print_stderr, reason = "version and usage go to standard error, as flanneld's do")]
fn say(text: &str) {
    eprintln!("{text}");
}

fn daemon(options: Arc<Options>, env_errors: &[String]) -> ExitCode {
    if let Err(error) = logging::init(options.log_format, options.verbosity, options.vmodule.clone()) {
        say(&format!("start logging: {error}"));
        return ExitCode::FAILURE;
    }
    for error in env_errors {
        tracing::error!("{error}");
    }
    // The packet loop has threads of its own; two are plenty for the control plane.
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::error!("start the runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    let result = runtime.block_on(run(options, &ProcessEnv));
    // A blocking call that hangs, on a dead file system perhaps, must not keep the process.
    runtime.shutdown_timeout(Duration::from_millis(100));
    match result {
        Ok(()) => {
            tracing::info!("exiting cleanly");
            ExitCode::SUCCESS
        }
        Err(exit) => {
            tracing::error!("{exit}");
            exit.code()
        }
    }
}

async fn run(options: Arc<Options>, env: &dyn Strings) -> Result<(), Exit> {
    let cancel = CancellationToken::new();
    watch_signals(&cancel)?;
    tracing::info!("felt {} starting: {}", env!("CARGO_PKG_VERSION"), options.redacted());
    options.check().map_err(Exit::failure)?;
    let view = Arc::new(View::new(Arc::clone(&options)));
    let parts = cancel.child_token();
    let outcome = tokio::select! {
        outcome = start::start(&options, &view, &parts, env) => outcome,
        // Whatever start was doing: nothing of it has to be undone, and the next start goes on from there.
        () = cancel.cancelled() => return Ok(()),
    };
    let running = outcome?;
    let result = running.until_cancelled(&cancel, &parts).await;
    cancel.cancel();
    result
}

/// The first signal cancels; the second ends the process at once, as if nobody handled it.
fn watch_signals(cancel: &CancellationToken) -> Result<(), Exit> {
    let fail = |error| Exit::failure(format!("install signal handlers: {error}"));
    let mut terminate = signal(SignalKind::terminate()).map_err(fail)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(fail)?;
    let cancel = cancel.clone();
    tokio::spawn(async move {
        for first in [true, false] {
            let number = tokio::select! {
                _ = terminate.recv() => 15,
                _ = interrupt.recv() => 2,
            };
            if first {
                tracing::info!("signal {number}: shutting down");
                cancel.cancel();
            } else {
                #[expect(clippy::exit, reason = "the operator asked a second time")]
                std::process::exit(128 + number);
            }
        }
    });
    Ok(())
}
