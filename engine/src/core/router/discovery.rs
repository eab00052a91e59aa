//! What instances say on the discovery channel: registrations of the native dialect, heartbeats of
//! MoRIIO, or heartbeats with a native registration inside.

use super::io::{Dialects, StaticInstance};
use super::rejections::RejectReason;
use crate::core::dialect::moriio::DecodeError;
use crate::core::dialect::moriio::address::ZmqAddress;
use crate::core::dialect::moriio::registration::{MoriioRegistration, UncheckedRegistration};
use crate::core::dialect::native::{self, Frame};
use crate::core::ids::{EngineId, Incarnation};
use crate::core::message::{Mode, Registration, Role};
use crate::fabric::Endpoint;
use std::sync::Arc;

/// A registration, and how the instance is spoken to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RegistrationEntry {
    pub(super) registration: Registration,
    /// Where MoRIIO peers find it, if it speaks MoRIIO.
    pub(super) zmq: Option<ZmqAddress>,
    /// True if it speaks the native dialect.
    pub(super) native: bool,
    /// True if who registered it has proven to know the secret.
    pub(super) signed: bool,
}

impl RegistrationEntry {
    /// Of an instance that speaks the native dialect only.
    pub(super) fn native(registration: Registration) -> RegistrationEntry {
        RegistrationEntry { registration, zmq: None, native: true, signed: false }
    }

    /// Of one DP rank of an instance that speaks MoRIIO only.
    pub(super) fn of_rank(
        beat: &MoriioRegistration,
        dp_rank: u16,
        incarnation: Incarnation,
        n: u64,
    ) -> RegistrationEntry {
        let zmq = beat.zmq();
        let control = match zmq.host.contains(':') {
            true => format!("tcp://[{}]:{}", zmq.host, zmq.handshake),
            false => format!("tcp://{}:{}", zmq.host, zmq.handshake),
        };
        let registration = Registration {
            sequence: n,
            dp_rank,
            dp_size: beat.dp_size().get(),
            tp: beat.tp_size().get(),
            ..Registration::new(
                rank_name(beat, dp_rank),
                incarnation,
                beat.role(),
                beat.mode(),
                beat.http().clone(),
                Endpoint::from(&*control),
            )
        };
        RegistrationEntry { registration, zmq: Some(zmq.clone()), native: false, signed: false }
    }

    /// Of an instance that the operator names. It has no incarnation, and is older than all that
    /// register at its place: what those say is more.
    pub(super) fn of_static(named: &StaticInstance, sequence: u64) -> RegistrationEntry {
        let registration = Registration {
            sequence,
            ..Registration::new(
                static_name(named),
                Incarnation(0),
                named.role,
                Mode::Pull,
                named.http.clone(),
                named.http.clone(),
            )
        };
        RegistrationEntry { registration, zmq: None, native: false, signed: false }
    }

    /// How the instance is spoken to.
    pub(super) fn dialects(&self) -> Dialects {
        Dialects { native: self.native, moriio: self.zmq.is_some() }
    }

    /// True if both are of one incarnation of one instance that speaks MoRIIO only: all that a
    /// restart could have changed is the same.
    pub(super) fn is_same_incarnation(&self, other: &RegistrationEntry) -> bool {
        let told = |entry: &RegistrationEntry| {
            let Registration { role, mode, dp_size, tp, .. } = entry.registration;
            (role, mode, dp_size, tp, entry.native)
        };
        told(self) == told(other) && self.zmq == other.zmq
    }
}

/// The name of one DP rank: its role and HTTP address are the instance's identity.
pub(super) fn rank_name(beat: &MoriioRegistration, dp_rank: u16) -> EngineId {
    format!("{}/{}/{dp_rank}", letter(beat.role()), beat.http()).into()
}

/// How names of instances begin that the operator named; no other begins so.
pub(super) const STATIC: &str = "static/";

/// The name of a static instance: its role and HTTP address are its identity.
pub(super) fn static_name(named: &StaticInstance) -> EngineId {
    format!("{STATIC}{}/{}", letter(named.role), named.http).into()
}

fn letter(role: Role) -> char {
    match role {
        Role::Prefill => 'P',
        Role::Decode => 'D',
    }
}

/// What a message says.
pub(super) enum DiscoveryMessage {
    /// One engine core that speaks the native dialect.
    Entry(Box<RegistrationEntry>),
    /// All DP ranks of an instance that speaks MoRIIO only.
    MoriioRegistration(MoriioRegistration),
}

/// A message that says nothing of use.
pub(super) struct DiscoveryError {
    pub(super) reason: RejectReason,
    pub(super) why: Arc<str>,
    /// Who it calls itself.
    pub(super) from: Option<Arc<str>>,
}

/// What an instance says of itself, for who counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::core) enum RegistrationKind {
    Well,
    /// It is well, and there are peers that it cannot reach.
    Troubles,
    /// It takes no new requests.
    Drains,
    /// Of MoRIIO, which says no more than that it is there.
    Heartbeat,
    Nothing,
}

/// Reads a message for what it tells.
pub(in crate::core) fn registration_kind(parts: &[Vec<u8>]) -> RegistrationKind {
    match read(parts) {
        Ok(DiscoveryMessage::Entry(entry)) if entry.registration.draining => {
            RegistrationKind::Drains
        }
        Ok(DiscoveryMessage::Entry(entry)) if !entry.registration.troubles.is_empty() => {
            RegistrationKind::Troubles
        }
        Ok(DiscoveryMessage::Entry(_)) => RegistrationKind::Well,
        Ok(DiscoveryMessage::MoriioRegistration(_)) => RegistrationKind::Heartbeat,
        Err(_) => RegistrationKind::Nothing,
    }
}

/// Reads a message; parts after the first are ignored.
pub(super) fn read(parts: &[Vec<u8>]) -> Result<DiscoveryMessage, DiscoveryError> {
    let malformed = |why: DecodeError| DiscoveryError {
        reason: RejectReason::Malformed,
        why: why.rule,
        from: None,
    };
    let first = parts.first().map_or(&[][..], |part| part);
    if first.starts_with(&native::MAGIC) {
        return match native::decode(first).map_err(malformed)? {
            Frame::Register(registration) => {
                Ok(DiscoveryMessage::Entry(Box::new(RegistrationEntry::native(registration))))
            }
            _ => {
                let why = "another message than a registration".into();
                Err(DiscoveryError { reason: RejectReason::Malformed, why, from: None })
            }
        };
    }
    let heard = UncheckedRegistration::decode(parts).map_err(malformed)?;
    let beat = heard.check().map_err(|why| DiscoveryError {
        reason: RejectReason::Unusable,
        why: why.rule,
        from: Some(heard.http_address.clone()),
    })?;
    Ok(match heard.native {
        Some(registration) => {
            let zmq = Some(beat.zmq().clone());
            DiscoveryMessage::Entry(Box::new(RegistrationEntry {
                registration: *registration,
                zmq,
                native: true,
                signed: false,
            }))
        }
        None => DiscoveryMessage::MoriioRegistration(beat),
    })
}
