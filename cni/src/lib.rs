//! felt's CNI plugins: one library, one multi-call binary.
//!
//! ```text
//! runtime -> main.rs (argv[0] names the plugin) -> skel (checks, dispatch) -> plugins::<name>
//!                                                    |                          |
//!                                                    |                          +- ipconf: addresses, routes, CHECK
//!                                                    +- types: config, result,  +- delegate: another plugin, in this
//!                                                       error, versions            process when it is this same file
//! ```
//!
//! Invariants: standard output carries the protocol and is written by [`skel`] alone; an ADD that
//! fails removes what it made; a DEL succeeds when there is nothing left to remove; the calling thread
//! is in the host's namespace whenever a handler returns or a delegate starts.

pub mod delegate;
pub mod gc;
pub mod install;
pub mod ipconf;
pub mod json;
pub mod kubenet;
pub mod names;
pub mod plugins;
pub mod skel;
pub mod trace;
pub mod types;
pub mod xtables;
