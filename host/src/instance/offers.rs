//! What a prefill answers a leg with, for whoever carries it to a decode word for word.
//!
//! Beside MoRIIO's form it is a decode leg of the native dialect, so that two engines of ours speak
//! that behind any router. With a secret it is sealed: who carries a leg cannot make one.

use kvferry_engine::core::dialect::moriio::address::ZmqAddress;
use kvferry_engine::core::dialect::moriio::params::KvTransferParams;
use kvferry_engine::core::ids::{BlockId, Incarnation, Mode, TransferKey};
use kvferry_engine::core::layout::BlockList;
use kvferry_engine::core::message::DecodeLeg;
use kvferry_engine::fabric::Endpoint;
use kvferry_trust::{CarrierKey, FleetProof, FleetSecret};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// The native leg of a decode, and the seal of who made it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SealedLeg {
    #[serde(flatten)]
    pub(crate) leg: DecodeLeg,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    seal: Option<Box<str>>,
}

/// Whose name legs of a router are sealed in.
const ROUTER: &str = "router";

/// Whose name legs are sealed in that a prefill answers.
const PREFILL: &str = "prefill";

/// All that a leg says, apart.
fn said(leg: &DecodeLeg) -> Vec<Vec<u8>> {
    let numbers = [leg.key.prompt, leg.sibling].map(|number| number.to_le_bytes().to_vec());
    let life = leg.incarnation.map(|incarnation| incarnation.0.to_le_bytes().to_vec());
    let texts = [&*leg.key.id.0, &*leg.prefill.0, &*leg.control.0, &leg.mode.to_string()];
    let texts = texts.map(|text| text.as_bytes().to_vec());
    texts.into_iter().chain(numbers).chain([life.unwrap_or_default()]).collect()
}

fn seal(key: &CarrierKey, leg: &DecodeLeg) -> Box<str> {
    let said = said(leg);
    let parts: Vec<&[u8]> = said.iter().map(Vec::as_slice).collect();
    key.seal(&parts).into()
}

impl SealedLeg {
    /// Of a router, sealed if it has a secret.
    pub(crate) fn of_router(leg: DecodeLeg, secret: Option<&FleetSecret>) -> SealedLeg {
        let key = secret.map(|secret| secret.carrier_key(&[ROUTER.as_bytes()]));
        SealedLeg { seal: key.map(|key| seal(&key, &leg)), leg }
    }

    /// The leg, if it was sealed by a router or the prefill that it names, or no secret says that
    /// it has to be.
    ///
    /// # Errors
    /// What is missing or wrong, and the remedy.
    pub(crate) fn open(self, proof: &FleetProof) -> Result<DecodeLeg, String> {
        // A native leg names no peer in MoRIIO's form, which nothing would vouch for.
        let leg = DecodeLeg { moriio: None, ..self.leg };
        let Some(secret) = proof.secret() else { return Ok(leg) };
        let Some(seal) = &self.seal else {
            let text = "the leg has no seal, which is demanded where there is a secret: give the \
                router that sends it the same secret (--secret-file, or KVFERRY_SECRET_FILE)";
            return Err(text.into());
        };
        let said = said(&leg);
        let parts: Vec<&[u8]> = said.iter().map(Vec::as_slice).collect();
        let prefill = [PREFILL.as_bytes(), leg.prefill.0.as_bytes()];
        secret
            .check_carried(&prefill, &parts, seal)
            .or_else(|_| secret.check_carried(&[ROUTER.as_bytes()], &parts, seal))
            .map_err(|why| format!("the seal of the leg: {why}"))?;
        Ok(leg)
    }
}

/// What a prefill that speaks the native dialect says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct NativePrefill {
    mode: Mode,
    control: Endpoint,
    #[serde(rename = "life")]
    incarnation: Incarnation,
    seal: Option<CarrierKey>,
}

/// What a leg says that a prefill answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnsweredLeg {
    pub key: TransferKey,
    /// It names a decode, which is written to.
    pub names_decode: bool,
}

/// What a prefill needs to know to answer its legs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefillOffer {
    address: ZmqAddress,
    /// TP ranks.
    tp: u16,
    /// Decodes that speak MoRIIO are dealt with, and fit.
    moriio: bool,
    native: Option<NativePrefill>,
}

impl PrefillOffer {
    /// Of an engine of which no more is known than where it listens, and its TP ranks.
    pub fn of_moriio((address, tp): (ZmqAddress, u16)) -> PrefillOffer {
        PrefillOffer { address, tp, moriio: true, native: None }
    }

    /// Of an engine that decodes reach at `control` by the native dialect.
    pub(crate) fn new(
        (address, tp): (ZmqAddress, u16),
        (mode, control, incarnation): (Mode, Endpoint, Incarnation),
        moriio: bool,
        proof: &FleetProof,
    ) -> PrefillOffer {
        let engine = address.engine();
        let name = [PREFILL.as_bytes(), engine.0.as_bytes()];
        let seal = proof.secret().map(|secret| secret.carrier_key(&name));
        let native = Some(NativePrefill { mode, control, incarnation, seal });
        PrefillOffer { address, tp, moriio, native }
    }

    /// `kvferry`'s form, for the decode.
    fn leg(&self, key: &TransferKey) -> Option<SealedLeg> {
        let NativePrefill { mode, control, incarnation, seal: sealer } = self.native.as_ref()?;
        let leg = DecodeLeg::new(key.clone(), *mode, self.address.engine(), control.clone());
        let leg = DecodeLeg { incarnation: Some(*incarnation), ..leg };
        Some(SealedLeg { seal: sealer.as_ref().map(|key| seal(key, &leg)), leg })
    }

    /// `kv_transfer_params` of the answer, in JSON: where the blocks of a prompt are. Where no
    /// decode that speaks MoRIIO could use them, it is told to compute the prompt, because it would
    /// wait for ever.
    ///
    /// # Errors
    /// What peers could not read.
    pub fn params(&self, leg: &AnsweredLeg, blocks: &[BlockList]) -> Result<String, String> {
        let AnsweredLeg { key, names_decode } = leg;
        let is_pushed = self.native.as_ref().is_some_and(|native| native.mode == Mode::Push);
        let native =
            self.leg(key).map(|leg| serde_json::to_string(&leg).expect("texts and numbers"));
        let mut json = if self.moriio && (!is_pushed || *names_decode) {
            let params = self.moriio_params(key, blocks);
            let json = params.encode_answer().map_err(|why| why.to_string())?;
            String::from_utf8(json).map_err(|why| why.to_string())?
        } else {
            json!({
                "do_remote_prefill": false,
                "do_remote_decode": false,
                "remote_engine_id": self.address.engine(),
                "remote_block_ids": null,
                "remote_host": self.address.host,
                "transfer_id": key.id,
            })
            .to_string()
        };
        if let Some(native) = native {
            json.pop();
            json.push_str(",\"kvferry\":");
            json.push_str(&native);
            json.push('}');
        }
        Ok(json)
    }

    /// Each of our DP ranks is an engine of its own to peers, with ports of its own.
    fn moriio_params(&self, key: &TransferKey, blocks: &[BlockList]) -> KvTransferParams {
        let lists = blocks.iter().map(|list| list.ids.iter().map(|id| BlockId(*id)).collect());
        KvTransferParams {
            do_remote_prefill: true,
            transfer_id: Some(key.id.clone()),
            remote_engine_id: Some(self.address.engine()),
            remote_block_ids: Some(lists.collect()),
            remote: Some(self.address.clone()),
            remote_dp_rank: Some(0),
            remote_dp_rank_override: true,
            remote_dp_size: Some(1),
            remote_dp_size_local: Some(1),
            remote_tp_size: self.tp,
            ..KvTransferParams::default()
        }
    }
}
