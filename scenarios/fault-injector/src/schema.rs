//! What each fault kind takes.

use crate::fault::DurationRange;
use crate::lists::FaultKind;
use kvferry_engine::core::Nanos;

/// What `chance` is per, and where a trigger makes sense at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opportunity {
    Operation,
    /// Each control frame sent.
    Frame,
    /// Each step of an engine.
    Step,
    Leg,
    Request,
    /// Each read under a lease.
    Lease,
    Registration,
    /// Each registration of a rank's memory.
    Memory,
    /// None: the fault is a property of the whole run.
    Run,
}

impl Opportunity {
    /// For tables and errors.
    pub const fn name(self) -> &'static str {
        match self {
            Opportunity::Operation => "operation",
            Opportunity::Frame => "frame",
            Opportunity::Step => "step",
            Opportunity::Leg => "leg",
            Opportunity::Request => "request",
            Opportunity::Lease => "lease",
            Opportunity::Registration => "registration",
            Opportunity::Memory => "memory",
            Opportunity::Run => "none",
        }
    }
}

/// The form of a `[[fault]]` table of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultSchema {
    /// What `chance` is per.
    pub opportunity: Opportunity,
    /// Keys it takes beside `kind`, `enabled` and the trigger.
    pub keys: &'static [&'static str],
    /// Keys without which it means nothing.
    pub required: &'static [&'static str],
    /// `lasts` where the file sets none.
    pub lasts: Option<DurationRange>,
    /// `delay` where the file sets none.
    pub delay: Option<DurationRange>,
    /// `factor` where the file sets none.
    pub factor: u32,
}

const fn schema(opportunity: Opportunity, keys: &'static [&'static str]) -> FaultSchema {
    FaultSchema { opportunity, keys, required: &[], lasts: None, delay: None, factor: 1 }
}

impl FaultSchema {
    const fn needs(self, required: &'static [&'static str]) -> FaultSchema {
        FaultSchema { required, ..self }
    }

    const fn lasting_ms(self, min: u64, max: u64) -> FaultSchema {
        FaultSchema {
            lasts: Some(DurationRange { min: Nanos::from_ms(min), max: Nanos::from_ms(max) }),
            ..self
        }
    }

    const fn late_us(self, min: u64, max: u64) -> FaultSchema {
        FaultSchema {
            delay: Some(DurationRange { min: Nanos::from_us(min), max: Nanos::from_us(max) }),
            ..self
        }
    }

    const fn by(self, factor: u32) -> FaultSchema {
        FaultSchema { factor, ..self }
    }
}

const PAIR: &[&str] = &["from", "to"];
const PAIR_LASTS: &[&str] = &["from", "to", "lasts"];
const PAIR_DELAY: &[&str] = &["from", "to", "delay"];
const FRAME: &[&str] = &["from", "to", "match"];
const FRAME_DELAY: &[&str] = &["from", "to", "match", "delay"];
const TARGET: &[&str] = &["target"];
const TARGET_LASTS: &[&str] = &["target", "lasts"];
const TARGET_DELAY: &[&str] = &["target", "delay"];
const RANK: &[&str] = &["target", "rank", "lasts"];

impl FaultKind {
    /// The form of its table.
    pub const fn schema(self) -> FaultSchema {
        use FaultKind::*;
        use Opportunity::*;
        match self {
            QpError | AckLost | CompletionLost | SiblingFailure | NoCopy => schema(Operation, PAIR),
            QueueFull => schema(Operation, PAIR_LASTS).lasting_ms(1, 20),
            CompletionReorder => schema(Operation, PAIR_DELAY).late_us(10, 2_000),
            NotifyOvertakes => schema(Operation, PAIR_DELAY).late_us(10, 2_000),
            Partial => schema(Operation, PAIR_DELAY).late_us(1, 500),
            LateLanding => schema(Operation, PAIR_DELAY).late_us(10, 5_000),
            SlowLink => {
                schema(Operation, &["from", "to", "lasts", "factor"]).lasting_ms(10, 1_000).by(100)
            }
            Loss | Damage | Foreign => schema(Frame, FRAME),
            Duplicate => schema(Frame, FRAME_DELAY).late_us(1, 1_000_000),
            FrameReorder => schema(Frame, FRAME_DELAY).late_us(10, 2_000),
            Delay => schema(Frame, FRAME_DELAY).late_us(100, 100_000),
            Partition => {
                schema(Frame, &["target", "from", "to", "direction", "lasts"]).lasting_ms(50, 2_000)
            }
            OneWayPermanent => schema(Frame, PAIR).needs(PAIR),
            HalfOpen => schema(Frame, PAIR_LASTS).lasting_ms(50, 2_000),
            DoneOutOfOrder => schema(Frame, &["from", "to", "delay", "first"]).late_us(10, 2_000),
            Crash => schema(Step, TARGET).needs(TARGET),
            Restart => schema(Step, TARGET_LASTS).needs(TARGET).lasting_ms(10, 1_000),
            Pause => schema(Step, TARGET_LASTS).needs(TARGET).lasting_ms(10, 1_000),
            RankLag => schema(Step, &["target", "rank", "lasts", "delay"])
                .needs(TARGET)
                .lasting_ms(10, 500)
                .late_us(10, 5_000),
            RankCrash => schema(Step, RANK).needs(TARGET).lasting_ms(10, 1_000),
            RestartOtherGeometry => {
                schema(Step, &["target", "lasts", "tp", "blocks", "block_tokens", "layout"])
                    .needs(TARGET)
                    .lasting_ms(10, 1_000)
            }
            RegisterFails => schema(Memory, RANK),
            PortDown => schema(Step, RANK).lasting_ms(10, 1_000),
            Drain => schema(Step, TARGET_LASTS).needs(TARGET).lasting_ms(100, 5_000),
            RoleSwitch => {
                schema(Step, &["target", "lasts", "first"]).needs(TARGET).lasting_ms(50, 2_000)
            }
            ClockBack => schema(Step, TARGET_LASTS).needs(TARGET).lasting_ms(10, 1_000),
            ExpiryRace => schema(Lease, &["from", "to", "first"]),
            SmallPool => schema(Run, TARGET),
            ImmediateReuse => schema(Run, &[]),
            Preempt => schema(Step, TARGET),
            PrefixHitOneSide => schema(Run, TARGET),
            StaleRegistration => schema(Registration, TARGET_LASTS).lasting_ms(10, 3_000),
            DispatchedTwice => schema(Leg, TARGET_DELAY).late_us(10, 20_000),
            DecodeLegLost => schema(Leg, TARGET),
            LegsReordered => schema(Leg, TARGET_DELAY).late_us(1_000, 50_000),
            LegCut => schema(Step, TARGET_DELAY).late_us(0, 20_000),
            RouterRestart => schema(Request, &["lasts"]).lasting_ms(10, 1_000),
            Siblings => schema(Request, &["samples"]),
            IdsDiffer => schema(Run, &[]),
            Abort | BothAbort => schema(Request, &["delay"]).late_us(0, 20_000),
            Burst => schema(Run, &["lasts", "factor"]).lasting_ms(100, 100).by(10),
            DegeneratePrompts | PromptsDiffer => schema(Request, &[]),
        }
    }

    /// True if drawing works it into the run, so that the simulator does nothing for it.
    pub const fn is_static(self) -> bool {
        use FaultKind::*;
        matches!(
            self,
            SmallPool
                | ImmediateReuse
                | PrefixHitOneSide
                | Siblings
                | IdsDiffer
                | Burst
                | DegeneratePrompts
                | PromptsDiffer
        )
    }
}
