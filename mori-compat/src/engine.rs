//! The engine: regions, peers and sessions.

use crate::audit::AuditLog;
use crate::desc::{CompatEngineDesc, CompatMemoryDesc};
use crate::error::CompatError;
use crate::fabric::CompatPlane;
use crate::poll_thread::{self, CompatEngineShared};
use crate::requests::KeptSessions;
use crate::session::CompatSession;
use crate::settings::CompatSettings;
use crate::state::{CompatPeer, CompatRegion, CompatSessionState, CompatState};
use kvferry_engine::fabric::{
    FabricError, Memory, OwnMemory, PeerId, Refused, RegionId, SessionId,
};
use kvferry_fabric_host::{HostConfig, HostPlane};
use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// No plane takes longer to register or to deregister memory or to open a session, or to say that it
/// cannot.
const ANSWER_MAX: Duration = Duration::from_secs(60);

/// MoRI's `IOEngine` with its backend.
pub struct CompatEngine {
    key: Arc<str>,
    desc: CompatEngineDesc,
    shared: Arc<CompatEngineShared>,
    thread: Option<JoinHandle<()>>,
    pub(crate) kept: KeptSessions,
}

impl fmt::Debug for CompatEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompatEngine").field("key", &self.key).finish_non_exhaustive()
    }
}

impl CompatEngine {
    /// Starts an engine that listens at `host:port` (port 0 is a free one) and lets everybody in
    /// who has its descriptors, as MoRI does. `workers` threads copy.
    ///
    /// # Errors
    /// `Setting` for faults, audit or fabric settings; `Plane` if it cannot listen.
    pub fn start(
        key: &str,
        host: &str,
        port: u16,
        workers: u32,
        settings: &CompatSettings,
    ) -> Result<CompatEngine, CompatError> {
        let config = HostConfig {
            key: key.into(),
            host: host.into(),
            port,
            workers,
            open_door: true,
            ..settings.fabric.clone()
        };
        let plane =
            HostPlane::new(config).map_err(|why| CompatError::Plane(format!("{key}: {why}")))?;
        CompatEngine::over(Box::new(plane), settings)
    }

    /// Starts an engine over a plane whose address and regions are MoRI's descriptors.
    ///
    /// # Errors
    /// As [`CompatEngine::start`].
    pub fn over(
        plane: Box<dyn CompatPlane>,
        settings: &CompatSettings,
    ) -> Result<CompatEngine, CompatError> {
        let desc = CompatEngineDesc::unpack(&plane.address().0)?;
        let key = desc.key().clone();
        let faults = settings.faults()?;
        let audit = settings.audit.as_ref().map(|path| AuditLog::open(path, &key)).transpose()?;
        let state = CompatState::new(plane, faults);
        let shared = Arc::new(CompatEngineShared::new(state, audit, settings.backoff));
        let thread = poll_thread::start(&shared)
            .map_err(|why| CompatError::Plane(format!("{key}: no thread for the engine: {why}")))?;
        let kept = KeptSessions::default();
        Ok(CompatEngine { key, desc, shared, thread: Some(thread), kept })
    }

    /// What peers need to reach this engine.
    pub fn desc(&self) -> &CompatEngineDesc {
        &self.desc
    }

    /// Makes memory of this process reachable while the engine lives.
    ///
    /// # Errors
    /// `Plane` if the fabric cannot take it, or nobody has vouched for it.
    pub fn register_memory(&self, memory: OwnMemory) -> Result<CompatMemoryDesc, CompatError> {
        let (base, len) = (memory.base(), memory.len());
        let about = |why: &dyn fmt::Display| {
            CompatError::Plane(format!("{}: cannot register {len} B at {base:#x}: {why}", self.key))
        };
        let mut state = self.shared.lock();
        let region = RegionId(state.ids.next() as u32);
        let Some(plane) = &mut state.plane else { return Err(about(&"the engine is closed")) };
        let memory = Memory::Own(memory);
        // Whatever the plane makes of it, audits follow the address.
        if let Some(why) = memory.unproven() {
            return Err(about(&why));
        }
        plane.register(region, memory).map_err(|why| about(&why))?;
        state.regions.insert(region, CompatRegion { base, answer: None });
        self.shared.ring();
        let until = Instant::now() + ANSWER_MAX;
        loop {
            let answer = state.regions.get(&region).and_then(|region| region.answer.clone());
            match answer {
                Some(Ok(desc)) => return CompatMemoryDesc::unpack(&desc.0),
                Some(Err(why)) => {
                    state.regions.remove(&region);
                    return Err(about(&why));
                }
                None => {}
            }
            let (next, in_time) = self.shared.wait(state, until);
            state = next;
            if !in_time {
                return Err(about(&"no answer from the fabric"));
            }
        }
    }

    /// Makes memory unreachable. What is under way from or to it here fails; on return no byte of
    /// anybody lands in it any more, and whoever owns it may free it.
    ///
    /// # Errors
    /// `Argument` for memory that is not registered, `Plane` if its use here does not end.
    pub fn deregister_memory(&self, memory: &CompatMemoryDesc) -> Result<(), CompatError> {
        let mut state = self.shared.lock();
        let (region, _) = self.own_region(&state, memory)?;
        // Nobody opens a session with it from here on.
        let taken = state.regions.remove(&region);
        state.kill(|line| line.local == region, "its memory was deregistered");
        self.shared.ring();
        let until = Instant::now() + ANSWER_MAX;
        let mut in_time = true;
        loop {
            // Without a plane nothing lands.
            let Some(plane) = &mut state.plane else { return Ok(()) };
            match plane.deregister(region) {
                Ok(()) => break,
                Err(Refused::Busy) if in_time => {}
                Err(why) => {
                    state.regions.extend(taken.map(|taken| (region, taken)));
                    let (key, id) = (&self.key, memory.id());
                    let why = format!("{key}: cannot deregister region {id}: {why}");
                    return Err(CompatError::Plane(why));
                }
            }
            (state, in_time) = self.shared.wait(state, until);
        }
        drop(state);
        self.shared.ring();
        self.kept.prune();
        Ok(())
    }

    /// The region of this engine that a descriptor names, and its first address.
    fn own_region(
        &self,
        state: &CompatState,
        memory: &CompatMemoryDesc,
    ) -> Result<(RegionId, u64), CompatError> {
        let found = state.regions.iter().find_map(|(id, region)| match &region.answer {
            Some(Ok(desc)) if *desc.0 == *memory.pack() => Some((*id, region.base)),
            _ => None,
        });
        found.ok_or_else(|| {
            CompatError::Argument(format!(
                "{}: region {} of {} is not registered here",
                self.key,
                memory.id(),
                memory.engine_key()
            ))
        })
    }

    /// Names a peer. A peer that has another address than before is a new one: sessions with the
    /// old one fail.
    ///
    /// # Errors
    /// `Plane` for an address that is not of this fabric.
    pub fn register_remote_engine(&self, desc: &CompatEngineDesc) -> Result<(), CompatError> {
        let mut state = self.shared.lock();
        let old = match state.peers.get(desc.key()) {
            Some(peer) if *peer.bytes == *desc.pack() => return Ok(()),
            old => old.map(|peer| peer.id),
        };
        let id = PeerId(state.ids.next() as u32);
        let Some(plane) = &mut state.plane else { return Ok(()) };
        plane.connect(id, &desc.address(), 0).map_err(|why| {
            let (key, host, port) = (desc.key(), desc.host(), desc.port());
            CompatError::Plane(format!(
                "cannot use the engine {key} at {host}:{port}: {why}; both sides have to run \
                 kvferry's mori"
            ))
        })?;
        if let Some(old) = old {
            let why = format!("{} came back with another address", desc.key());
            state.forget(old, &why);
        }
        let peer = CompatPeer { id, bytes: desc.pack().into() };
        state.peers.insert(desc.key().clone(), peer);
        self.shared.ring();
        Ok(())
    }

    /// Forgets a peer, and ends what is under way with it.
    ///
    /// # Errors
    /// `Argument` for one that is not registered, or has another address.
    pub fn deregister_remote_engine(&self, desc: &CompatEngineDesc) -> Result<(), CompatError> {
        let mut state = self.shared.lock();
        let (key, theirs) = (desc.key(), desc.pack());
        let known = state.peers.get(key).filter(|peer| *peer.bytes == *theirs).map(|peer| peer.id);
        let Some(peer) = known else {
            let why = format!("{}: the engine {key} is not registered here", self.key);
            return Err(CompatError::Argument(why));
        };
        state.peers.remove(key);
        state.forget(peer, "its engine was deregistered");
        self.shared.ring();
        drop(state);
        self.kept.prune();
        Ok(())
    }

    /// Prepares transfers between a region of this engine and one of a registered peer.
    ///
    /// # Errors
    /// `Argument` for regions or peers that are not registered, `Plane` if the peer cannot be
    /// reached.
    pub fn create_session(
        &self,
        local: &CompatMemoryDesc,
        remote: &CompatMemoryDesc,
    ) -> Result<CompatSession, CompatError> {
        let mut state = self.shared.lock();
        let key = remote.engine_key();
        let Some(peer) = state.peers.get(key).map(|peer| peer.id) else {
            return Err(CompatError::Argument(format!(
                "{}: the engine {key} of the remote region {} is not registered; call \
                 register_remote_engine first",
                self.key,
                remote.id()
            )));
        };
        let (region, base) = self.own_region(&state, local)?;
        let about = |why: &dyn fmt::Display| {
            CompatError::Plane(format!("{}: cannot open a session with {key}: {why}", self.key))
        };
        let session = SessionId(state.ids.next() as u32);
        let Some(plane) = &mut state.plane else { return Err(about(&"the engine is closed")) };
        plane.open(session, region, peer, &remote.region()).map_err(|why| about(&why))?;
        let line = CompatSessionState {
            peer,
            local: region,
            answer: None,
            dead: None,
            is_stale: false,
            busy: 0,
            orphan: false,
        };
        state.sessions.insert(session, line);
        drop(state);
        self.shared.ring();
        self.opened(session).map_err(|why| about(&why))?;
        Ok(CompatSession::new(self.shared.clone(), session, base, key.clone()))
    }

    fn opened(&self, session: SessionId) -> Result<(), FabricError> {
        let until = Instant::now() + ANSWER_MAX;
        let mut state = self.shared.lock();
        loop {
            let answer = state.sessions.get(&session).and_then(|line| line.answer.clone());
            let failed = match answer {
                Some(Ok(())) => return Ok(()),
                Some(Err(cause)) => Some(cause),
                None => None,
            };
            if let Some(cause) = failed {
                state.close(session);
                return Err(cause);
            }
            let (next, in_time) = self.shared.wait(state, until);
            state = next;
            if !in_time {
                state.close(session);
                return Err(FabricError::Unreachable);
            }
        }
    }

    /// A number that no transfer of this engine had.
    pub fn allocate_transfer_uid(&self) -> u64 {
        self.shared.lock().ids.next()
    }
}

impl Drop for CompatEngine {
    /// What is under way fails.
    fn drop(&mut self) {
        let mut done = Vec::new();
        let mut state = self.shared.lock();
        state.fail_all("the engine was closed", &mut done);
        let plane = state.plane.take();
        drop(state);
        self.shared.ring();
        drop(plane);
        self.shared.settle(done);
        if let Some(thread) = self.thread.take() {
            let _panicked = thread.join();
        }
    }
}
