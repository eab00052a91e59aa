//! The protocol actors of an instance: its core and one transfer actor per TP rank.

use actix::{Addr, Recipient};
use engine::actors::{Clock, ControlSeat, DataSeat, Driver, Foreign, Give, Look, RankReport};
use engine::core::decode::{Decode, DecodeEffect, DecodeInput};
use engine::core::error::PeerViolation;
use engine::core::ids::{EngineId, FlowId, RequestId, StepId};
use engine::core::layout::LayerLayout;
use engine::core::machine::{Gauges, Machine};
use engine::core::message::{DecodeHook, Job, PrefillHook, Report, Role};
use engine::core::prefill::{Prefill, PrefillEffect, PrefillInput};
use engine::core::station::CoreConfig;
use engine::core::transfer::{Transfer, TransferConfig, TransferInput, TransferSettings};
use engine::fabric::{ControlPlane, DataPlane, Memory};
use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use scenarios::run::Run;

/// The request that a flow is for, and its peer.
pub(crate) type FlowOwner = (RequestId, Option<EngineId>);

/// A TP rank that is to be started.
pub(crate) struct RankParts {
    plane: Box<dyn DataPlane>,
    transfer: TransferConfig,
}

impl RankParts {
    /// A rank over its plane: where its KV lies, and the times and limits of the run, if it is one.
    pub(crate) fn new(
        core: &CoreConfig,
        rank: u16,
        plane: Box<dyn DataPlane>,
        (memory, layers): (Vec<Memory>, Vec<LayerLayout>),
        run: Option<&Run>,
    ) -> RankParts {
        let caps = plane.caps();
        let settings = match run {
            Some(run) => scenarios::settings::transfer(run, &caps),
            None => TransferSettings {
                operations_max: caps.operations_max,
                slices_max: caps.slices_max,
                ..TransferSettings::default()
            },
        };
        let transfer = TransferConfig {
            rank,
            role: core.role,
            mode: core.mode,
            geometry: core.geometry.clone(),
            address: plane.address(),
            placement: caps.placement,
            memory,
            layers,
            settings,
        };
        RankParts { plane, transfer }
    }

    /// Starts its transfer actor on this thread; what it reports goes to `core`.
    pub(crate) fn start(self, core: Recipient<RankReport>, clock: &Clock) -> RankActor {
        let seat = DataSeat { rank: self.transfer.rank, plane: self.plane, core };
        let machine = Transfer::new(self.transfer);
        Driver::start(|_| seat, machine, Some(TransferInput::Start), clock.clone())
    }
}

/// A transfer actor and its plane.
pub(crate) type RankActor = Addr<Driver<DataSeat>>;

/// Where the effects of the actors go that are not for their planes.
pub(crate) struct Outlets {
    pub(crate) prefill: Recipient<Foreign<PrefillEffect>>,
    pub(crate) decode: Recipient<Foreign<DecodeEffect>>,
    pub(crate) reports: Recipient<RankReport>,
}

/// The actors, each beside the plane that it uses, on the thread that started them.
pub(crate) struct Cores {
    core: Core,
    /// None where they are in other processes.
    ranks: Vec<RankActor>,
}

enum Core {
    Prefill(Addr<Driver<ControlSeat<Prefill>>>),
    Decode(Addr<Driver<ControlSeat<Decode>>>),
}

impl Cores {
    pub(crate) fn start(
        config: CoreConfig,
        plane: Box<dyn ControlPlane>,
        ranks: Vec<RankParts>,
        outlets: Outlets,
        clock: &Clock,
    ) -> Cores {
        let core = match config.role {
            Role::Prefill => {
                let seat = ControlSeat { plane, outlet: outlets.prefill };
                let machine = Prefill::new(config);
                Core::Prefill(Driver::start(|_| seat, machine, None, clock.clone()))
            }
            Role::Decode => {
                let seat = ControlSeat { plane, outlet: outlets.decode };
                let machine = Decode::new(config);
                Core::Decode(Driver::start(|_| seat, machine, None, clock.clone()))
            }
        };
        let ranks = ranks.into_iter().map(|rank| rank.start(outlets.reports.clone(), clock));
        let ranks = ranks.collect();
        Cores { core, ranks }
    }

    /// Tells a prefill what its engine does; a decode does not hear it.
    pub(crate) fn prefill(&self, hook: PrefillHook) {
        if let Core::Prefill(core) = &self.core {
            core.do_send(Give(PrefillInput::Hook(hook)));
        }
    }

    /// Tells a decode what its engine does; a prefill does not hear it.
    pub(crate) fn decode(&self, hook: DecodeHook) {
        if let Core::Decode(core) = &self.core {
            core.do_send(Give(DecodeInput::Hook(hook)));
        }
    }

    /// Passes on what a transfer actor reports.
    pub(crate) fn report(&self, rank: u16, report: Report) {
        match &self.core {
            Core::Prefill(core) => core.do_send(Give(PrefillInput::Report { rank, report })),
            Core::Decode(core) => core.do_send(Give(DecodeInput::Report { rank, report })),
        }
    }

    /// Gives a job to all ranks.
    pub(crate) fn job(&self, job: &Job) {
        for rank in &self.ranks {
            rank.do_send(Give(TransferInput::Job(job.clone())));
        }
    }

    /// The first `layers` layers of a step are computed, on one rank or on all.
    pub(crate) fn layers(&self, rank: Option<u16>, step: StepId, layers: u16) {
        for (nth, addr) in (0..).zip(&self.ranks) {
            if rank.is_none_or(|rank| rank == nth) {
                addr.do_send(Give(TransferInput::Layers { step, layers }));
            }
        }
    }

    /// Tells later which request a flow is for, and the peer's name if only the core knows it: before
    /// the core hears of anything that it is told from now on.
    pub(crate) fn flow(&self, flow: FlowId, tell: impl FnOnce(Option<FlowOwner>) + Send + 'static) {
        match &self.core {
            Core::Prefill(core) => {
                core.do_send(Look(Box::new(move |core: &Prefill| tell(core.flow(flow)))));
            }
            Core::Decode(core) => core.do_send(Look(Box::new(move |core: &Decode| {
                tell(core.flow(flow).map(|request| (request.clone(), None)));
            }))),
        }
    }

    /// Sizes of the core's tables.
    pub(crate) fn gauges(&self) -> LocalBoxFuture<'static, Gauges> {
        // A core ends only with its process.
        match &self.core {
            Core::Prefill(core) => {
                let asked = core.send(Look(Box::new(|core: &Prefill| core.gauges())));
                asked.map(Result::unwrap_or_default).boxed_local()
            }
            Core::Decode(core) => {
                let asked = core.send(Look(Box::new(|core: &Decode| core.gauges())));
                asked.map(Result::unwrap_or_default).boxed_local()
            }
        }
    }

    /// Registers as draining from now on.
    pub(crate) fn drain(&self) {
        match &self.core {
            Core::Prefill(core) => core.do_send(Give(PrefillInput::Drain)),
            Core::Decode(core) => core.do_send(Give(DecodeInput::Drain)),
        }
    }
}

/// Logs a frame that was dropped.
pub(crate) fn log_violation(violation: &PeerViolation) {
    tracing::warn!(
        peer = &*violation.peer,
        frame = &*violation.frame,
        rule = &*violation.rule,
        "dropped a frame"
    );
}
