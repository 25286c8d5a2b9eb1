//! felt's packet loop: TUN to UDP and back.

mod answering;
pub mod buf;
pub mod config;
pub mod device;
pub mod encap;
pub mod engine;
pub mod fib;
#[cfg(any(fuzzing, test))]
pub mod fuzzing;
pub mod icmp;
mod inbound;
mod offload;
mod outbound;
pub mod socket;
#[doc(hidden)]
pub mod stage;
pub mod stats;
mod sys;
mod table;
#[cfg(test)]
#[path = "../tests/common/packets.rs"]
mod testing;
pub mod wire;
mod worker;
