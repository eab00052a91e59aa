//! Memory that strangers may have: unfinished messages, and messages that nobody took yet.

use crate::victim::{ZmqVictim, connect_from, greeted_from, hears_answer, is_answered, part};
use std::io::{Read, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

const HONEST: [u8; 4] = [127, 0, 0, 1];
const STRANGER: [u8; 4] = [127, 0, 0, 2];
const MIB: usize = 1 << 20;

/// More than both budgets of a plane and what the program has anyway, in MiB.
const MEMORY_MAX: u64 = 400;

/// Says the same over and over, up to so many bytes; how many were said until it was cut, if it was.
fn say_until_cut(victim: &ZmqVictim, what: &[u8], most: usize) -> Option<usize> {
    let (mut stream, mut said) = (greeted_from(STRANGER, victim.at), 0);
    while said < most {
        if stream.write_all(what).is_err() {
            return Some(said);
        }
        said += what.len();
    }
    // What was written last may be cut later than it was written.
    let mut rest = Vec::new();
    stream.set_read_timeout(Some(Duration::from_millis(1))).expect("a time");
    match stream.read_to_end(&mut rest) {
        Err(why) if why.kind() == std::io::ErrorKind::WouldBlock => None,
        _ => Some(said),
    }
}

#[test]
fn a_message_of_endless_parts_is_cut() {
    let victim = ZmqVictim::awake();
    let mut honest = greeted_from(HONEST, victim.at);
    let cut = say_until_cut(&victim, &part(true, 64 << 10), 1_600 * MIB);
    let peak = victim.peak_mib();
    assert!(cut.is_some() && peak < MEMORY_MAX, "cut after {cut:?} bytes; memory: {peak} MiB");
    is_answered(&mut honest, 100).expect("others go on");
}

#[test]
fn parts_without_bytes_have_a_size_too() {
    let victim = ZmqVictim::awake();
    let mut honest = greeted_from(HONEST, victim.at);
    let cut = say_until_cut(&victim, &[1, 0].repeat(32 << 10), 32 * MIB);
    let peak = victim.peak_mib();
    assert!(cut.is_some() && peak < MEMORY_MAX, "cut after {cut:?} bytes; memory: {peak} MiB");
    is_answered(&mut honest, 100).expect("others go on");
}

#[test]
fn who_has_most_of_the_unfinished_messages_is_cut_first() {
    let victim = ZmqVictim::awake();
    // Half of a message, which is large.
    let message = part(false, 12 * MIB);
    let mut honest = greeted_from(HONEST, victim.at);
    honest.write_all(&message[..6 * MIB]).expect("it is read");
    let unfinished = part(true, 15 * MIB);
    let strangers: Vec<_> = (0..64)
        .map(|_| {
            let mut stream = greeted_from(STRANGER, victim.at);
            // Those before it may be cut meanwhile, and it, too.
            let _cut = stream.write_all(&unfinished);
            stream
        })
        .collect();
    let peak = victim.peak_mib();
    assert!(peak < MEMORY_MAX, "memory: {peak} MiB");
    honest.write_all(&message[6 * MIB..]).expect("it was not cut");
    hears_answer(&mut honest, 12 * MIB).expect("all of it came");
    drop(strangers);
}

#[test]
fn messages_that_nobody_takes_wait_at_their_sender() {
    const STRANGERS: usize = 20;
    const MESSAGES: usize = 64;
    let mut victim = ZmqVictim::asleep();
    let (at, said) = (victim.at, &AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let strangers: Vec<_> = (0..STRANGERS)
            .map(|_| {
                scope.spawn(move || {
                    let mut stream = greeted_from(STRANGER, at);
                    for _ in 0..MESSAGES {
                        stream.write_all(&part(false, MIB)).expect("nobody is cut");
                        said.fetch_add(1, Ordering::SeqCst);
                    }
                    (0..MESSAGES).for_each(|_| hears_answer(&mut stream, MIB).expect("an answer"));
                })
            })
            .collect();
        // Until nothing more is taken, or everything was.
        let (mut before, mut still) = (0, 0);
        while still < 100 && before < STRANGERS * MESSAGES {
            std::thread::park_timeout(Duration::from_millis(10));
            let now = said.load(Ordering::SeqCst);
            (before, still) = (now, if now == before && now > 0 { still + 1 } else { 0 });
        }
        // More than the kernel holds: somebody reads it, though nobody takes it.
        let mut honest = greeted_from(HONEST, at);
        honest.write_all(&part(false, 16 * MIB)).expect("it is read");
        let peak = victim.peak_mib();
        victim.wake();
        hears_answer(&mut honest, 16 * MIB).expect("an answer");
        strangers.into_iter().for_each(|it| it.join().expect("nothing was lost"));
        assert!(peak < MEMORY_MAX, "taken before it was woken: {before} MiB; memory: {peak} MiB");
    });
}

#[test]
fn who_says_nothing_makes_place_for_who_does() {
    let victim = ZmqVictim::awake();
    let idle: Vec<_> = (0..900).map(|_| connect_from(STRANGER, victim.at)).collect();
    for _ in 0..12 {
        is_answered(&mut greeted_from(STRANGER, victim.at), 10).expect("an answer");
    }
    drop(idle);
}

#[test]
fn a_ping_is_answered_and_nothing_piles_up_for_who_does_not_read() {
    const PING: &[u8] = b"\x04\x0b\x04PING\0\0five";
    let victim = ZmqVictim::awake();
    let mut stream = greeted_from(STRANGER, victim.at);
    stream.write_all(PING).expect("it is heard");
    let mut answer = [0; 11];
    stream.read_exact(&mut answer).expect("an answer");
    assert_eq!(answer, *b"\x04\x09\x04PONGfive");
    let many = PING.repeat(8_192);
    // Where they take longer than three seconds, it is cut as who floods.
    let written = (0..600).take_while(|_| stream.write_all(&many).is_ok()).count();
    assert!(written > 10, "{written} times");
    let peak = victim.peak_mib();
    assert!(peak < 100, "memory: {peak} MiB");
}

#[test]
fn answers_that_nobody_reads_have_an_end() {
    let victim = ZmqVictim::awake();
    let mut honest = greeted_from(HONEST, victim.at);
    let strangers: Vec<_> = (0..8)
        .map(|_| {
            let mut stream = greeted_from(STRANGER, victim.at);
            // By which the answer is as long as the question.
            let question = [part(true, 4), part(false, 4 * MIB)].concat();
            while stream.write_all(&question).is_ok() {}
            stream
        })
        .collect();
    // 512 MiB may wait, unfinished, unread and unsent; each stranger has a message under way, and what is given back
    // the allocator keeps for a time.
    let peak = victim.peak_mib();
    assert!(peak < 900, "memory: {peak} MiB");
    is_answered(&mut honest, 100).expect("others go on");
    drop(strangers);
    // What was unread on connections that are gone does not count against their address any more. The
    // kernel does not hold all of the answer, so that some of it is unread for a while.
    let mut reader = greeted_from(STRANGER, victim.at);
    reader.write_all(&[part(true, 4), part(false, 14 * MIB)].concat()).expect("it is taken");
    let mut answer = vec![0; part(false, 14 * MIB).len()];
    reader.read_exact(&mut answer).expect("all of the answer");
}
