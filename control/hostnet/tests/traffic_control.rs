//! Bandwidth limits, announcements and connection tracking against the kernel.

mod support;

use std::net::UdpSocket;

use felt_hostnet::announce::announce;
use felt_hostnet::conntrack::Conntrack;
use felt_hostnet::netlink::{Address, Family, Handle, LinkKind, NewLink, NewQdisc, Tbf, TcHandle};
use felt_hostnet::netns::NetNs;
use felt_hostnet::nft::{Batch, Chain, Family as NftFamily, Hook, Nft, Rule, Transport};
use felt_hostnet::sysctl;
use support::{in_new_netns, json, run};

#[test]
fn limits_in_both_directions() {
    in_new_netns(|| {
        let mut handle = Handle::new().unwrap();
        handle.link_add(&NewLink::new("a0", LinkKind::veth("a1").into()).up()).unwrap();
        handle.link_add(&NewLink::new("bwp0", LinkKind::Ifb).up()).unwrap();
        let link = handle.link_by_name("a0").unwrap().index;
        let ifb = handle.link_by_name("bwp0").unwrap().index;
        let tbf = Tbf { rate: 1_250_000, limit: 131_250, buffer: 1_250_000 };
        let root = TcHandle::new(1, 0);
        handle.qdisc_add(link, TcHandle::ROOT, root, &NewQdisc::Tbf(tbf)).unwrap();
        assert!(
            handle.qdisc_add(link, TcHandle::ROOT, root, &NewQdisc::Tbf(tbf)).unwrap_err().already_exists()
        );
        handle.qdisc_replace(link, TcHandle::ROOT, root, &NewQdisc::Tbf(tbf)).unwrap();
        handle.qdisc_add(link, TcHandle::INGRESS, TcHandle::INGRESS_QDISC, &NewQdisc::Ingress).unwrap();
        handle.filter_redirect_all(link, TcHandle::INGRESS_QDISC, 1, ifb).unwrap();
        let fast = Tbf { rate: 5_000_000_000, ..tbf };
        handle.qdisc_add(ifb, TcHandle::ROOT, root, &NewQdisc::Tbf(fast)).unwrap();

        let found = handle.qdiscs(link).unwrap();
        assert_eq!(found.iter().find(|qdisc| qdisc.kind == "tbf").unwrap().tbf, Some(tbf));
        assert!(found.iter().any(|qdisc| qdisc.kind == "ingress"));
        assert_eq!(handle.qdiscs(ifb).unwrap()[0].tbf, Some(fast));
        let filters = handle.filters(link, TcHandle::INGRESS_QDISC).unwrap();
        assert_eq!(filters.len(), 1, "{filters:?}");
        assert_eq!(
            (filters[0].priority, filters[0].protocol, filters[0].redirects.as_slice()),
            (1, 3, &[ifb][..])
        );

        let shown = json("tc -j qdisc show dev a0");
        assert_eq!((&shown[0]["kind"], &shown[0]["options"]["rate"]), (&"tbf".into(), &1_250_000.into()));
        assert!(
            run("tc filter show dev a0 ingress").contains("mirred (Egress Redirect to device bwp0) stolen")
        );
        handle.qdisc_del(link, TcHandle::ROOT).unwrap();
        assert!(handle.qdiscs(link).unwrap().iter().all(|qdisc| qdisc.kind != "tbf"));
    });
}

#[test]
fn announcements_change_the_neighbours_mind() {
    in_new_netns(|| {
        let other = NetNs::create().unwrap();
        let mut here = Handle::new().unwrap();
        let mut there = Handle::new_in(&other).unwrap();
        here.link_add(&NewLink::new("a0", LinkKind::veth("a1").peer_netns(&other).into())).unwrap();
        let (a0, a1) = (here.link_by_name("a0").unwrap(), there.link_by_name("a1").unwrap());
        there.link_up(a1.index).unwrap();
        here.link_up(a0.index).unwrap();
        here.addr_add(a0.index, &Address::new("10.1.2.1/24".parse().unwrap())).unwrap();
        here.addr_add(a0.index, &Address::new("fd00:1::1/64".parse().unwrap()).nodad()).unwrap();
        there.addr_add(a1.index, &Address::new("10.1.2.2/24".parse().unwrap())).unwrap();
        there.addr_add(a1.index, &Address::new("fd00:1::2/64".parse().unwrap()).nodad()).unwrap();
        // The neighbour knows another MAC for the address that moved here.
        for address in ["10.1.2.1", "fd00:1::1"] {
            other
                .with(|| {
                    run(&format!("ip neigh replace {address} lladdr 02:00:00:00:00:99 dev a1 nud stale"))
                })
                .unwrap();
            announce(a0.index, a0.mac.unwrap(), address.parse().unwrap()).unwrap();
            let deadline = std::time::Instant::now() + std::time::Duration::from_secs(5);
            loop {
                let known = there.neighs(Some(a1.index), None).unwrap();
                let entry = known.iter().find(|entry| entry.address.to_string() == address).unwrap();
                if entry.mac == a0.mac {
                    break;
                }
                assert!(std::time::Instant::now() < deadline, "{entry:?}");
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
        }
    });
}

#[test]
fn udp_flows_of_a_port_are_forgotten() {
    in_new_netns(|| {
        let mut handle = Handle::new().unwrap();
        let lo = handle.link_by_name("lo").unwrap().index;
        handle.link_up(lo).unwrap();
        sysctl::write("net/ipv4/ip_forward", "1").unwrap();
        // A translation rule makes the namespace track connections.
        let mut batch = Batch::new();
        batch.add_table(NftFamily::Ip, "t", None);
        batch.add_chain(NftFamily::Ip, "t", &Chain::base("out", "nat", Hook::Output, -100));
        let rule =
            Rule::new("out").dport(Transport::Udp, 7001).dnat("127.0.0.1".parse().unwrap(), Some(7002));
        batch.add_rule(NftFamily::Ip, "t", &rule);
        Nft::new().unwrap().commit(batch).unwrap();
        let server = UdpSocket::bind("127.0.0.1:7002").unwrap();
        let client = UdpSocket::bind("127.0.0.1:0").unwrap();
        for port in [7001, 7001, 7003] {
            client.send_to(b"x", ("127.0.0.1", port)).unwrap();
        }
        server.recv_from(&mut [0; 8]).unwrap();
        assert!(run("conntrack -L -p udp --orig-port-dst 7001").contains("dport=7001"));
        let mut conntrack = Conntrack::new().unwrap();
        assert_eq!(conntrack.delete_udp_to_port(Family::V4, 7001).unwrap(), 1);
        assert_eq!(conntrack.delete_udp_to_port(Family::V4, 7001).unwrap(), 0);
        assert_eq!(conntrack.delete_udp_to_port(Family::V6, 7003).unwrap(), 0);
        assert!(!run("conntrack -L -p udp").contains("dport=7001"));
        assert!(run("conntrack -L -p udp").contains("dport=7003"));
    });
}
