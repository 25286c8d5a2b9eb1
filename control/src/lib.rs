//! felt's control plane: leases in, table changes out.
#![forbid(unsafe_code)]

pub mod gojson;
pub mod lease;
pub mod netconfig;
pub mod subnet;
pub mod traffic;
