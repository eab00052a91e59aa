//! Named deadlines, ordered by (deadline, sequence): equal deadlines fire in the order in which
//! they were armed.

use super::time::Nanos;
use std::collections::BTreeMap;

/// A table of deadlines with one entry per name.
#[derive(Debug, Clone)]
pub(super) struct Timers<K> {
    queue: BTreeMap<(Nanos, u64), K>,
    armed: BTreeMap<K, (Nanos, u64)>,
    sequence: u64,
}

impl<K> Default for Timers<K> {
    fn default() -> Self {
        Timers { queue: BTreeMap::new(), armed: BTreeMap::new(), sequence: 0 }
    }
}

impl<K: Ord + Clone> Timers<K> {
    /// Sets the deadline of `key`, replacing an earlier one.
    pub(super) fn arm(&mut self, key: K, at: Nanos) {
        self.sequence += 1;
        let place = (at, self.sequence);
        if let Some(old) = self.armed.insert(key.clone(), place) {
            self.queue.remove(&old);
        }
        self.queue.insert(place, key);
    }

    /// Sets the deadline of `key` unless it has one.
    pub(super) fn arm_if_idle(&mut self, key: K, at: Nanos) {
        if !self.armed.contains_key(&key) {
            self.arm(key, at);
        }
    }

    /// Removes the deadline of `key`; true if there was one.
    pub(super) fn cancel(&mut self, key: &K) -> bool {
        match self.armed.remove(key) {
            Some(place) => self.queue.remove(&place).is_some(),
            None => false,
        }
    }

    /// Takes the oldest deadline that is due at `now`.
    pub(super) fn pop_due(&mut self, now: Nanos) -> Option<K> {
        let entry = self.queue.first_entry()?;
        if entry.key().0 > now {
            return None;
        }
        let key = entry.remove();
        self.armed.remove(&key);
        Some(key)
    }

    pub(super) fn next(&self) -> Option<Nanos> {
        self.queue.first_key_value().map(|((at, _), _)| *at)
    }

    pub(super) fn len(&self) -> usize {
        self.armed.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_deadlines_fire_in_arming_order() {
        let mut timers = Timers::default();
        for name in [5, 3, 9, 1] {
            timers.arm(name, Nanos(10));
        }
        timers.arm(7, Nanos(4));
        let fired: Vec<_> = std::iter::from_fn(|| timers.pop_due(Nanos(10))).collect();
        assert_eq!(fired, [7, 5, 3, 9, 1]);
        assert_eq!(timers.len(), 0);
    }

    #[test]
    fn rearming_replaces_and_cancel_removes() {
        let mut timers = Timers::default();
        timers.arm("a", Nanos(1));
        timers.arm("b", Nanos(2));
        timers.arm("a", Nanos(3));
        assert_eq!(timers.next(), Some(Nanos(2)));
        assert!(timers.cancel(&"b"));
        assert!(!timers.cancel(&"b"));
        assert_eq!(timers.pop_due(Nanos(2)), None);
        assert_eq!(timers.pop_due(Nanos(3)), Some("a"));
    }
}
