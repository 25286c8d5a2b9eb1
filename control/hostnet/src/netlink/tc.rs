//! Queueing disciplines and filters, as far as bandwidth limits need them.
//!
//! A token bucket (tbf) limits what leaves a link. What comes in cannot be queued, so it is sent
//! through an ifb device first: an ingress discipline with one filter that matches all packets and
//! redirects them there.

use super::attr::{Attrs, Writer};
use super::socket::{Answer, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REPLACE};
use super::{Handle, IfIndex};
use crate::Error;

// RTM_* of linux/rtnetlink.h.
const RTM_NEWQDISC: u16 = 36;
const RTM_DELQDISC: u16 = 37;
const RTM_GETQDISC: u16 = 38;
const RTM_NEWTFILTER: u16 = 44;
const RTM_GETTFILTER: u16 = 46;

const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
const TCA_TBF_PARMS: u16 = 1;
const TCA_TBF_RATE64: u16 = 4;
const TCA_U32_CLASSID: u16 = 1;
const TCA_U32_SEL: u16 = 5;
const TCA_U32_ACT: u16 = 7;
const TCA_ACT_KIND: u16 = 1;
const TCA_ACT_OPTIONS: u16 = 2;
const TCA_MIRRED_PARMS: u16 = 2;
const TC_U32_TERMINAL: u8 = 1;
const TC_ACT_STOLEN: u32 = 4;
const TCA_EGRESS_REDIR: u32 = 1;
const ETH_P_ALL: u16 = 3;

/// Length of `struct tcmsg`.
const TCMSG_LEN: usize = 20;
/// Length of `struct tc_tbf_qopt`: two rate specifications of 12 bytes, limit, buffer, mtu.
const TBF_LEN: usize = 36;
const TBF_RATE: usize = 8;
const TBF_LIMIT: usize = 24;
const TBF_BUFFER: usize = 28;
/// Length of `struct tc_mirred`: five words common to actions, the kind of redirection, the link.
const MIRRED_LEN: usize = 28;
const MIRRED_ACTION: usize = 8;
const MIRRED_EACTION: usize = 20;
const MIRRED_IFINDEX: usize = 24;

/// Number of a discipline or class: major in the upper, minor in the lower 16 bits (`1:` is 0x10000).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TcHandle(pub u32);

impl TcHandle {
    /// The root of a link.
    pub const ROOT: Self = Self(0xffff_ffff);
    /// Where the ingress discipline is attached.
    pub const INGRESS: Self = Self(0xffff_fff1);
    /// The ingress discipline itself, `ffff:`.
    pub const INGRESS_QDISC: Self = Self(0xffff_0000);

    /// `major:minor`.
    pub const fn new(major: u16, minor: u16) -> Self {
        Self((major as u32) << 16 | minor as u32)
    }
}

/// Token bucket parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tbf {
    /// Bytes per second.
    pub rate: u64,
    /// Bytes that may wait.
    pub limit: u32,
    /// Size of the bucket as time, in the kernel's scheduler ticks.
    pub buffer: u32,
}

/// A queueing discipline to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NewQdisc {
    /// Token bucket.
    Tbf(Tbf),
    /// The place where filters see incoming packets.
    Ingress,
}

/// A queueing discipline as found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Qdisc {
    /// The link.
    pub index: IfIndex,
    /// Its own number.
    pub handle: TcHandle,
    /// Where it is attached.
    pub parent: TcHandle,
    /// The kernel's name of the kind.
    pub kind: String,
    /// Parameters, for a token bucket.
    pub tbf: Option<Tbf>,
}

/// A filter as found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filter {
    /// The kernel's name of the kind.
    pub kind: String,
    /// Priority; lower is looked at first.
    pub priority: u16,
    /// Ethernet protocol, 3 for all.
    pub protocol: u16,
    /// Links that packets are redirected to.
    pub redirects: Vec<IfIndex>,
}

fn header(index: IfIndex, handle: TcHandle, parent: TcHandle, info: u32) -> [u8; TCMSG_LEN] {
    let mut bytes = [0; TCMSG_LEN];
    bytes[4..8].copy_from_slice(&index.0.to_ne_bytes());
    bytes[8..12].copy_from_slice(&handle.0.to_ne_bytes());
    bytes[12..16].copy_from_slice(&parent.0.to_ne_bytes());
    bytes[16..20].copy_from_slice(&info.to_ne_bytes());
    bytes
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

impl Tbf {
    fn write(&self, w: &mut Writer<'_>) {
        let mut parameters = [0; TBF_LEN];
        let rate = u32::try_from(self.rate).unwrap_or(u32::MAX);
        parameters[TBF_RATE..TBF_RATE + 4].copy_from_slice(&rate.to_ne_bytes());
        parameters[TBF_LIMIT..TBF_LIMIT + 4].copy_from_slice(&self.limit.to_ne_bytes());
        parameters[TBF_BUFFER..TBF_BUFFER + 4].copy_from_slice(&self.buffer.to_ne_bytes());
        w.bytes(TCA_TBF_PARMS, &parameters);
        if self.rate > u64::from(u32::MAX) {
            w.bytes(TCA_TBF_RATE64, &self.rate.to_ne_bytes());
        }
    }

    fn read(options: Attrs<'_>) -> Option<Self> {
        let parameters = options.get(TCA_TBF_PARMS)?.value;
        let long = options.get(TCA_TBF_RATE64).and_then(|rate| rate.value.get(..8)?.try_into().ok());
        Some(Self {
            rate: match long {
                Some(bytes) => u64::from_ne_bytes(bytes),
                None => word(parameters, TBF_RATE)?.into(),
            },
            limit: word(parameters, TBF_LIMIT)?,
            buffer: word(parameters, TBF_BUFFER)?,
        })
    }
}

impl Handle {
    /// Adds a queueing discipline.
    ///
    /// # Errors
    /// [`Error::already_exists`] when one is attached there already (other than the kernel's default).
    pub fn qdisc_add(
        &mut self,
        index: IfIndex,
        parent: TcHandle,
        handle: TcHandle,
        qdisc: &NewQdisc,
    ) -> Result<(), Error> {
        self.qdisc_set(index, parent, handle, qdisc, NLM_F_CREATE | NLM_F_EXCL, "add")
    }

    /// Adds a queueing discipline, or takes the place of the one there.
    pub fn qdisc_replace(
        &mut self,
        index: IfIndex,
        parent: TcHandle,
        handle: TcHandle,
        qdisc: &NewQdisc,
    ) -> Result<(), Error> {
        self.qdisc_set(index, parent, handle, qdisc, NLM_F_CREATE | NLM_F_REPLACE, "replace")
    }

    fn qdisc_set(
        &mut self,
        index: IfIndex,
        parent: TcHandle,
        handle: TcHandle,
        qdisc: &NewQdisc,
        flags: u16,
        verb: &str,
    ) -> Result<(), Error> {
        let name = match qdisc {
            NewQdisc::Tbf(_) => "tbf",
            NewQdisc::Ingress => "ingress",
        };
        self.connection.request(
            RTM_NEWQDISC,
            flags,
            &|| format!("{verb} qdisc {name} on link {index}"),
            &|bytes| {
                bytes.extend_from_slice(&header(index, handle, parent, 0));
                let mut w = Writer(bytes);
                w.string(TCA_KIND, name);
                match qdisc {
                    NewQdisc::Tbf(tbf) => w.nest(TCA_OPTIONS, |w| tbf.write(w)),
                    NewQdisc::Ingress => w.nest(TCA_OPTIONS, |_| {}),
                }
            },
            &mut |_| Ok(()),
        )
    }

    /// Removes the discipline attached at `parent`, with its classes and filters.
    pub fn qdisc_del(&mut self, index: IfIndex, parent: TcHandle) -> Result<(), Error> {
        self.connection.request(
            RTM_DELQDISC,
            0,
            &|| format!("delete qdisc of link {index}"),
            &|bytes| bytes.extend_from_slice(&header(index, TcHandle(0), parent, 0)),
            &mut |_| Ok(()),
        )
    }

    /// The queueing disciplines of a link.
    pub fn qdiscs(&mut self, index: IfIndex) -> Result<Vec<Qdisc>, Error> {
        let mut found = Vec::new();
        self.connection.request(
            RTM_GETQDISC,
            NLM_F_DUMP,
            &|| format!("list qdiscs of link {index}"),
            &|bytes| bytes.extend_from_slice(&header(index, TcHandle(0), TcHandle(0), 0)),
            &mut |answer| {
                match answer {
                    Answer::Start => found.clear(),
                    Answer::Message(message) => found.extend(read_qdisc(message.payload)),
                }
                Ok(())
            },
        )?;
        found.retain(|qdisc| qdisc.index == index);
        Ok(found)
    }

    /// Adds a filter (u32) that matches every packet seen at `parent` and redirects it to another
    /// link's output.
    pub fn filter_redirect_all(
        &mut self,
        index: IfIndex,
        parent: TcHandle,
        priority: u16,
        to: IfIndex,
    ) -> Result<(), Error> {
        let info = u32::from(priority) << 16 | u32::from(ETH_P_ALL.to_be());
        self.connection.request(
            RTM_NEWTFILTER,
            NLM_F_CREATE | NLM_F_EXCL,
            &|| format!("redirect packets of link {index} to link {to}"),
            &|bytes| {
                bytes.extend_from_slice(&header(index, TcHandle(0), parent, info));
                let mut w = Writer(bytes);
                w.string(TCA_KIND, "u32");
                w.nest(TCA_OPTIONS, |w| {
                    w.ne32(TCA_U32_CLASSID, TcHandle::new(1, 1).0);
                    // struct tc_u32_sel with one key that compares nothing: it matches all.
                    let mut select = [0; 32];
                    select[0] = TC_U32_TERMINAL;
                    select[2] = 1;
                    w.bytes(TCA_U32_SEL, &select);
                    w.nest(TCA_U32_ACT, |w| {
                        w.nest(1, |w| {
                            w.string(TCA_ACT_KIND, "mirred");
                            w.nest(TCA_ACT_OPTIONS, |w| {
                                let mut mirred = [0; MIRRED_LEN];
                                let mut put = |at: usize, value: u32| {
                                    mirred[at..at + 4].copy_from_slice(&value.to_ne_bytes());
                                };
                                put(MIRRED_ACTION, TC_ACT_STOLEN);
                                put(MIRRED_EACTION, TCA_EGRESS_REDIR);
                                put(MIRRED_IFINDEX, to.0);
                                w.bytes(TCA_MIRRED_PARMS, &mirred);
                            });
                        });
                    });
                });
            },
            &mut |_| Ok(()),
        )
    }

    /// The filters at `parent` of a link.
    pub fn filters(&mut self, index: IfIndex, parent: TcHandle) -> Result<Vec<Filter>, Error> {
        let mut found = Vec::new();
        self.connection.request(
            RTM_GETTFILTER,
            NLM_F_DUMP,
            &|| format!("list filters of link {index}"),
            &|bytes| bytes.extend_from_slice(&header(index, TcHandle(0), parent, 0)),
            &mut |answer| {
                match answer {
                    Answer::Start => found.clear(),
                    Answer::Message(message) => found.extend(read_filter(message.payload)),
                }
                Ok(())
            },
        )?;
        Ok(found)
    }
}

fn read_qdisc(payload: &[u8]) -> Option<Qdisc> {
    let attrs = Attrs(payload.get(TCMSG_LEN..)?);
    let kind = attrs.get(TCA_KIND)?.as_text();
    let options = attrs.get(TCA_OPTIONS).map(|options| Attrs(options.value));
    Some(Qdisc {
        index: IfIndex(word(payload, 4)?),
        handle: TcHandle(word(payload, 8)?),
        parent: TcHandle(word(payload, 12)?),
        tbf: options.filter(|_| kind == "tbf").and_then(Tbf::read),
        kind,
    })
}

fn read_filter(payload: &[u8]) -> Option<Filter> {
    let info = word(payload, 16)?;
    let attrs = Attrs(payload.get(TCMSG_LEN..)?);
    let options = Attrs(attrs.get(TCA_OPTIONS)?.value);
    // The hash tables of u32 are listed like filters; only those with a selector are some.
    options.get(TCA_U32_SEL)?;
    let redirects = options.get(TCA_U32_ACT).map_or_else(Vec::new, |actions| {
        Attrs(actions.value)
            .filter_map(|action| {
                let action = Attrs(action.value);
                (action.get(TCA_ACT_KIND)?.as_text() == "mirred").then_some(())?;
                let parameters = Attrs(action.get(TCA_ACT_OPTIONS)?.value).get(TCA_MIRRED_PARMS)?.value;
                (word(parameters, MIRRED_EACTION)? == TCA_EGRESS_REDIR).then_some(())?;
                word(parameters, MIRRED_IFINDEX).map(IfIndex)
            })
            .collect()
    });
    Some(Filter {
        kind: attrs.get(TCA_KIND)?.as_text(),
        priority: (info >> 16) as u16,
        protocol: u16::from_be(info as u16),
        redirects,
    })
}
