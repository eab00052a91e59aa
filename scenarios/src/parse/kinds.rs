//! What each fault kind takes.

use crate::lists::FaultKind;
use crate::run::Span;
use ::engine::core::Nanos;

/// What `chance` is per, and where a trigger makes sense at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opportunity {
    /// Each operation accepted.
    Operation,
    /// Each control frame sent.
    Frame,
    /// Each step of an engine.
    Step,
    /// Each leg dispatched.
    Leg,
    /// Each client request.
    Request,
    /// Each read under a lease.
    Lease,
    /// Each registration sent.
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
pub struct Form {
    /// What `chance` is per.
    pub opportunity: Opportunity,
    /// Keys it takes beside `kind`, `enabled` and the trigger.
    pub keys: &'static [&'static str],
    /// Keys without which it means nothing.
    pub required: &'static [&'static str],
    /// `lasts` where the file sets none.
    pub lasts: Option<Span>,
    /// `delay` where the file sets none.
    pub delay: Option<Span>,
    /// `factor` where the file sets none.
    pub factor: u32,
}

const fn form(opportunity: Opportunity, keys: &'static [&'static str]) -> Form {
    Form { opportunity, keys, required: &[], lasts: None, delay: None, factor: 1 }
}

impl Form {
    const fn needs(self, required: &'static [&'static str]) -> Form {
        Form { required, ..self }
    }

    const fn lasting_ms(self, min: u64, max: u64) -> Form {
        Form { lasts: Some(Span { min: Nanos::from_ms(min), max: Nanos::from_ms(max) }), ..self }
    }

    const fn late_us(self, min: u64, max: u64) -> Form {
        Form { delay: Some(Span { min: Nanos::from_us(min), max: Nanos::from_us(max) }), ..self }
    }

    const fn by(self, factor: u32) -> Form {
        Form { factor, ..self }
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
    pub const fn form(self) -> Form {
        use FaultKind::*;
        use Opportunity::*;
        match self {
            QpError | AckLost | CompletionLost | SiblingFailure | NoCopy => form(Operation, PAIR),
            QueueFull => form(Operation, PAIR_LASTS).lasting_ms(1, 20),
            CompletionReorder => form(Operation, PAIR_DELAY).late_us(10, 2_000),
            NotifyOvertakes => form(Operation, PAIR_DELAY).late_us(10, 2_000),
            Partial => form(Operation, PAIR_DELAY).late_us(1, 500),
            LateLanding => form(Operation, PAIR_DELAY).late_us(10, 5_000),
            SlowLink => {
                form(Operation, &["from", "to", "lasts", "factor"]).lasting_ms(10, 1_000).by(100)
            }
            Loss | Damage | Foreign => form(Frame, FRAME),
            Duplicate => form(Frame, FRAME_DELAY).late_us(1, 1_000_000),
            FrameReorder => form(Frame, FRAME_DELAY).late_us(10, 2_000),
            Delay => form(Frame, FRAME_DELAY).late_us(100, 100_000),
            Partition => {
                form(Frame, &["target", "from", "to", "direction", "lasts"]).lasting_ms(50, 2_000)
            }
            OneWayPermanent => form(Frame, PAIR).needs(PAIR),
            HalfOpen => form(Frame, PAIR_LASTS).lasting_ms(50, 2_000),
            DoneOutOfOrder => form(Frame, &["from", "to", "delay", "first"]).late_us(10, 2_000),
            Crash => form(Step, TARGET).needs(TARGET),
            Restart => form(Step, TARGET_LASTS).needs(TARGET).lasting_ms(10, 1_000),
            Pause => form(Step, TARGET_LASTS).needs(TARGET).lasting_ms(10, 1_000),
            RankLag => form(Step, &["target", "rank", "lasts", "delay"])
                .needs(TARGET)
                .lasting_ms(10, 500)
                .late_us(10, 5_000),
            RankCrash => form(Step, RANK).needs(TARGET).lasting_ms(10, 1_000),
            RestartOtherGeometry => {
                form(Step, &["target", "lasts", "tp", "blocks", "block_tokens", "layout"])
                    .needs(TARGET)
                    .lasting_ms(10, 1_000)
            }
            RegisterFails => form(Memory, RANK),
            PortDown => form(Step, RANK).lasting_ms(10, 1_000),
            Drain => form(Step, TARGET_LASTS).needs(TARGET).lasting_ms(100, 5_000),
            ClockBack => form(Step, TARGET_LASTS).needs(TARGET).lasting_ms(10, 1_000),
            ExpiryRace => form(Lease, &["from", "to", "first"]),
            SmallPool => form(Run, TARGET),
            ImmediateReuse => form(Run, &[]),
            Preempt => form(Step, TARGET),
            PrefixHitOneSide => form(Run, TARGET),
            StaleRegistration => form(Registration, TARGET_LASTS).lasting_ms(10, 3_000),
            DispatchedTwice => form(Leg, TARGET_DELAY).late_us(10, 20_000),
            DecodeLegLost => form(Leg, TARGET),
            LegsReordered => form(Leg, TARGET_DELAY).late_us(1_000, 50_000),
            Siblings => form(Request, &["samples"]),
            IdsDiffer => form(Run, &[]),
            Abort => form(Request, TARGET_DELAY).late_us(0, 20_000),
            BothAbort => form(Request, &["delay"]).late_us(0, 20_000),
            Burst => form(Run, &["lasts", "factor"]).lasting_ms(100, 100).by(10),
            DegeneratePrompts => form(Request, &[]),
        }
    }

    /// True if drawing works it into the run, so that the simulator does nothing for it.
    pub const fn is_shape(self) -> bool {
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
        )
    }
}
