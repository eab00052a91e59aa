//! Memory of the router for what clients and instances send: one budget, shared by the addresses of
//! clients. Bodies of requests, answers that are not streamed, incomplete events of streams, and
//! what legs add to a body are charged before they are kept.

use super::error::HttpError;
use crate::process::lock;
use bytes::Bytes;
use hyper::StatusCode;
use kvferry_engine::source::{PeerSource, SourceBudget};
use prometheus_client::metrics::counter::Counter;
use std::sync::{Arc, Mutex};

/// Limit of all bytes held. An address gets no more than is left for all others: the first address
/// half of the limit, the next one half of the rest, so that there is always room for another one.
#[derive(Debug)]
pub(crate) struct MemoryBudget {
    held: Mutex<SourceBudget>,
    most: usize,
    refused: Counter,
}

impl MemoryBudget {
    /// A budget of this many bytes; `refused` counts the charges that it refuses.
    pub(crate) fn new(most: usize, refused: Counter) -> Arc<MemoryBudget> {
        Arc::new(MemoryBudget { held: Mutex::new(SourceBudget::new(most)), most, refused })
    }

    /// Bytes that are charged to all addresses.
    pub(crate) fn held(&self) -> usize {
        lock(&self.held).held()
    }

    /// A charge that has no bytes yet.
    pub(crate) fn charge(self: &Arc<MemoryBudget>, account: PeerSource) -> MemoryCharge {
        MemoryCharge { budget: self.clone(), account, bytes: 0 }
    }
}

/// Bytes charged to an address until the charge is dropped.
#[derive(Debug)]
pub(crate) struct MemoryCharge {
    budget: Arc<MemoryBudget>,
    account: PeerSource,
    bytes: usize,
}

/// Reason why bytes are not charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryRefusal {
    /// More than one address may ever hold; the limit of an address, in bytes.
    TooLarge(usize),
    /// Other requests of the address hold too much: this many bytes.
    OwnShare(usize),
    /// Other addresses hold too much; this many bytes are held in all.
    AllUsed(usize),
}

impl MemoryRefusal {
    pub(crate) fn status(self) -> StatusCode {
        match self {
            MemoryRefusal::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            MemoryRefusal::OwnShare(_) => StatusCode::TOO_MANY_REQUESTS,
            MemoryRefusal::AllUsed(_) => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// The error for `part`, which is a part of a request or of its answer.
    pub(crate) fn error(self, part: &str) -> HttpError {
        let why = match self {
            MemoryRefusal::TooLarge(most) => format!(
                "{part} takes more than {most} bytes, the memory that the router has for one \
                 address: send a smaller request, stream the answer, or have the operator raise \
                 --memory-max"
            ),
            MemoryRefusal::OwnShare(own) => format!(
                "there is no memory for {part}: requests of your address take {own} bytes and get \
                 no more than is left for others; send fewer at a time, or have the operator raise \
                 --memory-max"
            ),
            MemoryRefusal::AllUsed(all) => format!(
                "there is no memory for {part}: requests take {all} bytes; try again, or have the \
                 operator raise --memory-max"
            ),
        };
        HttpError::new(self.status(), &why)
    }
}

impl MemoryCharge {
    /// Charges more bytes.
    ///
    /// # Errors
    /// There is no memory for so many.
    pub(crate) fn add(&mut self, more: usize) -> Result<(), MemoryRefusal> {
        let mut held = lock(&self.budget.held);
        // They count twice: the address has them, and they are no longer free.
        if more.saturating_mul(2) <= held.room(self.account) {
            held.change(self.account, 0, more);
            self.bytes += more;
            return Ok(());
        }
        self.budget.refused.inc();
        let wanted = self.bytes.saturating_add(more);
        let (own, all, most) = (held.of(self.account), held.held(), self.budget.most);
        Err(if wanted > most / 2 {
            MemoryRefusal::TooLarge(most / 2)
        } else if own > self.bytes && wanted <= most.saturating_sub(all - own) / 2 {
            MemoryRefusal::OwnShare(own - self.bytes)
        } else {
            MemoryRefusal::AllUsed(all)
        })
    }

    /// Changes the charge to this many bytes.
    ///
    /// # Errors
    /// There is no memory for so many; the charge stays as it was.
    pub(crate) fn set(&mut self, bytes: usize) -> Result<(), MemoryRefusal> {
        if let Some(more) = bytes.checked_sub(self.bytes) {
            return if more == 0 { Ok(()) } else { self.add(more) };
        }
        lock(&self.budget.held).change(self.account, self.bytes, bytes);
        self.bytes = bytes;
        Ok(())
    }

    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Another charge to the same address.
    pub(crate) fn another(&self) -> MemoryCharge {
        self.budget.charge(self.account)
    }
}

impl Drop for MemoryCharge {
    fn drop(&mut self) {
        if self.bytes > 0 {
            lock(&self.budget.held).change(self.account, self.bytes, 0);
        }
    }
}

/// Collector of the frames of a body. One frame is not copied.
#[derive(Debug)]
pub(crate) struct ByteCollector {
    first: Bytes,
    all: Vec<u8>,
    /// Largest number of bytes to expect.
    whole: usize,
}

impl ByteCollector {
    pub(crate) fn new(whole: usize) -> ByteCollector {
        ByteCollector { first: Bytes::new(), all: Vec::new(), whole }
    }

    pub(crate) fn len(&self) -> usize {
        self.first.len().max(self.all.len())
    }

    /// Adds a frame and charges its memory first.
    ///
    /// # Errors
    /// There is no memory for it.
    pub(crate) fn add(
        &mut self,
        frame: Bytes,
        memory: &mut MemoryCharge,
    ) -> Result<(), MemoryRefusal> {
        if self.len() == 0 {
            memory.add(frame.len())?;
            self.first = frame;
            return Ok(());
        }
        let needed = self.len() + frame.len();
        if needed > self.all.capacity() {
            let grown = (needed + needed / 2).min(self.whole).max(needed);
            memory.add(grown - self.all.capacity().max(self.first.len()))?;
            self.all.reserve_exact(grown - self.all.len());
        }
        self.all.extend_from_slice(&std::mem::take(&mut self.first));
        self.all.extend_from_slice(&frame);
        Ok(())
    }

    pub(crate) fn finish(self) -> Bytes {
        if self.all.is_empty() { self.first } else { self.all.into() }
    }
}

/// Bytes together with their charge.
#[derive(Debug)]
pub(crate) struct ChargedBytes {
    pub(crate) bytes: Bytes,
    pub(crate) memory: MemoryCharge,
}

/// A charge to a budget without a limit.
#[cfg(test)]
pub(crate) fn unbounded() -> MemoryCharge {
    let source = PeerSource::new([127, 0, 0, 1].into());
    MemoryBudget::new(usize::MAX, Counter::default()).charge(source)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn charge(budget: &Arc<MemoryBudget>, n: u8) -> MemoryCharge {
        budget.charge(PeerSource::new([10, 0, 0, n].into()))
    }

    #[test]
    fn there_is_always_room_for_the_next_address() {
        let budget = MemoryBudget::new(96, Counter::default());
        let taken = |n: u8| {
            let mut own = charge(&budget, n);
            while own.add(1).is_ok() {}
            own
        };
        let charges: Vec<_> = (0..3).map(taken).collect();
        assert_eq!(charges.iter().map(MemoryCharge::bytes).collect::<Vec<_>>(), [48, 24, 12]);
        drop(charges);
        let held = lock(&budget.held);
        let of = |n: u8| held.of(PeerSource::new([10, 0, 0, n].into()));
        assert!(held.held() == 0 && (0..3).all(|n| of(n) == 0), "{held:?}");
    }

    #[test]
    fn frames_are_charged_before_they_are_kept() {
        let budget = MemoryBudget::new(96, Counter::default());
        let mut memory = charge(&budget, 0);
        let mut all = ByteCollector::new(40);
        for _ in 0..4 {
            all.add(Bytes::from_static(b"0123456789"), &mut memory).unwrap();
            assert!(memory.bytes() >= all.len() && memory.bytes() <= 40, "{memory:?}");
        }
        let more = all.add(Bytes::from_static(b"0123456789"), &mut memory);
        assert_eq!((more, all.len()), (Err(MemoryRefusal::TooLarge(48)), 40));
        assert_eq!(all.finish().len(), 40);
    }

    #[test]
    fn refusals_say_whose_bytes_are_in_the_way() {
        let budget = MemoryBudget::new(96, Counter::default());
        let mut own = charge(&budget, 0);
        assert_eq!(own.add(49), Err(MemoryRefusal::TooLarge(48)));
        own.add(40).unwrap();
        assert_eq!(own.add(9), Err(MemoryRefusal::TooLarge(48)));
        let mut second = own.another();
        assert_eq!(second.add(20), Err(MemoryRefusal::OwnShare(40)));
        let mut other = charge(&budget, 1);
        assert_eq!(other.add(40), Err(MemoryRefusal::AllUsed(40)));
        other.add(28).unwrap();
        own.set(30).unwrap();
        assert_eq!(own.set(40), Err(MemoryRefusal::AllUsed(58)));
        assert_eq!((own.bytes(), own.set(0), own.bytes()), (30, Ok(()), 0));
        let error = MemoryRefusal::OwnShare(1).error("the body");
        assert_eq!(error.status, 429);
        assert!(error.message().contains("--memory-max"));
    }
}
