//! The engine: regions, peers and sessions.

use crate::audit::Audit;
use crate::desc::{EngineDesc, MemoryDesc};
use crate::error::Error;
use crate::fabric::Fabric;
use crate::pump::{self, Shared};
use crate::session::Session;
use crate::settings::Settings;
use crate::state::{Line, Peer, Region, State};
use ::engine::fabric::{Cause, Memory, PeerId, RegionId, SessionId};
use fabric_host::{HostConfig, HostPlane};
use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// No plane takes longer to register memory or to open a session, or to say that it cannot.
const ANSWER_MAX: Duration = Duration::from_secs(60);

/// MoRI's `IOEngine` with its backend.
pub struct Engine {
    key: Arc<str>,
    desc: EngineDesc,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("key", &self.key).finish_non_exhaustive()
    }
}

impl Engine {
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
        settings: &Settings,
    ) -> Result<Engine, Error> {
        let config = HostConfig {
            key: key.into(),
            host: host.into(),
            port,
            workers,
            open_door: true,
            ..settings.fabric.clone()
        };
        let plane = HostPlane::new(config).map_err(|why| Error::Plane(format!("{key}: {why}")))?;
        Engine::over(Box::new(plane), settings)
    }

    /// Starts an engine over a plane whose address and regions are MoRI's descriptors.
    ///
    /// # Errors
    /// As [`Engine::start`].
    pub fn over(plane: Box<dyn Fabric>, settings: &Settings) -> Result<Engine, Error> {
        let desc = EngineDesc::unpack(&plane.address().0)?;
        let key = desc.key().clone();
        let faults = settings.faults()?;
        let audit = settings.audit.as_ref().map(|path| Audit::open(path, &key)).transpose()?;
        let state = State::new(plane, faults);
        let shared = Arc::new(Shared::new(state, audit, settings.backoff));
        let thread = pump::start(&shared)
            .map_err(|why| Error::Plane(format!("{key}: no thread for the engine: {why}")))?;
        Ok(Engine { key, desc, shared, thread: Some(thread) })
    }

    /// What peers need to reach this engine.
    pub fn desc(&self) -> &EngineDesc {
        &self.desc
    }

    /// Makes memory of this process reachable; the owner keeps it mapped while the engine lives.
    ///
    /// # Errors
    /// `Plane` if the fabric cannot take it.
    pub fn register_memory(&self, base: u64, len: u64) -> Result<MemoryDesc, Error> {
        let about = |why: &dyn fmt::Display| {
            Error::Plane(format!("{}: cannot register {len} B at {base:#x}: {why}", self.key))
        };
        let mut state = self.shared.lock();
        let region = RegionId(state.ids.next() as u32);
        let Some(plane) = &mut state.plane else { return Err(about(&"the engine is closed")) };
        plane.register(region, Memory::Own { base, len }).map_err(|why| about(&why))?;
        state.regions.insert(region, Region { base, answer: None });
        self.shared.ring();
        let until = Instant::now() + ANSWER_MAX;
        loop {
            let answer = state.regions.get(&region).and_then(|region| region.answer.clone());
            match answer {
                Some(Ok(desc)) => return MemoryDesc::unpack(&desc.0),
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

    /// Names a peer. A peer that has another address than before is a new one: sessions with the
    /// old one fail.
    ///
    /// # Errors
    /// `Plane` for an address that is not of this fabric.
    pub fn register_remote_engine(&self, desc: &EngineDesc) -> Result<(), Error> {
        let mut state = self.shared.lock();
        let old = match state.peers.get(desc.key()) {
            Some(peer) if *peer.bytes == *desc.pack() => return Ok(()),
            old => old.map(|peer| peer.id),
        };
        let id = PeerId(state.ids.next() as u32);
        let Some(plane) = &mut state.plane else { return Ok(()) };
        plane.connect(id, &desc.address(), 0).map_err(|why| {
            let (key, host, port) = (desc.key(), desc.host(), desc.port());
            Error::Plane(format!(
                "cannot use the engine {key} at {host}:{port}: {why}; both sides have to run \
                 kvferry's mori"
            ))
        })?;
        if let Some(old) = old {
            let why = format!("{} came back with another address", desc.key());
            state.kill(|peer| peer == old, &why);
            if let Some(plane) = &mut state.plane {
                plane.disconnect(old);
            }
        }
        let peer = Peer { id, bytes: desc.pack().into() };
        state.peers.insert(desc.key().clone(), peer);
        self.shared.ring();
        Ok(())
    }

    /// Prepares transfers between a region of this engine and one of a registered peer.
    ///
    /// # Errors
    /// `Argument` for regions or peers that are not registered, `Plane` if the peer cannot be
    /// reached.
    pub fn create_session(
        &self,
        local: &MemoryDesc,
        remote: &MemoryDesc,
    ) -> Result<Session, Error> {
        let mut state = self.shared.lock();
        let key = remote.engine_key();
        let Some(peer) = state.peers.get(key).map(|peer| peer.id) else {
            return Err(Error::Argument(format!(
                "{}: the engine {key} of the remote region {} is not registered; call \
                 register_remote_engine first",
                self.key,
                remote.id()
            )));
        };
        let found = state.regions.iter().find_map(|(id, region)| match &region.answer {
            Some(Ok(desc)) if *desc.0 == *local.pack() => Some((*id, region.base)),
            _ => None,
        });
        let Some((region, base)) = found else {
            return Err(Error::Argument(format!(
                "{}: region {} of {} is not registered here",
                self.key,
                local.id(),
                local.engine_key()
            )));
        };
        let about = |why: &dyn fmt::Display| {
            Error::Plane(format!("{}: cannot open a session with {key}: {why}", self.key))
        };
        let session = SessionId(state.ids.next() as u32);
        let Some(plane) = &mut state.plane else { return Err(about(&"the engine is closed")) };
        plane.open(session, region, peer, &remote.region()).map_err(|why| about(&why))?;
        let line = Line { peer, answer: None, dead: None, busy: 0, orphan: false };
        state.sessions.insert(session, line);
        drop(state);
        self.shared.ring();
        self.opened(session).map_err(|why| about(&why))?;
        Ok(Session::new(self.shared.clone(), session, base, key.clone()))
    }

    fn opened(&self, session: SessionId) -> Result<(), Cause> {
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
                return Err(Cause::Unreachable);
            }
        }
    }

    /// A number that no transfer of this engine had.
    pub fn allocate_transfer_uid(&self) -> u64 {
        self.shared.lock().ids.next()
    }
}

impl Drop for Engine {
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
