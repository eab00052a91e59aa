//! Which port a rank listens on, and which rank of a peer a rank deals with.
//!
//! ```
//! use kvferry_engine::core::dialect::moriio::ports::{ParallelSizes, PortFormula};
//!
//! let sizes = ParallelSizes { dp_size_local: 4, tp_size: 2 };
//! // The formula of 0.32.0 gives two ranks one port, which the other one does not.
//! let port = |formula: PortFormula, dp, tp| formula.listen(sizes, dp, tp);
//! assert_eq!(port(PortFormula::Legacy, 0, 1)?, port(PortFormula::Legacy, 1, 0)?);
//! assert_ne!(port(PortFormula::Injective, 0, 1)?, port(PortFormula::Injective, 1, 0)?);
//! # Ok::<(), kvferry_engine::core::layout::Mismatch>(())
//! ```

use crate::core::layout::Mismatch;
use crate::core::layout::check::refuse;
use serde::{Deserialize, Serialize};

/// How a listener's port is made of its base port and its rank. Both sides need the same.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum PortFormula {
    /// As vLLM 0.32.0: listeners at `dp + tp`, some of which collide when DP and TP are above 1,
    /// and diallers that partly look elsewhere.
    #[default]
    Legacy,
    /// `dp * tp_size + tp` on both sides, with the listener's TP size; as vLLM after 0.32.0.
    Injective,
}

/// What a port is dialled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DialPurpose {
    Handshake,
    RemoteBlocks,
    /// A [`Release`](super::notify::Release) before blocks were allocated; WRITE mode.
    EarlyRelease,
    /// A [`Release`](super::notify::Release) after reading; READ mode.
    Release,
    WriteDone,
}

/// The sizes of an engine that its ports depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ParallelSizes {
    /// DP ranks per pod; 0 if all are in one.
    pub dp_size_local: u16,
    /// TP ranks; 0 if not known.
    pub tp_size: u16,
}

impl ParallelSizes {
    /// TP ranks of the engine; where that is not known, as many as on the other side.
    pub fn tp_size_or(self, own_tp: u16) -> u16 {
        if self.tp_size == 0 { own_tp } else { self.tp_size }
    }
}

impl PortFormula {
    /// Distance of the port where the rank of an engine of this shape listens from the base port.
    /// `dp` is global.
    ///
    /// # Errors
    /// `Injective` and the shape has no such TP rank.
    pub fn listen(self, own: ParallelSizes, dp: u16, tp: u16) -> Result<u32, Mismatch> {
        match self {
            PortFormula::Legacy => Ok(port_offset(fold(dp, own.dp_size_local), tp, 1)),
            PortFormula::Injective => injective(own, dp, tp),
        }
    }

    /// Distance of the port to dial from the peer's base port, for its rank `tp` of the global DP
    /// rank `dp`.
    ///
    /// # Errors
    /// `Injective` and the peer has no such TP rank, as far as known.
    pub fn dial(
        self,
        what: DialPurpose,
        peer: ParallelSizes,
        dp: u16,
        tp: u16,
    ) -> Result<u32, Mismatch> {
        match (self, what) {
            (PortFormula::Injective, _) => injective(peer, dp, tp),
            (PortFormula::Legacy, DialPurpose::Handshake | DialPurpose::Release) => {
                Ok(port_offset(dp, tp, peer.tp_size))
            }
            (PortFormula::Legacy, DialPurpose::RemoteBlocks | DialPurpose::WriteDone) => {
                Ok(port_offset(fold(dp, peer.dp_size_local), tp, 1))
            }
            (PortFormula::Legacy, DialPurpose::EarlyRelease) => Ok(port_offset(dp, tp, 1)),
        }
    }
}

fn injective(listener: ParallelSizes, dp: u16, tp: u16) -> Result<u32, Mismatch> {
    if tp >= listener.tp_size {
        return refuse(format_args!("no TP rank {tp} of {}", listener.tp_size));
    }
    Ok(port_offset(fold(dp, listener.dp_size_local), tp, listener.tp_size))
}

/// `dp * tp_size + tp`, which 0.32.0 uses with 1 for sizes that it leaves out.
pub fn port_offset(dp: u16, tp: u16, tp_size: u16) -> u32 {
    u32::from(dp) * u32::from(tp_size) + u32::from(tp)
}

/// The port at this distance from the base port, if there is one.
pub fn port(base: i64, offset: u32) -> Option<u16> {
    let port = u16::try_from(base.checked_add(i64::from(offset))?).ok()?;
    (port > 0).then_some(port)
}

/// The rank within its pod of a global DP rank; `dp_size_local` 0 means one pod.
pub fn fold(dp: u16, dp_size_local: u16) -> u16 {
    if dp_size_local == 0 { dp } else { dp % dp_size_local }
}

/// The pod of a global DP rank; `dp_size_local` 0 means one pod.
pub fn pod_of(dp: u16, dp_size_local: u16) -> u16 {
    dp.checked_div(dp_size_local).unwrap_or(0)
}

/// The TP rank of the peer that a rank exchanges KV with; `remote_tp` 0 means as many as here.
///
/// # Errors
/// Neither size is a multiple of the other.
pub fn remote_tp_rank(rank: u16, local_tp: u16, remote_tp: u16) -> Result<u16, Mismatch> {
    let remote_tp = if remote_tp == 0 { local_tp } else { remote_tp };
    match () {
        () if local_tp == 0 => refuse(format_args!("TP sizes must be positive")),
        () if remote_tp.is_multiple_of(local_tp) => {
            let peers = remote_tp / local_tp;
            let first = rank.checked_mul(peers).filter(|_| rank < local_tp);
            first.map_or_else(|| refuse(format_args!("no TP rank {rank} of {local_tp}")), Ok)
        }
        () if local_tp.is_multiple_of(remote_tp) => Ok(rank / (local_tp / remote_tp)),
        () => refuse(format_args!("TP {local_tp} and {remote_tp} do not divide each other")),
    }
}

/// How many releases a prefill rank waits for.
///
/// # Errors
/// A size is 0, or the larger decode is no multiple of the prefill.
pub fn expected_acks(producer_tp: u16, consumer_tp: u16) -> Result<u16, Mismatch> {
    if producer_tp == 0 || consumer_tp == 0 {
        return refuse(format_args!("TP sizes must be positive"));
    }
    if consumer_tp <= producer_tp {
        return Ok(1);
    }
    if !consumer_tp.is_multiple_of(producer_tp) {
        let text = format_args!("TP {consumer_tp} of decode is no multiple of {producer_tp}");
        return refuse(text);
    }
    Ok(consumer_tp / producer_tp)
}

/// How many ranks of a prefill write to one of a decode, as 0.33.0 has it: of those with the same heads
/// only the first. 0.32.0 writes between equal sizes only.
pub fn expected_writers(producer_tp: u16, consumer_tp: u16, kv_heads: u16) -> u16 {
    let share = producer_tp.checked_div(consumer_tp).unwrap_or(0);
    let copies = producer_tp.checked_div(kv_heads).unwrap_or(0).max(1);
    (share / copies).max(1)
}

/// Checks that ranks of both sides hold the same heads: MoRIIO moves whole blocks.
///
/// # Errors
/// TP sizes differ and a side has fewer ranks than the model has KV heads.
pub fn check_heads(
    local_tp: u16,
    remote_tp: u16,
    kv_heads: u16,
    latent: bool,
) -> Result<(), Mismatch> {
    if latent || local_tp == remote_tp || local_tp.min(remote_tp) >= kv_heads {
        return Ok(());
    }
    refuse(format_args!("{kv_heads} KV heads over TP {local_tp} and {remote_tp}"))
}
