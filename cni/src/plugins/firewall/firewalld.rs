//! Three calls of firewalld over the system bus.
//!
//! The D-Bus protocol is spoken directly, little-endian, one call at a time: connect, authenticate as
//! this user, say Hello, call, wait for the answer (D-Bus specification 0.42).

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use ipnet::IpNet;

use crate::types::error::{Error, Result, go_text};

const SOCKET: &str = "/var/run/dbus/system_bus_socket";
const NAME: &str = "org.fedoraproject.FirewallD1";
const PATH: &str = "/org/fedoraproject/FirewallD1";
const ZONE: &str = "org.fedoraproject.FirewallD1.zone";
/// Longest answer that is read.
const ANSWER_MAX: usize = 1 << 20;

// Message types and header fields.
const METHOD_CALL: u8 = 1;
const METHOD_RETURN: u8 = 2;
const ERROR: u8 = 3;
const FIELD_PATH: u8 = 1;
const FIELD_INTERFACE: u8 = 2;
const FIELD_MEMBER: u8 = 3;
const FIELD_ERROR_NAME: u8 = 4;
const FIELD_REPLY_SERIAL: u8 = 5;
const FIELD_DESTINATION: u8 = 6;
const FIELD_SIGNATURE: u8 = 8;

/// A connection to the system bus.
#[derive(Debug)]
pub(super) struct Firewalld {
    stream: UnixStream,
    serial: u32,
}

/// A call's target.
struct Target<'a> {
    destination: &'a str,
    path: &'a str,
    interface: &'a str,
    member: &'a str,
}

/// A message from the bus.
struct Answer {
    kind: u8,
    reply_to: Option<u32>,
    error: Option<String>,
    body: Vec<u8>,
}

impl Firewalld {
    /// Connects to the system bus.
    pub(super) fn connect() -> Result<Self> {
        let path = std::env::var("DBUS_SYSTEM_BUS_ADDRESS")
            .ok()
            .and_then(|address| {
                address.strip_prefix("unix:path=").map(|p| p.split(',').next().unwrap_or(p).to_owned())
            })
            .unwrap_or_else(|| SOCKET.to_owned());
        Self::connect_to(&path)
            .map_err(|err| Error::internal(format!("dial unix {path}: connect: {}", go_text(&err))))
    }

    fn connect_to(path: &str) -> std::io::Result<Self> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(Duration::from_secs(25)))?;
        let mut bus = Self { stream, serial: 0 };
        // The user's number in decimal digits, each digit in hexadecimal. felt runs as root; the bus
        // checks the number against the socket's credentials.
        let uid = std::os::unix::fs::MetadataExt::uid(&std::fs::metadata("/proc/self")?).to_string();
        let hex: String = uid.bytes().map(|b| format!("{b:02x}")).collect();
        bus.stream.write_all(format!("\0AUTH EXTERNAL {hex}\r\n").as_bytes())?;
        let mut line = Vec::new();
        let mut byte = [0];
        while !line.ends_with(b"\r\n") && line.len() < 1024 {
            bus.stream.read_exact(&mut byte)?;
            line.push(byte[0]);
        }
        if !line.starts_with(b"OK ") {
            return Err(std::io::Error::other("the bus refused to authenticate"));
        }
        bus.stream.write_all(b"BEGIN\r\n")?;
        let hello = Target {
            destination: "org.freedesktop.DBus",
            path: "/org/freedesktop/DBus",
            interface: "org.freedesktop.DBus",
            member: "Hello",
        };
        bus.call(&hello, &[]).map_err(|err| std::io::Error::other(err.msg))?;
        Ok(bus)
    }

    /// Whether firewalld is on the bus.
    pub(super) fn has_owner(&mut self) -> Result<bool> {
        let target = Target {
            destination: "org.freedesktop.DBus",
            path: "/org/freedesktop/DBus",
            interface: "org.freedesktop.DBus",
            member: "NameHasOwner",
        };
        let body = self.call(&target, &[NAME])?;
        Ok(body.first().is_some_and(|b| *b != 0))
    }

    fn zone(&mut self, member: &str, zone: &str, source: IpNet) -> Result<()> {
        let target = Target { destination: NAME, path: PATH, interface: ZONE, member };
        self.call(&target, &[zone, &source.to_string()]).map(drop)
    }

    /// Puts a source into a zone; one that is there already is fine.
    pub(super) fn add_source(&mut self, zone: &str, source: IpNet) -> Result<()> {
        match self.zone("addSource", zone, source) {
            Err(err) if err.msg.contains("ZONE_ALREADY_SET") => Ok(()),
            other => {
                other.map_err(|err| err.context(format!("failed to add the address {source} to {zone} zone")))
            }
        }
    }

    /// Takes a source out of a zone.
    pub(super) fn remove_source(&mut self, zone: &str, source: IpNet) -> Result<()> {
        self.zone("removeSource", zone, source)
    }

    /// Asks whether a source is in a zone; only a failing call is a failure.
    pub(super) fn query_source(&mut self, zone: &str, source: IpNet) -> Result<()> {
        self.zone("querySource", zone, source)
            .map_err(|err| err.context(format!("failed to find the address {source} in {zone} zone")))
    }

    /// Sends a call with string arguments and returns the body of its answer.
    fn call(&mut self, target: &Target<'_>, arguments: &[&str]) -> Result<Vec<u8>> {
        self.serial += 1;
        let serial = self.serial;
        self.stream.write_all(&encode(serial, target, arguments))?;
        loop {
            let Answer { kind, reply_to, error, body } = self.receive()?;
            if reply_to != Some(serial) {
                continue;
            }
            match kind {
                METHOD_RETURN => return Ok(body),
                ERROR => {
                    let text =
                        body.get(4..).map(|b| String::from_utf8_lossy(b).trim_end_matches('\0').to_owned());
                    return Err(Error::internal(format!(
                        "{}: {}",
                        error.unwrap_or_default(),
                        text.unwrap_or_default()
                    )));
                }
                _ => {}
            }
        }
    }

    fn receive(&mut self) -> Result<Answer> {
        let mut head = [0; 16];
        self.stream.read_exact(&mut head)?;
        let big = head[0] == b'B';
        let word = |bytes: &[u8]| -> u32 {
            let array = [bytes[0], bytes[1], bytes[2], bytes[3]];
            if big { u32::from_be_bytes(array) } else { u32::from_le_bytes(array) }
        };
        let body_len = word(&head[4..8]) as usize;
        let fields_len = word(&head[12..16]) as usize;
        if body_len > ANSWER_MAX || fields_len > ANSWER_MAX {
            return Err(Error::internal("the bus sent an answer that is too long"));
        }
        let mut fields = vec![0; fields_len.next_multiple_of(8)];
        self.stream.read_exact(&mut fields)?;
        let mut body = vec![0; body_len];
        self.stream.read_exact(&mut body)?;
        let (mut reply_to, mut error) = (None, None);
        let mut at = 0;
        // Each field: code, signature of its value (length, text, NUL), value.
        while at + 4 <= fields_len {
            let code = fields[at];
            let kind = fields[at + 2];
            at = (at + 4).next_multiple_of(4);
            match kind {
                b'u' => {
                    let Some(bytes) = fields.get(at..at + 4) else { break };
                    if code == FIELD_REPLY_SERIAL {
                        reply_to = Some(word(bytes));
                    }
                    at += 4;
                }
                b's' | b'o' => {
                    let Some(bytes) = fields.get(at..at + 4) else { break };
                    let len = word(bytes) as usize;
                    let Some(text) = fields.get(at + 4..at + 4 + len) else { break };
                    if code == FIELD_ERROR_NAME {
                        error = Some(String::from_utf8_lossy(text).into_owned());
                    }
                    at += 4 + len + 1;
                }
                b'g' => {
                    let Some(len) = fields.get(at) else { break };
                    at += 1 + usize::from(*len) + 1;
                }
                _ => break,
            }
            at = at.next_multiple_of(8);
        }
        Ok(Answer { kind: head[1], reply_to, error, body })
    }
}

fn encode(serial: u32, target: &Target<'_>, arguments: &[&str]) -> Vec<u8> {
    let mut body = Vec::new();
    for argument in arguments {
        pad(&mut body, 4);
        string(&mut body, argument);
    }
    let mut fields = Vec::new();
    let mut field = |code: u8, kind: u8, text: &str| {
        pad(&mut fields, 8);
        fields.extend_from_slice(&[code, 1, kind, 0]);
        string(&mut fields, text);
    };
    field(FIELD_PATH, b'o', target.path);
    field(FIELD_DESTINATION, b's', target.destination);
    field(FIELD_INTERFACE, b's', target.interface);
    field(FIELD_MEMBER, b's', target.member);
    if !arguments.is_empty() {
        pad(&mut fields, 8);
        fields.extend_from_slice(&[FIELD_SIGNATURE, 1, b'g', 0, arguments.len() as u8]);
        fields.extend(std::iter::repeat_n(b's', arguments.len()));
        fields.push(0);
    }
    let mut message = vec![b'l', METHOD_CALL, 0, 1];
    message.extend_from_slice(&(body.len() as u32).to_le_bytes());
    message.extend_from_slice(&serial.to_le_bytes());
    message.extend_from_slice(&(fields.len() as u32).to_le_bytes());
    message.extend_from_slice(&fields);
    pad(&mut message, 8);
    message.extend_from_slice(&body);
    message
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(&(text.len() as u32).to_le_bytes());
    out.extend_from_slice(text.as_bytes());
    out.push(0);
}

fn pad(out: &mut Vec<u8>, to: usize) {
    out.resize(out.len().next_multiple_of(to), 0);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    /// A bus that authenticates and answers each call: an error to the second `addSource`.
    fn bus(listener: UnixListener) {
        let (mut stream, _) = listener.accept().unwrap();
        let mut line = Vec::new();
        let mut byte = [0];
        while !line.ends_with(b"BEGIN\r\n") {
            stream.read_exact(&mut byte).unwrap();
            line.push(byte[0]);
            if line.ends_with(b"\r\n") && line.starts_with(b"\0AUTH EXTERNAL ") && !line.contains(&b'B') {
                stream.write_all(b"OK 1234deadbeef\r\n").unwrap();
            }
        }
        let mut client = Firewalld { stream, serial: 0 };
        for n in 0u32.. {
            let mut head = [0; 16];
            if client.stream.read_exact(&mut head).is_err() {
                return;
            }
            let body_len = u32::from_le_bytes(head[4..8].try_into().unwrap()) as usize;
            let fields_len = u32::from_le_bytes(head[12..16].try_into().unwrap()) as usize;
            let mut rest = vec![0; fields_len.next_multiple_of(8) + body_len];
            client.stream.read_exact(&mut rest).unwrap();
            let serial = &head[8..12];
            let mut fields = vec![FIELD_REPLY_SERIAL, 1, b'u', 0];
            fields.extend_from_slice(serial);
            let mut body = Vec::new();
            let fails = rest.windows(9).any(|w| w == b"addSource") && n == 3;
            if fails {
                fields.extend_from_slice(&[FIELD_ERROR_NAME, 1, b's', 0]);
                string(&mut fields, "org.x.Exception");
                string(&mut body, "ZONE_ALREADY_SET: x");
            } else {
                body.extend_from_slice(&1u32.to_le_bytes());
            }
            let kind = if fails { ERROR } else { METHOD_RETURN };
            let mut message = vec![b'l', kind, 0, 1];
            message.extend_from_slice(&(body.len() as u32).to_le_bytes());
            message.extend_from_slice(&(n + 100).to_le_bytes());
            message.extend_from_slice(&(fields.len() as u32).to_le_bytes());
            message.extend_from_slice(&fields);
            pad(&mut message, 8);
            message.extend_from_slice(&body);
            client.stream.write_all(&message).unwrap();
        }
    }

    #[test]
    fn speaks_to_a_bus() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bus");
        let listener = UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || bus(listener));
        let mut client = Firewalld::connect_to(path.to_str().unwrap()).unwrap();
        assert!(client.has_owner().unwrap());
        let net: IpNet = "10.1.2.3/32".parse().unwrap();
        client.add_source("trusted", net).unwrap();
        client.add_source("trusted", net).unwrap();
        client.query_source("trusted", net).unwrap();
        drop(client);
        server.join().unwrap();
    }
}
