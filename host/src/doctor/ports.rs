//! Addresses and ports of this machine, and the router's.

use super::{Check, DoctorArgs};
use crate::instance::remedy;
use crate::process;
use kvferry_engine::fabric::bracketed;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::Duration;

const HOST_IP: &str = "host-ip";
const PROXY: &str = "proxy";

/// How long who is connected to may take.
const PATIENCE: Duration = Duration::from_secs(2);

pub(super) fn joined(host: &str, port: u16) -> String {
    format!("{}:{port}", bracketed(host))
}

/// Whether peers can be told the address and it is one of this machine's.
pub(super) fn host_ip(host: &str) -> Check {
    let addresses: Vec<SocketAddr> = match joined(host, 0).to_socket_addrs() {
        Ok(found) => found.collect(),
        Err(why) => {
            let found = format!("{host}: no address: {why}");
            return Check::fail(HOST_IP, found, "give an address, or a name that resolves");
        }
    };
    if addresses.iter().any(|address| address.ip().is_unspecified()) {
        let found = format!("{host} is no address that peers can connect to");
        return Check::fail(HOST_IP, found, "give the one that they reach (`ip -brief address`)");
    }
    if let Err(why) = TcpListener::bind(&*addresses) {
        let found = format!("{host}: cannot listen there: {why}");
        let remedy = "give an address of this machine (`ip -brief address` lists them; in a \
            container those of its network, or docker --network=host)";
        return Check::fail(HOST_IP, found, remedy);
    }
    let reach = match kvferry_trust::are_loopback(addresses.iter().map(SocketAddr::ip)) {
        true => ", which peers on other machines do not reach",
        false => "",
    };
    Check::ok(HOST_IP, format!("{host} is an address of this machine{reach}"))
}

/// The ports of a server, as far as they were given.
pub(super) fn own(args: &DoctorArgs) -> [(&'static str, Option<u16>); 2] {
    [("handshake-port", args.handshake_port), ("notify-port", args.notify_port)]
}

/// The ports that were given, all held together.
pub(super) fn listeners(args: &DoctorArgs) -> Vec<Check> {
    let at = |port: Option<u16>| port.map(|port| joined(&args.host_ip, port));
    let [handshake, notify] = own(args).map(|(name, port)| (name, at(port)));
    let wanted = [handshake, notify, ("discovery", args.discovery.clone())];
    let mut held: Vec<(&str, String, TcpListener)> = Vec::new();
    let mut checks = Vec::new();
    for (name, address) in wanted {
        let Some(address) = address else { continue };
        if let Some((other, ..)) = held.iter().find(|(_, taken, _)| *taken == address) {
            let found = format!("{address} is to be {other}, too");
            checks.push(Check::fail(name, found, format!("give {name} or {other} another port")));
            continue;
        }
        match TcpListener::bind(&address) {
            Ok(listener) => {
                checks.push(Check::ok(name, format!("{address} can be listened at")));
                if !address.ends_with(":0") {
                    held.push((name, address, listener));
                }
            }
            Err(why) => checks.push(taken(name, &address, &why)),
        }
    }
    checks
}

fn taken(name: &'static str, address: &str, why: &io::Error) -> Check {
    let remedy = remedy(address, why);
    Check::fail(name, format!("{address}: cannot listen there: {why}"), remedy)
}

/// A connection there, if it takes any.
///
/// # Errors
/// As [`process::dial`].
pub(super) fn dial(address: &str) -> io::Result<TcpStream> {
    process::dial(address, PATIENCE)
}

/// Whether something listens where the router is to be.
pub(super) fn proxy(address: &str) -> Check {
    let why = match dial(address) {
        Ok(_) => return Check::ok(PROXY, format!("{address} takes connections")),
        Err(why) => why,
    };
    Check::fail(
        PROXY,
        format!("{address}: cannot connect: {why}"),
        format!(
            "start the router there (`kvferry router --discovery {address}`), or open the port in \
             firewalls between"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::super::CheckStatus;
    use super::*;
    use rustix::net::{AddressFamily, SocketType, bind, getsockname, socket};
    use std::io::ErrorKind;

    fn refused(kind: ErrorKind) -> String {
        let check = taken("notify-port", "10.0.0.1:80", &kind.into());
        assert_eq!(check.status, CheckStatus::Fail);
        check.remedy.expect("something to do")
    }

    #[test]
    fn each_reason_has_its_remedy() {
        assert!(refused(ErrorKind::AddrInUse).contains("ss -ltnp 'sport = :80'"));
        assert!(refused(ErrorKind::PermissionDenied).contains("ip_unprivileged_port_start=80"));
        assert!(refused(ErrorKind::AddrNotAvailable).contains("ip -brief address"));
    }

    #[test]
    fn addresses_are_looked_up_and_tried() {
        let loopback = host_ip("127.0.0.1");
        assert_eq!(loopback.status, CheckStatus::Ok);
        assert!(loopback.found.contains("other machines do not reach"), "{loopback:?}");
        // Kept for documentation: no machine has it.
        let foreign = host_ip("192.0.2.1");
        assert_eq!(foreign.status, CheckStatus::Fail);
        assert!(foreign.found.starts_with("192.0.2.1: cannot listen there"), "{foreign:?}");
        assert_eq!(host_ip("0.0.0.0").status, CheckStatus::Fail);
        assert_eq!(host_ip("not a name").status, CheckStatus::Fail);
    }

    #[test]
    fn a_router_is_there_or_not() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        let address = listener.local_addr().expect("bound").to_string();
        assert_eq!(proxy(&address).status, CheckStatus::Ok);
        // Nobody else gets the port, and nobody listens at it.
        let silent = socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
        let loopback = SocketAddr::from(([127, 0, 0, 1], 0));
        bind(&silent, &loopback).expect("loopback");
        let address = getsockname(&silent).expect("bound");
        let address = SocketAddr::try_from(address).expect("of the internet").to_string();
        let gone = proxy(&address);
        assert_eq!(gone.status, CheckStatus::Fail);
        assert!(gone.found.starts_with(&format!("{address}: cannot connect")), "{gone:?}");
        assert_eq!(proxy("127.0.0.1").status, CheckStatus::Fail);
    }
}
