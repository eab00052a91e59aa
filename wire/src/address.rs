//! Addresses of the form `tcp://host:port`.

use kvferry_engine::fabric::{Endpoint, Refused};
use std::net::{SocketAddr, ToSocketAddrs};

const SCHEME: &str = "tcp://";

/// The address as libzmq takes it, resolved now: libzmq itself takes any host and any port, and
/// never says that there is no such.
///
/// # Errors
/// `Invalid` with the address and what is wrong with it.
pub(crate) fn resolve(to: &Endpoint) -> Result<String, Refused> {
    let invalid = |why: String| Refused::Invalid(format!("address {to}: {why}").into());
    let rest = to.0.strip_prefix(SCHEME);
    let rest = rest.ok_or_else(|| invalid(format!("does not begin with {SCHEME}")))?;
    let (host, port) = rest.rsplit_once(':').ok_or_else(|| invalid("no port".into()))?;
    let port: u16 = port.parse().map_err(|_| invalid("port is no number up to 65535".into()))?;
    if port == 0 {
        return Err(invalid("port 0".into()));
    }
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let mut found = (bare, port).to_socket_addrs().map_err(|why| invalid(why.to_string()))?;
    let address = found.next().ok_or_else(|| invalid("host without an address".into()))?;
    Ok(format!("{SCHEME}{address}"))
}

/// The address as others should be told it: libzmq names IPv4 addresses in their IPv6 form.
pub(crate) fn canonical_endpoint(bound: &str) -> String {
    let address = bound.strip_prefix(SCHEME).and_then(|rest| rest.parse::<SocketAddr>().ok());
    match address {
        Some(address) => {
            format!("{SCHEME}{}", SocketAddr::new(address.ip().to_canonical(), address.port()))
        }
        None => bound.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_told_as_they_are_dialled() {
        assert_eq!(canonical_endpoint("tcp://[::ffff:127.0.0.1]:80"), "tcp://127.0.0.1:80");
        assert_eq!(canonical_endpoint("tcp://[::1]:80"), "tcp://[::1]:80");
        assert_eq!(canonical_endpoint("tcp://10.0.0.1:80"), "tcp://10.0.0.1:80");
    }

    #[test]
    fn hosts_are_resolved_and_mistakes_named() {
        let resolved = |text: &str| resolve(&Endpoint::from(text));
        assert_eq!(resolved("tcp://127.0.0.1:80"), Ok("tcp://127.0.0.1:80".into()));
        assert_eq!(resolved("tcp://[::1]:80"), Ok("tcp://[::1]:80".into()));
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
