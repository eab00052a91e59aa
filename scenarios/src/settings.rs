//! Settings of the protocol machines of an instance, for who makes them and for who checks them.

use crate::run::{InstanceSettings, Run};
use kvferry_engine::core::channel::ChannelConfig;
use kvferry_engine::core::config::CoreSettings;
use kvferry_engine::core::transfer::TransferSettings;

/// Of its prefill or decode core.
pub fn core(run: &Run, instance: &InstanceSettings) -> CoreSettings {
    let (default, protocol) = (CoreSettings::default(), &instance.protocol);
    CoreSettings {
        heartbeat: run.router.heartbeat,
        lease: protocol.lease.unwrap_or(default.lease),
        drift_percent: protocol.drift_percent.unwrap_or(default.drift_percent),
        orphan: protocol.fetch.unwrap_or(default.orphan),
        resume: protocol.resume.unwrap_or(default.resume),
        claim: protocol.claim.unwrap_or(default.claim),
        requests_max: protocol.requests_max.unwrap_or(default.requests_max),
        early_max: protocol.early_max.unwrap_or(default.early_max),
        receivers_max: protocol.receivers_max.unwrap_or(default.receivers_max),
        tombstones_max: protocol.tombstones_max.unwrap_or(default.tombstones_max),
        rebuild_delay: protocol.rebuild.unwrap_or(default.rebuild_delay),
    }
}

/// Of the channels between its core and others.
pub fn channel(instance: &InstanceSettings) -> ChannelConfig {
    let (default, protocol) = (ChannelConfig::default(), &instance.protocol);
    ChannelConfig {
        hello: protocol.hello.unwrap_or(default.hello),
        retransmit: protocol.retransmit.unwrap_or(default.retransmit),
        retransmit_max: protocol.retransmit_max.unwrap_or(default.retransmit_max),
        silent: protocol.silent.unwrap_or(default.silent),
        queue_max: protocol.queue_max.unwrap_or(default.queue_max),
        peers_max: protocol.peers_max.unwrap_or(default.peers_max),
        links_max: protocol.links_max.unwrap_or(default.links_max),
        version: protocol.version.unwrap_or(default.version),
    }
}

/// Of its transfer actors.
pub fn transfer(instance: &InstanceSettings) -> TransferSettings {
    let (default, protocol) = (TransferSettings::default(), &instance.protocol);
    TransferSettings {
        layers_per_op: instance.layers_per_op(),
        operations_max: protocol.operations_max.unwrap_or(default.operations_max),
        slices_max: protocol.slices_max.unwrap_or(default.slices_max),
        operation_time: protocol.operation_time.unwrap_or(default.operation_time),
        operation_bytes_min: protocol.operation_bytes_min.unwrap_or(default.operation_bytes_min),
        operation_bytes_max: protocol.operation_bytes_max.unwrap_or(default.operation_bytes_max),
        stall: protocol.operation.unwrap_or(default.stall),
        open: protocol.open.unwrap_or(default.open),
        quiet: protocol.quiet.unwrap_or(default.quiet),
        retries_max: protocol.retries.unwrap_or(default.retries_max),
        reopens_max: protocol.reopens_max.unwrap_or(default.reopens_max),
        reopen_delay: protocol.reopen.unwrap_or(default.reopen_delay),
        busy_delay: protocol.busy.unwrap_or(default.busy_delay),
    }
}
