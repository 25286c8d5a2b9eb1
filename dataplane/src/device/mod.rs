//! The inner side: where packets of the pods come from and go to.
//!
//! [`Device`] is one queue. `tun` is the kernel's, `memory` one for tests without privileges, `faulty`
//! wraps either to make calls fail.

pub(crate) mod tun;

pub use tun::{TunDevice, TunError, TunOptions};
