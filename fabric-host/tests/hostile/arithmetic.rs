//! Numbers of a peer that add up to more than a number holds.

use crate::common::patient;
use crate::forged::{AttackedPlane, ForgedMessage, ForgedRegion, hear, own_memory, write_record};
use kvferry_engine::fabric::{Memory, OwnMemory};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

/// Address space without memory: reads find zeros.
fn vast(len: u64) -> u64 {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: A new mapping, which nobody else knows.
    let start = unsafe { mmap_anonymous(std::ptr::null_mut(), len as usize, access, flags) };
    start.expect("address space") as u64
}

/// Parts of a write that was refused are counted, and not copied.
#[test]
fn parts_whose_bytes_overflow_end_the_link() {
    let len = 1 << 44;
    let base = vast(len);
    // SAFETY: It is never unmapped, and nobody looks at it.
    let memory = Memory::Own(unsafe { OwnMemory::new(base, len) });
    let victim = AttackedPlane::new(patient(), memory);
    let (socket, mut segment) = victim.enter();
    let local = ForgedRegion { base, len, process: None, file: false };
    let (answer, _) = victim.open(&socket, local, None);
    assert!(matches!(answer, ForgedMessage::Opened { result: Ok(_), .. }), "{answer:?}");
    segment.push(&write_record(1, 1, false, 1, 8));
    let parts = u64::MAX / (len * 1_024) + 2;
    for _ in 0..parts {
        segment.push(&write_record(9, 1, false, 1_024, len));
    }
    victim.until("corrupt", |counters| counters.corrupt == 1);
    while hear(&socket).is_some() {}
    // Others are served.
    let (other, _segment) = victim.enter();
    let (answer, _) = victim.open(&other, own_memory(&[1; 8]), None);
    assert!(matches!(answer, ForgedMessage::Opened { result: Ok(_), .. }), "{answer:?}");
}
