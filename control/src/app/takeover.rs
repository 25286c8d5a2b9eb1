//! The start beside a running daemon: finding it, and taking its place.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::sleep;

use super::Exit;
use crate::admin::{AdminSocket, BindError};
use crate::api::{self, Phase};
use crate::backend::Backend;
use crate::cli::{Handover, Options};
use crate::command::Client;
use crate::handover::{self, TakeOverError, Wish};
use crate::lease::Lease;

/// Longest wait for a running daemon that is itself starting or leaving.
const PATIENCE: Duration = Duration::from_secs(15);
/// Between two looks at it.
const LOOK: Duration = Duration::from_millis(20);

/// Who has the admin socket.
pub(super) enum Place {
    /// This process now.
    Free(AdminSocket),
    /// A daemon in full swing.
    Taken(Predecessor),
}

/// The running daemon whose place this one takes.
#[derive(Debug)]
pub(super) struct Predecessor {
    socket: PathBuf,
}

/// Binds the admin socket, or finds the daemon that runs there, once it is up; one that leaves is waited for.
///
/// # Errors
/// When the socket cannot be made, or the daemon there is no predecessor of this one.
pub(super) async fn find(options: &Options) -> Result<Place, Exit> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let in_use = match AdminSocket::bind(&options.admin_socket).await {
            Ok(admin) => return Ok(Place::Free(admin)),
            Err(error @ BindError::InUse(_)) => error,
            Err(error) => return Err(Exit::failure(error)),
        };
        let status = Client::new(&options.admin_socket).get::<api::Status>("/v1/status").await;
        if let Ok(status) = status {
            let ours = status.subnet_file == options.subnet_file.display().to_string();
            if !ours || options.handover == Handover::Refuse {
                return Err(Exit::failure(in_use));
            }
            if status.phase == Phase::Running {
                tracing::info!("process {} serves this node: taking over from it", status.pid);
                return Ok(Place::Taken(Predecessor { socket: options.admin_socket.clone() }));
            }
        }
        if Instant::now() > deadline {
            return Err(Exit::failure(in_use));
        }
        sleep(LOOK).await;
    }
}

impl Predecessor {
    /// Starts the backend with what the predecessor hands over, which leaves then. Blocks for some milliseconds.
    ///
    /// # Errors
    /// When it refuses or cannot be talked to; it goes on then.
    pub(super) fn take_over(
        &self,
        backend: &mut dyn Backend,
        lease: &Lease,
        options: &Options,
    ) -> Result<(), Exit> {
        let wish = Wish {
            version: api::VERSION,
            pid: std::process::id(),
            subnet_file: options.subnet_file.display().to_string(),
            lease: lease.key.to_string(),
            planes: backend.planes(),
        };
        let agreed = handover::ask(&self.socket, &wish).map_err(Exit::failure)?;
        let begun = Instant::now();
        let broken = |error| Exit::failure(TakeOverError::Broken(error));
        let handed = agreed.go().map_err(broken)?;
        backend.take_over(lease, handed).map_err(Exit::failure)?;
        agreed.running().map_err(broken)?;
        tracing::info!("took over; packets waited for at most {} ms", begun.elapsed().as_millis());
        Ok(())
    }

    /// The admin socket, in place of the predecessor's.
    ///
    /// # Errors
    /// When it cannot be made.
    pub(super) fn admin_socket(&self) -> Result<AdminSocket, Exit> {
        AdminSocket::replace(&self.socket).map_err(Exit::failure)
    }
}

/// Starts the backend for the own lease, on the machine as it is or as a predecessor has it.
///
/// # Errors
/// See [`Backend::start`] and [`Predecessor::take_over`].
pub(super) fn start_backend(
    backend: &mut dyn Backend,
    lease: &Lease,
    options: &Arc<Options>,
    predecessor: Option<&Predecessor>,
) -> Result<(), Exit> {
    match predecessor {
        Some(predecessor) => predecessor.take_over(backend, lease, options),
        None => backend.start(lease).map_err(Exit::failure),
    }
}
