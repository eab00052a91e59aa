//! Bytes of clients' bodies in memory: one budget, shared by address.

use crate::process::lock;
use kvferry_engine::source::{PeerSource, SourceBudget};
use std::sync::{Arc, Mutex};

/// All bytes that may be held. An address gets no more than is left for all others then: the first
/// half of them, the next one half of what is left, so that there is always room for who comes.
#[derive(Debug)]
pub(crate) struct BodyBudget(Mutex<SourceBudget>);

impl BodyBudget {
    pub(crate) fn new(most: usize) -> Arc<BodyBudget> {
        Arc::new(BodyBudget(Mutex::new(SourceBudget::new(most))))
    }

    /// Bytes of one body, none so far.
    pub(crate) fn body(self: &Arc<BodyBudget>, account: PeerSource) -> BodyBytes {
        BodyBytes { budget: self.clone(), account, bytes: 0 }
    }
}

/// The bytes of one body, until it is dropped.
#[derive(Debug)]
pub(crate) struct BodyBytes {
    budget: Arc<BodyBudget>,
    account: PeerSource,
    bytes: usize,
}

impl BodyBytes {
    /// Takes more of them in.
    ///
    /// # Errors
    /// So many bytes are held for its address, and for all.
    pub(crate) fn add(&mut self, more: usize) -> Result<(), (usize, usize)> {
        let held = &mut *lock(&self.budget.0);
        // They count twice: its address has them, and they are not free any more.
        if more.saturating_mul(2) > held.room(self.account) {
            return Err((held.of(self.account), held.held()));
        }
        held.change(self.account, 0, more);
        self.bytes += more;
        Ok(())
    }
}

impl Drop for BodyBytes {
    fn drop(&mut self) {
        lock(&self.budget.0).change(self.account, self.bytes, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_always_room_for_who_comes() {
        let budget = BodyBudget::new(96);
        let taken = |n: u8| {
            let mut body = budget.body(PeerSource::new([10, 0, 0, n].into()));
            while body.add(1).is_ok() {}
            body
        };
        let bodies: Vec<_> = (0..3).map(taken).collect();
        assert_eq!(bodies.iter().map(|it| it.bytes).collect::<Vec<_>>(), [48, 24, 12]);
        drop(bodies);
        let held = lock(&budget.0);
        let of = |n: u8| held.of(PeerSource::new([10, 0, 0, n].into()));
        assert!(held.held() == 0 && (0..3).all(|n| of(n) == 0), "{held:?}");
    }
}
