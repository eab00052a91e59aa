//! A plane in another process, called through a socket: the test binary executed again.

use crate::core::command::DataCommand;
use crate::core::layout::Slices;
use crate::core::time::Nanos;
use crate::effects::perform_data;
use crate::fabric::{
    Address, Caps, DataEvent, DataPlane, Memory, NextPoll, PeerId, QuiesceTicket, Refused,
    RegionDesc, RegionId, SessionId, Submit,
};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
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
pub trait PlaneUnderTest {
    /// What calls go to and events are polled of, the same each time.
    fn plane(&mut self) -> &mut dyn DataPlane;

    /// The memory, the same each time; not registered yet.
    fn memory(&mut self) -> Memory;

    /// Copies out of that memory.
    fn peek(&mut self, offset: u64, into: &mut [u8]);

    /// Copies into that memory.
    fn poke(&mut self, offset: u64, bytes: &[u8]);

    /// Takes the plane's backend away, or lets it have a new one; false if it has none that could
    /// go.
    fn backend(&mut self, there: bool) -> bool {
        let _unused = there;
        false
    }
}

#[derive(Debug, Serialize, Deserialize)]
enum RemoteCall {
    Address,
    Memory,
    Call(DataCommand),
    Deregister(RegionId),
    Poll(Nanos),
    Peek(u64, u64),
    Poke(u64, Vec<u8>),
}

#[derive(Debug, Serialize, Deserialize)]
enum RemoteReply {
    Address(Address),
    Memory(Memory),
    Taken(Result<(), Refused>),
    Events(Vec<DataEvent>),
    Bytes(Vec<u8>),
}

fn send<T: Serialize>(mut socket: &UnixStream, value: &T) -> std::io::Result<()> {
    let bytes = rmp_serde::to_vec_named(value).expect("plain data");
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

/// The body of a test `child`: serves what `make` makes if this is such a process, else does
/// nothing.
///
/// # Panics
/// If the parent is not of this binary.
pub fn serve_if_child<S: DeserializeOwned>(make: impl FnOnce(S) -> Box<dyn PlaneUnderTest>) {
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

fn answer(served: &mut dyn PlaneUnderTest, call: RemoteCall) -> RemoteReply {
    let plane = served.plane();
    let taken = match call {
        RemoteCall::Address => return RemoteReply::Address(plane.address()),
        RemoteCall::Memory => return RemoteReply::Memory(served.memory()),
        // What comes as bytes is vouched for by nobody: what is served is.
        RemoteCall::Call(DataCommand::Register { region, memory }) => {
            let own = served.memory();
            let is_own = memory.unproven().is_some() && memory.len() == own.len();
            served.plane().register(region, if is_own { own } else { memory })
        }
        RemoteCall::Call(command) => {
            perform_data(plane, command).map_or(Ok(()), |refusal| Err(refusal.why()))
        }
        RemoteCall::Deregister(region) => plane.deregister(region),
        RemoteCall::Poke(offset, from) => {
            served.poke(offset, &from);
            Ok(())
        }
        RemoteCall::Poll(now) => {
            let mut events = Vec::new();
            plane.poll(now, &mut events);
            return RemoteReply::Events(events);
        }
        RemoteCall::Peek(offset, len) => {
            let mut into = vec![0; len as usize];
            served.peek(offset, &mut into);
            return RemoteReply::Bytes(into);
        }
    };
    RemoteReply::Taken(taken)
}

/// A plane in a child process.
#[derive(Debug)]
pub struct RemotePlane {
    child: Child,
    socket: UnixStream,
    caps: Caps,
    dead: bool,
    /// Read once, so that it is known after the end.
    address: RefCell<Option<Address>>,
}

impl RemotePlane {
    /// Starts the child, whose plane has these `caps`; the test binary has to have a test `child`
    /// that calls [`serve_if_child`].
    ///
    /// # Panics
    /// If the system starts no process.
    pub fn start(setup: &impl Serialize, caps: Caps) -> RemotePlane {
        let (socket, theirs) = UnixStream::pair().expect("a socket pair");
        let child = Command::new(std::env::current_exe().expect("this binary"))
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env(CHILD, "1")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .spawn()
            .expect("the test binary runs");
        send(&socket, setup).expect("the child reads");
        RemotePlane { child, socket, caps, dead: false, address: RefCell::default() }
    }

    fn ask(&self, call: &RemoteCall) -> Option<RemoteReply> {
        if self.dead {
            return None;
        }
        send(&self.socket, call).ok()?;
        receive(&self.socket).ok()
    }

    fn take(&self, call: &RemoteCall) -> Result<(), Refused> {
        match self.ask(call) {
            Some(RemoteReply::Taken(taken)) => taken,
            _ => Err(Refused::Gone),
        }
    }

    fn call(&self, command: DataCommand) -> Result<(), Refused> {
        self.take(&RemoteCall::Call(command))
    }

    /// Process id of the child.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    fn signal(&self, signal: Signal) -> Pid {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("our child");
        pid
    }

    /// Stops the child; returns when none of its threads runs any more.
    ///
    /// # Panics
    /// If it is not there.
    pub fn stop(&self) {
        let pid = self.signal(Signal::STOP);
        let stopped = waitpid(Some(pid), WaitOptions::UNTRACED).expect("our child");
        assert!(stopped.is_some_and(|(_, status)| status.stopped()), "{stopped:?}");
    }

    /// Lets it go on.
    ///
    /// # Panics
    /// If it is not there.
    pub fn go_on(&self) {
        self.signal(Signal::CONT);
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
impl PlaneUnderTest for RemotePlane {
    fn plane(&mut self) -> &mut dyn DataPlane {
        self
    }

    fn memory(&mut self) -> Memory {
        match self.ask(&RemoteCall::Memory) {
            Some(RemoteReply::Memory(memory)) => memory,
            other => panic!("no memory: {other:?}"),
        }
    }

    fn peek(&mut self, offset: u64, into: &mut [u8]) {
        match self.ask(&RemoteCall::Peek(offset, into.len() as u64)) {
            Some(RemoteReply::Bytes(bytes)) => into.copy_from_slice(&bytes),
            other => panic!("no bytes: {other:?}"),
        }
    }

    fn poke(&mut self, offset: u64, bytes: &[u8]) {
        self.take(&RemoteCall::Poke(offset, bytes.to_vec())).expect("bytes are taken");
    }
}

impl Drop for RemotePlane {
    fn drop(&mut self) {
        // A stopped child hears only this.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl DataPlane for RemotePlane {
    fn caps(&self) -> Caps {
        self.caps
    }

    fn address(&self) -> Address {
        if let Some(RemoteReply::Address(address)) = self.ask(&RemoteCall::Address) {
            *self.address.borrow_mut() = Some(address);
        }
        self.address.borrow().clone().expect("asked before the end")
    }

    fn register(&mut self, region: RegionId, memory: Memory) -> Result<(), Refused> {
        self.call(DataCommand::Register { region, memory })
    }

    fn deregister(&mut self, region: RegionId) -> Result<(), Refused> {
        self.take(&RemoteCall::Deregister(region))
    }

    fn connect(&mut self, peer: PeerId, address: &Address, fence_key: u64) -> Result<(), Refused> {
        self.call(DataCommand::Connect { peer, address: address.clone(), fence_key })
    }

    fn disconnect(&mut self, peer: PeerId) {
        let _ = self.call(DataCommand::Disconnect { peer });
    }

    fn open(
        &mut self,
        session: SessionId,
        local: RegionId,
        peer: PeerId,
        remote: &RegionDesc,
    ) -> Result<(), Refused> {
        self.call(DataCommand::Open { session, local, peer, remote: remote.clone() })
    }

    fn close(&mut self, session: SessionId) {
        let _ = self.call(DataCommand::Close { session });
    }

    fn submit(&mut self, batch: Submit<'_>) -> Result<(), Refused> {
        let Submit { op, session, direction, local, remote, len } = batch;
        let slices = Slices { local: local.into(), remote: remote.into(), len: len.into() };
        self.call(DataCommand::Submit { op, session, direction, slices })
    }

    fn quiesce(&mut self, session: SessionId, ticket: QuiesceTicket) {
        let _ = self.call(DataCommand::Quiesce { session, ticket });
    }

    fn fence(&mut self, peer: PeerId) {
        let _ = self.call(DataCommand::Fence { peer });
    }

    fn set_waker(&mut self, _waker: Waker) {}

    fn poll(&mut self, now: Nanos, out: &mut Vec<DataEvent>) -> NextPoll {
        if let Some(RemoteReply::Events(events)) = self.ask(&RemoteCall::Poll(now)) {
            out.extend(events);
        }
        NextPoll::External
    }
}
