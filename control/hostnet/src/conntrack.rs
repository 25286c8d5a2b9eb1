//! Removal of connection tracking entries.
//!
//! A UDP "connection" is kept by the kernel as long as packets flow. After a port map changes, packets
//! of such a flow would go on to the old pod, so that the entries of the port must go.

use crate::Error;
use crate::netlink::Family;
use crate::netlink::attr::{Attrs, Writer};
use crate::netlink::socket::{Answer, Connection, NLM_F_DUMP};
use crate::netns::NetNs;

const NFNL_SUBSYS_CTNETLINK: u16 = 1;
const IPCTNL_MSG_CT_GET: u16 = 1;
const IPCTNL_MSG_CT_DELETE: u16 = 2;

// CTA_* of linux/netfilter/nfnetlink_conntrack.h.
const CTA_TUPLE_ORIG: u16 = 1;
const CTA_ID: u16 = 12;
const CTA_ZONE: u16 = 18;
const CTA_FILTER: u16 = 25;
const CTA_TUPLE_PROTO: u16 = 2;
const CTA_PROTO_NUM: u16 = 1;
const CTA_PROTO_DST_PORT: u16 = 3;
const CTA_FILTER_ORIG_FLAGS: u16 = 1;
const CTA_FILTER_REPLY_FLAGS: u16 = 2;
/// `CTA_FILTER_F_CTA_PROTO_NUM | CTA_FILTER_F_CTA_PROTO_DST_PORT`.
const FILTER_PROTOCOL_AND_PORT: u32 = 1 << 3 | 1 << 5;

/// One connection tracking netlink socket.
#[derive(Debug)]
pub struct Conntrack {
    connection: Connection,
}

impl Conntrack {
    /// Opens a socket in the calling thread's network namespace.
    pub fn new() -> Result<Self, Error> {
        Connection::open(libc::NETLINK_NETFILTER as isize)
            .map(|connection| Self { connection })
            .map_err(|source| Error::new("open connection tracking socket", source))
    }

    /// Opens a socket in `netns`; the calling thread is back in its own namespace on return.
    pub fn new_in(netns: &NetNs) -> Result<Self, Error> {
        netns.with(Self::new).map_err(|source| Error::new("enter network namespace", source))?
    }

    /// Deletes the UDP entries whose packets were first sent to `port`, whatever the address. Returns
    /// how many.
    pub fn delete_udp_to_port(&mut self, family: Family, port: u16) -> Result<usize, Error> {
        self.delete_to_port(family, libc::IPPROTO_UDP as u8, port)
    }

    /// Deletes the entries of a protocol whose packets were first sent to `port`.
    pub fn delete_to_port(&mut self, family: Family, protocol: u8, port: u16) -> Result<usize, Error> {
        let mut deleted = 0;
        for keys in self.find(family, protocol, port)? {
            let what = || format!("delete connection tracking entry of port {port}");
            let outcome = self.connection.request(
                NFNL_SUBSYS_CTNETLINK << 8 | IPCTNL_MSG_CT_DELETE,
                0,
                &what,
                &|bytes| {
                    bytes.extend_from_slice(&header(family));
                    bytes.extend_from_slice(&keys);
                },
                &mut |_| Ok(()),
            );
            match outcome {
                Ok(()) => deleted += 1,
                // Expired meanwhile.
                Err(error) if error.is_not_found() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(deleted)
    }

    /// The attributes that name each entry: original direction, identifier, zone.
    fn find(&mut self, family: Family, protocol: u8, port: u16) -> Result<Vec<Vec<u8>>, Error> {
        let mut found: Vec<Vec<u8>> = Vec::new();
        self.connection.request(
            NFNL_SUBSYS_CTNETLINK << 8 | IPCTNL_MSG_CT_GET,
            NLM_F_DUMP,
            &|| format!("list connection tracking entries of port {port}"),
            &|bytes| {
                bytes.extend_from_slice(&header(family));
                let mut w = Writer(bytes);
                // Honoured since Linux 5.8; before, all entries come and are looked through below.
                w.nest(CTA_TUPLE_ORIG, |w| {
                    w.nest(CTA_TUPLE_PROTO, |w| {
                        w.bytes(CTA_PROTO_NUM, &[protocol]);
                        w.be16(CTA_PROTO_DST_PORT, port);
                    });
                });
                w.nest(CTA_FILTER, |w| {
                    w.ne32(CTA_FILTER_ORIG_FLAGS, FILTER_PROTOCOL_AND_PORT);
                    w.ne32(CTA_FILTER_REPLY_FLAGS, 0);
                });
            },
            &mut |answer| {
                match answer {
                    Answer::Start => found.clear(),
                    Answer::Message(message) => {
                        let attrs = Attrs(message.payload.get(4..).unwrap_or_default());
                        if matches(attrs, protocol, port) {
                            let mut keys = Vec::new();
                            let mut w = Writer(&mut keys);
                            for attr in attrs {
                                match attr.kind {
                                    CTA_TUPLE_ORIG => {
                                        w.nest(attr.kind, |w| w.0.extend_from_slice(attr.value));
                                    }
                                    CTA_ID | CTA_ZONE => w.bytes(attr.kind, attr.value),
                                    _ => {}
                                }
                            }
                            found.push(keys);
                        }
                    }
                }
                Ok(())
            },
        )?;
        Ok(found)
    }
}

fn header(family: Family) -> [u8; 4] {
    let number = match family {
        Family::V4 => libc::AF_INET,
        Family::V6 => libc::AF_INET6,
    };
    [number as u8, 0, 0, 0]
}

fn matches(attrs: Attrs<'_>, protocol: u8, port: u16) -> bool {
    let found = || {
        let tuple = Attrs(attrs.get(CTA_TUPLE_ORIG)?.value);
        let transport = Attrs(tuple.get(CTA_TUPLE_PROTO)?.value);
        Some((*transport.get(CTA_PROTO_NUM)?.value.first()?, transport.get(CTA_PROTO_DST_PORT)?.as_be16()?))
    };
    found() == Some((protocol, port))
}
