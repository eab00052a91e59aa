//! xGMI to peers of the node and RDMA to all others: two planes, one of each backend, that look like
//! one to their owner.

use crate::address::{MoriPlaneAddress, of_xgmi, region_with_xgmi, with_xgmi};
use crate::peer_choice::{MoriChoiceLog, MoriPeerChoice};
use crate::{DeviceEvents, MoriBackend, MoriConfig, MoriCounterReader, MoriError, MoriPlane};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{
    Address, Caps, DataEvent, DataPlane, FabricError, Memory, NextPoll, PeerId, QuiesceTicket,
    Refused, RegionDesc, RegionId, SessionId, Submit,
};
use kvferry_fabric_common::invalid;
use mori_sys::{Shim, ShimSearchPath};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::task::Waker;

/// How two planes became what their owner takes for one region.
#[derive(Debug)]
enum MixedRegion {
    /// What was answered so far, of the backends in their order.
    Registering([Option<Result<RegionDesc, FabricError>>; 2]),
    Registered,
}

/// A data plane over both backends of MoRI: xGMI moves bytes between GPUs of one node, RDMA to and
/// from peers of others, and those that have RDMA alone. Which it is for a peer is decided when it
/// is connected, and logged. A peer of the node to which xGMI does not open is an error, and never
/// a reason to take RDMA.
///
/// Its address and its region descriptors are those of its RDMA with more in them, so that peers
/// with RDMA alone read theirs. What voids what peers know of one backend voids all: a reset is of
/// both, and comes when peers have left memory that xGMI has mapped for them.
#[derive(Debug)]
pub struct MoriMixedPlane {
    rdma: MoriPlane,
    xgmi: MoriPlane,
    regions: BTreeMap<RegionId, MixedRegion>,
    log: MoriChoiceLog,
    /// Which have been reset, in the time from the first reset to that of the other.
    renewal: Option<[bool; 2]>,
    news: Vec<DataEvent>,
}

/// Where the backends are in pairs.
const fn at(backend: MoriBackend) -> usize {
    match backend {
        MoriBackend::Rdma => 0,
        MoriBackend::Xgmi => 1,
    }
}

impl MoriMixedPlane {
    /// As configurations have it.
    pub const NAME: &'static str = "mori";

    /// Whether a plane would take these settings; [`MoriConfig::backend`] says nothing here.
    ///
    /// # Errors
    /// The setting, its value and what it may be.
    pub fn check(config: &MoriConfig) -> Result<(), String> {
        config.check()?;
        match config.door_port {
            u16::MAX => {
                Err("door_port = 65535: the next one is that of xGMI's; name a lower one, \
                             or 0"
                    .into())
            }
            _ => Ok(()),
        }
    }

    /// Loads MoRI and starts one plane of each backend.
    ///
    /// # Errors
    /// As [`MoriPlane::new`].
    pub fn new(config: MoriConfig) -> Result<MoriMixedPlane, MoriError> {
        MoriMixedPlane::check(&config).map_err(MoriError::Config)?;
        let shim = Shim::load(&ShimSearchPath::of_process());
        let shim = shim.map_err(|why| MoriError::Unavailable(why.to_string()))?;
        MoriMixedPlane::with_shim(shim, config)
    }

    /// The same over MoRI that is loaded already.
    ///
    /// # Errors
    /// As [`MoriPlane::with_shim`].
    pub fn with_shim(shim: Arc<Shim>, config: MoriConfig) -> Result<MoriMixedPlane, MoriError> {
        MoriMixedPlane::check(&config).map_err(MoriError::Config)?;
        // MoRI's control plane is RDMA's alone, and so are peers that have no acceptor.
        let xgmi = MoriConfig {
            backend: MoriBackend::Xgmi,
            port: 0,
            door_port: if config.door_port == 0 { 0 } else { config.door_port + 1 },
            open_door: false,
            ..config.clone()
        };
        let rdma = MoriConfig { backend: MoriBackend::Rdma, ..config };
        Ok(MoriMixedPlane {
            rdma: MoriPlane::with_shim(shim.clone(), rdma)?,
            xgmi: MoriPlane::with_shim(shim, xgmi)?,
            regions: BTreeMap::new(),
            log: MoriChoiceLog::default(),
            renewal: None,
            news: Vec::new(),
        })
    }

    /// The settings of its RDMA.
    pub fn config(&self) -> &MoriConfig {
        self.rdma.config()
    }

    /// What tells what each backend did so far.
    pub fn meters(&self) -> [MoriCounterReader; 2] {
        [self.rdma.meter(), self.xgmi.meter()]
    }

    /// What tells when kernels are done.
    pub fn device_events(&self) -> DeviceEvents {
        self.rdma.device_events()
    }

    fn plane(&mut self, backend: MoriBackend) -> &mut MoriPlane {
        match backend {
            MoriBackend::Rdma => &mut self.rdma,
            MoriBackend::Xgmi => &mut self.xgmi,
        }
    }

    /// The plane of a peer; for one that neither knows either has the same answer.
    fn of_peer(&mut self, peer: PeerId) -> &mut MoriPlane {
        if self.xgmi.has_peer(peer) { &mut self.xgmi } else { &mut self.rdma }
    }

    /// The plane of a session; for one that neither knows either has the same answer.
    fn of_session(&mut self, session: SessionId) -> &mut MoriPlane {
        if self.xgmi.has_session(session) { &mut self.xgmi } else { &mut self.rdma }
    }

    /// Passes an event of a backend on, or what both make together.
    fn told(&mut self, backend: MoriBackend, event: DataEvent, out: &mut Vec<DataEvent>) {
        match event {
            DataEvent::Registered { region, result } => {
                out.extend(self.registered(backend, region, result));
            }
            DataEvent::Opened { session, result: Err(cause) } if backend == MoriBackend::Xgmi => {
                let result = Err(self.unopened(session, cause));
                out.push(DataEvent::Opened { session, result });
            }
            DataEvent::Reset { .. } => out.extend(self.reset(backend)),
            other => out.push(other),
        }
    }

    fn registered(
        &mut self,
        backend: MoriBackend,
        region: RegionId,
        result: Result<RegionDesc, FabricError>,
    ) -> Option<DataEvent> {
        let Some(MixedRegion::Registering(answers)) = self.regions.get_mut(&region) else {
            return None;
        };
        answers[at(backend)] = Some(result);
        let [Some(rdma), Some(xgmi)] = answers else { return None };
        let joined = match (rdma, xgmi) {
            (Ok(rdma), Ok(xgmi)) => region_with_xgmi(rdma, xgmi)
                .ok_or_else(|| FabricError::Backend("a descriptor above 64 KiB".into())),
            (Err(cause), _) | (_, Err(cause)) => Err(cause.clone()),
        };
        match &joined {
            Ok(_) => drop(self.regions.insert(region, MixedRegion::Registered)),
            Err(_) => {
                self.regions.remove(&region);
                for backend in [MoriBackend::Rdma, MoriBackend::Xgmi] {
                    // Nobody was told of it, so that nobody uses it.
                    let _gone = self.plane(backend).deregister(region);
                }
            }
        }
        Some(DataEvent::Registered { region, result: joined })
    }

    /// What the owner is told of a session that xGMI does not open.
    fn unopened(&mut self, session: SessionId, cause: FabricError) -> FabricError {
        let peer = self.xgmi.peer_of(session).unwrap_or_default();
        if self.log.is_first_failure(&peer) {
            let key = &self.config().key;
            tracing::warn!(%key, %peer, %cause, "xGMI to a peer of this node does not open");
        }
        match cause {
            FabricError::Backend(why) => FabricError::Backend(
                format!(
                    "xGMI to {peer}, a peer of this node, does not open: {why}; where there is no \
                     way between the GPUs of both set `backend` to mori-rdma on either side"
                )
                .into(),
            ),
            other => other,
        }
    }

    /// A backend has been reset, and the other one is to be.
    fn reset(&mut self, backend: MoriBackend) -> Option<DataEvent> {
        let is_first = self.renewal.is_none();
        let renewal = self.renewal.get_or_insert_default();
        renewal[at(backend)] = true;
        if renewal.iter().all(|reset| *reset) {
            self.renewal = None;
            self.regions.clear();
            return Some(DataEvent::Reset { address: self.address() });
        }
        if is_first {
            let key = &self.config().key;
            tracing::info!(%key, was = %backend, "a backend was replaced, and the other one is to be");
            match backend {
                MoriBackend::Rdma => self.xgmi.renew(),
                MoriBackend::Xgmi => self.rdma.renew(),
            }
        }
        None
    }
}

impl DataPlane for MoriMixedPlane {
    fn caps(&self) -> Caps {
        let (caps, xgmi) = (self.rdma.caps(), self.xgmi.caps());
        let per_peer = caps.per_peer.at_most(&xgmi.per_peer);
        Caps { per_peer, in_all: caps.in_all.at_most(&xgmi.in_all), ..caps }
    }

    fn address(&self) -> Address {
        let (rdma, xgmi) = (self.rdma.address(), self.xgmi.address());
        // MoRI's descriptors are some hundred bytes.
        with_xgmi(&rdma, &xgmi).unwrap_or(rdma)
    }

    fn register(&mut self, region: RegionId, memory: Memory) -> Result<(), Refused> {
        self.rdma.check_register(region, memory)?;
        if !matches!(memory, Memory::Device { .. }) {
            return Err(Refused::Unsupported(
                "memory of the host, which xGMI does not move: set `backend` to mori-rdma".into(),
            ));
        }
        if self.renewal.is_some() {
            // All is registered anew after the reset that ends this.
            return Ok(());
        }
        self.rdma.register(region, memory)?;
        if let Err(refused) = self.xgmi.register(region, memory) {
            let _gone = self.rdma.deregister(region);
            return Err(refused);
        }
        self.regions.insert(region, MixedRegion::Registering([None, None]));
        Ok(())
    }

    /// Refused as `Busy` it may be gone of one backend; the other one is asked the next time.
    fn deregister(&mut self, region: RegionId) -> Result<(), Refused> {
        if !self.regions.contains_key(&region) {
            return invalid(format!("region {region} is not registered"));
        }
        for backend in [MoriBackend::Rdma, MoriBackend::Xgmi] {
            let plane = self.plane(backend);
            if plane.has_region(region) {
                plane.deregister(region)?;
            }
        }
        self.regions.remove(&region);
        Ok(())
    }

    fn connect(&mut self, peer: PeerId, address: &Address, fence_key: u64) -> Result<(), Refused> {
        let Some(location) = MoriPlaneAddress::decode(address) else {
            return invalid("address of another kind of plane");
        };
        if self.rdma.has_peer(peer) || self.xgmi.has_peer(peer) {
            return invalid(format!("peer {peer} is connected already"));
        }
        if self.renewal.is_some() {
            // It would be void after the reset that ends this.
            return Ok(());
        }
        let MoriPeerChoice { backend, why } = MoriPeerChoice::of(&self.xgmi.address(), address);
        match (backend, of_xgmi(&address.0)) {
            (MoriBackend::Xgmi, Some(part)) => {
                self.xgmi.connect(peer, &Address(part.into()), fence_key)?;
            }
            _ => self.rdma.connect(peer, address, fence_key)?,
        }
        let name = location.name();
        if self.log.is_news(name.clone(), backend) {
            let key = &self.config().key;
            tracing::info!(%key, peer = %name, path = %backend, why, "what moves KV to and from a peer");
        }
        Ok(())
    }

    fn disconnect(&mut self, peer: PeerId) {
        self.of_peer(peer).disconnect(peer);
    }

    fn open(
        &mut self,
        session: SessionId,
        local: RegionId,
        peer: PeerId,
        remote: &RegionDesc,
    ) -> Result<(), Refused> {
        if self.rdma.has_session(session) || self.xgmi.has_session(session) {
            return invalid(format!("session {session} is open already"));
        }
        if self.renewal.is_some() && !self.of_peer(peer).has_peer(peer) {
            let cause = FabricError::Backend("the backends are being replaced".into());
            self.news.push(DataEvent::Opened { session, result: Err(cause) });
            return Ok(());
        }
        if !self.xgmi.has_peer(peer) {
            return self.rdma.open(session, local, peer, remote);
        }
        match of_xgmi(&remote.0) {
            Some(part) => self.xgmi.open(session, local, peer, &RegionDesc(part.into())),
            None => invalid("descriptor without xGMI, of a peer whose address has it"),
        }
    }

    fn close(&mut self, session: SessionId) {
        self.of_session(session).close(session);
    }

    fn submit(&mut self, batch: Submit<'_>) -> Result<(), Refused> {
        if self.rdma.has_operation(batch.op) || self.xgmi.has_operation(batch.op) {
            return invalid(format!("operation {} is in flight", batch.op));
        }
        let in_flight = self.rdma.in_flight() + self.xgmi.in_flight();
        let is_full = in_flight >= self.config().operations_max as usize;
        let plane = self.of_session(batch.session);
        match is_full && plane.has_session(batch.session) {
            true => Err(Refused::Busy),
            false => plane.submit(batch),
        }
    }

    fn quiesce(&mut self, session: SessionId, ticket: QuiesceTicket) {
        self.of_session(session).quiesce(session, ticket);
    }

    fn fence(&mut self, peer: PeerId) {
        self.of_peer(peer).fence(peer);
    }

    fn set_waker(&mut self, waker: Waker) {
        self.rdma.set_waker(waker.clone());
        self.xgmi.set_waker(waker);
    }

    fn poll(&mut self, now: Nanos, out: &mut Vec<DataEvent>) -> NextPoll {
        out.append(&mut self.news);
        let before = self.renewal;
        let mut next = NextPoll::External;
        for backend in [MoriBackend::Rdma, MoriBackend::Xgmi] {
            let mut told = Vec::new();
            next = next.sooner(self.plane(backend).poll(now, &mut told));
            for event in told {
                self.told(backend, event, out);
            }
        }
        // One that was polled already may have been told to be reset.
        if self.renewal == before { next } else { NextPoll::Ready }
    }
}
