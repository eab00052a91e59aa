//! Payloads for stages whose connector is vLLM-Omni's `MoriTransferEngineConnector`: the planes by
//! which they are reached, and what their payloads look like in the pool.

use super::mori_settings::{MoriStageSettings, StageFabric};
use super::pool_peers::PoolAddress;
use super::stages::{MoriHook, StageActor};
use crate::instance::{PlaneConfig, remedy};
use actix::Addr;
use kvferry_engine::actors::{Clock, Driver, Input, InputQueue, PlaneAdapter};
use kvferry_engine::core::command::DataRefusal;
use kvferry_engine::core::omni_mori::{
    ForeignPayload, OmniMori, OmniMoriConfig, OmniMoriEffect, OmniMoriInput, OmniMoriReport,
    OmniMoriSettings, PREAMBLE_BYTES,
};
use kvferry_engine::core::payload::{PayloadAnswer, PayloadClient};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::effects::{perform_control, perform_data};
use kvferry_engine::fabric::{
    ControlPlane, DataPlane, LinkKind, Memory, NextPoll, OwnMemory, Refused, RegionId, bracketed,
};
use kvferry_fabric_host::{HostConfig, MemfdPool};
use kvferry_fabric_mori::{MoriBackend, MoriConfig};
use kvferry_wire::{WireConfig, ZmqPlane};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use std::net::TcpListener;
use std::sync::Arc;
use std::task::Waker;

/// What it is among the processes of stages, of which no connection has this number.
pub(super) const MORI_CLIENT: PayloadClient = PayloadClient(u32::MAX);

pub(super) type MoriStageActor = Driver<MoriStages>;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MoriLabels {
    outcome: &'static str,
}

/// Counts of what became of payloads of such stages.
#[derive(Clone, Debug, Default)]
pub(super) struct MoriStageMetrics {
    pulls: Family<MoriLabels, Counter>,
    fetches: Family<MoriLabels, Counter>,
    violations: Counter,
}

impl MoriStageMetrics {
    pub(super) fn register(&self, all: &mut Registry) {
        let about = "Payloads that connectors of MoRI pulled, or why they did not";
        all.register("payload_mori_pulls", about, self.pulls.clone());
        let about = "Payloads that were pulled from connectors of MoRI, or not";
        all.register("payload_mori_fetches", about, self.fetches.clone());
        let about = "What connectors of MoRI said against their protocol";
        all.register("payload_mori_violations", about, self.violations.clone());
    }

    fn count(&self, report: &OmniMoriReport) {
        let (into, outcome) = match report {
            OmniMoriReport::Pulled { outcome, .. } => {
                (&self.pulls, outcome.as_ref().map_or_else(|refusal| refusal.kind, |_| "done"))
            }
            OmniMoriReport::Fetched { outcome, .. } => {
                (&self.fetches, if outcome.is_ok() { "done" } else { "failed" })
            }
            OmniMoriReport::Violation { .. } => {
                self.violations.inc();
                return;
            }
            OmniMoriReport::Unusable { .. } | OmniMoriReport::Unregistered(_) => return,
        };
        into.get_or_create(&MoriLabels { outcome }).inc();
    }
}

/// The planes, and the pool.
pub(super) struct MoriStages {
    control: Box<dyn ControlPlane>,
    data: Box<dyn DataPlane>,
    pool: Arc<MemfdPool>,
    stages: Addr<StageActor>,
    metrics: MoriStageMetrics,
}

/// Planes that listen, and whose payloads go there.
pub(super) struct MoriStagePlanes {
    control: ZmqPlane,
    data: Box<dyn DataPlane>,
    pub(super) deployment: Arc<str>,
}

impl MoriStageSettings {
    /// Listens.
    ///
    /// # Errors
    /// What cannot be had, and what to do.
    pub(super) fn listen(&self, fabric: &HostConfig) -> Result<MoriStagePlanes, String> {
        self.check_trust(fabric.trust.insecure_network)?;
        let PoolAddress { host, port } = &self.listen;
        let ports = [(LinkKind::Handshake, *port)].into_iter().filter(|(_, port)| *port != 0);
        let bound = bracketed(host).into_owned();
        let config = WireConfig { host: bound, ports: ports.collect(), ..WireConfig::default() };
        let mut control = ZmqPlane::new(config).map_err(|why| why.to_string())?;
        let at = control.listen(LinkKind::Handshake).map_err(|why| {
            let address = format!("{}:{port}", bracketed(host));
            // A trial says what to do about it; the port may be free by then.
            let remedy = TcpListener::bind(&address).err().map(|why| remedy(&address, &why));
            let remedy = remedy.map_or(String::new(), |remedy| format!("; {remedy}"));
            format!("payload_mori_listen = {address}: {why}{remedy}")
        })?;
        let plane = match self.fabric {
            StageFabric::Host => PlaneConfig::Host(fabric.clone()),
            StageFabric::MoriRdma => {
                let config = MoriConfig { backend: MoriBackend::Rdma, ..MoriConfig::default() };
                PlaneConfig::mori(config, fabric.trust.clone())?
            }
        };
        let backend = plane.backend();
        let key = format!("kvferry-omni-{}-{}", std::process::id(), at.0);
        // Such peers have no hello in which a key could be agreed on.
        let data = plane.start_as(key, host, true)?.plane;
        tracing::info!(
            listen = &*at.0,
            deployment = &*self.deployment,
            backend,
            "payloads for connectors of MoRI"
        );
        Ok(MoriStagePlanes { control, data, deployment: self.deployment.clone() })
    }
}

impl MoriStages {
    pub(super) fn start(
        clock: Clock,
        (planes, pool): (MoriStagePlanes, Arc<MemfdPool>),
        (stages, metrics): (Addr<StageActor>, MoriStageMetrics),
    ) -> Addr<MoriStageActor> {
        let MoriStagePlanes { control, data, deployment } = planes;
        let config = OmniMoriConfig {
            deployment,
            address: data.address(),
            caps: data.caps(),
            pool: pool.len(),
            settings: OmniMoriSettings::default(),
        };
        let adapter = MoriStages { control: Box::new(control), data, pool, stages, metrics };
        let first = [OmniMoriInput::Start];
        Driver::start(|_| adapter, OmniMori::new(config), first, clock)
    }

    /// Hands a part of the pool to the data plane.
    fn register(&mut self, region: RegionId, at: u64, bytes: u64) -> Option<DataRefusal> {
        let is_inside = at.checked_add(bytes).is_some_and(|end| end <= self.pool.len());
        assert!(is_inside, "{bytes} bytes at {at} of a pool of {}", self.pool.len());
        let base = self.pool.start() as u64 + at;
        // SAFETY: It is part of the pool's mapping, which this has as long as the plane. Nobody holds
        // references to its bytes.
        let memory = Memory::Own(unsafe { OwnMemory::new(base, bytes) });
        let refused = self.data.register(region, memory).err();
        refused.map(|why| DataRefusal::Register { region, why })
    }

    fn report(&self, report: OmniMoriReport) {
        self.metrics.count(&report);
        match report {
            OmniMoriReport::Pulled { key, outcome: Ok(bytes) } => {
                tracing::debug!(%key, bytes, "a connector of MoRI pulled a payload");
            }
            OmniMoriReport::Pulled { key, outcome: Err(refusal) } if refusal.kind == "unknown" => {
                tracing::debug!(%key, "a connector of MoRI pulls what is not there");
            }
            OmniMoriReport::Pulled { key, outcome: Err(refusal) } => {
                tracing::warn!(%key, why = &*refusal.why, "a connector of MoRI could not pull");
            }
            OmniMoriReport::Fetched { key, outcome: Ok(bytes) } => {
                tracing::debug!(%key, bytes, "pulled from a connector of MoRI");
            }
            OmniMoriReport::Fetched { key, outcome: Err(why) } => {
                tracing::warn!(%key, why = &*why, "cannot pull from a connector of MoRI");
            }
            OmniMoriReport::Unusable { key, why } => {
                tracing::warn!(%key, why = &*why, "connectors of MoRI cannot have a payload");
            }
            OmniMoriReport::Violation { from, rule } => {
                let peer = from.as_ref().map(|from| &*from.0);
                tracing::warn!(peer, rule = &*rule, "dropped what a connector of MoRI said");
            }
            OmniMoriReport::Unregistered(why) => {
                tracing::error!(why = &*why, "the pool cannot be registered");
            }
        }
    }
}

impl PlaneAdapter for MoriStages {
    type Machine = OmniMori;

    fn poll(&mut self, now: Nanos, out: &mut InputQueue<OmniMori>) -> NextPoll {
        let (mut said, mut moved) = (Vec::new(), Vec::new());
        let wake = self.control.poll(now, &mut said).sooner(self.data.poll(now, &mut moved));
        out.extend(said.into_iter().map(OmniMoriInput::Control));
        out.extend(moved.into_iter().map(OmniMoriInput::Data));
        wake
    }

    fn perform(&mut self, _: &OmniMori, effect: OmniMoriEffect, out: &mut InputQueue<OmniMori>) {
        match effect {
            OmniMoriEffect::Control(command) => {
                out.extend(
                    perform_control(&mut *self.control, command).map(OmniMoriInput::Control),
                );
            }
            OmniMoriEffect::Data(command) => {
                out.extend(perform_data(&mut *self.data, command).map(OmniMoriInput::Refused));
            }
            OmniMoriEffect::Register { region, at, bytes } => {
                out.extend(self.register(region, at, bytes).map(OmniMoriInput::Refused));
            }
            OmniMoriEffect::Deregister { region } => {
                // One that is not registered is not reachable.
                let is_done = self.data.deregister(region) != Err(Refused::Busy);
                out.push_back(OmniMoriInput::Deregistered { region, is_done });
            }
            OmniMoriEffect::Hook(hook) => self.stages.do_send(MoriHook(hook)),
            OmniMoriEffect::Preamble(foreign) => ForeignForm::write(&self.pool, foreign),
            OmniMoriEffect::Report(report) => self.report(report),
        }
    }

    fn ticks(&self, _: &OmniMori, _: Nanos, out: &mut InputQueue<OmniMori>) {
        out.push_back(OmniMoriInput::Tick);
    }

    fn set_waker(&mut self, waker: Waker) {
        self.control.set_waker(waker.clone());
        self.data.set_waker(waker);
    }
}

/// What the payload core answers, as it is for the machine.
pub(super) fn input_of(pool: &MemfdPool, answer: PayloadAnswer) -> Input<OmniMoriInput> {
    Input(match answer {
        PayloadAnswer::Arrived { key, claim, offset, bytes, .. } => {
            let found = ForeignForm::read(pool, offset, bytes);
            OmniMoriInput::Arrived { key, claim, found }
        }
        answer => OmniMoriInput::Answer(answer),
    })
}

/// What is at the beginning of each payload in the pool, as `kvferry.omni.codec` writes it: magic,
/// version, form, bytes of a header behind it, and bytes of the whole. Numbers are little-endian.
struct ForeignForm {
    form: u16,
    header: u32,
    whole: u64,
}

impl ForeignForm {
    const MAGIC: [u8; 4] = *b"KVFP";
    const VERSION: u16 = 1;
    const BYTES: usize = 24;

    /// Of a raw payload: its bytes are the only buffer.
    const RAW: u16 = 1;
    /// Of what vLLM-Omni serialized, and of what it did not.
    const SERIALIZED: u16 = 2;
    const FAST_PATH: u16 = 3;

    fn decode(bytes: [u8; Self::BYTES]) -> Option<ForeignForm> {
        let part = |at: usize, len: usize| {
            let mut number = [0; 8];
            number[..len].copy_from_slice(&bytes[at..at + len]);
            u64::from_le_bytes(number)
        };
        let is_known = bytes[..4] == Self::MAGIC && part(4, 2) == u64::from(Self::VERSION);
        is_known.then(|| ForeignForm {
            form: part(6, 2) as u16,
            header: part(8, 4) as u32,
            whole: part(16, 8),
        })
    }

    fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&Self::MAGIC);
        bytes[4..6].copy_from_slice(&Self::VERSION.to_le_bytes());
        bytes[6..8].copy_from_slice(&self.form.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.header.to_le_bytes());
        bytes[16..].copy_from_slice(&self.whole.to_le_bytes());
        bytes
    }

    /// Where the bytes are that a connector of MoRI takes, of a payload in a slot.
    fn foreign(&self, offset: u64, bytes: u64) -> Result<ForeignPayload, &'static str> {
        if self.whole > bytes {
            return Err("it is damaged: it has more bytes than its slot");
        }
        let (start, is_fast_path) = match self.form {
            Self::SERIALIZED => (PREAMBLE_BYTES, false),
            Self::FAST_PATH => (PREAMBLE_BYTES, true),
            Self::RAW => {
                let header = Self::BYTES as u64 + u64::from(self.header);
                (header.next_multiple_of(PREAMBLE_BYTES), true)
            }
            _ => {
                return Err(
                    "it is in a form that they cannot read: name the MoRI stages of this edge \
                    in the connector that puts it",
                );
            }
        };
        match self.whole.checked_sub(start) {
            None => Err("it is damaged: it ends ahead of its bytes"),
            Some(0) => Err("it has no bytes, which they cannot say"),
            Some(bytes) => Ok(ForeignPayload { at: offset + start, bytes, is_fast_path }),
        }
    }

    fn read(pool: &MemfdPool, offset: u64, bytes: u64) -> Result<ForeignPayload, Arc<str>> {
        let is_there = bytes >= Self::BYTES as u64
            && offset.checked_add(bytes).is_some_and(|end| end <= pool.len());
        if !is_there {
            return Err("it is damaged: it has fewer bytes than a preamble".into());
        }
        let mut preamble = [0; Self::BYTES];
        for (at, byte) in preamble.iter_mut().enumerate() {
            // SAFETY: Within the pool. Others may write it meanwhile: each byte is read once, and
            // what they make is checked.
            *byte = unsafe { pool.start().add(offset as usize + at).read_volatile() };
        }
        let form = ForeignForm::decode(preamble).ok_or("it is damaged: it has no preamble")?;
        Ok(form.foreign(offset, bytes)?)
    }

    /// Says ahead of bytes of a connector of MoRI what they are.
    fn write(pool: &MemfdPool, ForeignPayload { at, bytes, is_fast_path }: ForeignPayload) {
        let form = if is_fast_path { Self::FAST_PATH } else { Self::SERIALIZED };
        let whole = PREAMBLE_BYTES + bytes;
        let preamble = ForeignForm { form, header: 0, whole }.encode();
        let start = at.checked_sub(PREAMBLE_BYTES).filter(|start| start + whole <= pool.len());
        let start = start.expect("a slot of the pool") as usize;
        for at in 0..PREAMBLE_BYTES as usize {
            let byte = preamble.get(at).copied().unwrap_or(0);
            // SAFETY: Within the pool, in a slot that nobody else has.
            unsafe { pool.start().add(start + at).write_volatile(byte) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_fabric_host::HugePages;

    #[test]
    fn bytes_of_mori_are_found_behind_what_the_codec_writes() {
        let pool = MemfdPool::new(8192, HugePages::No).expect("a pool");
        let foreign = ForeignPayload { at: 4096 + 64, bytes: 100, is_fast_path: false };
        // SAFETY: Within the pool, which nobody else has.
        unsafe { pool.start().add(4096).write_bytes(0xff, 64) };
        ForeignForm::write(&pool, foreign);
        assert_eq!(ForeignForm::read(&pool, 4096, 164), Ok(foreign));
        let padding = (ForeignForm::BYTES..64).map(|at| {
            // SAFETY: As above.
            unsafe { pool.start().add(4096 + at).read_volatile() }
        });
        assert!(padding.into_iter().all(|byte| byte == 0), "nothing is left of what was there");
        let put = |form, header, whole| {
            let bytes = ForeignForm { form, header, whole }.encode();
            // SAFETY: Within the pool, which nobody else has.
            unsafe { pool.start().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
            ForeignForm::read(&pool, 0, 4096)
        };
        // A leaf of a tensor with two dimensions takes 26 bytes, so that the buffer is at 64.
        let raw = ForeignPayload { at: 64, bytes: 36, is_fast_path: true };
        assert_eq!(put(ForeignForm::RAW, 26, 100), Ok(raw));
        let longer = ForeignPayload { at: 128, bytes: 1, is_fast_path: true };
        assert_eq!(put(ForeignForm::RAW, 41, 129), Ok(longer));
        for (form, header, whole, why) in [
            (0, 40, 4000, "in a form that they cannot read"),
            (4, 40, 4000, "in a form that they cannot read"),
            (ForeignForm::FAST_PATH, 0, 4097, "more bytes than its slot"),
            (ForeignForm::RAW, u32::MAX, 4096, "ends ahead of its bytes"),
            (ForeignForm::SERIALIZED, 0, 63, "ends ahead of its bytes"),
            (ForeignForm::FAST_PATH, 0, 64, "no bytes"),
        ] {
            let said = put(form, header, whole).expect_err("it cannot be had");
            assert!(said.contains(why), "{said}");
        }
        assert!(ForeignForm::read(&pool, 4096, 23).is_err());
        assert!(ForeignForm::read(&pool, 4096 + 64, 64).is_err(), "no preamble");
    }
}
