//! The control plane of an instance, listening.

use engine::core::dialect::moriio::address::ZmqAddress;
use engine::core::ids::Incarnation;
use engine::fabric::{Channel, ControlPlane, Endpoint, bracketed};
use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};
use wire::{WireConfig, ZmqPlane};

/// A control plane with the channels that peers of an instance use.
pub(crate) struct Ears {
    pub(crate) plane: Box<dyn ControlPlane>,
    pub(crate) handshake: Endpoint,
    pub(crate) notify: Endpoint,
    /// As peers are told.
    pub(crate) address: ZmqAddress,
}

impl Ears {
    /// Listens at a host for handshakes and notices; port 0 is a free one.
    ///
    /// # Errors
    /// The address that cannot be had, and why.
    pub(crate) fn new(host: &str, ports: [u16; 2]) -> Result<Ears, String> {
        let channels = [Channel::Handshake, Channel::Notify];
        let given: BTreeMap<_, _> =
            channels.into_iter().zip(ports).filter(|(_, port)| *port != 0).collect();
        let bound = bracketed(host).into_owned();
        let config = WireConfig { host: bound, ports: given, ..WireConfig::default() };
        let mut plane = ZmqPlane::new(config).map_err(|why| why.to_string())?;
        let mut listen = |channel| plane.listen(channel).map_err(|why| why.to_string());
        let (handshake, notify) = (listen(Channel::Handshake)?, listen(Channel::Notify)?);
        let (shake, note) = (port_of(&handshake).into(), port_of(&notify).into());
        let address = ZmqAddress { host: host.into(), handshake: shake, notify: note };
        address.check().map_err(|why| format!("host {host}: {why}"))?;
        Ok(Ears { plane: Box::new(plane), handshake, notify, address })
    }
}

fn port_of(endpoint: &Endpoint) -> u16 {
    let port = endpoint.0.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
    port.expect("a plane listens at a port")
}

/// A life that begins now.
pub(crate) fn born() -> Incarnation {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    Incarnation(since.map_or(1, |since| since.as_micros() as u64))
}
