//! Links, addresses, routes, neighbours, FDB and rules against a real kernel, compared with what
//! iproute2 says.

mod support;

use std::time::Duration;

use felt_hostnet::netlink::{
    Address, BridgeConfig, BridgePortChange, Event, Family, Group, Handle, IfIndex, IpTunnelConfig,
    IpvlanMode, LinkChange, LinkDetail, LinkKind, MacvlanMode, Monitor, NewLink, Route, RouteKind, Rule,
    VlanFlags, VxlanConfig,
};
use felt_hostnet::netns::NetNs;
use felt_hostnet::{MacAddr, TolerateAbsence, sysctl};
use support::{in_new_netns, json, run};

/// Sets both ends of a pair up; the number of the first.
fn both_up(handle: &mut Handle, first: &str, second: &str) -> IfIndex {
    let second = handle.link_by_name(second).unwrap().index;
    handle.link_up(second).unwrap();
    let first = handle.link_by_name(first).unwrap().index;
    handle.link_up(first).unwrap();
    first
}

#[test]
fn veth_with_its_peer_in_another_namespace() {
    in_new_netns(|| {
        let other = NetNs::create().unwrap();
        let mut host = Handle::new().unwrap();
        let mut inside = Handle::new_in(&other).unwrap();
        let mac: MacAddr = "02:00:00:00:00:07".parse().unwrap();
        let here = NetNs::current().unwrap();
        inside
            .link_add(
                &NewLink::new("eth0", LinkKind::veth("vethfelt").peer_netns(&here).into())
                    .mac(mac)
                    .mtu(1400)
                    .up(),
            )
            .unwrap();
        let veth = host.link_by_name("vethfelt").unwrap();
        host.link_up(veth.index).unwrap();
        let eth0 = inside.link_by_name("eth0").unwrap();
        assert_eq!((eth0.mac, eth0.mtu, eth0.kind.as_deref()), (Some(mac), 1400, Some("veth")));
        assert!(eth0.is_up());
        let veth = host.link_by_name("vethfelt").unwrap();
        assert_eq!(eth0.peer, Some(veth.index));
        assert!(eth0.peer_netnsid.is_some());
        assert_eq!(veth.peer, Some(eth0.index));

        let shown = json("ip -j -d link show vethfelt");
        assert_eq!(shown[0]["ifindex"], veth.index.0);
        assert_eq!(shown[0]["mtu"], veth.mtu);
        assert_eq!(shown[0]["address"], veth.mac.unwrap().to_string());
        assert_eq!(shown[0]["txqlen"], veth.tx_queue_len);
        assert_eq!(shown[0]["linkinfo"]["info_kind"], "veth");
        assert_eq!(shown[0]["operstate"], "UP");

        host.link_del(veth.index).unwrap();
        assert!(inside.link_by_name("eth0").unwrap_err().is_not_found());
    });
}

#[test]
fn errors_say_what_where_and_why() {
    in_new_netns(|| {
        let mut handle = Handle::new().unwrap();
        let error = handle.link_by_name("nosuch0").unwrap_err();
        assert!(error.is_not_found());
        assert!(error.to_string().starts_with("find link nosuch0: No such device (os error 19)"), "{error}");
        assert!(!handle.link_del_by_name("nosuch0").tolerate_absence().unwrap());
        handle.link_add(&NewLink::new("br0", LinkKind::Bridge(BridgeConfig::default()))).unwrap();
        let error =
            handle.link_add(&NewLink::new("br0", LinkKind::Bridge(BridgeConfig::default()))).unwrap_err();
        assert!(error.already_exists());
        assert!(error.to_string().starts_with("create bridge br0: File exists (os error 17)"), "{error}");
        let error =
            handle.route_add(&Route::to("10.5.0.0/16".parse().unwrap()).via("192.0.2.1".parse().unwrap()));
        let error = error.unwrap_err();
        assert!(error.to_string().starts_with("add route 10.5.0.0/16 via 192.0.2.1: "), "{error}");
        // The socket is still in step after errors.
        assert_eq!(handle.link_by_name("br0").unwrap().name, "br0");
    });
}

#[test]
fn bridge_with_ports() {
    in_new_netns(|| {
        let mut handle = Handle::new().unwrap();
        handle
            .link_add(&NewLink::new("cni0", LinkKind::Bridge(BridgeConfig::default())).mtu(1450).up())
            .unwrap();
        handle.link_add(&NewLink::new("p0", LinkKind::veth("p1").into()).up()).unwrap();
        let bridge = handle.link_by_name("cni0").unwrap();
        let port = handle.link_by_name("p0").unwrap();
        handle.link_set_master(port.index, Some(bridge.index)).unwrap();
        handle
            .bridge_port_set(
                port.index,
                BridgePortChange {
                    hairpin: Some(true),
                    isolated: Some(true),
                    learning: Some(false),
                    unicast_flood: None,
                },
            )
            .unwrap();
        let port = handle.link_by_index(port.index).unwrap();
        assert_eq!(port.master, Some(bridge.index));
        let state = port.port.unwrap();
        assert!(state.hairpin && state.isolated && !state.learning && state.unicast_flood);
        let shown = json("ip -j -d link show p0");
        let data = &shown[0]["linkinfo"]["info_slave_data"];
        assert_eq!(
            (&data["hairpin"], &data["isolated"], &data["learning"]),
            (&true.into(), &true.into(), &false.into())
        );
        assert_eq!(shown[0]["master"], "cni0");
        assert!(matches!(bridge.detail, LinkDetail::Bridge(_)));
        handle.link_set_master(port.index, None).unwrap();
        assert_eq!(handle.link_by_name("p0").unwrap().master, None);
    });
}

#[test]
fn many_changes_in_one_request() {
    in_new_netns(|| {
        let mut handle = Handle::new().unwrap();
        handle.link_add(&NewLink::new("a0", LinkKind::veth("a1").into())).unwrap();
        let link = handle.link_by_name("a0").unwrap();
        let mac: MacAddr = "02:aa:bb:cc:dd:ee".parse().unwrap();
        handle
            .link_set(
                link.index,
                &LinkChange {
                    up: Some(true),
                    mtu: Some(1300),
                    mac: Some(mac),
                    tx_queue_len: Some(42),
                    promisc: Some(true),
                    allmulti: Some(true),
                    alias: Some("felt test"),
                    gso_max_size: Some(61_400),
                    gso_max_segs: Some(44),
                    ..LinkChange::default()
                },
            )
            .unwrap();
        handle.link_down(link.index).unwrap();
        handle.link_set_name(link.index, "renamed0").unwrap();
        let link = handle.link_by_name("renamed0").unwrap();
        assert_eq!((link.mtu, link.mac, link.tx_queue_len), (1300, Some(mac), 42));
        assert_eq!((link.gso_max_size, link.gso_max_segs), (Some(61_400), Some(44)));
        assert_eq!(link.alias.as_deref(), Some("felt test"));
        assert!(link.is_promisc() && link.promiscuity == 1 && link.allmulti == 1 && !link.is_up());
        let shown = json("ip -j -d link show renamed0");
        assert_eq!(shown[0]["ifalias"], "felt test");
        assert_eq!(shown[0]["gso_max_size"], 61_400);
        assert_eq!(shown[0]["promiscuity"], 1);

        let other = NetNs::create().unwrap();
        handle.link_set_netns(link.index, std::os::fd::AsFd::as_fd(&other)).unwrap();
        assert!(handle.link_by_name("renamed0").unwrap_err().is_not_found());
        assert_eq!(Handle::new_in(&other).unwrap().link_by_name("renamed0").unwrap().mac, Some(mac));
    });
}

#[test]
fn vxlan_as_a_flannel_node_makes_it() {
    in_new_netns(|| {
        let mut handle = Handle::new().unwrap();
        handle.link_add(&NewLink::new("under", LinkKind::veth("underp").into()).up()).unwrap();
        let under = handle.link_by_name("under").unwrap();
        handle.addr_add(under.index, &Address::new("198.18.0.1/24".parse().unwrap())).unwrap();
        let mac: MacAddr = "3a:00:00:00:00:01".parse().unwrap();
        let config = VxlanConfig {
            vni: 4097,
            lower: Some(under.index),
            local: Some("198.18.0.1".parse().unwrap()),
            port: Some(8472),
            learning: Some(false),
            ..VxlanConfig::default()
        };
        handle
            .link_add(
                &NewLink::new("flannel.4097", LinkKind::Vxlan(Box::new(config.clone())))
                    .mac(mac)
                    .mtu(1450)
                    .up(),
            )
            .unwrap();
        let link = handle.link_by_name("flannel.4097").unwrap();
        let found = &link.vxlan().unwrap().config;
        assert_eq!(
            (found.vni, found.lower, found.local, found.port, found.learning, found.gbp),
            (4097, config.lower, config.local, config.port, config.learning, false)
        );
        assert_eq!(found.udp_csum, Some(true));
        let shown = json("ip -j -d link show flannel.4097");
        let data = &shown[0]["linkinfo"]["info_data"];
        assert_eq!(data["id"], 4097);
        assert_eq!(data["port"], 8472);
        assert_eq!(data["local"], "198.18.0.1");
        assert_eq!(data["learning"], false);
        assert_eq!(data["link"], "under");

        // Another node, in flannel's order: neighbour, FDB, route.
        let gateway = "10.5.72.0".parse().unwrap();
        let peer: MacAddr = "3a:00:00:00:00:02".parse().unwrap();
        handle.addr_add(link.index, &Address::new("10.5.34.0/32".parse().unwrap())).unwrap();
        handle.neigh_set(link.index, gateway, peer).unwrap();
        handle.fdb_set(link.index, peer, "198.18.0.2".parse().unwrap()).unwrap();
        let route = Route::to("10.5.72.0/24".parse().unwrap()).via(gateway).dev(link.index).onlink();
        handle.route_replace(&route).unwrap();
        handle.route_replace(&route).unwrap();
        assert_eq!(run("ip route show dev flannel.4097").trim(), "10.5.72.0/24 via 10.5.72.0 onlink");
        assert_eq!(
            run("ip neigh show dev flannel.4097").trim(),
            "10.5.72.0 lladdr 3a:00:00:00:00:02 PERMANENT"
        );
        assert_eq!(
            run("bridge fdb show dev flannel.4097").trim(),
            "3a:00:00:00:00:02 dst 198.18.0.2 self permanent"
        );
        let neighbours = handle.neighs(Some(link.index), Some(Family::V4)).unwrap();
        assert_eq!((neighbours.len(), neighbours[0].mac), (1, Some(peer)));
        let fdb = handle.fdb(Some(link.index)).unwrap();
        assert_eq!(
            (fdb.len(), fdb[0].dst, fdb[0].own, fdb[0].permanent),
            (1, "198.18.0.2".parse().ok(), true, true)
        );

        handle.route_del(&route).unwrap();
        handle.fdb_del(link.index, peer, None).unwrap();
        handle.neigh_del(link.index, gateway).unwrap();
        assert!(handle.fdb(Some(link.index)).unwrap().is_empty());
        assert!(handle.neighs(Some(link.index), Some(Family::V4)).unwrap().is_empty());
        assert!(handle.fdb_del(link.index, peer, None).unwrap_err().is_not_found());
        assert!(handle.neigh_del(link.index, gateway).unwrap_err().is_not_found());
    });
}

#[test]
fn addresses_of_both_families() {
    in_new_netns(|| {
        let mut handle = Handle::new().unwrap();
        handle.link_add(&NewLink::new("a0", LinkKind::veth("a1").into()).up()).unwrap();
        let index = both_up(&mut handle, "a0", "a1");
        let v4 = Address::new("10.1.2.3/24".parse().unwrap()).broadcast_of_prefix();
        handle.addr_add(index, &v4).unwrap();
        assert!(handle.addr_add(index, &v4).unwrap_err().already_exists());
        handle.addr_add(index, &Address::new("10.9.9.9/32".parse().unwrap()).broadcast_of_prefix()).unwrap();
        handle.addr_add(index, &Address::new("fd00:1::5/64".parse().unwrap()).nodad()).unwrap();
        handle.addr_add(index, &Address::new("fd00:2::5/64".parse().unwrap())).unwrap();

        let found = handle.addrs(Some(index), Some(Family::V4)).unwrap();
        let nets: Vec<String> = found.iter().map(|address| address.net.to_string()).collect();
        assert_eq!(nets, ["10.1.2.3/24", "10.9.9.9/32"]);
        assert_eq!((found[0].broadcast, found[1].broadcast), ("10.1.2.255".parse().ok(), None));
        let shown = json("ip -j -4 addr show a0");
        assert_eq!(shown[0]["addr_info"][0]["broadcast"], "10.1.2.255");
        assert_eq!(shown[0]["addr_info"][1]["broadcast"], serde_json::Value::Null);

        let v6 = handle.addrs(Some(index), Some(Family::V6)).unwrap();
        let by = |text: &str| v6.iter().find(|address| address.net.to_string() == text).unwrap();
        assert!(!by("fd00:1::5/64").flags.tentative && by("fd00:1::5/64").flags.nodad);
        assert!(by("fd00:2::5/64").flags.tentative);
        let (failed, settled) = handle.addr_wait_dad(index, Duration::from_secs(10)).unwrap();
        assert!(failed.is_empty() && settled);

        handle.addr_del(index, "10.1.2.3/24".parse().unwrap()).unwrap();
        assert!(handle.addr_del(index, "10.1.2.3/24".parse().unwrap()).unwrap_err().is_not_found());
        assert_eq!(handle.addrs(Some(index), Some(Family::V4)).unwrap().len(), 1);
    });
}

#[test]
fn routes_of_both_families() {
    in_new_netns(|| {
        let mut handle = Handle::new().unwrap();
        let lo = handle.link_by_name("lo").unwrap();
        assert!(lo.loopback);
        handle.link_up(lo.index).unwrap();
        handle.link_add(&NewLink::new("a0", LinkKind::veth("a1").into()).up()).unwrap();
        let index = both_up(&mut handle, "a0", "a1");
        handle.addr_add(index, &Address::new("10.1.2.3/24".parse().unwrap())).unwrap();
        handle.addr_add(index, &Address::new("fd00:1::5/64".parse().unwrap()).nodad()).unwrap();

        let via = Route::to("10.5.0.0/16".parse().unwrap()).via("10.1.2.1".parse().unwrap());
        handle.route_add(&via).unwrap();
        assert!(handle.route_add(&via).unwrap_err().already_exists());
        let direct = Route::to("10.6.0.0/16".parse().unwrap()).dev(index).metric(77);
        handle.route_add(&direct).unwrap();
        let hole = Route::to("10.1.0.0/16".parse().unwrap()).blackhole().metric(4_294_967_294);
        handle.route_add(&hole).unwrap();
        let v6 = Route::to("fd00:9::/64".parse().unwrap()).via("fd00:1::1".parse().unwrap()).dev(index);
        handle.route_add(&v6).unwrap();
        let hole6 = Route::to("fd00:8::/64".parse().unwrap()).blackhole().metric(4_294_967_294);
        handle.route_add(&hole6).unwrap();
        handle
            .route_add(&Route::to("0.0.0.0/0".parse().unwrap()).via("10.1.2.1".parse().unwrap()).table(1000))
            .unwrap();

        let found = handle.routes(Family::V4, Some(254)).unwrap();
        let by = |text: &str| found.iter().find(|route| route.dst.to_string() == text).unwrap();
        assert_eq!(by("10.5.0.0/16").gateway, "10.1.2.1".parse().ok());
        assert_eq!((by("10.6.0.0/16").dev, by("10.6.0.0/16").metric), (Some(index), Some(77)));
        assert_eq!(
            (by("10.1.0.0/16").kind, by("10.1.0.0/16").metric),
            (RouteKind::Blackhole, Some(4_294_967_294))
        );
        assert_eq!(handle.routes(Family::V4, Some(1000)).unwrap().len(), 1);
        assert!(handle.routes(Family::V4, Some(1001)).unwrap().is_empty());
        assert!(handle.routes(Family::V4, None).unwrap().len() > found.len());
        let text = run("ip -4 route show");
        assert!(text.contains("10.5.0.0/16 via 10.1.2.1 dev a0"), "{text}");
        assert!(text.contains("10.6.0.0/16 dev a0 scope link metric 77"), "{text}");
        assert!(text.contains("blackhole 10.1.0.0/16 metric 4294967294"), "{text}");
        let text = run("ip -6 route show");
        assert!(text.contains("fd00:9::/64 via fd00:1::1 dev a0 metric 1024"), "{text}");
        assert!(text.contains("blackhole fd00:8::/64 dev lo metric 4294967294"), "{text}");

        let lookup = handle.route_lookup("10.5.1.1".parse().unwrap(), None).unwrap();
        assert_eq!(
            (lookup.dev, lookup.gateway, lookup.src),
            (Some(index), "10.1.2.1".parse().ok(), "10.1.2.3".parse().ok())
        );
        assert_eq!(
            handle.route_lookup("fd00:9::1".parse().unwrap(), None).unwrap().gateway,
            "fd00:1::1".parse().ok()
        );
        assert!(handle.route_lookup("203.0.113.9".parse().unwrap(), None).unwrap_err().is(libc::ENETUNREACH));

        for route in [&via, &direct, &hole, &v6, &hole6] {
            handle.route_del(route).unwrap();
            assert!(handle.route_del(route).unwrap_err().is_not_found(), "{route}");
        }
    });
}

#[test]
fn policy_rules() {
    in_new_netns(|| {
        let mut handle = Handle::new().unwrap();
        let rule = Rule { priority: Some(500), ..Rule::from_prefix("10.1.2.3/32".parse().unwrap(), 100) };
        handle.rule_add(&rule).unwrap();
        let v6 = Rule { mark: Some((0x40, 0xff)), ..Rule::from_prefix("fd00::/64".parse().unwrap(), 70_000) };
        handle.rule_add(&v6).unwrap();
        assert!(handle.rules(Family::V4).unwrap().contains(&rule));
        let found = handle.rules(Family::V6).unwrap();
        assert!(
            found.iter().any(|found| found.from == v6.from && found.table == 70_000 && found.mark == v6.mark)
        );
        assert!(run("ip rule show").contains("500:\tfrom 10.1.2.3 lookup 100"));
        handle.rule_del(&rule).unwrap();
        assert!(handle.rule_del(&rule).unwrap_err().is_not_found());
    });
}

#[test]
fn ten_thousand_routes_are_listed_whole() {
    in_new_netns(|| {
        let mut handle = Handle::new().unwrap();
        let lo = handle.link_by_name("lo").unwrap();
        handle.link_up(lo.index).unwrap();
        for number in 0..10_000u32 {
            let address = std::net::Ipv4Addr::from(0x0a00_0000 + (number << 8));
            let dst = ipnet::Ipv4Net::new(address, 24).unwrap();
            handle.route_add(&Route::to(dst.into()).dev(lo.index)).unwrap();
        }
        assert_eq!(handle.routes(Family::V4, Some(254)).unwrap().len(), 10_000);
    });
}

#[test]
fn sysctls_belong_to_the_namespace() {
    in_new_netns(|| {
        assert_eq!(sysctl::read("net/ipv4/ip_forward").unwrap(), "0");
        assert!(sysctl::ensure("net/ipv4/ip_forward", "1").unwrap());
        assert!(!sysctl::ensure("net/ipv4/ip_forward", "1").unwrap());
        assert_eq!(sysctl::read("net/ipv4/ip_forward").unwrap(), "1");
        let error = sysctl::write("net/ipv4/conf/nosuch0/forwarding", "1").unwrap_err();
        assert!(error.is_not_found(), "{error}");
        for bad in ["", "net.ipv4.ip_forward", "/etc/passwd", "../../etc/passwd", "net//ipv4"] {
            assert!(sysctl::write(bad, "1").is_err());
        }
    });
}

#[test]
fn changes_are_heard() {
    in_new_netns(|| {
        let groups = [Group::Links, Group::AddressesV4, Group::RoutesV4, Group::Neighbours];
        let mut monitor = Monitor::new(&groups).unwrap();
        assert!(monitor.wait(Some(Duration::from_millis(1))).unwrap().is_empty());
        let mut handle = Handle::new().unwrap();
        handle.link_add(&NewLink::new("a0", LinkKind::veth("a1").into())).unwrap();
        let index = both_up(&mut handle, "a0", "a1");
        handle.addr_add(index, &Address::new("10.1.2.3/24".parse().unwrap())).unwrap();
        let route = Route::to("10.5.0.0/16".parse().unwrap()).via("10.1.2.1".parse().unwrap());
        handle.route_add(&route).unwrap();
        handle.neigh_set(index, "10.1.2.9".parse().unwrap(), MacAddr([2, 0, 0, 0, 0, 9])).unwrap();
        handle.link_del(index).unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(5);
        let mut events = Vec::new();
        let gone = |event: &Event| matches!(event, Event::LinkGone(link) if link.name == "a0");
        while !events.iter().any(gone) {
            assert!(std::time::Instant::now() < deadline, "{events:?}");
            events.extend(monitor.wait(Some(Duration::from_millis(100))).unwrap());
        }
        assert!(
            events
                .iter()
                .any(|event| matches!(event, Event::LinkSet(link) if link.name == "a0" && link.is_up()))
        );
        assert!(events.iter().any(
            |event| matches!(event, Event::AddressSet(found) if found.net.to_string() == "10.1.2.3/24")
        ));
        assert!(events.iter().any(|event| matches!(event, Event::RouteSet(found) if found.dst == route.dst)));
        assert!(events.iter().any(|event| matches!(event, Event::NeighbourSet(found) if found.mac == Some(MacAddr([2, 0, 0, 0, 0, 9])))));
    });
}

/// Says what this kernel cannot show.
#[expect(clippy::print_stderr, reason = "an untested part must be named, not hidden")]
fn untested(error: &felt_hostnet::Error) {
    eprintln!("not tested on this kernel: {error}");
}

/// Makes a link; false, with a note, where this kernel does not have the kind.
fn made(handle: &mut Handle, link: &NewLink<'_>) -> bool {
    match handle.link_add(link) {
        Ok(()) => true,
        Err(error) if error.is_unsupported() => {
            untested(&error);
            false
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn other_kinds_read_back_as_made() {
    in_new_netns(|| {
        let mut handle = Handle::new().unwrap();
        handle.link_add(&NewLink::new("under", LinkKind::veth("underp").into()).up()).unwrap();
        let under = handle.link_by_name("under").unwrap().index;
        let mut tested = 0;
        let cases = [
            (NewLink::new("k0", LinkKind::Dummy), LinkDetail::Other),
            (NewLink::new("k1", LinkKind::Ifb), LinkDetail::Other),
            (
                NewLink::new("k2", LinkKind::Macvlan(MacvlanMode::Vepa)).lower(under),
                LinkDetail::Macvlan(Some(MacvlanMode::Vepa)),
            ),
            (
                NewLink::new("k3", LinkKind::Ipvlan(IpvlanMode::L3)).lower(under),
                LinkDetail::Ipvlan(Some(IpvlanMode::L3)),
            ),
            (NewLink::new("k4", LinkKind::Vlan(101)).lower(under), LinkDetail::Vlan(101)),
            (
                NewLink::new(
                    "k5",
                    LinkKind::IpIp(IpTunnelConfig {
                        local: Some("198.18.0.1".parse().unwrap()),
                        remote: Some("198.18.0.2".parse().unwrap()),
                        ttl: Some(64),
                        pmtu_discovery: Some(true),
                        ..IpTunnelConfig::default()
                    }),
                ),
                LinkDetail::IpTunnel(IpTunnelConfig {
                    lower: None,
                    local: Some("198.18.0.1".parse().unwrap()),
                    remote: Some("198.18.0.2".parse().unwrap()),
                    ttl: Some(64),
                    pmtu_discovery: Some(true),
                }),
            ),
        ];
        for (link, detail) in cases {
            // ipvlan and macvlan exclude each other on one lower link.
            if made(&mut handle, &link) {
                let found = handle.link_by_name(&link.name).unwrap();
                assert!(found.is_kind(link.kind.name()), "{found:?}");
                assert_eq!(found.detail, detail);
                handle.link_del(found.index).unwrap();
                tested += 1;
            }
        }
        assert!(tested >= 2, "this kernel has hardly any kind of link");
    });
}

#[test]
fn vlans_of_bridge_ports() {
    in_new_netns(|| {
        let mut handle = Handle::new().unwrap();
        let config = BridgeConfig { vlan_default_pvid: Some(0), ..BridgeConfig::default() };
        let filtering = BridgeConfig { vlan_filtering: Some(true), ..config };
        match handle.link_add(&NewLink::new("br0", LinkKind::Bridge(filtering))) {
            Ok(()) => {}
            Err(error) if error.is_unsupported() => {
                untested(&error);
                return;
            }
            Err(error) => panic!("{error}"),
        }
        handle.link_add(&NewLink::new("p0", LinkKind::veth("p1").into())).unwrap();
        let (bridge, port) = (handle.link_by_name("br0").unwrap(), handle.link_by_name("p0").unwrap().index);
        let LinkDetail::Bridge(found) = bridge.detail else { panic!("{bridge:?}") };
        assert_eq!((found.vlan_filtering, found.vlan_default_pvid), (Some(true), Some(0)));
        handle.link_set_master(port, Some(bridge.index)).unwrap();
        let access = VlanFlags { pvid: true, untagged: true, bridge_self: false };
        handle.bridge_vlan_add(port, 100, access).unwrap();
        handle.bridge_vlan_add(port, 200, VlanFlags::default()).unwrap();
        let vlans = handle.bridge_vlans().unwrap();
        assert!(vlans.contains(&(port, 100, access)), "{vlans:?}");
        handle.bridge_vlan_del(port, 200, VlanFlags::default()).unwrap();
        assert!(!run("bridge vlan show dev p0").contains("200"));
        handle.bridge_set_vlan_filtering(bridge.index, false).unwrap();
    });
}

#[test]
fn a_tun_device_says_what_it_is() {
    in_new_netns(|| {
        run("ip tuntap add dev tun7 mode tun multi_queue vnet_hdr");
        let link = Handle::new().unwrap().link_by_name("tun7").unwrap();
        let LinkDetail::Tun(tun) = &link.detail else { panic!("{link:?}") };
        assert!(!tun.tap && tun.persist && tun.vnet_hdr && tun.multi_queue, "{tun:?}");
        assert_eq!(link.mac, None);
    });
}
