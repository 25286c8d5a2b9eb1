//! Opening, comparing, entering, naming and removing network namespaces.

mod support;

use felt_hostnet::netlink::{Handle, LinkKind, NewLink};
use felt_hostnet::netns::{NetNs, OpenError};
use support::in_new_netns;

#[test]
fn with_comes_back_also_after_a_panic() {
    in_new_netns(|| {
        let home = NetNs::current().unwrap();
        let other = NetNs::create().unwrap();
        assert!(!home.is_same(&other).unwrap());
        let inside = other.with(|| NetNs::current().unwrap().id().unwrap()).unwrap();
        assert_eq!(inside, other.id().unwrap());
        assert!(NetNs::current().unwrap().is_same(&home).unwrap());
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _ = other.with(|| panic!("inside"));
        }));
        assert!(caught.is_err());
        assert!(NetNs::current().unwrap().is_same(&home).unwrap());
        {
            let _guard = other.enter().unwrap();
            assert!(NetNs::current().unwrap().is_same(&other).unwrap());
        }
        assert!(NetNs::current().unwrap().is_same(&home).unwrap());
    });
}

#[test]
fn names_are_made_opened_and_removed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("deep/blue");
    let made = NetNs::create_at(&path)
        .unwrap_or_else(|error| panic!("this test needs root (CAP_SYS_ADMIN) to mount a namespace: {error}"));
    let opened = NetNs::open(&path).unwrap();
    assert!(made.is_same(&opened).unwrap());
    assert!(!made.is_same(&NetNs::current().unwrap()).unwrap());
    let twice = NetNs::create_at(&path).unwrap_err();
    assert_eq!(twice.kind(), std::io::ErrorKind::AlreadyExists);
    assert!(
        opened.is_same(&NetNs::open(&path).unwrap()).unwrap(),
        "a failed second creation must change nothing"
    );

    // The namespace outlives its name as long as a descriptor is open.
    Handle::new_in(&opened).unwrap().link_add(&NewLink::new("a0", LinkKind::veth("a1").into())).unwrap();
    NetNs::delete_at(&path).unwrap();
    NetNs::delete_at(&path).unwrap();
    assert!(matches!(NetNs::open(&path), Err(OpenError::NotFound(_))));
    assert!(Handle::new_in(&opened).unwrap().link_by_name("a0").is_ok());
}

#[test]
fn other_files_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("plain");
    std::fs::write(&path, "").unwrap();
    let error = NetNs::open(&path).unwrap_err();
    assert!(error.is_not_a_namespace(), "{error}");
    assert!(error.to_string().starts_with("unknown FS magic on"), "{error}");
    let error = NetNs::open(directory.path().join("missing")).unwrap_err();
    assert!(error.is_not_found());
    NetNs::delete_at(&path).unwrap();
    assert!(!path.exists());
}
