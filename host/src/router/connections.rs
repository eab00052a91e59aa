//! The connections of clients that there are, by address, and which is closed for a new one.

use crate::process::lock;
use kvferry_engine::source::PeerSource;
use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use tokio::sync::Notify;

/// All connections of clients. A new one takes the place of the one that has been idle for longest,
/// of the address that has the most idle ones: who floods closes its own.
#[derive(Debug)]
pub(crate) struct ConnectionTable {
    most: usize,
    state: Mutex<TableState>,
}

#[derive(Debug, Default)]
struct TableState {
    total: usize,
    /// Moments at which connections became idle, in their order.
    moments: u64,
    accounts: HashMap<PeerSource, ConnectionAccount>,
}

/// The connections of one address.
#[derive(Debug, Default)]
struct ConnectionAccount {
    total: usize,
    /// Those without a request whose body is whole, by when they became so.
    idle: BTreeMap<u64, Arc<Notify>>,
}

/// No place for a connection: so many are in use, and of its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoPlace {
    pub(crate) most: usize,
    pub(crate) own: usize,
}

impl ConnectionTable {
    pub(crate) fn new(most: usize) -> Arc<ConnectionTable> {
        Arc::new(ConnectionTable { most, state: Mutex::default() })
    }

    /// Takes a connection in, if need be in the place of an idle one.
    pub(crate) fn admit(
        self: &Arc<ConnectionTable>,
        address: IpAddr,
    ) -> Result<Arc<ClientConnection>, NoPlace> {
        let account = PeerSource::new(address);
        let state = &mut *lock(&self.state);
        if state.total >= self.most && !state.close_one(account) {
            let own = state.accounts.get(&account).map_or(0, |own| own.total);
            return Err(NoPlace { most: self.most, own });
        }
        state.total += 1;
        state.moments += 1;
        let (since, closed) = (state.moments, Arc::<Notify>::default());
        let own = state.accounts.entry(account).or_default();
        own.total += 1;
        own.idle.insert(since, closed.clone());
        let (table, idle_since) = (self.clone(), AtomicU64::new(since));
        Ok(Arc::new(ClientConnection { table, account, closed, idle_since }))
    }
}

impl TableState {
    /// Closes an idle connection of who has the most of them, or of the account itself; of another
    /// one only if that has as many connections.
    fn close_one(&mut self, account: PeerSource) -> bool {
        let own = self.accounts.get(&account).map_or(0, |own| own.total);
        let may = |(of, it): &(&PeerSource, &ConnectionAccount)| {
            !it.idle.is_empty() && (**of == account || it.total >= own)
        };
        let all = self.accounts.iter().filter(may);
        let Some((of, _)) = all.max_by_key(|(_, it)| it.idle.len()) else { return false };
        let of = *of;
        let idle = self.accounts.get_mut(&of).and_then(|it| it.idle.pop_first());
        let Some((_, closed)) = idle else { return false };
        closed.notify_one();
        self.gone(of);
        true
    }

    fn gone(&mut self, account: PeerSource) {
        self.total -= 1;
        if let Some(own) = self.accounts.get_mut(&account) {
            own.total -= 1;
            if own.total == 0 {
                self.accounts.remove(&account);
            }
        }
    }
}

/// A connection in use.
const BUSY: u64 = 0;

/// One of the connections, until it is dropped.
#[derive(Debug)]
pub(crate) struct ClientConnection {
    table: Arc<ConnectionTable>,
    account: PeerSource,
    closed: Arc<Notify>,
    /// The moment at which it became idle, or [`BUSY`].
    idle_since: AtomicU64,
}

impl ClientConnection {
    pub(crate) fn account(&self) -> PeerSource {
        self.account
    }

    /// Waits until it is to be closed for another one.
    pub(crate) async fn closed(&self) {
        self.closed.notified().await;
    }

    /// It has a request whose body is whole, and stays until that is answered.
    pub(crate) fn begin(&self) {
        let state = &mut *lock(&self.table.state);
        let since = self.idle_since.load(Ordering::Relaxed);
        let own = state.accounts.get_mut(&self.account);
        // One that is being closed is not there.
        if own.is_some_and(|own| own.idle.remove(&since).is_some()) {
            self.idle_since.store(BUSY, Ordering::Relaxed);
        }
    }

    /// Its request has its answer.
    pub(crate) fn end(&self) {
        if self.idle_since.load(Ordering::Relaxed) != BUSY {
            return;
        }
        let state = &mut *lock(&self.table.state);
        state.moments += 1;
        self.idle_since.store(state.moments, Ordering::Relaxed);
        if let Some(own) = state.accounts.get_mut(&self.account) {
            own.idle.insert(state.moments, self.closed.clone());
        }
    }
}

impl Drop for ClientConnection {
    fn drop(&mut self) {
        let state = &mut *lock(&self.table.state);
        let since = self.idle_since.load(Ordering::Relaxed);
        let own = state.accounts.get_mut(&self.account);
        let was_idle = own.is_some_and(|own| own.idle.remove(&since).is_some());
        // One that was closed for another is not counted any more.
        if was_idle || since == BUSY {
            state.gone(self.account);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(n: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, n])
    }

    #[test]
    fn who_has_the_most_idle_ones_gives_way() {
        let table = ConnectionTable::new(4);
        let quiet = table.admit(at(1)).expect("room");
        let mut flood: Vec<_> =
            (0..20).map(|_| table.admit(at(2)).expect("it closes its own")).collect();
        assert_eq!(lock(&table.state).accounts[&PeerSource::new(at(2))].total, 3);
        // All in use: nobody gives way but who has as many.
        flood.drain(..17);
        flood.iter().for_each(|it| it.begin());
        assert_eq!(table.admit(at(2)).err(), Some(NoPlace { most: 4, own: 3 }));
        let new = table.admit(at(3)).expect("an idle one gives way");
        drop(quiet);
        assert_eq!(lock(&table.state).total, 4);
        flood.iter().for_each(|it| it.end());
        drop((flood, new));
        let state = lock(&table.state);
        assert!(state.total == 0 && state.accounts.is_empty(), "{state:?}");
    }
}
