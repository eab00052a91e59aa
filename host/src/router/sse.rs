//! Server-sent events, as far as instances send them: blocks of lines with an empty line behind.

use super::memory_budget::MemoryCharge;
use bytes::{Bytes, BytesMut};
use memchr::memchr_iter;
use std::ops::Range;

/// Longest event, in bytes.
const EVENT_MAX: usize = 16 << 20;

/// Offset after the empty line of the first event that ends at `from` or later.
pub(super) fn event_end(bytes: &[u8], from: usize) -> Option<usize> {
    let lines = memchr_iter(b'\n', &bytes[from..]).map(|at| from + at + 1);
    lines.into_iter().find_map(|next| match bytes[next..] {
        [b'\n', ..] => Some(next + 1),
        [b'\r', b'\n', ..] => Some(next + 2),
        _ => None,
    })
}

/// Offset at which the search for the end of an incomplete event continues with more bytes.
pub(super) fn search_from(searched: usize, length: usize) -> usize {
    searched.max(length.saturating_sub(2))
}

/// Splits a stream into events. Complete events are not copied; bytes of others are charged.
#[derive(Debug)]
pub(crate) struct SseDecoder {
    rest: BytesMut,
    /// No event ends before this offset of `rest`.
    searched: usize,
    /// Bytes after those of `rest`.
    last: Bytes,
    memory: MemoryCharge,
}

impl SseDecoder {
    /// A decoder that charges the bytes that it keeps.
    pub(crate) fn new(memory: MemoryCharge) -> SseDecoder {
        SseDecoder { rest: BytesMut::new(), searched: 0, last: Bytes::new(), memory }
    }

    /// Takes the next bytes, after all complete events were returned.
    ///
    /// # Errors
    /// An event is too long, or there is no memory for it.
    pub(crate) fn feed(&mut self, bytes: Bytes) -> Result<(), String> {
        if self.rest.is_empty() && bytes.ends_with(b"\n") {
            self.last = bytes;
            return Ok(());
        }
        let length = self.rest.len() + bytes.len();
        if length > EVENT_MAX {
            return Err("an event is longer than 16 MiB".into());
        }
        self.memory.set(length).map_err(|why| why.error("an event of a stream").message())?;
        self.rest.extend_from_slice(&bytes);
        Ok(())
    }

    /// The next whole event with the empty line behind it.
    pub(crate) fn next(&mut self) -> Option<Bytes> {
        if !self.last.is_empty() {
            if let Some(end) = event_end(&self.last, 0) {
                return Some(self.last.split_to(end));
            }
            let last = std::mem::take(&mut self.last);
            self.rest.extend_from_slice(&last);
        }
        let Some(end) = event_end(&self.rest, self.searched) else {
            self.searched = search_from(self.searched, self.rest.len());
            return None;
        };
        self.searched = 0;
        let event = self.rest.split_to(end).freeze();
        if self.rest.is_empty() {
            // A smaller charge is always granted.
            let _ = self.memory.set(0);
        }
        Some(event)
    }

    /// Drops the bytes that are kept, and their charge.
    pub(crate) fn clear(&mut self) {
        (self.rest, self.searched, self.last) = (BytesMut::new(), 0, Bytes::new());
        // Less is always granted.
        let _ = self.memory.set(0);
    }

    /// The bytes that are left when the stream has ended.
    pub(crate) fn rest(&mut self) -> Option<Bytes> {
        let rest = self.rest.split().freeze();
        (!rest.is_empty()).then_some(rest)
    }
}

/// Range of the data of an event with one line of data.
pub(crate) fn data_range(event: &[u8]) -> Option<Range<usize>> {
    let (mut found, mut start) = (None, 0);
    for end in memchr_iter(b'\n', event).chain([event.len()]) {
        let line = &event[start..end];
        if let Some(value) = line.strip_prefix(b"data:") {
            let value_start = end - value.trim_ascii_start().len();
            let range = value_start..value_start + value.trim_ascii().len();
            if found.replace(range).is_some() {
                return None;
            }
        }
        start = (end + 1).min(event.len());
    }
    found
}

/// Data of an event with one line of data.
pub(crate) fn data(event: &[u8]) -> Option<&[u8]> {
    data_range(event).map(|range| &event[range])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::router::memory_budget::unbounded;

    #[test]
    fn events_are_found_however_the_stream_is_cut() {
        let stream = b"data: {\"a\":1}\n\n: ping\n\ndata: x\r\n\r\nevent: e\ndata: y\n\ndata: rest";
        for cut in 1..stream.len() {
            let (mut events, mut seen) = (SseDecoder::new(unbounded()), Vec::new());
            for part in stream.chunks(cut) {
                events.feed(Bytes::copy_from_slice(part)).unwrap();
                seen.extend(std::iter::from_fn(|| events.next()));
            }
            assert_eq!(seen.concat(), &stream[..stream.len() - 10]);
            assert_eq!(seen.len(), 4);
            let found: Vec<_> = seen.iter().map(|event| data(event)).collect();
            assert_eq!(found, [Some(&b"{\"a\":1}"[..]), None, Some(b"x"), Some(b"y")]);
            assert_eq!(events.rest().as_deref(), Some(&b"data: rest"[..]));
        }
        assert_eq!(data(b"data: a\ndata: b\n\n"), None);
    }

    #[test]
    fn whole_events_are_not_copied_and_others_are_charged() {
        let mut events = SseDecoder::new(unbounded());
        let frame = Bytes::from_static(b"data: a\n\ndata: b\n\n");
        events.feed(frame.clone()).unwrap();
        assert_eq!(events.next().unwrap().as_ptr(), frame.as_ptr());
        assert_eq!((events.next().as_deref(), events.next()), (Some(&b"data: b\n\n"[..]), None));
        events.feed(Bytes::from_static(b"data: ")).unwrap();
        assert_eq!((events.next(), events.memory.bytes()), (None, 6));
        events.feed(Bytes::from_static(b"c\n\n")).unwrap();
        assert_eq!((events.next().is_some(), events.memory.bytes()), (true, 0));
    }

    /// The number of bytes searched for a long event does not grow with the number of its frames.
    #[test]
    fn long_events_are_searched_once() {
        let mut events = SseDecoder::new(unbounded());
        for at in 1..=1000 {
            events.feed(Bytes::from_static(b"xxxxxxx\n")).unwrap();
            assert!(events.next().is_none());
            assert_eq!(events.searched, at * 8 - 2);
        }
        events.feed(Bytes::from_static(b"\n")).unwrap();
        assert_eq!(events.next().map(|event| event.len()), Some(8001));
        assert_eq!(events.searched, 0);
    }

    #[test]
    fn endless_events_are_refused() {
        let mut events = SseDecoder::new(unbounded());
        assert!(events.feed(vec![b'x'; EVENT_MAX].into()).is_ok());
        assert!(events.feed(Bytes::from_static(b"x")).is_err());
    }
}
