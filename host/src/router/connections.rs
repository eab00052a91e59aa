//! The connections of clients that there are, by address, and which is closed for a new one.

use crate::process::lock;
use kvferry_engine::source::PeerSource;
use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// A connection whose client has read nothing for this time is closed before other busy ones.
const STALLED: Duration = Duration::from_secs(5);

/// All connections of clients. If the table is full, a new connection replaces another one, chosen
/// by the first of these rules that finds one:
///
/// 1. the one that has been idle for longest, of the address with the most idle ones;
/// 2. the one whose client has read nothing for longest, of the address with the most such ones;
/// 3. the newest busy one, of the address with the most connections, if that address has more than
///    the new one's address will have.
///
/// Rules 1 and 2 skip addresses with fewer connections than the new one's address. So an address
/// that floods the router closes its own connections.
#[derive(Debug)]
pub(crate) struct ConnectionTable {
    most: usize,
    state: Mutex<TableState>,
}

#[derive(Debug, Default)]
struct TableState {
    total: usize,
    /// Number of state changes so far; each change gets the next number, from 1.
    moments: u64,
    accounts: HashMap<PeerSource, ConnectionAccount>,
}

/// The connections of one address. Each is in one map, under the number of its last change.
#[derive(Debug, Default)]
struct ConnectionAccount {
    total: usize,
    /// Connections that have no complete request.
    idle: BTreeMap<u64, Arc<Notify>>,
    /// Connections with a complete request.
    busy: BTreeMap<u64, Arc<Notify>>,
    /// Connections with an answer that the client does not read, and since when.
    stalled: BTreeMap<u64, (Instant, Arc<Notify>)>,
}

impl ConnectionAccount {
    /// Number of connections whose clients do not read, if one of them has not for long; else 0.
    fn stalled(&self) -> usize {
        let first = self.stalled.first_key_value();
        let is_long = first.is_some_and(|(_, (since, _))| since.elapsed() >= STALLED);
        if is_long { self.stalled.len() } else { 0 }
    }

    /// Removes the connection that is to be closed.
    fn take(&mut self, next: NextToClose) -> Option<Arc<Notify>> {
        match next {
            NextToClose::Idle => self.idle.pop_first().map(|(_, closed)| closed),
            NextToClose::Stalled => self.stalled.pop_first().map(|(_, (_, closed))| closed),
            NextToClose::Newest => match self.busy.pop_last() {
                Some((_, closed)) => Some(closed),
                None => self.stalled.pop_last().map(|(_, (_, closed))| closed),
            },
        }
    }

    /// Removes a connection; true if it was there.
    fn remove(&mut self, moment: u64) -> bool {
        self.idle.remove(&moment).is_some()
            || self.busy.remove(&moment).is_some()
            || self.stalled.remove(&moment).is_some()
    }
}

/// Kind of connection that an address closes for a new one.
#[derive(Clone, Copy)]
enum NextToClose {
    /// The one that has been idle for longest.
    Idle,
    /// The one whose client has read nothing for longest.
    Stalled,
    /// The newest that is in use.
    Newest,
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

    /// Admits a connection; closes another one for it if the table is full.
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
        let (moment, closed) = (state.moments, Arc::<Notify>::default());
        let own = state.accounts.entry(account).or_default();
        own.total += 1;
        own.idle.insert(moment, closed.clone());
        let (table, moment) = (self.clone(), AtomicU64::new(moment));
        Ok(Arc::new(ClientConnection { table, account, closed, moment }))
    }
}

impl TableState {
    /// Closes a connection to make room for one of an account.
    fn close_one(&mut self, account: PeerSource) -> bool {
        let Some((of, next)) = self.next_to_close(account) else { return false };
        let closed = self.accounts.get_mut(&of).and_then(|own| own.take(next));
        let Some(closed) = closed else { return false };
        closed.notify_one();
        self.gone(of);
        true
    }

    /// The account, and the kind of its connection, that gives way to one of `account`.
    fn next_to_close(&self, account: PeerSource) -> Option<(PeerSource, NextToClose)> {
        let own = self.accounts.get(&account).map_or(0, |own| own.total);
        let may = |(of, it): &(&PeerSource, &ConnectionAccount)| **of == account || it.total >= own;
        let most = |count: fn(&ConnectionAccount) -> usize| {
            let all = self.accounts.iter().filter(may).map(|(of, it)| (count(it), *of));
            all.filter(|(count, _)| *count > 0).max_by_key(|(count, _)| *count).map(|(_, of)| of)
        };
        let busiest = || {
            let all = self.accounts.iter().filter(|(_, it)| it.total > own + 1);
            all.max_by_key(|(_, it)| it.total).map(|(of, _)| *of)
        };
        let idle = most(|it| it.idle.len()).map(|of| (of, NextToClose::Idle));
        let stalled = || most(ConnectionAccount::stalled).map(|of| (of, NextToClose::Stalled));
        idle.or_else(stalled).or_else(|| busiest().map(|of| (of, NextToClose::Newest)))
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

/// One of the connections, until it is dropped.
#[derive(Debug)]
pub(crate) struct ClientConnection {
    table: Arc<ConnectionTable>,
    account: PeerSource,
    closed: Arc<Notify>,
    /// Number of its last change.
    moment: AtomicU64,
}

impl ClientConnection {
    pub(crate) fn account(&self) -> PeerSource {
        self.account
    }

    /// Waits until it is to be closed for another one.
    pub(crate) async fn closed(&self) {
        self.closed.notified().await;
    }

    /// Marks it as busy: its request is complete, and is to be answered.
    pub(crate) fn begin(&self) {
        self.change(|own, before, now| {
            let closed = own.idle.remove(&before)?;
            own.busy.insert(now, closed);
            Some(())
        });
    }

    /// Marks it as idle: its request has its answer.
    pub(crate) fn end(&self) {
        self.change(|own, before, now| {
            let stalled = own.stalled.remove(&before).map(|(_, closed)| closed);
            let closed = stalled.or_else(|| own.busy.remove(&before))?;
            own.idle.insert(now, closed);
            Some(())
        });
    }

    /// Marks it as one whose client does not read its answer.
    pub(crate) fn stall(&self) {
        self.change(|own, before, now| {
            let closed = own.busy.remove(&before)?;
            own.stalled.insert(now, (Instant::now(), closed));
            Some(())
        });
    }

    /// Marks it as one whose client reads again.
    pub(crate) fn resume(&self) {
        self.change(|own, before, now| {
            let (_, closed) = own.stalled.remove(&before)?;
            own.busy.insert(now, closed);
            Some(())
        });
    }

    /// Moves it to another map of its account, unless it is being closed or `to` returns `None`.
    fn change(&self, to: impl FnOnce(&mut ConnectionAccount, u64, u64) -> Option<()>) {
        let state = &mut *lock(&self.table.state);
        let (before, now) = (self.moment.load(Ordering::Relaxed), state.moments + 1);
        let own = state.accounts.get_mut(&self.account);
        if own.and_then(|own| to(own, before, now)).is_some() {
            state.moments = now;
            self.moment.store(now, Ordering::Relaxed);
        }
    }
}

impl Drop for ClientConnection {
    fn drop(&mut self) {
        let state = &mut *lock(&self.table.state);
        let moment = self.moment.load(Ordering::Relaxed);
        // One that was closed for another is not counted any more.
        if state.accounts.get_mut(&self.account).is_some_and(|own| own.remove(moment)) {
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
    fn the_address_with_the_most_idle_ones_gives_way() {
        let table = ConnectionTable::new(4);
        let quiet = table.admit(at(1)).expect("room");
        let mut flood: Vec<_> =
            (0..20).map(|_| table.admit(at(2)).expect("it closes its own")).collect();
        assert_eq!(lock(&table.state).accounts[&PeerSource::new(at(2))].total, 3);
        // All are busy: an address takes no place from others that have fewer.
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

    /// Connections of an address, all with a request.
    fn busy(table: &Arc<ConnectionTable>, n: u8, count: usize) -> Vec<Arc<ClientConnection>> {
        let begun = || {
            let connection = table.admit(at(n)).expect("room");
            connection.begin();
            connection
        };
        std::iter::repeat_with(begun).take(count).collect()
    }

    fn total(table: &ConnectionTable, n: u8) -> usize {
        lock(&table.state).accounts.get(&PeerSource::new(at(n))).map_or(0, |it| it.total)
    }

    /// True if it is being closed to make room for another.
    fn is_closed(connection: &ClientConnection) -> bool {
        let state = lock(&connection.table.state);
        let moment = connection.moment.load(Ordering::Relaxed);
        let own = state.accounts.get(&connection.account);
        !own.is_some_and(|it| {
            it.idle.contains_key(&moment)
                || it.busy.contains_key(&moment)
                || it.stalled.contains_key(&moment)
        })
    }

    #[test]
    fn one_address_with_all_places_in_use_does_not_keep_others_out() {
        let table = ConnectionTable::new(4);
        let flood = busy(&table, 1, 4);
        let mut others = busy(&table, 2, 2);
        assert_eq!((total(&table, 1), total(&table, 2)), (2, 2));
        let closed: Vec<bool> = flood.iter().map(|it| is_closed(it)).collect();
        assert_eq!(closed, [false, false, true, true], "the newest give way");
        // No address gets more than the others have left.
        assert_eq!(table.admit(at(2)).err(), Some(NoPlace { most: 4, own: 2 }));
        assert_eq!(table.admit(at(1)).err(), Some(NoPlace { most: 4, own: 2 }));
        let third = table.admit(at(3)).err();
        assert_eq!(third, None, "one of two gives way to an address without any");
        drop((flood, others.split_off(0)));
        let state = lock(&table.state);
        assert!(state.total == 0 && state.accounts.is_empty(), "{state:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn connections_that_are_not_read_give_way_before_others_in_use() {
        let table = ConnectionTable::new(4);
        let flood = busy(&table, 1, 4);
        flood[1].stall();
        flood[0].stall();
        flood[0].resume();
        // A client that pauses does not count as one that does not read.
        tokio::time::advance(STALLED / 2).await;
        flood[2].stall();
        tokio::time::advance(STALLED / 2).await;
        let first = table.admit(at(1)).expect("an unread one of its own gives way");
        first.begin();
        let closed: Vec<bool> = flood.iter().map(|it| is_closed(it)).collect();
        assert_eq!(closed, [false, true, false, false]);
        assert_eq!(table.admit(at(1)).err(), Some(NoPlace { most: 4, own: 4 }));
        // Its answer is sent: it is idle again.
        flood[2].end();
        assert!(table.admit(at(2)).is_ok() && is_closed(&flood[2]));
        drop((flood, first));
        assert_eq!(lock(&table.state).total, 0);
    }
}
