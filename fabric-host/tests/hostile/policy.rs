//! The paths that are configured, kept by who serves.

use crate::common::config;
use crate::forged::{AttackedPlane, ForgedMessage, own_memory};
use kvferry_engine::fabric::Memory;
use kvferry_fabric_host::{DataPath, HugePages, MemfdPool};
use std::io::{Read, Write};
use std::net::TcpStream;

/// A control message as it goes by TCP: its words, its head and itself, filled up to words.
fn framed(message: &ForgedMessage) -> Vec<u8> {
    let bytes = message.encode();
    let words = bytes.len().div_ceil(8);
    let mut frame = (words as u64 + 1).to_le_bytes().to_vec();
    frame.extend((7_u64 << 56 | bytes.len() as u64).to_le_bytes());
    frame.extend(&bytes);
    frame.resize(16 + 8 * words, 0);
    frame
}

fn answer(stream: &mut TcpStream) -> ForgedMessage {
    let mut head = [0; 16];
    stream.read_exact(&mut head).expect("an answer");
    let word = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("eight bytes"));
    let mut bytes = vec![0; 8 * (word(0) as usize - 1)];
    stream.read_exact(&mut bytes).expect("an answer");
    rmp_serde::from_slice(&bytes[..word(8) as u32 as usize]).expect("a message")
}

#[test]
fn tcp_is_not_served_where_the_policy_has_none() {
    let pool = MemfdPool::new(8_192, HugePages::No).expect("a pool");
    let victim = AttackedPlane::new(config(DataPath::SharedMemory), pool.memory());
    let mut stream = TcpStream::connect(("127.0.0.1", victim.plane.port())).expect("a connection");
    stream.write_all(&framed(&victim.hello(1))).expect("a hello");
    let answer = answer(&mut stream);
    let why = answer.why();
    assert!(why.contains("tcp") && why.contains("`paths`"), "{why}");
    assert_eq!(victim.plane.counters().refused, 1);
}

#[test]
fn no_file_goes_out_where_the_policy_has_no_shared_memory() {
    let pool = MemfdPool::new(8_192, HugePages::No).expect("a pool");
    let Memory::MemFd { .. } = pool.memory() else { panic!("a memory file") };
    let victim = AttackedPlane::new(config(DataPath::CrossMemory), pool.memory());
    let (socket, _segment) = victim.enter();
    let (answer, file) = victim.open(&socket, own_memory(&[1; 8]), None);
    let ForgedMessage::Opened { result: Ok((DataPath::CrossMemory, region, _)), .. } = answer
    else {
        panic!("{answer:?}")
    };
    assert!(!region.file && file.is_none(), "the memory file went out");
}
