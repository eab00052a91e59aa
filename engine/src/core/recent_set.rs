//! Tables that forget the oldest.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// The newest names, `max` at most, in the order in which they came.
#[derive(Debug)]
pub(super) struct RecentSet<K> {
    order: BTreeMap<u64, K>,
    places: BTreeMap<K, u64>,
    next: u64,
    max: usize,
}

impl<K: Ord + Clone> RecentSet<K> {
    pub(super) fn new(max: u32) -> RecentSet<K> {
        let (order, places) = (BTreeMap::new(), BTreeMap::new());
        RecentSet { order, places, next: 0, max: max as usize }
    }

    /// Adds a name unless it is there; returns the oldest if that is forgotten for it.
    pub(super) fn insert(&mut self, name: K) -> Option<K> {
        if self.contains(&name) {
            return None;
        }
        self.order.insert(self.next, name.clone());
        self.places.insert(name, self.next);
        self.next += 1;
        let full = self.places.len() > self.max && !planted!("ended-names-without-limit");
        if full { self.pop_oldest() } else { None }
    }

    pub(super) fn remove(&mut self, name: &K) {
        if let Some(place) = self.places.remove(name) {
            self.order.remove(&place);
        }
    }

    pub(super) fn pop_oldest(&mut self) -> Option<K> {
        let (_, name) = self.order.pop_first()?;
        self.places.remove(&name);
        Some(name)
    }

    pub(super) fn contains(&self, name: &K) -> bool {
        self.places.contains_key(name)
    }

    pub(super) fn len(&self) -> usize {
        self.places.len()
    }
}

/// The newest names with a value each, `max` at most, in the order in which they came.
#[derive(Debug)]
pub(super) struct RecentMap<K, V> {
    names: RecentSet<K>,
    values: BTreeMap<K, V>,
}

impl<K: Ord + Clone, V> RecentMap<K, V> {
    pub(super) fn new(max: u32) -> RecentMap<K, V> {
        RecentMap { names: RecentSet::new(max), values: BTreeMap::new() }
    }

    /// Adds a name, or gives one that is there another value.
    pub(super) fn insert(&mut self, name: K, value: V) {
        self.values.insert(name.clone(), value);
        if let Some(oldest) = self.names.insert(name) {
            self.values.remove(&oldest);
        }
    }

    pub(super) fn remove(&mut self, name: &K) {
        if self.values.remove(name).is_some() {
            self.names.remove(name);
        }
    }

    pub(super) fn get(&self, name: &K) -> Option<&V> {
        self.values.get(name)
    }

    pub(super) fn get_mut(&mut self, name: &K) -> Option<&mut V> {
        self.values.get_mut(name)
    }

    /// Removes the names in a range.
    pub(super) fn remove_range(&mut self, range: RangeInclusive<K>) {
        let names = self.values.range(range).map(|(name, _)| name.clone());
        for name in names.collect::<Vec<_>>() {
            self.remove(&name);
        }
    }

    /// Keeps the names that fulfil a condition.
    pub(super) fn retain(&mut self, is_kept: impl Fn(&K) -> bool) {
        let names = self.values.keys().filter(|name| !is_kept(name)).cloned();
        for name in names.collect::<Vec<_>>() {
            self.remove(&name);
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.values.iter()
    }

    pub(super) fn len(&self) -> usize {
        self.names.len()
    }
}
