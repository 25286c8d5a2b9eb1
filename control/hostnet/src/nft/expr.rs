//! The expressions of a rule: the kernel's small instructions that load, compare and decide.
//!
//! Each knows how to write itself and how to be read back, so that a rule found in the kernel can be
//! compared with the one wanted. What is not known here is kept as [`Expr::Other`] and equals nothing
//! this crate writes. Numbers are those of linux/netfilter/nf_tables.h.

use crate::netlink::attr::{Attr, Attrs, Writer};

/// The register every rule of this crate loads into.
const REG: u32 = 1;
/// Second register: the port of a translation.
pub(super) const REG_PORT: u32 = 2;
const REG_VERDICT: u32 = 0;

/// Where a payload offset counts from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Base {
    /// Link-layer header.
    Link,
    /// Network header.
    Network,
    /// Transport header.
    Transport,
}

/// Packet metadata that can be loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meta {
    /// The packet mark.
    Mark,
    /// Name of the incoming link.
    IifName,
    /// Name of the outgoing link.
    OifName,
    /// Network protocol family (in tables for both).
    NfProto,
    /// Transport protocol.
    L4Proto,
}

/// What becomes of a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Accepted.
    Accept,
    /// Dropped.
    Drop,
    /// Back to the calling chain; in a base chain the policy decides.
    Return,
    /// Into a chain, and back after it.
    Jump(String),
    /// Into a chain for good.
    Goto(String),
}

/// One expression.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Expr {
    /// Loads bytes of the packet.
    Payload {
        /// Where the offset counts from.
        base: Base,
        /// Bytes from there.
        offset: u32,
        /// Bytes to load.
        len: u32,
    },
    /// Loads metadata.
    Meta(Meta),
    /// Sets the packet mark from the register.
    SetMark,
    /// Keeps the bits of the mask, then flips those of `xor`.
    Bitwise {
        /// Bits kept.
        mask: Vec<u8>,
        /// Bits flipped after.
        xor: Vec<u8>,
    },
    /// Goes on only if the loaded bytes are (`equal`) or are not these.
    Cmp {
        /// Equal or not equal.
        equal: bool,
        /// The bytes.
        value: Vec<u8>,
    },
    /// Loads the type of the destination address as routing sees it (`RTN_*`).
    FibDaddrType,
    /// Loads a constant into a register.
    Load {
        /// Which register (1 or 2).
        register: u32,
        /// The bytes.
        value: Vec<u8>,
    },
    /// Counts packets and bytes (the count is not compared).
    Counter,
    /// Source becomes the outgoing link's address.
    Masquerade {
        /// Source ports are picked at random, without regard to the original.
        fully_random: bool,
    },
    /// Destination becomes what registers 1 (address) and 2 (port) hold.
    Dnat {
        /// IPv6 address.
        v6: bool,
        /// Whether register 2 holds a port.
        port: bool,
    },
    /// Ends the rule.
    Verdict(Verdict),
    /// Anything else, by its name and attributes.
    Other {
        /// The kernel's name.
        name: String,
        /// Its attributes.
        data: Vec<u8>,
    },
}

impl Base {
    fn number(self) -> u32 {
        match self {
            Self::Link => 0,
            Self::Network => 1,
            Self::Transport => 2,
        }
    }
}

impl Meta {
    fn number(self) -> u32 {
        match self {
            Self::Mark => 3,
            Self::IifName => 6,
            Self::OifName => 7,
            Self::NfProto => 15,
            Self::L4Proto => 16,
        }
    }
}

const META_ALL: [Meta; 5] = [Meta::Mark, Meta::IifName, Meta::OifName, Meta::NfProto, Meta::L4Proto];

// NFT_JUMP and its like, from linux/netfilter/nf_tables.h; NF_DROP and NF_ACCEPT from netfilter.h.
const NF_DROP: i32 = 0;
const NF_ACCEPT: i32 = 1;
const NFT_JUMP: i32 = -3;
const NFT_GOTO: i32 = -4;
const NFT_RETURN: i32 = -5;

const NFTA_LIST_ELEM: u16 = 1;
const NFTA_EXPR_NAME: u16 = 1;
const NFTA_EXPR_DATA: u16 = 2;
const NFTA_DATA_VALUE: u16 = 1;
const NFTA_DATA_VERDICT: u16 = 2;
const NFTA_VERDICT_CODE: u16 = 1;
const NFTA_VERDICT_CHAIN: u16 = 2;
const NFT_FIB_RESULT_ADDRTYPE: u32 = 3;
const NFTA_FIB_F_DADDR: u32 = 2;
const NFT_NAT_DNAT: u32 = 1;
/// `NF_NAT_RANGE_PROTO_RANDOM_FULLY` of linux/netfilter/nf_nat.h.
const RANDOM_FULLY: u32 = 1 << 4;
/// `NF_NAT_RANGE_MAP_IPS | NF_NAT_RANGE_PROTO_SPECIFIED`: set by the kernel from the registers.
const NAT_FROM_REGISTERS: u32 = 3;

fn data_value(writer: &mut Writer<'_>, kind: u16, value: &[u8]) {
    writer.nest(kind, |data| data.bytes(NFTA_DATA_VALUE, value));
}

fn read_value(attr: Option<Attr<'_>>) -> Option<Vec<u8>> {
    Some(Attrs(attr?.value).get(NFTA_DATA_VALUE)?.value.to_vec())
}

impl Expr {
    fn name(&self) -> &str {
        match self {
            Self::Payload { .. } => "payload",
            Self::Meta(_) | Self::SetMark => "meta",
            Self::Bitwise { .. } => "bitwise",
            Self::Cmp { .. } => "cmp",
            Self::FibDaddrType => "fib",
            Self::Load { .. } | Self::Verdict(_) => "immediate",
            Self::Counter => "counter",
            Self::Masquerade { .. } => "masq",
            Self::Dnat { .. } => "nat",
            Self::Other { name, .. } => name,
        }
    }

    /// Writes the expressions as the list a rule carries.
    pub(super) fn write_list(list: &[Self], writer: &mut Writer<'_>) {
        for expr in list {
            writer.nest(NFTA_LIST_ELEM, |element| {
                element.string(NFTA_EXPR_NAME, expr.name());
                element.nest(NFTA_EXPR_DATA, |data| expr.write(data));
            });
        }
    }

    fn write(&self, w: &mut Writer<'_>) {
        match self {
            Self::Payload { base, offset, len } => {
                w.be32(1, REG);
                w.be32(2, base.number());
                w.be32(3, *offset);
                w.be32(4, *len);
            }
            Self::Meta(key) => {
                w.be32(1, REG);
                w.be32(2, key.number());
            }
            Self::SetMark => {
                w.be32(2, Meta::Mark.number());
                w.be32(3, REG);
            }
            Self::Bitwise { mask, xor } => {
                w.be32(1, REG);
                w.be32(2, REG);
                w.be32(3, mask.len() as u32);
                data_value(w, 4, mask);
                data_value(w, 5, xor);
            }
            Self::Cmp { equal, value } => {
                w.be32(1, REG);
                w.be32(2, u32::from(!equal));
                data_value(w, 3, value);
            }
            Self::FibDaddrType => {
                w.be32(1, REG);
                w.be32(2, NFT_FIB_RESULT_ADDRTYPE);
                w.be32(3, NFTA_FIB_F_DADDR);
            }
            Self::Load { register, value } => {
                w.be32(1, *register);
                data_value(w, 2, value);
            }
            Self::Counter => {
                w.be64(1, 0);
                w.be64(2, 0);
            }
            Self::Masquerade { fully_random } => {
                if *fully_random {
                    w.be32(1, RANDOM_FULLY);
                }
            }
            Self::Dnat { v6, port } => {
                w.be32(1, NFT_NAT_DNAT);
                w.be32(2, if *v6 { libc::NFPROTO_IPV6 } else { libc::NFPROTO_IPV4 } as u32);
                w.be32(3, REG);
                if *port {
                    w.be32(5, REG_PORT);
                }
            }
            Self::Verdict(verdict) => {
                w.be32(1, REG_VERDICT);
                w.nest(2, |data| data.nest(NFTA_DATA_VERDICT, |data| verdict.write(data)));
            }
            Self::Other { data, .. } => w.0.extend_from_slice(data),
        }
    }

    /// Reads the list of a rule.
    pub(super) fn read_list(list: &[u8]) -> Vec<Self> {
        Attrs(list)
            .map(|element| {
                let attrs = Attrs(element.value);
                let name = attrs.get(NFTA_EXPR_NAME).map(|name| name.as_text()).unwrap_or_default();
                let data = attrs.get(NFTA_EXPR_DATA).map_or(&[][..], |data| data.value);
                Self::read(&name, Attrs(data)).unwrap_or_else(|| Self::Other { name, data: data.to_vec() })
            })
            .collect()
    }

    /// Reads one expression; none when it says more than this type can hold.
    fn read(name: &str, attrs: Attrs<'_>) -> Option<Self> {
        let number = |kind: u16| attrs.get(kind).and_then(|attr| attr.as_be32());
        let at_reg = |kind: u16| register(number(kind)?).filter(|register| *register == REG);
        Some(match name {
            "payload" => {
                at_reg(1)?;
                let base = [Base::Link, Base::Network, Base::Transport]
                    .into_iter()
                    .find(|base| Some(base.number()) == number(2))?;
                Self::Payload { base, offset: number(3)?, len: number(4)? }
            }
            "meta" if number(1).is_some() => {
                at_reg(1)?;
                Self::Meta(META_ALL.into_iter().find(|key| Some(key.number()) == number(2))?)
            }
            "meta" => {
                at_reg(3)?;
                (number(2)? == Meta::Mark.number()).then_some(Self::SetMark)?
            }
            "bitwise" => {
                at_reg(1)?;
                at_reg(2)?;
                // NFTA_BITWISE_OP: 0 is mask and xor; shifts are something else.
                if number(6).is_some_and(|op| op != 0) {
                    return None;
                }
                Self::Bitwise { mask: read_value(attrs.get(4))?, xor: read_value(attrs.get(5))? }
            }
            "cmp" => {
                at_reg(1)?;
                let equal = match number(2)? {
                    0 => true,
                    1 => false,
                    _ => return None,
                };
                Self::Cmp { equal, value: read_value(attrs.get(3))? }
            }
            "fib" => {
                at_reg(1)?;
                let wanted = (Some(NFT_FIB_RESULT_ADDRTYPE), Some(NFTA_FIB_F_DADDR));
                ((number(2), number(3)) == wanted).then_some(Self::FibDaddrType)?
            }
            "immediate" => match number(1)? {
                REG_VERDICT => {
                    let data = Attrs(attrs.get(2)?.value);
                    Self::Verdict(Verdict::read(Attrs(data.get(NFTA_DATA_VERDICT)?.value))?)
                }
                other => Self::Load { register: register(other)?, value: read_value(attrs.get(2))? },
            },
            "counter" => Self::Counter,
            "masq" => {
                // A port range makes it something else.
                if number(2).is_some() {
                    return None;
                }
                match number(1).unwrap_or(0) {
                    0 => Self::Masquerade { fully_random: false },
                    RANDOM_FULLY => Self::Masquerade { fully_random: true },
                    _ => return None,
                }
            }
            "nat" => {
                let plain = number(1)? == NFT_NAT_DNAT && register(number(3)?)? == REG;
                let flags = number(7).unwrap_or(0) & !NAT_FROM_REGISTERS;
                let port = match number(5) {
                    None => false,
                    Some(found) => register(found)? == REG_PORT,
                };
                let v6 = number(2)? == libc::NFPROTO_IPV6 as u32;
                (plain && flags == 0).then_some(Self::Dnat { v6, port })?
            }
            _ => return None,
        })
    }
}

/// The kernel numbers its registers twice: 1..4 of 16 bytes each are also 8, 12, 16, 20 of four.
fn register(number: u32) -> Option<u32> {
    match number {
        1..=4 => Some(number),
        8 | 12 | 16 | 20 => Some(number / 4 - 1),
        _ => None,
    }
}

impl Verdict {
    fn write(&self, w: &mut Writer<'_>) {
        let (code, chain) = match self {
            Self::Accept => (NF_ACCEPT, None),
            Self::Drop => (NF_DROP, None),
            Self::Return => (NFT_RETURN, None),
            Self::Jump(chain) => (NFT_JUMP, Some(chain)),
            Self::Goto(chain) => (NFT_GOTO, Some(chain)),
        };
        w.be32(NFTA_VERDICT_CODE, code as u32);
        if let Some(chain) = chain {
            w.string(NFTA_VERDICT_CHAIN, chain);
        }
    }

    fn read(attrs: Attrs<'_>) -> Option<Self> {
        let chain = || attrs.get(NFTA_VERDICT_CHAIN).map(|chain| chain.as_text());
        Some(match attrs.get(NFTA_VERDICT_CODE)?.as_be32()? as i32 {
            NF_ACCEPT => Self::Accept,
            NF_DROP => Self::Drop,
            NFT_RETURN => Self::Return,
            NFT_JUMP => Self::Jump(chain()?),
            NFT_GOTO => Self::Goto(chain()?),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_expression_reads_back_as_written() {
        let list = vec![
            Expr::Payload { base: Base::Network, offset: 12, len: 4 },
            Expr::Meta(Meta::IifName),
            Expr::SetMark,
            Expr::Bitwise { mask: vec![255, 255, 0, 0], xor: vec![0; 4] },
            Expr::Cmp { equal: false, value: vec![10, 5, 0, 0] },
            Expr::FibDaddrType,
            Expr::Load { register: 2, value: vec![0, 80] },
            Expr::Counter,
            Expr::Masquerade { fully_random: true },
            Expr::Masquerade { fully_random: false },
            Expr::Dnat { v6: false, port: true },
            Expr::Verdict(Verdict::Goto("masq_checks".into())),
            Expr::Verdict(Verdict::Return),
            Expr::Other { name: "limit".into(), data: vec![8, 0, 1, 0, 0, 0, 0, 9] },
        ];
        let mut bytes = Vec::new();
        Expr::write_list(&list, &mut Writer(&mut bytes));
        assert_eq!(Expr::read_list(&bytes), list);
        for end in 0..bytes.len() {
            // Truncated input is read without panic, to a prefix.
            let _ = Expr::read_list(&bytes[..end]);
        }
    }
}
