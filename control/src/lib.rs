//! felt's control plane: leases in, table changes out.
//!
//! `feltd` takes a lease on a subnet from a registry, makes the tunnel for it, follows the other nodes' leases and keeps
//! the machine's network state equal to what they ask for. `felt` is the operator's command.
//!
//! ```text
//!  registry ----- watch -----> LeaseSet -- events --> Backend -- FibChange --> packet engine
//!  (subnet/)                   (lease.rs)            (backend/)               (felt-dataplane)
//!     ^                                                  |
//!     '-- acquire, keep -- app/ -- view.rs --> admin.rs, health.rs     kernel state (reconcile.rs)
//! ```
#![forbid(unsafe_code)]

pub mod admin;
pub mod api;
pub mod app;
pub mod backend;
pub mod cli;
pub mod command;
pub mod gojson;
pub mod handover;
pub mod health;
pub mod iface;
pub mod lease;
pub mod logging;
pub mod metrics;
pub mod netconfig;
pub mod notify;
pub mod reconcile;
pub mod state;
pub mod subnet;
pub mod traffic;
pub mod view;

#[cfg(test)]
mod documented;
