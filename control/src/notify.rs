//! systemd's start notification: one datagram `READY=1` to `$NOTIFY_SOCKET`.

use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use crate::cli::Strings;

/// Tells the service manager that the node is ready; does nothing without one.
///
/// # Errors
/// When the socket named by the environment cannot be reached.
pub fn ready(env: &dyn Strings) -> io::Result<()> {
    let Some(name) = env.get("NOTIFY_SOCKET").filter(|name| !name.is_empty()) else { return Ok(()) };
    let address = match name.strip_prefix('@') {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(&name)?,
    };
    UnixDatagram::unbound()?.send_to_addr(b"READY=1", &address).map(drop)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn send(name: &str) -> io::Result<()> {
        ready(&HashMap::from([("NOTIFY_SOCKET", name)]))
    }

    #[test]
    fn sends_one_datagram_to_a_path_or_an_abstract_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let mut buffer = [0; 64];
        let socket = UnixDatagram::bind(&path).unwrap();
        send(path.to_str().unwrap()).unwrap();
        assert_eq!(socket.recv(&mut buffer).map(|len| buffer[..len].to_vec()).unwrap(), b"READY=1");

        let name = format!("felt-notify-{}", std::process::id());
        let socket = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        send(&format!("@{name}")).unwrap();
        assert_eq!(socket.recv(&mut buffer).unwrap(), 7);
    }

    #[test]
    fn silent_without_a_manager_and_an_error_when_it_is_gone() {
        assert!(ready(&HashMap::new()).is_ok());
        assert!(send("").is_ok());
        assert!(send("/nonexistent/notify").is_err());
    }
}
