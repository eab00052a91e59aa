//! What is between this machine and another one, whose doctor waits: both try it together.
//!
//! The one that connects asks and tells; the one that waits does what it is asked, for one other.
//! With a secret it does so only for who has proven it, and without one it connects to nobody but
//! the address that it was asked from.

mod asking;
mod dialogue;
mod findings;
mod interface;
mod rate;
mod serving;

pub(super) use asking::with_peer;
pub(super) use serving::serve;

use super::mori_checks;
use super::ports::{dial, joined, own};
use super::{DoctorArgs, SystemRoots};
use crate::instance::FabricArg;
use crate::process::name;
use dialogue::{DataRoute, DoctorHello, NamedPort, PortTrial, VERSION};
use interface::NetworkInterface;
use kvferry_fabric_host::{DataPath, this_node};
use kvferry_trust::FleetProof;
use std::net::{IpAddr, TcpListener};
use std::path::PathBuf;

/// What this doctor brings to it.
struct PairSide<'a> {
    args: &'a DoctorArgs,
    proof: FleetProof,
    /// Held so that there is somebody to connect to; a server may have others.
    listeners: Vec<(NamedPort, Option<TcpListener>)>,
}

impl PairSide<'_> {
    /// # Errors
    /// A file that is no secret.
    fn new(args: &DoctorArgs, secret: Option<PathBuf>) -> Result<PairSide<'_>, String> {
        let proof = FleetProof::open(secret.as_deref())?;
        let mut listeners = Vec::new();
        for (name, port) in own(args) {
            let Some(port) = port else { continue };
            // Taken by the server itself, which takes connections as well.
            let listener = TcpListener::bind(joined(&args.host_ip, port)).ok();
            let bound = listener.as_ref().and_then(|listener| listener.local_addr().ok());
            let port = bound.map_or(port, |address| address.port());
            listeners.push((NamedPort { name: name.into(), port }, listener));
        }
        Ok(PairSide { args, proof, listeners })
    }

    /// What it says of itself on a connection whose end here is at `local`.
    fn hello(&self, local: IpAddr) -> DoctorHello {
        let host_ip = match self.args.host_ip == super::LOOPBACK {
            true => local.to_canonical().to_string(),
            false => self.args.host_ip.clone(),
        };
        DoctorHello {
            kvferry_doctor: VERSION.into(),
            host_ip,
            node: this_node().to_string(),
            interface: NetworkInterface::of(local, &SystemRoots::of_machine()),
            backend: match self.args.fabric {
                FabricArg::Host => "host".into(),
                FabricArg::Mori => format!("mori-{}", name(&self.args.backend)),
            },
            ports: self.listeners.iter().map(|(port, _)| port.clone()).collect(),
        }
    }

    /// The arguments of `bench` for this way of the bytes.
    fn fabric(&self, route: DataRoute) -> Vec<String> {
        let path = match route {
            DataRoute::SharedMemory => DataPath::SharedMemory,
            DataRoute::Tcp => DataPath::Tcp,
            DataRoute::Mori => {
                return mori_checks::fabric(self.args.backend, None, self.args.mori.as_deref());
            }
        };
        vec!["--fabric=host".into(), format!("--paths={}", path.name())]
    }
}

/// Connects to each of the ports, which are at `host`.
fn reach(host: &str, ports: &[NamedPort]) -> Vec<PortTrial> {
    let one = |NamedPort { name, port }: &NamedPort| {
        let address = joined(host, *port);
        let failure = dial(&address).err().map(Into::into);
        PortTrial { name: name.clone(), address, failure }
    };
    ports.iter().map(one).collect()
}
