//! Exact index of one prefix length: the address bits above it are the key.
//!
//! ```text
//!            key = address >> (BITS - length)
//!  dense     top[key / 64 - first] -> page[key % 64]       keys close together
//!  sparse    buckets[hash(key)]    -> [(key, hop), ..]    keys anywhere
//! ```
//!
//! A network's subnets lie side by side, so the dense form is the rule. It turns into the sparse one when
//! pages and top would take more than [`dense_budget`] for the number of prefixes held: however odd the
//! prefixes, memory stays proportional to their number. It turns back when the sparse form has to be
//! rebuilt anyway and the dense one would fit well.
//!
//! Pages and buckets are shared between copies of an index and copied when written to. Cloning an index
//! copies the top array only.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use super::peer::NextHop;

/// PERF: small pages copy fast and suit sparse networks (flannel takes subnets at random); the top array of
/// 65,536 subnets still is a sixth of an L1 cache.
const PAGE_BITS: u32 = 6;
const PAGE_SLOTS: usize = 1 << PAGE_BITS;

/// An address as a number.
pub(super) trait Key: Copy + Eq {
    const BITS: u32;
    fn shr(self, bits: u32) -> Self;
    fn wrapping_sub(self, other: Self) -> Self;
    /// Saturates.
    fn to_usize(self) -> usize;
    fn to_u128(self) -> u128;
    /// Drops high bits.
    fn from_u128(value: u128) -> Self;
}

impl Key for u32 {
    const BITS: u32 = 32;
    #[inline]
    fn shr(self, bits: u32) -> u32 {
        self >> bits
    }
    #[inline]
    fn wrapping_sub(self, other: u32) -> u32 {
        u32::wrapping_sub(self, other)
    }
    #[inline]
    fn to_usize(self) -> usize {
        self as usize
    }
    #[inline]
    fn to_u128(self) -> u128 {
        u128::from(self)
    }
    #[inline]
    fn from_u128(value: u128) -> u32 {
        value as u32
    }
}

impl Key for u128 {
    const BITS: u32 = 128;
    #[inline]
    fn shr(self, bits: u32) -> u128 {
        self >> bits
    }
    #[inline]
    fn wrapping_sub(self, other: u128) -> u128 {
        u128::wrapping_sub(self, other)
    }
    #[inline]
    fn to_usize(self) -> usize {
        usize::try_from(self).unwrap_or(usize::MAX)
    }
    #[inline]
    fn to_u128(self) -> u128 {
        self
    }
    #[inline]
    fn from_u128(value: u128) -> u128 {
        value
    }
}

/// Bytes that the dense form may take for `count` prefixes: 4 MiB, and 256 bytes for each.
pub(super) fn dense_budget(count: usize) -> usize {
    (4 << 20) + 256 * count
}

#[derive(Debug, Clone)]
struct Page {
    slots: [Option<NextHop>; PAGE_SLOTS],
    used: u16,
}

#[derive(Debug, Clone)]
struct Dense<K> {
    /// Number of the page that `top[0]` is.
    first: K,
    top: Vec<Option<Arc<Page>>>,
    pages: usize,
}

#[derive(Debug, Clone)]
struct Sparse<K> {
    /// Random, so that no one can choose prefixes that share a bucket.
    seed: (u64, u64),
    /// 64 - log2 of the number of buckets.
    shift: u32,
    buckets: Vec<Bucket<K>>,
}

type Bucket<K> = Option<Arc<[(K, NextHop)]>>;

#[derive(Debug, Clone)]
enum Form<K> {
    Dense(Dense<K>),
    Sparse(Sparse<K>),
}

/// The prefixes of one length.
#[derive(Debug, Clone)]
pub(super) struct Index<K> {
    len: u8,
    /// `BITS - len`; below BITS, since length 0 has no index.
    shift: u32,
    count: usize,
    form: Form<K>,
}

impl<K: Key> Index<K> {
    /// An empty index of prefixes of `len` bits, 1 to `K::BITS`.
    pub(super) fn new(len: u8) -> Self {
        debug_assert!(len >= 1 && u32::from(len) <= K::BITS);
        let dense = Dense { first: K::from_u128(0), top: Vec::new(), pages: 0 };
        Self { len, shift: K::BITS - u32::from(len), count: 0, form: Form::Dense(dense) }
    }

    pub(super) fn prefix_len(&self) -> u8 {
        self.len
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// The entry whose prefix holds `addr`.
    #[inline]
    pub(super) fn get(&self, addr: K) -> Option<&NextHop> {
        let key = addr.shr(self.shift);
        match &self.form {
            Form::Dense(dense) => dense.get(key),
            Form::Sparse(sparse) => sparse.get(key),
        }
    }

    /// Enters or replaces the prefix that holds `addr`.
    pub(super) fn set(&mut self, addr: K, hop: NextHop) {
        let key = addr.shr(self.shift);
        if let Form::Dense(dense) = &self.form
            && dense.bytes_with(key) > dense_budget(self.count + 1)
        {
            self.form = Form::Sparse(Sparse::build(dense.entries(), self.count + 1));
        }
        let added = match &mut self.form {
            Form::Dense(dense) => dense.set(key, hop),
            Form::Sparse(sparse) => sparse.set(key, hop),
        };
        self.count += usize::from(added);
        self.reshape_sparse();
    }

    /// Takes the prefix that holds `addr` out, if it is there.
    pub(super) fn remove(&mut self, addr: K) {
        let key = addr.shr(self.shift);
        let removed = match &mut self.form {
            Form::Dense(dense) => dense.remove(key),
            Form::Sparse(sparse) => sparse.remove(key),
        };
        self.count -= usize::from(removed);
        self.reshape_sparse();
    }

    /// All entries as (lowest address, entry), in no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (K, &NextHop)> {
        let (dense, sparse) = match &self.form {
            Form::Dense(dense) => (Some(dense), None),
            Form::Sparse(sparse) => (None, Some(sparse)),
        };
        dense
            .into_iter()
            .flat_map(Dense::entries)
            .chain(sparse.into_iter().flat_map(Sparse::entries))
            .map(|(key, hop)| (K::from_u128(key.to_u128() << self.shift), hop))
    }

    /// Keeps between a half and 4 entries per bucket on average, and goes back to the dense form when a
    /// rebuild finds the keys close together.
    fn reshape_sparse(&mut self) {
        let Form::Sparse(sparse) = &self.form else { return };
        let buckets = sparse.buckets.len();
        if self.count <= buckets * 4 && (self.count >= buckets / 2 || buckets <= MIN_BUCKETS) {
            return;
        }
        let mut dense = Dense { first: K::from_u128(0), top: Vec::new(), pages: 0 };
        let budget = dense_budget(self.count) / 2;
        let fits = sparse.entries().all(|(key, hop)| {
            let fits = dense.bytes_with(key) <= budget;
            if fits {
                dense.set(key, hop.clone());
            }
            fits
        });
        self.form =
            if fits { Form::Dense(dense) } else { Form::Sparse(Sparse::build(sparse.entries(), self.count)) };
    }

    /// Bytes held by pages, buckets and top arrays, shared ones included.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        match &self.form {
            Form::Dense(dense) => dense.bytes(dense.pages, dense.top.len()),
            Form::Sparse(sparse) => {
                sparse.buckets.len() * size_of::<Bucket<K>>() + self.count * size_of::<(K, NextHop)>()
            }
        }
    }

    /// Pages that two dense indexes share, and pages of this one.
    #[cfg(test)]
    pub(super) fn shared_pages(&self, other: &Self) -> (usize, usize) {
        let (Form::Dense(a), Form::Dense(b)) = (&self.form, &other.form) else { return (0, 0) };
        let same = |pair: &(&Option<Arc<Page>>, &Option<Arc<Page>>)| match pair {
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            _ => false,
        };
        (a.top.iter().zip(&b.top).filter(same).count(), a.pages)
    }

    #[cfg(test)]
    pub(super) fn is_dense(&self) -> bool {
        matches!(self.form, Form::Dense(_))
    }
}

impl<K: Key> Dense<K> {
    #[inline]
    fn get(&self, key: K) -> Option<&NextHop> {
        let page = key.shr(PAGE_BITS).wrapping_sub(self.first).to_usize();
        self.top.get(page)?.as_ref()?.slots[slot(key)].as_ref()
    }

    /// Where the page of `key` would be in a grown top array: pages to add in front, its index then,
    /// and the array's length then. `None` when the distance does not fit a `usize`.
    fn place(&self, key: K) -> Option<(usize, usize, usize)> {
        let (page, first) = (key.to_u128() >> PAGE_BITS, self.first.to_u128());
        let len = self.top.len();
        if len == 0 {
            return Some((0, 0, 1));
        }
        if page < first {
            let front = usize::try_from(first - page).ok()?;
            return Some((front, 0, front.checked_add(len)?));
        }
        let at = usize::try_from(page - first).ok()?;
        Some((0, at, len.max(at.checked_add(1)?)))
    }

    fn bytes(&self, pages: usize, top: usize) -> usize {
        (pages * size_of::<Page>()).saturating_add(top.saturating_mul(size_of::<Option<Arc<Page>>>()))
    }

    /// Bytes once `key` is held.
    fn bytes_with(&self, key: K) -> usize {
        let Some((front, at, len)) = self.place(key) else { return usize::MAX };
        let there = front == 0 && matches!(self.top.get(at), Some(Some(_)));
        self.bytes(self.pages + usize::from(!there), len)
    }

    /// Whether the key is new. The caller has checked [`Dense::bytes_with`].
    fn set(&mut self, key: K, hop: NextHop) -> bool {
        let Some((front, at, len)) = self.place(key) else { return false };
        if self.top.is_empty() || front > 0 {
            self.first = key.shr(PAGE_BITS);
            self.top.splice(0..0, std::iter::repeat_n(None, front));
        }
        self.top.resize(len, None);
        let page = self.top[at].get_or_insert_with(|| {
            self.pages += 1;
            Arc::new(Page { slots: [const { None }; PAGE_SLOTS], used: 0 })
        });
        let page = Arc::make_mut(page);
        let added = page.slots[slot(key)].replace(hop).is_none();
        page.used += u16::from(added);
        added
    }

    /// Whether the key was there.
    fn remove(&mut self, key: K) -> bool {
        let at = key.shr(PAGE_BITS).wrapping_sub(self.first).to_usize();
        let Some(entry) = self.top.get_mut(at) else { return false };
        let Some(page) = entry else { return false };
        if page.slots[slot(key)].is_none() {
            return false;
        }
        if page.used == 1 {
            *entry = None;
            self.pages -= 1;
            self.trim();
        } else {
            let page = Arc::make_mut(page);
            page.slots[slot(key)] = None;
            page.used -= 1;
        }
        true
    }

    /// Gives back the ends of the top array that hold no page.
    fn trim(&mut self) {
        while matches!(self.top.last(), Some(None)) {
            self.top.pop();
        }
        let front = self.top.iter().take_while(|page| page.is_none()).count();
        self.top.drain(..front);
        self.first = K::from_u128(self.first.to_u128() + front as u128);
    }

    fn entries(&self) -> impl Iterator<Item = (K, &NextHop)> {
        let first = self.first.to_u128();
        self.top.iter().enumerate().filter_map(|(at, page)| Some((at, page.as_ref()?))).flat_map(
            move |(at, page)| {
                let base = (first + at as u128) << PAGE_BITS;
                page.slots
                    .iter()
                    .enumerate()
                    .filter_map(move |(slot, hop)| Some((K::from_u128(base + slot as u128), hop.as_ref()?)))
            },
        )
    }
}

#[inline]
fn slot<K: Key>(key: K) -> usize {
    key.to_u128() as usize % PAGE_SLOTS
}

const MIN_BUCKETS: usize = 16;

impl<K: Key> Sparse<K> {
    /// A table of these entries with one or two per bucket.
    fn build<'a>(entries: impl Iterator<Item = (K, &'a NextHop)>, count: usize) -> Self {
        let buckets = (count / 2).next_power_of_two().max(MIN_BUCKETS);
        let random = RandomState::new();
        let mut table = Self {
            seed: (random.hash_one(0u8), random.hash_one(1u8)),
            shift: 64 - buckets.trailing_zeros(),
            buckets: Vec::new(),
        };
        let mut filling: Vec<Vec<(K, NextHop)>> = vec![Vec::new(); buckets];
        for (key, hop) in entries {
            filling[table.bucket(key)].push((key, hop.clone()));
        }
        table.buckets = filling
            .into_iter()
            .map(|bucket| if bucket.is_empty() { None } else { Some(bucket.into()) })
            .collect();
        table
    }

    /// Folded multiplication of the two halves, each mixed with a secret.
    #[inline]
    fn bucket(&self, key: K) -> usize {
        let key = key.to_u128();
        let (low, high) = (key as u64 ^ self.seed.0, (key >> 64) as u64 ^ self.seed.1);
        let product = u128::from(low) * u128::from(high);
        // INVARIANT: below `buckets.len()`, since the shift leaves as many bits as that has.
        ((product as u64 ^ (product >> 64) as u64) >> self.shift) as usize
    }

    #[inline]
    fn get(&self, key: K) -> Option<&NextHop> {
        let bucket = self.buckets[self.bucket(key)].as_ref()?;
        bucket.iter().find(|(k, _)| *k == key).map(|(_, hop)| hop)
    }

    fn set(&mut self, key: K, hop: NextHop) -> bool {
        let at = self.bucket(key);
        let mut entries: Vec<_> = self.buckets[at].iter().flat_map(|bucket| bucket.iter().cloned()).collect();
        let added = match entries.iter_mut().find(|(k, _)| *k == key) {
            Some(entry) => {
                entry.1 = hop;
                false
            }
            None => {
                entries.push((key, hop));
                true
            }
        };
        self.buckets[at] = Some(entries.into());
        added
    }

    fn remove(&mut self, key: K) -> bool {
        let at = self.bucket(key);
        let Some(bucket) = &self.buckets[at] else { return false };
        if !bucket.iter().any(|(k, _)| *k == key) {
            return false;
        }
        let entries: Vec<_> = bucket.iter().filter(|(k, _)| *k != key).cloned().collect();
        self.buckets[at] = if entries.is_empty() { None } else { Some(entries.into()) };
        true
    }

    fn entries(&self) -> impl Iterator<Item = (K, &NextHop)> {
        self.buckets.iter().flatten().flat_map(|bucket| bucket.iter().map(|(key, hop)| (*key, hop)))
    }
}
