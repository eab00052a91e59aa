//! ZMTP 3.1 with the NULL mechanism (RFC 37): what is said first, how messages are framed, and a
//! reader that holds no more of a message than one may have.
//!
//! ```
//! use kvferry_wire::zmtp::{ZmtpEvent, ZmtpReader, ZmtpSocket};
//!
//! let mut said = ZmtpSocket::Dealer.opening();
//! // A message of two parts, the first of which is empty.
//! said.extend(b"\x01\x00\x00\x02hi");
//! let (mut reader, mut heard) = (ZmtpReader::new(ZmtpSocket::Router), Vec::new());
//! reader.read(&said, &mut heard)?;
//! let ZmtpEvent::Message(parts, _) = &heard[1] else { panic!("{heard:?}") };
//! assert_eq!(parts[..], [b"".to_vec(), b"hi".to_vec()]);
//! # Ok::<(), kvferry_wire::zmtp::ZmtpError>(())
//! ```

/// Signature, version, mechanism, and who is the server, which NULL does not say.
const GREETING_BYTES: usize = 64;

/// Longest message in bytes, with 64 bytes for each part: that of the native dialect and some
/// for its envelope.
pub const MESSAGE_MAX: usize = 17 << 20;

/// Longest message of an unproven link. A hello of 8 ranks with 128 layers in a region of MoRI each is
/// shorter.
pub const UNPROVEN_MAX: usize = 1 << 20;

/// Longest message where MoRIIO peers send notifications, which prove nothing: the list of blocks of a
/// long context has more than 1 MiB if a block has one token.
pub const NOTIFY_MAX: usize = 8 << 20;

/// What a part costs in memory beside its bytes: its place in the list, which may be twice as long
/// as it is full, and what the allocator keeps.
const PART_COST: usize = 64;

/// Longest command. Those of libzmq have fewer than 100 bytes.
const COMMAND_MAX: usize = 4_096;

/// Longest context of a `PING`, which the `PONG` repeats.
const CONTEXT_MAX: usize = 16;

/// Bytes that are set aside for a part before they came.
const PART_AHEAD: usize = 64 << 10;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// What one side of a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZmtpSocket {
    /// Dials.
    Dealer,
    /// Listens.
    Router,
}

impl ZmtpSocket {
    fn name(self) -> &'static str {
        match self {
            ZmtpSocket::Dealer => "DEALER",
            ZmtpSocket::Router => "ROUTER",
        }
    }

    /// Which sockets it speaks with.
    fn takes(self, other: &[u8]) -> bool {
        let request: &[u8] = match self {
            ZmtpSocket::Dealer => b"REP",
            ZmtpSocket::Router => b"REQ",
        };
        [request, b"DEALER", b"ROUTER"].contains(&other)
    }

    /// The greeting and `READY`, which need not wait for the other side's.
    pub fn opening(self) -> Vec<u8> {
        let mut said = [&[0xff][..], &[0; 8], &[0x7f, 3, 1], b"NULL"].concat();
        said.resize(GREETING_BYTES, 0);
        let mut ready = b"\x05READY".to_vec();
        for (name, value) in [("Socket-Type", self.name()), ("Identity", "")] {
            ready.push(name.len() as u8);
            ready.extend(name.as_bytes());
            ready.extend((value.len() as u32).to_be_bytes());
            ready.extend(value.as_bytes());
        }
        frame(COMMAND, &ready, &mut said);
        said
    }
}

fn frame(flags: u8, bytes: &[u8], out: &mut Vec<u8>) {
    match u8::try_from(bytes.len()) {
        Ok(len) => out.extend([flags, len]),
        Err(_) => {
            out.push(flags | LONG);
            out.extend((bytes.len() as u64).to_be_bytes());
        }
    }
    out.extend(bytes);
}

/// A message as it is sent.
pub(crate) fn encode(parts: &[&[u8]]) -> Vec<u8> {
    let bytes: usize = parts.iter().map(|part| part.len() + 9).sum();
    let mut out = Vec::with_capacity(bytes);
    for (nth, part) in parts.iter().enumerate() {
        frame(if nth + 1 < parts.len() { MORE } else { 0 }, part, &mut out);
    }
    out
}

/// The answer to a `PING` with this context.
pub(crate) fn pong(context: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    frame(COMMAND, &[b"\x04PONG", context].concat(), &mut out);
    out
}

/// Why nothing more is read of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ZmtpError {
    /// What is said is not ZMTP 3 with the NULL mechanism, or not for such a socket.
    Protocol(&'static str),
    /// A message has more bytes and parts than one may have.
    TooLong,
}

/// What came.
#[derive(Debug, PartialEq, Eq)]
pub enum ZmtpEvent {
    /// The other side said what it is; messages may be sent.
    Ready,
    /// A whole message, and what it costs in memory.
    Message(Vec<Vec<u8>>, usize),
    /// A `PING` with its context.
    Ping(Vec<u8>),
}

#[derive(Debug)]
enum ZmtpState {
    /// The greeting, then `READY`, and whether the first is over.
    Opening(bool),
    Open,
}

/// Reads what the other side says.
#[derive(Debug)]
pub struct ZmtpReader {
    own: ZmtpSocket,
    state: ZmtpState,
    /// A greeting or the head of a frame, as much as came.
    head: [u8; GREETING_BYTES],
    head_len: usize,
    /// Contents of a frame, how much is missing, and its flags.
    body: Option<(Vec<u8>, usize, u8)>,
    /// Parts of a message that is not whole yet, and what they cost.
    parts: Vec<Vec<u8>>,
    cost: usize,
    /// Largest cost of a message.
    most: usize,
}

impl ZmtpReader {
    /// A reader of what is said to such a socket.
    pub fn new(own: ZmtpSocket) -> ZmtpReader {
        ZmtpReader {
            own,
            most: MESSAGE_MAX,
            state: ZmtpState::Opening(false),
            head: [0; GREETING_BYTES],
            head_len: 0,
            body: None,
            parts: Vec::new(),
            cost: 0,
        }
    }

    /// Bytes of memory that the unfinished message has.
    pub fn held(&self) -> usize {
        self.cost + self.body.as_ref().map_or(0, |(body, ..)| body.capacity())
    }

    /// Largest cost of a message; [`MESSAGE_MAX`] unless it was set.
    pub fn most(&self) -> usize {
        self.most
    }

    /// Sets the largest cost of a message, from the next part on.
    pub fn set_most(&mut self, most: usize) {
        self.most = most;
    }

    /// Reads on.
    ///
    /// # Errors
    /// Why the connection is to be closed.
    pub fn read(&mut self, bytes: &[u8], out: &mut Vec<ZmtpEvent>) -> Result<(), ZmtpError> {
        self.read_some(bytes, usize::MAX, out).map(|_| ())
    }

    /// Reads bytes and stops after this many messages. Returns how many bytes were read.
    ///
    /// # Errors
    /// Why the connection is to be closed.
    pub fn read_some(
        &mut self,
        all: &[u8],
        messages: usize,
        out: &mut Vec<ZmtpEvent>,
    ) -> Result<usize, ZmtpError> {
        let (mut bytes, mut seen, mut left) = (all, out.len(), messages);
        while !bytes.is_empty() && left > 0 {
            if self.body.is_some() {
                self.fill(&mut bytes);
            } else {
                self.head(&mut bytes)?;
            }
            if self.body.as_ref().is_some_and(|(_, missing, _)| *missing == 0) {
                let (body, _, flags) = self.body.take().expect("just seen");
                self.frame(body, flags, out)?;
                let is_message = |event: &&ZmtpEvent| matches!(event, ZmtpEvent::Message(..));
                left -= out[seen..].iter().filter(is_message).count();
                seen = out.len();
            }
        }
        Ok(all.len() - bytes.len())
    }

    /// Reads of the contents what is there.
    fn fill(&mut self, bytes: &mut &[u8]) {
        let Some((body, missing, _)) = &mut self.body else { return };
        let count = bytes.len().min(*missing);
        if body.capacity() - body.len() < count {
            // Twice as much as came, and never more than was announced: who only announces a long
            // part gets no memory for it.
            let ahead = count.max(body.len()).max(PART_AHEAD).min(*missing);
            body.reserve_exact(ahead);
        }
        body.extend_from_slice(&bytes[..count]);
        *missing -= count;
        *bytes = &bytes[count..];
    }

    /// Reads of a greeting or of the head of a frame what is there.
    fn head(&mut self, bytes: &mut &[u8]) -> Result<(), ZmtpError> {
        let greets = matches!(self.state, ZmtpState::Opening(false));
        let wanted = match (greets, self.head_len, self.head[0] & LONG) {
            (true, ..) => GREETING_BYTES,
            (false, 0, _) => 1,
            (false, _, 0) => 2,
            _ => 9,
        };
        let count = bytes.len().min(wanted - self.head_len);
        self.head[self.head_len..][..count].copy_from_slice(&bytes[..count]);
        self.head_len += count;
        *bytes = &bytes[count..];
        if greets {
            return self.greeting();
        }
        let flags = self.head[0];
        let len = match (self.head_len, flags & LONG) {
            (2, 0) => u64::from(self.head[1]),
            (9, LONG) => u64::from_be_bytes(*self.head[1..].first_chunk().expect("64 bytes")),
            _ => return Ok(()),
        };
        self.head_len = 0;
        self.begin(flags, len)
    }

    fn greeting(&mut self) -> Result<(), ZmtpError> {
        let said = &self.head[..self.head_len];
        let is_other = said[0] != 0xff || said.get(9).is_some_and(|byte| byte & 1 == 0);
        if is_other {
            return Err(ZmtpError::Protocol("no ZMTP, or one older than 2"));
        }
        if said.get(10).is_some_and(|version| *version < 3) {
            return Err(ZmtpError::Protocol("ZMTP older than 3"));
        }
        if said.len() < GREETING_BYTES {
            return Ok(());
        }
        if said[12..32] != *b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0" {
            return Err(ZmtpError::Protocol("a mechanism other than NULL"));
        }
        self.state = ZmtpState::Opening(true);
        self.head_len = 0;
        Ok(())
    }

    /// A frame of so many bytes begins.
    fn begin(&mut self, flags: u8, len: u64) -> Result<(), ZmtpError> {
        let is_command = flags & COMMAND > 0;
        if flags & !(MORE | LONG | COMMAND) > 0 || is_command && flags & MORE > 0 {
            return Err(ZmtpError::Protocol("a frame with flags that are none"));
        }
        if !is_command && !matches!(self.state, ZmtpState::Open) {
            return Err(ZmtpError::Protocol("a message before READY"));
        }
        let (most, why) = match is_command {
            true => (Some(COMMAND_MAX), ZmtpError::Protocol("a command that is too long")),
            false => (self.most.checked_sub(self.cost + PART_COST), ZmtpError::TooLong),
        };
        let len = usize::try_from(len).ok().filter(|len| most.is_some_and(|most| *len <= most));
        let len = len.ok_or(why)?;
        self.body = Some((Vec::with_capacity(len.min(PART_AHEAD)), len, flags));
        Ok(())
    }

    /// A frame is whole.
    fn frame(
        &mut self,
        body: Vec<u8>,
        flags: u8,
        out: &mut Vec<ZmtpEvent>,
    ) -> Result<(), ZmtpError> {
        if flags & COMMAND > 0 {
            return self.command(&body, out);
        }
        self.cost += body.len() + PART_COST;
        self.parts.push(body);
        if flags & MORE == 0 {
            let (parts, cost) = (std::mem::take(&mut self.parts), std::mem::take(&mut self.cost));
            out.push(ZmtpEvent::Message(parts, cost));
        }
        Ok(())
    }

    fn command(&mut self, body: &[u8], out: &mut Vec<ZmtpEvent>) -> Result<(), ZmtpError> {
        if let ZmtpState::Opening(_) = self.state {
            let said = body.strip_prefix(b"\x05READY");
            let said = said.ok_or(ZmtpError::Protocol("no READY after the greeting"))?;
            let other = socket_type(said).ok_or(ZmtpError::Protocol("a READY that is none"))?;
            if !self.own.takes(other) {
                return Err(ZmtpError::Protocol("a socket of a kind that is not spoken with"));
            }
            self.state = ZmtpState::Open;
            out.push(ZmtpEvent::Ready);
        } else if let Some([_, _, context @ ..]) = body.strip_prefix(b"\x04PING") {
            // Behind the time to live.
            if context.len() > CONTEXT_MAX {
                return Err(ZmtpError::Protocol("a PING with too long a context"));
            }
            out.push(ZmtpEvent::Ping(context.to_vec()));
        }
        // Others ask for nothing.
        Ok(())
    }
}

/// The kind of socket in the properties of a `READY`; none where they are not whole.
fn socket_type(mut said: &[u8]) -> Option<&[u8]> {
    let mut kind: &[u8] = b"";
    while let Some((len, rest)) = said.split_first() {
        let (name, rest) = rest.split_at_checked(usize::from(*len))?;
        let (len, rest) = rest.split_first_chunk()?;
        let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*len) as usize)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            kind = value;
        }
        said = rest;
    }
    Some(kind)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proven::PROOF_BYTES;
    use kvferry_engine::core::dialect::native::FRAME_MAX;
    use proptest::prelude::*;

    /// What is heard of bytes that come in pieces, and the most that was held meanwhile.
    fn heard(said: &[u8], pieces: usize) -> (Result<Vec<ZmtpEvent>, ZmtpError>, usize) {
        let (mut reader, mut out, mut most) = (ZmtpReader::new(ZmtpSocket::Router), Vec::new(), 0);
        for piece in said.chunks(pieces) {
            if let Err(why) = reader.read(piece, &mut out) {
                return (Err(why), most);
            }
            most = most.max(reader.held());
        }
        (Ok(out), most)
    }

    /// Same for bytes that are read one message at a time.
    fn by_message(mut said: &[u8]) -> Result<Vec<ZmtpEvent>, ZmtpError> {
        let (mut reader, mut out) = (ZmtpReader::new(ZmtpSocket::Router), Vec::new());
        while !said.is_empty() {
            let before = out.len();
            let count = reader.read_some(said, 1, &mut out)?;
            let is_message = |event: &&ZmtpEvent| matches!(event, ZmtpEvent::Message(..));
            let messages = out[before..].iter().filter(is_message).count();
            assert!(messages == 1 || messages == 0 && count == said.len());
            said = &said[count..];
        }
        Ok(out)
    }

    fn dealer(frames: &[u8]) -> Vec<u8> {
        [&ZmtpSocket::Dealer.opening(), frames].concat()
    }

    #[test]
    fn what_is_wrong_is_named() {
        let protocol = |said: &[u8]| match heard(said, usize::MAX) {
            (Err(ZmtpError::Protocol(why)), _) => why,
            (other, _) => panic!("{other:?}"),
        };
        assert!(protocol(b"GET").contains("no ZMTP"));
        let opening = ZmtpSocket::Dealer.opening();
        let with = |at: usize, byte: u8| {
            let mut changed = opening.clone();
            changed[at] = byte;
            protocol(&changed)
        };
        assert!(with(10, 2).contains("older than 3"));
        assert!(with(12, b'C').contains("NULL"));
        assert!(with(68, b'X').contains("no READY"));
        assert!(with(88, b'X').contains("kind"));
        assert!(with(84, 0xff).contains("READY that is none"));
        assert!(protocol(&[&opening[..64], &[0, 1, 1]].concat()).contains("before READY"));
        assert!(protocol(&dealer(&[5, 1, 1])).contains("flags"));
        assert!(protocol(&dealer(&[8, 1, 1])).contains("flags"));
        assert!(protocol(&dealer(&[6, 0, 0, 0, 0, 0, 0, 16, 1])).contains("command"));
        let ping = |context: &[u8]| {
            let mut said = Vec::new();
            frame(COMMAND, &[b"\x04PING\0\0", context].concat(), &mut said);
            dealer(&said)
        };
        let longest = [7; CONTEXT_MAX];
        let (Ok(events), _) = heard(&ping(&longest), usize::MAX) else { panic!("it is short") };
        assert_eq!(events, [ZmtpEvent::Ready, ZmtpEvent::Ping(longest.to_vec())]);
        assert!(protocol(&ping(&[7; CONTEXT_MAX + 1])).contains("too long a context"));
    }

    #[test]
    fn limits_hold_the_longest_messages_that_peers_send() {
        // A frame with its seal ahead.
        let sealed = FRAME_MAX + PROOF_BYTES + 2 * PART_COST;
        assert!(sealed <= MESSAGE_MAX, "{sealed}");
        // A MoRIIO peer lists a block of one token of a million tokens in five bytes.
        const { assert!(5 * 1_000_000 + PART_COST <= NOTIFY_MAX) };
    }

    #[test]
    fn largest_cost_that_is_set_counts_from_the_next_part_on() {
        let part = |more: bool, len: usize| {
            let mut said = Vec::new();
            frame(if more { MORE } else { 0 }, &vec![1; len], &mut said);
            said
        };
        let (mut reader, mut out) = (ZmtpReader::new(ZmtpSocket::Router), Vec::new());
        assert_eq!(reader.most(), MESSAGE_MAX);
        reader.read(&dealer(&part(true, 1_000)), &mut out).expect("it is short");
        reader.set_most(1_000 + PART_COST);
        assert_eq!(reader.read(&part(false, 0), &mut out), Err(ZmtpError::TooLong));
        let (mut reader, mut out) = (ZmtpReader::new(ZmtpSocket::Router), Vec::new());
        reader.set_most(1_000);
        reader.read(&dealer(&[]), &mut out).expect("a greeting is no message");
        let long = part(false, 2_000);
        reader.set_most(2_000 + PART_COST);
        reader.read(&long[..20], &mut out).expect("it is short enough");
        reader.set_most(1_000);
        reader.read(&long[20..], &mut out).expect("it was begun before");
        assert_eq!(reader.read(&long, &mut out), Err(ZmtpError::TooLong));
    }

    #[test]
    fn a_message_has_a_size_in_all() {
        let whole = MESSAGE_MAX - PART_COST;
        let long = encode(&[&vec![1; whole]]);
        assert!(matches!(heard(&dealer(&long), 65_536), (Ok(events), _) if events.len() == 2));
        for parts in [vec![whole + 1], vec![whole - PART_COST, 1], vec![0; whole / PART_COST + 2]] {
            let bytes = vec![1; whole + 1];
            let parts: Vec<_> = parts.into_iter().map(|len| &bytes[..len]).collect();
            let (result, most) = heard(&dealer(&encode(&parts)), 65_536);
            assert_eq!(result, Err(ZmtpError::TooLong));
            assert!(most <= MESSAGE_MAX, "{most}");
        }
        // That it is announced costs nothing.
        let announced = [&[LONG][..], &(whole as u64).to_be_bytes()].concat();
        assert!(heard(&dealer(&announced), 9).1 <= PART_AHEAD);
        let endless = [&[LONG][..], &u64::MAX.to_be_bytes()].concat();
        assert_eq!(heard(&dealer(&endless), 9).0, Err(ZmtpError::TooLong));
    }

    proptest! {
        #[test]
        fn it_does_not_matter_how_bytes_come(
            opens: bool,
            frames in proptest::collection::vec((0..8_u8, 0..700_usize), 0..40),
            noise: Vec<u8>,
            pieces in 1..200_usize,
        ) {
            let mut said = Vec::new();
            for (flags, len) in frames {
                // Some commands are some.
                let bytes = if len % 3 == 0 { b"\x04PING12345".to_vec() } else { vec![7; len] };
                frame(flags & !LONG, &bytes, &mut said);
            }
            said.extend(noise);
            let said = if opens { dealer(&said) } else { said };
            let (whole, _) = heard(&said, usize::MAX);
            let (pieced, most) = heard(&said, pieces);
            prop_assert_eq!(&whole, &pieced);
            prop_assert_eq!(&whole, &by_message(&said));
            prop_assert!(most <= said.len() * PART_COST + PART_AHEAD);
        }
    }
}
