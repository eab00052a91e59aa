//! `kv_transfer_params` of a request, as the leg that the cores know, and of an answer.

use kvferry_engine::core::dialect::moriio::address::{ZmqAddress, embedded_peer, incarnation_of};
use kvferry_engine::core::dialect::moriio::params::{KvTransferParams, unnamed_transfer};
use kvferry_engine::core::dialect::moriio::ports::{DialPurpose, PortFormula};
use kvferry_engine::core::ids::{BlockId, RequestId, TransferId, TransferKey};
use kvferry_engine::core::layout::BlockList;
use kvferry_engine::core::message::{DecodeLeg, Mode, MoriioLeg, PrefillLeg, Role};
use kvferry_engine::core::router::LegBody;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use std::sync::Arc;

/// What this instance is to its peers.
#[derive(Clone, Debug)]
pub(crate) struct InstanceIdentity {
    pub(crate) role: Role,
    pub(crate) mode: Mode,
    pub(crate) address: ZmqAddress,
    pub(crate) ports: PortFormula,
}

/// The leg of the native dialect beside the rest, from a router that knows both ends to speak it.
#[derive(Deserialize)]
struct NativeParams<'a> {
    #[serde(borrow)]
    kvferry: Option<&'a RawValue>,
}

/// That leg, if there is one.
///
/// # Errors
/// One that cannot be used; the rest is not taken in its place.
fn native<T: DeserializeOwned>(params: &RawValue) -> Result<Option<T>, String> {
    // What is no object is told as such by who reads the rest.
    let leg = serde_json::from_str(params.get()).ok().and_then(|NativeParams { kvferry }| kvferry);
    let leg = leg.map(|leg| serde_json::from_str(leg.get())).transpose();
    leg.map_err(|why| format!("the key kvferry of kv_transfer_params: {why}"))
}

impl InstanceIdentity {
    /// The leg of a request.
    ///
    /// # Errors
    /// What is missing or wrong, for the client.
    pub(crate) fn leg(
        &self,
        request: &RequestId,
        params: Option<&RawValue>,
        output: u32,
    ) -> Result<LegBody, String> {
        match self.role {
            Role::Prefill => self.prefill(request, params),
            Role::Decode => self.decode(request, params, output),
        }
    }

    fn prefill(&self, request: &RequestId, params: Option<&RawValue>) -> Result<LegBody, String> {
        let Some(json) = params else {
            return Err("a prefill instance takes legs of a router, with kv_transfer_params".into());
        };
        if let Some(transfer) = native(json)? {
            return Ok(LegBody::Prefill { transfer, prompt: 0 });
        }
        let params =
            KvTransferParams::decode(json.get().as_bytes()).map_err(|why| why.to_string())?;
        if !params.do_remote_decode {
            return Err("kv_transfer_params without do_remote_decode, sent to a prefill".into());
        }
        let native = embedded_peer(Role::Prefill, request)
            .is_some_and(|peer| incarnation_of(peer).is_some());
        // A decode that pulls comes by itself and need not be known.
        let peer = match self.mode {
            Mode::Push => Some(params.peer(Role::Prefill, request).map_err(|why| why.to_string())?),
            Mode::Pull => None,
        };
        let moriio = (!native).then(|| Arc::new(MoriioLeg { peer, blocks: Vec::new() }));
        let id = params.transfer_id.unwrap_or_else(|| unnamed_transfer(request));
        let key = TransferKey { id, prompt: 0 };
        let transfer = PrefillLeg { moriio, ..PrefillLeg::new(key, self.mode) };
        Ok(LegBody::Prefill { transfer, prompt: 0 })
    }

    fn decode(
        &self,
        request: &RequestId,
        params: Option<&RawValue>,
        output: u32,
    ) -> Result<LegBody, String> {
        let body =
            |transfer| Ok(LegBody::Decode { transfer, prompt: 0, sample: 0, output, params: None });
        if let Some(transfer) = params.map(native).transpose()?.flatten() {
            return body(transfer);
        }
        let params = match params {
            Some(json) => {
                KvTransferParams::decode(json.get().as_bytes()).map_err(|why| why.to_string())?
            }
            None => KvTransferParams::default(),
        };
        if !params.do_remote_prefill {
            return body(self.alone(request));
        }
        let id = params.transfer().map_err(|why| why.to_string())?.clone();
        let peer = params.peer(Role::Decode, request).map_err(|why| why.to_string())?;
        let control =
            peer.endpoint(self.ports, DialPurpose::Handshake, 0).map_err(|why| why.to_string())?;
        let blocks = params.remote_block_ids.unwrap_or_default();
        let list = |ids: Vec<BlockId>| BlockList::new(ids.into_iter().map(|id| id.0).collect());
        let blocks = blocks.into_iter().map(list).collect();
        let incarnation = embedded_peer(Role::Decode, request).and_then(incarnation_of);
        let prefill = peer.engine();
        let moriio =
            incarnation.is_none().then(|| Arc::new(MoriioLeg { peer: Some(peer), blocks }));
        let key = TransferKey { id, prompt: 0 };
        body(DecodeLeg { incarnation, moriio, ..DecodeLeg::new(key, self.mode, prefill, control) })
    }

    /// A request without a prefill: its leg names nobody, so that the instance computes the prompt
    /// itself, or fails it, as it is told to for prompts that did not arrive.
    fn alone(&self, request: &RequestId) -> DecodeLeg {
        DecodeLeg {
            moriio: Some(Arc::default()),
            ..DecodeLeg::new(
                TransferKey { id: TransferId(request.0.clone()), prompt: 0 },
                self.mode,
                "nobody".into(),
                "".into(),
            )
        }
    }

    /// What a prefill answers: where its blocks are.
    pub(crate) fn answer(
        address: &ZmqAddress,
        transfer: &TransferId,
        blocks: &[BlockList],
    ) -> KvTransferParams {
        let lists = blocks.iter().map(|list| list.ids.iter().map(|id| BlockId(*id)).collect());
        KvTransferParams {
            do_remote_prefill: true,
            transfer_id: Some(transfer.clone()),
            remote_engine_id: Some(address.engine()),
            remote_block_ids: Some(lists.collect()),
            remote: Some(address.clone()),
            remote_dp_rank: Some(0),
            remote_dp_rank_override: true,
            remote_dp_size: Some(1),
            remote_dp_size_local: Some(1),
            remote_tp_size: 1,
            ..KvTransferParams::default()
        }
    }
}
