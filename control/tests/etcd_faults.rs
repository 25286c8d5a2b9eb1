//! The etcd registry when servers die, hang, are restored, want certificates or passwords, or forget their history.

mod support;

use std::time::{Duration, Instant, SystemTime};

use etcd_client::{Permission, PermissionType};
use felt_control::lease::{Event, WatchResult};
use felt_control::subnet::etcd::{EtcdConfig, EtcdManager};
use felt_control::subnet::term::Term;
use felt_control::subnet::{AcquireError, ConfigError, SubnetManager};

use self::support::certs::Certs;
use self::support::etcd::{EtcdServer, Tls};
use self::support::etcd_fixture::{
    PREFIX, SECOND, acquire, attrs, config, key, manager, name, network, put, put_lease, reported, server,
    stored, with_term,
};
use self::support::proxy::Proxy;
use self::support::{Keep, SOON, Watch};

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
async fn a_renewal_that_was_blocked_is_made_at_once_afterwards() {
    let (server, mut client) = server().await;
    let proxy = Proxy::start(server.port()).await;
    // Renewed 2 s after the beginning, with 6 s to go.
    let manager = with_term(&proxy.endpoint(), Term::new(8 * SECOND, 6 * SECOND));
    let lease = acquire(&manager, 1).await;
    let mut keep = Keep::start(&manager, lease.clone());
    let before = stored(&mut client, &lease.key).await.unwrap();
    tokio::time::sleep(SECOND).await;
    proxy.cut();
    tokio::time::sleep(3 * SECOND).await;
    let (failures, end) = (keep.state.borrow().failures, keep.state.borrow().expiration.unwrap());
    assert!(failures > 0, "the blockade was noticed");
    // The server tells whole seconds.
    assert!(end < lease.expiration.unwrap() + SECOND, "not renewed meanwhile");
    proxy.mend();
    let begin = Instant::now();
    keep.until("renewed", |state| {
        state.failures == 0 && state.expiration.is_some_and(|now| now > end + SECOND)
    })
    .await;
    assert!(begin.elapsed() < 5 * SECOND, "{:?}", begin.elapsed());
    assert_eq!(stored(&mut client, &lease.key).await.unwrap(), before, "neither lost nor written again");
    keep.stop().await;
}

#[tokio::test]
async fn a_server_that_stops_answering_is_noticed_while_waiting_for_changes() {
    let (server, _client) = server().await;
    let manager = manager(&server.endpoint());
    let lease = acquire(&manager, 1).await;
    let mut keep = Keep::start(&manager, lease);
    keep.until("kept", |state| state.renewed_at.is_some()).await;
    // Not until the first look is over does it wait for nothing but a change.
    tokio::time::sleep(SECOND).await;
    server.pause();
    let begin = Instant::now();
    tokio::time::timeout(30 * SECOND, keep.state.wait_for(|state| state.failures > 0))
        .await
        .unwrap()
        .unwrap();
    assert!(begin.elapsed() < 25 * SECOND, "{:?}", begin.elapsed());
    server.resume();
    keep.until("kept again", |state| state.failures == 0).await;
    keep.stop().await;
}

#[tokio::test]
async fn certificates_are_read_again_at_every_connection() {
    let certs = Certs::get();
    let dir = tempfile::TempDir::new().unwrap();
    let path = |name: &str| dir.path().join(name);
    for (from, to) in [("ca.pem", "ca.pem"), ("client.pem", "cert.pem"), ("client.key", "key.pem")] {
        std::fs::copy(certs.path(from), path(to)).unwrap();
    }
    let mut server = EtcdServer::start_with(Some(Tls { certs, client_certs: true }));
    let config = EtcdConfig {
        cafile: Some(path("ca.pem")),
        certfile: Some(path("cert.pem")),
        keyfile: Some(path("key.pem")),
        ..config(&server.endpoint())
    };
    let manager = EtcdManager::new(config, Term::default()).unwrap();
    assert!(manager.list().await.unwrap().is_empty());
    // A half-written certificate is an error that names it; a whole one is used without a restart.
    server.stop();
    std::fs::write(path("cert.pem"), "").unwrap();
    server.start_again();
    manager.list().await.unwrap_err();
    std::fs::copy(certs.path("client.pem"), path("cert.pem")).unwrap();
    assert!(manager.list().await.unwrap().is_empty());
}
