//! A peer by TCP.

use super::forged::{AttackedAddress, ForgedMessage, ForgedRegion, REGION};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};

/// A record with its length ahead.
pub(super) fn pack(words: &[u64]) -> Vec<u8> {
    let all = std::iter::once(words.len() as u64).chain(words.iter().copied());
    all.flat_map(u64::to_le_bytes).collect()
}

/// A message as a record.
pub(super) fn pack_message(message: &ForgedMessage) -> Vec<u8> {
    let mut bytes = message.encode();
    let head = 7 << 56 | bytes.len() as u64;
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    let words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
    pack(&std::iter::once(head).chain(words).collect::<Vec<_>>())
}

pub(super) struct ForgedStream(TcpStream);

impl ForgedStream {
    pub(super) fn connect(at: &AttackedAddress) -> ForgedStream {
        let stream = TcpStream::connect((&*at.engine.host, at.engine.port as u16));
        ForgedStream(stream.expect("the plane listens"))
    }

    fn hear(&mut self) -> Option<Vec<u64>> {
        let mut len = [0; 8];
        self.0.read_exact(&mut len).ok()?;
        let mut bytes = vec![0; 8 * u64::from_le_bytes(len) as usize];
        self.0.read_exact(&mut bytes).ok()?;
        let words = bytes.as_chunks::<8>().0.iter();
        Some(words.map(|word| u64::from_le_bytes(*word)).collect())
    }

    /// Says hello; true if it is let in.
    pub(super) fn greet(&mut self, hello: &ForgedMessage) -> bool {
        if self.0.write_all(&pack_message(hello)).is_err() {
            return false;
        }
        let Some(answer) = self.hear() else { return false };
        let bytes: Vec<u8> = answer[1..].iter().flat_map(|word| word.to_le_bytes()).collect();
        let len = answer[0] as u32 as usize;
        let message: ForgedMessage = rmp_serde::from_slice(&bytes[..len]).expect("a message");
        matches!(message, ForgedMessage::Welcome { .. })
    }

    /// One that keeps to the protocol, with a session to the region.
    pub(super) fn enter_honestly(at: &AttackedAddress) -> ForgedStream {
        let mut hello = at.hello(std::process::id());
        if let ForgedMessage::Hello { from, .. } = &mut hello {
            *from = at.sender("honest-tcp", std::process::id());
        }
        let mut stream = ForgedStream::connect(at);
        assert!(stream.greet(&hello), "an honest peer is let in");
        let local = ForgedRegion { base: 0, len: 8, process: None, file: false };
        let (region, token) = (REGION.0, at.token);
        let open = ForgedMessage::Open { session: 1, region, token, local };
        stream.0.write_all(&pack_message(&open)).expect("it is heard");
        let answer = stream.hear().expect("an answer");
        assert_eq!(answer[0] >> 56, 7, "a message");
        stream
    }

    /// Writes a word to the start of the region.
    pub(super) fn write(&mut self, word: u64) {
        let record = pack(&[1 << 56 | 1 << 32 | 1, word, 0, 0, 0, 8]);
        let said = [&record[..], &word.to_le_bytes()].concat();
        self.0.write_all(&said).expect("an honest peer is heard");
        assert_eq!(self.hear(), Some(vec![3 << 56, word]), "an honest peer is served");
    }

    /// Says bytes, and then no more; all that is answered, until the plane has hung up.
    pub(super) fn finish(mut self, said: &[u8]) -> Vec<u8> {
        self.0.set_nonblocking(true).expect("a socket");
        let (mut left, mut heard, mut buffer) = (said, Vec::new(), vec![0; 64 << 10]);
        let mut is_over = false;
        loop {
            let mut is_stuck = true;
            if left.is_empty() && !std::mem::replace(&mut is_over, true) {
                // It fails if the plane was first.
                let _over = self.0.shutdown(Shutdown::Write);
            }
            if !left.is_empty() {
                match self.0.write(left) {
                    Ok(count) => (left, is_stuck) = (&left[count..], false),
                    Err(why) if why.kind() == ErrorKind::WouldBlock => {}
                    Err(_) => left = &[],
                }
            }
            match self.0.read(&mut buffer) {
                Ok(0) => return heard,
                Ok(count) => {
                    heard.extend_from_slice(&buffer[..count]);
                    is_stuck = false;
                }
                Err(why) if why.kind() == ErrorKind::WouldBlock => {}
                Err(_) => return heard,
            }
            if is_stuck {
                std::thread::yield_now();
            }
        }
    }
}
