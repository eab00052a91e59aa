//! The control plane of an instance, listening.

use super::InstanceTrust;
use kvferry_engine::core::dialect::moriio::address::ZmqAddress;
use kvferry_engine::fabric::{ControlPlane, Endpoint, LinkKind, Refused, bracketed};
use kvferry_trust::FleetProof;
use kvferry_wire::{ProvenPlane, SignedPlane, WireConfig, ZmqPlane};
use std::io::{self, ErrorKind};
use std::net::TcpListener;
use std::path::Path;

/// A control plane with the channels that peers of an instance use.
pub(crate) struct ControlListeners {
    pub(crate) plane: Box<dyn ControlPlane>,
    pub(crate) handshake: Endpoint,
    pub(crate) notify: Endpoint,
    /// As peers are told.
    pub(crate) address: ZmqAddress,
}

/// Where an instance is to listen, each with the name under which the user gave it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ListenAddresses<'a> {
    pub(crate) host: (&'a str, &'a str),
    /// For handshakes; port 0 is a free one.
    pub(crate) handshake: (&'a str, u16),
    pub(crate) notify: (&'a str, u16),
}

impl ListenAddresses<'_> {
    /// Tries whether all that was given can be listened at, and leaves it.
    ///
    /// # Errors
    /// The name, its value, why it cannot be had and what to do.
    pub(crate) fn check_all(&self) -> Result<(), String> {
        [self.handshake, self.notify].into_iter().try_for_each(|port| self.check_port(port))
    }

    fn check_port(&self, (port_key, port): (&str, u16)) -> Result<(), String> {
        let (key, host) = self.host;
        let listen = |port: u16| {
            let address = format!("{}:{port}", bracketed(host));
            let said =
                |why| format!("cannot listen at {address}: {why}; {}", remedy(&address, &why));
            TcpListener::bind(&address).map_err(said)
        };
        listen(0).map_err(|why| format!("{key} = {host}: {why}"))?;
        listen(port).map_err(|why| format!("{port_key} = {port}: {why}"))?;
        Ok(())
    }
}

impl ControlListeners {
    /// Listens for handshakes and notices, for whom it is `trust` to say, with the fleet's secret of
    /// a file if there is one.
    ///
    /// # Errors
    /// A file that is none, or the address that cannot be had, under the name by which it was given, and what to do.
    pub(crate) fn new(
        places: ListenAddresses<'_>,
        secret_file: Option<&Path>,
        trust: InstanceTrust,
    ) -> Result<ControlListeners, String> {
        let proof = FleetProof::open(secret_file)?;
        trust.announce();
        let (_, host) = places.host;
        let channels =
            [(LinkKind::Handshake, places.handshake.1), (LinkKind::Notify, places.notify.1)];
        let ports = channels.into_iter().filter(|(_, port)| *port != 0).collect();
        let bound = bracketed(host).into_owned();
        let config = WireConfig { host: bound, ports, ..WireConfig::default() };
        let mut plane = ZmqPlane::new(config).map_err(|why| why.to_string())?;
        let mut listen = |channel, port| {
            // A trial names the key; the port may be free by then.
            let named = |why: Refused| places.check_port(port).err().unwrap_or(why.to_string());
            plane.listen(channel).map_err(named)
        };
        let handshake = listen(LinkKind::Handshake, places.handshake)?;
        let notify = listen(LinkKind::Notify, places.notify)?;
        let (shake, note) = (port_of(&handshake).into(), port_of(&notify).into());
        let address = ZmqAddress { host: host.into(), handshake: shake, notify: note };
        address.check().map_err(|why| format!("host {host}: {why}"))?;
        let plane = SignedPlane::new(plane, proof.clone());
        let plane = ProvenPlane::new(plane, proof, address.engine().to_string());
        let plane = if trust.moriio_peers { plane } else { plane.without_moriio_peers() };
        Ok(ControlListeners { plane: Box::new(plane), handshake, notify, address })
    }
}

/// What to do where `HOST:PORT` cannot be listened at.
pub(crate) fn remedy(address: &str, why: &io::Error) -> String {
    let port = address.rsplit_once(':').map_or(address, |(_, port)| port);
    match why.kind() {
        ErrorKind::AddrInUse => format!(
            "end the process that has port {port} (`ss -ltnp 'sport = :{port}'` shows it), or give \
             another port"
        ),
        ErrorKind::PermissionDenied => format!(
            "give a port from 1024, or allow {port}: sysctl -w \
             net.ipv4.ip_unprivileged_port_start={port}"
        ),
        ErrorKind::AddrNotAvailable => {
            "give an address of this machine (`ip -brief address`)".into()
        }
        _ => "give HOST:PORT of this machine".into(),
    }
}

fn port_of(endpoint: &Endpoint) -> u16 {
    let port = endpoint.0.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
    port.expect("a plane listens at a port")
}
