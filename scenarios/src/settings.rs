//! Settings of the protocol machines of a run, for who makes them and for who checks them.

use crate::run::Run;
use ::engine::core::channel::ChannelConfig;
use ::engine::core::station::CoreSettings;
use ::engine::core::transfer::TransferSettings;
use ::engine::fabric::Caps;

/// Of the prefill and decode cores.
pub fn core(run: &Run) -> CoreSettings {
    let (default, protocol) = (CoreSettings::default(), &run.protocol);
    CoreSettings {
        heartbeat: run.router.heartbeat,
        lease: protocol.lease.unwrap_or(default.lease),
        orphan: protocol.fetch.unwrap_or(default.orphan),
        resume: protocol.resume.unwrap_or(default.resume),
        requests_max: protocol.requests_max.unwrap_or(default.requests_max),
        early_max: protocol.early_max.unwrap_or(default.early_max),
        receivers_max: protocol.receivers_max.unwrap_or(default.receivers_max),
        tombstones_max: protocol.tombstones_max.unwrap_or(default.tombstones_max),
        ..default
    }
}

/// Of the channels between cores.
pub fn channel(run: &Run) -> ChannelConfig {
    let (default, protocol) = (ChannelConfig::default(), &run.protocol);
    ChannelConfig {
        hello: protocol.hello.unwrap_or(default.hello),
        retransmit: protocol.retransmit.unwrap_or(default.retransmit),
        retransmit_max: protocol.retransmit_max.unwrap_or(default.retransmit_max),
        silent: protocol.silent.unwrap_or(default.silent),
        queue_max: protocol.queue_max.unwrap_or(default.queue_max),
        peers_max: protocol.peers_max.unwrap_or(default.peers_max),
        links_max: protocol.links_max.unwrap_or(default.links_max),
    }
}

/// Of the transfer actors, on planes that can do `caps`.
pub fn transfer(run: &Run, caps: &Caps) -> TransferSettings {
    let (default, protocol) = (TransferSettings::default(), &run.protocol);
    TransferSettings {
        layers_per_op: protocol.layers_per_op.max(1),
        operations_max: caps.operations_max,
        slices_max: caps.slices_max,
        stall: protocol.operation.unwrap_or(default.stall),
        retries_max: protocol.retries.unwrap_or(default.retries_max),
        ..default
    }
}
