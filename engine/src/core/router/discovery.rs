//! What instances say on the discovery channel: registrations of the native dialect, heartbeats of
//! MoRIIO, or heartbeats with a native registration inside.

use super::registry::Reject;
use crate::core::dialect::moriio::DecodeError;
use crate::core::dialect::moriio::address::ZmqAddress;
use crate::core::dialect::moriio::registration::{Heard, Heartbeat};
use crate::core::dialect::native::{self, Frame};
use crate::core::ids::{EngineId, Incarnation};
use crate::core::message::{Registration, Role};
use crate::fabric::Endpoint;
use std::sync::Arc;

/// A registration, and how the instance is spoken to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) registration: Registration,
    /// Where MoRIIO peers find it, if it speaks MoRIIO.
    pub(super) zmq: Option<ZmqAddress>,
    /// True if it speaks the native dialect.
    pub(super) native: bool,
}

impl Entry {
    /// Of an instance that speaks the native dialect only.
    pub(super) fn native(registration: Registration) -> Entry {
        Entry { registration, zmq: None, native: true }
    }

    /// Of one DP rank of an instance that speaks MoRIIO only.
    pub(super) fn of_rank(beat: &Heartbeat, dp_rank: u16, life: Incarnation, n: u64) -> Entry {
        let zmq = beat.zmq();
        let control = match zmq.host.contains(':') {
            true => format!("tcp://[{}]:{}", zmq.host, zmq.handshake),
            false => format!("tcp://{}:{}", zmq.host, zmq.handshake),
        };
        let registration = Registration {
            engine: rank_name(beat, dp_rank),
            incarnation: life,
            sequence: n,
            role: beat.role(),
            mode: beat.mode(),
            http: beat.http().clone(),
            control: Endpoint::from(&*control),
            dp_rank,
            dp_size: beat.dp_size().get(),
            tp: beat.tp_size().get(),
            draining: false,
            fit: None,
            troubles: Vec::new(),
        };
        Entry { registration, zmq: Some(zmq.clone()), native: false }
    }

    /// True if both are of one life of one instance that speaks MoRIIO only: all that a restart
    /// could have changed is the same.
    pub(super) fn is_same_life(&self, other: &Entry) -> bool {
        let told = |entry: &Entry| {
            let Registration { role, mode, dp_size, tp, .. } = entry.registration;
            (role, mode, dp_size, tp, entry.native)
        };
        told(self) == told(other) && self.zmq == other.zmq
    }
}

/// The name of one DP rank: its role and HTTP address are the instance's identity.
pub(super) fn rank_name(beat: &Heartbeat, dp_rank: u16) -> EngineId {
    let role = match beat.role() {
        Role::Prefill => 'P',
        Role::Decode => 'D',
    };
    format!("{role}/{}/{dp_rank}", beat.http()).into()
}

/// What a message says.
pub(super) enum Said {
    /// One engine core that speaks the native dialect.
    Entry(Box<Entry>),
    /// All DP ranks of an instance that speaks MoRIIO only.
    Heartbeat(Heartbeat),
}

/// A message that says nothing of use.
pub(super) struct Unread {
    pub(super) reason: Reject,
    /// What is wrong.
    pub(super) why: Arc<str>,
    /// Who it calls itself.
    pub(super) from: Option<Arc<str>>,
}

/// What an instance says of itself, for who counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::core) enum Tells {
    /// It is well.
    Well,
    /// It is well, and there are peers that it cannot reach.
    Troubles,
    /// It takes no new requests.
    Drains,
    /// Of MoRIIO, which says no more than that it is there.
    Heartbeat,
    /// Nothing of use.
    Nothing,
}

/// Reads a message for what it tells.
pub(in crate::core) fn tells(parts: &[Vec<u8>]) -> Tells {
    match read(parts) {
        Ok(Said::Entry(entry)) if entry.registration.draining => Tells::Drains,
        Ok(Said::Entry(entry)) if !entry.registration.troubles.is_empty() => Tells::Troubles,
        Ok(Said::Entry(_)) => Tells::Well,
        Ok(Said::Heartbeat(_)) => Tells::Heartbeat,
        Err(_) => Tells::Nothing,
    }
}

/// Reads a message; parts after the first are ignored.
pub(super) fn read(parts: &[Vec<u8>]) -> Result<Said, Unread> {
    let malformed =
        |why: DecodeError| Unread { reason: Reject::Malformed, why: why.rule, from: None };
    let first = parts.first().map_or(&[][..], |part| part);
    if first.starts_with(&native::MAGIC) {
        return match native::decode(first).map_err(malformed)? {
            Frame::Register(registration) => Ok(Said::Entry(Box::new(Entry::native(registration)))),
            _ => {
                let why = "another message than a registration".into();
                Err(Unread { reason: Reject::Malformed, why, from: None })
            }
        };
    }
    let heard = Heard::decode(parts).map_err(malformed)?;
    let beat = heard.check().map_err(|why| Unread {
        reason: Reject::Unusable,
        why: why.rule,
        from: Some(heard.http_address.clone()),
    })?;
    Ok(match heard.native {
        Some(registration) => {
            let zmq = Some(beat.zmq().clone());
            Said::Entry(Box::new(Entry { registration: *registration, zmq, native: true }))
        }
        None => Said::Heartbeat(beat),
    })
}
