//! The network interface that a connection goes by.

use super::super::{SystemRoots, line};
use serde::{Deserialize, Serialize};
use std::fs;
use std::net::IpAddr;
use std::path::Path;

/// An interface, as the kernel has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct NetworkInterface {
    pub(super) name: String,
    /// Bytes of a packet at most.
    pub(super) mtu: u32,
    /// In Mb/s; none where there is no cable, as in virtual machines.
    pub(super) speed: Option<u32>,
}

impl NetworkInterface {
    /// The one that has this address.
    pub(super) fn of(address: IpAddr, roots: &SystemRoots) -> Option<NetworkInterface> {
        let all = if_addrs::get_if_addrs().unwrap_or_default();
        let its = all.into_iter().find(|interface| interface.ip() == address.to_canonical())?;
        NetworkInterface::named(&its.name, &roots.sys)
    }

    fn named(name: &str, sys: &Path) -> Option<NetworkInterface> {
        let folder = sys.join("class/net").join(name);
        let mtu = line(&folder.join("mtu"))?.parse().ok()?;
        // Without a link it is -1, or cannot be read.
        let speed = line(&folder.join("speed")).and_then(|text| text.parse().ok());
        Some(NetworkInterface { name: name.into(), mtu, speed: speed.filter(|speed| *speed > 0) })
    }

    /// One of this machine with a link that is at least twice as fast.
    pub(super) fn faster(&self, roots: &SystemRoots) -> Option<NetworkInterface> {
        let ours = self.speed?;
        let names = fs::read_dir(roots.sys.join("class/net")).ok()?.flatten();
        let all = names
            .filter_map(|entry| NetworkInterface::named(entry.file_name().to_str()?, &roots.sys));
        all.filter(|other| other.speed.is_some_and(|speed| speed / 2 >= ours))
            .max_by_key(|other| other.speed)
    }

    /// As `eth0 (MTU 9000, 100 Gb/s)`.
    pub(super) fn describe(&self) -> String {
        let NetworkInterface { name, mtu, speed } = self;
        let speed = speed.map(|speed| format!(", {} Gb/s", f64::from(speed) / 1e3));
        format!("{name} (MTU {mtu}{})", speed.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::tests::TempTree;
    use super::*;

    #[test]
    fn a_faster_interface_is_found() {
        let tree = TempTree::new(
            "interfaces",
            &[
                ("sys/class/net/eth0/mtu", "1500\n"),
                ("sys/class/net/eth0/speed", "10000\n"),
                ("sys/class/net/ens1/mtu", "9000\n"),
                ("sys/class/net/ens1/speed", "400000\n"),
                ("sys/class/net/down/mtu", "9000\n"),
                ("sys/class/net/down/speed", "-1\n"),
            ],
        );
        let roots = tree.roots();
        let named = |name| NetworkInterface::named(name, &roots.sys);
        let slow = named("eth0").expect("it is there");
        let fast = slow.faster(&roots).expect("there is one");
        assert_eq!(fast.describe(), "ens1 (MTU 9000, 400 Gb/s)");
        assert_eq!(fast.faster(&roots), None);
        let down = named("down").expect("it is there");
        assert_eq!((down.describe(), down.faster(&roots)), ("down (MTU 9000)".into(), None));
        assert_eq!(named("none"), None);
    }

    #[test]
    fn loopback_is_an_interface() {
        let loopback = NetworkInterface::of([127, 0, 0, 1].into(), &SystemRoots::of_machine());
        assert!(loopback.is_some_and(|it| it.mtu > 1_000));
    }
}
