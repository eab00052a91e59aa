//! The prefill and the decode core of a host with a pool, over which its payloads come to other
//! hosts and those of others to it.

use super::config::OperatorConfig;
use super::fault_injector::with_faults;
use super::stages::StageActor;
use crate::instance::{
    ControlListeners, CounterSource, InstanceTrust, ListenAddresses, PlaneConfig, PlaneMeter,
    ProtocolLimits, RankSetup, StartedPlane, TrustSettings, log_refusal, log_violation,
};
use crate::process::address;
use actix::Addr;
use kvferry_engine::actors::{
    Clock, EffectHandler, Input, InputQueue, InstanceBuilder, InstanceDriver,
};
use kvferry_engine::core::config::CoreConfig;
use kvferry_engine::core::error::{Failure, PeerViolation};
use kvferry_engine::core::ids::{EngineId, Incarnation};
use kvferry_engine::core::instance::{Instance, InstanceInput};
use kvferry_engine::core::message::{DecodeAnswer, Mode, PrefillAnswer, Role};
use kvferry_engine::core::payload::{
    DirectoryNews, PayloadEffect, PayloadHost, PayloadInput, pool_geometry, pool_layout,
};
use kvferry_engine::core::verify::Verify;
use kvferry_engine::fabric::{Endpoint, Memory, unbracketed};
use std::collections::BTreeMap;

/// Where a host is reached by others.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PoolAddress {
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl PoolAddress {
    /// Of HOST:PORT, with the host in brackets where it is an address of IPv6.
    pub(crate) fn parse(text: &str) -> Option<PoolAddress> {
        let (host, port) = address::host_and_port(text).ok()?;
        Some(PoolAddress { host: unbracketed(host).into(), port })
    }

    /// What it is called by those who look for it.
    fn engine(&self) -> EngineId {
        format!("{}:{}", self.host, self.port).into()
    }

    fn as_host(&self) -> PayloadHost {
        PayloadHost { engine: self.engine(), control: Endpoint::tcp(&self.host, self.port) }
    }
}

/// The two cores before they run.
pub(super) struct PoolCores {
    /// The prefill's name, by which others ask for this host.
    pub(super) engine: EngineId,
    prefill: InstanceBuilder,
    decode: InstanceBuilder,
    /// The other hosts that are known from the start.
    hosts: Vec<PoolAddress>,
    pub(super) counters: Vec<CounterSource>,
    pub(super) trust: InstanceTrust,
}

impl PoolCores {
    /// Listens where other hosts reach this one, and makes what moves the bytes of a pool in a memory
    /// file.
    ///
    /// # Errors
    /// What cannot be had, under the name by which it was given, and what to do.
    pub(super) fn new(
        (listen, hosts): &(PoolAddress, Vec<PoolAddress>),
        incarnation: Incarnation,
        (file, bytes): (i32, u64),
        operator: &OperatorConfig,
    ) -> Result<PoolCores, String> {
        let told = TrustSettings {
            peers: operator.fabric.trust.clone(),
            moriio_peers: Some(false),
            verify: Verify::Off,
        };
        let key = ("payload_listen", listen.host.as_str());
        let trust = InstanceTrust::of(key, &told).map_err(|why| why.to_string())?;
        let limits = operator.limits.limits()?;
        let core = |role, port| {
            let handshake = ("payload_listen", port);
            let notify = ("payload_listen", 0);
            let places = ListenAddresses { host: key, handshake, notify, ranks: 1 };
            let secret = told.peers.secret_file.as_deref();
            let listeners = ControlListeners::new(places, secret, trust)?;
            instance(role, listeners, incarnation, (file, bytes, operator, &limits))
        };
        let (engine, prefill, served) = core(Role::Prefill, listen.port)?;
        let (_, decode, initiated) = core(Role::Decode, 0)?;
        let counters = [served, initiated].map(CounterSource::Here).into();
        Ok(PoolCores { engine, prefill, decode, hosts: hosts.clone(), counters, trust })
    }

    /// Starts both, with what they tell going to the payload core.
    pub(super) fn start(self, gateway: &Addr<StageActor>, clock: &Clock) -> PoolPeers {
        let start = |instance: InstanceBuilder, news: fn(DirectoryNews) -> PayloadInput| {
            let side = PoolSide { gateway: gateway.clone(), news };
            instance.with_clock(clock.clone()).start(|_| side)
        };
        let mut peers = PoolPeers {
            prefill: start(self.prefill, PayloadInput::PrefillPeer),
            decode: start(self.decode, PayloadInput::DecodePeer),
            hosts: BTreeMap::new(),
        };
        for host in &self.hosts {
            if let Some(hosts) = peers.add(host) {
                gateway.do_send(Input(hosts));
            }
        }
        peers
    }
}

fn instance(
    role: Role,
    listeners: ControlListeners,
    incarnation: Incarnation,
    (file, bytes, operator, limits): (i32, u64, &OperatorConfig, &ProtocolLimits),
) -> Result<(EngineId, InstanceBuilder, PlaneMeter), String> {
    let engine = listeners.address.engine();
    let control = listeners.handshake.clone();
    let config = CoreConfig {
        mode: Mode::Pull,
        settings: limits.protocol.clone(),
        channel: limits.channel.clone(),
        payloads: true,
        ..CoreConfig::new(role, engine.clone(), incarnation, pool_geometry(), control)
    };
    let plane = PlaneConfig::Host(operator.fabric.clone());
    let StartedPlane { plane, meter, .. } = plane.start(&config, 0, &listeners.address.host)?;
    let rank = RankSetup {
        rank: 0,
        plane: with_faults(plane)?,
        kv: (vec![Memory::MemFd { fd: file, len: bytes }], vec![pool_layout(bytes)]),
        settings: limits.operations.clone(),
    };
    let instance = rank.add_to(InstanceBuilder::new(config).with_core(listeners.plane));
    Ok((engine, instance, meter))
}

/// One of the two cores, to the payload core.
pub(super) struct PoolSide {
    gateway: Addr<StageActor>,
    news: fn(DirectoryNews) -> PayloadInput,
}

impl EffectHandler for PoolSide {
    fn prefill(&mut self, answer: PrefillAnswer, _: &mut InputQueue<Instance>) {
        self.gateway.do_send(Input(PayloadInput::Prefill(answer)));
    }

    fn decode(&mut self, answer: DecodeAnswer, _: &mut InputQueue<Instance>) {
        self.gateway.do_send(Input(PayloadInput::Decode(answer)));
    }

    fn directory(&mut self, news: DirectoryNews, _: &mut InputQueue<Instance>) {
        self.gateway.do_send(Input((self.news)(news)));
    }

    fn violation(&mut self, violation: &PeerViolation) {
        log_violation(violation);
    }

    fn refused(&mut self, peer: &EngineId, failure: &Failure) {
        log_refusal(peer, failure);
    }
}

/// The two cores, to the payload core.
pub(super) struct PoolPeers {
    prefill: Addr<InstanceDriver<PoolSide>>,
    decode: Addr<InstanceDriver<PoolSide>>,
    /// The other hosts that put payloads.
    hosts: BTreeMap<EngineId, PayloadHost>,
}

impl PoolPeers {
    /// Adds another host; all that there are then, if it is new.
    pub(super) fn add(&mut self, address: &PoolAddress) -> Option<PayloadInput> {
        let host = address.as_host();
        let is_new = self.hosts.insert(host.engine.clone(), host).is_none();
        is_new.then(|| PayloadInput::Hosts(self.hosts.values().cloned().collect()))
    }

    /// How many other hosts there are.
    pub(super) fn len(&self) -> usize {
        self.hosts.len()
    }

    /// Hands on what is for one of the cores; what is not comes back.
    pub(super) fn perform(&self, effect: PayloadEffect) -> Option<PayloadEffect> {
        let (to, input) = match effect {
            PayloadEffect::Prefill(hook) => (&self.prefill, InstanceInput::Prefill(hook)),
            PayloadEffect::PrefillPeer(call) => (&self.prefill, InstanceInput::Directory(call)),
            PayloadEffect::Decode(hook) => (&self.decode, InstanceInput::Decode(hook)),
            PayloadEffect::DecodePeer(call) => (&self.decode, InstanceInput::Directory(call)),
            effect => return Some(effect),
        };
        to.do_send(Input(input));
        None
    }
}
