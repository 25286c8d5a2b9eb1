//! The etcd registry against a real etcd server.

mod support;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use etcd_client::{Client, GetOptions, Permission, PermissionType, PutOptions};
use felt_control::lease::{Event, Lease, LeaseAttrs, SubnetKey, WatchResult};
use felt_control::netconfig::NetworkConfig;
use felt_control::subnet::etcd::{EtcdConfig, EtcdManager};
use felt_control::subnet::term::Term;
use felt_control::subnet::{AcquireError, ConfigError, SubnetManager};
use serde_json::value::RawValue;
use tokio::sync::Barrier;

use self::support::certs::Certs;
use self::support::etcd::{EtcdServer, Tls};
use self::support::proxy::Proxy;
use self::support::{Keep, SOON, Watch};

const SECOND: Duration = Duration::from_secs(1);
const PREFIX: &str = "/coreos.com/network";

fn config(endpoint: &str) -> EtcdConfig {
    EtcdConfig {
        endpoints: vec![endpoint.to_owned()],
        prefix: PREFIX.to_owned(),
        cafile: None,
        certfile: None,
        keyfile: None,
        user: None,
    }
}

fn manager(endpoint: &str) -> EtcdManager {
    with_term(endpoint, Term::default())
}

fn with_term(endpoint: &str, term: Term) -> EtcdManager {
    EtcdManager::new(config(endpoint), term).unwrap()
}

fn key(text: &str) -> SubnetKey {
    text.parse().unwrap()
}

fn name(key: impl std::fmt::Display) -> String {
    format!("{PREFIX}/subnets/{key}")
}

fn attrs(n: u8) -> LeaseAttrs {
    LeaseAttrs { public_ip: Some([198, 18, 0, n].into()), ..LeaseAttrs::default() }
}

fn vxlan(n: u8, mac: &str) -> LeaseAttrs {
    let data = format!(r#"{{"VNI":1,"VtepMAC":"{mac}"}}"#);
    LeaseAttrs {
        backend_type: "vxlan".to_owned(),
        backend_data: Some(RawValue::from_string(data).unwrap()),
        ..attrs(n)
    }
}

/// A server with a configuration of 31 leasable /24 subnets.
async fn server() -> (EtcdServer, Client) {
    let server = EtcdServer::start();
    let mut client = server.client().await;
    put(&mut client, &format!("{PREFIX}/config"), r#"{"Network":"10.50.0.0/19"}"#).await;
    (server, client)
}

async fn put(client: &mut Client, name: &str, value: &str) {
    client.put(name, value, None).await.unwrap();
}

/// Puts a lease of another node, as flannel does it.
async fn put_lease(client: &mut Client, key: &str, n: u8) {
    let granted = client.lease_grant(86_400, None).await.unwrap().id();
    let options = PutOptions::new().with_lease(granted);
    client.put(name(key), attrs(n).encode(), Some(options)).await.unwrap();
}

/// Value, etcd lease and mod revision of a lease key.
async fn stored(client: &mut Client, key: &SubnetKey) -> Option<(String, i64, i64)> {
    let answer = client.get(name(key), None).await.unwrap();
    let kv = answer.kvs().first()?;
    Some((kv.value_str().unwrap().to_owned(), kv.lease(), kv.mod_revision()))
}

async fn network(manager: &EtcdManager) -> NetworkConfig {
    manager.network_config().await.unwrap()
}

async fn acquire(manager: &EtcdManager, n: u8) -> Lease {
    manager.acquire(&network(manager).await, &attrs(n), None).await.unwrap()
}

/// Waits for the next result that satisfies `test`, passing over others.
async fn reported(watch: &mut Watch, what: &str, test: impl Fn(&WatchResult) -> bool) {
    let begin = Instant::now();
    while !test(&watch.next().await) {
        assert!(begin.elapsed() < SOON, "never reported: {what}");
    }
}

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
async fn history_compacted_while_away_is_made_up_for() {
    let (server, mut client) = server().await;
    put_lease(&mut client, "10.50.1.0-24", 1).await;
    put_lease(&mut client, "10.50.2.0-24", 2).await;
    let proxy = Proxy::start(server.port()).await;
    let manager = manager(&proxy.endpoint());
    let own = acquire(&manager, 9).await;
    let keep = Keep::start(&manager, own.clone());
    let mut watch = Watch::start(&manager);
    assert!(matches!(watch.next().await, WatchResult::Snapshot(leases) if leases.len() == 3));

    proxy.cut();
    client.delete(name("10.50.1.0-24"), None).await.unwrap();
    client.delete(name(own.key), None).await.unwrap();
    for n in 0..1000u32 {
        put(&mut client, &name(format!("10.50.3.{}-30", n % 4 * 4)), &attrs((n % 200) as u8).encode()).await;
    }
    let revision = client.get("x", None).await.unwrap().header().unwrap().revision();
    client.compact(revision, None).await.unwrap();
    proxy.mend();
    let begin = Instant::now();
    let WatchResult::Snapshot(leases) = watch.next().await else { panic!("no snapshot") };
    assert!(begin.elapsed() < Duration::from_secs(6), "{:?}", begin.elapsed());
    let keys: Vec<_> = leases.iter().map(|lease| lease.key).collect();
    assert!(!keys.contains(&key("10.50.1.0-24")) && keys.contains(&key("10.50.2.0-24")), "{keys:?}");
    // The own lease, deleted meanwhile, is back under the same key.
    let is_back = |event: &Event| matches!(event, Event::Added(lease) if lease.key == own.key);
    if !keys.contains(&own.key) {
        reported(&mut watch, "own lease", |result| match result {
            WatchResult::Events(events) => events.iter().any(is_back),
            WatchResult::Snapshot(_) => false,
        })
        .await;
    }
    keep.stop().await;
}

#[tokio::test]
async fn outage_longer_than_the_term_ends_with_the_same_subnet() {
    let (server, mut client) = server().await;
    put_lease(&mut client, "10.50.1.0-24", 1).await;
    let proxy = Proxy::start(server.port()).await;
    let manager = with_term(&proxy.endpoint(), Term::new(3 * SECOND, 2 * SECOND));
    let own = acquire(&manager, 9).await;
    let mut keep = Keep::start(&manager, own.clone());
    let mut watch = Watch::start(&manager);
    assert!(matches!(watch.next().await, WatchResult::Snapshot(_)));

    proxy.cut();
    let begin = Instant::now();
    while stored(&mut client, &own.key).await.is_some() {
        assert!(begin.elapsed() < SOON, "lease did not end");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    keep.until("in trouble", |state| state.failures > 0 && state.last_error.is_some()).await;
    put_lease(&mut client, "10.50.1.0-24", 11).await;
    proxy.mend();
    keep.until("held again", |state| {
        state.failures == 0 && state.expiration.is_some_and(|end| end > SystemTime::now())
    })
    .await;
    assert_eq!(stored(&mut client, &own.key).await.unwrap().0, attrs(9).encode());
    reported(&mut watch, "the peer's new address", |result| match result {
        WatchResult::Events(events) => {
            events.iter().any(|event| matches!(event, Event::Added(lease) if lease.attrs == attrs(11)))
        }
        WatchResult::Snapshot(leases) => leases.iter().any(|lease| lease.attrs == attrs(11)),
    })
    .await;
    keep.stop().await;
}

#[tokio::test]
async fn server_killed_and_started_again_is_found_again() {
    let (mut server, mut client) = server().await;
    let manager = manager(&server.endpoint());
    let own = acquire(&manager, 9).await;
    let mut keep = Keep::start(&manager, own.clone());
    let mut watch = Watch::start(&manager);
    assert!(matches!(watch.next().await, WatchResult::Snapshot(_)));
    server.stop();
    keep.until("in trouble", |state| state.failures > 0).await;
    let begin = Instant::now();
    manager.list().await.unwrap_err();
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    server.start_again();
    keep.until("held again", |state| state.failures == 0).await;
    client = {
        drop(client);
        server.client().await
    };
    put_lease(&mut client, "10.50.1.0-24", 1).await;
    reported(&mut watch, "the new lease", |result| match result {
        WatchResult::Events(events) => {
            events.iter().any(|event| matches!(event, Event::Added(lease) if lease.attrs == attrs(1)))
        }
        WatchResult::Snapshot(leases) => leases.iter().any(|lease| lease.attrs == attrs(1)),
    })
    .await;
    assert_eq!(stored(&mut client, &own.key).await.unwrap().0, attrs(9).encode());
    keep.stop().await;
}

#[tokio::test]
async fn silent_server_does_not_block_for_ever() {
    let (server, _client) = server().await;
    let manager = manager(&server.endpoint());
    let net = network(&manager).await;
    server.pause();
    let begin = Instant::now();
    let error = manager.acquire(&net, &attrs(1), None).await.unwrap_err();
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    assert!(matches!(error, AcquireError::Registry(_)), "{error}");
    server.resume();
    acquire(&manager, 1).await;
}

#[tokio::test]
async fn members_and_leaders_may_come_and_go() {
    let mut members = EtcdServer::start_cluster();
    let mut client = members[0].client().await;
    put(&mut client, &format!("{PREFIX}/config"), r#"{"Network":"10.50.0.0/19"}"#).await;
    let list: Vec<String> = members.iter().map(EtcdServer::endpoint).collect();
    let manager = manager(&list.join(","));
    let own = acquire(&manager, 9).await;
    let mut keep = Keep::start(&manager, own.clone());
    let mut watch = Watch::start(&manager);
    assert!(matches!(watch.next().await, WatchResult::Snapshot(_)));
    let is_lease = |result: &WatchResult, n: u8| match result {
        WatchResult::Events(events) => {
            events.iter().any(|event| matches!(event, Event::Added(lease) if lease.attrs == attrs(n)))
        }
        WatchResult::Snapshot(leases) => leases.iter().any(|lease| lease.attrs == attrs(n)),
    };
    // One after the other goes and comes back, the leader among them and the one in use.
    for n in 0..3u8 {
        members[usize::from(n)].stop();
        let mut client = members[usize::from((n + 1) % 3)].client().await;
        let begin = Instant::now();
        while client.put(name(format!("10.50.{n}.0-24")), attrs(n).encode(), None).await.is_err() {
            assert!(begin.elapsed() < SOON, "no leader");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        reported(&mut watch, "a lease", |result| is_lease(result, n)).await;
        members[usize::from(n)].start_again();
    }
    // Two of three: nobody leads, and the one that is left must say so.
    members[0].stop();
    members[1].stop();
    keep.until("in trouble", |state| state.failures > 0).await;
    manager.list().await.unwrap_err();
    EtcdServer::start_all_again(&mut members[..2]);
    keep.until("held again", |state| state.failures == 0).await;
    let mut client = members[2].client().await;
    let begin = Instant::now();
    while client.put(name("10.50.20.0-24"), attrs(20).encode(), None).await.is_err() {
        assert!(begin.elapsed() < SOON, "no leader");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    reported(&mut watch, "a lease", |result| is_lease(result, 20)).await;
    keep.stop().await;
}

#[tokio::test]
async fn restored_cluster_with_a_younger_history_is_read_anew() {
    let (server, mut client) = server().await;
    for n in 1..20 {
        put_lease(&mut client, &format!("10.50.{n}.0-24"), n).await;
    }
    let (other, mut other_client) = self::server().await;
    put_lease(&mut other_client, "10.50.30.0-24", 30).await;
    let (one, two) = (Proxy::start(server.port()).await, Proxy::start(other.port()).await);
    two.cut();
    let both = format!("{},{}", one.endpoint(), two.endpoint());
    let manager = manager(&both);
    let mut watch = Watch::start(&manager);
    assert!(matches!(watch.next().await, WatchResult::Snapshot(leases) if leases.len() == 19));
    two.mend();
    one.cut();
    let WatchResult::Snapshot(leases) = watch.next().await else { panic!("no snapshot") };
    assert_eq!(leases.iter().map(|lease| lease.key).collect::<Vec<_>>(), [key("10.50.30.0-24")]);
}

#[tokio::test]
async fn dead_silent_and_foreign_endpoints_are_passed_over() {
    let (server, _client) = server().await;
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    // Accepts by its backlog and never answers.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let foreign = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let foreign_addr = foreign.local_addr().unwrap();
    let thread = std::thread::spawn(move || {
        use std::io::Write;
        while let Ok((mut stream, _)) = foreign.accept() {
            if stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").is_err() {
                return;
            }
            let mut bytes = [0; 1];
            if std::io::Read::read(&mut stream, &mut bytes).is_ok_and(|n| n == 1 && bytes[0] == b'q') {
                return;
            }
        }
    });
    let list = format!(
        " http://{closed} , http://{},http://{foreign_addr} ,, {} ,",
        silent.local_addr().unwrap(),
        server.endpoint()
    );
    for _ in 0..4 {
        // Less than it takes to give one up: they are tried side by side.
        let begin = Instant::now();
        acquire(&manager(&list), 1).await;
        assert!(begin.elapsed() < Duration::from_millis(3900), "{:?}", begin.elapsed());
    }
    let bad = format!("http://{closed},http://{foreign_addr}");
    let error = manager(&bad).list().await.unwrap_err().to_string();
    assert!(error.contains(&closed.to_string()) && error.contains(&foreign_addr.to_string()), "{error}");
    assert!(error.contains("refused"), "{error}");
    let mut quit = std::net::TcpStream::connect(foreign_addr).unwrap();
    std::io::Write::write_all(&mut quit, b"q").unwrap();
    thread.join().unwrap();
}

#[tokio::test]
async fn tls_works_with_an_authority_alone_and_with_a_client_certificate() {
    let certs = Certs::get();
    for client_certs in [false, true] {
        let server = EtcdServer::start_with(Some(Tls { certs, client_certs }));
        let plain = EtcdConfig { cafile: Some(certs.path("ca.pem")), ..config(&server.endpoint()) };
        let full = EtcdConfig {
            certfile: Some(certs.path("client.pem")),
            keyfile: Some(certs.path("client.key")),
            ..plain.clone()
        };
        let good = EtcdManager::new(if client_certs { full.clone() } else { plain.clone() }, Term::default());
        let error = good.unwrap().network_config().await.unwrap_err();
        assert!(matches!(error, ConfigError::Missing { .. }), "{error}");

        let stranger = EtcdConfig { cafile: Some(certs.path("other-ca.pem")), ..full.clone() };
        let manager = EtcdManager::new(stranger, Term::default()).unwrap();
        let error = manager.network_config().await.unwrap_err().to_string();
        assert!(error.contains("certificate"), "{error}");
        let absent = EtcdConfig { cafile: Some(certs.path("absent.pem")), ..full };
        let manager = EtcdManager::new(absent, Term::default()).unwrap();
        let error = manager.network_config().await.unwrap_err().to_string();
        assert!(error.contains("absent.pem"), "{error}");
        if client_certs {
            let manager = EtcdManager::new(plain, Term::default()).unwrap();
            let error = manager.network_config().await.unwrap_err();
            assert!(matches!(error, ConfigError::Registry(_)), "{error}");
        }
    }
}

#[tokio::test]
async fn users_are_authenticated_and_new_tokens_fetched() {
    let (mut server, mut client) = server().await;
    let rw = Permission::new(PermissionType::Readwrite, PREFIX).with_prefix();
    client.user_add("root", "rootpw", None).await.unwrap();
    client.user_grant_role("root", "root").await.unwrap();
    client.role_add("felt").await.unwrap();
    client.role_grant_permission("felt", rw).await.unwrap();
    client.user_add("felt", "s3cret", None).await.unwrap();
    client.user_grant_role("felt", "felt").await.unwrap();
    client.auth_enable().await.unwrap();

    let as_user = |password: &str| {
        let user = Some(("felt".to_owned(), password.to_owned()));
        EtcdManager::new(EtcdConfig { user, ..config(&server.endpoint()) }, Term::new(4 * SECOND, 3 * SECOND))
            .unwrap()
    };
    let manager = as_user("s3cret");
    let lease = acquire(&manager, 1).await;
    let mut keep = Keep::start(&manager, lease.clone());
    let mut watch = Watch::start(&manager);
    assert!(matches!(watch.next().await, WatchResult::Snapshot(leases) if leases.len() == 1));
    for config in [as_user("wrong"), self::manager(&server.endpoint())] {
        let error = config.network_config().await.unwrap_err().to_string();
        assert!(error.contains("authentication") || error.contains("user name is empty"), "{error}");
        assert!(!error.contains("wrong"), "{error}");
    }

    // The server forgets its tokens.
    server.stop();
    keep.until("in trouble", |state| state.failures > 0).await;
    server.start_again();
    keep.until("held again", |state| state.failures == 0).await;
    let other = acquire(&manager, 2).await;
    reported(&mut watch, "the new lease", |result| match result {
        WatchResult::Events(events) => {
            events.iter().any(|event| matches!(event, Event::Added(lease) if lease.key == other.key))
        }
        WatchResult::Snapshot(leases) => leases.iter().any(|lease| lease.key == other.key),
    })
    .await;
    assert!(manager.list().await.unwrap().iter().any(|found| found.key == lease.key));
    keep.stop().await;
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
