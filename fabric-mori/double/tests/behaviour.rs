//! The double against what was measured of MoRI, in both layout classes, or MoRI itself.

mod support;

use kvferry_mori_build::MoriInstallation;
use mori_double::INSTALLS;
use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::LazyLock;
use support::{TESTED, cases, compile, run, said};

/// The cases with a MoRI; headers of `flags` come before the system's.
fn program(found: &MoriInstallation, name: &str, flags: &[&str]) -> PathBuf {
    let arguments = kvferry_mori_build::arguments(found, env!("CARGO_TARGET_TMPDIR").as_ref());
    let own = [flags, &["-O1", "-g1", "tests/cpp/main.cpp"]].concat();
    let own = own.into_iter().map(Into::into).collect();
    compile(name, &[arguments.expect("a folder"), own].concat())
}

static PROGRAMS: LazyLock<Vec<PathBuf>> = LazyLock::new(|| {
    if TESTED.is_some() {
        let found = kvferry_mori_build::search(&|name| std::env::var_os(name));
        return vec![program(&found.unwrap_or_else(|why| panic!("{why}")), "cases-installed", &[])];
    }
    let double = INSTALLS.map(|install| {
        let found = MoriInstallation::explicit(install.include, install.lib).expect("it was built");
        program(&found, &format!("cases-{}", install.class), &[])
    });
    double.to_vec()
});

fn passes(case: &str) {
    for program in PROGRAMS.iter() {
        let output = run(program, case, &[]);
        assert!(output.status.success(), "{}: {}", program.display(), said(&output));
    }
}

enum DoubleExit {
    Exit,
    Abort,
}

/// The words are the double's own.
fn ends(case: &str, end: &DoubleExit, words: &[&str]) {
    for program in PROGRAMS.iter() {
        let output = run(program, case, &[]);
        let (code, signal) = (output.status.code(), output.status.signal());
        let right = match end {
            DoubleExit::Exit => code == Some(255),
            DoubleExit::Abort => signal == Some(6),
        };
        let text = said(&output);
        assert!(right, "{}: {text}", program.display());
        let whole = TESTED.is_some() || words.iter().all(|word| text.contains(word));
        assert!(whole, "{}: {text}", program.display());
    }
}

macro_rules! passing {
    ($($case:ident)*) => {
        pub(super) const PASSING: &[&str] = &[$(stringify!($case)),*];
        $(#[test] fn $case() { passes(stringify!($case)); })*
    };
}

macro_rules! ending {
    ($($case:ident $end:ident $words:expr;)*) => {
        pub(super) const ENDING: &[&str] = &[$(stringify!($case)),*];
        $(#[test] fn $case() { ends(stringify!($case), &DoubleExit::$end, &$words); })*
    };
}

/// What MoRI itself does, too: `./test --mori` runs these on the one that is installed.
mod every_mori {
    use super::{DoubleExit, ends, passes};

    passing! {
        a_batch_to_a_deregistered_target
        a_control_plane_that_does_not_answer
        a_deregistered_target
        a_full_send_queue
        a_killed_initiator_does_not_hold_a_memory
        a_killed_target
        a_permuted_batch
        a_stopped_target_is_written
        a_target_that_cannot_pin
        a_target_without_backend
        an_offset_that_wraps_here
        an_offset_that_wraps_there
        another_process
        backends_that_cannot_be_made
        both_directions
        deregistering_fences_a_flood
        deregistering_fences_a_stopped_initiator
        empty_ones
        engine_batches
        golden_bytes
        in_chunks
        integers_are_shortest
        lenient_on_length_strict_on_type
        no_session
        notifications
        ranges
        removing_the_backend_fences_a_flood
        two_memories_at_one_address
        visitors
    }

    ending! {
        ends_foreign_address Exit ["bind(192.0.2.1:0) failed: Cannot assign"];
        ends_port_in_use Exit ["Address already in use"];
        ends_ragged_batch Abort ["assert: localOffsets.size()"];
        ends_tcp_backend Abort ["assert: false"];
        ends_unequal_batch Abort ["assert: the vectors of a batch"];
        ends_unmapped_memory Abort ["registered", "ibv_reg_mr failed"];
    }
}

/// The stand-in's knobs, what it does in their place where MoRI corrupts memory, and GPUs that are
/// none.
mod stand_in {
    use super::{DoubleExit, ends, passes};

    passing! {
        a_killed_target_is_given_up
        a_port_that_flaps
        a_status_at_a_recycled_address
        a_target_without_backend_is_given_up
        auto_xgmi
        fault_ack_lost
        fault_late
        fault_late_and_deregistered
        fault_late_and_the_target_is_removed
        fault_late_is_removed_with_the_backend
        fault_lost
        fault_qp_error
        fault_slow
        fault_sq_full
        fault_throw
        latencies_overlap
        load
        messages_of_software_rdma
        more_elements_than_memory
        no_nic
        routes
        sessions_are_cached
        sizes_beyond_a_work_request
        slow_set_ups
        the_initiator_removes_its_backend
        waiting
        xgmi_and_a_killed_target
        xgmi_between_processes
        xgmi_events_leak
        xgmi_is_late_as_asked
        xgmi_of_another_node
        xgmi_without_a_handle
    }

    ending! {
        ends_no_smi Exit ["rocm_smi"];
        ends_session_after_backend Abort ["a session is used after its RDMA backend was removed"];
        ends_unserialised_calls Abort ["DeregisterMemory beside another call"];
        ends_xgmi_out_of_range Abort ["out of range: offset 18446744073709551611, size 8 of 65536"];
        ends_xgmi_polled_after_backend Abort ["polled after its backend was removed"];
        ends_xgmi_ragged_batch Abort ["assert: batchSize"];
    }
}

#[test]
fn no_case_is_forgotten() {
    let lists = [every_mori::PASSING, every_mori::ENDING, stand_in::PASSING, stand_in::ENDING];
    let known: BTreeSet<&str> = lists.concat().into_iter().collect();
    for program in PROGRAMS.iter() {
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

/// MoRI's headers include HIP's, which every machine with MoRI has: the stand-in, the cases and the
/// shim compile with them too.
#[test]
#[ignore = "needs HIP's headers: ./test runs it where they are, and says where they are not"]
fn the_headers_of_hip_are_no_conflict() {
    let hip = std::env::var("KVFERRY_HIP_INCLUDE").expect("KVFERRY_HIP_INCLUDE names their folder");
    let header = std::fs::read_to_string(format!("{hip}/hip/hip_runtime_api.h"));
    assert!(header.expect("the folder has HIP's header").contains("hipEventQuery"), "{hip}");
    let of_hip = ["-D__HIP_PLATFORM_AMD__=1", "-I", &hip];
    for install in INSTALLS {
        let library = ["-fPIC", "-shared", "-I", install.include, "src/all.cpp"];
        compile(&format!("libdouble-hip-{}.so", install.class), &[&of_hip[..], &library].concat());
        let found = MoriInstallation::explicit(install.include, install.lib).expect("it was built");
        let program = program(&found, &format!("cases-hip-{}", install.class), &of_hip);
        for case in ["golden_bytes", "both_directions"] {
            let output = run(&program, case, &[]);
            assert!(output.status.success(), "{case}: {}", said(&output));
        }
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
        let folder = folder.join(format!("shim-hip-{}", install.class));
        std::fs::create_dir_all(&folder).expect("a folder");
        if let Err(why) = kvferry_mori_build::compile(&found, &folder, &of_hip) {
            panic!("{why}");
        }
    }
}

/// The stand-in as a MoRI that is installed: a case that fails there is reported, and one that
/// holds is not.
#[test]
fn an_installed_mori_is_tested() {
    if TESTED.is_some() {
        return;
    }
    let home = std::path::Path::new(INSTALLS[1].lib).parent().expect("a folder");
    let mut again = Command::new(std::env::current_exe().expect("this program"));
    again.args(["every_mori::both_directions", "every_mori::golden_bytes", "--test-threads", "1"]);
    again.env("KVFERRY_TEST_MORI", "installed").env("MORI_HOME", home);
    let output = again.env("MORI_DOUBLE_NO_NIC", "1").output().expect("it runs");
    let text = said(&output);
    let failed = text.contains("both_directions ... FAILED") && output.status.code() == Some(101);
    assert!(failed && text.contains("golden_bytes ... ok"), "{text}");
}
