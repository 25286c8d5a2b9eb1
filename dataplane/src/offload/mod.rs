//! Super-packets: what the virtio-net header in front of a packet says, cutting, and merging.

pub(crate) mod vnet_hdr;
