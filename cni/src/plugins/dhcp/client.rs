//! The client's side of the exchange, on one link of a container.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use felt_hostnet::MacAddr;
use felt_hostnet::netlink::{Handle, OperState};
use felt_hostnet::netns::NetNs;
use felt_hostnet::packet::PacketSocket;

use super::lease::Grant;
use super::packet::{Message, Options, kind, option};
use crate::ipconf::{self, find_link};
use crate::plugins::veth::random;
use crate::types::error::{Context, Error, Result};

/// Ethernet's number of IPv4.
const ETH_P_IP: u16 = 0x0800;
/// Largest answer that is read.
const ANSWER_MAX: usize = 4096;
/// Size of messages we take (option 57).
const MESSAGE_MAX: u16 = 1500;
/// Pause before a message is sent again.
const RESEND: Duration = Duration::from_secs(1);
/// How long a link may take to come up.
const LINK_UP: Duration = Duration::from_secs(3);

/// What a container asks for, and with which patience.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Request {
    pub client_id: Vec<u8>,
    /// Options sent with every request.
    pub provide: Options,
    /// Codes asked for.
    pub parameters: Vec<u8>,
    pub broadcast: bool,
    /// Patience for one exchange.
    pub timeout: Duration,
}

/// One link with a socket on it.
pub(super) struct Client<'a> {
    socket: PacketSocket,
    mac: MacAddr,
    request: &'a Request,
}

/// How an exchange can fail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Failure {
    /// The server says no.
    Refused,
    /// Nobody answered in time.
    Silence,
    /// Anything else.
    Other(Error),
}

impl From<Error> for Failure {
    fn from(err: Error) -> Self {
        Self::Other(err)
    }
}

impl From<std::io::Error> for Failure {
    fn from(err: std::io::Error) -> Self {
        Self::Other(err.into())
    }
}

impl<'a> Client<'a> {
    /// Sets the link up if need be and opens a socket on it.
    pub(super) fn open(ns: &NetNs, ifname: &str, request: &'a Request) -> Result<Self> {
        let mut inside = Handle::new_in(ns)?;
        let mut link = find_link(&mut inside, ifname)
            .map_err(|err| err.context(format!("error looking up {ifname:?}")))?;
        if !link.is_up() {
            inside.link_up(link.index)?;
            let deadline = Instant::now() + LINK_UP;
            while link.oper_state != OperState::Up && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(2));
                link = inside.link_by_index(link.index)?;
            }
        }
        let mac = link.mac.ok_or_else(|| Error::internal(format!("{ifname} has no hardware address")))?;
        let socket = ipconf::inside(ns, || {
            PacketSocket::open(link.index, ETH_P_IP)
                .with_context(|| format!("open packet socket on {ifname}"))
        })?;
        Ok(Self { socket, mac, request })
    }

    fn message(&self, xid: u32, kind: u8, ciaddr: Ipv4Addr) -> Message {
        let mut options = self.request.provide.clone();
        options.insert(option::MESSAGE_TYPE, vec![kind]);
        options.entry(option::CLIENT_ID).or_insert_with(|| self.request.client_id.clone());
        if kind != kind::RELEASE {
            options.insert(option::MAX_SIZE, MESSAGE_MAX.to_be_bytes().to_vec());
            options.insert(option::PARAMETERS, self.request.parameters.clone());
        }
        Message {
            xid,
            broadcast: self.request.broadcast && ciaddr.is_unspecified(),
            ciaddr,
            yiaddr: Ipv4Addr::UNSPECIFIED,
            mac: self.mac,
            options,
        }
    }

    /// Sends a message, again every second, until an answer is `wanted`.
    fn ask<T>(
        &mut self,
        message: &Message,
        wanted: impl Fn(&Message) -> Option<std::result::Result<T, Failure>>,
    ) -> std::result::Result<T, Failure> {
        let packet = message.to_packet(Ipv4Addr::BROADCAST);
        let deadline = Instant::now() + self.request.timeout;
        let mut buffer = [0; ANSWER_MAX];
        let mut resend = Instant::now();
        loop {
            let now = Instant::now();
            if now >= deadline {
                return Err(Failure::Silence);
            }
            if now >= resend {
                self.socket.send(MacAddr::BROADCAST, &packet)?;
                resend = now + RESEND;
            }
            let Some(len) = self.socket.receive(&mut buffer, resend.min(deadline) - now)? else { continue };
            let Some(answer) = Message::from_packet(&buffer[..len]) else { continue };
            if answer.xid != message.xid || answer.mac != self.mac {
                continue;
            }
            if let Some(outcome) = wanted(&answer) {
                return outcome;
            }
        }
    }

    /// Discovers a server and takes a lease.
    pub(super) fn acquire(&mut self) -> std::result::Result<Grant, Failure> {
        let discover = self.message(random() as u32, kind::DISCOVER, Ipv4Addr::UNSPECIFIED);
        let offer = self.ask(&discover, |m| (m.kind() == Some(kind::OFFER)).then(|| Ok(m.clone())))?;
        let mut request = self.message(discover.xid, kind::REQUEST, Ipv4Addr::UNSPECIFIED);
        request.options.insert(option::REQUESTED_IP, offer.yiaddr.octets().to_vec());
        if let Some(server) = offer.options.get(&option::SERVER_ID) {
            request.options.insert(option::SERVER_ID, server.clone());
        }
        self.ask(&request, acknowledged)
    }

    /// Extends a lease.
    pub(super) fn renew(&mut self, address: Ipv4Addr) -> std::result::Result<Grant, Failure> {
        let request = self.message(random() as u32, kind::REQUEST, address);
        self.ask(&request, acknowledged)
    }

    /// Gives a lease back. There is no answer.
    pub(super) fn release(&mut self, grant: &Grant) -> Result<()> {
        let mut message = self.message(random() as u32, kind::RELEASE, grant.address.addr());
        message.options.insert(option::SERVER_ID, grant.server.octets().to_vec());
        self.socket.send(MacAddr::BROADCAST, &message.to_packet(grant.server))?;
        Ok(())
    }
}

fn acknowledged(answer: &Message) -> Option<std::result::Result<Grant, Failure>> {
    match answer.kind() {
        Some(kind::ACK) => Some(Grant::from_ack(answer).map_err(Failure::Other)),
        Some(kind::NAK) => Some(Err(Failure::Refused)),
        _ => None,
    }
}
