//! `kv_transfer_params` and ids of the legs.
//!
//! As vllm-router 0.1.17 sends them, and beyond that: the DP rank of the peer, with
//! `remote_dp_rank_override`, and its TP size in both modes. As the override alone would have only
//! the decode rank with the prefill's number tell the prefill of its blocks,
//! the decode leg also says that its rank is the one to do it. Static instances get what NixlConnector
//! reads.

use super::fields::{FieldEdit, JsonFields};
use crate::instance::SealedLeg;
use crate::spans::{PARENT_KEY, traceparent};
use bytes::Bytes;
use kvferry_engine::core::dialect::moriio::address::embed;
use kvferry_engine::core::ids::{RequestId, push_hex};
use kvferry_engine::core::message::Mode;
use kvferry_engine::core::router::{InstancePair, LegBody, PairMember};
use kvferry_trust::FleetProof;
use opentelemetry::trace::SpanContext;
use serde::Serialize;
use std::io::Write;
use std::sync::Arc;

/// What both legs of one transfer are called by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TransferUid(pub(crate) u128);

impl TransferUid {
    pub(crate) fn transfer_id(self) -> String {
        let mut id = String::with_capacity(35);
        id.push_str("tx-");
        push_hex(&mut id, self.0);
        id
    }

    /// The request id of both legs if the engines find each other by it: it has the addresses of
    /// both.
    ///
    /// # Errors
    /// An address that no instance may have registered with.
    pub(crate) fn request_id_of(self, pair: &InstancePair) -> Result<Option<RequestId>, String> {
        match (&pair.prefill.zmq, &pair.decode.zmq) {
            (Some(prefill), Some(decode)) if !pair.is_native() => {
                embed(prefill, decode, self.0).map(Some).map_err(|why| why.to_string())
            }
            _ => Ok(None),
        }
    }

    /// The request id of both legs, from that of the client; it names no peer.
    pub(crate) fn request_id(self, client: &str) -> String {
        let mut id = String::with_capacity(client.len() + 33);
        id.push_str(client);
        id.push('-');
        push_hex(&mut id, self.0);
        id
    }
}

/// The object for a leg; none for a decode that has nothing to read. With a secret, native legs of
/// decodes are sealed.
///
/// # Errors
/// A prefill answer that is no object.
pub(crate) fn write(
    body: &LegBody,
    pair: &InstancePair,
    unique: TransferUid,
    proof: &FleetProof,
) -> Result<Option<Bytes>, String> {
    let native = pair.is_native();
    match body {
        LegBody::Prefill { .. } if pair.is_static() => Ok(Some(TO_STATIC_PREFILL.into())),
        LegBody::Decode { params: Some(answer), .. } if pair.is_static() => {
            fields_of(answer).map(|fields| Some(fields.text().clone()))
        }
        LegBody::Prefill { transfer, .. } => {
            let native = native.then(|| json(transfer));
            Ok(Some(leg(&pair.decode, true, unique, native)))
        }
        LegBody::Decode { params: Some(answer), .. } => read(answer, &pair.prefill).map(Some),
        LegBody::Decode { transfer, .. }
            if transfer.is_alone() || transfer.mode == Mode::Pull && !native =>
        {
            Ok(None)
        }
        LegBody::Decode { transfer, .. } => {
            let native = native
                .then(|| json(&SealedLeg::of_router(transfer.clone(), proof.secret().as_deref())));
            Ok(Some(leg(&pair.prefill, false, unique, native)))
        }
    }
}

/// Longest `kv_transfer_params` of a prefill's answer, in bytes.
pub(crate) const PARAMS_MAX: usize = 4 << 20;

/// Returns the `kv_transfer_params` of a prefill's answer, if any.
///
/// # Errors
/// The answer is not a JSON object, or its parameters are too long.
pub(crate) fn answered(body: Bytes) -> Result<Option<Arc<str>>, String> {
    let fields = JsonFields::parse(body);
    let fields = fields.map_err(|why| why.of("its answer"))?;
    let Some(params) = fields.get("kv_transfer_params") else { return Ok(None) };
    if params.len() > PARAMS_MAX {
        let length = params.len();
        return Err(format!("its kv_transfer_params of {length} bytes exceed {PARAMS_MAX}"));
    }
    let params = std::str::from_utf8(params);
    params.map(|params| Some(params.into())).map_err(|why| format!("kv_transfer_params: {why}"))
}

/// Fields of the `kv_transfer_params` that a prefill answered.
fn fields_of(answer: &str) -> Result<JsonFields, String> {
    let fields = JsonFields::parse(Bytes::copy_from_slice(answer.as_bytes()));
    fields.map_err(|why| why.of("a prefill's kv_transfer_params"))
}

/// The object with the span that the transfer is part of, for hosts: vLLM's servers tell their
/// connectors no headers.
///
/// # Errors
/// What is no object.
pub(crate) fn with_span(params: Bytes, span: &SpanContext) -> Result<Bytes, String> {
    let fields = JsonFields::parse(params).map_err(|why| why.of("kv_transfer_params"))?;
    let parent = format!("\"{}\"", traceparent(span));
    Ok(fields.edited(&[(PARENT_KEY, FieldEdit::Put(parent.into()))]))
}

/// A prefill leg that names nobody, as vLLM's NixlConnector takes it: what it answers is the leg of
/// the decode.
const TO_STATIC_PREFILL: &str = "{\"do_remote_decode\":true,\"do_remote_prefill\":false,\
     \"remote_engine_id\":null,\"remote_block_ids\":null,\"remote_host\":null,\"remote_port\":null}";

fn json(leg: &impl Serialize) -> String {
    serde_json::to_string(leg).expect("legs are texts and numbers")
}

fn leg(peer: &PairMember, to_prefill: bool, unique: TransferUid, native: Option<String>) -> Bytes {
    let mut out = Vec::with_capacity(320);
    let (dp_rank, dp_size) = peer.told_dp();
    // Writing to a Vec does not fail.
    let _ = write!(
        out,
        "{{\"do_remote_decode\":{to_prefill},\"do_remote_prefill\":{},\
         \"remote_engine_id\":null,\"remote_block_ids\":null,\"remote_dp_size\":{},\
         \"remote_tp_size\":{},\"transfer_id\":\"{}\",\"remote_dp_rank\":{},\
         \"remote_dp_rank_override\":true",
        !to_prefill,
        dp_size,
        peer.tp,
        unique.transfer_id(),
        dp_rank
    );
    if !to_prefill {
        out.extend_from_slice(b",\"is_request_leader\":true");
    }
    if let Some(native) = native {
        let _ = write!(out, ",\"kvferry\":{native}");
    }
    out.push(b'}');
    out.into()
}

/// A decode leg that reads: the prefill's answer, with what the registration knows better.
fn read(answer: &str, prefill: &PairMember) -> Result<Bytes, String> {
    let fields = fields_of(answer)?;
    let (dp_rank, dp_size) = prefill.told_dp();
    let [dp_size, tp, rank] =
        [dp_size, prefill.tp, dp_rank].map(|number| Bytes::from(number.to_string()));
    let edits = [
        ("remote_dp_size", FieldEdit::Put(dp_size)),
        ("remote_tp_size", FieldEdit::Put(tp)),
        ("remote_dp_rank", FieldEdit::Default(rank)),
        ("remote_dp_rank_override", FieldEdit::Default(Bytes::from_static(b"true"))),
    ];
    Ok(fields.edited(&edits))
}
