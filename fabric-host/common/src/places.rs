//! Places for connections, of which there are only so many at a time. Who comes when all are taken
//! takes that of another who has said nothing worth keeping yet: of the address that has most of
//! them, who says nothing for longest.

use crate::lock;
use kvferry_engine::source::PeerSource;
use rustix::net::{RecvFlags, Shutdown, recv, shutdown};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// How long a newcomer waits for a thread that is over to notice it, if there are too many of them.
/// Their sockets are shut down, so that they take only the time until they run.
const PATIENCE: Duration = Duration::from_secs(1);

/// Who a connection comes from; none by a Unix socket.
type Source = Option<PeerSource>;

#[derive(Debug)]
enum PlaceState {
    /// Another one may take it; the socket is for telling its thread.
    Open(Source, OwnedFd),
    Kept,
    /// Its socket was shut down, and its thread ends.
    Lost,
}

#[derive(Debug, Default)]
struct Places {
    next: u64,
    /// The lowest number is the oldest.
    by_number: BTreeMap<u64, PlaceState>,
}

impl Places {
    fn lost(&self) -> usize {
        let is_lost = |state: &&PlaceState| matches!(state, PlaceState::Lost);
        self.by_number.values().filter(is_lost).count()
    }

    /// Shuts one down that makes place; false if there is none.
    fn evict(&mut self) -> bool {
        let open = || {
            self.by_number.iter().filter_map(|(number, state)| match state {
                PlaceState::Open(source, socket) => Some((*number, *source, socket)),
                PlaceState::Kept | PlaceState::Lost => None,
            })
        };
        let mut count = BTreeMap::<Source, usize>::new();
        for (_, source, _) in open() {
            *count.entry(source).or_default() += 1;
        }
        let largest = count.into_iter().max_by_key(|(_, count)| *count).map(|(source, _)| source);
        let of = || open().filter(|(_, source, _)| Some(*source) == largest);
        let silent = of().find(|(_, _, socket)| is_silent(socket));
        let Some((number, _, socket)) = silent.or_else(|| of().next()) else { return false };
        // It fails if the other side is gone already, of which its thread hears as well.
        let _told = shutdown(socket, Shutdown::Both);
        self.by_number.insert(number, PlaceState::Lost);
        true
    }
}

/// True if nothing came that was not read.
fn is_silent(socket: &OwnedFd) -> bool {
    let came = recv(socket, &mut [0; 1][..], RecvFlags::PEEK | RecvFlags::DONTWAIT);
    came.map_or(true, |(bytes, _)| bytes == 0)
}

/// The places of a listener.
#[derive(Debug)]
pub(crate) struct PlaceTable {
    most: usize,
    patience: Duration,
    places: Mutex<Places>,
    /// A place was given back.
    left: Condvar,
}

impl PlaceTable {
    pub(crate) fn new(most: u32) -> PlaceTable {
        let (places, left) = Default::default();
        PlaceTable { most: most as usize, patience: PATIENCE, places, left }
    }

    /// A place for a connection; none if nobody makes one, or no descriptor is left.
    pub(crate) fn enter(
        self: &Arc<Self>,
        from: Option<SocketAddr>,
        connection: impl AsFd,
    ) -> Option<ConnectionPlace> {
        let socket = rustix::io::fcntl_dupfd_cloexec(connection, 0).ok()?;
        // Threads that have not noticed yet that they are over are bounded, too.
        let are_too_many = |places: &mut Places| places.by_number.len() >= 2 * self.most;
        let waited = self.left.wait_timeout_while(lock(&self.places), self.patience, are_too_many);
        let (mut places, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let lost = places.lost();
        let is_full = places.by_number.len() - lost >= self.most;
        if is_full && (lost >= self.most || !places.evict()) {
            return None;
        }
        let number = places.next;
        places.next += 1;
        places
            .by_number
            .insert(number, PlaceState::Open(from.map(|from| PeerSource::new(from.ip())), socket));
        Some(ConnectionPlace { number, table: self.clone() })
    }

    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.places).by_number.is_empty()
    }
}

/// The place of a connection, until this is dropped.
#[derive(Debug)]
pub struct ConnectionPlace {
    number: u64,
    table: Arc<PlaceTable>,
}

impl ConnectionPlace {
    /// Keeps it: nobody takes it any more. False if somebody has; then the connection was shut
    /// down.
    pub fn keep(&self) -> bool {
        let mut places = lock(&self.table.places);
        let Some(state) = places.by_number.get_mut(&self.number) else { return false };
        if !matches!(state, PlaceState::Lost) {
            *state = PlaceState::Kept;
        }
        matches!(state, PlaceState::Kept)
    }
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        lock(&self.table.places).by_number.remove(&self.number);
        self.table.left.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    fn connection() -> (UnixStream, UnixStream) {
        UnixStream::pair().expect("two ends")
    }

    fn is_over(mut peer: &UnixStream) -> bool {
        peer.set_nonblocking(true).expect("it does not block");
        matches!(peer.read(&mut [0; 1]), Ok(0))
    }

    #[test]
    fn who_has_most_and_says_nothing_makes_place() {
        let table = Arc::new(PlaceTable::new(4));
        let from = |last: u8| Some(SocketAddr::from(([10, 0, 0, last], 1)));
        let mut came = Vec::new();
        for last in [1, 1, 1, 2] {
            let (ours, theirs) = connection();
            came.push((table.enter(from(last), &ours).expect("there is room"), ours, theirs));
        }
        assert!(came[0].0.keep(), "nobody has taken it");
        (&came[1].2).write_all(b"x").expect("it is read");
        let (ours, _theirs) = connection();
        let new = table.enter(from(3), &ours).expect("somebody makes place");
        let over: Vec<_> = came.iter().map(|(_, _, theirs)| is_over(theirs)).collect();
        assert_eq!(over, [false, false, true, false]);
        assert!(!came[2].0.keep() && came[1].0.keep() && came[3].0.keep() && new.keep());
        // All are kept: nobody makes place until one is over.
        assert!(table.enter(from(4), &ours).is_none());
        came.remove(0);
        assert!(table.enter(from(4), &ours).is_some());
        drop((came, new));
        assert!(table.is_empty());
    }

    #[test]
    fn threads_that_are_over_are_bounded() {
        let patience = Duration::ZERO;
        let table = Arc::new(PlaceTable { patience, ..PlaceTable::new(2) });
        let (ours, _theirs) = connection();
        let places: Vec<_> = (0..9).filter_map(|_| table.enter(None, &ours)).collect();
        assert_eq!(places.len(), 4);
        drop(places);
        assert!(table.enter(None, &ours).is_some());
    }
}
