//! What every implementation of the two planes has to do, as checks that any of them can be run
//! through (feature `conformance`).
//!
//! An implementation provides a fixture, [`DataFixture`] or [`ControlFixture`], and calls
//! [`data_plane`] or [`control_plane`], or makes a test of each entry of [`DATA_CHECKS`] and
//! [`CONTROL_CHECKS`]. A check panics with what it found.
//!
//! ```
//! use kvferry_engine::conformance::{CONTROL_CHECKS, DATA_CHECKS, DataFixture};
//!
//! /// Runs one check by its name, as the test of that name does.
//! fn run(name: &str, fixture: &mut dyn DataFixture) {
//!     let (_, check) = DATA_CHECKS.iter().find(|(known, _)| *known == name).unwrap();
//!     check(fixture);
//! }
//! assert!(DATA_CHECKS.iter().any(|(name, _)| *name == "moves_exactly_the_ranges"));
//! assert!(!CONTROL_CHECKS.is_empty());
//! ```

mod backend;
mod control;
mod data;
mod data_edges;
mod data_harness;
mod data_limits;
mod data_outcomes;
mod data_plane_pair;
mod data_recovery;
mod data_shutdown;
mod remote_plane;
mod wakes;

pub use control::{CONTROL_CHECKS, ControlCheck, ControlFixture};
pub use data_harness::DataFixture;
pub use data_plane_pair::{DataPlanePair, SecondPlane};
pub use remote_plane::{PlaneUnderTest, RemotePlane, serve_if_child};

/// A check of a data plane.
pub type DataCheck = fn(&mut dyn DataFixture);

/// Checks of data planes with their names.
pub const DATA_CHECKS: &[(&str, DataCheck)] = &[
    ("register_and_open_are_answered", data::register_and_open_are_answered),
    ("caps_are_fixed", data::caps_are_fixed),
    (
        "refused_calls_have_no_events_and_take_no_ids",
        data::refused_calls_have_no_events_and_take_no_ids,
    ),
    ("moves_exactly_the_ranges", data::moves_exactly_the_ranges),
    ("digests_its_own_memory", data::digests_its_own_memory),
    ("refuses_bad_batches", data::refuses_bad_batches),
    ("refuses_dead_sessions", data::refuses_dead_sessions),
    ("completes_each_operation_once", data::completes_each_operation_once),
    ("busy_is_back_pressure", data::busy_is_back_pressure),
    ("ids_in_use_are_invalid", data::ids_in_use_are_invalid),
    ("empty_operations_complete", data::empty_operations_complete),
    ("moves_any_number_of_ranges", data_limits::moves_any_number_of_ranges),
    ("moves_ranges_of_any_length", data_limits::moves_ranges_of_any_length),
    ("session_moves_bytes_after_each_refusal", data_limits::session_moves_bytes_after_each_refusal),
    (
        "next_session_moves_bytes_after_each_failure",
        data_limits::next_session_moves_bytes_after_each_failure,
    ),
    ("quiet_answers_each_ticket_once", data_shutdown::quiet_answers_each_ticket_once),
    ("unknown_sessions_are_quiet", data_shutdown::unknown_sessions_are_quiet),
    ("close_fails_operations_then_is_quiet", data_shutdown::close_fails_operations_then_is_quiet),
    ("close_spares_other_sessions", data_shutdown::close_spares_other_sessions),
    ("fence_keeps_the_pass_out", data_shutdown::fence_keeps_the_pass_out),
    ("new_pass_lets_in_again", data_shutdown::new_pass_lets_in_again),
    ("wrong_pass_reaches_nothing", data_shutdown::wrong_pass_reaches_nothing),
    ("deregister_waits_for_own_operations", data_shutdown::deregister_waits_for_own_operations),
    ("deregister_ends_remote_access", data_shutdown::deregister_ends_remote_access),
    ("outcomes_say_what_landed", data_outcomes::outcomes_say_what_landed),
    (
        "disconnect_closes_the_sessions_of_one_peer",
        data_outcomes::disconnect_closes_the_sessions_of_one_peer,
    ),
    (
        "fence_spares_others_and_own_operations",
        data_outcomes::fence_spares_others_and_own_operations,
    ),
    ("events_wake_the_owner_of_memory", wakes::events_wake_the_owner_of_memory),
    ("one_poll_reports_one_reset_at_most", backend::one_poll_reports_one_reset_at_most),
    ("a_backend_that_is_gone_is_replaced", backend::a_backend_that_is_gone_is_replaced),
    ("peer_death_fails_operations", data_shutdown::peer_death_fails_operations),
    (
        "operations_have_as_many_ranges_as_is_said",
        data_edges::operations_have_as_many_ranges_as_is_said,
    ),
    ("operations_are_taken_up_to_the_credit", data_edges::operations_are_taken_up_to_the_credit),
    ("ranges_are_taken_up_to_the_credit", data_edges::ranges_are_taken_up_to_the_credit),
    ("bytes_are_taken_up_to_the_credit", data_edges::bytes_are_taken_up_to_the_credit),
    (
        "session_moves_bytes_after_each_invalid_batch",
        data_recovery::session_moves_bytes_after_each_invalid_batch,
    ),
    (
        "session_moves_bytes_after_each_refused_call",
        data_recovery::session_moves_bytes_after_each_refused_call,
    ),
    (
        "next_session_moves_bytes_after_each_fence",
        data_recovery::next_session_moves_bytes_after_each_fence,
    ),
    (
        "next_session_moves_bytes_after_a_wrong_pass",
        data_recovery::next_session_moves_bytes_after_a_wrong_pass,
    ),
    (
        "next_session_moves_bytes_after_own_memory_went",
        data_recovery::next_session_moves_bytes_after_own_memory_went,
    ),
    (
        "next_session_moves_bytes_after_a_disconnect",
        data_recovery::next_session_moves_bytes_after_a_disconnect,
    ),
    (
        "next_session_moves_bytes_after_one_to_memory_that_went",
        data_recovery::next_session_moves_bytes_after_one_to_memory_that_went,
    ),
];

/// Runs all checks of a data plane, each with a fixture of its own.
pub fn data_plane(make: &mut dyn FnMut() -> Box<dyn DataFixture>) {
    for (_, check) in DATA_CHECKS {
        check(&mut *make());
    }
}

/// Which of the checks are about limits that a plane states.
const LIMIT_CHECKS: [&str; 6] = [
    "moves_any_number_of_ranges",
    "moves_ranges_of_any_length",
    "operations_have_as_many_ranges_as_is_said",
    "operations_are_taken_up_to_the_credit",
    "ranges_are_taken_up_to_the_credit",
    "bytes_are_taken_up_to_the_credit",
];

/// Runs the checks of limits alone, for planes whose limits are too small for others.
pub fn data_plane_limits(make: &mut dyn FnMut() -> Box<dyn DataFixture>) {
    for (_, check) in DATA_CHECKS.iter().filter(|(name, _)| LIMIT_CHECKS.contains(name)) {
        check(&mut *make());
    }
}

/// Runs all checks of a control plane, each with a fixture of its own.
pub fn control_plane(make: &mut dyn FnMut() -> Box<dyn ControlFixture>) {
    for (_, check) in CONTROL_CHECKS {
        check(&mut *make());
    }
}
