//! The adapter of an instance: its planes, and where the rest of what it wants goes.

use super::driver::{InputQueue, PlaneAdapter};
use super::planes::PlaneSet;
use crate::core::engine_core::CoreEffect;
use crate::core::error::{Failure, PeerViolation};
use crate::core::ids::{EngineId, RequestId};
use crate::core::instance::{Instance, InstanceEffect, InstanceInput};
use crate::core::message::{DecodeAnswer, PrefillAnswer, RouterEvent, TransferJob, TransferReport};
use crate::core::payload::DirectoryNews;
use crate::core::time::Nanos;
use crate::fabric::NextPoll;
use std::os::fd::BorrowedFd;
use std::task::Waker;

/// Where the effects of an instance go that are not for its planes. What the engine does at once
/// goes to `out`, behind what the instance has to handle already.
pub trait EffectHandler: Unpin + 'static {
    /// A prefill core tells its engine.
    fn prefill(&mut self, _answer: PrefillAnswer, _out: &mut InputQueue<Instance>) {}

    /// A decode core tells its engine.
    fn decode(&mut self, _answer: DecodeAnswer, _out: &mut InputQueue<Instance>) {}

    /// The core gives its ranks a job: those of other processes get it by this, those of this one
    /// by themselves.
    fn job(&mut self, _job: &TransferJob) {}

    /// A rank tells its core: one in another process hears it by this, one in this by itself.
    fn report(&mut self, _rank: u16, _report: &TransferReport) {}

    /// A peer broke the protocol, and the frame was dropped.
    fn violation(&mut self, _violation: &PeerViolation) {}

    /// What becomes of the registrations.
    fn router(&mut self, _news: &RouterEvent) {}

    /// What the payload core is told of the peers.
    fn directory(&mut self, _news: DirectoryNews, _out: &mut InputQueue<Instance>) {}

    /// A peer's hello was refused.
    fn refused(&mut self, _peer: &EngineId, _failure: &Failure) {}

    /// MoRIIO is spoken with the peer of a request.
    fn speaks_moriio(&mut self, _request: &RequestId) {}

    /// A machine is about to handle an input.
    fn began(&mut self, _now: Nanos, _input: &InstanceInput) {}

    /// What it wanted is done.
    fn ended(&mut self, _instance: &Instance) {}

    /// See [`PlaneAdapter::KEEPS_TIME`].
    const KEEPS_TIME: bool = true;
}

/// The adapter of an [`Instance`].
pub struct InstanceAdapter<F, O> {
    /// The control plane and a data plane for each rank.
    pub fabric: F,
    /// Where its other effects go.
    pub outlet: O,
}

impl<F: PlaneSet, O: EffectHandler> InstanceAdapter<F, O> {
    fn perform_core<A>(
        &mut self,
        effect: CoreEffect<A>,
        answer: fn(&mut O, A, &mut InputQueue<Instance>),
        out: &mut InputQueue<Instance>,
    ) {
        match effect {
            CoreEffect::Control(command) => {
                out.extend(self.fabric.control(command).map(InstanceInput::Control));
            }
            CoreEffect::Job(job) => self.outlet.job(&job),
            CoreEffect::Answer(said) => answer(&mut self.outlet, said, out),
            CoreEffect::Directory(news) => self.outlet.directory(news, out),
            CoreEffect::Violation(violation) => self.outlet.violation(&violation),
            CoreEffect::Router(news) => self.outlet.router(&news),
            CoreEffect::Refused { peer, failure } => self.outlet.refused(&peer, &failure),
            CoreEffect::SpeaksMoriio { request } => self.outlet.speaks_moriio(&request),
        }
    }
}

impl<F: PlaneSet, O: EffectHandler> PlaneAdapter for InstanceAdapter<F, O> {
    type Machine = Instance;

    const KEEPS_TIME: bool = O::KEEPS_TIME;

    fn poll(&mut self, now: Nanos, out: &mut InputQueue<Instance>) -> NextPoll {
        self.fabric.poll(now, out)
    }

    fn perform(
        &mut self,
        instance: &Instance,
        effect: InstanceEffect,
        out: &mut InputQueue<Instance>,
    ) {
        instance.follow(&effect, out);
        match effect {
            InstanceEffect::Prefill(effect) => self.perform_core(effect, O::prefill, out),
            InstanceEffect::Decode(effect) => self.perform_core(effect, O::decode, out),
            InstanceEffect::Data { rank, command } => {
                let refused = self.fabric.data(rank, command);
                out.extend(refused.map(|refusal| InstanceInput::Refused { rank, refusal }));
            }
            InstanceEffect::Report { rank, report } => self.outlet.report(rank, &report),
        }
    }

    fn ticks(&self, instance: &Instance, now: Nanos, out: &mut InputQueue<Instance>) {
        instance.ticks(now, out);
    }

    fn set_waker(&mut self, waker: Waker) {
        self.fabric.set_waker(&waker);
    }

    fn doorbells(&mut self) -> Vec<(usize, BorrowedFd<'_>)> {
        self.fabric.doorbells()
    }

    fn on_doorbell(&mut self, bell: usize) {
        self.fabric.on_doorbell(bell);
    }

    fn began(&mut self, now: Nanos, input: &InstanceInput) {
        self.outlet.began(now, input);
    }

    fn ended(&mut self, instance: &Instance) {
        self.outlet.ended(instance);
    }
}
