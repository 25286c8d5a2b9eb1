//! Routing policy rules.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::socket::{NLM_F_CREATE, NLM_F_EXCL};
use super::{Family, Handle};
use crate::Error;

/// A rule that sends matching packets to a routing table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// Address family.
    pub family: Family,
    /// Order: lower is looked at first. Absent in a new rule: the kernel picks the next lower.
    pub priority: Option<u32>,
    /// Source prefix; none matches all.
    pub from: Option<IpNet>,
    /// Destination prefix; none matches all.
    pub to: Option<IpNet>,
    /// Packet mark with its mask.
    pub mark: Option<(u32, u32)>,
    /// Incoming link.
    pub iif: Option<String>,
    /// Outgoing link.
    pub oif: Option<String>,
    /// The table to look in.
    pub table: u32,
}

impl Rule {
    /// A rule for packets from a prefix.
    pub fn from_prefix(from: IpNet, table: u32) -> Self {
        Self {
            family: Family::of(from.addr()),
            priority: None,
            from: Some(from),
            to: None,
            mark: None,
            iif: None,
            oif: None,
            table,
        }
    }

    fn to_message(&self) -> RuleMessage {
        let mut message = RuleMessage::default();
        message.header.family = self.family.raw();
        message.header.action = RuleAction::ToTable;
        message.header.src_len = self.from.map_or(0, |net| net.prefix_len());
        message.header.dst_len = self.to.map_or(0, |net| net.prefix_len());
        let attributes = &mut message.attributes;
        attributes.extend(self.from.map(|net| RuleAttribute::Source(net.addr())));
        attributes.extend(self.to.map(|net| RuleAttribute::Destination(net.addr())));
        attributes.extend(self.priority.map(RuleAttribute::Priority));
        if let Some((mark, mask)) = self.mark {
            attributes.push(RuleAttribute::FwMark(mark));
            attributes.push(RuleAttribute::FwMask(mask));
        }
        attributes.extend(self.iif.clone().map(RuleAttribute::Iifname));
        attributes.extend(self.oif.clone().map(RuleAttribute::Oifname));
        match u8::try_from(self.table) {
            Ok(table) => message.header.table = table,
            Err(_) => attributes.push(RuleAttribute::Table(self.table)),
        }
        message
    }

    fn from_message(message: &RouteNetlinkMessage) -> Option<Self> {
        let RouteNetlinkMessage::NewRule(found) = message else { return None };
        let (family, unspecified) = match found.header.family {
            AddressFamily::Inet => (Family::V4, IpAddr::V4(Ipv4Addr::UNSPECIFIED)),
            AddressFamily::Inet6 => (Family::V6, IpAddr::V6(Ipv6Addr::UNSPECIFIED)),
            _ => return None,
        };
        let mut rule = Self {
            family,
            priority: Some(0),
            from: None,
            to: None,
            mark: None,
            iif: None,
            oif: None,
            table: found.header.table.into(),
        };
        let (mut from, mut to) = (None, None);
        let (mut mark, mut mask) = (None, None);
        for attribute in &found.attributes {
            match attribute {
                RuleAttribute::Source(address) => from = Some(*address),
                RuleAttribute::Destination(address) => to = Some(*address),
                RuleAttribute::Priority(priority) => rule.priority = Some(*priority),
                RuleAttribute::Table(table) => rule.table = *table,
                RuleAttribute::FwMark(value) => mark = Some(*value),
                RuleAttribute::FwMask(value) => mask = Some(*value),
                RuleAttribute::Iifname(name) => rule.iif = Some(name.clone()),
                RuleAttribute::Oifname(name) => rule.oif = Some(name.clone()),
                _ => {}
            }
        }
        let net = |address: Option<IpAddr>, length: u8| {
            (length > 0 || address.is_some())
                .then(|| IpNet::new(address.unwrap_or(unspecified), length).ok())
                .flatten()
        };
        rule.from = net(from, found.header.src_len);
        rule.to = net(to, found.header.dst_len);
        rule.mark = mark.map(|mark| (mark, mask.unwrap_or(u32::MAX)));
        Some(rule)
    }
}

impl Handle {
    /// Adds a rule.
    ///
    /// # Errors
    /// [`Error::already_exists`] for an equal rule.
    pub fn rule_add(&mut self, rule: &Rule) -> Result<(), Error> {
        let request = RouteNetlinkMessage::NewRule(rule.to_message());
        self.change(&request, NLM_F_CREATE | NLM_F_EXCL, &|| format!("add rule {rule:?}"))
    }

    /// Removes the first rule that has all that is said.
    pub fn rule_del(&mut self, rule: &Rule) -> Result<(), Error> {
        let request = RouteNetlinkMessage::DelRule(rule.to_message());
        self.change(&request, 0, &|| format!("delete rule {rule:?}"))
    }

    /// The rules of a family, in the order the kernel looks at them.
    pub fn rules(&mut self, family: Family) -> Result<Vec<Rule>, Error> {
        let mut request = RuleMessage::default();
        request.header.family = family.raw();
        let answers = self.dump(&RouteNetlinkMessage::GetRule(request), &|| "list rules".into())?;
        Ok(answers.iter().filter_map(Rule::from_message).collect())
    }
}
