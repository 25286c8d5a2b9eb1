//! The network configuration.

/// The network configuration of the whole cluster.
#[derive(Debug, Clone)]
pub struct NetworkConfig {}
