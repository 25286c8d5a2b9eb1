//! felt's packet loop: TUN to UDP and back.

pub mod encap;
pub mod fib;
pub mod icmp;
mod sys;
pub mod wire;
