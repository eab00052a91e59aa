//! `[protocol]` and `[fabric]`, of the whole file and of one instance.

use crate::run::{FabricLimits, ProtocolSettings};
use crate::value::ByteVolume;
use kvferry_engine::core::Nanos;
use kvferry_engine::core::dialect::native::{VERSION, VERSION_MIN};
use kvferry_faults::settings;

/// Of what there has to be at least one.
pub(super) const COUNT: (u32, u32) = (1, u32::MAX);

settings! {
    pub(super) struct ProtocolSpec sets ProtocolSettings {
        hello: Nanos => channel.hello;
        retransmit: Nanos => channel.retransmit;
        retransmit_max: Nanos => channel.retransmit_max;
        silent: Nanos => channel.silent;
        lease: Nanos => core.lease;
        fence: Nanos;
        fetch: Nanos => core.orphan;
        resume: Nanos => core.resume;
        claim: Nanos => core.claim;
        operation: Nanos => transfer.stall;
        operation_time: Nanos => transfer.operation_time;
        open: Nanos => transfer.open;
        quiet: Nanos => transfer.quiet;
        reopen: Nanos => transfer.reopen_delay;
        busy: Nanos => transfer.busy_delay;
        rebuild: Nanos => core.rebuild_delay;
        // What a reader takes off a lease: something has to be left of it.
        drift_percent: u32, in (0, 90) => core.drift_percent;
        operations_max: u32, in COUNT => transfer.operations_max;
        slices_max: u32, in COUNT => transfer.slices_max;
        retries: u32 => transfer.retries_max;
        reopens_max: u32 => transfer.reopens_max;
        requests_max: u32, in COUNT => core.requests_max;
        early_max: u32, in COUNT => core.early_max;
        receivers_max: u32, in COUNT => core.receivers_max;
        tombstones_max: u32, in COUNT => core.tombstones_max;
        queue_max: u32, in COUNT => channel.queue_max;
        peers_max: u32, in COUNT => channel.peers_max;
        links_max: u32, in COUNT => channel.links_max;
        operation_bytes_min: ByteVolume => transfer.operation_bytes_min;
        operation_bytes_max: ByteVolume => transfer.operation_bytes_max;
        version: u16, in (VERSION_MIN, VERSION) => channel.version;
        layers_per_op: u16, in (1, 1024) => transfer.layers_per_op;
    }
}

settings! {
    pub(super) struct FabricSpec sets FabricLimits {
        operations_max: u32, in COUNT;
        operations_per_peer: u32, in COUNT;
        slices_max: u32, in COUNT;
        ranges_max: u32, in COUNT;
        ranges_per_peer: u32, in COUNT;
        bytes_max: ByteVolume;
        bytes_per_peer: ByteVolume;
    }
}

/// Limits in which an operation of the most ranges fits into the credits.
pub(super) fn within_credits(mut fabric: FabricLimits) -> FabricLimits {
    let credits = [fabric.ranges_max, fabric.ranges_per_peer].into_iter().flatten().min();
    if let Some(credits) = credits {
        fabric.slices_max = Some(fabric.slices_max.map_or(credits, |most| most.min(credits)));
    }
    fabric
}
