//! Which instances may register: those that the operator listed, and of one address no more than
//! are left for others.

use super::io::RouterConfig;
use super::rejections::RejectReason;
use crate::fabric::Endpoint;
use crate::source::PeerSource;
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;
use std::sync::Arc;

/// Instances by where they serve HTTP: `HOST`, `HOST:PORT` or `ADDRESS/BITS`, IPv6 in brackets
/// where a port follows. A name stands for itself and not for its addresses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedInstances {
    places: Arc<[ListedPlace]>,
    /// Those that sign their registrations are in it, too, wherever they serve.
    has_signed: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum ListedPlace {
    /// A name or an address, at any port or at this one.
    Host(Box<str>, Option<u16>),
    /// Addresses that begin with these bits.
    Prefix(IpAddr, u8),
}

impl ListedInstances {
    /// Addresses that lead to this machine.
    pub fn loopback() -> ListedInstances {
        "127.0.0.0/8,::1,localhost".parse().expect("a list")
    }

    /// With all instances that sign their registrations.
    pub fn or_signed(self) -> ListedInstances {
        ListedInstances { has_signed: true, ..self }
    }

    /// True if an instance at this HTTP address, which signs or not, is in the list.
    pub(super) fn has(&self, http: &Endpoint, is_signed: bool) -> bool {
        if self.has_signed && is_signed {
            return true;
        }
        let Some((host, port)) = split(&http.0) else { return false };
        self.places.iter().any(|place| match place {
            ListedPlace::Host(name, at) => *name == host && at.is_none_or(|at| Some(at) == port),
            ListedPlace::Prefix(begin, bits) => {
                host.parse().is_ok_and(|address| is_within(address, *begin, *bits))
            }
        })
    }
}

impl FromStr for ListedInstances {
    type Err = String;

    fn from_str(text: &str) -> Result<ListedInstances, String> {
        let places = text.split(',').map(|one| {
            place(one.trim()).ok_or_else(|| {
                format!(
                    "{one:?} is no HOST, HOST:PORT or ADDRESS/BITS (IPv6 in brackets before a port)"
                )
            })
        });
        let places = places.collect::<Result<_, String>>()?;
        Ok(ListedInstances { places, has_signed: false })
    }
}

fn place(text: &str) -> Option<ListedPlace> {
    if let Some((begin, bits)) = text.split_once('/') {
        let (begin, bits) = (begin.parse::<IpAddr>().ok()?, bits.parse::<u8>().ok()?);
        let most = if begin.is_ipv4() { 32 } else { 128 };
        return (bits <= most).then_some(ListedPlace::Prefix(begin, bits));
    }
    let (host, port) = split(text)?;
    Some(ListedPlace::Host(host, port))
}

/// Host and port as they are compared: addresses in their usual form, names in lower case.
fn split(text: &str) -> Option<(Box<str>, Option<u16>)> {
    if let Ok(address) = text.parse::<IpAddr>() {
        return Some((address.to_canonical().to_string().into(), None));
    }
    let (host, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, rest)) => (host.parse::<Ipv6Addr>().ok()?.to_string(), rest),
        None => match text.split_once(':') {
            Some((host, _)) => (host.to_owned(), &text[host.len()..]),
            None => (text.to_owned(), ""),
        },
    };
    let port = match port.strip_prefix(':') {
        Some(port) => Some(port.parse().ok()?),
        None if port.is_empty() => None,
        None => return None,
    };
    let is_name = |host: &str| {
        !host.is_empty() && host.chars().all(|c| c.is_ascii_alphanumeric() || "-._:".contains(c))
    };
    let host = match host.parse::<IpAddr>() {
        Ok(address) => address.to_canonical().to_string(),
        Err(_) => host.to_ascii_lowercase(),
    };
    is_name(&host).then(|| (host.into(), port))
}

fn is_within(address: IpAddr, begin: IpAddr, bits: u8) -> bool {
    match (address.to_canonical(), begin) {
        (IpAddr::V4(address), IpAddr::V4(begin)) => {
            let mask = u32::MAX.checked_shl(32 - u32::from(bits)).unwrap_or(0);
            (address.to_bits() ^ begin.to_bits()) & mask == 0
        }
        (IpAddr::V6(address), IpAddr::V6(begin)) => {
            let mask = u128::MAX.checked_shl(128 - u32::from(bits)).unwrap_or(0);
            (address.to_bits() ^ begin.to_bits()) & mask == 0
        }
        _ => false,
    }
}

/// Whether an instance may be known here at all: its prompts, and the key of the operator, go to
/// where it says that it serves. It is signed if who registered it has proven to know the secret.
pub(super) fn admit(
    http: &Endpoint,
    is_signed: bool,
    config: &RouterConfig,
) -> Result<(), RejectReason> {
    if config.require_signed && !is_signed {
        return Err(RejectReason::Unsigned);
    }
    match config.listed.as_ref().is_none_or(|listed| listed.has(http, is_signed)) {
        true => Ok(()),
        false => Err(RejectReason::Unlisted),
    }
}

/// The source of all connections beyond those of which it is remembered whence they came.
pub(super) const UNNAMED: PeerSource = PeerSource::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED));

/// Whence a registration came; none of what is no IP address, as in a simulation.
pub(super) fn source_of(from: &Endpoint) -> Option<PeerSource> {
    let (host, _) = split(from.0.strip_prefix("tcp://").unwrap_or(&from.0))?;
    host.parse().ok().map(PeerSource::new)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_names_addresses_and_prefixes() {
        let listed: ListedInstances =
            "Node-1, node-2:8000,10.1.0.0/16,192.168.0.7,[2001:db8::1]:80,2001:db8:1::/48,0.0.0.0/32"
                .parse()
                .expect("a list");
        for taken in [
            "node-1:1",
            "NODE-1:2",
            "node-2:8000",
            "10.1.255.3:8000",
            "192.168.0.7:9",
            "[2001:db8::1]:80",
            "[2001:db8:1:2::3]:80",
            "[::ffff:10.1.2.3]:80",
        ] {
            assert!(listed.has(&taken.into(), false), "{taken}");
        }
        for other in [
            "node-2:8001",
            "node-1.evil:1",
            "10.2.0.1:8000",
            "10.1.0.1.evil:80",
            "[2001:db8::1]:81",
            "[2001:db8:2::3]:80",
            "evil@node-1:1",
            "",
            "[::1",
        ] {
            assert!(!listed.has(&other.into(), false), "{other}");
        }
        for bad in ["", "a,,b", "10.0.0.0/33", "a/8", "a:b", "a:99999", "http://a"] {
            assert!(bad.parse::<ListedInstances>().is_err(), "{bad}");
        }
        let own = ListedInstances::loopback();
        assert!(own.has(&"127.1.2.3:80".into(), false) && own.has(&"[::1]:80".into(), false));
        assert!(own.has(&"localhost:80".into(), false) && !own.has(&"0.0.0.0:80".into(), false));
    }

    #[test]
    fn a_source_is_an_address() {
        let source = |from: &str| source_of(&from.into()).map(|it| it.to_string());
        assert_eq!(source("tcp://10.0.0.1:5").as_deref(), Some("10.0.0.1"));
        assert_eq!(source("tcp://[2001:db8::7]:5").as_deref(), Some("2001:db8::/64"));
        assert_eq!((source("sim://p0"), source("p0")), (None, None));
    }
}
