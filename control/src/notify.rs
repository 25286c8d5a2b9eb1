//! systemd's notifications, datagrams to `$NOTIFY_SOCKET` (sd_notify(3)): `READY=1`, and `WATCHDOG=1` while the loops
//! make progress.

use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::cli::Strings;
use crate::view::View;

/// Tells the service manager that the node is ready; does nothing without one.
///
/// # Errors
/// When the socket named by the environment cannot be reached.
pub fn ready(env: &dyn Strings) -> io::Result<()> {
    send(env, "READY=1")
}

/// Tells the service manager that this process is the service from now on, and ready. It believes it from a process of
/// the service's control group, if the unit says `NotifyAccess=all`.
///
/// # Errors
/// As [`ready`].
pub fn succeeded(env: &dyn Strings) -> io::Result<()> {
    send(env, &format!("MAINPID={}\nREADY=1", std::process::id()))
}

fn send(env: &dyn Strings, text: &str) -> io::Result<()> {
    let Some(name) = env.get("NOTIFY_SOCKET").filter(|name| !name.is_empty()) else { return Ok(()) };
    let address = match name.strip_prefix('@') {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(&name)?,
    };
    UnixDatagram::unbound()?.send_to_addr(text.as_bytes(), &address).map(drop)
}

/// How often the service manager wants a sign of life: half of `$WATCHDOG_USEC` (sd_watchdog_enabled(3)), unless it is
/// meant for another process.
pub fn watchdog_period(env: &dyn Strings) -> Option<Duration> {
    let mine = env.get("WATCHDOG_PID").is_none_or(|pid| pid == std::process::id().to_string());
    let period = env.get("WATCHDOG_USEC")?.parse().ok().map(Duration::from_micros)?;
    (mine && !period.is_zero()).then_some(period / 2)
}

/// Tells the service manager regularly that the daemon lives, as long as [`View::alive`] says so: when it falls silent,
/// the service manager restarts the daemon. Ends at once where no watchdog is asked for.
pub async fn watchdog(
    period: Option<Duration>,
    env: &(dyn Strings + Sync),
    view: &View,
    cancel: CancellationToken,
) {
    let Some(period) = period else { return };
    loop {
        match view.alive() {
            Ok(()) => {
                if let Err(error) = send(env, "WATCHDOG=1") {
                    tracing::warn!("tell the service manager's watchdog: {error}");
                }
            }
            Err(reason) => tracing::error!("the service manager's watchdog is not told: {reason}"),
        }
        tokio::select! {
            () = tokio::time::sleep(period) => {}
            () = cancel.cancelled() => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn send_to(name: &str) -> io::Result<()> {
        ready(&HashMap::from([("NOTIFY_SOCKET", name)]))
    }

    #[test]
    fn sends_one_datagram_to_a_path_or_an_abstract_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let mut buffer = [0; 64];
        let socket = UnixDatagram::bind(&path).unwrap();
        send_to(path.to_str().unwrap()).unwrap();
        assert_eq!(socket.recv(&mut buffer).map(|len| buffer[..len].to_vec()).unwrap(), b"READY=1");

        let name = format!("felt-notify-{}", std::process::id());
        let socket = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        send_to(&format!("@{name}")).unwrap();
        assert_eq!(socket.recv(&mut buffer).unwrap(), 7);
    }

    #[test]
    fn the_watchdog_is_told_twice_per_period_and_only_by_the_process_meant() {
        let own = std::process::id().to_string();
        let env = |usec: &'static str, pid: &str| {
            let pid = pid.to_owned();
            watchdog_period(&HashMap::from([("WATCHDOG_USEC", usec), ("WATCHDOG_PID", pid.as_str())]))
        };
        assert_eq!(env("3000000", &own), Some(Duration::from_millis(1500)));
        assert_eq!((env("3000000", "1"), env("0", &own), env("soon", &own)), (None, None, None));
        let unnamed = watchdog_period(&HashMap::from([("WATCHDOG_USEC", "2000000")]));
        assert_eq!(unnamed, Some(Duration::from_secs(1)));
        assert_eq!(watchdog_period(&HashMap::new()), None);
    }

    #[test]
    fn silent_without_a_manager_and_an_error_when_it_is_gone() {
        assert!(ready(&HashMap::new()).is_ok());
        assert!(send_to("").is_ok());
        assert!(send_to("/nonexistent/notify").is_err());
    }
}
