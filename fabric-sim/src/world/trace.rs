//! The trace of a run: its hash, and on request every input and effect.

use super::SimOptions;
use super::actor::{MachineConfig, MachineEffect, MachineId, MachineInput};
use super::outputs::{LeavingEffect, OutputHasher};
use super::sight::Sight;
use crate::hash::TraceHasher;
use kvferry_engine::core::decode::{DecodeEffect, DecodeInput};
use kvferry_engine::core::ids::TransferKey;
use kvferry_engine::core::message::{DecodeHook, PrefillHook};
use kvferry_engine::core::payload::PayloadEffect;
use kvferry_engine::core::prefill::{PrefillEffect, PrefillInput};
use kvferry_engine::core::router::{LegBody, RouterEffect};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::core::transfer::TransferEffect;
use kvferry_scenarios::Run;
use serde::{Deserialize, Serialize};
use std::hash::{Hash, Hasher};
use std::io::Cursor;

/// One input or effect.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedEvent {
    pub t: Nanos,
    /// Counts the inputs, effects, starts and ends from 1; of a sight the last one before it.
    pub seq: u64,
    /// The record that led here; 0 if that is not a record.
    pub cause: u64,
    pub actor: MachineId,
    /// The transfer that it names, if it names one.
    pub transfer: Option<TransferKey>,
    pub detail: RecordedDetail,
}

/// What happened to a machine, or what it wanted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RecordedDetail {
    /// It came into being.
    Start(MachineConfig),
    Stop,
    /// It got an input.
    Input(MachineInput),
    Effect(MachineEffect),
    /// The liveness phase began, with these instances as its core.
    Settled(Vec<String>),
    /// The world saw something; the trace hash knows nothing of it.
    Saw(Sight),
}

/// A recorded run: MessagePack of the name, the seed, and then the records one after another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recording(pub Vec<u8>);

#[derive(Debug)]
pub(super) struct Tracer {
    hasher: TraceHasher,
    seq: u64,
    recording: Option<Recording>,
    outputs: Option<OutputHasher>,
}

/// What can be traced as an effect.
pub(super) trait TracedEffect: Hash + Clone + Into<MachineEffect> {
    /// The transfer that it names.
    fn transfer(&self) -> Option<TransferKey> {
        None
    }

    /// The same as an effect that leaves the process; none if it stays within.
    fn leaving(&self) -> Option<LeavingEffect<'_>>;
}

impl TracedEffect for PrefillEffect {
    fn leaving(&self) -> Option<LeavingEffect<'_>> {
        match self {
            PrefillEffect::Control(command) => Some(LeavingEffect::Control(command)),
            PrefillEffect::Answer(answer) => Some(LeavingEffect::Prefill(answer)),
            _ => None,
        }
    }
}

impl TracedEffect for DecodeEffect {
    fn leaving(&self) -> Option<LeavingEffect<'_>> {
        match self {
            DecodeEffect::Control(command) => Some(LeavingEffect::Control(command)),
            DecodeEffect::Answer(answer) => Some(LeavingEffect::Decode(answer)),
            _ => None,
        }
    }
}

impl TracedEffect for TransferEffect {
    fn leaving(&self) -> Option<LeavingEffect<'_>> {
        match self {
            TransferEffect::Data(command) => Some(LeavingEffect::Data(command)),
            TransferEffect::Report(_) => None,
        }
    }
}

impl TracedEffect for PayloadEffect {
    fn leaving(&self) -> Option<LeavingEffect<'_>> {
        match self {
            PayloadEffect::Answer { client, answer } => {
                Some(LeavingEffect::Payload(*client, answer))
            }
            _ => None,
        }
    }
}

impl TracedEffect for RouterEffect {
    fn leaving(&self) -> Option<LeavingEffect<'_>> {
        Some(match self {
            RouterEffect::Control(command) => LeavingEffect::Control(command),
            effect => LeavingEffect::Router(effect),
        })
    }

    fn transfer(&self) -> Option<TransferKey> {
        match self {
            RouterEffect::Dispatch { body: LegBody::Prefill { transfer, .. }, .. } => {
                Some(transfer.key.clone())
            }
            RouterEffect::Dispatch { body: LegBody::Decode { transfer, .. }, .. } => {
                Some(transfer.key.clone())
            }
            _ => None,
        }
    }
}

fn transfer_of(input: &MachineInput) -> Option<TransferKey> {
    match input {
        MachineInput::Prefill(PrefillInput::Hook(PrefillHook::Arrived { leg, .. })) => {
            Some(leg.key.clone())
        }
        MachineInput::Decode(DecodeInput::Hook(DecodeHook::Arrived { leg, .. })) => {
            Some(leg.key.clone())
        }
        _ => None,
    }
}

impl Tracer {
    pub(super) fn new(run: &Run, options: SimOptions) -> Tracer {
        let outputs = options.outputs.then(OutputHasher::default);
        let mut recording = options.record.then(Recording::default);
        if let Some(recording) = &mut recording {
            recording.push(&(&run.name, run.seed));
        }
        Tracer { hasher: TraceHasher::new(run.seed), seq: 0, recording, outputs }
    }

    /// Number of the record made last.
    pub(super) fn seq(&self) -> u64 {
        self.seq
    }

    fn next(&mut self, now: Nanos, actor: MachineId, tag: u8) {
        self.seq += 1;
        self.hasher.write_u64(now.0);
        self.hasher.add(&(tag, actor));
    }

    fn keep(
        &mut self,
        t: Nanos,
        actor: MachineId,
        cause: u64,
        transfer: impl FnOnce() -> Option<TransferKey>,
        detail: impl FnOnce() -> RecordedDetail,
    ) {
        if let Some(recording) = &mut self.recording {
            let (transfer, detail) = (transfer(), detail());
            recording.push(&RecordedEvent { t, seq: self.seq, cause, actor, transfer, detail });
        }
    }

    pub(super) fn started(&mut self, now: Nanos, actor: MachineId, config: &MachineConfig) {
        self.next(now, actor, 0);
        let bytes = rmp_serde::to_vec(config).expect("settings can be serialised");
        self.hasher.write(&bytes);
        self.keep(now, actor, 0, || None, || RecordedDetail::Start(config.clone()));
    }

    pub(super) fn stopped(&mut self, now: Nanos, actor: MachineId) {
        self.next(now, actor, 1);
        self.keep(now, actor, 0, || None, || RecordedDetail::Stop);
    }

    pub(super) fn input(&mut self, now: Nanos, actor: MachineId, cause: u64, input: &MachineInput) {
        self.next(now, actor, 2);
        self.hasher.add(input);
        self.keep(
            now,
            actor,
            cause,
            || transfer_of(input),
            || RecordedDetail::Input(input.clone()),
        );
    }

    pub(super) fn settled(&mut self, now: Nanos, core: &[String]) {
        self.next(now, MachineId::Router, 4);
        self.hasher.add(&core);
        self.keep(now, MachineId::Router, 0, || None, || RecordedDetail::Settled(core.to_vec()));
    }

    pub(super) fn saw(&mut self, sights: impl Iterator<Item = (Nanos, Sight)>) {
        for (now, sight) in sights {
            self.keep(now, MachineId::Router, 0, || None, || RecordedDetail::Saw(sight));
        }
    }

    /// The number of its record.
    pub(super) fn effect<E: TracedEffect>(
        &mut self,
        now: Nanos,
        actor: MachineId,
        cause: u64,
        effect: &E,
    ) -> u64 {
        self.next(now, actor, 3);
        self.hasher.add(effect);
        if let Some(outputs) = &mut self.outputs
            && let Some(effect) = effect.leaving()
        {
            outputs.add(now, actor, &effect);
        }
        let transfer = || effect.transfer();
        self.keep(now, actor, cause, transfer, || RecordedDetail::Effect(effect.clone().into()));
        self.seq
    }

    pub(super) fn hash(&self) -> u64 {
        self.hasher.finish()
    }

    pub(super) fn outputs_hash(&self) -> Option<u64> {
        self.outputs.as_ref().map(OutputHasher::finish)
    }

    pub(super) fn take_recording(&mut self) -> Option<Recording> {
        self.recording.take()
    }
}

impl Recording {
    fn push<T: Serialize>(&mut self, value: &T) {
        // By name: a leg leaves out what it lacks, also in front of what it has.
        rmp_serde::encode::write_named(&mut self.0, value).expect("records can be serialised");
    }

    /// Name of the scenario, seed, and the records in order.
    ///
    /// # Errors
    /// What is wrong with the bytes; from the records, each on its own.
    pub fn read(&self) -> Result<(String, u64, RecordingReader<'_>), rmp_serde::decode::Error> {
        let mut reader = rmp_serde::Deserializer::new(Cursor::new(self.0.as_slice()));
        let (name, seed) = Deserialize::deserialize(&mut reader)?;
        Ok((name, seed, RecordingReader { reader }))
    }
}

/// The records of a [`Recording`].
pub struct RecordingReader<'a> {
    reader: rmp_serde::Deserializer<rmp_serde::decode::ReadReader<Cursor<&'a [u8]>>>,
}

impl std::fmt::Debug for RecordingReader<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Records")
    }
}

impl Iterator for RecordingReader<'_> {
    type Item = Result<RecordedEvent, rmp_serde::decode::Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let bytes = self.reader.get_ref();
        if bytes.position() == bytes.get_ref().len() as u64 {
            return None;
        }
        Some(RecordedEvent::deserialize(&mut self.reader))
    }
}
