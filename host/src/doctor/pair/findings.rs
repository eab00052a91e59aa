//! What was seen between two machines, in the words of a remedy.

use super::super::Check;
use super::dialogue::{BULK, ConnectFailure, DoctorHello, PortTrial};
use super::interface::NetworkInterface;
use std::io;
use std::time::Duration;

pub(super) const REACH: &str = "peer-reach";
pub(super) const VERSIONS: &str = "peer-version";
pub(super) const NODE: &str = "peer-node";
pub(super) const SECRET: &str = "peer-secret";
pub(super) const LATENCY: &str = "peer-latency";
pub(super) const CLOCK: &str = "peer-clock";
pub(super) const PORTS: &str = "peer-ports";
pub(super) const NETWORK: &str = "peer-network";

/// How far clocks may be apart until logs and traces of the two no longer line up by eye.
const APART: Duration = Duration::from_millis(100);

/// Bytes of a packet that headers of IPv6 and TCP take at most, with its usual options.
const HEADERS: u32 = 40 + 20 + 20;

/// What to do about a connection that there is not.
fn remedy(address: &str, failure: &ConnectFailure) -> String {
    let port = address.rsplit_once(':').map_or(address, |(_, port)| port);
    match failure {
        ConnectFailure::Refused => format!(
            "see that it is the address of that machine and not of another one, that what listens \
             there does so at this address (`ss -ltn 'sport = :{port}'`), and that no firewall \
             rejects it (`nft list ruleset`); publish the port of a container"
        ),
        ConnectFailure::Silent => format!(
            "a firewall drops it, or the address is of no machine: allow TCP port {port} between the \
             two (`nft list ruleset`, security groups, a NetworkPolicy)"
        ),
        ConnectFailure::Other(_) => {
            "see the route there (`ip route get`), the name and the interface".into()
        }
    }
}

fn why(failure: &ConnectFailure) -> &str {
    match failure {
        ConnectFailure::Refused => "refused: the machine answers, and nobody listens",
        ConnectFailure::Silent => "nothing answers",
        ConnectFailure::Other(why) => why,
    }
}

/// Nobody waits there, or cannot be reached.
pub(super) fn unreached(to: &str, failure: ConnectFailure) -> Check {
    let found = format!("{to}: cannot connect: {}", why(&failure));
    let remedy = remedy(to, &failure);
    Check::fail(REACH, found, format!("start `kvferry doctor --serve ADDR:PORT` there; {remedy}"))
}

pub(super) fn versions(ours: &DoctorHello, theirs: &DoctorHello) -> Check {
    let (ours, theirs) = (&ours.kvferry_doctor, &theirs.kvferry_doctor);
    match ours == theirs {
        true => Check::ok(VERSIONS, format!("both are kvferry {ours}")),
        false => Check::warn(
            VERSIONS,
            format!("this is kvferry {ours}, the other {theirs}"),
            "install the same on both; between an update of the one and of the other they agree on \
             what both know",
        ),
    }
}

/// Whether the two share memory.
pub(super) fn node(ours: &DoctorHello, theirs: &DoctorHello) -> Check {
    let boot = |hello: &DoctorHello| hello.node.split('/').next().map(str::to_owned);
    if ours.node == theirs.node {
        return Check::ok(NODE, "one machine: bytes go by shared memory");
    }
    if boot(ours) != boot(theirs) {
        return Check::ok(NODE, "two machines");
    }
    Check::warn(
        NODE,
        "one machine, with other namespaces of processes or of the network: bytes go by TCP",
        "have them share these (docker --pid=host --network=host; shareProcessNamespace and hostNetwork \
         of a pod), if both are of one trust",
    )
}

/// One question and its answer.
pub(super) struct RoundTrip {
    pub(super) took: Duration,
    /// Nanoseconds that the other's clock is ahead, if the answer was half way.
    ahead: i128,
}

impl RoundTrip {
    /// `ours` was read when it began, `theirs` by the other one.
    pub(super) fn new(took: Duration, ours: u64, theirs: u64) -> RoundTrip {
        let half_way = i128::from(ours) + took.as_nanos() as i128 / 2;
        RoundTrip { took, ahead: i128::from(theirs) - half_way }
    }
}

/// Of the round trips, shortest first.
pub(super) fn latency(trips: &[RoundTrip]) -> Check {
    let us = |at: usize| trips[at].took.as_nanos() as f64 / 1e3;
    let (best, middle, worst) = (us(0), us(trips.len() / 2), us(trips.len() - 1));
    let number = trips.len();
    Check::ok(
        LATENCY,
        format!(
            "{number} round trips of {best:.0} us at best, {middle:.0} us median, {worst:.0} us at worst"
        ),
    )
}

pub(super) fn clock(best: &RoundTrip) -> Check {
    let apart = Duration::from_nanos(best.ahead.unsigned_abs().try_into().unwrap_or(u64::MAX));
    let unsure = best.took / 2;
    let way = if best.ahead < 0 { "behind" } else { "ahead" };
    let found = format!(
        "the other's clock is {:.3} ms {way}, give or take {:.3} ms",
        apart.as_secs_f64() * 1e3,
        unsure.as_secs_f64() * 1e3
    );
    match apart > APART + unsure {
        true => Check::warn(
            CLOCK,
            found,
            "have both follow one clock (chrony, systemd-timesyncd): logs and traces of the two do \
             not line up",
        ),
        false => Check::ok(CLOCK, found),
    }
}

/// Which ports are reached, from here and from there.
pub(super) fn ports(from_here: &[PortTrial], from_there: &Result<Vec<PortTrial>, String>) -> Check {
    let (there, refused) = match from_there {
        Ok(there) => (there.as_slice(), None),
        Err(why) => (&[][..], Some(why)),
    };
    let all = || {
        let here = from_here.iter().map(|trial| (trial, "from here"));
        here.chain(there.iter().map(|trial| (trial, "from there")))
    };
    let failed: Vec<_> =
        all().filter_map(|(trial, way)| Some((trial, way, trial.failure.as_ref()?))).collect();
    if !failed.is_empty() {
        let found = failed.iter().map(|(trial, way, failure)| {
            format!("{} at {} {way}: {}", trial.name, trial.address, why(failure))
        });
        let mut remedies: Vec<_> =
            failed.iter().map(|(trial, _, failure)| remedy(&trial.address, failure)).collect();
        remedies.dedup();
        let found: Vec<_> = found.collect();
        return Check::fail(PORTS, found.join("; "), remedies.join("; "));
    }
    if let Some(why) = refused {
        let remedy =
            "give both the fleet's secret_file, or --host-ip the address that the other sees";
        return Check::warn(PORTS, format!("not tried from there: {why}"), remedy);
    }
    let reached: Vec<_> =
        all().map(|(trial, way)| format!("{} at {} {way}", trial.name, trial.address)).collect();
    match reached.is_empty() {
        true => Check::skip(PORTS, "neither was given --handshake-port or --notify-port"),
        false => Check::ok(PORTS, format!("reached: {}", reached.join(", "))),
    }
}

/// How bytes went that were more than a packet.
pub(super) struct NetworkPath<'a> {
    /// This end of the connection.
    pub(super) local: &'a str,
    /// Bytes of a segment of TCP at most.
    pub(super) segment: Option<u32>,
    /// An interface of this machine that is faster than the one taken.
    pub(super) faster: Option<NetworkInterface>,
    /// For [`BULK`] bytes there and back.
    pub(super) took: Duration,
}

/// Small messages got through, and many bytes do not.
pub(super) fn stalled(ours: &DoctorHello, theirs: &DoctorHello, why: &io::Error) -> Check {
    let mtu = ours.interface.as_ref().map_or(1_500, |interface| interface.mtu);
    Check::fail(
        NETWORK,
        format!(
            "small messages get through, and {BULK} bytes at a time did not: {why}; {}",
            both(ours, theirs)
        ),
        format!(
            "something between the two takes smaller packets and does not say so: `ping -M do -s {} {}` \
             shows it; give both interfaces, the switches and any tunnel one MTU, and let ICMP through",
            mtu.saturating_sub(28),
            theirs.host_ip
        ),
    )
}

fn both(ours: &DoctorHello, theirs: &DoctorHello) -> String {
    let one = |hello: &DoctorHello| {
        let interface = hello.interface.as_ref();
        interface.map_or("an interface that is not known".into(), NetworkInterface::describe)
    };
    format!("{} here, {} there", one(ours), one(theirs))
}

/// What the way to the other one is, and whether it is the best that there is.
pub(super) fn network(ours: &DoctorHello, theirs: &DoctorHello, path: &NetworkPath<'_>) -> Check {
    let segment = path.segment.map(|bytes| format!(", segments of {bytes} bytes"));
    let found = format!(
        "{}{}; {} MiB there and back in {:.1} ms",
        both(ours, theirs),
        segment.unwrap_or_default(),
        BULK >> 20,
        path.took.as_secs_f64() * 1e3
    );
    if ours.host_ip != path.local {
        return Check::warn(
            NETWORK,
            format!(
                "{found}; the route there leaves from {}, and host-ip is {}",
                path.local, ours.host_ip
            ),
            "give --host-ip the address that the route takes, or the route the interface of host-ip (`ip \
             route get`)",
        );
    }
    if let Some(faster) = &path.faster {
        return Check::warn(
            NETWORK,
            format!("{found}; {} is faster", faster.describe()),
            format!("give host-ip, and --peer, the addresses of the network of {}", faster.name),
        );
    }
    let mtus = [ours, theirs].map(|hello| hello.interface.as_ref().map(|interface| interface.mtu));
    let [Some(here), Some(there)] = mtus else { return Check::ok(NETWORK, found) };
    let small = path.segment.filter(|bytes| bytes + HEADERS < here.min(there));
    if here != there || small.is_some() {
        return Check::warn(
            NETWORK,
            format!("{found}; the way between takes less than the larger MTU"),
            "give both interfaces and the switches between one MTU (9000 where they can)",
        );
    }
    Check::ok(NETWORK, found)
}

#[cfg(test)]
mod tests {
    use super::super::super::CheckStatus;
    use super::*;

    fn hello(mtu: u32) -> DoctorHello {
        let interface = NetworkInterface { name: "eth0".into(), mtu, speed: Some(100_000) };
        DoctorHello {
            kvferry_doctor: "1.0.0".into(),
            host_ip: "10.0.0.1".into(),
            node: "b/1/2".into(),
            interface: Some(interface),
            backend: "host".into(),
            ports: Vec::new(),
        }
    }

    fn path() -> NetworkPath<'static> {
        let took = Duration::from_millis(1);
        NetworkPath { local: "10.0.0.1", segment: Some(8_948), faster: None, took }
    }

    #[test]
    fn what_is_wrong_with_the_way_has_its_remedy() {
        let jumbo = hello(9_000);
        assert_eq!(network(&jumbo, &jumbo, &path()).status, CheckStatus::Ok);
        let faster = NetworkInterface { speed: Some(400_000), name: "ens1".into(), mtu: 9_000 };
        for (theirs, path, found, remedy) in [
            (hello(1_500), path(), "takes less than the larger MTU", "one MTU"),
            (hello(9_000), NetworkPath { segment: Some(1_448), ..path() }, "takes less", "one MTU"),
            (
                hello(9_000),
                NetworkPath { local: "192.168.0.1", ..path() },
                "leaves from 192.168.0.1, and host-ip is 10.0.0.1",
                "ip route get",
            ),
            (
                hello(9_000),
                NetworkPath { faster: Some(faster), ..path() },
                "ens1 (MTU 9000, 400 Gb/s) is faster",
                "the network of ens1",
            ),
        ] {
            let check = network(&jumbo, &theirs, &path);
            assert_eq!(check.status, CheckStatus::Warn, "{check:?}");
            assert!(check.found.contains(found), "{check:?}");
            assert!(check.remedy.is_some_and(|said| said.contains(remedy)), "{remedy}");
        }
        let why = io::ErrorKind::WouldBlock.into();
        let check = stalled(&jumbo, &jumbo, &why);
        assert!(check.remedy.is_some_and(|said| said.contains("ping -M do -s 8972 10.0.0.1")));
    }

    #[test]
    fn clocks_are_compared_half_way() {
        let trip = |ms: u64, theirs: u64| RoundTrip::new(Duration::from_millis(ms), 0, theirs);
        let near = clock(&trip(10, 5_000_000));
        assert!(near.found.starts_with("the other's clock is 0.000 ms ahead"), "{near:?}");
        assert_eq!(near.status, CheckStatus::Ok);
        let far = clock(&trip(10, 305_000_000));
        assert!(far.found.starts_with("the other's clock is 300.000 ms ahead"), "{far:?}");
        assert_eq!(far.status, CheckStatus::Warn);
        // As far as it may be by the time that the answer took.
        assert_eq!(clock(&trip(1_000, 0)).status, CheckStatus::Ok);
        let behind = clock(&RoundTrip::new(Duration::ZERO, 200_000_000, 0));
        assert!(behind.found.contains("200.000 ms behind"), "{behind:?}");
    }

    #[test]
    fn ports_that_are_not_reached_are_named_with_the_way() {
        let trial = |name: &str, failure| PortTrial {
            name: name.into(),
            address: "10.0.0.2:7000".into(),
            failure,
        };
        let good = [trial("notify-port", None)];
        assert_eq!(ports(&good, &Ok(Vec::new())).status, CheckStatus::Ok);
        assert_eq!(ports(&[], &Ok(Vec::new())).status, CheckStatus::Skip);
        assert_eq!(ports(&good, &Err("no".into())).status, CheckStatus::Warn);
        let silent = trial("handshake-port", Some(ConnectFailure::Silent));
        let check = ports(&good, &Ok(vec![silent]));
        assert_eq!(check.found, "handshake-port at 10.0.0.2:7000 from there: nothing answers");
        assert!(check.remedy.is_some_and(|said| said.contains("allow TCP port 7000")));
        let refused = trial("handshake-port", Some(ConnectFailure::Refused));
        let check = ports(&[refused], &Ok(Vec::new()));
        assert!(check.found.contains("from here: refused"), "{check:?}");
    }

    #[test]
    fn one_machine_is_told_from_two() {
        let at = |node: &str| DoctorHello { node: node.into(), ..hello(1_500) };
        assert!(node(&at("b/1/2"), &at("b/1/2")).found.contains("shared memory"));
        assert!(node(&at("b/1/2"), &at("c/1/2")).found.contains("two machines"));
        let apart = node(&at("b/1/2"), &at("b/3/2"));
        assert!(apart.remedy.is_some_and(|said| said.contains("shareProcessNamespace")));
    }
}
