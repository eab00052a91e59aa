//! The control plane of an instance, listening.

use super::InstanceTrust;
use kvferry_engine::core::dialect::moriio::address::ZmqAddress;
use kvferry_engine::fabric::{ControlPlane, Endpoint, LinkKind, Refused, bracketed};
use kvferry_trust::FleetProof;
use kvferry_wire::{ProvenPlane, SignedPlane, WireConfig, ZmqPlane};
use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::net::TcpListener;
use std::path::Path;

/// How often ports that follow one another are looked for: others take them in between.
const TRIALS: usize = 16;

/// A control plane with the channels that peers of an instance use.
pub(crate) struct ControlListeners {
    pub(crate) plane: Box<dyn ControlPlane>,
    pub(crate) handshake: Endpoint,
    pub(crate) notify: Endpoint,
    /// As peers are told.
    pub(crate) address: ZmqAddress,
    /// Of the fleet's secret.
    pub(crate) proof: FleetProof,
}

/// Where an instance is to listen, each with the name under which the user gave it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ListenAddresses<'a> {
    pub(crate) host: (&'a str, &'a str),
    /// For handshakes; port 0 is a free one.
    pub(crate) handshake: (&'a str, u16),
    pub(crate) notify: (&'a str, u16),
    /// TP ranks. Where there are peers that speak MoRIIO, each takes the next port of both.
    pub(crate) ranks: u16,
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

    /// Listens at the ports of all ranks.
    ///
    /// # Errors
    /// The port that cannot be had, under the name by which it was given, and what to do.
    fn listen(&self) -> Result<(ZmqPlane, [Endpoint; 2]), String> {
        let mut listening = Err(String::new());
        for _ in 0..TRIALS {
            listening = self.listen_once();
            // What was given is not free the next time either.
            if listening.is_ok() || self.ranks == 1 || self.are_given() {
                break;
            }
        }
        listening
    }

    fn are_given(&self) -> bool {
        self.handshake.1 != 0 && self.notify.1 != 0
    }

    fn listen_once(&self) -> Result<(ZmqPlane, [Endpoint; 2]), String> {
        let (_, host) = self.host;
        let bound = bracketed(host).into_owned();
        let kinds: [fn(u16) -> LinkKind; 2] = [LinkKind::handshake_of, LinkKind::notify_of];
        let places = [self.handshake, self.notify];
        let firsts = self.first_ports(places)?;
        let mut ports = BTreeMap::new();
        for ((kind, (key, given)), first) in kinds.into_iter().zip(places).zip(firsts) {
            for rank in (0..self.ranks).filter(|_| first != 0) {
                let port = first.checked_add(rank).ok_or_else(|| {
                    format!("{key} {given}: rank {rank} has a port above 65535; give a smaller one")
                })?;
                ports.insert(kind(rank), port);
            }
        }
        let config = WireConfig { host: bound, ports: ports.clone(), ..WireConfig::default() };
        let mut plane = ZmqPlane::new(config).map_err(|why| why.to_string())?;
        let mut listen = |channel, key| {
            // A trial names the key; the port may be free by then.
            let port = ports.get(&channel).copied().unwrap_or(0);
            let named =
                |why: Refused| self.check_port((key, port)).err().unwrap_or(why.to_string());
            plane.listen(channel).map_err(named)
        };
        let mut first = |kind: fn(u16) -> LinkKind, key| {
            let first = listen(kind(0), key)?;
            (1..self.ranks).try_for_each(|rank| listen(kind(rank), key).map(|_| ()))?;
            Ok::<Endpoint, String>(first)
        };
        let handshake = first(kinds[0], places[0].0)?;
        let notify = first(kinds[1], places[1].0)?;
        Ok((plane, [handshake, notify]))
    }

    /// The ports of the first rank: those that were given, else of several ranks ones that have free
    /// ones behind them.
    fn first_ports(&self, places: [(&str, u16); 2]) -> Result<[u16; 2], String> {
        // They are held until both are found.
        let mut held = Vec::new();
        let mut firsts = [0; 2];
        for (first, (key, port)) in firsts.iter_mut().zip(places) {
            *first = match port {
                0 if self.ranks > 1 => {
                    let found = (0..TRIALS).find_map(|_| self.free_run(&mut held));
                    found.ok_or_else(|| format!("{key}: no {} free ports in a row", self.ranks))?
                }
                port => port,
            };
        }
        Ok(firsts)
    }

    /// The first of as many free ports as there are ranks, which are held.
    fn free_run(&self, held: &mut Vec<TcpListener>) -> Option<u16> {
        let (_, host) = self.host;
        let bind = |port: u16| TcpListener::bind(format!("{}:{port}", bracketed(host))).ok();
        let first = bind(0)?;
        let port = first.local_addr().ok()?.port();
        let mut run = vec![first];
        for rank in 1..self.ranks {
            run.push(bind(port.checked_add(rank)?)?);
        }
        held.append(&mut run);
        Some(port)
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
        // Who speaks the native dialect asks rank 0 for all.
        let ranks = if trust.moriio_peers { places.ranks.max(1) } else { 1 };
        let (plane, [handshake, notify]) = ListenAddresses { ranks, ..places }.listen()?;
        let (shake, note) = (port_of(&handshake).into(), port_of(&notify).into());
        let address = ZmqAddress { host: host.into(), handshake: shake, notify: note };
        address.check().map_err(|why| format!("host {host}: {why}"))?;
        let plane = SignedPlane::new(plane, proof.clone());
        let plane = ProvenPlane::new(plane, proof.clone(), address.engine().to_string());
        let plane = if trust.moriio_peers { plane } else { plane.without_moriio_peers() };
        Ok(ControlListeners { plane: Box::new(plane), handshake, notify, address, proof })
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
