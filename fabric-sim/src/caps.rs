//! What simulated data planes can do.

use kvferry_engine::fabric::{Caps, Credits, FenceScope, Placement, PlaneTimeouts};
use kvferry_scenarios::run::FabricLimits;

/// What a data plane can do; limits that the scenario does not set are those of a NIC with room for
/// more than any test needs.
pub(crate) fn caps(placement: Placement, limits: &FabricLimits) -> Caps {
    let credits = |operations: u32, ranges: Option<u32>, bytes: Option<u64>| Credits {
        operations,
        ranges: ranges.map_or(u64::MAX, u64::from),
        bytes: bytes.unwrap_or(u64::MAX),
    };
    let of_peer = limits.operations_per_peer.unwrap_or(u32::MAX);
    Caps {
        read: true,
        write: true,
        slices_max: limits.slices_max.unwrap_or(65_536),
        per_peer: credits(of_peer, limits.ranges_per_peer, limits.bytes_per_peer),
        in_all: credits(limits.operations_max.unwrap_or(1024), limits.ranges_max, limits.bytes_max),
        placement,
        fence: FenceScope::Peer,
        patience: PlaneTimeouts::default(),
    }
}
