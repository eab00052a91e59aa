//! The double against what was measured of MoRI, in both layout classes.

mod support;

use mori_double::INSTALLS;
use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::sync::OnceLock;
use support::{cases, compile, run, said};

fn programs() -> &'static [PathBuf; 2] {
    static PROGRAMS: OnceLock<[PathBuf; 2]> = OnceLock::new();
    PROGRAMS.get_or_init(|| {
        INSTALLS.map(|install| {
            let rpath = format!("-Wl,-rpath,{}", install.lib);
            let name = format!("cases-{}", install.class);
            let paths = ["-I", install.include, "-L", install.lib, &rpath];
            compile(
                &name,
                &[&["-O1", "-g1", "tests/cpp/main.cpp"], &paths[..], &["-lmori_io"]].concat(),
            )
        })
    })
}

fn passes(case: &str) {
    for program in programs() {
        let output = run(program, case, &[]);
        assert!(output.status.success(), "{}: {}", program.display(), said(&output));
    }
}

enum End {
    /// `exit(-1)`.
    Exit,
    Abort,
}

fn ends(case: &str, end: &End, words: &[&str]) {
    for program in programs() {
        let output = run(program, case, &[]);
        let (code, signal) = (output.status.code(), output.status.signal());
        let right = match end {
            End::Exit => code == Some(255),
            End::Abort => signal == Some(6),
        };
        let text = said(&output);
        assert!(right, "{}: {text}", program.display());
        assert!(words.iter().all(|word| text.contains(word)), "{}: {text}", program.display());
    }
}

macro_rules! passing {
    ($($case:ident)*) => {
        const PASSING: &[&str] = &[$(stringify!($case)),*];
        $(#[test] fn $case() { passes(stringify!($case)); })*
    };
}

macro_rules! ending {
    ($($case:ident $end:ident $words:expr;)*) => {
        const ENDING: &[&str] = &[$(stringify!($case)),*];
        $(#[test] fn $case() { ends(stringify!($case), &End::$end, &$words); })*
    };
}

passing! {
    a_control_plane_that_does_not_answer
    a_deregistered_target
    a_full_send_queue
    a_killed_initiator_does_not_hold_a_memory
    a_killed_target
    a_killed_target_is_given_up
    a_permuted_batch
    a_status_at_a_recycled_address
    a_stopped_target_is_written
    a_target_that_cannot_pin
    a_target_without_backend
    a_target_without_backend_is_given_up
    an_offset_that_wraps_here
    an_offset_that_wraps_there
    another_process
    auto_xgmi
    backends_that_cannot_be_made
    both_directions
    deregistering_fences_a_flood
    deregistering_fences_a_stopped_initiator
    empty_ones
    engine_batches
    events
    fault_ack_lost
    fault_environment
    fault_late
    fault_late_and_deregistered
    fault_late_and_the_target_is_removed
    fault_late_is_removed_with_the_backend
    fault_lost
    fault_qp_error
    fault_slow
    fault_sq_full
    fault_texts
    fault_throw
    golden_bytes
    in_chunks
    integers_are_shortest
    latencies_overlap
    lenient_on_length_strict_on_type
    load
    no_nic
    no_session
    notifications
    ranges
    removing_the_backend_fences_a_flood
    routes
    sessions_are_cached
    sizes_beyond_a_work_request
    the_initiator_removes_its_backend
    two_memories_at_one_address
    visitors
    waiting
    xgmi_and_a_killed_target
    xgmi_between_processes
    xgmi_events_leak
    xgmi_is_late_as_asked
    xgmi_of_another_node
    xgmi_without_a_handle
}

ending! {
    ends_bad_faults Abort ["MORI_DOUBLE_FAULTS: 'fire@1' is of no known kind"];
    ends_exit Exit ["an injected fault"];
    ends_foreign_address Exit ["bind(192.0.2.1:0) failed: Cannot assign"];
    ends_no_smi Exit ["rocm_smi"];
    ends_pin Abort ["registered", "ibv_reg_mr failed"];
    ends_port_in_use Exit ["Address already in use"];
    ends_ragged_batch Abort ["assert: localOffsets.size()"];
    ends_session_after_backend Abort ["a session is used after its RDMA backend was removed"];
    ends_tcp_backend Abort ["assert: false"];
    ends_unequal_batch Abort ["assert: the vectors of a batch"];
    ends_unserialised_calls Abort ["DeregisterMemory beside another call"];
    ends_xgmi_out_of_range Abort ["out of range: offset 18446744073709551611, size 8 of 64"];
    ends_xgmi_polled_after_backend Abort ["polled after its backend was removed"];
    ends_xgmi_ragged_batch Abort ["assert: batchSize"];
}

#[test]
fn no_case_is_forgotten() {
    let known: BTreeSet<&str> = PASSING.iter().chain(ENDING).copied().collect();
    for program in programs() {
        let there = cases(program);
        assert_eq!(there.iter().map(String::as_str).collect::<BTreeSet<_>>(), known);
    }
}

/// The shim needs `dlopen` to find every name of the double that it uses.
#[test]
fn the_shims_load() {
    for install in INSTALLS {
        let output = std::process::Command::new("ldd").args(["-r", install.shim]).output();
        let output = output.expect("ldd");
        let text = said(&output);
        let whole = !text.contains("undefined symbol") && !text.contains("not found");
        assert!(output.status.success() && whole && text.contains(install.lib), "{text}");
    }
}
