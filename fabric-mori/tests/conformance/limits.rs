//! The checks of limits, over planes with small ones.

use crate::PORT;
use crate::common::{MoriTestPlane, MoriTestSetup, config};
use kvferry_engine::conformance::{DataPlanePair, SecondPlane, data_plane_limits};
use kvferry_fabric_mori::{MoriBackend, MoriConfig};
use std::sync::PoisonError;

/// Runs the checks of how many ranges, bytes and operations are taken.
fn check_limits(change: impl Fn(MoriConfig) -> MoriConfig) {
    let _alone = PORT.lock().unwrap_or_else(PoisonError::into_inner);
    for backend in [MoriBackend::Rdma, MoriBackend::Xgmi] {
        let setup = MoriTestSetup::of(change(config(backend)));
        let plane = || Box::new(MoriTestPlane::new(&setup));
        data_plane_limits(&mut || {
            Box::new(DataPlanePair::new(plane(), SecondPlane::Here(plane())))
        });
    }
}

#[test]
fn planes_take_what_their_queues_hold_and_no_more() {
    let limits = [(1, 1, 1, 1), (2, 8, 8, 1), (3, 7, 8, 2), (64, 1_024, 1_024, 1)];
    for (operations_max, slices_max, send_wr_max, qp_per_transfer) in limits {
        check_limits(|config| MoriConfig {
            operations_max,
            slices_max,
            send_wr_max,
            qp_per_transfer,
            ..config
        });
    }
}

#[test]
fn ranges_around_a_piece_are_moved() {
    check_limits(|config| MoriConfig { chunking: true, chunk_bytes: 4_096, ..config });
}
