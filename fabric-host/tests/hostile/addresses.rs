//! Addresses that nobody vouches for: planes follow none that came as a number.

use crate::common::{next, patient};
use kvferry_engine::fabric::{DataEvent, DataPlane, Memory, Refused, RegionId};
use kvferry_fabric_host::HostPlane;
use serde::Serialize;

/// Memory as a message says it.
#[derive(Serialize)]
enum SaidMemory {
    Own { base: u64, len: u64 },
}

#[test]
fn memory_that_came_as_bytes_is_not_registered() {
    let mut plane = HostPlane::new(patient()).expect("a plane at loopback");
    let bytes = [7_u8; 4_096];
    let said = SaidMemory::Own { base: bytes.as_ptr() as u64, len: 4_096 };
    let said = rmp_serde::to_vec_named(&said).expect("plain data");
    let memory: Memory = rmp_serde::from_slice(&said).expect("memory of this process");
    let Err(Refused::Invalid(why)) = plane.register(RegionId(1), memory) else {
        panic!("peers can write what is borrowed")
    };
    assert!(why.contains("4096 bytes at 0x") && why.contains("OwnMemory::new"), "{why}");
}

#[test]
fn this_process_is_not_written_as_if_it_were_another() {
    let mut plane = HostPlane::new(patient()).expect("a plane at loopback");
    let bytes = [7_u8; 4_096];
    let (pid, base) = (std::process::id(), bytes.as_ptr() as u64);
    let memory = Memory::OtherProcess { pid, base, len: 4_096 };
    plane.register(RegionId(1), memory).expect("the answer is an event");
    let DataEvent::Registered { result: Err(why), .. } = next(&mut plane) else {
        panic!("peers can write what is borrowed")
    };
    assert!(why.to_string().contains("which is this one"), "{why}");
}
