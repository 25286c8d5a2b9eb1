//! Rules built from the matches and statements of nft's language.
//!
//! A [`Rule`] is written as it reads: `Rule::new("postrtg").saddr(pods).daddr_not(multicast)
//! .masquerade(true)` is nft's `ip saddr 10.5.0.0/16 ip daddr != 224.0.0.0/4 masquerade fully-random`.
//! In tables of both families the family is tested first, as nft does.

use std::net::IpAddr;

use ipnet::IpNet;

use super::expr::{Base, Expr, Meta, REG_PORT, Verdict};
use crate::MacAddr;

/// Largest comment nft accepts, bytes.
pub(super) const COMMENT_MAX: usize = 128;

/// A rule to be added to a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// The chain.
    pub chain: String,
    /// Text shown by `nft list`, at most 128 bytes; more is cut.
    pub comment: Option<String>,
    /// What it does, in order.
    pub exprs: Vec<Expr>,
    /// Whether the table holds both families, so that addresses need a test of the family first.
    both_families: bool,
}

/// Transport protocol of a port match.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Transport {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

impl Transport {
    /// The IP protocol number.
    pub fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
        }
    }
}

impl Rule {
    /// An empty rule of a chain in a table of one family.
    pub fn new(chain: &str) -> Self {
        Self { chain: chain.to_owned(), comment: None, exprs: Vec::new(), both_families: false }
    }

    /// An empty rule of a chain in an `inet` table.
    pub fn new_inet(chain: &str) -> Self {
        Self { both_families: true, ..Self::new(chain) }
    }

    /// Adds an expression.
    pub fn expr(mut self, expr: Expr) -> Self {
        self.exprs.push(expr);
        self
    }

    /// Sets the comment.
    pub fn comment(mut self, text: &str) -> Self {
        let mut end = text.len().min(COMMENT_MAX);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        self.comment = Some(text[..end].to_owned());
        self
    }

    /// Source address is in the prefix.
    pub fn saddr(self, net: IpNet) -> Self {
        self.address(net, false, true)
    }

    /// Source address is not in the prefix.
    pub fn saddr_not(self, net: IpNet) -> Self {
        self.address(net, false, false)
    }

    /// Destination address is in the prefix.
    pub fn daddr(self, net: IpNet) -> Self {
        self.address(net, true, true)
    }

    /// Destination address is not in the prefix.
    pub fn daddr_not(self, net: IpNet) -> Self {
        self.address(net, true, false)
    }

    fn address(mut self, net: IpNet, destination: bool, equal: bool) -> Self {
        let net = net.trunc();
        let (family, offset, value, mask): (libc::c_int, u32, Vec<u8>, Vec<u8>) = match net {
            IpNet::V4(net) => (
                libc::NFPROTO_IPV4,
                if destination { 16 } else { 12 },
                net.network().octets().to_vec(),
                net.netmask().octets().to_vec(),
            ),
            IpNet::V6(net) => (
                libc::NFPROTO_IPV6,
                if destination { 24 } else { 8 },
                net.network().octets().to_vec(),
                net.netmask().octets().to_vec(),
            ),
        };
        if self.both_families {
            let test = [Expr::Meta(Meta::NfProto), Expr::Cmp { equal: true, value: vec![family as u8] }];
            // Once is enough: nft shows the test only where it is not implied.
            if !self.exprs.windows(2).any(|pair| pair == test) {
                self.exprs.extend(test);
            }
        }
        self.exprs.push(Expr::Payload { base: Base::Network, offset, len: value.len() as u32 });
        if net.prefix_len() < net.max_prefix_len() {
            self.exprs.push(Expr::Bitwise { xor: vec![0; mask.len()], mask });
        }
        self.expr(Expr::Cmp { equal, value })
    }

    /// Packet mark has this value under the mask.
    pub fn mark(mut self, value: u32, mask: u32) -> Self {
        self.exprs.push(Expr::Meta(Meta::Mark));
        if mask != u32::MAX {
            self.exprs.push(Expr::Bitwise { mask: mask.to_ne_bytes().to_vec(), xor: vec![0; 4] });
        }
        self.expr(Expr::Cmp { equal: true, value: value.to_ne_bytes().to_vec() })
    }

    /// Sets bits of the packet mark (`meta mark set meta mark or bits`).
    pub fn set_mark_bits(self, bits: u32) -> Self {
        self.expr(Expr::Meta(Meta::Mark))
            .expr(Expr::Bitwise { mask: (!bits).to_ne_bytes().to_vec(), xor: bits.to_ne_bytes().to_vec() })
            .expr(Expr::SetMark)
    }

    /// Incoming link has this name.
    pub fn iifname(self, name: &str) -> Self {
        self.expr(Expr::Meta(Meta::IifName)).expr(Expr::Cmp { equal: true, value: name_bytes(name) })
    }

    /// Outgoing link has this name.
    pub fn oifname(self, name: &str) -> Self {
        self.expr(Expr::Meta(Meta::OifName)).expr(Expr::Cmp { equal: true, value: name_bytes(name) })
    }

    /// Ethernet source is this address (bridge family).
    pub fn ether_saddr(self, mac: MacAddr) -> Self {
        self.expr(Expr::Payload { base: Base::Link, offset: 6, len: 6 })
            .expr(Expr::Cmp { equal: true, value: mac.octets().to_vec() })
    }

    /// Transport protocol and destination port.
    pub fn dport(self, transport: Transport, port: u16) -> Self {
        self.expr(Expr::Meta(Meta::L4Proto))
            .expr(Expr::Cmp { equal: true, value: vec![transport.number()] })
            .expr(Expr::Payload { base: Base::Transport, offset: 2, len: 2 })
            .expr(Expr::Cmp { equal: true, value: port.to_be_bytes().to_vec() })
    }

    /// Destination is an address of this host (`fib daddr type local`).
    pub fn daddr_local(self) -> Self {
        const RTN_LOCAL: u32 = 2;
        self.expr(Expr::FibDaddrType).expr(Expr::Cmp { equal: true, value: RTN_LOCAL.to_ne_bytes().to_vec() })
    }

    /// Counts packets and bytes.
    pub fn counter(self) -> Self {
        self.expr(Expr::Counter)
    }

    /// Source becomes the outgoing link's address.
    pub fn masquerade(self, fully_random: bool) -> Self {
        self.expr(Expr::Masquerade { fully_random })
    }

    /// Destination becomes `address`, and `port` where given.
    pub fn dnat(mut self, address: IpAddr, port: Option<u16>) -> Self {
        let value = match address {
            IpAddr::V4(address) => address.octets().to_vec(),
            IpAddr::V6(address) => address.octets().to_vec(),
        };
        self.exprs.push(Expr::Load { register: 1, value });
        if let Some(port) = port {
            self.exprs.push(Expr::Load { register: REG_PORT, value: port.to_be_bytes().to_vec() });
        }
        self.expr(Expr::Dnat { v6: address.is_ipv6(), port: port.is_some() })
    }

    /// Accepts the packet.
    pub fn accept(self) -> Self {
        self.expr(Expr::Verdict(Verdict::Accept))
    }

    /// Drops the packet.
    pub fn drop(self) -> Self {
        self.expr(Expr::Verdict(Verdict::Drop))
    }

    /// Returns to the calling chain.
    pub fn returns(self) -> Self {
        self.expr(Expr::Verdict(Verdict::Return))
    }

    /// Goes through a chain and comes back.
    pub fn jump(self, chain: &str) -> Self {
        self.expr(Expr::Verdict(Verdict::Jump(chain.to_owned())))
    }

    /// Goes to a chain for good.
    pub fn goto(self, chain: &str) -> Self {
        self.expr(Expr::Verdict(Verdict::Goto(chain.to_owned())))
    }
}

/// A link name as the kernel compares it: padded to IFNAMSIZ.
fn name_bytes(name: &str) -> Vec<u8> {
    let mut bytes = name.as_bytes().to_vec();
    bytes.resize(libc::IFNAMSIZ, 0);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_comments_are_cut_at_a_character() {
        let text = "ä".repeat(100);
        let rule = Rule::new("c").comment(&text);
        let cut = rule.comment.unwrap();
        assert!(cut.len() <= COMMENT_MAX && text.starts_with(&cut));
        assert_eq!(cut.len(), 128);
    }

    #[test]
    fn family_is_tested_once_in_tables_of_both() {
        let rule = Rule::new_inet("c")
            .saddr("10.1.2.3/32".parse().unwrap())
            .daddr_not("10.1.0.0/16".parse().unwrap());
        let tests = rule.exprs.iter().filter(|expr| **expr == Expr::Meta(Meta::NfProto)).count();
        assert_eq!(tests, 1);
        let rule = Rule::new("c").saddr("10.1.2.3/32".parse().unwrap());
        assert!(!rule.exprs.contains(&Expr::Meta(Meta::NfProto)));
    }
}
