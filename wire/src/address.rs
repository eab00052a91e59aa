//! Addresses of the form `tcp://host:port`.

use kvferry_engine::fabric::{Endpoint, Refused, unbracketed};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};

/// Connections that the kernel keeps for us. Who comes when there are more waits for a second.
const BACKLOG: i32 = 1_024;

const SCHEME: &str = "tcp://";

/// The address, resolved now.
///
/// # Errors
/// `Invalid` with the address and what is wrong with it.
pub(crate) fn resolve(to: &Endpoint) -> Result<SocketAddr, Refused> {
    let invalid = |why: String| Refused::Invalid(format!("address {to}: {why}").into());
    let rest = to.0.strip_prefix(SCHEME);
    let rest = rest.ok_or_else(|| invalid(format!("does not begin with {SCHEME}")))?;
    let (host, port) = rest.rsplit_once(':').ok_or_else(|| invalid("no port".into()))?;
    let port: u16 = port.parse().map_err(|_| invalid("port is no number up to 65535".into()))?;
    if port == 0 {
        return Err(invalid("port 0".into()));
    }
    let mut found =
        (unbracketed(host), port).to_socket_addrs().map_err(|why| invalid(why.to_string()))?;
    found.next().ok_or_else(|| invalid("host without an address".into()))
}

/// A socket that listens and does not block, and its address as others should be told it. `*` is
/// all addresses of this machine, of IPv6 and of IPv4.
///
/// # Errors
/// What the system says.
pub(crate) fn bind(host: &str, port: u16) -> io::Result<(TcpListener, Endpoint)> {
    let socket = match host {
        "*" => {
            let any = [IpAddr::from(Ipv6Addr::UNSPECIFIED), Ipv4Addr::UNSPECIFIED.into()];
            TcpListener::bind(&any.map(|any| SocketAddr::new(any, port))[..])?
        }
        host => TcpListener::bind((unbracketed(host), port))?,
    };
    socket.set_nonblocking(true)?;
    rustix::net::listen(&socket, BACKLOG)?;
    let bound = socket.local_addr()?;
    Ok((socket, Endpoint::from(format!("{SCHEME}{bound}").as_str())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpStream;

    #[test]
    fn star_is_all_addresses() {
        let (listener, endpoint) = bind("*", 0).expect("a free port");
        let (_, port) = endpoint.0.rsplit_once(':').expect("a port");
        let port: u16 = port.parse().expect("a number");
        let mut addresses = vec![IpAddr::from([127, 0, 0, 1])];
        if TcpListener::bind("[::1]:0").is_ok() {
            addresses.push(Ipv6Addr::LOCALHOST.into());
        }
        for address in addresses {
            let stream = TcpStream::connect((address, port)).expect("it listens there");
            assert_eq!(stream.peer_addr().expect("its end").port(), port);
        }
        drop(listener);
    }

    #[test]
    fn hosts_are_resolved_and_mistakes_named() {
        let resolved = |text: &str| resolve(&Endpoint::from(text));
        assert_eq!(resolved("tcp://127.0.0.1:80"), Ok(([127, 0, 0, 1], 80).into()));
        assert_eq!(resolved("tcp://[::1]:80"), Ok((Ipv6Addr::LOCALHOST, 80).into()));
        assert!(resolved("tcp://localhost:80").is_ok());
        for (bad, why) in [
            ("127.0.0.1:80", "does not begin with tcp://"),
            ("tcp://127.0.0.1", "port"),
            ("tcp://127.0.0.1:0", "port 0"),
            ("tcp://127.0.0.1:99999", "port is no number"),
            ("tcp://no such host:80", "no such host"),
        ] {
            let Err(Refused::Invalid(text)) = resolved(bad) else { panic!("{bad} was taken") };
            assert!(text.contains(why) && text.contains(bad), "{text}");
        }
    }
}
