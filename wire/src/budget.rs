//! What is shared fairly by those who dial.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};

/// Where a connection comes from: an IPv4 address, or the network of an IPv6 one, as a host has all
/// addresses of its network (64 bits).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PeerSource(IpAddr);

impl PeerSource {
    pub(crate) fn new(address: IpAddr) -> PeerSource {
        PeerSource(match address.to_canonical() {
            IpAddr::V6(address) => {
                let network = u128::from(address) >> 64 << 64;
                IpAddr::V6(Ipv6Addr::from(network))
            }
            address => address,
        })
    }
}

/// Bytes, or connections, that there may be, and who has how many of them.
#[derive(Debug)]
pub(crate) struct SourceBudget {
    most: usize,
    held: usize,
    by_source: BTreeMap<PeerSource, usize>,
}

impl SourceBudget {
    pub(crate) fn new(most: usize) -> SourceBudget {
        SourceBudget { most, held: 0, by_source: BTreeMap::new() }
    }

    /// True if a source has less than what is free: alone it gets a half of all, with another one a
    /// third, and whoever comes next finds as much.
    pub(crate) fn has_room(&self, source: PeerSource) -> bool {
        let own = self.by_source.get(&source).copied().unwrap_or(0);
        own < self.most.saturating_sub(self.held)
    }

    /// A source that had `before` has `now`.
    pub(crate) fn change(&mut self, source: PeerSource, before: usize, now: usize) {
        if before == now {
            return;
        }
        self.held = self.held + now - before;
        let own = self.by_source.entry(source).or_default();
        *own = *own + now - before;
        if *own == 0 {
            self.by_source.remove(&source);
        }
    }

    /// Nobody has anything.
    pub(crate) fn clear(&mut self) {
        self.held = 0;
        self.by_source.clear();
    }

    /// Who has most, if there is more than may be.
    pub(crate) fn largest_if_over(&self) -> Option<PeerSource> {
        if self.held <= self.most {
            return None;
        }
        self.by_source.iter().max_by_key(|(_, held)| **held).map(|(source, _)| *source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(address: &str) -> PeerSource {
        PeerSource::new(address.parse().expect("an address"))
    }

    #[test]
    fn who_comes_later_finds_room() {
        let mut budget = SourceBudget::new(120);
        let sources = ["10.0.0.1", "10.0.0.2", "10.0.0.3"].map(source);
        let got = sources.map(|source| {
            let mut own = 0;
            while budget.has_room(source) {
                budget.change(source, own, own + 1);
                own += 1;
            }
            own
        });
        assert_eq!(got, [60, 30, 15]);
        assert_eq!(budget.largest_if_over(), None);
        budget.change(sources[1], 30, 100);
        assert_eq!(budget.largest_if_over(), Some(sources[1]));
        budget.change(sources[1], 100, 0);
        assert!(budget.has_room(sources[1]));
    }

    #[test]
    fn a_host_is_one_source_however_it_writes_its_address() {
        assert_eq!(source("::ffff:10.0.0.1"), source("10.0.0.1"));
        assert_ne!(source("10.0.0.2"), source("10.0.0.1"));
        assert_eq!(source("2001:db8::1"), source("2001:db8::ffff:1"));
        assert_ne!(source("2001:db8:0:1::1"), source("2001:db8::1"));
    }
}
