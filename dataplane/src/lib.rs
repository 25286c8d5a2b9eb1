//! felt's packet loop: TUN to UDP and back.

pub mod config;
pub mod device;
pub mod encap;
pub mod engine;
pub mod fib;
pub mod icmp;
#[allow(dead_code, reason = "the packet threads that use it come next")]
mod offload;
#[allow(dead_code, reason = "the packet threads that use it come next")]
pub mod stats;
#[allow(dead_code, reason = "the packet threads that use it come next")]
mod sys;
pub mod wire;
