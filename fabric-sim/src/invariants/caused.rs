//! I17: what fails has a cause that some fault of the run, or a setting, can have.

use super::credit::failure;
use super::{CheckContext, Invariant};
use crate::abilities::fits;
use crate::observation::{Observation, ObservationKind, SimProcessId};
use kvferry_engine::core::dialect::native::Frame;
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::TransferKey;
use kvferry_engine::core::message::{PrefillAnswer, Role};
use kvferry_engine::core::router::LegEvent;
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::FabricError;
use kvferry_scenarios::lists::FaultKind;
use kvferry_scenarios::run::{InstanceSettings, ProtocolSettings, Run};
use std::collections::BTreeSet;

/// Every fault kind has a list of causes that it can have, see [`can_cause`]; a cause that none of
/// the kinds which hit so far can have is a mistake. What engines and clients do by themselves
/// (leave, abort, preempt, ask for more than there is room for) is no fault and not judged here.
#[derive(Debug)]
pub(super) struct CausedFailures {
    hit: BTreeSet<FaultKind>,
    /// Some engines do not fit each other.
    misfits: bool,
    /// A time of the protocol is shorter than by default, and may be than what it waits for.
    times: bool,
    /// A limit of the protocol is lower than by default, and may be than what is asked for.
    limits: bool,
    leases: Vec<Nanos>,
    /// What the router gave up.
    abandoned: BTreeSet<(SimProcessId, TransferKey)>,
}

/// What a fault can do to the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FaultReach {
    /// Nothing that a request would notice, but that it takes longer.
    Nothing,
    /// Operations fail, sessions die, ranks are connected anew.
    Fabric,
    /// Frames do not come, peers fall silent.
    Wire,
    /// Frames come that others wrote to others, and spoil what they come into.
    Foreign,
    /// A process forgets everything, or stands still.
    Process,
    /// A leg or a registration is lost, late or repeated.
    Router,
    /// A request ends early, or its times do.
    Request,
    /// The two legs of a request have different prompts.
    Prompt,
}

pub(super) fn reach(kind: FaultKind) -> FaultReach {
    use FaultKind::*;
    match kind {
        QueueFull | CompletionReorder | NotifyOvertakes | DoneOutOfOrder | FrameReorder
        | Duplicate | ImmediateReuse | PrefixHitOneSide | Siblings | IdsDiffer | Burst => {
            FaultReach::Nothing
        }
        QpError | AckLost | CompletionLost | Partial | LateLanding | SiblingFailure | SlowLink
        | NoCopy | PortDown => FaultReach::Fabric,
        Loss | Delay | Partition | OneWayPermanent | HalfOpen | Damage => FaultReach::Wire,
        FaultKind::Foreign => FaultReach::Foreign,
        Crash | Restart | Pause | RankLag | RankCrash | RestartOtherGeometry | Drain
        | RoleSwitch | ClockBack | RegisterFails => FaultReach::Process,
        StaleRegistration | DispatchedTwice | DecodeLegLost | LegsReordered | LegCut
        | RouterRestart => FaultReach::Router,
        // A decode has no room for a prompt that its prefill has computed.
        ExpiryRace | Preempt | Abort | BothAbort | DegeneratePrompts | SmallPool => {
            FaultReach::Request
        }
        PromptsDiffer => FaultReach::Prompt,
    }
}

/// True if faults of this reach can be why something failed so.
fn can_cause(reach: FaultReach, failure: &Failure) -> bool {
    use FaultReach::*;
    match failure {
        // A connection that ends takes its operations along.
        Failure::Fabric(_) | Failure::Unreachable | Failure::PeerSilent => {
            matches!(reach, Fabric | Wire | Foreign | Process)
        }
        Failure::Refused(_) => matches!(reach, Fabric | Process),
        Failure::PeerRestarted | Failure::EngineGone => reach == Process,
        Failure::Violation(_) => matches!(reach, Wire | Foreign),
        Failure::PromptMismatch { .. } => reach == Prompt,
        Failure::Mismatch(_) | Failure::HelloRefused(_) => {
            matches!(reach, Foreign | Process | Router)
        }
        Failure::DuplicateKey => matches!(reach, Router | Process),
        Failure::UnknownTransfer
        | Failure::NotFetched
        | Failure::LeaseExpired
        | Failure::Stalled => reach != Nothing,
        // A process that starts again is another incarnation.
        Failure::OtherLife => reach == Process,
        // Every instance knows the failures of all: bytes changed on their way.
        Failure::Unknown(_) => matches!(reach, Wire | Foreign),
        // What engines, clients and limits do, see [`Caused::is_natural`].
        _ => true,
    }
}

/// Times that something is waited for.
fn times(ProtocolSettings { core, channel, transfer, .. }: &ProtocolSettings) -> [Nanos; 5] {
    [core.lease, core.orphan, core.resume, channel.silent, transfer.stall]
}

/// How much there is room for.
fn limits(ProtocolSettings { core, channel, .. }: &ProtocolSettings) -> [u32; 7] {
    [
        core.requests_max,
        core.early_max,
        core.receivers_max,
        core.tombstones_max,
        channel.queue_max,
        channel.peers_max,
        channel.links_max,
    ]
}

/// True if one of these settings is less than by default at some instance.
fn is_cut<T: PartialOrd, const N: usize>(run: &Run, of: fn(&ProtocolSettings) -> [T; N]) -> bool {
    let default = of(&ProtocolSettings::default());
    let is_less = |one: &InstanceSettings| {
        of(&one.protocol).iter().zip(&default).any(|(set, default)| set < default)
    };
    run.instances.iter().any(is_less)
}

impl CausedFailures {
    pub(super) fn new(run: &Run) -> CausedFailures {
        let of = |role| run.instances.iter().filter(move |instance| instance.role == role);
        let misfits = of(Role::Prefill)
            .any(|prefill| of(Role::Decode).any(|decode| !fits(&run.model, prefill, decode)));
        CausedFailures {
            hit: run.shaped.iter().copied().collect(),
            misfits,
            times: is_cut(run, times),
            limits: is_cut(run, limits),
            leases: run.instances.iter().map(|one| one.protocol.core.lease).collect(),
            abandoned: BTreeSet::new(),
        }
    }

    fn is_natural(&self, failure: &Failure) -> bool {
        match failure {
            Failure::Cancelled | Failure::PrefillEnded | Failure::Preempted | Failure::Overload => {
                true
            }
            Failure::Mismatch(_) | Failure::HelloRefused(_) => self.misfits,
            Failure::UnknownTransfer | Failure::NotFetched => self.times || self.limits,
            Failure::LeaseExpired | Failure::Stalled => self.times,
            // Who finds no room for what its peer waits for ends the connection.
            Failure::DuplicateKey | Failure::Fabric(FabricError::PeerGone) => self.limits,
            _ => false,
        }
    }

    fn judge(&self, now: CheckContext<'_>, failure: &Failure) {
        let caused = || match failure {
            // Other faults change no byte of what is said to have arrived.
            Failure::Corrupt(_) => self.hit.contains(&FaultKind::NoCopy),
            _ => self.hit.iter().any(|kind| can_cause(reach(*kind), failure)),
        };
        if self.is_natural(failure) || caused() {
            return;
        }
        let hit: Vec<_> = self.hit.iter().map(|kind| kind.name()).collect();
        let hit = if hit.is_empty() { "no fault at all".into() } else { hit.join(", ") };
        now.report_once(failure.kind(), || {
            format!("{failure} is what none of these can cause: {hit}")
        });
    }

    /// A prefill lets go of a prompt. Says whether that is because the router or its engine told it
    /// that nobody fetches it any more: a client that leaves does that, which is no fault.
    fn freed(&mut self, now: CheckContext<'_>, who: SimProcessId, answer: &PrefillAnswer) -> bool {
        let PrefillAnswer::SourceFree { request, failure: Some(Failure::NotFetched) } = answer
        else {
            return false;
        };
        let Some(prompt) = now.state.prompt(who, request) else { return false };
        // A prompt that is dispatched twice has two requests and one key.
        let abandoned = prompt.is_given_up || self.abandoned.contains(&(who, prompt.key.clone()));
        let Some(finished) = prompt.finished else { return abandoned };
        if !abandoned && now.at < finished + self.leases[usize::from(who.instance)] {
            let (name, waited) = (now.name(who.instance), now.at - finished);
            now.report(|| {
                format!("{name} kept request {request} for {waited} only, which nobody fetched")
            });
        }
        abandoned
    }
}

impl Invariant for CausedFailures {
    fn wants(&self) -> &'static [ObservationKind] {
        use ObservationKind::*;
        &[Faulted, PrefillAnswer, DecodeAnswer, Leg, FrameArrived, Stray, Crashed]
    }

    fn observe(&mut self, now: CheckContext<'_>, seen: &Observation<'_>) {
        match seen {
            Observation::Faulted { kind, .. } => {
                self.hit.insert(*kind);
            }
            Observation::FrameArrived { to, frame: Frame::Abandon { keys }, .. }
            | Observation::Stray { to, frame: Some(Frame::Abandon { keys }) } => {
                self.abandoned.extend(keys.iter().map(|key| (*to, key.clone())));
            }
            Observation::Crashed { who } => {
                self.abandoned.retain(|(owner, _)| owner != who);
            }
            Observation::Leg { event: LegEvent::Done { recomputed: Some(why), .. }, .. } => {
                self.judge(now, why);
            }
            _ => {
                let is_told = match seen {
                    Observation::PrefillAnswer { who, answer } => self.freed(now, *who, answer),
                    _ => false,
                };
                if let Some(failure) = failure(seen).filter(|_| !is_told) {
                    self.judge(now, failure);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{
        D0, HASH, InvariantBench, InvariantId, P0, key, prefill_leg, request,
    };
    use kvferry_engine::core::message::{FinishReason, Mode, PrefillHook};

    #[test]
    fn a_cause_needs_a_fault_that_can_have_it() {
        let faults = [
            (None, false),
            (Some(FaultKind::QueueFull), false),
            (Some(FaultKind::DecodeLegLost), false),
            (Some(FaultKind::AckLost), true),
            (Some(FaultKind::Loss), true),
        ];
        for (kind, held) in faults {
            let mut bench = InvariantBench::new(InvariantId::Caused);
            if let Some(kind) = kind {
                bench.see(Observation::Faulted { kind, from: Some(0), to: None });
            }
            bench.load_failed_by(D0, "r", Failure::Overload);
            bench.holds();
            for _ in 0..2 {
                bench.load_failed_by(D0, "r", Failure::Fabric(FabricError::AckTimeout));
            }
            bench.judges(held, "transfer failed: acknowledgement lost is what none of these");
        }
    }

    #[test]
    fn another_incarnation_and_unknown_failures_need_a_fault_of_their_kind() {
        let unknown = || Failure::Unknown("Later".into());
        let rows = [
            (FaultKind::Restart, Failure::OtherLife, true),
            (FaultKind::Loss, Failure::OtherLife, false),
            (FaultKind::NoCopy, Failure::Corrupt("block 1".into()), true),
            (FaultKind::LateLanding, Failure::Corrupt("block 1".into()), false),
            (FaultKind::Damage, unknown(), true),
            (FaultKind::Restart, unknown(), false),
        ];
        for (kind, failure, held) in rows {
            let mut bench = InvariantBench::new(InvariantId::Caused);
            bench.see(Observation::Faulted { kind, from: Some(0), to: None });
            bench.load_failed_by(D0, "r", failure);
            bench.judges(held, "is what none of these can cause");
        }
    }

    #[test]
    fn a_setting_at_its_default_causes_nothing() {
        let default = ProtocolSettings::default().core.tombstones_max;
        for (most, held) in [(default, false), (default - 1, true)] {
            let mut bench = InvariantBench::with(InvariantId::Caused, |run| {
                run.instances[0].protocol.core.tombstones_max = most;
            });
            bench.load_failed_by(D0, "r", Failure::UnknownTransfer);
            bench.judges(held, "is what none of these can cause: no fault at all");
        }
    }

    /// A prompt that an engine has computed, that the router may give up, and that nobody fetches.
    fn nobody_fetches(bench: &mut InvariantBench, abandoned: bool, seconds: u64) {
        let key = key("r");
        let leg = prefill_leg("r", Mode::Pull);
        let hook =
            &PrefillHook::Arrived { request: request("r"), leg, tokens: 32, prompt_hash: HASH };
        bench.see(Observation::PrefillHook { who: P0, hook });
        let (name, reason) = (request("r"), FinishReason::Length);
        let hook = &PrefillHook::Finished { request: name.clone(), reason };
        bench.see(Observation::PrefillHook { who: P0, hook });
        if abandoned {
            let frame = &Frame::Abandon { keys: vec![key] };
            bench.see(Observation::FrameArrived { from: SimProcessId::ROUTER, to: P0, frame });
        }
        bench.now = bench.now + Nanos::from_secs(seconds);
        let failure = Some(Failure::NotFetched);
        let answer = &PrefillAnswer::SourceFree { request: name, failure };
        bench.see(Observation::PrefillAnswer { who: P0, answer });
    }

    #[test]
    fn what_the_router_gives_up_needs_no_fault() {
        for (abandoned, held) in [(true, true), (false, false)] {
            let mut bench = InvariantBench::new(InvariantId::Caused);
            nobody_fetches(&mut bench, abandoned, 1_000);
            bench.judges(held, "is what none of these can cause: no fault at all");
        }
    }

    #[test]
    fn a_prompt_is_held_for_a_lease() {
        for (seconds, abandoned, held) in [(19, false, false), (19, true, true), (20, false, true)]
        {
            let mut bench = InvariantBench::with(InvariantId::Caused, |run| {
                for one in &mut run.instances {
                    one.protocol.core.lease = Nanos::from_secs(20);
                }
            });
            nobody_fetches(&mut bench, abandoned, seconds);
            bench.judges(held, "p0 kept request r for 19.000s only");
        }
    }
}
