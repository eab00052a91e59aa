//! `kv_transfer_params` of a request, as the leg that the cores know, and of an answer.

use super::failure_notice::failure_in;
use super::offers::{AnsweredLeg, PrefillOffer, SealedLeg};
use kvferry_engine::core::dialect::moriio::address::{ZmqAddress, embedded_peer, incarnation_of};
use kvferry_engine::core::dialect::moriio::params::{KvTransferParams, unnamed_transfer};
use kvferry_engine::core::dialect::moriio::ports::{DialPurpose, PortFormula};
use kvferry_engine::core::ids::{
    BlockId, EngineId, Incarnation, RequestId, TransferId, TransferKey,
};
use kvferry_engine::core::layout::BlockList;
use kvferry_engine::core::message::{DecodeLeg, Mode, MoriioLeg, PrefillLeg, Role};
use kvferry_engine::core::router::LegBody;
use kvferry_engine::fabric::Endpoint;
use kvferry_engine::text::printable;
use kvferry_trust::FleetProof;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use std::sync::Arc;

/// Most characters of an engine's name in an error.
const ENGINE_SHOWN: usize = 100;

/// What this instance is to its peers.
#[derive(Clone, Debug)]
pub(crate) struct InstanceIdentity {
    pub(crate) role: Role,
    pub(crate) mode: Mode,
    pub(crate) address: ZmqAddress,
    pub(crate) ports: PortFormula,
    /// Where peers say the native hello.
    pub(crate) control: Endpoint,
    pub(crate) incarnation: Incarnation,
    /// Peers that speak MoRIIO are dealt with, and fit.
    pub(crate) moriio_peers: bool,
    /// Nothing else is spoken.
    pub(crate) moriio_only: bool,
    /// What the legs of a decode are sealed by, and the answers of a prefill.
    pub(crate) proof: FleetProof,
    /// TP ranks.
    pub(crate) tp: u16,
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
    let Some(leg) = leg else { return Ok(None) };
    // What a prefill answered that handed nothing over, carried on.
    if let Some(failed) = failure_in(leg) {
        return Err(format!("the prefill handed nothing over: {}", failed.why));
    }
    let leg = serde_json::from_str(leg.get()).map(Some);
    leg.map_err(|why| format!("the key kvferry of kv_transfer_params: {why}"))
}

impl InstanceIdentity {
    /// What the answers of a prefill are made of, with the secret as it is now.
    pub(crate) fn offer(&self) -> PrefillOffer {
        let at = (self.address.clone(), self.tp);
        if self.moriio_only {
            return PrefillOffer::of_moriio(at);
        }
        let native = (self.mode, self.control.clone(), self.incarnation);
        PrefillOffer::new(at, native, self.moriio_peers, &self.proof)
    }

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
        if let Some(transfer) = native::<PrefillLeg>(json)? {
            // Drops a peer in MoRIIO's form, which a native leg must not name: a prefill would dial
            // it.
            let transfer = PrefillLeg { moriio: None, ..transfer };
            return Ok(LegBody::Prefill { transfer, prompt: 0 });
        }
        let params =
            KvTransferParams::decode(json.get().as_bytes()).map_err(|why| why.to_string())?;
        if !params.do_remote_decode {
            return Err("kv_transfer_params without do_remote_decode, sent to a prefill".into());
        }
        if params.do_remote_prefill {
            let why = "kv_transfer_params with do_remote_decode and do_remote_prefill, of two legs";
            return Err(why.into());
        }
        let embedded = embedded_peer(Role::Prefill, request);
        let peer = match self.mode {
            // Nobody is named: a decode of ours asks by itself, with what this prefill answers.
            Mode::Push if embedded.is_none() && params.remote.is_none() => None,
            Mode::Push => Some(params.peer(Role::Prefill, request).map_err(|why| why.to_string())?),
            // A decode that pulls comes by itself and need not be known.
            Mode::Pull => None,
        };
        // With a secret the id's native mark is ignored, as at the decode, which then speaks
        // MoRIIO.
        let named = embedded.filter(|_| !self.proof.is_demanded()).and_then(incarnation_of);
        let native = named.is_some() || self.mode == Mode::Push && peer.is_none();
        let moriio = (!native).then(|| Arc::new(MoriioLeg { peer, ..MoriioLeg::default() }));
        let transfer = PrefillLeg { moriio, ..PrefillLeg::new(key_of(request, params), self.mode) };
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
        if let Some(sealed) = params.map(native::<SealedLeg>).transpose()?.flatten() {
            return body(sealed.open(&self.proof)?);
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
        let prefill = peer.engine();
        let only = self.proof.is_demanded();
        if only && !self.moriio_peers {
            return Err(unsealed(&prefill));
        }
        let incarnation = embedded_peer(Role::Decode, request).and_then(incarnation_of);
        // The request id proves nothing: with a secret, its mark of the native dialect is ignored.
        let incarnation = incarnation.filter(|_| !only);
        let leg = MoriioLeg { peer: Some(peer), blocks, only };
        let moriio = incarnation.is_none().then(|| Arc::new(leg));
        let key = TransferKey { id, prompt: 0 };
        body(DecodeLeg { incarnation, moriio, ..DecodeLeg::new(key, self.mode, prefill, control) })
    }

    /// A request without a prefill: its leg names nobody, so that the instance computes the prompt
    /// itself, or fails it, as it is told to for prompts that did not arrive.
    fn alone(&self, request: &RequestId) -> DecodeLeg {
        DecodeLeg::alone(TransferId(request.0.clone()), self.mode)
    }
}

#[cfg(test)]
impl InstanceIdentity {
    /// Of one rank that speaks to everybody and has no secret.
    pub(crate) fn open(role: Role, mode: Mode, address: ZmqAddress) -> InstanceIdentity {
        InstanceIdentity {
            role,
            mode,
            address,
            ports: PortFormula::default(),
            control: "".into(),
            incarnation: Incarnation(1),
            moriio_peers: true,
            moriio_only: false,
            proof: FleetProof::open(None).expect("no secret"),
            tp: 1,
        }
    }
}

/// Error for a leg that names a prefill without a seal, if there is a secret and no MoRIIO peers.
fn unsealed(prefill: &EngineId) -> String {
    format!(
        "the leg names the prefill {} and has no seal, which is demanded where there is a secret: send \
         it by kvferry router with the same secret, or copy kv_transfer_params of the prefill's \
         answer; moriio_peers true accepts it, in MoRIIO's dialect only",
        printable(&prefill.0, ENGINE_SHOWN)
    )
}

/// The transfer of a leg to a prefill.
fn key_of(request: &RequestId, params: KvTransferParams) -> TransferKey {
    let id = params.transfer_id.unwrap_or_else(|| unnamed_transfer(request));
    TransferKey { id, prompt: 0 }
}

/// What a prefill answers, of a request that came with these parameters.
///
/// # Errors
/// Those of a leg that a prefill cannot use.
pub fn answered_leg(request: &RequestId, params: &RawValue) -> Result<AnsweredLeg, String> {
    if let Some(PrefillLeg { key, .. }) = native(params)? {
        return Ok(AnsweredLeg { key, names_decode: false });
    }
    let params =
        KvTransferParams::decode(params.get().as_bytes()).map_err(|why| why.to_string())?;
    let names_decode = params.peer(Role::Prefill, request).is_ok();
    Ok(AnsweredLeg { key: key_of(request, params), names_decode })
}
