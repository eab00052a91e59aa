//! Why legs failed, and what clients are told of it.
//!
//! vLLM answers a request whose KV did not come with a bare error. The host of the decode tells the
//! router the reason with its registration, which may come after the answer: such an answer waits
//! for it for a short time.

use super::{HttpAdapter, RouterInputQueue, leg_input};
use crate::router::client_words;
use crate::router::error::HttpError;
use crate::router::in_flight::InFlightLeg;
use crate::router::leg::LegError;
use crate::router::metrics::role_name;
use crate::router::request_spans::leg_failed;
use actix::{Context, Handler, Message};
use hyper::StatusCode;
use kvferry_engine::actors::Driver;
use kvferry_engine::core::ids::{EngineId, LegId};
use kvferry_engine::core::message::FailedLeg;
use kvferry_engine::core::router::{LegEvent, LegFailure};
use std::time::Duration;

/// Longest wait for the cause of a leg that failed. A host tells it at most 100 ms after the
/// registration before; the rest is for the way and for machines that are busy.
const CAUSE_WAIT: Duration = Duration::from_millis(300);

/// The wait for the cause of a leg is over.
#[derive(Message)]
#[rtype(result = "()")]
struct CauseOverdue(LegId);

impl HttpAdapter {
    /// Takes a leg that has ended, or is given up, out of the tables.
    pub(super) fn take_leg(&mut self, leg: LegId) -> Option<InFlightLeg> {
        let running = self.legs.remove(&leg)?;
        if let Some(transfer) = &running.transfer {
            self.transfers.remove(transfer);
        }
        Some(running)
    }

    /// A leg failed. If its decode has not said why yet, the leg stays until it does, or until
    /// [`CAUSE_WAIT`] is over.
    pub(super) fn leg_failed(&mut self, leg: LegId, fault: LegError, out: &mut RouterInputQueue) {
        let waits = |it: &&mut InFlightLeg| fault.lacks_cause && it.transfer.is_some();
        let Some(running) = self.legs.get_mut(&leg).filter(waits) else {
            return self.end_failed(leg, fault, out);
        };
        if let Some(failure) = running.cause.take() {
            let fault = fault.caused_by(running.role, failure);
            return self.end_failed(leg, fault, out);
        }
        running.uncaused = Some(Box::new(fault));
        let core = self.core.clone();
        // It ends by itself.
        let _detached = actix::spawn(async move {
            tokio::time::sleep(CAUSE_WAIT).await;
            core.do_send(CauseOverdue(leg));
        });
    }

    /// A decode said why legs failed. Only its own legs are looked at.
    pub(super) fn causes(
        &mut self,
        engine: &EngineId,
        failed: Vec<FailedLeg>,
        out: &mut RouterInputQueue,
    ) {
        for FailedLeg { key, sibling, failure } in failed {
            let Some(&leg) = self.transfers.get(&(key, sibling)) else { continue };
            let Some(running) = self.legs.get_mut(&leg) else { continue };
            if running.engine != *engine {
                continue;
            }
            match running.uncaused.take() {
                Some(fault) => {
                    let fault = fault.caused_by(running.role, failure);
                    self.end_failed(leg, fault, out);
                }
                // The first one is the reason, the others follow from it.
                None => _ = running.cause.get_or_insert(failure),
            }
        }
    }

    fn end_failed(&mut self, leg: LegId, fault: LegError, out: &mut RouterInputQueue) {
        if let Some(mut running) = self.take_leg(leg) {
            self.failed(leg, &mut running, fault, out);
        }
    }

    pub(super) fn failed(
        &mut self,
        leg: LegId,
        running: &mut InFlightLeg,
        fault: LegError,
        out: &mut RouterInputQueue,
    ) {
        let LegError { failure, refusal, .. } = fault;
        let (engine, http, role) = (&running.engine, &running.http, role_name(running.role));
        let request = self.request_id(running);
        let outcome = match &failure {
            // A busy instance refuses legs often, as long as it is full.
            LegFailure::Busy { .. } => {
                tracing::debug!(%leg, %engine, role, request, "leg refused as busy");
                "busy"
            }
            // What a client asked for is no fault of an instance.
            LegFailure::Request(why) => {
                let told = refusal.message();
                tracing::debug!(%leg, %engine, role, request, %why, told, "leg refused a request");
                "refused"
            }
            failure => {
                let why = refusal.message();
                tracing::warn!(%leg, %engine, %http, role, request, %failure, why, "leg failed");
                "failed"
            }
        };
        if let Some(span) = running.span.take_if(|_| outcome != "refused") {
            leg_failed(span, &failure);
        }
        self.leg_ended(running, outcome);
        if let Some(client) = self.clients.get_mut(&running.client) {
            client.fault = Some(refusal);
        }
        out.push_back(leg_input(leg, LegEvent::Failed(failure)));
    }
}

/// What a client is told when the core gave up and no instance had said anything.
pub(super) fn refusal(failure: &LegFailure) -> HttpError {
    match failure {
        LegFailure::Request(why) => HttpError::bad(why, ""),
        LegFailure::Busy { .. } => HttpError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "all instances that serve the request are busy, and none took it within \
                 --queue-timeout: send it again later, or have the operator add instances",
        ),
        failure => {
            let why = client_words::without_addresses(&failure.to_string());
            HttpError::new(StatusCode::BAD_GATEWAY, &format!("no instance served: {why}"))
        }
    }
}

impl Handler<CauseOverdue> for Driver<HttpAdapter> {
    type Result = ();

    fn handle(&mut self, CauseOverdue(leg): CauseOverdue, context: &mut Context<Self>) {
        self.with_adapter(context, |front, out| {
            let Some(running) = front.legs.get_mut(&leg) else { return };
            let Some(fault) = running.uncaused.take() else { return };
            let fault = fault.without_cause(running.role, CAUSE_WAIT);
            front.end_failed(leg, fault, out);
        });
    }
}
