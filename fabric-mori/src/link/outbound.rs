//! What is asked of a peer's acceptor.

use super::{
    MoriAcceptorMessage, MoriDiallerMessage, MoriHello, MoriRegionGrant, PURPOSE, receive, send,
};
use crate::address::MoriMemoryKey;
use kvferry_engine::fabric::{PeerId, RegionId, SessionId};
use kvferry_fabric_common::{PlaneIdentity, lock, set_keepalive, spawn};
use kvferry_trust::{FleetSecret, NO_SECRET, ProofError};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use std::io;
use std::net::{Ipv4Addr, Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// What a peer tells of a region, or why it does not.
pub(crate) type MoriGrantResult = Result<MoriRegionGrant, String>;

/// What a line tells.
#[derive(Debug)]
pub(crate) enum MoriLinkEvent {
    Told {
        session: SessionId,
        answer: MoriGrantResult,
    },
    /// The peer wants a region to be left, or all, for which the line is to be hung up in the end.
    Leave(Arc<MoriOutboundLink>, Option<RegionId>),
    /// The line has ended, and the peer with it or its trust in us.
    Over {
        peer: PeerId,
        line: u64,
        why: String,
    },
}

/// What is known of the socket.
#[derive(Debug, Default)]
enum MoriLinkState {
    /// Asks that wait for the connection.
    #[default]
    Dialling,
    Up(TcpStream),
    Over,
}

/// A connection to a peer's acceptor, which a thread of its own makes and reads.
#[derive(Debug)]
pub(crate) struct MoriOutboundLink {
    pub(crate) id: u64,
    state: Mutex<(MoriLinkState, Vec<MoriDiallerMessage>)>,
    /// What was asked for last.
    last: Mutex<Option<(SessionId, MoriMemoryKey)>>,
}

/// How a line is made.
#[derive(Debug)]
pub(crate) struct MoriDialRequest {
    pub(crate) peer: PeerId,
    pub(crate) id: u64,
    pub(crate) host: Arc<str>,
    pub(crate) port: u16,
    /// Incarnation that is meant.
    pub(crate) to: u64,
    pub(crate) who: PlaneIdentity,
    pub(crate) fence_key: u64,
    pub(crate) patience: Duration,
    pub(crate) dead_ms: u32,
    /// What the fleet knows; none to prove nothing.
    pub(crate) secret: Option<Arc<FleetSecret>>,
}

/// Says hello; if there is a secret, until both sides are proven.
fn say_hello(socket: &TcpStream, dial: &MoriDialRequest) -> io::Result<()> {
    let (who, fence_key, to) = (dial.who.clone(), dial.fence_key, dial.to);
    let hello = MoriHello { who, fence_key, to, offer: None };
    let Some(secret) = &dial.secret else { return send(socket, &hello) };
    let said = hello.said();
    let offer = secret.offer().map_err(io::Error::other)?;
    send(socket, &MoriHello { offer: Some(offer.clone()), ..hello })?;
    socket.set_read_timeout(Some(dial.patience))?;
    let answer = match receive(socket)? {
        MoriAcceptorMessage::Prove(answer) => answer,
        MoriAcceptorMessage::Refused { why } => return Err(io::Error::other(why)),
        _ => return Err(io::Error::other(NO_SECRET)),
    };
    socket.set_read_timeout(None)?;
    let (proof, _) = secret.confirm((PURPOSE, &said), &offer, &answer).map_err(io::Error::other)?;
    send(socket, &MoriDiallerMessage::Proven(proof))
}

impl MoriOutboundLink {
    /// Dials; `say` is called by the thread of the line.
    pub(crate) fn dial(
        dial: MoriDialRequest,
        say: impl Fn(MoriLinkEvent) + Send + Sync + 'static,
    ) -> Arc<MoriOutboundLink> {
        let (state, last) = (Mutex::default(), Mutex::default());
        let line = Arc::new(MoriOutboundLink { id: dial.id, state, last });
        let ours = line.clone();
        let (peer, id) = (dial.peer, dial.id);
        let say = Arc::new(say);
        let thread = {
            let say = say.clone();
            move || {
                let over = ours.run(&dial, &*say);
                let why = over.err().map_or_else(|| "closed".into(), |why| why.to_string());
                ours.lock().0 = MoriLinkState::Over;
                say(MoriLinkEvent::Over { peer, line: id, why });
            }
        };
        if let Err(why) = spawn("kvferry-dial", thread) {
            line.lock().0 = MoriLinkState::Over;
            say(MoriLinkEvent::Over { peer, line: id, why: why.to_string() });
        }
        line
    }

    fn lock(&self) -> MutexGuard<'_, (MoriLinkState, Vec<MoriDiallerMessage>)> {
        lock(&self.state)
    }

    fn run(
        self: &Arc<Self>,
        dial: &MoriDialRequest,
        say: &dyn Fn(MoriLinkEvent),
    ) -> io::Result<()> {
        let host: Ipv4Addr = dial.host.parse().map_err(io::Error::other)?;
        let socket = TcpStream::connect_timeout(&(host, dial.port).into(), dial.patience)?;
        set_keepalive(&socket, dial.dead_ms)?;
        say_hello(&socket, dial)?;
        {
            let mut state = self.lock();
            if matches!(state.0, MoriLinkState::Over) {
                return Ok(());
            }
            for ask in state.1.drain(..) {
                send(&socket, &ask)?;
            }
            state.0 = MoriLinkState::Up(socket.try_clone()?);
        }
        loop {
            say(match receive(&socket)? {
                MoriAcceptorMessage::Told { session, grant } => {
                    MoriLinkEvent::Told { session: SessionId(session), answer: grant }
                }
                MoriAcceptorMessage::Release { region } => {
                    MoriLinkEvent::Leave(self.clone(), Some(region))
                }
                MoriAcceptorMessage::Leave => MoriLinkEvent::Leave(self.clone(), None),
                MoriAcceptorMessage::Refused { why } => return Err(io::Error::other(why)),
                MoriAcceptorMessage::Prove(_) => return Err(io::Error::other(ProofError::Wrong)),
            });
        }
    }

    /// Asks for memory on behalf of a session; nothing comes of it if the line is over, which is
    /// told.
    pub(crate) fn ask(&self, session: SessionId, name: MoriMemoryKey) {
        *self.last() = Some((session, name.clone()));
        let ask = MoriDiallerMessage::Enter { session: session.0, name };
        let mut state = self.lock();
        match &state.0 {
            MoriLinkState::Dialling => state.1.push(ask),
            // A frame of a hundred bytes, so that nothing waits; a broken line is told by its
            // thread.
            MoriLinkState::Up(socket) => drop(send(socket, &ask)),
            MoriLinkState::Over => {}
        }
    }

    /// Our backend is another one. By asking for the same as last the peer knows that the queue
    /// pairs which it has are dead, whatever becomes of the session; not if that is to be opened
    /// `anew`.
    pub(crate) fn renew(&self, anew: impl Fn(&SessionId) -> bool) {
        let last = self.last().clone();
        if let Some((session, name)) = last.filter(|(session, _)| !anew(session)) {
            self.ask(session, name);
        }
    }

    fn last(&self) -> MutexGuard<'_, Option<(SessionId, MoriMemoryKey)>> {
        lock(&self.last)
    }

    /// True if nothing can be asked any more.
    pub(crate) fn is_over(&self) -> bool {
        matches!(self.lock().0, MoriLinkState::Over)
    }

    /// True if the peer's end is closed, whether or not the thread of the line has seen it.
    pub(crate) fn is_closed(&self) -> bool {
        let MoriLinkState::Up(socket) = &self.lock().0 else { return true };
        let look = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        match recv(socket, &mut [0_u8; 1][..], look) {
            Ok((_, waiting)) => waiting == 0,
            Err(why) => why != Errno::AGAIN,
        }
    }

    /// Says that nothing is under way to or from a region.
    pub(crate) fn released(&self, region: RegionId) {
        if let MoriLinkState::Up(socket) = &self.lock().0 {
            let _told = send(socket, &MoriDiallerMessage::Released { region });
        }
    }

    /// Ends the line; [`MoriLinkEvent::Over`] still follows.
    pub(crate) fn hang_up(&self) {
        let mut state = self.lock();
        if let MoriLinkState::Up(socket) = &state.0 {
            let _gone = socket.shutdown(Shutdown::Both);
        }
        state.0 = MoriLinkState::Over;
    }
}
