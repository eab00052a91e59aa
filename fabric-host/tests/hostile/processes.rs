//! Processes that take the id of one that has ended.

use crate::common::patient;
use crate::common::remote::HostTestMemory;
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{
    Completion, DataEvent, DataPlane, Direction, FabricError, Landed, Memory, OpId, PeerId,
    RegionId, SessionId, Submit,
};
use kvferry_fabric_host::{HostConfig, HostPlane, read_memory};
use std::time::Instant;

const LEN: u64 = 4_096;
const SESSION: SessionId = SessionId(3);

/// A copy of this process that does nothing until it is killed.
struct IdleChild(u32);

impl IdleChild {
    /// With an id of the kernel's choice, or with this one; none if that needs more rights.
    fn start(id: Option<u32>) -> Option<IdleChild> {
        let mut ids = [id.unwrap_or(0) as libc::pid_t];
        // SAFETY: All-zero arguments are valid ones.
        let mut with: libc::clone_args = unsafe { std::mem::zeroed() };
        with.exit_signal = libc::SIGCHLD as u64;
        if id.is_some() {
            (with.set_tid, with.set_tid_size) = (ids.as_mut_ptr() as u64, 1);
        }
        // SAFETY: As a fork; the child calls nothing but `pause`.
        let child = unsafe {
            libc::syscall(libc::SYS_clone3, &raw mut with, size_of::<libc::clone_args>())
        };
        match child {
            0 => loop {
                // SAFETY: It takes no address.
                unsafe { libc::pause() };
            },
            child => u32::try_from(child).ok().map(IdleChild),
        }
    }

    fn end(self) -> u32 {
        let id = self.0;
        drop(self);
        id
    }
}

impl Drop for IdleChild {
    fn drop(&mut self) {
        // SAFETY: A signal to, and the end of, our own child.
        unsafe {
            libc::kill(self.0 as i32, libc::SIGKILL);
            libc::waitpid(self.0 as i32, std::ptr::null_mut(), 0);
        }
    }
}

fn next(plane: &mut HostPlane) -> DataEvent {
    let (start, mut events) = (Instant::now(), Vec::new());
    while events.is_empty() {
        assert!(start.elapsed() < crate::forged::PATIENCE, "no event");
        plane.poll(Nanos::ZERO, &mut events);
        std::thread::yield_now();
    }
    events.remove(0)
}

fn run(plane: &mut HostPlane, direction: Direction, op: u64) -> Completion {
    let (op, at, len) = (OpId(op), &[0][..], &[LEN][..]);
    let batch = Submit { op, session: SESSION, direction, local: at, remote: at, len };
    plane.submit(batch).expect("taken");
    match next(plane) {
        DataEvent::Completed { outcome, .. } => outcome,
        other => panic!("{other:?}"),
    }
}

#[test]
fn nothing_is_written_to_who_took_the_id_of_a_process() {
    let config = || HostConfig { open_door: true, ..patient() };
    let bytes = Box::leak(vec![0xa5_u8; LEN as usize].into_boxed_slice());
    let base = bytes.as_ptr() as u64;
    let first = IdleChild::start(None).expect("a child");
    let mut side = HostPlane::new(config()).expect("a plane");
    side.register(RegionId(1), Memory::OtherProcess { pid: first.0, base, len: LEN })
        .expect("memory is taken");
    let DataEvent::Registered { result: Ok(desc), .. } = next(&mut side) else { panic!("none") };
    let mut near = HostPlane::new(config()).expect("a plane");
    let mut ours = HostTestMemory::new(LEN, false);
    near.register(RegionId(1), ours.memory()).expect("memory is taken");
    assert!(matches!(next(&mut near), DataEvent::Registered { result: Ok(_), .. }));
    near.connect(PeerId(2), &side.address(), 0).expect("a peer");
    near.open(SESSION, RegionId(1), PeerId(2), &desc).expect("an open is taken");
    assert!(matches!(next(&mut near), DataEvent::Opened { result: Ok(()), .. }));
    ours.poke(0, &[7; LEN as usize]);
    assert_eq!(run(&mut near, Direction::Write, 1), Completion::Done);
    // Another process, with the same id and other memory at the same address.
    let Some(second) = IdleChild::start(Some(first.end())) else {
        // Only root can choose the id of a process.
        return;
    };
    let failed = Completion::Failed { cause: FabricError::RemoteAccess, landed: Landed::Unknown };
    let outcome = run(&mut near, Direction::Write, 2);
    let mut seen = [0; LEN as usize];
    assert_eq!(read_memory(second.0, base, &mut seen).expect("a child"), seen.len());
    assert!(seen.iter().all(|byte| *byte == 0xa5), "bytes landed in another process: {outcome:?}");
    assert_eq!(outcome, failed);
    assert_eq!(run(&mut near, Direction::Read, 3), failed);
    let mut kept = [0; LEN as usize];
    ours.peek(0, &mut kept);
    assert!(kept.iter().all(|byte| *byte == 7), "bytes of another process landed");
}
