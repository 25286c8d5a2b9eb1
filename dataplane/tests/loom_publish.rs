//! All interleavings of the snapshot publication, by loom.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p felt-dataplane --test loom_publish`; without the flag
//! this file is empty. loom reports a read of a snapshot that is not ordered before its freeing, so the
//! models only have to publish and read. The variants that lack a fence must make it report one.

#![cfg(loom)]

use std::panic::{AssertUnwindSafe, catch_unwind};

use felt_dataplane::fib::publish::{PUBLISHER_FENCE, Publisher, READER_FENCE, Reader, channel_with};
use loom::thread;

/// Reads twice, as two batches would; versions never go back.
fn read_twice<const FENCES: u8>(reader: &mut Reader<u32, FENCES>) {
    let first = *reader.current();
    let second = *reader.current();
    assert!(second >= first, "went back from {first} to {second}");
}

fn publish_against_one_reader<const FENCES: u8>() {
    let (mut publisher, mut readers): (Publisher<u32, FENCES>, _) = channel_with(0, 1);
    let mut reader = readers.pop().expect("one was asked for");
    let batches = thread::spawn(move || read_twice(&mut reader));
    publisher.publish(1);
    publisher.publish(2);
    batches.join().expect("the reader ends");
    publisher.reclaim();
    assert_eq!(publisher.replaced(), 0, "the reader is gone: nothing is held back");
}

#[test]
fn reader_never_sees_a_freed_snapshot() {
    loom::model(publish_against_one_reader::<{ READER_FENCE | PUBLISHER_FENCE }>);
}

/// Runs the model without a fence and wants loom's own report of the fault.
fn assert_fault_found<const FENCES: u8>() {
    let outcome = catch_unwind(AssertUnwindSafe(|| loom::model(publish_against_one_reader::<FENCES>)));
    let panic = outcome.expect_err("the weakened variant must fail");
    let message = panic
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string))
        .unwrap_or_default();
    assert!(message.contains("Causality violation"), "failed for another reason: {message}");
}

#[test]
fn without_fences_loom_finds_the_fault() {
    assert_fault_found::<0>();
}

#[test]
fn without_the_readers_fence_loom_finds_the_fault() {
    assert_fault_found::<PUBLISHER_FENCE>();
}

#[test]
fn without_the_publishers_fence_loom_finds_the_fault() {
    assert_fault_found::<READER_FENCE>();
}

#[test]
fn two_readers_do_not_disturb_each_other() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let (mut publisher, readers): (Publisher<u32>, _) = channel_with(0, 2);
        let threads: Vec<_> = readers
            .into_iter()
            .map(|mut reader| thread::spawn(move || assert!(*reader.current() <= 1)))
            .collect();
        publisher.publish(1);
        for thread in threads {
            thread.join().expect("the reader ends");
        }
    });
}

#[test]
fn a_sleeping_reader_holds_nothing_and_wakes_to_the_newest() {
    loom::model(|| {
        let (mut publisher, mut readers): (Publisher<u32>, _) = channel_with(0, 1);
        let mut reader = readers.pop().expect("one was asked for");
        let worker = thread::spawn(move || {
            let before = *reader.current();
            reader.quiesce();
            let after = *reader.current();
            assert!(after >= before);
            reader.quiesce();
            reader
        });
        publisher.publish(1);
        let mut reader = worker.join().expect("the reader ends");
        publisher.publish(2);
        assert_eq!(publisher.replaced(), 0, "a quiet reader holds no snapshot");
        assert_eq!(*reader.current(), 2);
    });
}

#[test]
fn reader_outlives_the_publisher() {
    loom::model(|| {
        let (mut publisher, mut readers): (Publisher<u32>, _) = channel_with(0, 1);
        let mut reader = readers.pop().expect("one was asked for");
        let batches = thread::spawn(move || read_twice(&mut reader));
        publisher.publish(1);
        drop(publisher);
        batches.join().expect("the reader ends");
    });
}
