//! The rules as data: what they match and what they do, in order, for one family.

use ipnet::IpNet;

use super::Pods;

/// The bit by which kube-proxy marks packets it masquerades itself; those are left to it.
pub const KUBE_MARK: u32 = 0x4000;

/// One condition on a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Match {
    /// kube-proxy's mark is set.
    KubeMark,
    /// The source is in the network.
    From(IpNet),
    /// The source is not in the network.
    NotFrom(IpNet),
    /// The destination is in the network.
    To(IpNet),
    /// The destination is not in the network.
    NotTo(IpNet),
}

/// What a rule does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Leaves the packet as it is.
    Return,
    /// Lets the packet pass.
    Accept,
    /// Replaces the source by the node's address.
    Masquerade,
}

/// One rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleSpec {
    /// All must hold.
    pub matches: Vec<Match>,
    /// What happens then.
    pub action: Action,
}

fn rule<const N: usize>(matches: [Match; N], action: Action) -> RuleSpec {
    RuleSpec { matches: matches.to_vec(), action }
}

/// Whose source address is replaced on the way out.
///
/// | from | to | source |
/// |---|---|---|
/// | pod | pod, here or elsewhere | kept |
/// | anyone outside | pod of this node | kept |
/// | pod | anyone outside, multicast excepted | replaced by the node's |
/// | anyone outside, this node too | pod of another node | replaced, so that the answer comes back here |
pub fn masquerade(pods: Pods) -> Vec<RuleSpec> {
    use Action::{Masquerade, Return};
    use Match::{From, KubeMark, NotFrom, NotTo, To};
    let Pods { network, subnet } = pods;
    let multicast: IpNet = match network {
        IpNet::V4(_) => ipnet::Ipv4Net::new_assert([224, 0, 0, 0].into(), 4).into(),
        IpNet::V6(_) => ipnet::Ipv6Net::new_assert([0xff00, 0, 0, 0, 0, 0, 0, 0].into(), 8).into(),
    };
    vec![
        rule([KubeMark], Return),
        rule([From(subnet), To(network)], Return),
        rule([From(network), To(subnet)], Return),
        rule([NotFrom(network), To(subnet)], Return),
        rule([From(network), NotTo(multicast)], Masquerade),
        rule([NotFrom(network), To(network)], Masquerade),
    ]
}

/// Forwarded traffic from and to pods passes.
pub fn forward(pods: Pods) -> Vec<RuleSpec> {
    vec![rule([Match::From(pods.network)], Action::Accept), rule([Match::To(pods.network)], Action::Accept)]
}
