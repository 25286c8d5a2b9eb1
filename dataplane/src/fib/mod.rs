//! The forwarding table: overlay prefix to next hop, longest match first.
//!
//! A [`Fib`] is an immutable snapshot. Changes make a new one that shares all pages but the changed ones
//! with the old; [`publish`] hands it to the workers, which take it once per batch:
//!
//! ```text
//!  control:  old Fib --with_changes--> new Fib --Publisher::publish--.
//!                                                                    v
//!  worker:   Reader::current() -> &Fib -> Cursor -> v4(dst), v4(dst), ..   one batch
//! ```
//!
//! INVARIANT: nothing here is written to while a reader can see it, so a lookup needs no lock and no
//! atomic instruction. Lookup costs one probe per prefix length in use; in a network all subnets have
//! the same.

mod index;
mod peer;
mod prefix;
#[cfg(test)]
mod tests;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

pub use peer::{NextHop, PEER_COUNTERS, Peer, PeerCounters, PeerId};
pub use prefix::{Prefix, PrefixError};

pub use crate::sys::snapshot as publish;

use index::{Index, Key};

/// One change of a table.
#[derive(Debug, Clone)]
pub enum FibChange {
    /// Enter or replace this prefix.
    Set(Prefix, Arc<Peer>),
    /// Take this very prefix out; nothing happens when it is not there.
    Remove(Prefix),
}

/// An immutable table.
#[derive(Debug, Clone, Default)]
pub struct Fib {
    v4: Family<u32>,
    v6: Family<u128>,
}

/// The indexes of one address family.
#[derive(Debug, Clone)]
struct Family<K> {
    /// Longest prefix first.
    indexes: Vec<Index<K>>,
    /// The prefix of length 0.
    default: Option<NextHop>,
}

impl Fib {
    /// An empty table.
    pub fn new() -> Fib {
        Fib::default()
    }

    /// A table of these entries; of equal prefixes the last one counts.
    pub fn from_entries(entries: impl IntoIterator<Item = (Prefix, Arc<Peer>)>) -> Fib {
        let mut fib = Fib::new();
        for (prefix, peer) in entries {
            fib.set(prefix, NextHop::new(peer));
        }
        fib
    }

    /// This table with the changes made in order. Both share every page that no change touches.
    pub fn with_changes(&self, changes: &[FibChange]) -> Fib {
        let mut fib = self.clone();
        for change in changes {
            match change {
                FibChange::Set(prefix, peer) => fib.set(*prefix, NextHop::new(peer.clone())),
                FibChange::Remove(prefix) => fib.remove(*prefix),
            }
        }
        fib
    }

    fn set(&mut self, prefix: Prefix, hop: NextHop) {
        match prefix.addr() {
            IpAddr::V4(addr) => self.v4.set(u32::from(addr), prefix.prefix_len(), hop),
            IpAddr::V6(addr) => self.v6.set(u128::from(addr), prefix.prefix_len(), hop),
        }
    }

    fn remove(&mut self, prefix: Prefix) {
        match prefix.addr() {
            IpAddr::V4(addr) => self.v4.remove(u32::from(addr), prefix.prefix_len()),
            IpAddr::V6(addr) => self.v6.remove(u128::from(addr), prefix.prefix_len()),
        }
    }

    /// The next hop of the longest prefix that holds this address.
    #[inline]
    pub fn v4(&self, dst: Ipv4Addr) -> Option<&NextHop> {
        self.v4.get(u32::from(dst))
    }

    /// The next hop of the longest prefix that holds this address.
    #[inline]
    pub fn v6(&self, dst: Ipv6Addr) -> Option<&NextHop> {
        self.v6.get(u128::from(dst))
    }

    /// The next hop of the longest prefix that holds this address.
    #[inline]
    pub fn lookup(&self, dst: IpAddr) -> Option<&NextHop> {
        match dst {
            IpAddr::V4(addr) => self.v4(addr),
            IpAddr::V6(addr) => self.v6(addr),
        }
    }

    /// A lookup that remembers the last destination of each family, for one batch.
    #[inline]
    pub fn cursor(&self) -> Cursor<'_> {
        Cursor { fib: self, v4: None, v6: None }
    }

    /// Number of prefixes.
    pub fn len(&self) -> usize {
        self.v4.len() + self.v6.len()
    }

    /// No prefixes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes held by the indexes, pages shared with other tables included.
    #[cfg(test)]
    fn bytes(&self) -> usize {
        let v4 = self.v4.indexes.iter().map(Index::bytes).sum::<usize>();
        v4 + self.v6.indexes.iter().map(Index::bytes).sum::<usize>()
    }

    /// All entries, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (Prefix, &Arc<Peer>)> {
        let v4 = self
            .v4
            .iter()
            .filter_map(|(addr, len, hop)| Some((Prefix::v4(addr.into(), len).ok()?, hop.peer())));
        let v6 = self
            .v6
            .iter()
            .filter_map(|(addr, len, hop)| Some((Prefix::v6(addr.into(), len).ok()?, hop.peer())));
        v4.chain(v6)
    }
}

impl<K> Default for Family<K> {
    fn default() -> Self {
        Self { indexes: Vec::new(), default: None }
    }
}

impl<K: Key> Family<K> {
    #[inline]
    fn get(&self, addr: K) -> Option<&NextHop> {
        self.indexes.iter().find_map(|index| index.get(addr)).or(self.default.as_ref())
    }

    /// Where the index of this length is, or belongs.
    fn find(&self, len: u8) -> Result<usize, usize> {
        self.indexes.binary_search_by(|index| len.cmp(&index.prefix_len()))
    }

    fn set(&mut self, addr: K, len: u8, hop: NextHop) {
        if len == 0 {
            self.default = Some(hop);
            return;
        }
        let at = self.find(len).unwrap_or_else(|at| {
            self.indexes.insert(at, Index::new(len));
            at
        });
        self.indexes[at].set(addr, hop);
    }

    fn remove(&mut self, addr: K, len: u8) {
        if len == 0 {
            self.default = None;
            return;
        }
        let Ok(at) = self.find(len) else { return };
        self.indexes[at].remove(addr);
        if self.indexes[at].count() == 0 {
            self.indexes.remove(at);
        }
    }

    fn len(&self) -> usize {
        self.indexes.iter().map(Index::count).sum::<usize>() + usize::from(self.default.is_some())
    }

    fn iter(&self) -> impl Iterator<Item = (K, u8, &NextHop)> {
        let default = self.default.iter().map(|hop| (K::from_u128(0), 0, hop));
        let longer = self
            .indexes
            .iter()
            .flat_map(|index| index.iter().map(|(addr, peer)| (addr, index.prefix_len(), peer)));
        longer.chain(default)
    }
}

/// See [`Fib::cursor`].
#[derive(Debug, Clone)]
pub struct Cursor<'a> {
    fib: &'a Fib,
    v4: Option<(Ipv4Addr, Option<&'a NextHop>)>,
    v6: Option<(Ipv6Addr, Option<&'a NextHop>)>,
}

impl<'a> Cursor<'a> {
    /// [`Fib::v4`].
    #[inline]
    pub fn v4(&mut self, dst: Ipv4Addr) -> Option<&'a NextHop> {
        match self.v4 {
            Some((last, peer)) if last == dst => peer,
            _ => {
                let peer = self.fib.v4(dst);
                self.v4 = Some((dst, peer));
                peer
            }
        }
    }

    /// [`Fib::v6`].
    #[inline]
    pub fn v6(&mut self, dst: Ipv6Addr) -> Option<&'a NextHop> {
        match self.v6 {
            Some((last, peer)) if last == dst => peer,
            _ => {
                let peer = self.fib.v6(dst);
                self.v6 = Some((dst, peer));
                peer
            }
        }
    }
}
