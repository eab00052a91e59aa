//! Over a plane that does what it likes with bytes and batches.

use super::args::{BenchArgs, BenchPlan};
use super::batch::BatchShape;
use super::check::check;
use super::connection::BenchConnection;
use super::harness::PlaneHarness;
use super::measure::{BenchCase, BenchSession};
use super::memory::BenchMemory;
use super::{CommandError, Exit, check_bytes, server};
use crate::instance::PlaneConfig;
use clap::Parser;
use kvferry_engine::core::Nanos;
use kvferry_engine::fabric::{
    Address, Caps, Completion, Credits, DataEvent, DataPlane, Direction, FabricError, FenceScope,
    Landed, Memory, NextPoll, PeerId, Placement, PlaneTimeouts, QuiesceTicket, Refused, RegionDesc,
    RegionId, SessionId, Submit,
};
use kvferry_fabric_host::HostConfig;
use std::fs::File;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::task::Waker;
use std::thread::{self, JoinHandle};
use std::time::Duration;

const MEMORY: u64 = 1 << 16;
const PATIENCE: Duration = Duration::from_secs(60);

/// What becomes of batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Conduct {
    Right,
    /// They complete and nothing is moved.
    Idle,
    /// The remote ranges are taken in the other order.
    Misplaced,
    Stuck,
    Failing,
}

struct Stub {
    conduct: Conduct,
    /// Memory of this side, and of the other one.
    files: [File; 2],
    events: Vec<DataEvent>,
    /// Operations that it has room for, and those that it says it has room for.
    room: usize,
    operations_max: u32,
}

impl Stub {
    fn copy(&self, batch: &Submit<'_>) {
        let mut remote = batch.remote.to_vec();
        if self.conduct == Conduct::Misplaced {
            remote.reverse();
        }
        for ((local, remote), len) in batch.local.iter().zip(remote).zip(batch.len) {
            let mut sides = [(&self.files[0], *local), (&self.files[1], remote)];
            if batch.direction == Direction::Read {
                sides.reverse();
            }
            let mut bytes = vec![0; *len as usize];
            let [(from, at), (to, there)] = sides;
            from.read_exact_at(&mut bytes, at).expect("inside");
            to.write_all_at(&bytes, there).expect("inside");
        }
    }
}

impl DataPlane for Stub {
    fn caps(&self) -> Caps {
        Caps {
            read: true,
            write: true,
            slices_max: 64,
            per_peer: Credits::UNLIMITED,
            in_all: Credits::of_operations(self.operations_max),
            placement: Placement::OnQuiet,
            fence: FenceScope::Peer,
            patience: PlaneTimeouts::default(),
        }
    }

    fn address(&self) -> Address {
        Address(Arc::default())
    }

    fn register(&mut self, _: RegionId, _: Memory) -> Result<(), Refused> {
        Ok(())
    }

    fn deregister(&mut self, _: RegionId) -> Result<(), Refused> {
        Ok(())
    }

    fn connect(&mut self, _: PeerId, _: &Address, _: u64) -> Result<(), Refused> {
        Ok(())
    }

    fn disconnect(&mut self, _: PeerId) {}

    fn open(
        &mut self,
        _: SessionId,
        _: RegionId,
        _: PeerId,
        _: &RegionDesc,
    ) -> Result<(), Refused> {
        Ok(())
    }

    fn close(&mut self, _: SessionId) {}

    fn submit(&mut self, batch: Submit<'_>) -> Result<(), Refused> {
        if self.events.len() >= self.room {
            return Err(Refused::Busy);
        }
        let outcome = match self.conduct {
            Conduct::Stuck => return Ok(()),
            Conduct::Failing => {
                Completion::Failed { cause: FabricError::QueuePair, landed: Landed::Unknown }
            }
            _ => Completion::Done,
        };
        if matches!(self.conduct, Conduct::Right | Conduct::Misplaced) {
            self.copy(&batch);
        }
        self.events.push(DataEvent::Completed { op: batch.op, outcome });
        Ok(())
    }

    fn quiesce(&mut self, session: SessionId, ticket: QuiesceTicket) {
        self.events.push(DataEvent::Quiet { session, ticket });
    }

    fn fence(&mut self, _: PeerId) {}

    fn set_waker(&mut self, _: Waker) {}

    /// One at a time.
    fn poll(&mut self, _: Nanos, out: &mut Vec<DataEvent>) -> NextPoll {
        out.extend((!self.events.is_empty()).then(|| self.events.remove(0)));
        match self.events.is_empty() {
            true => NextPoll::External,
            false => NextPoll::Ready,
        }
    }
}

/// A side over such a plane, and a thread that is the other one.
struct HarnessPair {
    side: PlaneHarness,
    line: BenchConnection,
    far: JoinHandle<()>,
}

fn memory(patience: Duration) -> (BenchPlan, BenchMemory, File) {
    let plane = PlaneConfig::Host(HostConfig::default());
    let plan = BenchPlan { plane, device: None, memory: MEMORY, patience };
    let bytes = BenchMemory::new(&plan).expect("memory");
    let BenchMemory::Host { file, .. } = &bytes else { panic!("memory of the host") };
    let file = file.try_clone().expect("a descriptor");
    (plan, bytes, file)
}

/// The other side answers so many questions and goes.
fn pair(conduct: Conduct, room: usize, patience: Duration, answers: usize) -> HarnessPair {
    let (plan, bytes, near) = memory(patience);
    let (far_plan, far_bytes, far) = memory(PATIENCE);
    let stub = |file: &File, other: &File| {
        let files = [file, other].map(|file| file.try_clone().expect("a descriptor"));
        Box::new(Stub { conduct, files, events: Vec::new(), room, operations_max: 6 })
    };
    let (plane, far_plane) = (stub(&near, &far), stub(&far, &near));
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let address = listener.local_addr().expect("bound");
    let far = thread::spawn(move || {
        let line =
            BenchConnection::new(listener.accept().expect("a connection").0).expect("a line");
        let mut side = PlaneHarness::with_plane(far_plane, far_bytes, &far_plan, Arc::default());
        for _ in 0..answers {
            let Ok(text) = side.recv_line(&line, "a question") else { return };
            let answer = server::answer(&side, &serde_json::from_str(&text).expect("a question"));
            line.send(&answer).expect("it is heard");
        }
    });
    let line =
        BenchConnection::new(TcpStream::connect(address).expect("it listens")).expect("a line");
    HarnessPair { side: PlaneHarness::with_plane(plane, bytes, &plan, Arc::default()), line, far }
}

impl HarnessPair {
    fn lane(&mut self) -> BenchSession<'_> {
        BenchSession { side: &mut self.side, line: &self.line, operations: 0 }
    }

    fn end(self) {
        drop(self.line);
        self.far.join().expect("the other side holds out");
    }
}

fn kind(direction: Direction) -> BenchCase {
    BenchCase { direction, shape: BatchShape::new(1_000, 5, MEMORY).expect("room") }
}

fn said(stop: CommandError) -> String {
    match stop {
        CommandError::Input(text) => text,
        CommandError::Output(why) => panic!("{why}"),
    }
}

#[test]
fn bytes_that_are_not_there_are_found() {
    for direction in [Direction::Write, Direction::Read] {
        for conduct in [Conduct::Right, Conduct::Idle, Conduct::Misplaced] {
            let mut pair = pair(conduct, 1, PATIENCE, usize::MAX);
            let found = check(&mut pair.lane(), kind(direction), 7);
            let found = found.unwrap_or_else(|why| panic!("{direction:?} {conduct:?}: {why}"));
            assert_eq!(found.is_none(), conduct == Conduct::Right, "{direction:?}: {found:?}");
            assert!(found.is_none_or(|text| text.contains("of 5 x 1000: wrong bytes")));
            pair.end();
        }
    }
}

#[test]
fn wrong_bytes_are_the_exit_of_the_command() {
    #[derive(Parser)]
    struct BenchCli {
        #[command(flatten)]
        args: BenchArgs,
    }
    let args = BenchCli::parse_from(["bench"]).args;
    let kinds = [Direction::Write, Direction::Read].map(kind);
    for (conduct, exit) in [(Conduct::Right, Exit::HELD), (Conduct::Idle, Exit::CORRECTNESS)] {
        let mut pair = pair(conduct, 1, PATIENCE, usize::MAX);
        for other_of_host in [true, false] {
            let mut out = Vec::new();
            let ended = check_bytes(&args, &mut pair.lane(), &kinds, other_of_host, &mut out);
            let expected = if other_of_host { exit } else { Exit::HELD };
            assert_eq!(ended.map_err(said), Ok(expected), "{conduct:?}");
            let out = String::from_utf8(out).expect("text");
            let right = out.matches(": right\n").count();
            let all = other_of_host && conduct == Conduct::Right;
            assert_eq!(right, if all { 2 } else { 0 }, "{out}");
            assert_eq!(out.contains("were not compared"), !other_of_host, "{out}");
        }
        pair.end();
    }
}

#[test]
fn no_more_batches_are_in_flight_than_the_plane_takes() {
    for (room, inflight, most) in [(3, 8, 3), (100, 4, 4), (100, 8, 6)] {
        let mut pair = pair(Conduct::Right, room, PATIENCE, usize::MAX);
        let span = Duration::from_millis(1);
        let figures = pair.lane().row(kind(Direction::Write), span, inflight).expect("a row");
        assert_eq!(figures.inflight, most);
        assert!(figures.p50 <= figures.p99 && figures.mean > Duration::ZERO, "{figures:?}");
        assert!(figures.serial_rate > 0.0 && figures.pipelined_rate > 0.0, "{figures:?}");
        pair.end();
    }
}

#[test]
fn batches_that_fail_or_never_end_are_errors() {
    let one = |conduct, room, patience, answers| {
        let mut pair = pair(conduct, room, patience, answers);
        let ended = pair.lane().row(kind(Direction::Read), Duration::ZERO, 1);
        let text = said(ended.expect_err("no row"));
        pair.end();
        text
    };
    let failed = one(Conduct::Failing, 1, PATIENCE, usize::MAX);
    assert_eq!(failed, "read of 5 x 1000: queue pair error");
    let short = Duration::from_millis(50);
    let late = "read of 5 x 1000: nothing came within 0.05 s (--timeout)";
    assert_eq!(one(Conduct::Stuck, 1, short, usize::MAX), late);
    // It never has room.
    assert_eq!(one(Conduct::Right, 0, short, usize::MAX), late);
    // The other side goes at once.
    let gone = one(Conduct::Stuck, 1, PATIENCE, 0);
    assert!(gone.contains("read of 5 x 1000: the other side, 127.0.0.1:"), "{gone}");
    assert!(gone.contains("has ended its connection"), "{gone}");
}
