//! Publication of immutable snapshots: one writer replaces the whole, readers look at it without locks.
//!
//! ```text
//!  Publisher                    shared                          Reader i
//!  publish(new) ---------> current: *Snapshot ----------> current(): same as mine? go on
//!     |                    slot[i]: *Snapshot or null <---- else: announce in slot[i], look again
//!     `- fence, frees each replaced snapshot that no slot names
//! ```
//!
//! Each reader announces in its slot which snapshot it may be looking at (a hazard pointer). As long as
//! nothing was published, [`Reader::current`] is one load and a compare; it writes shared memory only when
//! it takes a new snapshot. A reader that is about to sleep calls [`Reader::quiesce`], so that sleeping
//! readers keep nothing alive.
//!
//! The one delicate point: a reader stores its slot and then loads `current`; the publisher stores
//! `current` and then loads the slots. At least one of the two must see the other's store, else the
//! publisher frees what the reader has just begun to use. Acquire and release do not give that; the
//! sequentially consistent fences between store and load do. `tests/loom_publish.rs` checks all
//! interleavings, and that without either fence the fault is found.
//!
//! Unsafe for speed and for want of a safe way: an `Arc` behind a lock would let the writer, descheduled
//! while it holds the lock, stop the packet loop; reading a shared pointer without one has no safe form.

#![expect(unsafe_code, reason = "hazard pointers: raw pointers whose life the slots guard")]

#[cfg(loom)]
use loom::sync::{
    Arc, Mutex,
    atomic::{AtomicPtr, Ordering, fence},
};
#[cfg(not(loom))]
use std::sync::{
    Arc, Mutex,
    atomic::{AtomicPtr, Ordering, fence},
};

use std::marker::PhantomData;
use std::ptr;

use crossbeam_utils::CachePadded;

use node::Node;

/// A published snapshot. In loom's world it also is what loom watches for reads that race with freeing.
#[cfg(not(loom))]
mod node {
    /// See above.
    pub(super) struct Node<T>(T);

    impl<T> Node<T> {
        pub(super) fn boxed(value: T) -> *mut Node<T> {
            Box::into_raw(Box::new(Node(value)))
        }

        pub(super) fn value(&self) -> &T {
            &self.0
        }

        /// # Safety
        /// `node` comes from [`Node::boxed`], is not freed, and no one looks at it any more.
        pub(super) unsafe fn free(node: *mut Node<T>) {
            // SAFETY: by the contract the box is ours again.
            drop(unsafe { Box::from_raw(node) });
        }
    }
}

#[cfg(loom)]
mod node {
    use loom::cell::UnsafeCell;

    pub(super) struct Node<T> {
        value: T,
        watched: UnsafeCell<()>,
    }

    impl<T> Node<T> {
        pub(super) fn boxed(value: T) -> *mut Node<T> {
            Box::into_raw(Box::new(Node { value, watched: UnsafeCell::new(()) }))
        }

        pub(super) fn value(&self) -> &T {
            self.watched.with(|_| ());
            &self.value
        }

        /// Counts as a write for loom. The memory stays, so that the weakened variant's faulty read is
        /// found by loom and is no undefined behaviour in the test.
        ///
        /// # Safety
        /// As in the real one, but that a faulty caller does no harm.
        pub(super) unsafe fn free(node: *mut Node<T>) {
            // SAFETY: nodes are never given back in loom's world.
            let node = unsafe { &*node };
            node.watched.with_mut(|_| ());
        }
    }
}

struct Shared<T> {
    current: CachePadded<AtomicPtr<Node<T>>>,
    /// What each reader may be looking at; null when it looks at nothing.
    slots: Box<[CachePadded<AtomicPtr<Node<T>>>]>,
    /// What a dropped publisher had not been able to free.
    left_over: Mutex<Vec<Owned<T>>>,
}

/// A replaced snapshot that is not freed yet.
struct Owned<T>(*mut Node<T>);

// SAFETY: an `Owned` is a box in all but name: it goes to another thread with the value, which is `Send`.
unsafe impl<T: Send> Send for Owned<T> {}

// SAFETY: a `Shared` gives out `&T` in many threads (`T: Sync`) and drops values in whichever thread lets
// go last (`T: Send`). Everything else in it is atomic or behind a lock.
unsafe impl<T: Send + Sync> Sync for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Send for Shared<T> {}

impl<T> Drop for Shared<T> {
    fn drop(&mut self) {
        // Publisher and readers are gone: each holds an `Arc` of this.
        let current = self.current.load(Ordering::Relaxed);
        // SAFETY: `current` always is a live node, and no reader is left to look at it.
        unsafe { Node::free(current) };
        let left_over = self.left_over.lock().map(|mut list| std::mem::take(&mut *list)).unwrap_or_default();
        for Owned(node) in left_over {
            // SAFETY: replaced nodes are live until freed, are listed once, and no reader is left.
            unsafe { Node::free(node) };
        }
    }
}

/// The writing end; there is one.
pub struct Publisher<T, const FENCES: u8 = ALL_FENCES> {
    shared: Arc<Shared<T>>,
    replaced: Vec<Owned<T>>,
}

/// A reading end, for one thread.
pub struct Reader<T, const FENCES: u8 = ALL_FENCES> {
    shared: Arc<Shared<T>>,
    slot: usize,
    /// What the slot names.
    held: *mut Node<T>,
    _value: PhantomData<T>,
}

// SAFETY: a reader is used by one thread at a time (`current` takes `&mut self`); `held` is guarded by the
// slot whatever thread that is. It gives out `&T` there, so `T: Sync`, and may be the last to drop the
// shared part, so `T: Send`.
unsafe impl<T: Send + Sync, const FENCES: u8> Send for Reader<T, FENCES> {}

/// A publisher of `initial` and this many readers of it.
pub fn channel<T: Send + Sync>(initial: T, readers: usize) -> (Publisher<T>, Vec<Reader<T>>) {
    channel_with::<T, ALL_FENCES>(initial, readers)
}

/// [`channel`] with the choice to weaken it, for its own test.
#[doc(hidden)]
pub fn channel_with<T: Send + Sync, const FENCES: u8>(
    initial: T,
    readers: usize,
) -> (Publisher<T, FENCES>, Vec<Reader<T, FENCES>>) {
    let shared = Arc::new(Shared {
        current: CachePadded::new(AtomicPtr::new(Node::boxed(initial))),
        slots: (0..readers).map(|_| CachePadded::new(AtomicPtr::new(ptr::null_mut()))).collect(),
        left_over: Mutex::new(Vec::new()),
    });
    let readers = (0..readers)
        .map(|slot| Reader { shared: shared.clone(), slot, held: ptr::null_mut(), _value: PhantomData })
        .collect();
    (Publisher { shared, replaced: Vec::new() }, readers)
}

/// Both fences, as it must be. What is left out otherwise shows that the loom test would notice.
const ALL_FENCES: u8 = READER_FENCE | PUBLISHER_FENCE;
/// The fence between a reader's store to its slot and its second look at `current`.
#[doc(hidden)]
pub const READER_FENCE: u8 = 1;
/// The fence between the publisher's store to `current` and its look at the slots.
#[doc(hidden)]
pub const PUBLISHER_FENCE: u8 = 2;

impl<T: Send + Sync, const FENCES: u8> Publisher<T, FENCES> {
    /// Replaces the snapshot; readers see the new one at their next [`Reader::current`]. Frees what no
    /// reader can look at any more.
    pub fn publish(&mut self, value: T) {
        let old = self.shared.current.swap(Node::boxed(value), Ordering::AcqRel);
        self.replaced.push(Owned(old));
        self.reclaim();
    }

    /// Frees replaced snapshots that no reader can look at any more. [`Publisher::publish`] does it too;
    /// calling it now and then gives the last replaced one back early.
    pub fn reclaim(&mut self) {
        if self.replaced.is_empty() {
            return;
        }
        if FENCES & PUBLISHER_FENCE != 0 {
            fence(Ordering::SeqCst);
        }
        let slots = &self.shared.slots;
        self.replaced.retain(|Owned(node)| {
            let in_use = slots.iter().any(|slot| slot.load(Ordering::Acquire) == *node);
            if !in_use {
                // SAFETY: the node was taken out of `current` before the fence. A reader that announced it
                // before its own fence is seen above. One that announces it later finds another `current`
                // behind its fence and does not use it. A reader that let go did so with a release store,
                // which the load above acquires. It is in this list once and leaves it here.
                unsafe { Node::free(*node) };
            }
            in_use
        });
    }

    /// Replaced snapshots that are not freed yet: at most one for each reader, once reclaimed.
    pub fn replaced(&self) -> usize {
        self.replaced.len()
    }
}

impl<T, const FENCES: u8> Drop for Publisher<T, FENCES> {
    fn drop(&mut self) {
        if let Ok(mut left_over) = self.shared.left_over.lock() {
            left_over.append(&mut self.replaced);
        }
    }
}

impl<T: Send + Sync, const FENCES: u8> Reader<T, FENCES> {
    /// The newest snapshot. To be called once per batch: the reference is good until the next call.
    #[inline]
    pub fn current(&mut self) -> &T {
        let newest = self.shared.current.load(Ordering::Acquire);
        if newest != self.held {
            self.take(newest);
        }
        // SAFETY: `held` is not null: it equals a value of `current`. The slot names it since before `take`
        // saw it in `current` behind a fence, so the publisher does not free it while the slot does; the
        // slot changes in `&mut self` methods only, when the returned reference is gone. Its contents were
        // written before the release store to `current` that an acquire load here has read.
        unsafe { &*self.held }.value()
    }

    /// Announces a snapshot and makes sure that it was the current one afterwards.
    #[cold]
    fn take(&mut self, mut newest: *mut Node<T>) {
        let slot = &self.shared.slots[self.slot];
        loop {
            // Release: what was read through the old snapshot is done before the slot lets go of it.
            slot.store(newest, Ordering::Release);
            if FENCES & READER_FENCE != 0 {
                fence(Ordering::SeqCst);
            }
            let again = self.shared.current.load(Ordering::Acquire);
            if again == newest {
                self.held = newest;
                return;
            }
            newest = again;
        }
    }

    /// Lets go of the snapshot, for a reader that may not come back soon.
    #[inline]
    pub fn quiesce(&mut self) {
        self.held = ptr::null_mut();
        self.shared.slots[self.slot].store(ptr::null_mut(), Ordering::Release);
    }
}

impl<T, const FENCES: u8> Drop for Reader<T, FENCES> {
    fn drop(&mut self) {
        self.shared.slots[self.slot].store(ptr::null_mut(), Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    /// Counts itself out.
    struct Counted(u64, Arc<AtomicUsize>);

    impl Drop for Counted {
        fn drop(&mut self) {
            self.1.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_replaced_snapshot_lives_as_long_as_a_reader_names_it() {
        let dropped = Arc::new(AtomicUsize::new(0));
        let (mut publisher, mut readers) = channel(Counted(0, dropped.clone()), 2);
        assert_eq!(readers[0].current().0, 0);
        publisher.publish(Counted(1, dropped.clone()));
        publisher.publish(Counted(2, dropped.clone()));
        assert_eq!(dropped.load(Ordering::Relaxed), 1, "1 was never looked at, 0 still is");
        assert_eq!(publisher.replaced(), 1);
        assert_eq!(readers[0].current().0, 2);
        publisher.reclaim();
        assert_eq!((dropped.load(Ordering::Relaxed), publisher.replaced()), (2, 0));
        drop((publisher, readers));
        assert_eq!(dropped.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn the_last_end_frees_what_the_publisher_left() {
        let dropped = Arc::new(AtomicUsize::new(0));
        let (mut publisher, mut readers) = channel(Counted(0, dropped.clone()), 1);
        readers[0].current();
        publisher.publish(Counted(1, dropped.clone()));
        drop(publisher);
        assert_eq!(dropped.load(Ordering::Relaxed), 0);
        assert_eq!(readers[0].current().0, 1);
        drop(readers);
        assert_eq!(dropped.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn readers_keep_up_with_a_busy_publisher() {
        const LAST: u64 = 20_000;
        let dropped = Arc::new(AtomicUsize::new(0));
        let (mut publisher, readers) = channel(Counted(0, dropped.clone()), 3);
        std::thread::scope(|scope| {
            for (i, mut reader) in readers.into_iter().enumerate() {
                scope.spawn(move || {
                    let mut seen = 0;
                    while seen < LAST {
                        let now = reader.current().0;
                        assert!(now >= seen);
                        seen = now;
                        if i == 0 {
                            reader.quiesce();
                        }
                    }
                });
            }
            for version in 1..=LAST {
                publisher.publish(Counted(version, dropped.clone()));
                assert!(publisher.replaced() <= 3);
            }
        });
        publisher.reclaim();
        assert_eq!(dropped.load(Ordering::Relaxed) as u64, LAST);
    }
}
