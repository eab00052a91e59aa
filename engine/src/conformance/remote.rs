//! A plane in another process, called through a socket: the test binary executed again.

use crate::core::time::Nanos;
use crate::fabric::{
    Address, Caps, DataEvent, DataPlane, Direction, Memory, OpId, PeerId, Refused, RegionDesc,
    RegionId, SessionId, Submit, Ticket, Wake,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::task::Waker;

/// Set in the process that holds the plane.
const CHILD: &str = "KVFERRY_CONFORMANCE_CHILD";

/// A plane and its memory, in the process that has them.
pub trait Served {
    /// The plane.
    fn plane(&mut self) -> &mut dyn DataPlane;

    /// The memory, the same each time; not registered yet.
    fn memory(&mut self) -> Memory;

    /// Copies out of that memory.
    fn peek(&mut self, offset: u64, into: &mut [u8]);

    /// Copies into that memory.
    fn poke(&mut self, offset: u64, bytes: &[u8]);

    /// Takes the plane's backend away, or lets it have a new one; false if it has none that could go.
    fn backend(&mut self, there: bool) -> bool {
        let _unused = there;
        false
    }
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

fn receive<T: DeserializeOwned>(mut socket: &UnixStream) -> std::io::Result<T> {
    let mut len = [0; 8];
    socket.read_exact(&mut len)?;
    let mut bytes = vec![0; u64::from_le_bytes(len) as usize];
    socket.read_exact(&mut bytes)?;
    Ok(rmp_serde::from_slice(&bytes).expect("both sides are one binary"))
}

/// The body of a test `child`: serves what `make` makes if this is such a process, else does nothing.
///
/// # Panics
/// If the parent is not of this binary.
pub fn serve_if_child<S: DeserializeOwned>(make: impl FnOnce(S) -> Box<dyn Served>) {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let stdin = std::io::stdin().as_fd().try_clone_to_owned().expect("a descriptor");
    let socket = UnixStream::from(stdin);
    let mut served = make(receive(&socket).expect("the parent says what to make"));
    while let Ok(call) = receive(&socket) {
        if send(&socket, &answer(&mut *served, call)).is_err() {
            break;
        }
    }
}

fn answer(served: &mut dyn Served, call: Call) -> Answer {
    let plane = served.plane();
    let taken = match call {
        Call::Address => return Answer::Address(plane.address()),
        Call::Memory => return Answer::Memory(served.memory()),
        Call::Register(region, memory) => plane.register(region, memory),
        Call::Deregister(region) => plane.deregister(region),
        Call::Connect(peer, address, pass) => plane.connect(peer, &address, pass),
        Call::Open(session, local, peer, remote) => plane.open(session, local, peer, &remote),
        Call::Submit(op, session, direction, [local, remote, len]) => {
            let (local, remote, len) = (&local[..], &remote[..], &len[..]);
            plane.submit(Submit { op, session, direction, local, remote, len })
        }
        Call::Disconnect(peer) => {
            plane.disconnect(peer);
            Ok(())
        }
        Call::Close(session) => {
            plane.close(session);
            Ok(())
        }
        Call::Quiesce(session, ticket) => {
            plane.quiesce(session, ticket);
            Ok(())
        }
        Call::Fence(peer) => {
            plane.fence(peer);
            Ok(())
        }
        Call::Poke(offset, from) => {
            served.poke(offset, &from);
            Ok(())
        }
        Call::Poll(now) => {
            let mut events = Vec::new();
            plane.poll(now, &mut events);
            return Answer::Events(events);
        }
        Call::Peek(offset, len) => {
            let mut into = vec![0; len as usize];
            served.peek(offset, &mut into);
            return Answer::Bytes(into);
        }
    };
    Answer::Taken(taken)
}

/// A plane in a child process.
#[derive(Debug)]
pub struct Remote {
    child: Child,
    socket: UnixStream,
    caps: Caps,
    dead: bool,
    /// Read once, so that it is known after the end.
    address: RefCell<Option<Address>>,
}

impl Remote {
    /// Starts the child, whose plane has these `caps`; the test binary has to have a test `child`
    /// that calls [`serve_if_child`].
    ///
    /// # Panics
    /// If the system starts no process.
    pub fn start(setup: &impl Serialize, caps: Caps) -> Remote {
        let (socket, theirs) = UnixStream::pair().expect("a socket pair");
        let child = Command::new(std::env::current_exe().expect("this binary"))
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env(CHILD, "1")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .spawn()
            .expect("the test binary runs");
        send(&socket, setup).expect("the child reads");
        Remote { child, socket, caps, dead: false, address: RefCell::default() }
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

    /// Process id of the child.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Kills the child.
    ///
    /// # Panics
    /// If it is not there.
    pub fn kill(&mut self) {
        self.dead = true;
        self.child.kill().expect("it can be killed");
        self.child.wait().expect("it ends");
    }
}

/// All of it panics if the child is not there.
impl Served for Remote {
    fn plane(&mut self) -> &mut dyn DataPlane {
        self
    }

    fn memory(&mut self) -> Memory {
        match self.ask(&Call::Memory) {
            Some(Answer::Memory(memory)) => memory,
            other => panic!("no memory: {other:?}"),
        }
    }

    fn peek(&mut self, offset: u64, into: &mut [u8]) {
        match self.ask(&Call::Peek(offset, into.len() as u64)) {
            Some(Answer::Bytes(bytes)) => into.copy_from_slice(&bytes),
            other => panic!("no bytes: {other:?}"),
        }
    }

    fn poke(&mut self, offset: u64, bytes: &[u8]) {
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
        self.caps
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
