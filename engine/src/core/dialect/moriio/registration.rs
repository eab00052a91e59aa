//! Registration with a router, which is the heartbeat as well: the same frame every 3 s, one way.
//!
//! ```
//! use kvferry_engine::core::dialect::moriio::address::ZmqAddress;
//! use kvferry_engine::core::dialect::moriio::registration::{MoriioRegistration, UncheckedRegistration};
//! use kvferry_engine::core::ids::{Mode, Role};
//! use std::num::NonZeroU16;
//!
//! let zmq = ZmqAddress::parse("host:10.0.0.1,handshake:6301,notify:61005").unwrap();
//! let (http, one) = ("10.0.0.1:8000".into(), NonZeroU16::MIN);
//! let said = MoriioRegistration::new(Role::Prefill, http, zmq, one, one, Mode::Pull).unwrap();
//! let heard = UncheckedRegistration::decode(&[said.encode()])?.check()?;
//! assert_eq!(heard, said);
//! # Ok::<(), kvferry_engine::core::dialect::DecodeError>(())
//! ```

use super::address::{ZmqAddress, with_incarnation};
use super::{Bin, DecodeError, EncodeError, error, pack};
use crate::authority;
use crate::core::Nanos;
use crate::core::dialect::msgpack::{MsgpackMap, MsgpackValue};
use crate::core::dialect::native::{self, Frame};
use crate::core::ids::{Mode, Role};
use crate::core::message::Registration;
use crate::fabric::Endpoint;
use serde::Serialize;
use std::borrow::Cow;
use std::num::NonZeroU16;
use std::sync::Arc;

/// Time between two registrations, `PING_INTERVAL` of 0.32.0. vllm-router 0.1.17 forgets an
/// instance 4 to 5 s after its last one.
pub const PERIOD: Nanos = Nanos::from_secs(3);

/// What an instance says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MoriioRegistration {
    role: Role,
    http: Endpoint,
    zmq: ZmqAddress,
    dp_size: NonZeroU16,
    tp_size: NonZeroU16,
    mode: Mode,
}

#[derive(Serialize)]
struct MoriioRegistrationWire<'a> {
    r#type: &'static str,
    http_address: &'a Endpoint,
    zmq_address: String,
    dp_size: NonZeroU16,
    tp_size: NonZeroU16,
    transfer_mode: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    kvferry: Option<Bin<'a>>,
}

impl MoriioRegistration {
    /// `http` is `host:port`, with brackets around IPv6; `zmq` has the base ports; `dp_size` is
    /// the global one.
    ///
    /// # Errors
    /// Addresses on which routers fail later, or those of [`ZmqAddress::check`].
    pub fn new(
        role: Role,
        http: Endpoint,
        zmq: ZmqAddress,
        dp_size: NonZeroU16,
        tp_size: NonZeroU16,
        mode: Mode,
    ) -> Result<MoriioRegistration, EncodeError> {
        if !is_http(&http.0) {
            let rule = "http_address that is not host:port";
            return Err(EncodeError { frame: "registration", rule });
        }
        zmq.check()?;
        Ok(MoriioRegistration { role, http, zmq, dp_size, tp_size, mode })
    }

    pub fn role(&self) -> Role {
        self.role
    }

    /// Where its legs are sent.
    pub fn http(&self) -> &Endpoint {
        &self.http
    }

    /// Where its peers find it.
    pub fn zmq(&self) -> &ZmqAddress {
        &self.zmq
    }

    /// Number of DP ranks in all pods.
    pub fn dp_size(&self) -> NonZeroU16 {
        self.dp_size
    }

    /// Number of TP ranks.
    pub fn tp_size(&self) -> NonZeroU16 {
        self.tp_size
    }

    /// Who moves the bytes.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The bytes of the only part.
    pub fn encode(&self) -> Vec<u8> {
        self.pack(self.zmq.to_string(), None)
    }

    /// The same of an instance that speaks the native dialect, too: with its native registration
    /// under one more key, and with a part in the address that tells its incarnation, both of which
    /// others ignore.
    pub fn encode_with(&self, registration: &Registration) -> Vec<u8> {
        let native = native::encode(&Frame::Register(registration.clone()));
        self.pack(with_incarnation(&self.zmq, registration.incarnation), Some(Bin(&native)))
    }

    fn pack(&self, zmq_address: String, kvferry: Option<Bin<'_>>) -> Vec<u8> {
        pack(&MoriioRegistrationWire {
            r#type: match self.role {
                Role::Prefill => "P",
                Role::Decode => "D",
            },
            http_address: &self.http,
            zmq_address,
            dp_size: self.dp_size,
            tp_size: self.tp_size,
            transfer_mode: match self.mode {
                Mode::Push => "WRITE",
                Mode::Pull => "READ",
            },
            kvferry,
        })
    }
}

/// A registration as vllm-router 0.1.17 takes it, with addresses and sizes that may be of no use.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct UncheckedRegistration {
    /// What the instance does.
    pub role: Role,
    /// Where its legs are sent; names the instance within its role.
    pub http_address: Arc<str>,
    /// Where its peers find it.
    pub zmq_address: Arc<str>,
    /// Number of DP ranks; 1 if not told or told as 0.
    pub dp_size: u64,
    /// Number of TP ranks; 1 if not told.
    pub tp_size: u64,
    /// Who moves the bytes.
    pub mode: Mode,
    /// What a native instance says beside it, see [`MoriioRegistration::encode_with`].
    pub native: Option<Box<Registration>>,
}

impl UncheckedRegistration {
    /// The registration; `parts` are those after the sender's identity, of which the first counts.
    /// Texts may be `bin`, and bytes may follow the map.
    ///
    /// # Errors
    /// Names the field that is missing or wrong. vllm-router 0.1.17 drops the same.
    pub fn decode<P: AsRef<[u8]>>(parts: &[P]) -> Result<UncheckedRegistration, DecodeError> {
        let part = parts.first().map_or(&[][..], |part| part.as_ref());
        UncheckedRegistration::read(part).map_err(|rule| error("registration", rule))
    }

    fn read(part: &[u8]) -> Result<UncheckedRegistration, &'static str> {
        let (value, _) = MsgpackValue::first(part)?;
        let map = MsgpackMap::read(value)?;
        let text =
            |name, rule| map.get_loosely(name).and_then(MsgpackValue::text_or_bin).ok_or(rule);
        let size = |name, rule| match map.get_loosely(name).filter(|size| !size.is_nil()) {
            Some(size) => size.number::<u64>().ok_or(rule),
            None => Ok(1),
        };
        Ok(UncheckedRegistration {
            role: match text("type", "type missing or no text")? {
                "P" => Role::Prefill,
                "D" => Role::Decode,
                _ => return Err("unknown type"),
            },
            http_address: text("http_address", "http_address missing or no text")?.into(),
            zmq_address: text("zmq_address", "zmq_address missing or no text")?.into(),
            dp_size: size("dp_size", "dp_size is no size")?.max(1),
            tp_size: size("tp_size", "tp_size is no size")?,
            mode: match text("transfer_mode", "transfer_mode missing or no text")? {
                "WRITE" => Mode::Push,
                "READ" => Mode::Pull,
                _ => return Err("unknown transfer_mode"),
            },
            native: map.get("kvferry").and_then(MsgpackValue::bin).and_then(registration),
        })
    }

    /// The registration of an instance that can be used.
    ///
    /// # Errors
    /// What would fail with each request that is sent there: no address, or sizes out of range.
    pub fn check(&self) -> Result<MoriioRegistration, DecodeError> {
        let size = |size: u64, rule| {
            let size = u16::try_from(size).ok().and_then(NonZeroU16::new);
            size.ok_or_else(|| error("registration", rule))
        };
        let zmq = ZmqAddress::parse(&self.zmq_address)
            .ok_or_else(|| error("registration", "zmq_address that is none"))?;
        let dp_size = size(self.dp_size, "dp_size out of range")?;
        let tp_size = size(self.tp_size, "tp_size out of range")?;
        let http = Endpoint(bracketed(&self.http_address).into());
        MoriioRegistration::new(self.role, http, zmq, dp_size, tp_size, self.mode)
            .map_err(|unsendable| error("registration", unsendable.rule))
    }
}

/// The native registration; none if the bytes are something else, or of another version.
fn registration(bytes: &[u8]) -> Option<Box<Registration>> {
    match native::decode(bytes) {
        Ok(Frame::Register(registration)) => Some(Box::new(registration)),
        _ => None,
    }
}

/// True for `host:port`.
fn is_http(text: &str) -> bool {
    authority::split(text).is_some_and(|(_, port)| port.is_some())
}

/// The address with brackets around IPv6, which vLLM leaves out: the port is behind the last colon.
fn bracketed(text: &str) -> Cow<'_, str> {
    match text.rsplit_once(':') {
        Some((host, port)) if host.contains(':') && !host.starts_with('[') => {
            format!("[{host}]:{port}").into()
        }
        _ => text.into(),
    }
}
