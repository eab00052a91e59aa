//! Hash over the effects that leave the machines of a run. Unlike the trace hash it covers no input, no
//! effect between machines of one process, and no type of an effect that wraps another one.

use super::actor::MachineId;
use crate::hash::TraceHasher;
use kvferry_engine::core::command::{ControlCommand, DataCommand};
use kvferry_engine::core::message::{DecodeAnswer, PrefillAnswer};
use kvferry_engine::core::payload::{PayloadAnswer, PayloadClient};
use kvferry_engine::core::router::{LegBody, RouterEffect};
use kvferry_engine::core::time::Nanos;
use serde::Serialize;
use std::collections::BTreeMap;
use std::hash::Hasher;

/// An effect that leaves the process of its machine.
#[derive(Clone, Copy)]
pub(super) enum LeavingEffect<'a> {
    Control(&'a ControlCommand),
    Data(&'a DataCommand),
    Prefill(&'a PrefillAnswer),
    Decode(&'a DecodeAnswer),
    Payload(PayloadClient, &'a PayloadAnswer),
    /// Any of the router's but a call on its control plane.
    Router(&'a RouterEffect),
}

/// One order of effects of a process. Effects of different ways may be reordered within a turn without
/// a difference to anyone outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum OutputWay {
    Control,
    /// The data plane of a TP rank.
    Data(u16),
    /// To the serving engine, the stages, or the clients and instances of the router.
    Answer,
}

/// Process of a machine: its kind and its index among those of the run.
type ProcessKey = (u8, u16);

/// Hashes effects by process and way, each in its order.
#[derive(Debug, Default)]
pub(super) struct OutputHasher {
    ways: BTreeMap<(ProcessKey, OutputWay), TraceHasher>,
    /// Serialised answer; kept for its memory.
    bytes: Vec<u8>,
}

impl OutputHasher {
    pub(super) fn add(&mut self, now: Nanos, actor: MachineId, effect: &LeavingEffect<'_>) {
        let (process, rank) = match actor {
            MachineId::Router => ((0, 0), 0),
            MachineId::Prefill(instance) | MachineId::Decode(instance) => ((1, instance), 0),
            MachineId::Transfer(instance, rank) => ((1, instance), rank),
            MachineId::Payload(host) => ((2, host), 0),
        };
        let way = match effect {
            LeavingEffect::Control(_) => OutputWay::Control,
            LeavingEffect::Data(_) => OutputWay::Data(rank),
            _ => OutputWay::Answer,
        };
        let hasher = self.ways.entry((process, way)).or_insert(TraceHasher::new(0));
        hasher.write_u64(now.0);
        let bytes = &mut self.bytes;
        match effect {
            LeavingEffect::Control(command) => hasher.add(command),
            LeavingEffect::Data(command) => hasher.add(command),
            LeavingEffect::Prefill(answer) => add_named(hasher, bytes, answer),
            LeavingEffect::Decode(answer) => add_named(hasher, bytes, answer),
            LeavingEffect::Payload(client, answer) => add_named(hasher, bytes, &(client, answer)),
            LeavingEffect::Router(effect) => add_router(hasher, bytes, effect),
        }
    }

    pub(super) fn finish(&self) -> u64 {
        let mut all = TraceHasher::new(0);
        for (key, hasher) in &self.ways {
            all.add(key);
            all.write_u64(hasher.finish());
        }
        all.finish()
    }
}

/// Hashes a value by the names of its variants and fields, which outlive its place in an enum.
fn add_named(hasher: &mut TraceHasher, bytes: &mut Vec<u8>, value: &impl Serialize) {
    bytes.clear();
    rmp_serde::encode::write_named(bytes, value).expect("answers can be serialised");
    hasher.write(bytes);
}

fn add_router(hasher: &mut TraceHasher, bytes: &mut Vec<u8>, effect: &RouterEffect) {
    let RouterEffect::Dispatch { leg, client, engine, body, expected, .. } = effect else {
        return add_named(hasher, bytes, effect);
    };
    let (key, mode, prompt, sample) = match body {
        LegBody::Prefill { transfer, prompt } => (&transfer.key, transfer.mode, prompt, &0),
        LegBody::Decode { transfer, prompt, sample, .. } => {
            (&transfer.key, transfer.mode, prompt, sample)
        }
    };
    add_named(hasher, bytes, &(leg, client, engine, expected));
    add_named(hasher, bytes, &(key, mode, prompt, sample));
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_engine::fabric::LinkId;

    fn hang_up(link: u32) -> ControlCommand {
        ControlCommand::HangUp { link: LinkId(link) }
    }

    fn free(request: &str) -> PrefillAnswer {
        PrefillAnswer::PreemptionSafe { request: request.into() }
    }

    fn hash(effects: &[(u64, MachineId, LeavingEffect<'_>)]) -> u64 {
        let mut hasher = OutputHasher::default();
        for (now, actor, effect) in effects {
            hasher.add(Nanos(*now), *actor, effect);
        }
        hasher.finish()
    }

    #[test]
    fn order_counts_within_one_way_and_not_between_ways() {
        let (one, two, answer) = (hang_up(1), hang_up(2), free("a"));
        let core = MachineId::Prefill(0);
        let [first, second] = [&one, &two].map(|it| (5, core, LeavingEffect::Control(it)));
        let answered = (5, core, LeavingEffect::Prefill(&answer));
        let base = hash(&[first, second, answered]);
        assert_eq!(hash(&[answered, first, second]), base);
        assert_ne!(hash(&[second, first, answered]), base);
    }

    #[test]
    fn time_process_and_content_count() {
        let (one, two, answer) = (hang_up(1), hang_up(2), free("a"));
        let base = hash(&[(5, MachineId::Prefill(0), LeavingEffect::Control(&one))]);
        for other in [
            (6, MachineId::Prefill(0), LeavingEffect::Control(&one)),
            (5, MachineId::Prefill(1), LeavingEffect::Control(&one)),
            (5, MachineId::Prefill(0), LeavingEffect::Control(&two)),
            (5, MachineId::Prefill(0), LeavingEffect::Prefill(&answer)),
        ] {
            assert_ne!(hash(&[other]), base);
        }
        assert_ne!(
            hash(&[(5, MachineId::Prefill(0), LeavingEffect::Prefill(&answer))]),
            hash(&[(5, MachineId::Prefill(0), LeavingEffect::Prefill(&free("b")))]),
        );
    }
}
