//! Bytes of clients' bodies in memory: one budget, shared by address.

use crate::process::lock;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

/// All bytes that may be held. An address gets no more than is left for all others then: the first
/// half of them, the next one half of what is left, so that there is always room for who comes.
#[derive(Debug)]
pub(crate) struct BodyBudget {
    most: usize,
    held: Mutex<HeldBytes>,
}

#[derive(Debug, Default)]
struct HeldBytes {
    total: usize,
    accounts: HashMap<IpAddr, usize>,
}

impl BodyBudget {
    pub(crate) fn new(most: usize) -> Arc<BodyBudget> {
        Arc::new(BodyBudget { most, held: Mutex::default() })
    }

    /// Bytes of one body, none so far.
    pub(crate) fn body(self: &Arc<BodyBudget>, account: IpAddr) -> BodyBytes {
        BodyBytes { budget: self.clone(), account, bytes: 0 }
    }
}

/// The bytes of one body, until it is dropped.
#[derive(Debug)]
pub(crate) struct BodyBytes {
    budget: Arc<BodyBudget>,
    account: IpAddr,
    bytes: usize,
}

impl BodyBytes {
    /// Takes more of them in.
    ///
    /// # Errors
    /// So many bytes are held for its address, and for all.
    pub(crate) fn add(&mut self, more: usize) -> Result<(), (usize, usize)> {
        let held = &mut *lock(&self.budget.held);
        let own = held.accounts.get(&self.account).copied().unwrap_or(0);
        let left = self.budget.most.saturating_sub(held.total).saturating_sub(more);
        if own + more > left {
            return Err((own, held.total));
        }
        held.total += more;
        held.accounts.insert(self.account, own + more);
        self.bytes += more;
        Ok(())
    }
}

impl Drop for BodyBytes {
    fn drop(&mut self) {
        let held = &mut *lock(&self.budget.held);
        held.total -= self.bytes;
        if let Some(own) = held.accounts.get_mut(&self.account) {
            *own -= self.bytes;
            if *own == 0 {
                held.accounts.remove(&self.account);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_always_room_for_who_comes() {
        let budget = BodyBudget::new(96);
        let taken = |n: u8| {
            let mut body = budget.body(IpAddr::from([10, 0, 0, n]));
            while body.add(1).is_ok() {}
            body
        };
        let bodies: Vec<_> = (0..3).map(taken).collect();
        assert_eq!(bodies.iter().map(|it| it.bytes).collect::<Vec<_>>(), [48, 24, 12]);
        drop(bodies);
        let held = lock(&budget.held);
        assert!(held.total == 0 && held.accounts.is_empty(), "{held:?}");
    }
}
