//! Records of an encrypted link: sealed where they were copied together, opened where they were
//! received. They are made here and not by rustls, which copies and allocates for each; their keys
//! are those that both sides get of the TLS between them (RFC 5705), and their form is that of TLS
//! 1.3.

use ring::aead::{AES_128_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use rustls::Connection;
use std::ops::Range;

/// Bytes in a record at most.
pub(super) const RECORD_PLAIN_MAX: usize = 16 << 10;

/// Type, version and length, which are authenticated.
pub(super) const RECORD_HEAD: usize = 5;

/// Application data, ahead of a record and, as TLS 1.3 has it, behind what is in it.
const DATA: u8 = 0x17;

/// The type behind what is in a record, and the tag.
const TAIL: usize = 1 + 16;

/// What a record has beside its bytes.
pub(super) const RECORD_EXTRA: usize = RECORD_HEAD + TAIL;

/// Records under one key: AES-GCM is good for 2^24 of full length (RFC 8446, 5.5).
const RECORDS_PER_KEY: u64 = 1 << 23;

/// Which side says what is encrypted under a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RecordSender {
    Dialler,
    Acceptor,
}

/// The keys of one direction, each for so many records.
#[derive(Debug)]
pub(super) struct RecordKeys {
    sender: RecordSender,
    /// Records so far.
    count: u64,
    key: LessSafeKey,
    iv: [u8; NONCE_LEN],
}

impl RecordKeys {
    /// # Errors
    /// The handshake is not over.
    pub(super) fn new(tls: &Connection, sender: RecordSender) -> Result<RecordKeys, rustls::Error> {
        let (key, iv) = RecordKeys::key(tls, sender, 0)?;
        Ok(RecordKeys { sender, count: 0, key, iv })
    }

    /// The key of a generation.
    fn key(
        tls: &Connection,
        sender: RecordSender,
        generation: u64,
    ) -> Result<(LessSafeKey, [u8; NONCE_LEN]), rustls::Error> {
        let context = [&[sender as u8][..], &generation.to_be_bytes()].concat();
        let label = b"EXPORTER-kvferry-records";
        let bytes = tls.export_keying_material([0; 16 + NONCE_LEN], label, Some(&context))?;
        let (key, iv) = bytes.split_at(16);
        let key = UnboundKey::new(&AES_128_GCM, key).expect("a key of 16 bytes");
        Ok((LessSafeKey::new(key), iv.try_into().expect("what is left")))
    }

    /// The nonce of the next record, under the key that is for it.
    fn next(&mut self, tls: &Connection) -> Result<Nonce, rustls::Error> {
        let count = self.count;
        if count > 0 && count.is_multiple_of(RECORDS_PER_KEY) {
            (self.key, self.iv) = RecordKeys::key(tls, self.sender, count / RECORDS_PER_KEY)?;
        }
        self.count += 1;
        let mut nonce = self.iv;
        for (byte, of_count) in nonce[NONCE_LEN - 8..].iter_mut().zip(count.to_be_bytes()) {
            *byte ^= of_count;
        }
        Ok(Nonce::assume_unique_for_key(nonce))
    }

    /// Makes a record of what stands behind room for its head, at the end of `out`.
    ///
    /// # Errors
    /// None that there should be.
    pub(super) fn seal(
        &mut self,
        tls: &Connection,
        out: &mut Vec<u8>,
        at: usize,
    ) -> Result<(), rustls::Error> {
        out.push(DATA);
        let (start, len) = (at + RECORD_HEAD, out.len() - at - RECORD_HEAD + TAIL - 1);
        let head = head(len);
        out[at..start].copy_from_slice(&head);
        let nonce = self.next(tls)?;
        let sealed = self.key.seal_in_place_separate_tag(nonce, Aad::from(head), &mut out[start..]);
        let tag = sealed.map_err(|_| rustls::Error::EncryptError)?;
        out.extend_from_slice(tag.as_ref());
        Ok(())
    }

    /// Opens the record at the front of what was received: where its bytes are, and how long it is;
    /// none if it is not all there.
    ///
    /// # Errors
    /// It is none that the other side made, or not the next one.
    pub(super) fn open(
        &mut self,
        tls: &Connection,
        received: &mut [u8],
    ) -> Result<Option<(Range<usize>, usize)>, rustls::Error> {
        let Some((said, rest)) = received.split_first_chunk_mut::<RECORD_HEAD>() else {
            return Ok(None);
        };
        let len = usize::from(u16::from_be_bytes([said[3], said[4]]));
        if *said != head(len) || !(TAIL..=RECORD_PLAIN_MAX + TAIL).contains(&len) {
            return Err(rustls::Error::DecryptError);
        }
        let Some(record) = rest.get_mut(..len) else { return Ok(None) };
        let nonce = self.next(tls)?;
        let opened = self.key.open_in_place(nonce, Aad::from(*said), record);
        match opened {
            Ok([.., DATA]) => Ok(Some((RECORD_HEAD..RECORD_HEAD + len - TAIL, RECORD_HEAD + len))),
            _ => Err(rustls::Error::DecryptError),
        }
    }
}

fn head(len: usize) -> [u8; RECORD_HEAD] {
    let [high, low] = (len as u16).to_be_bytes();
    [DATA, 3, 3, high, low]
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::super::tls_config::LinkTls;
    use super::*;

    /// Both ends of a connection.
    fn ends() -> [Connection; 2] {
        let tls = LinkTls::new().unwrap();
        let mut ends = [tls.dial().unwrap(), tls.accept().unwrap()];
        while ends.iter().any(|end| end.is_handshaking()) {
            for (from, to) in [(0, 1), (1, 0)] {
                let mut said = Vec::new();
                while ends[from].wants_write() {
                    ends[from].write_tls(&mut said).unwrap();
                }
                let mut said = &*said;
                while !said.is_empty() {
                    ends[to].read_tls(&mut said).unwrap();
                    ends[to].process_new_packets().unwrap();
                }
            }
        }
        ends
    }

    fn sealed(keys: &mut RecordKeys, tls: &Connection, bytes: &[u8]) -> Vec<u8> {
        let mut out = vec![0; RECORD_HEAD];
        out.extend_from_slice(bytes);
        keys.seal(tls, &mut out, 0).unwrap();
        assert_eq!(out.len(), bytes.len() + RECORD_EXTRA);
        out
    }

    fn opened(keys: &mut RecordKeys, tls: &Connection, record: &[u8]) -> Option<Vec<u8>> {
        let mut record = record.to_vec();
        let (bytes, len) = keys.open(tls, &mut record).ok()??;
        assert_eq!(len, record.len());
        Some(record[bytes].to_vec())
    }

    #[test]
    fn keys_change_on_both_sides_before_they_have_sealed_too_much() {
        let [dialler, acceptor] = ends();
        let mut sending = RecordKeys::new(&dialler, RecordSender::Dialler).unwrap();
        let mut receiving = RecordKeys::new(&acceptor, RecordSender::Dialler).unwrap();
        for count in [0, RECORDS_PER_KEY - 2, 2 * RECORDS_PER_KEY - 2] {
            // As if all before had been of the key that is in use.
            (sending.count, receiving.count) = (count, count);
            for n in 0..4_u8 {
                let ivs = sending.iv;
                let record = sealed(&mut sending, &dialler, &[n; 100]);
                assert_eq!(opened(&mut receiving, &acceptor, &record), Some(vec![n; 100]));
                assert_eq!(ivs != sending.iv, count > 0 && n == 2, "{count} {n}");
            }
        }
    }

    #[test]
    fn what_is_not_the_next_record_of_the_other_side_is_refused() {
        let [dialler, acceptor] = ends();
        let keys = |sender| RecordKeys::new(&acceptor, sender).unwrap();
        let mut sending = RecordKeys::new(&dialler, RecordSender::Dialler).unwrap();
        let [first, second, none] =
            [b"first".as_slice(), b"second", b""].map(|it| sealed(&mut sending, &dialler, it));
        let mut receiving = keys(RecordSender::Dialler);
        assert_eq!(opened(&mut receiving, &acceptor, &first).as_deref(), Some(&b"first"[..]));
        assert_eq!(opened(&mut receiving, &acceptor, &first), None, "again");
        assert_eq!(opened(&mut keys(RecordSender::Dialler), &acceptor, &second), None, "ahead");
        assert_eq!(opened(&mut keys(RecordSender::Acceptor), &acceptor, &first), None, "returned");
        let [other, _] = ends();
        let mut of_other = RecordKeys::new(&other, RecordSender::Dialler).unwrap();
        assert_eq!(opened(&mut of_other, &other, &first), None, "of another connection");
        for at in 0..first.len() {
            let mut changed = first.clone();
            changed[at] ^= 1;
            assert_eq!(opened(&mut keys(RecordSender::Dialler), &acceptor, &changed), None, "{at}");
        }
        // What is not all there is waited for.
        for len in 0..first.len() {
            let opened = keys(RecordSender::Dialler).open(&acceptor, &mut first[..len].to_vec());
            assert!(matches!(opened, Ok(None)), "{len}");
        }
        let mut receiving = keys(RecordSender::Dialler);
        for (record, bytes) in [(first, &b"first"[..]), (second, b"second"), (none, b"")] {
            assert_eq!(opened(&mut receiving, &acceptor, &record).as_deref(), Some(bytes));
        }
    }
}
