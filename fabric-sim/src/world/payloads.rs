//! Hosts with pools: their payload cores between the stages and the cores that move the bytes.

use super::actor::{MachineConfig, MachineId};
use super::event::SimEnvelope;
use super::{LOCAL, ReadyStep, Simulation, build};
use crate::dma::DataPlaneIx;
use crate::observation::{Observation, PayloadSight, SimProcessId};
use kvferry_engine::core::decode::DecodeInput;
use kvferry_engine::core::message::DecodeHook;
use kvferry_engine::core::payload::pool::PAGE;
use kvferry_engine::core::payload::{PayloadEffect, PayloadHost, PayloadInput};
use kvferry_engine::core::prefill::PrefillInput;

impl Simulation {
    /// The host that an instance is a core of.
    pub(super) fn host_of(&self, instance: u16) -> Option<u16> {
        let is_its = |first: u16| (first..first + 2).contains(&instance);
        let at = self.run.hosts.iter().position(|host| is_its(host.instance))?;
        Some(at as u16)
    }

    /// The prefill core of a host, which names its process.
    pub(super) fn host_process(&self, host: u16) -> SimProcessId {
        self.who(self.run.hosts[usize::from(host)].instance)
    }

    /// True if the process of a host is there.
    pub(super) fn host_lives(&self, host: u16) -> bool {
        let instance = self.run.hosts[usize::from(host)].instance;
        self.instances[usize::from(instance)].process.is_some()
    }

    /// The cores of a host have begun, and share its pool; so do its payloads.
    pub(super) fn start_payloads(&mut self, host: u16) {
        let run = self.run.clone();
        let named = |at: u16| &run.instances[usize::from(run.hosts[usize::from(at)].instance)];
        if let [Some(prefill), Some(decode)] = self.pool_planes(host) {
            self.dma.share_store(decode, prefill);
        }
        let (who, slot) = (self.host_process(host), self.payload_slot(host));
        self.restart_machine(slot, MachineId::Payload(host), who.incarnation);
        let config = Box::new(run.hosts[usize::from(host)].config.clone());
        let born = self.born(who.instance);
        let config = MachineConfig::Payload(config, named(host).name.as_str().into(), born);
        self.ready.push_back(ReadyStep::Start(slot, config));
        let other = |at: u16| PayloadHost {
            engine: named(at).name.as_str().into(),
            control: build::control(named(at)),
        };
        let others = (0..run.hosts.len() as u16).filter(|at| *at != host).map(other).collect();
        self.tell(slot, PayloadInput::Hosts(others).into());
        self.stages_begin(host);
    }

    /// A host is gone, and with it the connections of the stages to it.
    pub(super) fn stop_payloads(&mut self, host: u16) {
        let slot = self.payload_slot(host);
        if self.machines[slot as usize].alive {
            self.ready.push_back(ReadyStep::Stop(slot));
        }
        self.stages_cut_off(host);
    }

    /// The planes of the prefill and of the decode core.
    fn pool_planes(&self, host: u16) -> [Option<DataPlaneIx>; 2] {
        let first = self.run.hosts[usize::from(host)].instance;
        [first, first + 1].map(|instance| self.data_planes(instance).first().copied())
    }

    /// The pool of a host; none while it is down.
    pub(super) fn pool(&self, host: u16) -> Option<&[u8]> {
        let [plane, _] = self.pool_planes(host);
        self.dma.store(plane?)?.bytes(0)
    }

    pub(super) fn pool_mut(&mut self, host: u16) -> Option<&mut [u8]> {
        let [plane, _] = self.pool_planes(host);
        self.dma.store_mut(plane?)?.bytes_mut(0)
    }

    /// Tells the payloads of a host, as all parts of its process are told.
    pub(super) fn tell_payloads(&mut self, host: u16, input: PayloadInput, cause: u64) {
        let slot = self.payload_slot(host);
        let incarnation = self.machines[slot as usize].incarnation;
        let input = input.into();
        self.post(LOCAL, SimEnvelope::Machine { slot, incarnation, input, cause });
    }

    pub(super) fn payload_effect(&mut self, (slot, cause): (u32, u64), effect: PayloadEffect) {
        let (id, instance) = self.owner(slot);
        let MachineId::Payload(host) = id else { unreachable!("it is a payload core's effect") };
        let who = self.who(instance);
        self.tracer.effect(self.now, id, cause, &effect);
        match effect {
            PayloadEffect::Answer { client, answer } => {
                self.post(LOCAL, SimEnvelope::Stage { host, client, answer });
            }
            PayloadEffect::Prefill(hook) => {
                self.observer.observe(self.now, &Observation::PrefillHook { who, hook: &hook });
                self.hook(instance, PrefillInput::Hook(hook).into());
            }
            PayloadEffect::PrefillPeer(call) => {
                self.hook(instance, PrefillInput::Directory(call).into());
            }
            PayloadEffect::Decode(hook) => {
                let who = self.who(instance + 1);
                if let DecodeHook::Allocated { blocks, .. } = &hook {
                    let ids = blocks.iter().map(|list| list.ids.clone()).collect::<Vec<_>>();
                    self.pages_taken(host, &ids);
                }
                self.observer.observe(self.now, &Observation::DecodeHook { who, hook: &hook });
                self.hook(instance + 1, DecodeInput::Hook(hook).into());
            }
            PayloadEffect::DecodePeer(call) => {
                self.hook(instance + 1, DecodeInput::Directory(call).into());
            }
            PayloadEffect::Misuse { rule, .. } => {
                let sight = PayloadSight::Misuse { rule: &rule };
                self.observer.observe(self.now, &Observation::Payload { host: who, sight });
            }
            PayloadEffect::PeerMisuse { rule, .. } => {
                let sight = PayloadSight::Misuse { rule: &rule };
                self.observer.observe(self.now, &Observation::Payload { host: who, sight });
            }
            PayloadEffect::FetchFailed { .. } => {}
        }
    }

    /// Pages of a pool have a new owner: nobody reads what was there for a transfer that counts, and
    /// nothing lands there of one before.
    pub(super) fn pages_taken(&mut self, host: u16, pages: &[Vec<u32>]) {
        let who = self.host_process(host);
        let request = &"slot".into();
        for seen in [
            Observation::Freed { who, request, blocks: pages },
            Observation::Taken { who, request, blocks: pages },
        ] {
            self.observer.observe(self.now, &seen);
        }
    }

    /// The same of a range of the pool, in bytes.
    pub(super) fn slot_taken(&mut self, host: u16, (offset, bytes): (u64, u64)) {
        let end = (offset + bytes.max(1)).div_ceil(PAGE);
        let pages = ((offset / PAGE) as u32..end as u32).collect();
        self.pages_taken(host, &[pages]);
    }
}
