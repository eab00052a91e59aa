//! A plane's start and end.

use super::HostPlane;
use super::digest::HostDigests;
use super::submit::InlineCopier;
use crate::config::{HostConfig, PeerTrust};
use crate::copy::CopyBuffers;
use crate::descriptor::{HostPlaneAddress, this_node};
use crate::doorbell::WorkerHandle;
use crate::link::{HostListeners, LinkTls, listen};
use crate::ring::{AtomicU64, Consumer, Producer, words_for};
use crate::shared::HostPlaneShared;
use crate::worker::HostWorker;
use kvferry_engine::fabric::unbracketed;
use kvferry_fabric_common::{PlaneIdentity, PlaneLedger, draw_incarnation, spawn};
use kvferry_trust::{FleetProof, NetworkTrust};
use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Why there is no plane.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HostError {
    /// A setting: which, its value and what it may be.
    Config(String),
    /// An address that cannot be listened at, with address, port and reason.
    Listen(String),
    /// Threads, descriptors or memory that the system does not give.
    System(String),
}

impl fmt::Display for HostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HostError::Config(text) | HostError::Listen(text) => f.write_str(text),
            HostError::System(text) => write!(f, "host plane: {text}"),
        }
    }
}

impl std::error::Error for HostError {}

fn resolve(config: &HostConfig) -> Result<Vec<SocketAddr>, HostError> {
    let (host, port) = (unbracketed(&config.host), config.port);
    let fail = |why: String| HostError::Listen(format!("cannot listen at {host}:{port}: {why}"));
    let found: Vec<_> = (host, port).to_socket_addrs().map_err(|w| fail(w.to_string()))?.collect();
    if found.is_empty() { Err(fail("no address of that name".into())) } else { Ok(found) }
}

/// The host that peers are told.
fn advertised(config: &HostConfig) -> Result<Arc<str>, HostError> {
    if let Some(host) = &config.advertised {
        return Ok(unbracketed(host).into());
    }
    let host = unbracketed(&config.host);
    if host.parse::<IpAddr>().is_ok_and(|address| address.is_unspecified()) {
        let text = format!("host = \"{host}\" is no address for peers: name one by `advertised`");
        return Err(HostError::Config(text));
    }
    Ok(host.into())
}

impl HostPlane {
    /// Listens and starts the threads.
    ///
    /// # Errors
    /// A setting that cannot be, an address that cannot be listened at, or what the system lacks.
    pub fn new(config: HostConfig) -> Result<HostPlane, HostError> {
        config.check().map_err(HostError::Config)?;
        let PeerTrust { secret_file, encrypt, insecure_network, .. } = &config.trust;
        let places = resolve(&config)?;
        let (at, ips) = (("host", &*config.host), places.iter().map(SocketAddr::ip));
        let trust = NetworkTrust::of((at, ips), secret_file.as_deref(), *insecure_network);
        trust.map_err(|why| HostError::Config(why.to_string()))?.announce();
        let proof = FleetProof::open(secret_file.as_deref()).map_err(HostError::Config)?;
        let tls = encrypt.then(LinkTls::new).transpose().map_err(HostError::System)?;
        let host = advertised(&config)?;
        let incarnation = draw_incarnation().map_err(HostError::System)?;
        let who = PlaneIdentity { key: config.key.as_str().into(), incarnation };
        let uname = rustix::system::uname();
        let mut location = HostPlaneAddress {
            who,
            node: this_node(),
            hostname: uname.nodename().to_string_lossy().into(),
            host,
            port: 0,
            pid: std::process::id(),
        };
        let listeners = HostListeners::open(&places, &location.socket_name());
        let listeners = listeners.map_err(HostError::Listen)?;
        let bound = listeners.tcp.local_addr().map_err(|why| HostError::Listen(why.to_string()))?;
        location.port = bound.port();
        let handles = (0..config.threads()).map(|_| WorkerHandle::new().map(Arc::new));
        let handles = handles
            .collect::<Result<Vec<_>, _>>()
            .map_err(|why| HostError::System(format!("doorbell: {why}")))?;
        let room = (4 * config.operations_max as usize + 16).next_power_of_two();
        let hub = HostPlaneShared::new(config, location, handles, (proof, tls));
        let hub = Arc::new(hub.map_err(HostError::System)?);
        let mut plane = HostPlane {
            hub: hub.clone(),
            listener: None,
            threads: Vec::new(),
            outcomes: Vec::new(),
            ledger: PlaneLedger::default(),
            dials: BTreeMap::new(),
            quiesce_probes: Vec::new(),
            links: BTreeMap::new(),
            short: 0,
            inline_copier: InlineCopier::new(hub.copy_pool.clone()),
            digests: HostDigests::new(CopyBuffers::new(hub.copy_pool.clone())),
            notices: Vec::new(),
            slices: Vec::new(),
            record: Vec::new(),
            heard: Vec::new(),
            idle_polls: 0,
            busy_polling_since: None,
        };
        let mut start = |work: Box<dyn FnOnce() + Send>| {
            let thread = spawn("kvferry-copy", work);
            plane.threads.push(thread.map_err(|why| HostError::System(why.to_string()))?);
            Ok(())
        };
        for _ in 1..hub.config.copiers {
            let pool = hub.copy_pool.clone();
            start(Box::new(move || pool.work()))?;
        }
        for number in 0..hub.workers.len() {
            let words: Arc<[AtomicU64]> = (0..words_for(room)).map(|_| AtomicU64::new(0)).collect();
            plane.outcomes.push(Consumer::new(words.clone()));
            let worker = HostWorker::new(hub.clone(), number, Producer::new(words))
                .map_err(|why| HostError::System(format!("epoll: {why}")))?;
            start(Box::new(|| worker.run()))?;
        }
        plane.listener = Some(listen(hub, listeners).map_err(HostError::System)?);
        Ok(plane)
    }
}

impl Drop for HostPlane {
    fn drop(&mut self) {
        self.hub.stopping.store(true, Ordering::Release);
        self.hub.copy_pool.end();
        for worker in &self.hub.workers {
            worker.wake();
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        // Last: who is refused may conclude that nothing lands here any more.
        if let Some(listener) = self.listener.take() {
            listener.drain();
        }
    }
}
