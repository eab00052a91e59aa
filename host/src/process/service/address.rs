//! Addresses on the command line.

use std::net::Ipv6Addr;

const FORM: &str = "give HOST:PORT, IPv6 in brackets";

/// Parses the address of a listener that a command connects to: HOST:PORT, port from 1 on.
///
/// # Errors
/// Another form, or a port that is not a number from 1 to 65535.
pub(crate) fn dialled(text: &str) -> Result<String, String> {
    match host_and_port(text)? {
        (_, 0) => Err(format!("port 0 is not a TCP port (1-65535); {FORM}")),
        _ => Ok(text.to_owned()),
    }
}

/// Parses an address to listen at: HOST:PORT, where port 0 means a free port.
///
/// # Errors
/// Another form, or a port that is not a number from 0 to 65535.
pub(crate) fn listened(text: &str) -> Result<String, String> {
    host_and_port(text).map(|_| text.to_owned())
}

/// Host and port of `HOST:PORT`: a name, an IPv4 address or an IPv6 address in brackets.
pub(crate) fn host_and_port(text: &str) -> Result<(&str, u16), String> {
    let (host, port) = text.rsplit_once(':').ok_or_else(|| format!("it has no port; {FORM}"))?;
    if !is_host(host) {
        return Err(format!("{host:?} is not a host name or address; {FORM}"));
    }
    let number = port.parse().ok().filter(|_| port.bytes().all(|b| b.is_ascii_digit()));
    let number =
        number.ok_or_else(|| format!("port {port} is not a TCP port (1-65535); {FORM}"))?;
    Ok((host, number))
}

/// True for a name, an IPv4 address or an IPv6 address in brackets.
pub(crate) fn is_host(text: &str) -> bool {
    match text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        Some(inside) => is_ipv6(inside),
        None => is_name(text),
    }
}

/// True for an IPv6 address, with its interface or without.
pub(crate) fn is_ipv6(text: &str) -> bool {
    let address = text.split_once('%').map_or(text, |(address, _)| address);
    address.parse::<Ipv6Addr>().is_ok()
}

/// True for a host name or an IPv4 address.
pub(crate) fn is_name(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_a_host_and_a_tcp_port() {
        for good in ["127.0.0.1:36367", "router.ns.svc:80", "[::1]:36367", "[fe80::1%eth0]:1"] {
            assert_eq!(dialled(good).as_deref(), Ok(good));
        }
        for (bad, problem) in [
            ("127.0.0.1:notaport", "port notaport is not a TCP port"),
            ("127.0.0.1:70000", "port 70000 is not a TCP port"),
            ("127.0.0.1:+80", "port +80 is not a TCP port"),
            ("127.0.0.1:0", "port 0 is not a TCP port"),
            ("127.0.0.1:", "port  is not a TCP port"),
            ("127.0.0.1", "it has no port"),
            ("::1:36367", "is not a host name or address"),
            ("[::g]:36367", "is not a host name or address"),
            (":36367", "is not a host name or address"),
            ("tcp://127.0.0.1:36367", "is not a host name or address"),
        ] {
            let why = dialled(bad).expect_err(bad);
            assert!(why.contains(problem) && why.ends_with(FORM), "{bad}: {why}");
        }
        assert_eq!(listened("127.0.0.1:0").as_deref(), Ok("127.0.0.1:0"));
    }
}
