//! nftables by netlink.
//!
//! The kernel's packet filter is changed in transactions: a [`Batch`] of tables, chains and rules is
//! applied whole or not at all, in one write, without starting a program (an `nft` run takes tens of
//! milliseconds). What is written reads well in `nft list ruleset`, comments included. [`Nft`] also
//! lists what is there, as expressions that compare equal to those wanted, so that nothing is
//! rewritten that is right already.
//!
//! Covered is what felt's own rules need; the encoder is small because of that. Rules with other
//! expressions are listed (as [`Expr::Other`]) and can be deleted by handle.
//!
//! ```no_run
//! use felt_hostnet::nft::{Batch, Chain, Family, Hook, Nft, Rule};
//!
//! # fn main() -> Result<(), felt_hostnet::Error> {
//! let mut batch = Batch::new();
//! batch.add_table(Family::Ip, "demo", Some("rules of the demo"));
//! batch.add_chain(Family::Ip, "demo", &Chain::base("postrtg", "nat", Hook::Postrouting, 100));
//! batch.flush_chain(Family::Ip, "demo", "postrtg");
//! batch.add_rule(Family::Ip, "demo", &Rule::new("postrtg")
//!     .saddr("10.5.0.0/16".parse().unwrap())
//!     .daddr_not("224.0.0.0/4".parse().unwrap())
//!     .masquerade(true));
//! Nft::new()?.commit(batch)?;
//! # Ok(())
//! # }
//! ```

mod expr;
mod rule;

use std::fmt;

pub use expr::{Base, Expr, Meta, Verdict};
pub use rule::{Rule, Transport};

use crate::Error;
use crate::netlink::attr::{Attrs, Writer};
use crate::netlink::socket::{
    Answer, Connection, HEADER_LEN, Messages, NLM_F_ACK, NLM_F_APPEND, NLM_F_CREATE, NLM_F_DUMP,
    NLM_F_REQUEST, kernel_error, write_header,
};
use crate::netns::NetNs;

const NETLINK_NETFILTER: isize = libc::NETLINK_NETFILTER as isize;
/// Length of `struct nfgenmsg`.
const NFGENMSG_LEN: usize = 4;
const NFNL_SUBSYS_NFTABLES: u16 = 10;
const NFNL_MSG_BATCH_BEGIN: u16 = 0x10;
const NFNL_MSG_BATCH_END: u16 = 0x11;
const NLMSG_ERROR: u16 = 2;
/// A deletion does not take along what is inside.
const NLM_F_NONREC: u16 = 0x100;

// NFT_MSG_* of linux/netfilter/nf_tables.h.
const NEWTABLE: u16 = 0;
const GETTABLE: u16 = 1;
const DELTABLE: u16 = 2;
const NEWCHAIN: u16 = 3;
const GETCHAIN: u16 = 4;
const DELCHAIN: u16 = 5;
const NEWRULE: u16 = 6;
const GETRULE: u16 = 7;
const DELRULE: u16 = 8;
const GETGEN: u16 = 16;

// NFTA_TABLE_*, NFTA_CHAIN_*, NFTA_RULE_*.
const GEN_ID: u16 = 1;
const TABLE_NAME: u16 = 1;
const TABLE_USERDATA: u16 = 6;
const CHAIN_TABLE: u16 = 1;
const CHAIN_NAME: u16 = 3;
const CHAIN_HOOK: u16 = 4;
const CHAIN_POLICY: u16 = 5;
const CHAIN_TYPE: u16 = 7;
const CHAIN_USERDATA: u16 = 12;
const HOOK_NUMBER: u16 = 1;
const HOOK_PRIORITY: u16 = 2;
const RULE_TABLE: u16 = 1;
const RULE_CHAIN: u16 = 2;
const RULE_HANDLE: u16 = 3;
const RULE_EXPRESSIONS: u16 = 4;
const RULE_USERDATA: u16 = 7;

/// `NFTNL_UDATA_*_COMMENT`: the first user data item of tables, chains and rules alike.
const UDATA_COMMENT: u8 = 0;

/// Address family of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    /// IPv4.
    Ip,
    /// IPv6.
    Ip6,
    /// Both.
    Inet,
    /// Bridged frames.
    Bridge,
}

impl Family {
    fn number(self) -> u8 {
        (match self {
            Self::Ip => libc::NFPROTO_IPV4,
            Self::Ip6 => libc::NFPROTO_IPV6,
            Self::Inet => libc::NFPROTO_INET,
            Self::Bridge => libc::NFPROTO_BRIDGE,
        }) as u8
    }

    fn from_number(number: u8) -> Option<Self> {
        [Self::Ip, Self::Ip6, Self::Inet, Self::Bridge].into_iter().find(|family| family.number() == number)
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ip => "ip",
            Self::Ip6 => "ip6",
            Self::Inet => "inet",
            Self::Bridge => "bridge",
        })
    }
}

/// Where a base chain is attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are nft's")]
pub enum Hook {
    Prerouting,
    Input,
    Forward,
    Output,
    Postrouting,
}

/// A chain, to be made or as found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    /// Name.
    pub name: String,
    /// Attachment, for a base chain.
    pub base: Option<BaseChain>,
    /// Text shown by `nft list`.
    pub comment: Option<String>,
}

/// Attachment of a base chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BaseChain {
    /// `filter`, `nat` or `route`.
    pub kind: String,
    /// Where.
    pub hook: u32,
    /// Order among chains of one hook: lower first.
    pub priority: i32,
    /// What happens to a packet no rule decided on.
    pub accept: bool,
}

impl Chain {
    /// A chain that is jumped to.
    pub fn regular(name: &str) -> Self {
        Self { name: name.to_owned(), base: None, comment: None }
    }

    /// A base chain whose policy is to accept.
    pub fn base(name: &str, kind: &str, hook: Hook, priority: i32) -> Self {
        let base = BaseChain { kind: kind.to_owned(), hook: hook as u32, priority, accept: true };
        Self { name: name.to_owned(), base: Some(base), comment: None }
    }

    /// Sets the comment.
    pub fn comment(mut self, text: &str) -> Self {
        self.comment = Some(text.to_owned());
        self
    }
}

/// A table as found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// Family.
    pub family: Family,
    /// Name.
    pub name: String,
    /// Text shown by `nft list`.
    pub comment: Option<String>,
}

/// A rule as found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundRule {
    /// The kernel's number, for deletion.
    pub handle: u64,
    /// The chain.
    pub chain: String,
    /// Comment.
    pub comment: Option<String>,
    /// What it does.
    pub exprs: Vec<Expr>,
}

impl FoundRule {
    /// Whether it does what `rule` asks for and says the same.
    pub fn is(&self, rule: &Rule) -> bool {
        self.chain == rule.chain && self.comment == rule.comment && self.exprs == rule.exprs
    }
}

/// Changes that are applied together or not at all.
#[derive(Debug, Default)]
pub struct Batch {
    operations: Vec<Operation>,
}

#[derive(Debug)]
struct Operation {
    kind: u16,
    flags: u16,
    family: u8,
    attributes: Vec<u8>,
    what: String,
}

impl Batch {
    /// An empty batch.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    fn push(
        &mut self,
        kind: u16,
        flags: u16,
        family: Family,
        what: String,
        fill: impl FnOnce(&mut Writer<'_>),
    ) {
        let mut attributes = Vec::new();
        fill(&mut Writer(&mut attributes));
        self.operations.push(Operation { kind, flags, family: family.number(), attributes, what });
    }

    /// Makes a table; one that exists stays (with its comment).
    pub fn add_table(&mut self, family: Family, table: &str, comment: Option<&str>) {
        self.push(NEWTABLE, NLM_F_CREATE, family, format!("add table {family} {table}"), |w| {
            w.string(TABLE_NAME, table);
            if let Some(comment) = comment {
                w.bytes(TABLE_USERDATA, &user_data(comment));
            }
        });
    }

    /// Deletes a table with all it holds, whether it exists or not.
    pub fn delete_table(&mut self, family: Family, table: &str) {
        // Made first, so that the deletion finds one: works on every kernel, unlike "destroy".
        self.add_table(family, table, None);
        self.push(DELTABLE, 0, family, format!("delete table {family} {table}"), |w| {
            w.string(TABLE_NAME, table);
        });
    }

    /// Makes a chain; one that exists stays if it is attached alike.
    pub fn add_chain(&mut self, family: Family, table: &str, chain: &Chain) {
        let what = format!("add chain {family} {table} {}", chain.name);
        self.push(NEWCHAIN, NLM_F_CREATE, family, what, |w| {
            w.string(CHAIN_TABLE, table);
            w.string(CHAIN_NAME, &chain.name);
            if let Some(base) = &chain.base {
                w.nest(CHAIN_HOOK, |w| {
                    w.be32(HOOK_NUMBER, base.hook);
                    w.be32(HOOK_PRIORITY, base.priority as u32);
                });
                w.be32(CHAIN_POLICY, u32::from(base.accept));
                w.string(CHAIN_TYPE, &base.kind);
            }
            if let Some(comment) = &chain.comment {
                w.bytes(CHAIN_USERDATA, &user_data(comment));
            }
        });
    }

    /// Deletes an existing chain; the kernel refuses while it holds rules or is jumped to.
    pub fn delete_chain(&mut self, family: Family, table: &str, chain: &str) {
        self.push(DELCHAIN, 0, family, format!("delete chain {family} {table} {chain}"), |w| {
            w.string(CHAIN_TABLE, table);
            w.string(CHAIN_NAME, chain);
        });
    }

    /// Deletes an existing table with these chains if none of them holds a rule and nothing else is in
    /// the table; else the whole batch is refused with EBUSY.
    pub fn delete_table_if_unused(&mut self, family: Family, table: &str, chains: &[Chain]) {
        for chain in chains {
            let what = format!("delete chain {family} {table} {}", chain.name);
            self.push(DELCHAIN, NLM_F_NONREC, family, what, |w| {
                w.string(CHAIN_TABLE, table);
                w.string(CHAIN_NAME, &chain.name);
            });
        }
        self.push(DELTABLE, NLM_F_NONREC, family, format!("delete table {family} {table}"), |w| {
            w.string(TABLE_NAME, table);
        });
    }

    /// Deletes all rules of an existing chain.
    pub fn flush_chain(&mut self, family: Family, table: &str, chain: &str) {
        self.push(DELRULE, 0, family, format!("flush chain {family} {table} {chain}"), |w| {
            w.string(RULE_TABLE, table);
            w.string(RULE_CHAIN, chain);
        });
    }

    /// Adds a rule at the end of its chain.
    pub fn add_rule(&mut self, family: Family, table: &str, rule: &Rule) {
        self.rule(family, table, rule, NLM_F_CREATE | NLM_F_APPEND, "add");
    }

    /// Adds a rule at the head of its chain.
    pub fn insert_rule(&mut self, family: Family, table: &str, rule: &Rule) {
        self.rule(family, table, rule, NLM_F_CREATE, "insert");
    }

    fn rule(&mut self, family: Family, table: &str, rule: &Rule, flags: u16, verb: &str) {
        let what = format!("{verb} rule {family} {table} {}", rule.chain);
        self.push(NEWRULE, flags, family, what, |w| {
            w.string(RULE_TABLE, table);
            w.string(RULE_CHAIN, &rule.chain);
            w.nest(RULE_EXPRESSIONS, |w| Expr::write_list(&rule.exprs, w));
            if let Some(comment) = &rule.comment {
                w.bytes(RULE_USERDATA, &user_data(comment));
            }
        });
    }

    /// Deletes one rule by its handle.
    pub fn delete_rule(&mut self, family: Family, table: &str, chain: &str, handle: u64) {
        let what = format!("delete rule {family} {table} {chain} handle {handle}");
        self.push(DELRULE, 0, family, what, |w| {
            w.string(RULE_TABLE, table);
            w.string(RULE_CHAIN, chain);
            w.be64(RULE_HANDLE, handle);
        });
    }
}

/// The user data item that nft shows as a comment: type, length, text with NUL.
fn user_data(comment: &str) -> Vec<u8> {
    let mut end = comment.len().min(rule::COMMENT_MAX);
    while !comment.is_char_boundary(end) {
        end -= 1;
    }
    let mut bytes = vec![UDATA_COMMENT, end as u8 + 1];
    bytes.extend_from_slice(&comment.as_bytes()[..end]);
    bytes.push(0);
    bytes
}

fn comment_of(attrs: Attrs<'_>, kind: u16) -> Option<String> {
    let mut data = attrs.get(kind)?.value;
    while let [item, length, rest @ ..] = data {
        let value = rest.get(..usize::from(*length))?;
        if *item == UDATA_COMMENT {
            let end = value.iter().position(|byte| *byte == 0).unwrap_or(value.len());
            return Some(String::from_utf8_lossy(&value[..end]).into_owned());
        }
        data = &rest[value.len()..];
    }
    None
}

/// One nftables netlink socket.
#[derive(Debug)]
pub struct Nft {
    connection: Connection,
}

impl Nft {
    /// Opens a socket in the calling thread's network namespace.
    pub fn new() -> Result<Self, Error> {
        let connection = Connection::open(NETLINK_NETFILTER)
            .map_err(|source| Error::new("open netfilter netlink socket", source))?;
        connection.set_receive_memory(1 << 20);
        Ok(Self { connection })
    }

    /// Opens a socket in `netns`; the calling thread is back in its own namespace on return.
    pub fn new_in(netns: &NetNs) -> Result<Self, Error> {
        netns.with(Self::new).map_err(|source| Error::new("enter network namespace", source))?
    }

    /// Whether the kernel has nftables at all.
    pub fn is_supported(&mut self) -> Result<bool, Error> {
        match self.tables() {
            Ok(_) => Ok(true),
            // Without the module nobody answers for this part of netfilter netlink.
            Err(error) if error.is(libc::EINVAL) || error.is_unsupported() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The number of the ruleset's generation: every change of any table, also by iptables in its
    /// nf_tables variant, makes it another. Equal numbers mean that nothing was changed in between.
    pub fn generation(&mut self) -> Result<u32, Error> {
        let mut generation = None;
        self.connection.request(
            NFNL_SUBSYS_NFTABLES << 8 | GETGEN,
            0,
            &|| "ask for the ruleset generation".into(),
            &|bytes| bytes.extend_from_slice(&[0; NFGENMSG_LEN]),
            &mut |answer| {
                if let Answer::Message(found) = answer {
                    let attrs = Attrs(found.payload.get(NFGENMSG_LEN..).unwrap_or_default());
                    generation = attrs.get(GEN_ID).and_then(|id| id.as_be32());
                }
                Ok(())
            },
        )?;
        generation.ok_or_else(|| Error::protocol("ask for the ruleset generation", "no number came"))
    }

    /// Applies a batch; on failure nothing of it is in effect, and the error names the operation the
    /// kernel refused first.
    pub fn commit(&mut self, batch: Batch) -> Result<(), Error> {
        let Some(last) = batch.operations.len().checked_sub(1) else { return Ok(()) };
        let mut bytes = Vec::new();
        let begin = self.connection.next_sequence();
        message(&mut bytes, NFNL_MSG_BATCH_BEGIN, NLM_F_REQUEST, begin, 0, NFNL_SUBSYS_NFTABLES, &[]);
        for (number, operation) in batch.operations.iter().enumerate() {
            let sequence = self.connection.next_sequence();
            let ack = if number == last { NLM_F_ACK } else { 0 };
            let kind = NFNL_SUBSYS_NFTABLES << 8 | operation.kind;
            let flags = NLM_F_REQUEST | operation.flags | ack;
            message(&mut bytes, kind, flags, sequence, operation.family, 0, &operation.attributes);
        }
        let end = self.connection.next_sequence();
        message(&mut bytes, NFNL_MSG_BATCH_END, NLM_F_REQUEST, end, 0, NFNL_SUBSYS_NFTABLES, &[]);

        let name = |sequence: u32| match sequence.wrapping_sub(begin).checked_sub(1) {
            Some(number) => match batch.operations.get(number as usize) {
                Some(operation) => operation.what.clone(),
                None => "nftables transaction".to_owned(),
            },
            None => "nftables transaction".to_owned(),
        };
        let whole = || "nftables transaction".to_owned();
        self.connection.set_send_memory(bytes.len());
        self.connection.send(&bytes).map_err(|source| Error::new(whole(), source))?;
        // The kernel works inside the write: every answer is there when it returns.
        let mut acknowledged = false;
        let mut failure: Option<Error> = None;
        loop {
            let datagram = match self.connection.receive(libc::MSG_DONTWAIT) {
                Ok(datagram) => datagram,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(Error::new(whole(), error)),
            };
            for answer in Messages(datagram) {
                let ours = answer.sequence.wrapping_sub(begin) <= end.wrapping_sub(begin);
                if answer.kind != NLMSG_ERROR || !ours {
                    continue;
                }
                match kernel_error(answer) {
                    Some((errno, note)) if failure.is_none() => {
                        let source = std::io::Error::from_raw_os_error(errno);
                        failure = Some(Error::with_note(name(answer.sequence), source, note));
                    }
                    Some(_) => {}
                    None => acknowledged = true,
                }
            }
        }
        match failure {
            Some(error) => Err(error),
            None if acknowledged => Ok(()),
            None => Err(Error::protocol(whole(), "the kernel did not answer")),
        }
    }

    /// The tables of every family this crate knows.
    pub fn tables(&mut self) -> Result<Vec<Table>, Error> {
        let mut found = Vec::new();
        self.list(
            GETTABLE,
            libc::NFPROTO_UNSPEC as u8,
            &|| "list tables".into(),
            &|_| {},
            &mut |family, attrs| {
                if let (Some(family), Some(name)) = (Family::from_number(family), attrs.get(TABLE_NAME)) {
                    let comment = comment_of(attrs, TABLE_USERDATA);
                    found.push(Table { family, name: name.as_text(), comment });
                }
            },
        )?;
        Ok(found)
    }

    /// Whether a table exists.
    pub fn has_table(&mut self, family: Family, table: &str) -> Result<bool, Error> {
        Ok(self.tables()?.iter().any(|found| found.family == family && found.name == table))
    }

    /// The chains of a table; none when there is no such table.
    pub fn chains(&mut self, family: Family, table: &str) -> Result<Vec<Chain>, Error> {
        let mut found = Vec::new();
        let what = || format!("list chains of {family} {table}");
        // The kernel filters chains by family only.
        self.list(GETCHAIN, family.number(), &what, &|_| {}, &mut |_, attrs| {
            if attrs.get(CHAIN_TABLE).is_none_or(|name| name.as_text() != table) {
                return;
            }
            let Some(name) = attrs.get(CHAIN_NAME) else { return };
            let base = attrs.get(CHAIN_HOOK).and_then(|hook| {
                let hook = Attrs(hook.value);
                Some(BaseChain {
                    kind: attrs.get(CHAIN_TYPE)?.as_text(),
                    hook: hook.get(HOOK_NUMBER)?.as_be32()?,
                    priority: hook.get(HOOK_PRIORITY)?.as_be32()? as i32,
                    accept: attrs.get(CHAIN_POLICY)?.as_be32()? == 1,
                })
            });
            let comment = comment_of(attrs, CHAIN_USERDATA);
            found.push(Chain { name: name.as_text(), base, comment });
        })?;
        Ok(found)
    }

    /// The rules of a table, or of one of its chains, in order; none when there is no such table or
    /// chain.
    pub fn rules(
        &mut self,
        family: Family,
        table: &str,
        chain: Option<&str>,
    ) -> Result<Vec<FoundRule>, Error> {
        let mut found = Vec::new();
        let what = || match chain {
            Some(chain) => format!("list rules of {family} {table} {chain}"),
            None => format!("list rules of {family} {table}"),
        };
        let select = |w: &mut Writer<'_>| {
            w.string(RULE_TABLE, table);
            if let Some(chain) = chain {
                w.string(RULE_CHAIN, chain);
            }
        };
        self.list(GETRULE, family.number(), &what, &select, &mut |_, attrs| {
            if attrs.get(RULE_TABLE).is_none_or(|name| name.as_text() != table) {
                return;
            }
            let Some(name) = attrs.get(RULE_CHAIN).map(|name| name.as_text()) else { return };
            if chain.is_some_and(|chain| chain != name) {
                return;
            }
            found.push(FoundRule {
                handle: attrs.get(RULE_HANDLE).and_then(|handle| handle.as_be64()).unwrap_or(0),
                chain: name,
                comment: comment_of(attrs, RULE_USERDATA),
                exprs: attrs.get(RULE_EXPRESSIONS).map_or_else(Vec::new, |list| Expr::read_list(list.value)),
            });
        })?;
        Ok(found)
    }

    fn list(
        &mut self,
        kind: u16,
        family: u8,
        what: &dyn Fn() -> String,
        select: &dyn Fn(&mut Writer<'_>),
        each: &mut dyn FnMut(u8, Attrs<'_>),
    ) -> Result<(), Error> {
        let mut messages: Vec<(u8, Vec<u8>)> = Vec::new();
        let outcome = self.connection.request(
            NFNL_SUBSYS_NFTABLES << 8 | kind,
            NLM_F_DUMP,
            what,
            &|bytes| {
                bytes.extend_from_slice(&[family, 0, 0, 0]);
                select(&mut Writer(bytes));
            },
            &mut |answer| {
                match answer {
                    Answer::Start => messages.clear(),
                    Answer::Message(found) => {
                        if let (Some(family), Some(rest)) =
                            (found.payload.first(), found.payload.get(NFGENMSG_LEN..))
                        {
                            messages.push((*family, rest.to_vec()));
                        }
                    }
                }
                Ok(())
            },
        );
        match outcome {
            Err(error) if error.is(libc::ENOENT) => return Ok(()),
            other => other?,
        }
        for (family, attributes) in &messages {
            each(*family, Attrs(attributes));
        }
        Ok(())
    }
}

/// Appends one netfilter message.
fn message(
    bytes: &mut Vec<u8>,
    kind: u16,
    flags: u16,
    sequence: u32,
    family: u8,
    resource: u16,
    attributes: &[u8],
) {
    let start = bytes.len();
    bytes.resize(start + HEADER_LEN, 0);
    bytes.extend_from_slice(&[family, 0]);
    bytes.extend_from_slice(&resource.to_be_bytes());
    bytes.extend_from_slice(attributes);
    write_header(bytes, start, kind, flags, sequence);
}
