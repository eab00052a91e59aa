//! The process that initiates and measures.

use super::raw_tcp::RawStreams;
use super::target::{CHILD, WAYS, cpu, plane};
use super::workload::{AttachCall, LatencyStats, POOL, Workload, attach, fill, is_filled};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{
    Address, Completion, DataEvent, DataPlane, Direction, Memory, NextPoll, OpId, PeerId,
    RegionDesc, RegionId, SessionId, Submit,
};
use kvferry_fabric_host::{DataPath, HostPlane, HugePages, MemfdPool};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How bytes are moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyMethod {
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
    /// The same by TLS.
    EncryptedTcp,
    /// Nothing but the system calls, by so many streams.
    RawTcp(usize),
    /// From the child: this side copies.
    SharedRead,
    CrossRead,
}

impl CopyMethod {
    pub(crate) const ALL: [CopyMethod; 14] = [
        CopyMethod::Memcpy,
        CopyMethod::MemcpyFar,
        CopyMethod::Shared,
        CopyMethod::SharedRead,
        CopyMethod::Attach,
        CopyMethod::AttachRead,
        CopyMethod::AttachFar,
        CopyMethod::Cross,
        CopyMethod::CrossRead,
        CopyMethod::RawTcp(1),
        CopyMethod::RawTcp(2),
        CopyMethod::RawTcp(4),
        CopyMethod::Tcp,
        CopyMethod::EncryptedTcp,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            CopyMethod::Memcpy => "memcpy",
            CopyMethod::MemcpyFar => "memcpy, told",
            CopyMethod::Shared => "shared memory",
            CopyMethod::Attach => "bare writev",
            CopyMethod::AttachRead => "bare readv",
            CopyMethod::AttachFar => "readv, told",
            CopyMethod::Cross => "cross-memory",
            CopyMethod::Tcp => "tcp",
            CopyMethod::EncryptedTcp => "encrypted tcp",
            CopyMethod::RawTcp(1) => "raw tcp",
            CopyMethod::RawTcp(2) => "raw tcp, 2",
            CopyMethod::RawTcp(_) => "raw tcp, 4",
            CopyMethod::SharedRead => "shared, read",
            CopyMethod::CrossRead => "cross, read",
        }
    }

    fn reads(self) -> bool {
        matches!(self, CopyMethod::AttachRead | CopyMethod::SharedRead | CopyMethod::CrossRead)
    }

    /// Which of [`WAYS`] it goes, if it is that of a plane.
    fn way(self) -> Option<usize> {
        let at = |path, encrypt| WAYS.iter().position(|way| *way == (path, encrypt));
        match self {
            CopyMethod::Memcpy | CopyMethod::MemcpyFar => None,
            CopyMethod::Attach | CopyMethod::AttachRead | CopyMethod::AttachFar => None,
            CopyMethod::RawTcp(_) => None,
            CopyMethod::Shared | CopyMethod::SharedRead => at(DataPath::SharedMemory, false),
            CopyMethod::Cross | CopyMethod::CrossRead => at(DataPath::CrossMemory, false),
            CopyMethod::Tcp => at(DataPath::Tcp, false),
            CopyMethod::EncryptedTcp => at(DataPath::Tcp, true),
        }
    }
}

/// Blocks of the same size.
struct BlockBatch<'a> {
    direction: Direction,
    from: &'a [u64],
    to: &'a [u64],
    size: u64,
}

pub(crate) struct Initiator {
    child: Child,
    tell: ChildStdin,
    told: BufReader<ChildStdout>,
    pool: MemfdPool,
    /// Where the plain copy goes.
    copy: Vec<u8>,
    /// In the order of [`WAYS`].
    planes: Vec<HostPlane>,
    /// The child's pool in its address space, and the port of its echo.
    far: (u64, u16),
    /// To the child.
    raw: Option<RawStreams>,
    op: u64,
    seed: u64,
}

fn bytes(hex: &str) -> Arc<[u8]> {
    (0..hex.len() / 2)
        .map(|n| u8::from_str_radix(&hex[2 * n..2 * n + 2], 16).expect("hexadecimal"))
        .collect()
}

const SESSION: SessionId = SessionId(1);

impl Initiator {
    pub(crate) fn start() -> Initiator {
        let secret = std::env::temp_dir().join(format!("kvferry-bench-{}", std::process::id()));
        fs::write(&secret, "00112233445566778899aabbccddeeff").expect("a file");
        fs::set_permissions(&secret, Permissions::from_mode(0o400)).expect("its mode");
        let mut child = Command::new(std::env::current_exe().expect("this binary"))
            .env(CHILD, &secret)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the benchmark runs again");
        let tell = child.stdin.take().expect("piped");
        let told = BufReader::new(child.stdout.take().expect("piped"));
        let pool = MemfdPool::new(POOL, HugePages::No).expect("a pool");
        let (copy, planes, far) = (vec![1; POOL as usize], Vec::new(), (0, 0));
        let mut near =
            Initiator { child, tell, told, pool, copy, planes, far, raw: None, op: 0, seed: 0 };
        for way in WAYS {
            let line = near.hear();
            let (address, desc) = line.split_once(' ').expect("two words");
            let (mut plane, _) = plane(way, &secret, &near.pool);
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
        fs::remove_file(secret).expect("it is there");
        let line = near.hear();
        let mut words = line.split(' ').map(|word| word.parse().expect("a number"));
        let mut word = || words.next().expect("three words");
        near.far = (word(), word() as u16);
        near.raw = Some(RawStreams::connect(word() as u16));
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
    pub(crate) fn verify(&mut self, way: CopyMethod, row: &Workload, from: &[u64], to: &[u64]) {
        self.seed += 1;
        let (seed, size, pool) = (self.seed, row.size, self.pool.start());
        // SAFETY: Blocks of a row are inside every pool, and nothing is under way.
        let right = unsafe {
            self.copy.fill(0);
            if way.reads() {
                assert_eq!(self.ask(&format!("fill {} {seed}", row.name)), "filled");
                std::ptr::write_bytes(pool, 0, POOL as usize);
                self.run_method(way, row, from, to, 1);
                is_filled(pool, to, seed, size)
            } else {
                fill(pool, from, seed, size);
                assert_eq!(self.ask("clear"), "cleared");
                self.run_method(way, row, from, to, 1);
                match way {
                    CopyMethod::Memcpy => is_filled(self.copy.as_ptr(), to, seed, size),
                    _ => self.ask(&format!("verify {} {seed}", row.name)) == "true",
                }
            }
        };
        assert!(right, "{way:?} {row:?} moved other bytes");
    }

    pub(crate) fn measure(
        &mut self,
        way: CopyMethod,
        row: &Workload,
        from: &[u64],
        to: &[u64],
        (at_a_time, stats): (usize, &mut LatencyStats),
    ) {
        let (far, near) = (self.far_cpu(), cpu());
        let start = Instant::now();
        self.run_method(way, row, from, to, at_a_time);
        stats.times.push(start.elapsed());
        stats.near_cpu += cpu() - near;
        stats.far_cpu += self.far_cpu() - far;
    }

    fn run_method(
        &mut self,
        way: CopyMethod,
        row: &Workload,
        from: &[u64],
        to: &[u64],
        at_a_time: usize,
    ) {
        if let CopyMethod::RawTcp(streams) = way {
            let pool = self.pool.start() as u64;
            let raw = self.raw.as_ref().expect("connected when it started");
            // SAFETY: Blocks of a row are inside the pool.
            return unsafe { raw.send(streams, (pool, from), row, at_a_time) };
        }
        match way.way() {
            Some(by) => {
                let direction = if way.reads() { Direction::Read } else { Direction::Write };
                self.transfer(by, &BlockBatch { direction, from, to, size: row.size }, at_a_time);
            }
            None if matches!(way, CopyMethod::MemcpyFar | CopyMethod::AttachFar) => {
                let (what, source) = match (way, self.pool.memory()) {
                    (CopyMethod::MemcpyFar, Memory::MemFd { fd, .. }) => ("memcpy", fd as u64),
                    _ => ("readv", self.pool.start() as u64),
                };
                let told = self.ask(&format!("{what} {} {source} {at_a_time}", row.name));
                assert_eq!(told, "done");
            }
            None => (0..at_a_time).for_each(|_| match way {
                CopyMethod::Attach => self.attach(libc::process_vm_writev, row, from, to),
                CopyMethod::AttachRead => self.attach(libc::process_vm_readv, row, to, from),
                _ => self.plain(row, from, to),
            }),
        }
    }

    fn plain(&mut self, row: &Workload, from: &[u64], to: &[u64]) {
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
    fn attach(&self, call: AttachCall, row: &Workload, local: &[u64], remote: &[u64]) {
        let sides = [(self.pool.start() as u64, local), (self.far.0, remote)];
        // SAFETY: Ranges of both pools, and nothing else is under way.
        unsafe { attach(call, self.child.id(), sides, row.size) }
    }

    fn post(&mut self, by: usize, move_: &BlockBatch<'_>) -> OpId {
        self.op += 1;
        let op = OpId(self.op);
        let &BlockBatch { direction, from, to, size } = move_;
        let (local, remote) = if direction == Direction::Write { (from, to) } else { (to, from) };
        let len = vec![size; from.len()];
        let batch = Submit { op, session: SESSION, direction, local, remote, len: &len };
        self.planes[by].submit(batch).expect("a batch is taken");
        op
    }

    fn transfer(&mut self, by: usize, move_: &BlockBatch<'_>, at_a_time: usize) {
        let ops: Vec<OpId> = (0..at_a_time).map(|_| self.post(by, move_)).collect();
        for op in ops {
            let done = wait(
                &mut self.planes[by],
                |event| matches!(event, DataEvent::Completed { op: id, .. } if *id == op),
            );
            assert_eq!(done, DataEvent::Completed { op, outcome: Completion::Done });
        }
    }

    /// 64 bytes there and the word of it back.
    pub(crate) fn round_trips(&mut self) {
        println!("\nrtt64");
        let mut stats = [0; 5].map(|_| LatencyStats { bytes: 64, ..LatencyStats::default() });
        let mut echo = TcpStream::connect(("127.0.0.1", self.far.1)).expect("the echo listens");
        echo.set_nodelay(true).expect("loopback");
        let word = BlockBatch { direction: Direction::Write, from: &[0], to: &[0], size: 64 };
        for _ in 0..200 {
            for (n, stats) in stats.iter_mut().enumerate() {
                for round in 0..110 {
                    let start = Instant::now();
                    match WAYS.get(n) {
                        Some(_) => self.transfer(n, &word, 1),
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
        let names = ["shared memory", "cross-memory", "tcp", "encrypted tcp", "bare tcp echo"];
        for (name, stats) in names.iter().zip(&stats) {
            stats.print(name, &[]);
        }
    }

    /// A thousand operations of 32 blocks of 4 KiB in flight at a time.
    pub(crate) fn many(&mut self) {
        println!("\nmany (1000 x 32 x 4096 B)");
        let blocks: Vec<u64> = (0..32_000).map(|n| n * 8_192).collect();
        let write =
            |part| BlockBatch { direction: Direction::Write, from: part, to: part, size: 4_096 };
        for (by, (path, encrypt)) in WAYS.into_iter().enumerate() {
            let mut stats = LatencyStats { bytes: 32_000 * 4_096, ..LatencyStats::default() };
            for _ in 0..15 {
                let (far, near) = (self.far_cpu(), cpu());
                let start = Instant::now();
                let mut open: BTreeSet<OpId> =
                    blocks.chunks(32).map(|part| self.post(by, &write(part))).collect();
                while !open.is_empty() {
                    match wait(&mut self.planes[by], |_| true) {
                        DataEvent::Completed { op, outcome: Completion::Done } => open.remove(&op),
                        other => panic!("{other:?}"),
                    };
                }
                stats.times.push(start.elapsed());
                stats.near_cpu += cpu() - near;
                stats.far_cpu += self.far_cpu() - far;
            }
            let name = if encrypt { "encrypted tcp" } else { path.name() };
            stats.print(name, &[]);
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
            (None, NextPoll::Ready) => std::thread::yield_now(),
            (None, NextPoll::At(at)) => sleep(plane, Some(Duration::from_nanos(at.0))),
            (None, NextPoll::External) => sleep(plane, None),
        }
    }
}

/// Until the plane has news.
fn sleep(plane: &mut HostPlane, at_most: Option<Duration>) {
    let bell = plane.doorbell().expect("a descriptor to watch");
    let time = at_most.map(|time| Timespec::try_from(time).expect("not for years"));
    poll(&mut [PollFd::new(&bell, PollFlags::IN)], time.as_ref()).expect("a descriptor to watch");
}

impl Drop for Initiator {
    fn drop(&mut self) {
        let _ = writeln!(self.tell, "end");
        let _ = self.child.wait();
    }
}
