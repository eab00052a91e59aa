//! Server-sent events, as far as instances send them: blocks of lines with an empty line behind.

use bytes::{Bytes, BytesMut};

/// Longest event, in bytes.
const EVENT_MAX: usize = 16 << 20;

/// Cuts a stream into events.
#[derive(Debug, Default)]
pub(crate) struct SseDecoder {
    rest: BytesMut,
}

impl SseDecoder {
    /// Takes the next bytes in.
    ///
    /// # Errors
    /// An event is too long.
    pub(crate) fn feed(&mut self, bytes: &[u8]) -> Result<(), &'static str> {
        if self.rest.len() + bytes.len() > EVENT_MAX {
            return Err("an event is longer than 16 MiB");
        }
        self.rest.extend_from_slice(bytes);
        Ok(())
    }

    /// The next whole event with the empty line behind it.
    pub(crate) fn next(&mut self) -> Option<Bytes> {
        let lf = memchr::memmem::find(&self.rest, b"\n\n").map(|at| at + 2);
        let crlf = memchr::memmem::find(&self.rest, b"\r\n\r\n").map(|at| at + 4);
        let end = [lf, crlf].into_iter().flatten().min()?;
        Some(self.rest.split_to(end).freeze())
    }

    /// What is left when the stream has ended.
    pub(crate) fn rest(&mut self) -> Option<Bytes> {
        let rest = self.rest.split().freeze();
        (!rest.is_empty()).then_some(rest)
    }
}

/// The data of an event of one line.
pub(crate) fn data(event: &[u8]) -> Option<&[u8]> {
    let line = event.trim_ascii();
    let data = line.strip_prefix(b"data:")?.trim_ascii();
    (!data.contains(&b'\n')).then_some(data)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_found_however_the_stream_is_cut() {
        let stream = b"data: {\"a\":1}\n\n: ping\n\ndata: x\r\n\r\nevent: e\ndata: y\n\ndata: rest";
        for cut in 1..stream.len() {
            let (mut events, mut seen) = (SseDecoder::default(), Vec::new());
            for part in stream.chunks(cut) {
                events.feed(part).unwrap();
                seen.extend(std::iter::from_fn(|| events.next()));
            }
            assert_eq!(seen.concat(), &stream[..stream.len() - 10]);
            assert_eq!(seen.len(), 4);
            let found: Vec<_> = seen.iter().map(|event| data(event)).collect();
            assert_eq!(found, [Some(&b"{\"a\":1}"[..]), None, Some(b"x"), None]);
            assert_eq!(events.rest().as_deref(), Some(&b"data: rest"[..]));
        }
    }

    #[test]
    fn endless_events_are_refused() {
        let mut events = SseDecoder::default();
        assert!(events.feed(&vec![b'x'; EVENT_MAX]).is_ok());
        assert!(events.feed(b"x").is_err());
    }
}
