//! Who connects, as far as a budget is concerned, and what is shared fairly by all who do.
//!
//! ```
//! use kvferry_engine::source::{PeerSource, SourceBudget};
//!
//! let source = |text: &str| PeerSource::new(text.parse().unwrap());
//! assert_eq!(source("2001:db8::1"), source("2001:db8::2"));
//!
//! let mut budget = SourceBudget::new(120);
//! budget.change(source("10.0.0.1"), 0, 60);
//! assert_eq!(budget.room(source("10.0.0.1")), 0);
//! assert_eq!(budget.room(source("10.0.0.2")), 60);
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

/// Where a connection comes from: an IPv4 address, or the network of an IPv6 one, as a host usually
/// has all addresses of its network (64 bits).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerSource(IpAddr);

impl PeerSource {
    /// The source of an address.
    pub const fn new(address: IpAddr) -> PeerSource {
        PeerSource(match address.to_canonical() {
            IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
            address => address,
        })
    }
}

impl fmt::Display for PeerSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.is_ipv4() {
            true => write!(f, "{}", self.0),
            false => write!(f, "{}/64", self.0),
        }
    }
}

/// Bytes, or connections, that there may be, and who has how many of them.
#[derive(Debug)]
pub struct SourceBudget {
    most: usize,
    held: usize,
    by_source: BTreeMap<PeerSource, usize>,
}

impl SourceBudget {
    /// A budget of which nobody has anything.
    pub const fn new(most: usize) -> SourceBudget {
        SourceBudget { most, held: 0, by_source: BTreeMap::new() }
    }

    /// By how much a source has less than what is free: alone it gets a half of all, with another one
    /// a third, and whoever comes next finds as much.
    pub fn room(&self, source: PeerSource) -> usize {
        self.most.saturating_sub(self.held).saturating_sub(self.of(source))
    }

    /// What a source has.
    pub fn of(&self, source: PeerSource) -> usize {
        self.by_source.get(&source).copied().unwrap_or(0)
    }

    /// What all have.
    pub const fn held(&self) -> usize {
        self.held
    }

    /// A source that had `before` of something has `now`.
    pub fn change(&mut self, source: PeerSource, before: usize, now: usize) {
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
    pub fn clear(&mut self) {
        self.held = 0;
        self.by_source.clear();
    }

    /// Who has most, if there is more than may be.
    pub fn largest_if_over(&self) -> Option<PeerSource> {
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
            while budget.room(source) > 0 {
                budget.change(source, own, own + 1);
                own += 1;
            }
            own
        });
        assert_eq!(got, [60, 30, 15]);
        assert_eq!((budget.of(sources[1]), budget.held()), (30, 105));
        assert_eq!(budget.largest_if_over(), None);
        budget.change(sources[1], 30, 100);
        assert_eq!(budget.largest_if_over(), Some(sources[1]));
        budget.change(sources[1], 100, 0);
        assert!(budget.room(sources[1]) > 0);
    }

    #[test]
    fn a_host_is_one_source_however_it_writes_its_address() {
        assert_eq!(source("::ffff:10.0.0.1"), source("10.0.0.1"));
        assert_ne!(source("10.0.0.2"), source("10.0.0.1"));
        assert_eq!(source("2001:db8::1"), source("2001:db8::ffff:1"));
        assert_ne!(source("2001:db8:0:1::1"), source("2001:db8::1"));
    }
}
