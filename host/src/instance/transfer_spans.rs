//! Spans of the transfers of an instance, made of what its log has of them when they end.

use super::record::{TransferOutcome, TransferRecord};
use crate::spans::{SpanTracer, bounded};
use kvferry_engine::core::message::{Mode, Role};
use kvferry_engine::core::time::Nanos;
use opentelemetry::KeyValue;
use opentelemetry::trace::{SpanContext, SpanKind};
use std::time::{Duration, SystemTime};

/// Makes the spans of an instance's transfers.
#[derive(Debug)]
pub(super) struct TransferSpans {
    pub(super) tracer: SpanTracer,
    role: Role,
    mode: Mode,
    /// Below which span the next request to arrive is.
    pub(super) next: Option<SpanContext>,
}

impl TransferSpans {
    pub(super) fn new(tracer: SpanTracer, role: Role, mode: Mode) -> TransferSpans {
        TransferSpans { tracer, role, mode, next: None }
    }

    /// A transfer has just ended.
    pub(super) fn ended(&self, record: &TransferRecord) {
        let Some((now, outcome)) = &record.ended else { return };
        let wall = SystemTime::now();
        let when = |then: Nanos| wall - Duration::from_nanos(now.0.saturating_sub(then.0));
        let what = (SpanKind::Server, "transfer", when(record.arrived));
        let mut span =
            self.tracer.begin_at(what, record.parent.as_ref(), || self.attributes(record));
        let times = [
            ("begun", record.begun),
            ("moved", record.moved),
            ("prompt_finished", record.finished),
        ];
        for (name, time) in times {
            if let Some(time) = time {
                span.event_at(name, when(time));
            }
        }
        match outcome {
            TransferOutcome::Failed { cause, why } => span.fail(cause.to_string(), why),
            outcome => span.end(outcome.name()),
        }
    }

    fn attributes(&self, record: &TransferRecord) -> Vec<KeyValue> {
        let mut attributes = vec![
            KeyValue::new("kvferry.role", self.role.to_string()),
            KeyValue::new("kvferry.mode", self.mode.to_string()),
            KeyValue::new("kvferry.request_id", bounded(&record.request.0).to_owned()),
            KeyValue::new("kvferry.tokens", i64::from(record.tokens)),
            KeyValue::new("kvferry.blocks", i64::from(record.blocks)),
        ];
        if self.role == Role::Decode {
            attributes.push(KeyValue::new("kvferry.tokens_computed", i64::from(record.computed)));
        }
        if let Some(key) = &record.transfer {
            attributes.push(KeyValue::new("kvferry.transfer_id", bounded(&key.id.0).to_owned()));
        }
        if let Some(peer) = &record.peer {
            attributes.push(KeyValue::new("kvferry.peer", peer.to_string()));
        }
        if let Some(bytes) = record.bytes {
            attributes.push(KeyValue::new("kvferry.bytes", bytes as i64));
        }
        if let Some(dialect) = record.dialect {
            attributes.push(KeyValue::new("kvferry.dialect", dialect.name()));
        }
        attributes
    }
}
