//! An instance: its core, its transfer machines, and what they tell one another. A process holds
//! all of it, or a part whose rest is in other processes.
//!
//! ```
//! use kvferry_engine::core::config::CoreConfig;
//! use kvferry_engine::core::ids::{Incarnation, Role};
//! use kvferry_engine::core::instance::{Instance, InstanceInput, InstancePart};
//! use kvferry_engine::core::layout::{Geometry, KvGroup};
//! use kvferry_engine::core::{Machine, Nanos, Outbox};
//!
//! let geometry = Geometry::new("llama", 8, vec![KvGroup::full(16, 0..32)]);
//! let control = "tcp://10.0.0.1:6301".into();
//! let (mut instance, mut out) = (Instance::default(), Outbox::new());
//! instance.add_core(CoreConfig::new(Role::Prefill, "p", Incarnation(1), geometry, control));
//! // The rank is in another process: here its start changes nothing.
//! assert_eq!(InstanceInput::Start(0).part(), InstancePart::Rank(0));
//! instance.handle(Nanos::ZERO, InstanceInput::Start(0), &mut out);
//! assert!(out.is_empty());
//! ```

use super::command::{DataCommand, DataRefusal};
use super::config::CoreConfig;
use super::decode::{Decode, DecodeEffect, DecodeInput, VerifyCounters};
use super::engine_core::{CoreEffect, CoreInput};
use super::ids::StepId;
use super::machine::{Gauges, Machine, Outbox};
use super::message::{DecodeHook, PrefillHook, Role, TransferJob, TransferReport};
use super::payload::DirectoryCall;
use super::prefill::{Prefill, PrefillEffect, PrefillInput};
use super::time::Nanos;
use super::transfer::{Transfer, TransferConfig, TransferEffect, TransferInput};
use crate::fabric::{ControlEvent, DataEvent};
use std::collections::VecDeque;

/// A machine of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum InstancePart {
    /// The prefill or decode core.
    Core,
    /// The transfer machine of this TP rank.
    Rank(u16),
}

/// What can happen to an instance. What is for a machine that it does not have changes nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InstanceInput {
    /// The engine tells a prefill.
    Prefill(PrefillHook),
    /// The engine tells a decode.
    Decode(DecodeHook),
    /// What the payload core has the core do with its peers.
    Directory(DirectoryCall),
    /// Register as draining from now on.
    Drain,
    /// The control plane reports.
    Control(ControlEvent),
    /// The transfer machine of a rank reports to the core.
    Report {
        /// TP rank.
        rank: u16,
        report: TransferReport,
    },
    /// The transfer machine of a rank starts.
    Start(u16),
    /// The core has a rank do something.
    Job {
        /// TP rank.
        rank: u16,
        job: TransferJob,
    },
    /// The worker of a rank computed the first layers of a step, see [`TransferInput::Layers`].
    Layers {
        /// TP rank.
        rank: u16,
        step: StepId,
        layers: u16,
    },
    /// The data plane of a rank reports.
    Data {
        /// TP rank.
        rank: u16,
        event: DataEvent,
    },
    /// The data plane of a rank did not take a call.
    Refused {
        /// TP rank.
        rank: u16,
        /// The call, and why.
        refusal: DataRefusal,
    },
    /// A deadline of a machine may be due.
    Tick(InstancePart),
}

impl InstanceInput {
    /// The machine that it is for.
    pub fn part(&self) -> InstancePart {
        match self {
            InstanceInput::Prefill(_)
            | InstanceInput::Decode(_)
            | InstanceInput::Directory(_)
            | InstanceInput::Drain
            | InstanceInput::Control(_)
            | InstanceInput::Report { .. } => InstancePart::Core,
            InstanceInput::Start(rank)
            | InstanceInput::Job { rank, .. }
            | InstanceInput::Layers { rank, .. }
            | InstanceInput::Data { rank, .. }
            | InstanceInput::Refused { rank, .. } => InstancePart::Rank(*rank),
            InstanceInput::Tick(part) => *part,
        }
    }
}

impl From<PrefillHook> for InstanceInput {
    fn from(hook: PrefillHook) -> Self {
        InstanceInput::Prefill(hook)
    }
}

impl From<DecodeHook> for InstanceInput {
    fn from(hook: DecodeHook) -> Self {
        InstanceInput::Decode(hook)
    }
}

/// What an instance wants done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InstanceEffect {
    /// What a prefill core wants done. Its jobs are for all ranks; those of this process get them by
    /// [`Instance::follow`].
    Prefill(PrefillEffect),
    /// The same of a decode core.
    Decode(DecodeEffect),
    /// Call the data plane of a rank.
    Data {
        /// TP rank.
        rank: u16,
        command: DataCommand,
    },
    /// Tell the core; one of this process hears it by [`Instance::follow`].
    Report {
        /// TP rank.
        rank: u16,
        report: TransferReport,
    },
}

#[derive(Debug)]
enum CoreMachine {
    Prefill(Box<Prefill>, Outbox<PrefillEffect>),
    Decode(Box<Decode>, Outbox<DecodeEffect>),
}

/// Who is told of each input that a machine is about to take.
#[derive(Clone, Copy, Debug)]
pub struct InputObserver {
    pub prefill: fn(&PrefillInput),
    pub decode: fn(&DecodeInput),
    pub transfer: fn(&TransferInput),
}

/// The machines of an instance that one process holds; none to begin with.
///
/// One input is one turn of one machine. What the machines tell one another goes through
/// [`Instance::follow`] into the queue that other inputs come from, so that the order is the same
/// whoever holds the queue.
#[derive(Debug, Default)]
pub struct Instance {
    core: Option<CoreMachine>,
    ranks: Vec<(u16, Transfer)>,
    rank_out: Outbox<TransferEffect>,
    observer: Option<InputObserver>,
}

impl Instance {
    /// Has the inputs of the machines told from now on.
    pub fn set_observer(&mut self, heard: InputObserver) {
        self.observer = Some(heard);
    }

    pub fn add_core(&mut self, config: CoreConfig) {
        self.core = Some(match config.role {
            Role::Prefill => CoreMachine::Prefill(Box::new(Prefill::new(config)), Outbox::new()),
            Role::Decode => CoreMachine::Decode(Box::new(Decode::new(config)), Outbox::new()),
        });
    }

    /// Adds the transfer machine of a rank; it wants an [`InstanceInput::Start`].
    pub fn add_rank(&mut self, config: TransferConfig) {
        self.ranks.push((config.rank, Transfer::new(config)));
    }

    /// What the machines of this process are to hear of an effect, in order.
    pub fn follow(&self, effect: &InstanceEffect, out: &mut VecDeque<InstanceInput>) {
        match effect {
            InstanceEffect::Prefill(CoreEffect::Job(job))
            | InstanceEffect::Decode(CoreEffect::Job(job)) => out.extend(
                self.ranks
                    .iter()
                    .map(|(rank, _)| InstanceInput::Job { rank: *rank, job: job.clone() }),
            ),
            InstanceEffect::Report { rank, report } if self.core.is_some() => {
                out.push_back(InstanceInput::Report { rank: *rank, report: report.clone() });
            }
            _ => {}
        }
    }

    /// The ticks that are due.
    pub fn ticks(&self, now: Nanos, out: &mut VecDeque<InstanceInput>) {
        let is_due =
            |part: &InstancePart| self.deadline_of(*part).is_some_and(|deadline| deadline <= now);
        out.extend(self.parts().filter(is_due).map(InstanceInput::Tick));
    }

    fn parts(&self) -> impl Iterator<Item = InstancePart> + '_ {
        let core = self.core.is_some().then_some(InstancePart::Core);
        core.into_iter().chain(self.ranks.iter().map(|(rank, _)| InstancePart::Rank(*rank)))
    }

    /// When a machine wants its next tick, if at all.
    pub fn deadline_of(&self, part: InstancePart) -> Option<Nanos> {
        match part {
            InstancePart::Core => match self.core.as_ref()? {
                CoreMachine::Prefill(core, _) => core.deadline(),
                CoreMachine::Decode(core, _) => core.deadline(),
            },
            InstancePart::Rank(rank) => self.rank(rank)?.deadline(),
        }
    }

    /// What became of the KV that was verified; zeros for a prefill.
    pub fn verified(&self) -> VerifyCounters {
        match &self.core {
            Some(CoreMachine::Decode(core, _)) => core.verified(),
            _ => VerifyCounters::default(),
        }
    }

    /// Sizes of a machine's tables; zeros for one that is elsewhere.
    pub fn gauges_of(&self, part: InstancePart) -> Gauges {
        match (part, &self.core) {
            (InstancePart::Core, Some(CoreMachine::Prefill(core, _))) => core.gauges(),
            (InstancePart::Core, Some(CoreMachine::Decode(core, _))) => core.gauges(),
            (InstancePart::Core, None) => Gauges::default(),
            (InstancePart::Rank(rank), _) => {
                self.rank(rank).map(Machine::gauges).unwrap_or_default()
            }
        }
    }

    fn rank(&self, rank: u16) -> Option<&Transfer> {
        self.ranks.iter().find(|(own, _)| *own == rank).map(|(_, machine)| machine)
    }

    fn core(&mut self, now: Nanos, input: InstanceInput, out: &mut Outbox<InstanceEffect>) {
        match &mut self.core {
            Some(CoreMachine::Prefill(core, effects)) => {
                let hook = |input| match input {
                    InstanceInput::Prefill(hook) => Some(hook),
                    _ => None,
                };
                let Some(input) = core_input(input, hook) else { return };
                if let Some(observer) = self.observer {
                    (observer.prefill)(&input);
                }
                core.handle(now, input, effects);
                effects.drain().for_each(|effect| out.push(InstanceEffect::Prefill(effect)));
            }
            Some(CoreMachine::Decode(core, effects)) => {
                let hook = |input| match input {
                    InstanceInput::Decode(hook) => Some(hook),
                    _ => None,
                };
                let Some(input) = core_input(input, hook) else { return };
                if let Some(observer) = self.observer {
                    (observer.decode)(&input);
                }
                core.handle(now, input, effects);
                effects.drain().for_each(|effect| out.push(InstanceEffect::Decode(effect)));
            }
            None => {}
        }
    }
}

/// What an input is to the core; none if it is for another one.
fn core_input<H>(
    input: InstanceInput,
    hook: impl FnOnce(InstanceInput) -> Option<H>,
) -> Option<CoreInput<H>> {
    Some(match input {
        InstanceInput::Directory(call) => CoreInput::Directory(call),
        InstanceInput::Drain => CoreInput::Drain,
        InstanceInput::Control(event) => CoreInput::Control(event),
        InstanceInput::Report { rank, report } => CoreInput::Report { rank, report },
        InstanceInput::Tick(_) => CoreInput::Tick,
        input => CoreInput::Hook(hook(input)?),
    })
}

impl Machine for Instance {
    type Input = InstanceInput;
    type Effect = InstanceEffect;

    fn handle(&mut self, now: Nanos, input: InstanceInput, out: &mut Outbox<InstanceEffect>) {
        let InstancePart::Rank(rank) = input.part() else { return self.core(now, input, out) };
        let Some((_, machine)) = self.ranks.iter_mut().find(|(own, _)| *own == rank) else {
            return;
        };
        let input = match input {
            InstanceInput::Start(_) => TransferInput::Start,
            InstanceInput::Job { job, .. } => TransferInput::Job(job),
            InstanceInput::Layers { step, layers, .. } => TransferInput::Layers { step, layers },
            InstanceInput::Data { event, .. } => TransferInput::Data(event),
            InstanceInput::Refused { refusal, .. } => TransferInput::Refused(refusal),
            InstanceInput::Tick(_) => TransferInput::Tick,
            _ => return,
        };
        if let Some(heard) = self.observer {
            (heard.transfer)(&input);
        }
        machine.handle(now, input, &mut self.rank_out);
        for effect in self.rank_out.drain() {
            out.push(match effect {
                TransferEffect::Data(command) => InstanceEffect::Data { rank, command },
                TransferEffect::Report(report) => InstanceEffect::Report { rank, report },
            });
        }
    }

    fn deadline(&self) -> Option<Nanos> {
        self.parts().filter_map(|part| self.deadline_of(part)).min()
    }

    /// Those of the core.
    fn gauges(&self) -> Gauges {
        self.gauges_of(InstancePart::Core)
    }
}
