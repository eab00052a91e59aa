//! The process that initiates and measures.

use super::child::{CHILD, cpu, plane};
use super::work::{AttachCall, POOL, Row, Stats, attach, fill, is_filled};
use engine::core::time::Nanos;
use engine::fabric::{
    Address, DataEvent, DataPlane, Direction, Memory, OpId, Outcome, PeerId, RegionDesc, RegionId,
    SessionId, Submit, Wake,
};
use fabric_host::{HostPlane, HugePages, Path, Pool};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How bytes are moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Within this process.
    Memcpy,
    /// In the child, which maps this side's pool, is told by a pipe and answers by one: what a push
    /// is.
    MemcpyFar,
    Shared,
    /// Nothing but the system call, `process_vm_writev`.
    Attach,
    /// The same with `process_vm_readv`, which is what planes call.
    AttachRead,
    /// The same in the child, told by the pipe.
    AttachFar,
    Cross,
    Tcp,
    /// From the child: this side copies.
    SharedRead,
    CrossRead,
}

impl Way {
    pub(crate) const ALL: [Way; 10] = [
        Way::Memcpy,
        Way::MemcpyFar,
        Way::Shared,
        Way::SharedRead,
        Way::Attach,
        Way::AttachRead,
        Way::AttachFar,
        Way::Cross,
        Way::CrossRead,
        Way::Tcp,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Way::Memcpy => "memcpy",
            Way::MemcpyFar => "memcpy, told",
            Way::Shared => "shared memory",
            Way::Attach => "bare writev",
            Way::AttachRead => "bare readv",
            Way::AttachFar => "readv, told",
            Way::Cross => "cross-memory",
            Way::Tcp => "tcp",
            Way::SharedRead => "shared, read",
            Way::CrossRead => "cross, read",
        }
    }

    fn reads(self) -> bool {
        matches!(self, Way::AttachRead | Way::SharedRead | Way::CrossRead)
    }

    fn path(self) -> Option<Path> {
        match self {
            Way::Memcpy | Way::MemcpyFar => None,
            Way::Attach | Way::AttachRead | Way::AttachFar => None,
            Way::Shared | Way::SharedRead => Some(Path::SharedMemory),
            Way::Cross | Way::CrossRead => Some(Path::CrossMemory),
            Way::Tcp => Some(Path::Tcp),
        }
    }
}

/// Blocks of the same size.
struct Move<'a> {
    direction: Direction,
    from: &'a [u64],
    to: &'a [u64],
    size: u64,
}

pub(crate) struct Near {
    child: Child,
    tell: ChildStdin,
    told: BufReader<ChildStdout>,
    pool: Pool,
    /// Where the plain copy goes.
    copy: Vec<u8>,
    planes: Vec<HostPlane>,
    /// The child's pool in its address space, and the port of its echo.
    far: (u64, u16),
    op: u64,
    seed: u64,
}

fn bytes(hex: &str) -> Arc<[u8]> {
    (0..hex.len() / 2)
        .map(|n| u8::from_str_radix(&hex[2 * n..2 * n + 2], 16).expect("hexadecimal"))
        .collect()
}

const SESSION: SessionId = SessionId(1);

impl Near {
    pub(crate) fn start() -> Near {
        let mut child = Command::new(std::env::current_exe().expect("this binary"))
            .env(CHILD, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the benchmark runs again");
        let tell = child.stdin.take().expect("piped");
        let told = BufReader::new(child.stdout.take().expect("piped"));
        let pool = Pool::new(POOL, HugePages::No).expect("a pool");
        let (copy, planes) = (vec![1; POOL as usize], Vec::new());
        let mut near = Near { child, tell, told, pool, copy, planes, far: (0, 0), op: 0, seed: 0 };
        for path in Path::ALL {
            let line = near.hear();
            let (address, desc) = line.split_once(' ').expect("two words");
            let (mut plane, _) = plane(path, &near.pool);
            plane.doorbell().expect("a descriptor to watch");
            plane.connect(PeerId(1), &Address(bytes(address)), 0).expect("a peer");
            let desc = RegionDesc(bytes(desc));
            plane.open(SESSION, RegionId(1), PeerId(1), &desc).expect("an open is taken");
            match wait(&mut plane, |_| true) {
                DataEvent::Opened { result: Ok(()), .. } => {}
                other => panic!("not opened: {other:?}"),
            }
            near.planes.push(plane);
        }
        let line = near.hear();
        let (base, port) = line.split_once(' ').expect("two words");
        near.far = (base.parse().expect("a number"), port.parse().expect("a port"));
        near
    }

    fn hear(&mut self) -> String {
        let mut line = String::new();
        self.told.read_line(&mut line).expect("the child lives");
        line.trim().into()
    }

    fn ask(&mut self, line: &str) -> String {
        writeln!(self.tell, "{line}").expect("the child lives");
        self.hear()
    }

    fn far_cpu(&mut self) -> Duration {
        Duration::from_nanos(self.ask("cpu").parse().expect("nanoseconds"))
    }

    /// Moves known bytes and has them compared.
    pub(crate) fn verify(&mut self, way: Way, row: &Row, from: &[u64], to: &[u64]) {
        self.seed += 1;
        let (seed, size, pool) = (self.seed, row.size, self.pool.start());
        // SAFETY: Blocks of a row are inside every pool, and nothing is under way.
        let right = unsafe {
            self.copy.fill(0);
            if way.reads() {
                assert_eq!(self.ask(&format!("fill {} {seed}", row.name)), "filled");
                std::ptr::write_bytes(pool, 0, POOL as usize);
                self.go(way, row, from, to, 1);
                is_filled(pool, to, seed, size)
            } else {
                fill(pool, from, seed, size);
                assert_eq!(self.ask("clear"), "cleared");
                self.go(way, row, from, to, 1);
                match way {
                    Way::Memcpy => is_filled(self.copy.as_ptr(), to, seed, size),
                    _ => self.ask(&format!("verify {} {seed}", row.name)) == "true",
                }
            }
        };
        assert!(right, "{way:?} {row:?} moved other bytes");
    }

    pub(crate) fn measure(
        &mut self,
        way: Way,
        row: &Row,
        from: &[u64],
        to: &[u64],
        (at_a_time, stats): (usize, &mut Stats),
    ) {
        let (far, near) = (self.far_cpu(), cpu());
        let start = Instant::now();
        self.go(way, row, from, to, at_a_time);
        stats.times.push(start.elapsed());
        stats.near_cpu += cpu() - near;
        stats.far_cpu += self.far_cpu() - far;
    }

    fn go(&mut self, way: Way, row: &Row, from: &[u64], to: &[u64], at_a_time: usize) {
        match way.path() {
            Some(path) => {
                let direction = if way.reads() { Direction::Read } else { Direction::Write };
                self.transfer(path, &Move { direction, from, to, size: row.size }, at_a_time);
            }
            None if matches!(way, Way::MemcpyFar | Way::AttachFar) => {
                let (what, source) = match (way, self.pool.memory()) {
                    (Way::MemcpyFar, Memory::MemFd { fd, .. }) => ("memcpy", fd as u64),
                    _ => ("readv", self.pool.start() as u64),
                };
                let told = self.ask(&format!("{what} {} {source} {at_a_time}", row.name));
                assert_eq!(told, "done");
            }
            None => (0..at_a_time).for_each(|_| match way {
                Way::Attach => self.attach(libc::process_vm_writev, row, from, to),
                Way::AttachRead => self.attach(libc::process_vm_readv, row, to, from),
                _ => self.plain(row, from, to),
            }),
        }
    }

    fn plain(&mut self, row: &Row, from: &[u64], to: &[u64]) {
        for (from, to) in from.iter().zip(to) {
            // SAFETY: Inside the pool and the buffer.
            unsafe {
                let source = self.pool.start().add(*from as usize);
                let target = self.copy.as_mut_ptr().add(*to as usize);
                std::ptr::copy_nonoverlapping(source, target, row.size as usize);
            }
        }
    }

    /// Nothing but the system call.
    fn attach(&self, call: AttachCall, row: &Row, local: &[u64], remote: &[u64]) {
        let sides = [(self.pool.start() as u64, local), (self.far.0, remote)];
        // SAFETY: Ranges of both pools, and nothing else is under way.
        unsafe { attach(call, self.child.id(), sides, row.size) }
    }

    fn post(&mut self, path: Path, move_: &Move<'_>) -> OpId {
        self.op += 1;
        let op = OpId(self.op);
        let &Move { direction, from, to, size } = move_;
        let (local, remote) = if direction == Direction::Write { (from, to) } else { (to, from) };
        let len = vec![size; from.len()];
        let batch = Submit { op, session: SESSION, direction, local, remote, len: &len };
        self.planes[path as usize].submit(batch).expect("a batch is taken");
        op
    }

    fn transfer(&mut self, path: Path, move_: &Move<'_>, at_a_time: usize) {
        let ops: Vec<OpId> = (0..at_a_time).map(|_| self.post(path, move_)).collect();
        for op in ops {
            let done = wait(
                &mut self.planes[path as usize],
                |event| matches!(event, DataEvent::Completed { op: id, .. } if *id == op),
            );
            assert_eq!(done, DataEvent::Completed { op, outcome: Outcome::Done });
        }
    }

    /// 64 bytes there and the word of it back.
    pub(crate) fn round_trips(&mut self) {
        println!("\nrtt64");
        let mut stats = [0; 4].map(|_| Stats { bytes: 64, ..Stats::default() });
        let mut echo = TcpStream::connect(("127.0.0.1", self.far.1)).expect("the echo listens");
        echo.set_nodelay(true).expect("loopback");
        let word = Move { direction: Direction::Write, from: &[0], to: &[0], size: 64 };
        for _ in 0..200 {
            for (n, stats) in stats.iter_mut().enumerate() {
                for round in 0..110 {
                    let start = Instant::now();
                    match Path::ALL.get(n) {
                        Some(path) => self.transfer(*path, &word, 1),
                        None => {
                            echo.write_all(&[1; 64]).expect("the echo hears");
                            echo.read_exact(&mut [0; 64]).expect("the echo answers");
                        }
                    }
                    // The first of a turn wake those who slept.
                    if round >= 10 {
                        stats.times.push(start.elapsed());
                    }
                }
            }
        }
        for (name, stats) in
            ["shared memory", "cross-memory", "tcp", "bare tcp echo"].iter().zip(&stats)
        {
            stats.print(name, &[]);
        }
    }

    /// A thousand operations of 32 blocks of 4 KiB in flight at a time.
    pub(crate) fn many(&mut self) {
        println!("\nmany (1000 x 32 x 4096 B)");
        let blocks: Vec<u64> = (0..32_000).map(|n| n * 8_192).collect();
        let write = |part| Move { direction: Direction::Write, from: part, to: part, size: 4_096 };
        for path in Path::ALL {
            let mut stats = Stats { bytes: 32_000 * 4_096, ..Stats::default() };
            for _ in 0..15 {
                let (far, near) = (self.far_cpu(), cpu());
                let start = Instant::now();
                let mut open: BTreeSet<OpId> =
                    blocks.chunks(32).map(|part| self.post(path, &write(part))).collect();
                while !open.is_empty() {
                    match wait(&mut self.planes[path as usize], |_| true) {
                        DataEvent::Completed { op, outcome: Outcome::Done } => open.remove(&op),
                        other => panic!("{other:?}"),
                    };
                }
                stats.times.push(start.elapsed());
                stats.near_cpu += cpu() - near;
                stats.far_cpu += self.far_cpu() - far;
            }
            stats.print(path.name(), &[]);
        }
    }
}

/// The next event of a kind; sleeps when the plane says so.
fn wait(plane: &mut HostPlane, wanted: impl Fn(&DataEvent) -> bool) -> DataEvent {
    thread_local! {
        static LATER: std::cell::RefCell<std::collections::VecDeque<DataEvent>> =
            const { std::cell::RefCell::new(std::collections::VecDeque::new()) };
    }
    let mut events = Vec::new();
    loop {
        let found = LATER.with_borrow_mut(|later| {
            let wake = plane.poll(Nanos::ZERO, &mut events);
            later.extend(events.drain(..));
            let at = later.iter().position(&wanted);
            (at.and_then(|at| later.remove(at)), wake)
        });
        match found {
            (Some(event), _) => return event,
            // The thread that is waited for may be queued behind this one.
            (None, Wake::Ready) => std::thread::yield_now(),
            (None, Wake::At(at)) => sleep(plane, Some(Duration::from_nanos(at.0))),
            (None, Wake::External) => sleep(plane, None),
        }
    }
}

/// Until the plane has news.
fn sleep(plane: &mut HostPlane, at_most: Option<Duration>) {
    let bell = plane.doorbell().expect("a descriptor to watch");
    let time = at_most.map(|time| Timespec::try_from(time).expect("not for years"));
    poll(&mut [PollFd::new(&bell, PollFlags::IN)], time.as_ref()).expect("a descriptor to watch");
    let _ = rustix::io::read(bell, &mut [0; 8]);
}

impl Drop for Near {
    fn drop(&mut self) {
        let _ = writeln!(self.tell, "end");
        let _ = self.child.wait();
    }
}
