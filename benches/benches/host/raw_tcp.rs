//! Nothing but `sendmsg` and `recvmsg` over loopback, by one or several streams, each with a thread
//! on both sides and its share of the blocks: what TCP can do with the sockets' own settings.

use super::workload::{ROWS, Workload};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;

/// Most streams that are compared with.
pub(crate) const STREAMS_MAX: usize = 4;

/// Ranges that one call takes.
const RANGES_MAX: usize = 1_024;

type MessageCall = unsafe extern "C" fn(libc::c_int, *mut libc::msghdr, libc::c_int) -> isize;

unsafe extern "C" fn send(fd: libc::c_int, header: *mut libc::msghdr, flags: libc::c_int) -> isize {
    // SAFETY: The caller promises it of the header.
    unsafe { libc::sendmsg(fd, header, flags) }
}

/// A share of the blocks of a row, which one stream carries.
struct BlockShare {
    row: usize,
    part: usize,
    streams: usize,
    times: u64,
}

impl BlockShare {
    fn encode(&self) -> [u8; 32] {
        let words = [self.row as u64, self.part as u64, self.streams as u64, self.times];
        let mut bytes = [0; 32];
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn decode(bytes: &[u8; 32]) -> BlockShare {
        let word =
            |n: usize| u64::from_le_bytes(bytes[8 * n..8 * n + 8].try_into().expect("eight bytes"));
        let small = |n| word(n) as usize;
        BlockShare { row: small(0), part: small(1), streams: small(2), times: word(3) }
    }

    fn of<'a>(&self, blocks: &'a [u64]) -> &'a [u64] {
        let at = |n: usize| blocks.len() * n / self.streams;
        &blocks[at(self.part)..at(self.part + 1)]
    }
}

/// Moves blocks through a socket.
///
/// # Safety
/// The blocks are in the pool, and nothing else is at them.
unsafe fn pass(call: MessageCall, stream: &TcpStream, pool: u64, blocks: &[u64], size: u64) {
    let mut ranges = Vec::with_capacity(RANGES_MAX);
    let (mut index, mut offset) = (0, 0);
    while index < blocks.len() {
        ranges.clear();
        for (n, at) in blocks[index..].iter().take(RANGES_MAX).enumerate() {
            let skip = if n == 0 { offset } else { 0 };
            let base = (pool + at + skip) as *mut libc::c_void;
            ranges.push(libc::iovec { iov_base: base, iov_len: (size - skip) as usize });
        }
        // SAFETY: An all-zero header is a valid one.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        (header.msg_iov, header.msg_iovlen) = (ranges.as_mut_ptr(), ranges.len() as _);
        // SAFETY: The list is as long as the header says, and its ranges are the caller's promise.
        let moved = unsafe { call(stream.as_raw_fd(), &raw mut header, 0) };
        assert!(moved > 0, "{}", std::io::Error::last_os_error());
        let past = offset + moved as u64;
        (index, offset) = (index + (past / size) as usize, past % size);
    }
}

fn land(mut stream: TcpStream, pool: u64) {
    stream.set_nodelay(true).expect("loopback");
    let drawn: Vec<Vec<u64>> = ROWS.iter().map(|row| row.blocks()[1].clone()).collect();
    let mut head = [0; 32];
    while stream.read_exact(&mut head).is_ok() {
        let share = BlockShare::decode(&head);
        let blocks = share.of(&drawn[share.row]);
        for _ in 0..share.times {
            // SAFETY: Blocks of a row are inside the pool, and streams have other shares of them.
            unsafe { pass(libc::recvmsg, &stream, pool, blocks, ROWS[share.row].size) };
        }
        stream.write_all(&[1]).expect("the initiator waits");
    }
}

/// Lands what is sent into a pool, for as long as the process lives; the port.
pub(crate) fn serve(pool: u64) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let port = listener.local_addr().expect("bound").port();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || land(stream, pool));
        }
    });
    port
}

/// The side that sends.
pub(crate) struct RawStreams(Vec<TcpStream>);

impl RawStreams {
    pub(crate) fn connect(port: u16) -> RawStreams {
        let stream = |_| {
            let stream = TcpStream::connect(("127.0.0.1", port)).expect("the child listens");
            stream.set_nodelay(true).expect("loopback");
            stream
        };
        RawStreams((0..STREAMS_MAX).map(stream).collect())
    }

    /// Sends blocks of a row and waits until they are in their places.
    ///
    /// # Safety
    /// They are in the pool.
    pub(crate) unsafe fn send(
        &self,
        streams: usize,
        (pool, from): (u64, &[u64]),
        row: &Workload,
        times: usize,
    ) {
        let number = ROWS.iter().position(|other| other.name == row.name).expect("a row");
        let one = |part: usize| {
            let share = BlockShare { row: number, part, streams, times: times as u64 };
            let mut stream = &self.0[part];
            stream.write_all(&share.encode()).expect("the child hears");
            for _ in 0..times {
                // SAFETY: The caller promises it.
                unsafe { pass(send, stream, pool, share.of(from), row.size) };
            }
            stream.read_exact(&mut [0]).expect("the child answers");
        };
        std::thread::scope(|scope| {
            (1..streams).for_each(|part| _ = scope.spawn(move || one(part)));
            one(0);
        });
    }
}
