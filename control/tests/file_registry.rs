//! The file registry as daemons use it: several managers on one directory.

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use felt_control::lease::{Event, Lease, LeaseAttrs, SubnetKey, WatchResult};
use felt_control::netconfig::NetworkConfig;
use felt_control::subnet::file::FileManager;
use felt_control::subnet::term::Term;
use felt_control::subnet::{AcquireError, ConfigError, SubnetManager};
use tokio::sync::Barrier;

use self::support::{Keep, SOON, Watch, eventually};

const SECOND: Duration = Duration::from_secs(1);

/// A registry directory with a network of 31 leasable /24 subnets.
fn registry() -> tempfile::TempDir {
    let temp = tempfile::tempdir().unwrap();
    fs::write(temp.path().join("config"), r#"{"Network":"10.50.0.0/19"}"#).unwrap();
    temp
}

fn manager(root: &Path) -> FileManager {
    FileManager::new(root, Term::default())
}

fn attrs(n: u8) -> LeaseAttrs {
    LeaseAttrs { public_ip: Some([198, 18, 0, n].into()), ..LeaseAttrs::default() }
}

fn key(text: &str) -> SubnetKey {
    text.parse().unwrap()
}

fn path(root: &Path, key: &str) -> std::path::PathBuf {
    root.join("subnets").join(key)
}

fn put(root: &Path, key: &str, text: &str) {
    fs::create_dir_all(root.join("subnets")).unwrap();
    fs::write(path(root, key), text).unwrap();
}

async fn acquire(manager: &FileManager, n: u8) -> Lease {
    let net = manager.network_config().await.unwrap();
    manager.acquire(&net, &attrs(n), None).await.unwrap()
}

#[tokio::test]
async fn config_problems_name_the_file() {
    let temp = tempfile::tempdir().unwrap();
    let manager = manager(temp.path());
    let config = temp.path().join("config");
    let error = manager.network_config().await.unwrap_err();
    assert!(matches!(error, ConfigError::Missing { .. }), "{error}");
    for content in ["", "null", "{", r#"{"Network":"10.50.0.0/29"}"#] {
        fs::write(&config, content).unwrap();
        let error = manager.network_config().await.unwrap_err();
        assert!(matches!(error, ConfigError::Invalid { .. }), "{content}: {error}");
        assert!(error.to_string().contains(config.to_str().unwrap()), "{error}");
    }
    fs::remove_file(&config).unwrap();
    fs::create_dir(&config).unwrap();
    let error = manager.network_config().await.unwrap_err().to_string();
    assert!(error.contains("config") && error.contains("directory"), "{error}");
}

#[tokio::test]
async fn lease_is_a_file_with_flannels_value() {
    let temp = registry();
    let manager = manager(temp.path());
    let net = manager.network_config().await.unwrap();
    let lease = manager.acquire(&net, &attrs(1), Some(key("10.50.7.0-24"))).await.unwrap();
    assert_eq!(lease.key, key("10.50.7.0-24"));
    let text = fs::read_to_string(path(temp.path(), "10.50.7.0-24")).unwrap();
    let start = r#"{"PublicIP":"198.18.0.1","PublicIPv6":null,"Expiration":""#;
    assert!(text.starts_with(start), "{text}");
    let left = lease.expiration.unwrap().duration_since(SystemTime::now()).unwrap();
    assert!(left > Term::DEFAULT_TTL - 5 * SECOND && left <= Term::DEFAULT_TTL);
    // A restart finds it, whatever subnet.env says.
    let again = manager.acquire(&net, &attrs(1), Some(key("10.50.9.0-24"))).await.unwrap();
    assert_eq!(again.key, lease.key);
    assert_eq!(manager.own_lease(&attrs(1)).await.unwrap().unwrap().key, lease.key);
    assert_eq!(manager.list().await.unwrap().len(), 1);
    assert!(manager.remove(&lease.key).await.unwrap());
    assert!(!manager.remove(&lease.key).await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_starting_together_get_distinct_subnets() {
    for dual in [false, true] {
        let temp = tempfile::tempdir().unwrap();
        let config = if dual {
            r#"{"Network":"10.50.0.0/19","SubnetMin":"10.50.0.0","EnableIPv6":true,"IPv6Network":"fd00:50::/59","IPv6SubnetMin":"fd00:50::"}"#
        } else {
            r#"{"Network":"10.50.0.0/19","SubnetMin":"10.50.0.0"}"#
        };
        let net = NetworkConfig::parse(config.as_bytes(), felt_control::netconfig::Source::Registry).unwrap();
        let barrier = Arc::new(Barrier::new(32));
        let tasks: Vec<_> = (0..32u8)
            .map(|n| {
                let (barrier, net) = (Arc::clone(&barrier), net.clone());
                let manager = manager(temp.path());
                tokio::spawn(async move {
                    barrier.wait().await;
                    manager.acquire(&net, &attrs(n), None).await.unwrap().key
                })
            })
            .collect();
        let mut keys: Vec<SubnetKey> = Vec::new();
        for task in tasks {
            let key = task.await.unwrap();
            assert!(!keys.iter().any(|other| other.overlaps(&key)), "{key} was given twice");
            keys.push(key);
        }
        let error = manager(temp.path()).acquire(&net, &attrs(99), None).await.unwrap_err();
        assert!(matches!(error, AcquireError::OutOfSubnets { leases: 32, .. }), "{error}");
        assert_eq!(fs::read_dir(temp.path().join("subnets")).unwrap().count(), 32);
    }
}

#[tokio::test]
async fn watch_reports_what_changes() {
    let temp = registry();
    let (one, two) = (manager(temp.path()), manager(temp.path()));
    let mut watch = Watch::start(&one);
    assert_eq!(watch.next().await, WatchResult::Snapshot(vec![]));

    let lease = acquire(&two, 2).await;
    let Event::Added(added) = watch.event().await else { panic!("not added") };
    assert_eq!((added.key, &added.attrs), (lease.key, &lease.attrs));

    // By hand, as configuration management does it, and not atomically.
    put(temp.path(), "10.50.9.0-24", r#"{"PublicIP":"198.18.0.9"}"#);
    let Event::Added(added) = watch.event().await else { panic!("not added") };
    assert_eq!((added.key, added.expiration), (key("10.50.9.0-24"), None));
    put(temp.path(), "10.50.9.0-24", r#"{"PublicIP":"198.18.0.7"}"#);
    let Event::Added(added) = watch.event().await else { panic!("not added") };
    assert_eq!(added.attrs, attrs(7));

    two.remove(&lease.key).await.unwrap();
    let Event::Removed(removed) = watch.event().await else { panic!("not removed") };
    assert_eq!((removed.key, removed.attrs), (lease.key, attrs(2)));
    watch.cancel.cancel();
    assert_eq!(watch.rx.recv().await, None);
}

#[tokio::test]
async fn foreign_and_broken_files_disturb_nobody() {
    let temp = registry();
    put(temp.path(), "notes.txt", "hello");
    put(temp.path(), "10.50.1.0-24", "{ broken");
    put(temp.path(), "10.50.2.0-24", r#"{"PublicIP":"198.18.0.2"}"#);
    let manager = manager(temp.path());
    let mut watch = Watch::start(&manager);
    let WatchResult::Snapshot(leases) = watch.next().await else { panic!("no snapshot") };
    assert_eq!(leases.len(), 1);
    // A known lease that becomes unreadable stays known until its file goes.
    put(temp.path(), "10.50.2.0-24", "\u{0}\u{0}");
    put(temp.path(), "more.txt", "hello");
    put(temp.path(), "10.50.3.0-24", r#"{"PublicIP":"198.18.0.3"}"#);
    let Event::Added(added) = watch.event().await else { panic!("not added") };
    assert_eq!(added.key, key("10.50.3.0-24"));
    fs::remove_file(path(temp.path(), "10.50.2.0-24")).unwrap();
    let Event::Removed(removed) = watch.event().await else { panic!("not removed") };
    assert_eq!(removed.attrs, attrs(2));
    // A broken lease still occupies its subnet.
    for n in 10..39u8 {
        assert_ne!(acquire(&manager, n).await.key, key("10.50.1.0-24"));
    }
    assert_eq!(fs::read_to_string(path(temp.path(), "10.50.1.0-24")).unwrap(), "{ broken");
}

#[tokio::test]
async fn directory_may_vanish_and_return() {
    let temp = registry();
    let manager = manager(temp.path());
    let lease = acquire(&manager, 1).await;
    let mut watch = Watch::start(&manager);
    assert!(matches!(watch.next().await, WatchResult::Snapshot(leases) if leases.len() == 1));
    fs::remove_dir_all(temp.path().join("subnets")).unwrap();
    assert!(matches!(watch.event().await, Event::Removed(removed) if removed.key == lease.key));
    let again = acquire(&manager, 1).await;
    assert!(matches!(watch.event().await, Event::Added(added) if added.key == again.key));
}

#[tokio::test]
async fn lease_is_renewed_before_its_end() {
    let temp = registry();
    let manager = FileManager::new(temp.path(), Term::new(3 * SECOND, 2 * SECOND));
    let lease = acquire(&manager, 1).await;
    let mut keep = Keep::start(&manager, lease.clone());
    let first = lease.expiration.unwrap();
    keep.until("renewed twice", |state| state.expiration.is_some_and(|end| end >= first + 2 * SECOND)).await;
    let on_disk = manager.list().await.unwrap().remove(0);
    assert_eq!((on_disk.key, &on_disk.attrs), (lease.key, &lease.attrs));
    assert!(on_disk.expiration.unwrap() > SystemTime::now());
    keep.stop().await;
}

#[tokio::test]
async fn deleted_lease_is_taken_again_with_the_same_subnet() {
    let temp = registry();
    let manager = manager(temp.path());
    let lease = acquire(&manager, 1).await;
    let file = path(temp.path(), &lease.key.to_string());
    let keep = Keep::start(&manager, lease);
    eventually("held", || keep.state.borrow().renewed_at.is_some()).await;
    for _ in 0..3 {
        fs::remove_file(&file).unwrap();
        eventually("taken again", || file.exists()).await;
    }
    fs::remove_dir_all(temp.path().join("subnets")).unwrap();
    eventually("taken again", || file.exists()).await;
    keep.stop().await;
}

#[tokio::test]
async fn lease_taken_by_another_node_ends_keep() {
    let temp = registry();
    let manager = manager(temp.path());
    let lease = acquire(&manager, 1).await;
    let keep = Keep::start(&manager, lease.clone());
    put(temp.path(), &lease.key.to_string(), r#"{"PublicIP":"198.18.0.77"}"#);
    let error = tokio::time::timeout(SOON, keep.task).await.unwrap().unwrap().unwrap_err();
    assert!(error.to_string().contains("198.18.0.77"), "{error}");
    assert!(error.to_string().contains(&lease.key.to_string()), "{error}");
}

#[tokio::test]
async fn reservation_stays_one() {
    let temp = registry();
    put(temp.path(), "10.50.9.0-24", r#"{"PublicIP":"198.18.0.1"}"#);
    let manager = FileManager::new(temp.path(), Term::new(SECOND, SECOND / 2));
    for n in 2..32 {
        assert_ne!(acquire(&manager, n).await.key, key("10.50.9.0-24"));
    }
    let lease = acquire(&manager, 1).await;
    assert_eq!((lease.key, lease.expiration), (key("10.50.9.0-24"), None));
    let keep = Keep::start(&manager, lease);
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let text = fs::read_to_string(path(temp.path(), "10.50.9.0-24")).unwrap();
    assert!(!text.contains("Expiration"), "{text}");
    assert_eq!(keep.state.borrow().expiration, None);
    keep.stop().await;
}

#[tokio::test]
async fn changed_attributes_are_published_and_not_written_back() {
    let temp = registry();
    let manager = manager(temp.path());
    let lease = acquire(&manager, 1).await;
    let file = path(temp.path(), &lease.key.to_string());
    let keep = Keep::start(&manager, lease.clone());
    let net = manager.network_config().await.unwrap();
    let changed = LeaseAttrs { backend_type: "host-gw".to_owned(), ..attrs(1) };
    let again = manager.acquire(&net, &changed, None).await.unwrap();
    assert_eq!(again.key, lease.key);
    // Make the keeper look, and take the lease again.
    fs::remove_file(&file).unwrap();
    eventually("taken again", || file.exists()).await;
    assert!(fs::read_to_string(&file).unwrap().contains("host-gw"));
    keep.stop().await;
}

#[tokio::test]
async fn abandoned_leases_are_removed_and_just_expired_ones_are_not() {
    let temp = registry();
    let expired = |ago: u64, n: u8| {
        let at = jiff::Timestamp::try_from(SystemTime::now() - Duration::from_secs(ago)).unwrap();
        format!(r#"{{"PublicIP":"198.18.0.{n}","Expiration":"{at}"}}"#)
    };
    put(temp.path(), "10.50.1.0-24", &expired(3600, 1));
    put(temp.path(), "10.50.2.0-24", &expired(30, 2));
    let manager = manager(temp.path());
    let mut watch = Watch::start(&manager);
    let WatchResult::Snapshot(leases) = watch.next().await else { panic!("no snapshot") };
    assert_eq!(leases.iter().map(|lease| lease.key).collect::<Vec<_>>(), [key("10.50.2.0-24")]);
    eventually("removed", || !path(temp.path(), "10.50.1.0-24").exists()).await;
    assert!(path(temp.path(), "10.50.2.0-24").exists());
    watch.cancel.cancel();

    // Its subnet is free for others; the expired node itself may still come back.
    put(temp.path(), "10.50.1.0-24", &expired(3600, 1));
    let net = manager.network_config().await.unwrap();
    let taken = manager.acquire(&net, &attrs(5), Some(key("10.50.1.0-24"))).await.unwrap();
    assert_eq!(taken.key, key("10.50.1.0-24"));
    assert_eq!(acquire(&manager, 2).await.key, key("10.50.2.0-24"));
    let names: BTreeSet<String> = fs::read_dir(temp.path().join("subnets"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(names, BTreeSet::from(["10.50.1.0-24".to_owned(), "10.50.2.0-24".to_owned()]));
}

#[tokio::test]
async fn ten_thousand_leases_are_read_fast_and_a_change_is_seen_among_them() {
    let temp = registry();
    for n in 0..10_000u32 {
        let key = format!("10.{}.{}.0-24", 60 + n / 250, n % 250);
        put(temp.path(), &key, &attrs((n % 250) as u8).encode());
    }
    let manager = manager(temp.path());
    let begin = std::time::Instant::now();
    let mut watch = Watch::start(&manager);
    assert!(matches!(watch.next().await, WatchResult::Snapshot(leases) if leases.len() == 10_000));
    assert!(begin.elapsed() < 3 * SECOND, "{:?}", begin.elapsed());
    let begin = std::time::Instant::now();
    manager.remove(&key("10.70.9.0-24")).await.unwrap();
    assert!(matches!(watch.event().await, Event::Removed(lease) if lease.key == key("10.70.9.0-24")));
    assert!(begin.elapsed() < SECOND, "{:?}", begin.elapsed());
}
