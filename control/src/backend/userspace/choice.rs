//! Engine settings: the network config with this node's flags on top.

use felt_dataplane::config::{OffloadMode, SourceGuard as Guard};

use crate::backend::Context;
use crate::netconfig::{BackendKind, Offload, SourceGuard};

/// What every engine of this node runs with.
#[derive(Debug, Clone, Copy)]
pub(super) struct EngineChoice {
    pub(super) workers: usize,
    pub(super) offload: OffloadMode,
    pub(super) source_guard: Guard,
    pub(super) accept_gbp: bool,
}

/// Packet workers as told; 0 = from the number of cores.
pub(super) fn workers(context: &Context) -> usize {
    context.options.workers.unwrap_or(context.net.backend.workers)
}

/// The engine settings in force.
pub(super) fn engine(context: &Context) -> EngineChoice {
    let backend = &context.net.backend;
    EngineChoice {
        workers: workers(context),
        offload: match context.options.offload.unwrap_or(backend.offload) {
            Offload::Auto => OffloadMode::Auto,
            Offload::Off => OffloadMode::Off,
        },
        source_guard: match context.options.source_guard.unwrap_or(backend.source_guard) {
            SourceGuard::Off => Guard::Off,
            SourceGuard::Inner => Guard::Inner,
            SourceGuard::Peers => Guard::Peers,
            SourceGuard::Strict => Guard::Strict,
        },
        accept_gbp: matches!(&backend.kind, BackendKind::Vxlan(vxlan) if vxlan.gbp),
    }
}
