//! Host names and ports as registrations may have them: strings that name one host and nothing else.

use std::net::{Ipv4Addr, Ipv6Addr};

/// Longest host name, and longest label of one (RFC 1123).
const NAME_MAX: usize = 253;
const LABEL_MAX: usize = 63;

/// True for an IP address without brackets, or a host name: labels of letters, digits and hyphens
/// (RFC 952, RFC 1123), and of underscores, which names of containers have. Numbers alone are not a
/// name, since resolvers take them for an address in another form, unless it is a single one that is
/// too large for an address: the short id of a container may have digits only.
pub(crate) fn is_host(text: &str) -> bool {
    if text.parse::<Ipv4Addr>().is_ok() || is_ipv6(text) {
        return true;
    }
    let name = text.strip_suffix('.').unwrap_or(text);
    let is_label = |label: &str| {
        let is_plain = |c: u8| c.is_ascii_alphanumeric() || c == b'-' || c == b'_';
        (1..=LABEL_MAX).contains(&label.len())
            && label.bytes().all(is_plain)
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    let is_number = |label: &str| {
        let hex = label.strip_prefix("0x").or(label.strip_prefix("0X"));
        label.bytes().all(|c| c.is_ascii_digit())
            || hex.is_some_and(|hex| hex.bytes().all(|c| c.is_ascii_hexdigit()))
    };
    let mut labels = name.split('.');
    name.len() <= NAME_MAX
        && labels.clone().all(is_label)
        && (!labels.all(is_number) || is_large_number(name))
}

/// True for decimal digits that no resolver takes for an IPv4 address, in octal neither.
fn is_large_number(name: &str) -> bool {
    let fits = |radix| u32::from_str_radix(name, radix).is_ok();
    let is_decimal = name.bytes().all(|c| c.is_ascii_digit());
    is_decimal && !fits(10) && !(name.starts_with('0') && fits(8))
}

/// An IPv6 address, with or without a zone.
fn is_ipv6(text: &str) -> bool {
    let (address, zone) = text.split_once('%').map_or((text, None), |(at, zone)| (at, Some(zone)));
    let is_plain = |c: u8| c.is_ascii_alphanumeric() || b".-_".contains(&c);
    let zone_fits = zone.is_none_or(|zone| !zone.is_empty() && zone.bytes().all(is_plain));
    address.parse::<Ipv6Addr>().is_ok() && zone_fits
}

/// The host and the port of `HOST` or `HOST:PORT`, where an IPv6 address has brackets.
pub(crate) fn split(text: &str) -> Option<(&str, Option<u16>)> {
    let (host, rest) = match text.strip_prefix('[') {
        Some(rest) => rest.split_once(']').filter(|(host, _)| is_ipv6(host))?,
        None => {
            let (host, rest) = text.split_at(text.find(':').unwrap_or(text.len()));
            (host, rest)
        }
    };
    let is_number = |port: &&str| !port.is_empty() && port.bytes().all(|c| c.is_ascii_digit());
    let port = match rest.strip_prefix(':') {
        Some(port) => Some(Some(port).filter(is_number)?.parse().ok().filter(|port| *port > 0)?),
        None if rest.is_empty() => None,
        None => return None,
    };
    is_host(host).then_some((host, port))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn hosts_and_ports_are_read() {
        for (text, host, port) in [
            ("p0", "p0", None),
            ("10.0.0.1:80", "10.0.0.1", Some(80)),
            ("[::1]", "::1", None),
            ("[fe80::1%eth0]:80", "fe80::1%eth0", Some(80)),
            ("node-1.example.com.:65535", "node-1.example.com.", Some(65_535)),
            ("kvferry_prefill_1:8000", "kvferry_prefill_1", Some(8_000)),
            ("3com.example:1", "3com.example", Some(1)),
            ("p2.0", "p2.0", None),
            ("402938571264:8000", "402938571264", Some(8_000)),
        ] {
            assert_eq!(split(text), Some((host, port)), "{text}");
        }
    }

    #[test]
    fn strings_that_name_another_host_than_it_seems_are_refused() {
        for bad in [
            "",
            ":80",
            "a:",
            "a:0",
            "a:65536",
            "a:+1",
            "a:1:2",
            "::1",
            "::1:80",
            "[::1",
            "[p0]:80",
            "[::1]80",
            "[::1%]:80",
            "[::1]:80@evil:80",
            "http://evil/:80",
            "evil/:80",
            "user@evil:80",
            "evil?:80",
            "evil#:80",
            "a b:1",
            "a\n:1",
            "a..b",
            ".a",
            "-a",
            "a-",
            "127.1",
            "2130706433",
            "4294967295",
            "000000000001",
            "037777777777",
            "0x1234567890ab",
            "402938571264.1",
            "0x7f.1",
            "0X7F000001",
            "1.2.3.4.5",
            "\u{202e}moc.live:80",
            "ev\u{200b}il:80",
            "еvil:80",
        ] {
            assert_eq!(split(bad), None, "{bad:?}");
        }
        assert_eq!(split(&"a".repeat(64)), None);
        assert_eq!(split(&["a"; 128].join(".")), None);
    }

    proptest! {
        /// A host and port that are accepted contain nothing else.
        #[test]
        fn what_is_taken_is_a_host_and_a_port(
            text in "([a-z0-9._:%@/?#\\[\\]\\-]|[^\\x00-\\x7f]){0,24}(:[0-9]{1,6})?",
        ) {
            if let Some((host, port)) = split(&text) {
                let shown = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
                let again = match text.rsplit_once(':').filter(|_| port.is_some()) {
                    Some((_, digits)) => format!("{shown}:{digits}"),
                    None => shown,
                };
                prop_assert_eq!(&again, &text);
                prop_assert!(text.is_ascii() && !text.contains(['@', '/', '?', '#', ' ']));
                prop_assert!(is_host(host));
            }
        }
    }
}
