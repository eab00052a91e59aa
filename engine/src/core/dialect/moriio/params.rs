//! `kv_transfer_params`: what a leg of a request carries beside the prompt, and what a prefill
//! answers for the decode. JSON objects in the bodies of requests and answers.
//!
//! ```
//! use kvferry_engine::core::dialect::moriio::params::KvTransferParams;
//!
//! let json = br#"{"do_remote_prefill": true, "transfer_id": "t", "remote_engine_id": null,
//!     "remote_block_ids": [[4, 5]], "of_a_later_version": 1}"#;
//! let params = KvTransferParams::decode(json)?;
//! assert!(params.do_remote_prefill && !params.do_remote_decode);
//! assert_eq!(params.transfer()?, &"t".into());
//! assert!(KvTransferParams::decode(b"{}").is_err());
//! # Ok::<(), kvferry_engine::core::dialect::DecodeError>(())
//! ```

use super::address::{ZmqAddress, embedded_peer, int};
use super::ports::{DialPurpose, ParallelSizes, PortFormula, pod_of, port};
use super::{DecodeError, EncodeError, error};
use crate::core::ids::{BlockId, EngineId, Mode, RequestId, Role, TransferId};
use crate::core::layout::Mismatch;
use crate::core::layout::check::refuse;
use crate::fabric::Endpoint;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::sync::Arc;

const FRAME: &str = "kv_transfer_params";

/// One object, of either leg and either mode. `remote` is the peer of whom the object is for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct KvTransferParams {
    /// The receiver is a decode whose KV is elsewhere.
    pub do_remote_prefill: bool,
    /// The receiver is a prefill whose KV is for another.
    pub do_remote_decode: bool,
    /// The transfer, the same in both legs.
    pub transfer_id: Option<TransferId>,
    /// Name of the peer, in READ mode from its answer.
    pub remote_engine_id: Option<EngineId>,
    /// Blocks to read, one list per KV group; only in READ mode, from the peer's answer.
    pub remote_block_ids: Option<Vec<Vec<BlockId>>>,
    /// Where the peer listens, if the request id does not say it.
    pub remote: Option<ZmqAddress>,
    /// Hosts of the peer's pods, if there is more than one.
    pub remote_hosts: Vec<Arc<str>>,
    /// Global DP rank of the peer that has the KV or wants to be told of it.
    pub remote_dp_rank: Option<u16>,
    /// WRITE: only the decode rank of this very number tells the prefill of its blocks.
    pub remote_dp_rank_override: bool,
    /// WRITE: this decode rank tells the prefill of its blocks, or does not, whatever else is said.
    pub is_request_leader: Option<bool>,
    /// DP ranks of the peer, in all pods.
    pub remote_dp_size: Option<u16>,
    /// DP ranks in one pod of the peer.
    pub remote_dp_size_local: Option<u16>,
    /// TP ranks of the peer; 0 if not known.
    pub remote_tp_size: u16,
}

impl KvTransferParams {
    /// A leg of a transfer in WRITE mode, or to the prefill in READ mode; the decode's leg in READ
    /// mode is the prefill's answer. `remote` is left out where the request id has the addresses.
    pub fn leg(to: Role, transfer: TransferId, remote: Option<ZmqAddress>) -> KvTransferParams {
        KvTransferParams {
            do_remote_prefill: to == Role::Decode,
            do_remote_decode: to == Role::Prefill,
            transfer_id: Some(transfer),
            remote,
            ..KvTransferParams::default()
        }
    }

    /// What the object says.
    ///
    /// # Errors
    /// No object, a key that 0.32.0 needs is missing, or a value of no use.
    pub fn decode(json: &[u8]) -> Result<KvTransferParams, DecodeError> {
        let object = serde_json::from_slice(json).map_err(|_| error(FRAME, "no object"))?;
        KvTransferParams::read(&object).map_err(|rule| error(FRAME, rule))
    }

    fn read(object: &Map<String, Value>) -> Result<KvTransferParams, &'static str> {
        let engine = object.get("remote_engine_id").ok_or("no remote_engine_id")?;
        let blocks = object.get("remote_block_ids").ok_or("no remote_block_ids")?;
        let flag = |key| object.get(key).is_some_and(truthy);
        let text = |value: &Value, rule| match value {
            Value::Null => Ok(None),
            Value::String(text) => Ok(Some(Arc::from(text.as_str()))),
            _ => Err(rule),
        };
        let size = |key, rule| match object.get(key).filter(|value| !value.is_null()) {
            None => Ok(None),
            Some(value) => number(value).map(Some).ok_or(rule),
        };
        let transfer = object.get("transfer_id").unwrap_or(&Value::Null);
        let tp = size("remote_tp_size", "remote_tp_size is no size")?.filter(|size| *size > 0);
        let tp = tp.or(size("tp_size", "tp_size is no size")?).unwrap_or(0);
        Ok(KvTransferParams {
            do_remote_prefill: flag("do_remote_prefill"),
            do_remote_decode: flag("do_remote_decode"),
            transfer_id: text(transfer, "transfer_id is no text")?.map(TransferId),
            remote_engine_id: text(engine, "remote_engine_id is no text")?.map(EngineId),
            remote_block_ids: block_lists(blocks)?,
            remote: address(object),
            remote_hosts: hosts(object.get("remote_hosts").unwrap_or(&Value::Null)),
            remote_dp_rank: size("remote_dp_rank", "remote_dp_rank is no rank")?,
            remote_dp_rank_override: flag("remote_dp_rank_override"),
            is_request_leader: object
                .get("is_request_leader")
                .filter(|value| !value.is_null())
                .map(truthy),
            remote_dp_size: size("remote_dp_size", "remote_dp_size is no size")?,
            remote_dp_size_local: size("remote_dp_size_local", "remote_dp_size_local is no size")?,
            remote_tp_size: tp,
        })
    }

    /// The peer of an engine of this role, as request id and params say it. The request id counts,
    /// also if it is wrong.
    ///
    /// # Errors
    /// An embedded address that is none, or no address at all.
    pub fn peer(&self, role: Role, request: &RequestId) -> Result<MoriioRemote, DecodeError> {
        let address = match embedded_peer(role, request) {
            Some(text) => ZmqAddress::parse(text)
                .ok_or_else(|| error(FRAME, "address in the request id that is none"))?,
            None => {
                let remote = self.remote.clone();
                remote.ok_or_else(|| error(FRAME, "no address, nor in the request id"))?
            }
        };
        let hosts = match &self.remote_hosts[..] {
            [] => vec![address.host.clone()],
            hosts => hosts.to_vec(),
        };
        let dp_size = self.remote_dp_size.unwrap_or(1).max(1);
        let dp_size_local = self.remote_dp_size_local.filter(|size| *size > 0).unwrap_or(dp_size);
        let shape = ParallelSizes { dp_size_local, tp_size: self.remote_tp_size };
        Ok(MoriioRemote {
            address,
            hosts,
            dp_size,
            dp_rank: self.remote_dp_rank.unwrap_or(0),
            shape,
        })
    }

    /// The transfer.
    ///
    /// # Errors
    /// None is named, as in READ mode by llm-d. A prefill may then use [`unnamed_transfer`].
    pub fn transfer(&self) -> Result<&TransferId, DecodeError> {
        self.transfer_id.as_ref().ok_or_else(|| error(FRAME, "no transfer_id"))
    }

    /// True if the decode rank `dp` (global) of pods with `dp_size_local` ranks is the one that
    /// tells the prefill of its blocks; WRITE mode.
    pub fn is_leader(&self, dp: u16, dp_size_local: u16) -> bool {
        match self.is_request_leader {
            Some(leads) => leads,
            None if self.remote_dp_rank_override => self.remote_dp_rank.unwrap_or(0) == dp,
            None => pod_of(dp, dp_size_local) == 0,
        }
    }

    /// The object of a leg to an engine of this role, under this request id.
    ///
    /// # Errors
    /// What ends the engine core of 0.32.0: a transfer, an address or blocks to read are missing,
    /// or an address is none. Also the flags of another leg.
    pub fn encode_leg(
        &self,
        to: Role,
        mode: Mode,
        request: &RequestId,
    ) -> Result<Vec<u8>, EncodeError> {
        let wrong = |rule| Err(EncodeError { frame: FRAME, rule });
        if self.transfer_id.is_none() {
            return wrong("no transfer_id");
        }
        let flags = (self.do_remote_decode, self.do_remote_prefill);
        if flags != (to == Role::Prefill, to == Role::Decode) {
            return wrong("flags of another leg");
        }
        match (to, mode) {
            // Without an address: the decode will come by itself.
            (Role::Prefill, Mode::Pull) => return Ok(self.bytes()),
            (Role::Decode, Mode::Pull) if self.remote_block_ids.is_none() => {
                return wrong("no blocks to read");
            }
            _ => {}
        }
        let Ok(peer) = self.peer(to, request) else {
            return wrong("no address, nor in the request id");
        };
        for host in peer.hosts {
            ZmqAddress { host, ..peer.address }.check()?;
        }
        peer.address.check()?;
        Ok(self.bytes())
    }

    /// The object with which a prefill answers, and which is the decode's leg in READ mode.
    ///
    /// # Errors
    /// Those of that leg with any request id.
    pub fn encode_answer(&self) -> Result<Vec<u8>, EncodeError> {
        self.encode_leg(Role::Decode, Mode::Pull, &RequestId::from(""))
    }

    fn bytes(&self) -> Vec<u8> {
        serde_json::to_vec(&self.wire()).expect("keys are texts")
    }
}

/// The transfer of a request that names none, by the prefill's own name of the request. The
/// decode can only learn it from the prefill's answer, so there is none in WRITE mode.
pub fn unnamed_transfer(request: &RequestId) -> TransferId {
    format!("sidecar-{request}").into()
}

/// Who is at the other end of a transfer.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MoriioRemote {
    /// Where it listens, in pod 0.
    pub address: ZmqAddress,
    /// Hosts of its pods, at least one.
    pub hosts: Vec<Arc<str>>,
    /// DP ranks in all pods.
    pub dp_size: u16,
    /// Global DP rank that has the KV or wants to be told.
    pub dp_rank: u16,
    /// What its ports depend on.
    pub shape: ParallelSizes,
}

impl MoriioRemote {
    /// Name of the engine, as its DP rank names itself.
    pub fn engine(&self) -> EngineId {
        let host = self.host(self.dp_rank).clone();
        ZmqAddress { host, ..self.address }.engine()
    }

    /// Name of the engine whose handshakes are at `control`, if it is one of ours: each DP rank is
    /// named by a port of its own.
    pub fn engine_at(&self, control: &Endpoint) -> EngineId {
        match control.0.rsplit_once(':') {
            Some((_, port)) => format!("{}:{port}", self.host(self.dp_rank)).into(),
            None => self.engine(),
        }
    }

    /// Where TP rank `tp` of the DP rank listens. 0.32.0 looks elsewhere itself where a peer has
    /// several DP ranks and several TP ranks, and finds nobody.
    ///
    /// # Errors
    /// A rank that the peer does not have, or no port.
    pub fn endpoint(
        &self,
        formula: PortFormula,
        what: DialPurpose,
        tp: u16,
    ) -> Result<Endpoint, Mismatch> {
        let offset = formula.listen(self.shape, self.dp_rank, tp)?;
        let base = match what {
            DialPurpose::Handshake => self.address.handshake,
            _ => self.address.notify,
        };
        match port(base, offset) {
            Some(port) => Ok(Endpoint::tcp(self.host(self.dp_rank), port)),
            None => refuse(format_args!("no port at {base} + {offset}")),
        }
    }

    /// The host of a global DP rank; of pod 0 if the pod is not known.
    pub fn host(&self, dp: u16) -> &Arc<str> {
        let pod = usize::from(pod_of(dp, self.shape.dp_size_local));
        self.hosts.get(pod).unwrap_or(&self.hosts[0])
    }
}

#[derive(Serialize)]
struct ParamsWire<'a> {
    do_remote_prefill: bool,
    do_remote_decode: bool,
    remote_block_ids: &'a Option<Vec<Vec<BlockId>>>,
    remote_engine_id: &'a Option<EngineId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    remote_host: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    remote_handshake_port: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    remote_notify_port: Option<i64>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    remote_hosts: &'a [Arc<str>],
    #[serde(skip_serializing_if = "Option::is_none")]
    remote_dp_rank: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    remote_dp_rank_override: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    is_request_leader: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    remote_dp_size: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    remote_dp_size_local: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    remote_tp_size: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tp_size: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    transfer_id: &'a Option<TransferId>,
}

impl KvTransferParams {
    fn wire(&self) -> ParamsWire<'_> {
        let tp = Some(self.remote_tp_size).filter(|size| *size > 0);
        // Only answers have blocks, and they name the size otherwise.
        let answer = self.remote_block_ids.is_some();
        ParamsWire {
            do_remote_prefill: self.do_remote_prefill,
            do_remote_decode: self.do_remote_decode,
            remote_block_ids: &self.remote_block_ids,
            remote_engine_id: &self.remote_engine_id,
            remote_host: self.remote.as_ref().map(|remote| &*remote.host),
            remote_handshake_port: self.remote.as_ref().map(|remote| remote.handshake),
            remote_notify_port: self.remote.as_ref().map(|remote| remote.notify),
            remote_hosts: &self.remote_hosts,
            remote_dp_rank: self.remote_dp_rank,
            remote_dp_rank_override: self.remote_dp_rank_override.then_some(true),
            is_request_leader: self.is_request_leader,
            remote_dp_size: self.remote_dp_size,
            remote_dp_size_local: self.remote_dp_size_local,
            remote_tp_size: tp.filter(|_| !answer),
            tp_size: tp.filter(|_| answer),
            transfer_id: &self.transfer_id,
        }
    }
}

/// What Python takes for true.
fn truthy(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(value) => *value,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(values) => !values.is_empty(),
        Value::Object(values) => !values.is_empty(),
    }
}

/// A number, or a text that is one.
fn number<T: TryFrom<i64>>(value: &Value) -> Option<T> {
    let number = match value {
        Value::String(text) => int(text),
        value => value.as_i64(),
    };
    T::try_from(number?).ok()
}

fn block_lists(value: &Value) -> Result<Option<Vec<Vec<BlockId>>>, &'static str> {
    let list = |list: &Value| {
        let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok()).map(BlockId);
        list.as_array()?.iter().map(id).collect::<Option<Vec<_>>>()
    };
    match value {
        Value::Null => Ok(None),
        Value::Array(lists) => {
            let lists = lists.iter().map(list).collect::<Option<_>>();
            lists.map(Some).ok_or("remote_block_ids that are no lists of ids")
        }
        _ => Err("remote_block_ids that are no lists of ids"),
    }
}

/// The explicit address. It matters only where the request id has none, so a wrong one is as none.
fn address(object: &Map<String, Value>) -> Option<ZmqAddress> {
    let host = object.get("remote_host")?.as_str().filter(|host| !host.is_empty())?;
    let handshake = number(object.get("remote_handshake_port")?)?;
    let notify = number(object.get("remote_notify_port")?)?;
    Some(ZmqAddress { host: host.into(), handshake, notify })
}

/// One host or a list of them, each as a text.
fn hosts(value: &Value) -> Vec<Arc<str>> {
    let host = |value: &Value| match value {
        Value::String(text) => text.as_str().into(),
        value => value.to_string().into(),
    };
    match value {
        Value::Null => Vec::new(),
        Value::Array(values) => values.iter().map(host).collect(),
        value => vec![host(value)],
    }
}
