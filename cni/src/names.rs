//! Names derived from a network and a container, as the reference derives them, so that either can
//! remove what the other made.

use std::fmt::Write as _;

use sha2::{Digest, Sha512};

/// The first `len` hexadecimal digits of the SHA-512 of `text`.
pub fn hash(text: &str, len: usize) -> String {
    let mut out = String::with_capacity(len + 1);
    for byte in Sha512::digest(text.as_bytes()) {
        if out.len() >= len {
            break;
        }
        let _ = write!(out, "{byte:02x}");
    }
    out.truncate(len);
    out
}

/// `<prefix>` and enough digits of the hash of network and container to make `len` characters.
pub fn prefixed(prefix: &str, network: &str, id: &str, len: usize) -> String {
    format!("{prefix}{}", hash(&format!("{network}{id}"), len - prefix.len()))
}

/// Length of an iptables chain name.
const CHAIN_LEN: usize = 28;

/// The masquerade chain of an attachment.
pub fn masquerade_chain(network: &str, id: &str) -> String {
    prefixed("CNI-", network, id, CHAIN_LEN)
}

/// The port map chain of an attachment.
pub fn portmap_chain(network: &str, id: &str) -> String {
    prefixed("CNI-DN-", network, id, CHAIN_LEN)
}

/// The source translation chain very old port maps used.
pub fn old_portmap_chain(network: &str, id: &str) -> String {
    prefixed("CNI-SN-", network, id, CHAIN_LEN)
}

/// The ifb device of a bandwidth limit.
pub fn ifb(network: &str, id: &str) -> String {
    prefixed("bwp", network, id, 15)
}

/// What comments of nftables masquerade rules of a network begin with.
pub fn nft_network(network: &str) -> String {
    hash(network, 16)
}

/// What comments of one attachment's nftables masquerade rules begin with.
pub fn nft_attachment(network: &str, ifname: &str, id: &str) -> String {
    format!("{}-{}", nft_network(network), hash(&format!("{ifname}:{id}"), 16))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_names_seen_of_the_reference() {
        assert_eq!(masquerade_chain("ds", "cid1"), "CNI-0d4a8140e97b16cd89421a79");
        assert_eq!(portmap_chain("cnispecnet", "cid1"), "CNI-DN-94347884297db246e0ff0");
        assert_eq!(ifb("cnispecnet", "cid1"), "bwp94347884297d");
        assert_eq!(nft_network("f3"), "3a74b2d8a51f7551");
        assert!(nft_attachment("f3", "eth0", "cid1").ends_with("-0b65a318f52e521b"));
    }
}
