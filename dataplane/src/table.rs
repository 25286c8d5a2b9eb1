//! What the packet threads look things up in: the forwarding table, and the endpoints of all nodes in it.

use std::net::IpAddr;

use crate::fib::Fib;

/// One published state.
#[derive(Debug, Default)]
pub(crate) struct Table {
    pub(crate) fib: Fib,
    /// Sorted.
    endpoints: Vec<IpAddr>,
}

impl Table {
    pub(crate) fn new(fib: Fib) -> Table {
        let mut endpoints: Vec<_> = fib.iter().map(|(_, peer)| peer.endpoint.ip()).collect();
        endpoints.sort_unstable();
        endpoints.dedup();
        Table { fib, endpoints }
    }

    /// Whether some node has this endpoint.
    pub(crate) fn knows_endpoint(&self, addr: IpAddr) -> bool {
        self.endpoints.binary_search(&addr).is_ok()
    }
}
