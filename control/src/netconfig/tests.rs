use super::*;

fn parse(text: &str) -> Result<NetworkConfig, NetworkConfigError> {
    NetworkConfig::parse(text.as_bytes(), Source::Registry)
}

fn ok(text: &str) -> NetworkConfig {
    parse(text).unwrap_or_else(|e| panic!("{text}: {e}"))
}

/// Parses, and requires an error whose message has all of `parts`.
fn fails(text: &str, parts: &[&str]) {
    let error = match parse(text) {
        Ok(config) => panic!("{text} was accepted: {config:?}"),
        Err(error) => error.to_string(),
    };
    for part in parts {
        assert!(error.contains(part), "{text}: {error:?} lacks {part:?}");
    }
}

/// Subnet length, first and last subnet of a config with IPv4.
fn pool4(text: &str) -> (u8, String, String) {
    let pool = ok(text).ipv4_pool.expect("IPv4 is on");
    (pool.subnet_len(), pool.first().to_string(), pool.last().to_string())
}

fn pool6(text: &str) -> (u8, String, String) {
    let pool = ok(text).ipv6_pool.expect("IPv6 is on");
    (pool.subnet_len(), pool.first().to_string(), pool.last().to_string())
}

fn strings(len: u8, first: &str, last: &str) -> (u8, String, String) {
    (len, first.to_owned(), last.to_owned())
}

/// Configurations that users reported, and what becomes of each: derived lengths and the backend, or what the error says.
#[test]
fn configurations_from_the_field_have_the_expected_result() {
    enum Becomes {
        /// Network, length of subnets, backend.
        Config(&'static str, u8, &'static str),
        Error(&'static [&'static str]),
    }
    use Becomes::{Config, Error};
    let six = |rest: &str| format!(r#"{{"EnableIPv4":false,"EnableIPv6":true,{rest}}}"#);
    let four = |rest: &str| format!(r#"{{"Network":"10.50.0.0/16",{rest}}}"#);
    let plain = "10.50.0.0/16";
    for (text, becomes) in [
        (r#"{"Network":"10.50.0.0/16"}"#.to_owned(), Config(plain, 24, "udp")),
        (r#"{"Network":"10.50.0.0/23"}"#.to_owned(), Config("10.50.0.0/23", 25, "udp")),
        (r#"{"Network":"10.50.0.0/29"}"#.to_owned(), Error(&["Network:", "too small"])),
        (r#"{"Network":"10.50.0.0/32"}"#.to_owned(), Error(&["Network:", "too small"])),
        (four(r#""SubnetLen":17"#), Error(&["SubnetLen:", "four subnets"])),
        (four(r#""SubnetMin":"10.51.0.0""#), Error(&["SubnetMin:", "outside"])),
        (r#"{"Network":"10.50.5.0/16"}"#.to_owned(), Config(plain, 24, "udp")),
        (four(r#""Backend":{"Type":"vxlan","Directrouting":true}"#), Config(plain, 24, "vxlan")),
        (four(r#""X":1,"Backend":{"Type":"vxlan","Y":[{}]}"#), Config(plain, 24, "vxlan")),
        (four(r#""Backend":{}"#), Config(plain, 24, "udp")),
        (four(r#""Backend":null"#), Config(plain, 24, "udp")),
        (r#"{\"Network\":\"10.50.0.0/16\"}"#.to_owned(), Error(&[])),
        (four(r#""EnableIPv6":true"#), Error(&["IPv6Network:", "missing"])),
        (six(r#""IPv6Network":"fd00:50::/120","IPv6SubnetLen":127"#), Error(&["IPv6SubnetLen:", "/126"])),
        (six(r#""IPv6Network":"fd00:50::/120""#), Config("fd00:50::/120", 122, "udp")),
        (six(r#""IPv6Network":"::/0""#), Error(&["IPv6Network:", "missing"])),
        (six(r#""IPv6Network":"fd00:50::1/128""#), Error(&["IPv6Network:", "too small"])),
        (r#"{"Network":"10.0.0.0/0"}"#.to_owned(), Error(&["Network:", "missing"])),
    ] {
        match becomes {
            Error(parts) => fails(&text, parts),
            Config(network, len, backend) => {
                let config = ok(&text);
                let (found, found_len) = match (config.ipv4, config.ipv4_pool, config.ipv6, config.ipv6_pool)
                {
                    (Some(net), Some(pool), ..) => (net.to_string(), pool.subnet_len()),
                    (_, _, Some(net), Some(pool)) => (net.to_string(), pool.subnet_len()),
                    _ => panic!("{text}: no network"),
                };
                assert_eq!((found.as_str(), found_len), (network, len), "{text}");
                assert_eq!(config.backend.kind.name(), backend, "{text}");
            }
        }
    }
    let BackendKind::Vxlan(vxlan) =
        ok(&four(r#""Backend":{"Type":"vxlan","Directrouting":true}"#)).backend.kind
    else {
        panic!("not vxlan")
    };
    assert!(vxlan.direct_routing);
    assert!(ok(r#"{"Network":"10.50.5.0/16"}"#).notes[0].contains("10.50.0.0/16"), "said in the log");
}

#[test]
fn derives_the_ipv4_subnet_size_from_the_network() {
    for (network, len, first, last) in [
        ("10.0.0.0/8", 24, "10.0.1.0", "10.255.255.0"),
        ("10.50.0.0/16", 24, "10.50.1.0", "10.50.255.0"),
        ("10.50.0.0/22", 24, "10.50.1.0", "10.50.3.0"),
        ("10.50.0.0/23", 25, "10.50.0.128", "10.50.1.128"),
        ("10.50.0.0/28", 30, "10.50.0.4", "10.50.0.12"),
        ("128.0.0.0/1", 24, "128.0.1.0", "255.255.255.0"),
    ] {
        let text = format!(r#"{{"Network":"{network}"}}"#);
        assert_eq!(pool4(&text), strings(len, first, last), "{network}");
    }
    for network in ["10.50.0.0/29", "10.50.0.0/30", "10.50.0.0/31", "10.50.0.0/32"] {
        fails(&format!(r#"{{"Network":"{network}"}}"#), &["Network:", "too small", "/28"]);
    }
}

#[test]
fn derives_the_ipv6_subnet_size_from_the_network() {
    let config =
        |network: &str| format!(r#"{{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"{network}"}}"#);
    for (network, len, first, last) in [
        ("fd00:50::/48", 64, "fd00:50:0:1::", "fd00:50:0:ffff::"),
        ("fd00:50::/62", 64, "fd00:50:0:1::", "fd00:50:0:3::"),
        ("fd00:50::/63", 65, "fd00:50:0:0:8000::", "fd00:50:0:1:8000::"),
        ("fd00:50::/124", 126, "fd00:50::4", "fd00:50::c"),
        ("8000::/1", 64, "8000:0:0:1::", "ffff:ffff:ffff:ffff::"),
    ] {
        assert_eq!(pool6(&config(network)), strings(len, first, last), "{network}");
    }
    for network in ["fd00:50::/125", "fd00:50::/127", "fd00:50::1/128"] {
        fails(&config(network), &["IPv6Network:", "too small", "/124"]);
    }
}

#[test]
fn an_unset_network_is_named() {
    fails("{}", &["Network:", "missing"]);
    fails("null", &["object"]);
    fails(r#"{"Network":"0.0.0.0/0"}"#, &["Network:", "missing"]);
    fails(r#"{"Network":"10.0.0.0/0"}"#, &["Network:", "missing"]);
    fails(r#"{"Network":"10.50.0.0/16","EnableIPv6":true}"#, &["IPv6Network:", "missing", "EnableIPv6"]);
    fails(
        r#"{"Network":"10.50.0.0/16","EnableIPv6":true,"IPv6Network":"::/0"}"#,
        &["IPv6Network:", "missing"],
    );
    fails(r#"{"EnableIPv4":false}"#, &["EnableIPv4", "EnableIPv6"]);
    // Also where the subnet sizes do not matter.
    for text in ["{}", r#"{"Network":"10.0.0.0/8","EnableIPv6":true}"#] {
        NetworkConfig::parse(text.as_bytes(), Source::Kubernetes).unwrap_err();
    }
}

#[test]
fn checks_the_given_subnet_length() {
    let v4 = |network: &str, len: u32| format!(r#"{{"Network":"{network}","SubnetLen":{len}}}"#);
    assert_eq!(ok(&v4("10.50.0.0/16", 18)).ipv4_pool.unwrap().subnet_len(), 18);
    assert_eq!(ok(&v4("10.50.0.0/28", 30)).ipv4_pool.unwrap().subnet_len(), 30);
    fails(&v4("10.50.0.0/16", 17), &["SubnetLen:", "four subnets"]);
    fails(&v4("10.50.0.0/29", 30), &["SubnetLen:", "four subnets"]);
    fails(&v4("10.50.0.0/32", 30), &["SubnetLen:", "four subnets"]);
    fails(&v4("10.50.0.0/16", 31), &["SubnetLen:", "31", "/30"]);
    fails(&v4("10.50.0.0/16", 4_294_967_295), &["SubnetLen:"]);

    let v6 = |network: &str, len: u64| {
        format!(r#"{{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"{network}","IPv6SubnetLen":{len}}}"#)
    };
    assert_eq!(ok(&v6("fd00:50::/124", 126)).ipv6_pool.unwrap().subnet_len(), 126);
    assert_eq!(ok(&v6("8000::/1", 3)).ipv6_pool.unwrap().subnet_len(), 3);
    fails(&v6("fd00:50::/120", 127), &["IPv6SubnetLen:", "/126"]);
    fails(&v6("fd00:50::/120", 121), &["IPv6SubnetLen:", "four subnets"]);
    fails(&v6("fd00:50::/128", 126), &["IPv6SubnetLen:", "four subnets"]);
    fails(&v6("fd00:50::/120", u64::MAX), &["IPv6SubnetLen:"]);
}

#[test]
fn checks_the_given_range() {
    let with = |rest: &str| format!(r#"{{"Network":"10.50.0.0/16",{rest}}}"#);
    assert_eq!(
        pool4(&with(r#""SubnetMin":"10.50.0.0","SubnetMax":"10.50.9.0""#)),
        strings(24, "10.50.0.0", "10.50.9.0")
    );
    assert_eq!(
        pool4(&with(r#""SubnetMin":"0.0.0.0","SubnetMax":"0.0.0.0""#)),
        strings(24, "10.50.1.0", "10.50.255.0")
    );
    fails(&with(r#""SubnetMin":"10.51.0.0""#), &["SubnetMin:", "10.51.0.0", "outside", "10.50.0.0/16"]);
    fails(&with(r#""SubnetMax":"10.49.0.0""#), &["SubnetMax:", "outside"]);
    fails(&with(r#""SubnetMin":"10.50.1.128""#), &["SubnetMin:", "10.50.1.128", "/24"]);
    fails(&with(r#""SubnetMax":"10.50.255.255""#), &["SubnetMax:", "/24"]);
    fails(
        &with(r#""SubnetMin":"10.50.9.0","SubnetMax":"10.50.8.0""#),
        &["SubnetMin:", "SubnetMax", "no subnet"],
    );

    let six = |rest: &str| {
        format!(r#"{{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00:50::/48",{rest}}}"#)
    };
    assert_eq!(
        pool6(&six(r#""IPv6SubnetMin":"fd00:50::","IPv6SubnetMax":null"#)),
        strings(64, "fd00:50::", "fd00:50:0:ffff::")
    );
    fails(&six(r#""IPv6SubnetMin":"fd00:51::""#), &["IPv6SubnetMin:", "outside"]);
    fails(&six(r#""IPv6SubnetMax":"fd00:50::1""#), &["IPv6SubnetMax:", "/64"]);
}

#[test]
fn host_bits_are_cut_off_and_reported() {
    let config = ok(r#"{"Network":"10.50.5.0/16","EnableIPv6":true,"IPv6Network":"fd00:50::7/48"}"#);
    assert_eq!(config.ipv4.unwrap().to_string(), "10.50.0.0/16");
    assert_eq!(config.ipv6.unwrap().to_string(), "fd00:50::/48");
    assert_eq!(config.notes.len(), 2);
    assert!(config.notes[0].contains("Network 10.50.5.0/16"), "{:?}", config.notes);
    assert!(config.notes[0].contains("10.50.0.0/16"));
    assert!(ok(r#"{"Network":"10.50.0.0/16"}"#).notes.is_empty());
}

#[test]
fn keys_match_without_case_and_the_last_one_wins() {
    let config = ok(
        r#"{"network":"10.50.0.0/16","SUBNETLEN":26,"backend":{"TYPE":"VXLAN","Directrouting":true,"vni":7},"x":{"y":1}}"#,
    );
    assert_eq!(config.ipv4_pool.unwrap().subnet_len(), 26);
    let BackendKind::Vxlan(vxlan) = config.backend.kind else {
        panic!("{config:?}");
    };
    assert!(vxlan.direct_routing);
    assert_eq!(vxlan.vni, 7);
    let config = ok(
        r#"{"Network":"10.1.0.0/16","network":"10.2.0.0/16","Network":"10.3.0.0/16","nETWORK":"10.4.0.0/16"}"#,
    );
    assert_eq!(config.ipv4.unwrap().to_string(), "10.4.0.0/16");
    let config = ok("{\"Networ\u{212a}\":\"10.1.0.0/16\",\"\u{17f}ubnetLen\":25}");
    assert_eq!(config.ipv4_pool.unwrap().subnet_len(), 25);
}

#[test]
fn null_leaves_numbers_and_booleans_but_is_no_address() {
    let config = ok(
        r#"{"Network":"10.50.0.0/16","SubnetLen":25,"SubnetLen":null,"EnableIPv4":null,"EnableNFTables":true,"EnableNFTables":null,"Backend":{"Type":"vxlan","VNI":null}}"#,
    );
    assert_eq!(config.ipv4_pool.unwrap().subnet_len(), 25);
    assert!(config.nftables);
    fails(r#"{"Network":null}"#, &["Network:", "null"]);
    fails(r#"{"Network":"10.50.0.0/16","SubnetMin":null}"#, &["SubnetMin:", "null"]);
    fails(r#"{"Network":"10.50.0.0/16","IPv6Network":null}"#, &["IPv6Network:"]);
}

#[test]
fn wrong_types_name_the_key_and_the_value() {
    let with = |rest: &str| format!(r#"{{"Network":"10.50.0.0/16",{rest}}}"#);
    fails(&with(r#""SubnetLen":24.0"#), &["SubnetLen:", "24.0"]);
    fails(&with(r#""SubnetLen":"24""#), &["SubnetLen:", "\"24\""]);
    fails(&with(r#""SubnetLen":-1"#), &["SubnetLen:", "-1"]);
    fails(&with(r#""EnableIPv6":"yes""#), &["EnableIPv6:"]);
    fails(&with(r#""SubnetMin":5"#), &["SubnetMin:"]);
    fails(&with(r#""Backend":"vxlan""#), &["Backend:", "an object"]);
    fails(&with(r#""Backend":{"Type":1}"#), &["Backend.Type:"]);
    fails(&with(r#""Backend":{"Type":"vxlan","VNI":"1"}"#), &["Backend.VNI:"]);
    fails(&with(r#""Backend":{"Type":"vxlan","VNI":16777216}"#), &["Backend.VNI:", "16777215"]);
    fails(&with(r#""Backend":{"Port":70000}"#), &["Backend.Port:", "65535"]);
    fails(&with(r#""Backend":{"Type":"vxlan","DirectRouting":1}"#), &["Backend.DirectRouting:"]);
    for bad in [
        "10.50.0.0",
        "10.50.0.0/33",
        "10.50.0/16",
        "10.050.0.0/16",
        "fd00::/48",
        "10.50.0.0/-1",
        "10.50.0.0/+16",
        "10.50.0.0/",
        "",
        " 10.50.0.0/16",
        "10.50.0.0\\\\/16",
        "::ffff:10.5.0.0/112",
    ] {
        fails(&format!(r#"{{"Network":"{bad}"}}"#), &["Network:"]);
    }
    fails(&with(r#""IPv6Network":"fe80::%eth0/64""#), &["IPv6Network:"]);
    fails(&with(r#""IPv6Network":"10.0.0.0/8""#), &["IPv6Network:"]);
}

#[test]
fn text_that_is_not_one_object_is_an_error() {
    for bad in [
        "",
        " \n",
        "[]",
        "7",
        "{",
        r#"{"Network":"10.50.0.0/16"} x"#,
        r#"{\"Network\":\"10.50.0.0/16\"}"#,
        "// c\n{}",
        "\u{0}",
    ] {
        let error = parse(bad).unwrap_err().to_string();
        assert!(!error.is_empty());
    }
    NetworkConfig::parse(b"\xff\xfe{}", Source::Registry).unwrap_err();
    ok("\n {\"Network\":\"10.50.0.0/16\"} \n");
}

#[test]
fn an_absent_null_or_empty_backend_is_udp() {
    for backend in ["", r#","Backend":null"#, r#","Backend":{}"#, r#","Backend":{"Type":""}"#] {
        let config = ok(&format!(r#"{{"Network":"10.50.0.0/16"{backend}}}"#));
        assert_eq!(config.backend, Backend::default(), "{backend}");
        assert_eq!(config.backend.kind.name(), "udp");
        assert_eq!(config.backend.kind.lease_type(), "");
    }
    let config = ok(r#"{"Network":"10.50.0.0/16","Backend":{"Port":9000}}"#);
    let BackendKind::Udp(udp) = config.backend.kind else {
        panic!("{config:?}");
    };
    assert_eq!(udp.port, 9000);
}

#[test]
fn every_backend_has_its_keys_and_defaults() {
    let kind =
        |backend: &str| ok(&format!(r#"{{"Network":"10.50.0.0/16","Backend":{backend}}}"#)).backend.kind;
    assert_eq!(
        kind(r#"{"Type":"vxlan"}"#),
        BackendKind::Vxlan(Vxlan {
            vni: 1,
            port: 8472,
            mtu: None,
            gbp: false,
            learning: false,
            direct_routing: false,
        })
    );
    assert_eq!(
        kind(
            r#"{"Type":"vxlan","VNI":5,"Port":0,"MTU":1400,"GBP":true,"Learning":true,"DirectRouting":true}"#
        ),
        BackendKind::Vxlan(Vxlan {
            vni: 5,
            port: 8472,
            mtu: Some(1400),
            gbp: true,
            learning: true,
            direct_routing: true,
        })
    );
    assert_eq!(kind(r#"{"Type":"host-gw"}"#), BackendKind::HostGw);
    assert_eq!(kind(r#"{"Type":"Alloc"}"#), BackendKind::Alloc);
    assert_eq!(kind(r#"{"Type":"ipip","DirectRouting":true}"#), BackendKind::Ipip { direct_routing: true });
    let BackendKind::Extension(extension) =
        kind(r#"{"Type":"extension","SubnetAddCommand":"ip route","ShutdownCommand":7}"#)
    else {
        panic!("not extension");
    };
    assert_eq!(extension.subnet_add, "ip route");
    assert_eq!(extension.pre_startup, "");
}

#[test]
fn refused_backends_say_what_there_is() {
    for name in ["wireguard", "ipsec", "tencent-vpc", "aws-vpc", "nonsense"] {
        fails(
            &format!(r#"{{"Network":"10.50.0.0/16","Backend":{{"Type":"{name}"}}}}"#),
            &["Backend.Type:", name, "vxlan, udp, host-gw"],
        );
    }
}

#[test]
fn own_keys_have_words_and_defaults() {
    let config = ok(
        r#"{"Network":"10.50.0.0/16","Backend":{"Type":"vxlan","dataplane":"Kernel","offload":"off","workers":3,"sourceguard":"strict"}}"#,
    );
    assert_eq!(config.backend.dataplane, Dataplane::Kernel);
    assert_eq!(config.backend.offload, Offload::Off);
    assert_eq!(config.backend.workers, 3);
    assert_eq!(config.backend.source_guard, SourceGuard::Strict);
    assert_eq!(Backend::default().source_guard, SourceGuard::Inner);
    fails(
        r#"{"Network":"10.50.0.0/16","Backend":{"SourceGuard":"all"}}"#,
        &["Backend.SourceGuard:", "\"all\"", "off, inner, peers, strict"],
    );
}

#[test]
fn kubernetes_ignores_size_and_range() {
    let text = r#"{"Network":"10.50.0.0/30","SubnetLen":99,"SubnetMin":"1.2.3.4"}"#;
    let config = NetworkConfig::parse(text.as_bytes(), Source::Kubernetes).unwrap();
    assert_eq!(config.ipv4.unwrap().to_string(), "10.50.0.0/30");
    assert_eq!(config.ipv4_pool, None);
}

proptest::proptest! {
    #[test]
    fn no_text_panics(text in "\\PC{0,60}") {
        let _ = parse(&text);
    }

    #[test]
    fn a_pool_lies_inside_its_network(
        addr: u32, len in 1u8..=32, subnet_len in 0u64..=33,
        min: Option<u32>, max: Option<u32>,
    ) {
        let network = Ipv4Net::new(addr.into(), len).unwrap().trunc();
        let inside = |bits: u32| std::net::Ipv4Addr::from_bits(
            network.network().to_bits() | (bits & network.hostmask().to_bits()));
        if let Ok(pool) = Ipv4Pool::derive(network, subnet_len, min.map(inside), max.map(inside)) {
            proptest::prop_assert!(pool.first() <= pool.last());
            for end in [pool.first(), pool.last()] {
                let subnet = Ipv4Net::new(end, pool.subnet_len()).unwrap();
                proptest::prop_assert!(network.contains(&subnet));
                proptest::prop_assert!(pool.contains(subnet));
            }
        }
    }

    #[test]
    fn an_ipv6_pool_lies_inside_its_network(addr: u128, len in 1u8..=128, subnet_len in 0u64..=129) {
        let network = Ipv6Net::new(addr.into(), len).unwrap().trunc();
        if let Ok(pool) = Ipv6Pool::derive(network, subnet_len, None, None) {
            for end in [pool.first(), pool.last()] {
                let subnet = Ipv6Net::new(end, pool.subnet_len()).unwrap();
                proptest::prop_assert!(network.contains(&subnet));
                proptest::prop_assert!(pool.contains(subnet));
            }
        }
    }
}
