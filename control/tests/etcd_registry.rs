//! The etcd registry against a real etcd server: keys, values, renewal, reservations, races.

mod support;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use etcd_client::GetOptions;
use felt_control::lease::{Event, LeaseAttrs, SubnetKey, WatchResult};
use felt_control::subnet::etcd::{EtcdConfig, EtcdManager};
use felt_control::subnet::term::Term;
use felt_control::subnet::{AcquireError, ConfigError, SubnetManager};
use tokio::sync::Barrier;

use self::support::etcd::EtcdServer;
use self::support::etcd_fixture::{
    PREFIX, SECOND, acquire, attrs, config, key, manager, name, network, put, put_lease, server, stored,
    vxlan, with_term,
};
use self::support::{Keep, SOON, Watch};

#[tokio::test]
async fn missing_config_is_named_with_a_hint_and_found_when_it_appears() {
    let server = EtcdServer::start();
    let manager = manager(&server.endpoint());
    let error = manager.network_config().await.unwrap_err();
    assert!(matches!(error, ConfigError::Missing { .. }));
    let text = error.to_string();
    assert!(text.contains("/coreos.com/network/config") && text.contains("v3"), "{text}");
    let mut client = server.client().await;
    put(&mut client, "/coreos.com/network/config", "{\\\"Network\\\"").await;
    let error = manager.network_config().await.unwrap_err();
    assert!(matches!(error, ConfigError::Invalid { .. }), "{error}");
    put(&mut client, "/coreos.com/network/config", r#"{"network":"10.50.0.0/16"}"#).await;
    assert_eq!(network(&manager).await.ipv4.unwrap().to_string(), "10.50.0.0/16");
}

#[tokio::test]
async fn lease_has_flannels_key_and_value_and_survives_restarts() {
    let (server, mut client) = server().await;
    let first = manager(&server.endpoint());
    let net = network(&first).await;
    let mine = vxlan(1, "ee:25:24:46:88:02");
    let lease = first.acquire(&net, &mine, Some(key("10.50.7.0-24"))).await.unwrap();
    assert_eq!(lease.key, key("10.50.7.0-24"));
    let (value, etcd_lease, _) = stored(&mut client, &lease.key).await.unwrap();
    assert_eq!(
        value,
        r#"{"PublicIP":"198.18.0.1","PublicIPv6":null,"BackendType":"vxlan","BackendData":{"VNI":1,"VtepMAC":"ee:25:24:46:88:02"}}"#
    );
    assert_eq!(client.lease_time_to_live(etcd_lease, None).await.unwrap().granted_ttl(), 86_400);
    let left = lease.expiration.unwrap().duration_since(SystemTime::now()).unwrap();
    assert!(left > Term::DEFAULT_TTL - 10 * SECOND, "{left:?}");

    // A restart, without subnet.env or with a wrong one.
    let second = manager(&server.endpoint());
    let found = second.own_lease(&attrs(1)).await.unwrap().unwrap();
    assert_eq!((found.key, found.attrs), (lease.key, mine.clone()));
    for previous in [None, Some(key("10.50.9.0-24"))] {
        let again = second.acquire(&net, &mine, previous).await.unwrap();
        assert_eq!(again.key, lease.key);
    }
    assert_eq!(second.list().await.unwrap().len(), 1);
    assert_eq!(client.leases().await.unwrap().leases().iter().filter(|l| l.id() == etcd_lease).count(), 1);
    assert!(second.remove(&lease.key).await.unwrap());
    assert!(!second.remove(&lease.key).await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_nodes_starting_together_get_distinct_subnets_fifty_times() {
    let server = EtcdServer::start();
    let mut client = server.client().await;
    let begin = Instant::now();
    for round in 0..50 {
        let prefix = format!("/race/{round}");
        // Every fifth round in two families, where equal keys are not all there is to clash.
        let net = if round % 5 == 4 {
            r#"{"Network":"10.50.0.0/19","SubnetMin":"10.50.0.0","EnableIPv6":true,"IPv6Network":"fd00:50::/59","IPv6SubnetMin":"fd00:50::"}"#
        } else {
            r#"{"Network":"10.50.0.0/19","SubnetMin":"10.50.0.0"}"#
        };
        put(&mut client, &format!("{prefix}/config"), net).await;
        let barrier = Arc::new(Barrier::new(20));
        let tasks: Vec<_> = (0..20u8)
            .map(|n| {
                let barrier = Arc::clone(&barrier);
                let config = EtcdConfig { prefix: prefix.clone(), ..config(&server.endpoint()) };
                let manager = EtcdManager::new(config, Term::default()).unwrap();
                tokio::spawn(async move {
                    let net = network(&manager).await;
                    barrier.wait().await;
                    manager.acquire(&net, &attrs(n), None).await.unwrap().key
                })
            })
            .collect();
        let mut keys: Vec<SubnetKey> = Vec::new();
        for task in tasks {
            let key = task.await.unwrap();
            let twice = keys.iter().find(|other| other.overlaps(&key));
            assert_eq!(twice, None, "round {round}: {key} overlaps");
            keys.push(key);
        }
        let options = GetOptions::new().with_prefix().with_count_only();
        let count = client.get(format!("{prefix}/subnets/"), Some(options)).await.unwrap().count();
        assert_eq!(count, 20, "round {round}");
    }
    assert!(begin.elapsed() < Duration::from_secs(120), "{:?}", begin.elapsed());
    // No lease was granted in vain and left behind.
    assert_eq!(client.leases().await.unwrap().leases().len(), 50 * 20);
}

#[tokio::test]
async fn last_subnets_are_given_out_and_then_an_error() {
    let (server, mut client) = server().await;
    put(&mut client, &name("10.50.31.0-24"), "not json").await;
    let manager = manager(&server.endpoint());
    let net = network(&manager).await;
    let mut keys = BTreeSet::new();
    for n in 1..=30 {
        keys.insert(manager.acquire(&net, &attrs(n), None).await.unwrap().key);
    }
    assert_eq!(keys.len(), 30);
    let error = manager.acquire(&net, &attrs(99), None).await.unwrap_err();
    assert!(matches!(error, AcquireError::OutOfSubnets { leases: 30, .. }), "{error}");
    assert_eq!(stored(&mut client, &key("10.50.31.0-24")).await.unwrap().0, "not json");
}

#[tokio::test]
async fn previous_subnet_of_a_node_whose_address_changed() {
    let (server, _client) = server().await;
    let manager = manager(&server.endpoint());
    let net = network(&manager).await;
    let mac = "02:00:00:00:00:01";
    let lease = manager.acquire(&net, &vxlan(1, mac), None).await.unwrap();
    // Another node that remembers the same subnet gets another one, at once.
    let stranger = manager.acquire(&net, &vxlan(8, "02:00:00:00:00:08"), Some(lease.key)).await.unwrap();
    assert_ne!(stranger.key, lease.key);
    // The node itself, under a new address, keeps it.
    let moved = manager.acquire(&net, &vxlan(9, mac), Some(lease.key)).await.unwrap();
    assert_eq!(moved.key, lease.key);
    assert_eq!(manager.list().await.unwrap().len(), 2);
    assert_eq!(manager.own_lease(&attrs(1)).await.unwrap(), None);
}

#[tokio::test]
async fn lease_that_no_longer_fits_is_given_up() {
    let (server, mut client) = server().await;
    put_lease(&mut client, "10.99.1.0-24", 1).await;
    let manager = manager(&server.endpoint());
    let lease = acquire(&manager, 1).await;
    assert!(lease.key.to_string().starts_with("10.50."));
    assert_eq!(stored(&mut client, &key("10.99.1.0-24")).await, None);
}

#[tokio::test]
async fn reservation_is_taken_by_its_owner_only_and_stays_one() {
    let (server, mut client) = server().await;
    put(&mut client, &name("10.50.9.0-24"), r#"{"PublicIP":"198.18.0.1"}"#).await;
    let manager = with_term(&server.endpoint(), Term::new(2 * SECOND, SECOND));
    for n in 2..32 {
        assert_ne!(acquire(&manager, n).await.key, key("10.50.9.0-24"));
    }
    let lease = acquire(&manager, 1).await;
    assert_eq!((lease.key, lease.expiration), (key("10.50.9.0-24"), None));
    let before = stored(&mut client, &lease.key).await.unwrap();
    assert_eq!((before.0.as_str(), before.1), (attrs(1).encode().as_str(), 0));
    let keep = Keep::start(&manager, lease.clone());
    tokio::time::sleep(3 * SECOND).await;
    assert_eq!(stored(&mut client, &lease.key).await.unwrap(), before);
    assert_eq!(keep.state.borrow().expiration, None);
    keep.stop().await;
    // And at the next start, too.
    assert_eq!(acquire(&manager, 1).await.expiration, None);
    assert_eq!(stored(&mut client, &lease.key).await.unwrap(), before);
}

#[tokio::test]
async fn lease_made_a_reservation_while_it_is_kept_stays_one() {
    let (server, mut client) = server().await;
    let manager = with_term(&server.endpoint(), Term::new(4 * SECOND, 3 * SECOND));
    let lease = acquire(&manager, 1).await;
    let mut keep = Keep::start(&manager, lease.clone());
    put(&mut client, &name(lease.key), &attrs(1).encode()).await;
    keep.until("noticed", |state| state.expiration.is_none()).await;
    tokio::time::sleep(3 * SECOND).await;
    assert_eq!(stored(&mut client, &lease.key).await.unwrap().1, 0);
    keep.stop().await;
}

#[tokio::test]
async fn lease_is_renewed_without_touching_its_key() {
    let (server, mut client) = server().await;
    let manager = with_term(&server.endpoint(), Term::new(3 * SECOND, 2 * SECOND));
    let lease = acquire(&manager, 1).await;
    let before = stored(&mut client, &lease.key).await.unwrap();
    let mut keep = Keep::start(&manager, lease.clone());
    let end = lease.expiration.unwrap();
    keep.until("renewed for long", |state| state.expiration.is_some_and(|now| now > end + 6 * SECOND)).await;
    assert_eq!(stored(&mut client, &lease.key).await.unwrap(), before);
    assert_eq!(keep.state.borrow().failures, 0);
    keep.stop().await;
    // Nobody renews it any more.
    let begin = Instant::now();
    while stored(&mut client, &lease.key).await.is_some() {
        assert!(begin.elapsed() < SOON, "lease did not end");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn deleted_key_or_revoked_lease_is_taken_again_with_the_same_subnet() {
    let (server, mut client) = server().await;
    let manager = manager(&server.endpoint());
    let lease = acquire(&manager, 1).await;
    let keep = Keep::start(&manager, lease.clone());
    for round in 0..4 {
        let (value, etcd_lease, revision) = stored(&mut client, &lease.key).await.unwrap();
        assert_eq!(value, attrs(1).encode());
        if round % 2 == 0 {
            client.delete(name(lease.key), None).await.unwrap();
        } else {
            client.lease_revoke(etcd_lease).await.unwrap();
        }
        let begin = Instant::now();
        loop {
            match stored(&mut client, &lease.key).await {
                Some(new) if new.2 > revision => {
                    assert!(new.1 != 0 && new.1 != etcd_lease);
                    break;
                }
                _ => assert!(begin.elapsed() < SOON, "not taken again"),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    keep.stop().await;
}

#[tokio::test]
async fn subnet_held_by_another_node_ends_keep_with_its_name() {
    let (server, mut client) = server().await;
    let manager = manager(&server.endpoint());
    let lease = acquire(&manager, 1).await;
    let keep = Keep::start(&manager, lease.clone());
    put_lease(&mut client, &lease.key.to_string(), 77).await;
    let error = tokio::time::timeout(SOON, keep.task).await.unwrap().unwrap().unwrap_err().to_string();
    assert!(error.contains("198.18.0.77") && error.contains(&lease.key.to_string()), "{error}");
    // Also when the key is another one that overlaps ours.
    let lease = acquire(&manager, 2).await;
    let net = lease.key.v4.unwrap();
    let half = format!("{}-25", net.addr());
    put_lease(&mut client, &half, 78).await;
    let keep = Keep::start(&manager, lease.clone());
    client.delete(name(lease.key), None).await.unwrap();
    let error = tokio::time::timeout(SOON, keep.task).await.unwrap().unwrap().unwrap_err().to_string();
    assert!(error.contains("198.18.0.78"), "{error}");
}

#[tokio::test]
async fn changed_attributes_are_published_and_not_written_back() {
    let (server, mut client) = server().await;
    let manager = manager(&server.endpoint());
    let net = network(&manager).await;
    let lease = manager.acquire(&net, &vxlan(1, "02:00:00:00:00:01"), None).await.unwrap();
    let keep = Keep::start(&manager, lease.clone());
    let new = vxlan(1, "02:00:00:00:00:02");
    assert_eq!(manager.acquire(&net, &new, None).await.unwrap().key, lease.key);
    client.delete(name(lease.key), None).await.unwrap();
    let begin = Instant::now();
    loop {
        if let Some((value, ..)) = stored(&mut client, &lease.key).await {
            assert_eq!(value, new.encode());
            break;
        }
        assert!(begin.elapsed() < SOON, "not taken again");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // A value rewritten by somebody else is put right.
    put(&mut client, &name(lease.key), "nonsense").await;
    let begin = Instant::now();
    while stored(&mut client, &lease.key).await.unwrap().0 != new.encode() {
        assert!(begin.elapsed() < SOON, "not repaired");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    keep.stop().await;
}

#[tokio::test]
async fn watch_reports_what_changes_and_ignores_what_is_no_lease() {
    let (server, mut client) = server().await;
    put_lease(&mut client, "10.50.1.0-24", 1).await;
    put(&mut client, &name("foo"), "bar").await;
    put(&mut client, &name("10.50.2.0-24"), "{broken").await;
    let manager = manager(&server.endpoint());
    let mut watch = Watch::start(&manager);
    let WatchResult::Snapshot(leases) = watch.next().await else { panic!("no snapshot") };
    assert_eq!(leases.iter().map(|lease| lease.key).collect::<Vec<_>>(), [key("10.50.1.0-24")]);

    // What the reference takes for "everything is gone".
    put(&mut client, &name("foo"), "baz").await;
    client.delete(name("foo"), None).await.unwrap();
    put(&mut client, &name("10.50.1.0-24"), "{broken, too").await;
    put(&mut client, &name("10.50.3.0-24"), r#"{"PublicIP":"not-an-ip"}"#).await;
    put_lease(&mut client, "10.50.4.0-24", 4).await;
    let Event::Added(added) = watch.event().await else { panic!("not added") };
    assert_eq!((added.key, added.attrs), (key("10.50.4.0-24"), attrs(4)));
    assert!(added.expiration.is_some());

    put(&mut client, &name("10.50.3.0-24"), &attrs(3).encode()).await;
    let Event::Added(added) = watch.event().await else { panic!("not added") };
    assert_eq!((added.key, added.expiration), (key("10.50.3.0-24"), None));
    client.delete(name("10.50.4.0-24"), None).await.unwrap();
    let Event::Removed(removed) = watch.event().await else { panic!("not removed") };
    assert_eq!((removed.key, removed.attrs), (key("10.50.4.0-24"), attrs(4)));
    watch.cancel.cancel();
    assert_eq!(tokio::time::timeout(SOON, watch.rx.recv()).await.unwrap(), None);
}

#[tokio::test]
async fn network_without_ipv4_has_keys_of_its_own_form() {
    let (server, mut client) = server().await;
    let text = r#"{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00:50::/56"}"#;
    put(&mut client, &format!("{PREFIX}/config"), text).await;
    let manager = manager(&server.endpoint());
    let net = network(&manager).await;
    let six = |n: u16| LeaseAttrs {
        public_ipv6: Some([0xfd77, 0, 0, 0, 0, 0, 0, n].into()),
        ..LeaseAttrs::default()
    };
    let one = manager.acquire(&net, &six(1), None).await.unwrap();
    let two = manager.acquire(&net, &six(2), None).await.unwrap();
    assert!(one.key.to_string().starts_with("0.0.0.0-0&fd00:50:0:"), "{}", one.key);
    assert!(!one.key.overlaps(&two.key));
    let value = stored(&mut client, &one.key).await.unwrap().0;
    assert_eq!(value, r#"{"PublicIP":"0.0.0.0","PublicIPv6":"fd77::1"}"#);
    assert_eq!(manager.acquire(&net, &six(1), None).await.unwrap().key, one.key);
}

#[tokio::test]
async fn five_thousand_leases_are_read_fast_and_bursts_of_changes_followed() {
    let (server, mut client) = server().await;
    let key = |n: u32| format!("10.{}.{}.0-24", 60 + n / 250, n % 250);
    for first in (0..5000).step_by(100) {
        let puts: Vec<_> = (first..first + 100)
            .map(|n| etcd_client::TxnOp::put(name(key(n)), attrs((n % 250) as u8).encode(), None))
            .collect();
        client.txn(etcd_client::Txn::new().and_then(puts)).await.unwrap();
    }
    let manager = manager(&server.endpoint());
    let begin = Instant::now();
    let mut watch = Watch::start(&manager);
    let WatchResult::Snapshot(leases) = watch.next().await else { panic!("no snapshot") };
    assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
    assert_eq!(leases.iter().map(|lease| lease.key).collect::<BTreeSet<_>>().len(), 5000);
    assert_eq!(manager.list().await.unwrap().len(), 5000);

    let changes: Vec<_> =
        (0..1000u32).map(|n| (name(key(n)), attrs(((n + 7) % 250) as u8).encode())).collect();
    let writer = tokio::spawn(async move {
        for chunk in changes.chunks(20) {
            let puts: Vec<_> = chunk
                .iter()
                .map(|(key, value)| etcd_client::TxnOp::put(key.as_str(), value.as_str(), None))
                .collect();
            client.txn(etcd_client::Txn::new().and_then(puts)).await.unwrap();
        }
    });
    let mut seen = BTreeSet::new();
    while seen.len() < 1000 {
        let WatchResult::Events(events) = watch.next().await else { panic!("lost the thread") };
        for event in events {
            let Event::Added(lease) = event else { panic!("not added") };
            seen.insert(lease.key);
        }
    }
    writer.await.unwrap();
}

#[tokio::test]
async fn a_dual_stack_lease_has_flannels_key_and_value_and_is_found_again() {
    let (server, mut client) = server().await;
    let text = r#"{"Network":"10.7.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:7::/48","Backend":{"Type":"vxlan","VNI":7}}"#;
    put(&mut client, &format!("{PREFIX}/config"), text).await;
    let manager = manager(&server.endpoint());
    let net = network(&manager).await;
    let data = |mac: &str| {
        Some(serde_json::value::RawValue::from_string(format!(r#"{{"VNI":7,"VtepMAC":"{mac}"}}"#)).unwrap())
    };
    let mine = LeaseAttrs {
        public_ipv6: Some("fd77::2".parse().unwrap()),
        backend_data: data("da:26:38:ca:3c:97"),
        backend_v6_data: data("72:ce:dc:28:82:8e"),
        ..vxlan(2, "da:26:38:ca:3c:97")
    };
    let previous = key("10.7.52.0-24&fd00:7:0:58::-64");
    let lease = manager.acquire(&net, &mine, Some(previous)).await.unwrap();
    assert_eq!(lease.key, previous);
    let name = "/coreos.com/network/subnets/10.7.52.0-24&fd00:7:0:58::-64";
    let answer = client.get(name, None).await.unwrap();
    assert_eq!(
        answer.kvs()[0].value_str().unwrap(),
        r#"{"PublicIP":"198.18.0.2","PublicIPv6":"fd77::2","BackendType":"vxlan","BackendData":{"VNI":7,"VtepMAC":"da:26:38:ca:3c:97"},"BackendV6Data":{"VNI":7,"VtepMAC":"72:ce:dc:28:82:8e"}}"#
    );
    assert_eq!(manager.acquire(&net, &mine, None).await.unwrap().key, previous);
    // Neither family of it goes to another node, and a watch tells both.
    let mut watch = Watch::start(&manager);
    assert!(matches!(watch.next().await, WatchResult::Snapshot(leases) if leases[0].attrs == mine));
    let other = manager.acquire(&net, &attrs(3), Some(previous)).await.unwrap();
    assert!(!other.key.overlaps(&previous), "{}", other.key);
}

#[tokio::test]
async fn a_family_switched_on_keeps_the_subnet_of_the_other() {
    let (server, mut client) = server().await;
    let manager = manager(&server.endpoint());
    let four = acquire(&manager, 1).await;
    let text = r#"{"Network":"10.50.0.0/19","EnableIPv6":true,"IPv6Network":"fd00:50::/56"}"#;
    put(&mut client, &format!("{PREFIX}/config"), text).await;
    let net = network(&manager).await;
    let dual = LeaseAttrs { public_ipv6: Some("fd77::1".parse().unwrap()), ..attrs(1) };
    let lease = manager.acquire(&net, &dual, Some(four.key)).await.unwrap();
    assert_eq!(lease.key.v4, four.key.v4);
    assert!(lease.key.v6.is_some());
    assert_eq!(stored(&mut client, &four.key).await, None, "the old key is gone");
    // And back.
    put(&mut client, &format!("{PREFIX}/config"), r#"{"Network":"10.50.0.0/19"}"#).await;
    assert_eq!(acquire(&manager, 1).await.key, four.key);
    assert_eq!(manager.list().await.unwrap().len(), 1);
}
