//! What this node last published, shared by taking and keeping a lease.

use std::sync::{Mutex, PoisonError};

use crate::lease::{Lease, LeaseAttrs, SubnetKey};

/// The attributes last written for the own lease.
///
/// Taking the lease again with changed attributes publishes them at once; the task that keeps the lease still holds
/// the old ones and must not write them back.
#[derive(Debug, Default)]
pub(super) struct Published(Mutex<Option<(SubnetKey, LeaseAttrs)>>);

impl Published {
    /// Remembers what was written.
    pub(super) fn set(&self, lease: &Lease) {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *last = Some((lease.key, lease.attrs.clone()));
    }

    /// The newest attributes for the key of `lease`, else its own.
    pub(super) fn attrs(&self, lease: &Lease) -> LeaseAttrs {
        let last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &*last {
            Some((key, attrs)) if *key == lease.key => attrs.clone(),
            _ => lease.attrs.clone(),
        }
    }
}
