//! Kernel networking state for felt's daemon, plugins and tests.
//!
//! Everything here is synchronous: a request goes to the kernel, the answer is waited for, and an
//! error says what was tried on what, with the kernel's errno kept. There is no runtime and no
//! thread; a plugin that lives for ten milliseconds and a daemon that lives for months use the same
//! calls.
//!
//! | Module | What it covers |
//! |---|---|
//! | [`netlink`] | links, addresses, routes, neighbours, FDB, rules, queueing, events |
//! | [`announce`] | gratuitous ARP, unsolicited neighbour advertisement |
//! | [`conntrack`] | removal of tracked connections |
//! | [`iptables`] | rules through the iptables programs |
//! | [`nft`] | nftables transactions and listings |
//! | [`netns`] | opening, comparing, entering and making network namespaces |
//! | [`rights`] | open files passed to another process |
//! | [`sysctl`] | `/proc/sys` values |
//! | [`subnet_env`] | the file in which the daemon tells the plugins their subnet |
//!
//! ```no_run
//! use felt_hostnet::netlink::{Address, Handle, LinkKind, NewLink, Route};
//! use felt_hostnet::netns::NetNs;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let pod = NetNs::open("/run/netns/pod1")?;
//! let mut host = Handle::new()?;
//! let mut inside = Handle::new_in(&pod)?; // talks to the pod's namespace from here
//!
//! // eth0 in the pod, its peer in the host's namespace, in one request sent inside the pod.
//! let here = NetNs::current()?;
//! inside.link_add(
//!     &NewLink::new("eth0", LinkKind::veth("veth12ab").peer_netns(&here).into()).mtu(1450).up(),
//! )?;
//! let eth0 = inside.link_by_name("eth0")?;
//! inside.addr_add(eth0.index, &Address::new("10.244.1.2/24".parse()?).broadcast_of_prefix())?;
//! inside.route_add(&Route::to("0.0.0.0/0".parse()?).via("10.244.1.1".parse()?))?;
//!
//! let cni0 = host.link_by_name("cni0")?;
//! let veth = host.link_by_name("veth12ab")?;
//! host.link_set_master(veth.index, Some(cni0.index))?;
//! host.link_up(veth.index)?;
//! # Ok(())
//! # }
//! ```
//!
//! Invariant: unsafe code lives in `sys` alone.

pub mod announce;
pub mod conntrack;
mod error;
pub mod iptables;
mod mac;
pub mod netlink;
pub mod netns;
pub mod nft;
pub mod packet;
pub mod rights;
pub mod signals;
pub mod subnet_env;
mod sys;
pub mod sysctl;

pub use error::{Error, TolerateAbsence};
pub use mac::{MacAddr, ParseMacError};
