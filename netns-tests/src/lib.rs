//! Clusters of network namespaces on one machine: what felt's demo, tests and benchmarks run in.
//!
//! | Module | What it is |
//! |---|---|
//! | [`cmd`] | programs with deadlines, signals, waiting for conditions |
//! | [`check`] | what tests assert, with messages |
//! | [`netns`] | namespaces that vanish with their maker; places to run commands |
//! | [`topology`] | a cluster: underlay, nodes, registry, pods (start here: the picture) |
//! | [`daemon`], [`etcd`] | `feltd` and etcd as processes of a node |
//! | [`pod`] | attaching pods as a container runtime does |
//! | [`kernel_node`] | a node that is the kernel's vxlan device |
//! | [`traffic`], [`generator`] | ping, TCP, UDP, latency between pods |
//! | [`capture`] | what was on a link |
//! | [`snapshot`] | is anything left behind |
//! | [`vm`] | another kernel, in emulation |
//! | [`demo`] | the seven steps of `felt-lab demo` |
//! | [`mod@bench`] | `felt-lab bench` |
//!
//! The crate shares no code with the daemon, the data plane or the plugins: it runs their programs and asks the kernel
//! with the system's own tools what came of it.

#![forbid(unsafe_code)]

pub mod bench;
pub mod bins;
pub mod capture;
pub mod check;
pub mod cmd;
pub mod daemon;
pub mod demo;
pub mod etcd;
pub mod generator;
pub mod kernel_node;
pub mod netns;
pub mod pod;
pub mod snapshot;
pub mod topology;
pub mod traffic;
pub mod vm;
