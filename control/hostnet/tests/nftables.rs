//! nftables by netlink against the kernel, compared with what `nft` prints.

mod support;

use felt_hostnet::nft::{Batch, Chain, Expr, Family, Hook, Nft, Rule, Transport};
use support::{in_new_netns, run};

fn net(text: &str) -> ipnet::IpNet {
    text.parse().unwrap()
}

/// Rule lines of `nft list ruleset`, trimmed.
fn lines(command: &str) -> Vec<String> {
    run(command).lines().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty()).collect()
}

#[test]
fn rules_read_as_written_in_nfts_language() {
    in_new_netns(|| {
        let mut nft = Nft::new().unwrap();
        let mut batch = Batch::new();
        batch.add_table(Family::Ip, "felt-t", Some("rules of a test"));
        batch.add_chain(
            Family::Ip,
            "felt-t",
            &Chain::base("postrtg", "nat", Hook::Postrouting, 100).comment("masquerading"),
        );
        batch.add_chain(Family::Ip, "felt-t", &Chain::regular("aside"));
        let rules = [
            Rule::new("postrtg").mark(0x4000, 0x4000).returns(),
            Rule::new("postrtg").mark(0x4000, u32::MAX).returns(),
            Rule::new("postrtg").saddr(net("10.5.1.0/24")).daddr(net("10.5.0.0/16")).returns(),
            Rule::new("postrtg").saddr_not(net("10.5.1.0/24")).daddr(net("10.5.0.0/16")).jump("aside"),
            Rule::new("postrtg")
                .saddr(net("10.5.0.0/16"))
                .daddr_not(net("224.0.0.0/4"))
                .comment("to the world")
                .masquerade(true),
            Rule::new("postrtg").saddr(net("10.5.1.7/32")).oifname("eth0").counter().masquerade(false),
            Rule::new("aside").set_mark_bits(0x2000),
            Rule::new("aside").saddr(net("192.0.2.0/23")).iifname("veth1").accept(),
        ];
        for rule in &rules {
            batch.add_rule(Family::Ip, "felt-t", rule);
        }
        nft.commit(batch).unwrap();
        assert_eq!(
            lines("nft list table ip felt-t"),
            [
                "table ip felt-t {",
                "comment \"rules of a test\"",
                "chain postrtg {",
                "comment \"masquerading\"",
                "type nat hook postrouting priority srcnat; policy accept;",
                "meta mark & 0x00004000 == 0x00004000 return",
                "meta mark 0x00004000 return",
                "ip saddr 10.5.1.0/24 ip daddr 10.5.0.0/16 return",
                "ip saddr != 10.5.1.0/24 ip daddr 10.5.0.0/16 jump aside",
                "ip saddr 10.5.0.0/16 ip daddr != 224.0.0.0/4 masquerade fully-random comment \"to the world\"",
                "ip saddr 10.5.1.7 oifname \"eth0\" counter packets 0 bytes 0 masquerade",
                "}",
                "chain aside {",
                "meta mark set meta mark | 0x00002000",
                "ip saddr 192.0.2.0/23 iifname \"veth1\" accept",
                "}",
                "}",
            ]
        );
        // What is listed equals what was asked for, in order.
        let found = nft.rules(Family::Ip, "felt-t", None).unwrap();
        assert_eq!(found.len(), rules.len());
        for rule in &rules {
            assert!(found.iter().any(|found| found.is(rule)), "{rule:?}\n{found:#?}");
        }
        let in_chain = nft.rules(Family::Ip, "felt-t", Some("aside")).unwrap();
        assert!(in_chain[0].is(&rules[6]) && in_chain[1].is(&rules[7]) && in_chain.len() == 2);
        let chains = nft.chains(Family::Ip, "felt-t").unwrap();
        assert_eq!(chains[0], Chain::base("postrtg", "nat", Hook::Postrouting, 100).comment("masquerading"));
        let tables = nft.tables().unwrap();
        assert_eq!(tables[0].comment.as_deref(), Some("rules of a test"));

        let mut batch = Batch::new();
        batch.delete_rule(Family::Ip, "felt-t", "aside", in_chain[0].handle);
        nft.commit(batch).unwrap();
        assert_eq!(nft.rules(Family::Ip, "felt-t", Some("aside")).unwrap().len(), 1);
        for _ in 0..2 {
            let mut batch = Batch::new();
            batch.delete_table(Family::Ip, "felt-t");
            nft.commit(batch).unwrap();
            assert!(!nft.has_table(Family::Ip, "felt-t").unwrap());
        }
        assert!(run("nft list ruleset").trim().is_empty());
        assert!(nft.rules(Family::Ip, "felt-t", None).unwrap().is_empty());
    });
}

#[test]
fn port_maps_and_inet_tables() {
    in_new_netns(|| {
        let mut nft = Nft::new().unwrap();
        let mut batch = Batch::new();
        batch.add_table(Family::Ip, "cni_hostport", None);
        batch.add_chain(Family::Ip, "cni_hostport", &Chain::regular("hostports"));
        batch.add_chain(
            Family::Ip,
            "cni_hostport",
            &Chain::base("prerouting", "nat", Hook::Prerouting, -100),
        );
        batch.add_rule(
            Family::Ip,
            "cni_hostport",
            &Rule::new("hostports")
                .daddr(net("192.0.2.1/32"))
                .dport(Transport::Tcp, 8080)
                .dnat("10.5.1.2".parse().unwrap(), Some(80))
                .comment("cid1"),
        );
        batch.add_rule(Family::Ip, "cni_hostport", &Rule::new("prerouting").daddr_local().jump("hostports"));
        batch.add_table(Family::Ip6, "cni_hostport", None);
        batch.add_chain(
            Family::Ip6,
            "cni_hostport",
            &Chain::base("prerouting", "nat", Hook::Prerouting, -100),
        );
        batch.add_rule(
            Family::Ip6,
            "cni_hostport",
            &Rule::new("prerouting").dport(Transport::Udp, 53).dnat("fd00::2".parse().unwrap(), Some(5353)),
        );
        batch.add_table(Family::Inet, "cni_plugins_masquerade", None);
        batch.add_chain(Family::Inet, "cni_plugins_masquerade", &Chain::regular("masq_checks"));
        batch.add_chain(
            Family::Inet,
            "cni_plugins_masquerade",
            &Chain::base("postrouting", "nat", Hook::Postrouting, 100),
        );
        for rule in [
            Rule::new_inet("postrouting").daddr(net("224.0.0.0/4")).returns(),
            Rule::new_inet("postrouting").daddr(net("ff00::/8")).returns(),
            Rule::new_inet("postrouting").goto("masq_checks"),
            Rule::new_inet("masq_checks")
                .saddr(net("10.5.1.2/32"))
                .daddr_not(net("10.5.1.0/24"))
                .masquerade(false)
                .comment("3a74b2d8a51f7551-0b65a318f52e521b, net: f3, if: eth0, id: cid1"),
        ] {
            batch.add_rule(Family::Inet, "cni_plugins_masquerade", &rule);
        }
        nft.commit(batch).unwrap();
        let text = run("nft list ruleset");
        for wanted in [
            "ip daddr 192.0.2.1 tcp dport 8080 dnat to 10.5.1.2:80 comment \"cid1\"",
            "fib daddr type local jump hostports",
            "udp dport 53 dnat to [fd00::2]:5353",
            "ip daddr 224.0.0.0/4 return",
            "ip6 daddr ff00::/8 return",
            "goto masq_checks",
            "ip saddr 10.5.1.2 ip daddr != 10.5.1.0/24 masquerade comment \"3a74b2d8a51f7551-0b65a318f52e521b, net: f3, if: eth0, id: cid1\"",
        ] {
            assert!(text.lines().any(|line| line.trim() == wanted), "{wanted:?} not in\n{text}");
        }
    });
}

#[test]
fn rules_made_by_nft_compare_equal() {
    in_new_netns(|| {
        run("nft add table ip felt-t");
        run("nft add chain ip felt-t postrtg { type nat hook postrouting priority 100 ; }");
        run(
            "nft add rule ip felt-t postrtg ip saddr 10.5.1.7 ip daddr != 10.5.1.8 counter return comment \"x\"",
        );
        run("nft add rule ip felt-t postrtg limit rate 5/second accept");
        let found = Nft::new().unwrap().rules(Family::Ip, "felt-t", Some("postrtg")).unwrap();
        let wanted = Rule::new("postrtg")
            .saddr(net("10.5.1.7/32"))
            .daddr_not(net("10.5.1.8/32"))
            .counter()
            .returns()
            .comment("x");
        assert!(found[0].is(&wanted), "{found:#?}");
        assert!(matches!(&found[1].exprs[0], Expr::Other { name, .. } if name == "limit"), "{found:#?}");
    });
}

#[test]
fn failed_transaction_changes_nothing_and_names_the_culprit() {
    in_new_netns(|| {
        let mut nft = Nft::new().unwrap();
        let mut batch = Batch::new();
        batch.add_table(Family::Ip, "felt-t", None);
        batch.add_rule(Family::Ip, "felt-t", &Rule::new("missing").accept());
        batch.add_chain(Family::Ip, "felt-t", &Chain::regular("later"));
        let error = nft.commit(batch).unwrap_err();
        assert!(error.is_not_found());
        assert!(error.to_string().starts_with("add rule ip felt-t missing: "), "{error}");
        assert!(nft.tables().unwrap().is_empty());
        // The socket is in step.
        let mut batch = Batch::new();
        batch.add_table(Family::Ip, "felt-t", None);
        nft.commit(batch).unwrap();
        assert!(nft.has_table(Family::Ip, "felt-t").unwrap());
    });
}

#[test]
fn a_thousand_rules_in_one_transaction() {
    in_new_netns(|| {
        let mut nft = Nft::new().unwrap();
        let mut batch = Batch::new();
        batch.add_table(Family::Ip, "felt-t", None);
        batch.add_chain(Family::Ip, "felt-t", &Chain::regular("c"));
        for number in 0..1000u16 {
            let address = std::net::Ipv4Addr::from(0x0a00_0000 + u32::from(number));
            let rule = Rule::new("c").saddr(ipnet::IpNet::from(std::net::IpAddr::from(address))).returns();
            batch.add_rule(Family::Ip, "felt-t", &rule.comment(&format!("rule {number}")));
        }
        nft.commit(batch).unwrap();
        let found = nft.rules(Family::Ip, "felt-t", Some("c")).unwrap();
        assert_eq!(found.len(), 1000);
        assert_eq!(found[999].comment.as_deref(), Some("rule 999"));
    });
}

#[test]
fn bridge_family_filters_by_source_address() {
    in_new_netns(|| {
        let mut nft = Nft::new().unwrap();
        let mut batch = Batch::new();
        batch.add_table(Family::Bridge, "nat", None);
        batch.add_chain(Family::Bridge, "nat", &Chain::base("PREROUTING", "filter", Hook::Prerouting, -300));
        batch.add_chain(Family::Bridge, "nat", &Chain::regular("cni-br-iface-c-eth0"));
        batch.add_rule(
            Family::Bridge,
            "nat",
            &Rule::new("PREROUTING")
                .iifname("veth1")
                .jump("cni-br-iface-c-eth0")
                .comment("macspoofchk-c-eth0"),
        );
        batch.add_rule(
            Family::Bridge,
            "nat",
            &Rule::new("cni-br-iface-c-eth0").ether_saddr("02:00:00:00:00:01".parse().unwrap()).returns(),
        );
        batch.add_rule(Family::Bridge, "nat", &Rule::new("cni-br-iface-c-eth0").drop());
        nft.commit(batch).unwrap_or_else(|error| panic!("bridge family: {error}"));
        let text = run("nft list ruleset");
        for wanted in [
            "iifname \"veth1\" jump cni-br-iface-c-eth0 comment \"macspoofchk-c-eth0\"",
            "ether saddr 02:00:00:00:00:01 return",
            "drop",
        ] {
            assert!(text.lines().any(|line| line.trim() == wanted), "{wanted:?} not in\n{text}");
        }
    });
}

#[test]
fn generation_tells_every_change_and_no_other() {
    in_new_netns(|| {
        let mut nft = Nft::new().unwrap();
        let first = nft.generation().unwrap();
        nft.rules(Family::Ip, "none", None).unwrap();
        assert_eq!(nft.generation().unwrap(), first);
        run("iptables-nft -A FORWARD -j ACCEPT");
        let second = nft.generation().unwrap();
        assert_ne!(second, first);
        run("iptables-nft-save");
        assert_eq!(nft.generation().unwrap(), second);
        run("ip6tables-nft -t nat -A POSTROUTING -j RETURN");
        assert_ne!(nft.generation().unwrap(), second);
    });
}
