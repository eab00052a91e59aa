//! A plane in another process, called through a socket: the test binary executed again.

use engine::core::time::Nanos;
use engine::fabric::{
    Address, Caps, DataEvent, DataPlane, Direction, FenceScope, Memory, OpId, PeerId, Placement,
    Refused, RegionDesc, RegionId, SessionId, Submit, Ticket, Wake,
};
use fabric_host::{HostConfig, HostPlane, HugePages, Pool};
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::task::Waker;

/// Set in the process that holds the plane.
const CHILD: &str = "FABRIC_HOST_TEST_CHILD";

/// What a child is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Setup {
    pub(crate) config: HostConfig,
    pub(crate) memory: u64,
    pub(crate) file: bool,
}

#[derive(Debug, Serialize, Deserialize)]
enum Call {
    Address,
    Memory,
    Register(RegionId, Memory),
    Deregister(RegionId),
    Connect(PeerId, Address, u64),
    Disconnect(PeerId),
    Open(SessionId, RegionId, PeerId, RegionDesc),
    Close(SessionId),
    Submit(OpId, SessionId, Direction, [Vec<u64>; 3]),
    Quiesce(SessionId, Ticket),
    Fence(PeerId),
    Poll(Nanos),
    Peek(u64, u64),
    Poke(u64, Vec<u8>),
}

#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Address(Address),
    Memory(Memory),
    Taken(Result<(), Refused>),
    Events(Vec<DataEvent>),
    Bytes(Vec<u8>),
}

fn send<T: Serialize>(mut socket: &UnixStream, value: &T) -> std::io::Result<()> {
    let bytes = rmp_serde::to_vec(value).expect("plain data");
    socket.write_all(&(bytes.len() as u64).to_le_bytes())?;
    socket.write_all(&bytes)
}

fn receive<T: for<'a> Deserialize<'a>>(mut socket: &UnixStream) -> std::io::Result<T> {
    let mut len = [0; 8];
    socket.read_exact(&mut len)?;
    let mut bytes = vec![0; u64::from_le_bytes(len) as usize];
    socket.read_exact(&mut bytes)?;
    Ok(rmp_serde::from_slice(&bytes).expect("both sides are one binary"))
}

/// Memory of a plane under test.
pub(crate) struct Bytes {
    own: Vec<u8>,
    pool: Option<Pool>,
}

impl Bytes {
    pub(crate) fn new(len: u64, file: bool) -> Bytes {
        let pool = file.then(|| Pool::new(len, HugePages::No).expect("a memory file"));
        let own = if file { Vec::new() } else { vec![0; len as usize] };
        Bytes { own, pool }
    }

    pub(crate) fn memory(&mut self) -> Memory {
        match &self.pool {
            Some(pool) => pool.memory(),
            None => {
                let base = self.own.as_mut_ptr() as u64;
                Memory::Own { base, len: self.own.len() as u64 }
            }
        }
    }

    pub(crate) fn start(&mut self) -> *mut u8 {
        self.pool.as_ref().map_or(self.own.as_mut_ptr(), Pool::start)
    }

    fn len(&self) -> u64 {
        self.pool.as_ref().map_or(self.own.len() as u64, Pool::len)
    }

    pub(crate) fn peek(&mut self, offset: u64, into: &mut [u8]) {
        assert!(offset + into.len() as u64 <= self.len());
        // SAFETY: Inside the memory.
        unsafe {
            std::ptr::copy(self.start().add(offset as usize), into.as_mut_ptr(), into.len());
        }
    }

    pub(crate) fn poke(&mut self, offset: u64, bytes: &[u8]) {
        assert!(offset + bytes.len() as u64 <= self.len());
        // SAFETY: Inside the memory.
        unsafe {
            std::ptr::copy(bytes.as_ptr(), self.start().add(offset as usize), bytes.len());
        }
    }
}

/// The body of the test `child`: serves the plane if this is the child, else does nothing.
pub(crate) fn serve_if_child() {
    let Ok(setup) = std::env::var(CHILD) else { return };
    let setup: Setup = toml::from_str(&setup).expect("the parent wrote it");
    let stdin = std::io::stdin().as_fd().try_clone_to_owned().expect("a descriptor");
    let socket = UnixStream::from(stdin);
    let mut plane = HostPlane::new(setup.config).expect("a plane");
    let mut bytes = Bytes::new(setup.memory, setup.file);
    while let Ok(call) = receive(&socket) {
        let mut done = |call: &mut dyn FnMut(&mut HostPlane)| {
            call(&mut plane);
            Answer::Taken(Ok(()))
        };
        let answer = match call {
            Call::Address => Answer::Address(plane.address()),
            Call::Memory => Answer::Memory(bytes.memory()),
            Call::Register(region, memory) => Answer::Taken(plane.register(region, memory)),
            Call::Deregister(region) => Answer::Taken(plane.deregister(region)),
            Call::Connect(peer, address, pass) => {
                Answer::Taken(plane.connect(peer, &address, pass))
            }
            Call::Disconnect(peer) => done(&mut |plane| plane.disconnect(peer)),
            Call::Open(session, local, peer, remote) => {
                Answer::Taken(plane.open(session, local, peer, &remote))
            }
            Call::Close(session) => done(&mut |plane| plane.close(session)),
            Call::Submit(op, session, direction, [local, remote, len]) => {
                let (local, remote, len) = (&local[..], &remote[..], &len[..]);
                let batch = Submit { op, session, direction, local, remote, len };
                Answer::Taken(plane.submit(batch))
            }
            Call::Quiesce(session, ticket) => done(&mut |plane| plane.quiesce(session, ticket)),
            Call::Fence(peer) => done(&mut |plane| plane.fence(peer)),
            Call::Poll(now) => {
                let mut events = Vec::new();
                plane.poll(now, &mut events);
                Answer::Events(events)
            }
            Call::Peek(offset, len) => {
                let mut into = vec![0; len as usize];
                bytes.peek(offset, &mut into);
                Answer::Bytes(into)
            }
            Call::Poke(offset, from) => done(&mut |_| bytes.poke(offset, &from)),
        };
        if send(&socket, &answer).is_err() {
            break;
        }
    }
}

/// A plane in a child process.
pub(crate) struct Remote {
    child: Child,
    socket: UnixStream,
    dead: bool,
    /// Bytes read by `memory` and `address` once, so that they need no `&mut`.
    address: RefCell<Option<Address>>,
}

impl Remote {
    /// Starts the child; the test binary has to have a test of the name `child`.
    pub(crate) fn start(setup: &Setup) -> Remote {
        let (socket, theirs) = UnixStream::pair().expect("a socket pair");
        let setup = toml::to_string(setup).expect("plain data");
        let child = Command::new(std::env::current_exe().expect("this binary"))
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env(CHILD, setup)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .spawn()
            .expect("the test binary runs");
        Remote { child, socket, dead: false, address: RefCell::default() }
    }

    fn ask(&self, call: &Call) -> Option<Answer> {
        if self.dead {
            return None;
        }
        send(&self.socket, call).ok()?;
        receive(&self.socket).ok()
    }

    fn take(&self, call: &Call) -> Result<(), Refused> {
        match self.ask(call) {
            Some(Answer::Taken(taken)) => taken,
            _ => Err(Refused::Gone),
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Stops the process; returns when it has stopped.
    pub(crate) fn stop(&self) {
        // SAFETY: Signals to, and waits for, our own child.
        unsafe {
            assert_eq!(libc::kill(self.pid() as i32, libc::SIGSTOP), 0);
            let mut status = 0;
            let got = libc::waitpid(self.pid() as i32, &raw mut status, libc::WUNTRACED);
            assert!(got > 0 && libc::WIFSTOPPED(status), "the child did not stop");
        }
    }

    /// Lets it go on.
    pub(crate) fn go_on(&self) {
        // SAFETY: A signal to our own child.
        assert_eq!(unsafe { libc::kill(self.pid() as i32, libc::SIGCONT) }, 0);
    }

    pub(crate) fn kill(&mut self) {
        self.dead = true;
        self.child.kill().expect("it can be killed");
        self.child.wait().expect("it ends");
    }

    pub(crate) fn memory(&self) -> Memory {
        match self.ask(&Call::Memory) {
            Some(Answer::Memory(memory)) => memory,
            other => panic!("no memory: {other:?}"),
        }
    }

    pub(crate) fn peek(&self, offset: u64, into: &mut [u8]) {
        match self.ask(&Call::Peek(offset, into.len() as u64)) {
            Some(Answer::Bytes(bytes)) => into.copy_from_slice(&bytes),
            other => panic!("no bytes: {other:?}"),
        }
    }

    pub(crate) fn poke(&self, offset: u64, bytes: &[u8]) {
        self.take(&Call::Poke(offset, bytes.to_vec())).expect("bytes are taken");
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        // A stopped child hears only this.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl DataPlane for Remote {
    fn caps(&self) -> Caps {
        let config = HostConfig::default();
        Caps {
            read: true,
            write: true,
            operations_max: config.operations_max,
            slices_max: config.slices_max,
            placement: Placement::OnCompletion,
            fence: FenceScope::Peer,
        }
    }

    fn address(&self) -> Address {
        if let Some(Answer::Address(address)) = self.ask(&Call::Address) {
            *self.address.borrow_mut() = Some(address);
        }
        self.address.borrow().clone().expect("asked before the end")
    }

    fn register(&mut self, region: RegionId, memory: Memory) -> Result<(), Refused> {
        self.take(&Call::Register(region, memory))
    }

    fn deregister(&mut self, region: RegionId) -> Result<(), Refused> {
        self.take(&Call::Deregister(region))
    }

    fn connect(&mut self, peer: PeerId, address: &Address, pass: u64) -> Result<(), Refused> {
        self.take(&Call::Connect(peer, address.clone(), pass))
    }

    fn disconnect(&mut self, peer: PeerId) {
        let _ = self.take(&Call::Disconnect(peer));
    }

    fn open(
        &mut self,
        session: SessionId,
        local: RegionId,
        peer: PeerId,
        remote: &RegionDesc,
    ) -> Result<(), Refused> {
        self.take(&Call::Open(session, local, peer, remote.clone()))
    }

    fn close(&mut self, session: SessionId) {
        let _ = self.take(&Call::Close(session));
    }

    fn submit(&mut self, batch: Submit<'_>) -> Result<(), Refused> {
        let lists = [batch.local.to_vec(), batch.remote.to_vec(), batch.len.to_vec()];
        self.take(&Call::Submit(batch.op, batch.session, batch.direction, lists))
    }

    fn quiesce(&mut self, session: SessionId, ticket: Ticket) {
        let _ = self.take(&Call::Quiesce(session, ticket));
    }

    fn fence(&mut self, peer: PeerId) {
        let _ = self.take(&Call::Fence(peer));
    }

    fn set_waker(&mut self, _waker: Waker) {}

    fn poll(&mut self, now: Nanos, out: &mut Vec<DataEvent>) -> Wake {
        if let Some(Answer::Events(events)) = self.ask(&Call::Poll(now)) {
            out.extend(events);
        }
        Wake::External
    }
}
