//! Feeds a recording to the protocol machines alone and demands the same effects.
//!
//! ```
//! use kvferry_sim::replay::replay;
//! use kvferry_sim::world::{SimOptions, run};
//!
//! let text = "about = 'one prompt'\nseed = 1\n[workload]\nmode = 'push'\nrequests = 1\n";
//! let scenario = kvferry_scenarios::parse("one.toml", text, ".".as_ref(), None)?;
//! let report = run(&scenario.draw(1)?, SimOptions { record: true, ..SimOptions::default() });
//! let summary = replay(&report.recording.unwrap()).unwrap();
//! assert!(summary.inputs > 0 && summary.effects > 0);
//! # Ok::<(), kvferry_scenarios::ScenarioError>(())
//! ```

use crate::world::{AnyMachine, MachineEffect, MachineId, RecordedDetail, Recording};
use std::collections::{BTreeMap, VecDeque};
use std::fmt;

/// What a replay did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplaySummary {
    /// Name of the scenario.
    pub scenario: String,
    pub seed: u64,
    /// Inputs that were fed.
    pub inputs: u64,
    /// Effects that were equal.
    pub effects: u64,
}

/// Why a recording could not be replayed to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReplayError {
    /// The recording cannot be read.
    Damaged { records: u64, why: String },
    /// An input of a machine that was not started.
    NotStarted { seq: u64, actor: MachineId },
    /// A machine did something else than recorded.
    Differs {
        seq: u64,
        actor: MachineId,
        /// The effect on record, if there is one.
        recorded: Option<Box<MachineEffect>>,
        /// The effect now, if there is one.
        replayed: Option<Box<MachineEffect>>,
    },
}

impl fmt::Display for ReplayError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReplayError::Damaged { records, why } => {
                write!(f, "recording is damaged after {records} records: {why}; record it again")
            }
            ReplayError::NotStarted { seq, actor } => {
                write!(f, "record {seq}: input of {actor}, which was not started; record it again")
            }
            ReplayError::Differs { seq, actor, recorded, replayed } => {
                let show = |effect: &Option<Box<MachineEffect>>| match effect {
                    Some(effect) => format!("{effect:?}"),
                    None => "nothing".to_string(),
                };
                let (recorded, replayed) = (show(recorded), show(replayed));
                write!(f, "record {seq}: {actor} did {recorded} when recorded, {replayed} now")
            }
        }
    }
}

impl std::error::Error for ReplayError {}

/// Replays a recording.
///
/// # Errors
/// The first difference, or what is wrong with the recording.
pub fn replay(recording: &Recording) -> Result<ReplaySummary, ReplayError> {
    let damaged =
        |records, why: &dyn fmt::Display| ReplayError::Damaged { records, why: why.to_string() };
    let (scenario, seed, records) = recording.read().map_err(|why| damaged(0, &why))?;
    let mut machines: BTreeMap<MachineId, AnyMachine> = BTreeMap::new();
    let mut pending: VecDeque<MachineEffect> = VecDeque::new();
    let (mut last, mut count, mut inputs, mut effects) = (MachineId::Router, 0, 0, 0);
    for record in records {
        let record = record.map_err(|why| damaged(count, &why))?;
        count += 1;
        let (seq, actor) = (record.seq, record.actor);
        if let RecordedDetail::Saw(_) = record.detail {
            continue;
        }
        if let RecordedDetail::Effect(recorded) = record.detail {
            let replayed = pending.pop_front();
            if replayed.as_ref() != Some(&recorded) {
                let recorded = Some(Box::new(recorded));
                let replayed = replayed.map(Box::new);
                return Err(ReplayError::Differs { seq, actor, recorded, replayed });
            }
            effects += 1;
            continue;
        }
        no_more(&mut pending, seq, last)?;
        last = actor;
        match record.detail {
            RecordedDetail::Start(config) => {
                machines.insert(actor, AnyMachine::new(config));
            }
            RecordedDetail::Stop => {
                machines.remove(&actor);
            }
            RecordedDetail::Input(input) => {
                let machine = machines.get_mut(&actor);
                let machine = machine.ok_or(ReplayError::NotStarted { seq, actor })?;
                machine.handle(record.t, input);
                pending.extend(machine.take_effects());
                inputs += 1;
            }
            RecordedDetail::Effect(_) | RecordedDetail::Settled(_) | RecordedDetail::Saw(_) => {}
        }
    }
    no_more(&mut pending, count, last)?;
    Ok(ReplaySummary { scenario, seed, inputs, effects })
}

/// Refuses effects that are not on record.
fn no_more(
    pending: &mut VecDeque<MachineEffect>,
    seq: u64,
    actor: MachineId,
) -> Result<(), ReplayError> {
    match pending.pop_front() {
        None => Ok(()),
        Some(effect) => {
            let replayed = Some(Box::new(effect));
            Err(ReplayError::Differs { seq, actor, recorded: None, replayed })
        }
    }
}
