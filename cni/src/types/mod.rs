//! The names of the CNI specification: configuration, result, error, versions, arguments.

pub mod args;
pub mod conf;
pub mod error;
pub mod result;
pub mod version;
