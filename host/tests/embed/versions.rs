//! Connectors and hosts of earlier versions, as they were recorded with each other.

use crate::rig::*;
use kvferry::sidecar::SidecarClient;
use kvferry::sidecar::proto::{ClientIdentity, FromHost, ToHost, VERSION};
use kvferry::sidecar::spec::ServingEngine;
use kvferry_engine::core::message::{DecodeAnswer, DecodeHook, FinishReason, Mode, Role};
use kvferry_fabric_host::{HugePages, MemfdPool};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::mem::discriminant;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};

/// Lines of who spoke, `>` to the host or `<` from it, and the frame in hex. A decode with one
/// worker, whose memory nobody touches: two requests that cannot be served, and an onlooker.
const VERSION_5: &str = include_str!("../fixtures/embed/conversation-v5.txt");

/// The same of the version before this one.
const VERSION_9: &str = include_str!("../fixtures/embed/conversation-v9.txt");

const BEFORE: u16 = 9;

#[test]
fn the_version_before_is_recorded() {
    assert_eq!(BEFORE + 1, VERSION, "record a conversation of version {}", VERSION - 1);
}

fn frames(conversation: &'static str) -> Vec<(&'static str, bool, Vec<u8>)> {
    let frame = |line: &'static str| {
        let mut words = line.split(' ');
        let (who, way, hex) = (words.next(), words.next(), words.next().expect("three words"));
        let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex");
        let bytes = (0..hex.len()).step_by(2).map(byte).collect();
        (who.expect("three words"), way == Some(">"), bytes)
    };
    conversation.lines().map(frame).collect()
}

fn receive(stream: &mut UnixStream) -> Vec<u8> {
    let mut head = [0; 4];
    stream.read_exact(&mut head).expect("a frame");
    let mut body = vec![0; u32::from_be_bytes(head) as usize];
    stream.read_exact(&mut body).expect("a frame");
    body
}

fn send(stream: &mut UnixStream, frame: &[u8]) {
    stream.write_all(&(frame.len() as u32).to_be_bytes()).expect("the other side reads");
    stream.write_all(frame).expect("the other side reads");
}

fn answer(frame: &[u8]) -> FromHost {
    rmp_serde::from_slice(frame).expect("an answer")
}

/// What an answer says that does not differ from run to run.
fn gist(answer: &FromHost) -> String {
    match answer {
        FromHost::Ready { address, lease_ms, .. } => format!("{} {lease_ms}", address.host),
        FromHost::Ended(ended) => ended.outcome.name().into(),
        // Words may change, and why the second one fails depends on the machine.
        FromHost::Unusable { request, .. } => request.to_string(),
        FromHost::Decode(DecodeAnswer::Rejected { request, .. }) => format!("rejected {request}"),
        FromHost::Trace(trace) => {
            trace.records.iter().map(|record| format!("{} ", record.request)).collect()
        }
        other => format!("{other:?}"),
    }
}

fn is_served_as_it_was(name: &str, conversation: &'static str) {
    let host = SidecarProcess::start(name);
    let mut streams: BTreeMap<&str, UnixStream> = BTreeMap::new();
    let (mut said, mut heard) = (0, 0);
    for (who, is_said, frame) in frames(conversation) {
        let stream = streams.entry(who).or_insert_with(|| {
            let stream = UnixStream::connect(&host.socket).expect("the host listens");
            stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
            stream
        });
        if is_said {
            send(stream, &frame);
            said += 1;
            continue;
        }
        let (now, then) = (answer(&receive(stream)), answer(&frame));
        assert_eq!(discriminant(&now), discriminant(&then), "{now:?} in place of {then:?}");
        assert_eq!(gist(&now), gist(&then));
        heard += 1;
    }
    assert!(said >= 6 && heard >= 6, "{said} {heard}");
}

#[test]
fn a_connector_of_version_5_is_served_as_it_was() {
    is_served_as_it_was("version-5", VERSION_5);
}

#[test]
fn a_connector_of_the_version_before_is_served_as_it_was() {
    is_served_as_it_was("version-before", VERSION_9);
}

/// A host of an earlier version: says to one after the other who connects what was said to `parts`,
/// each frame after as many as were heard before it, until so many were said and heard.
fn old_host(
    name: &str,
    conversation: &'static str,
    parts: &'static [(&'static str, usize)],
) -> (PathBuf, JoinHandle<()>) {
    let socket = place(name);
    let listener = UnixListener::bind(&socket).expect("the path is free");
    let play = move || {
        for (part, number) in parts {
            let (mut stream, _) = listener.accept().expect("a connector");
            let frames = frames(conversation).into_iter().filter(|(who, ..)| who == part);
            for (_, is_heard, frame) in frames.take(*number) {
                if is_heard {
                    receive(&mut stream);
                } else {
                    send(&mut stream, &frame);
                }
            }
        }
    };
    (socket, thread::spawn(play))
}

fn link(socket: &Path, who: ClientIdentity) -> SidecarClient {
    SidecarClient::connect(socket, who).expect("the host listens")
}

fn without_limits() -> ServingEngine {
    let mut engine = engine(Role::Decode, Mode::Pull, Sidecar);
    engine.settings.limits = Default::default();
    engine
}

fn serves_a_connector_of_today(name: &str, conversation: &'static str) {
    let parts = &[("worker", 2), ("scheduler", 9), ("observer", 2)];
    let (socket, host) = old_host(name, conversation, parts);
    let then = |who: &str| {
        let frames = frames(conversation)
            .into_iter()
            .filter(move |(part, is_said, _)| *part == who && !is_said);
        frames.map(|(_, _, frame)| gist(&answer(&frame))).collect::<Vec<_>>()
    };
    let heard = |link: &mut SidecarClient, number: usize| {
        let mut heard = Vec::new();
        while heard.len() < number {
            let mut more = Vec::new();
            link.wait(PATIENCE, &mut more).expect("the host says something");
            heard.extend(more.iter().map(gist));
        }
        heard
    };
    let pool = MemfdPool::new(2 * BLOCKS * BLOCK, HugePages::No).expect("some memory");
    let mut worker = link(&socket, ClientIdentity::Worker(Box::new(worker(&pool, 32))));
    assert_eq!(heard(&mut worker, 1), then("worker"));
    let mut scheduler = link(&socket, ClientIdentity::Scheduler(Box::new(without_limits())));
    let mut said = heard(&mut scheduler, 1);
    for request in ["r", "d-1"] {
        let (request, params) = (request.into(), "{}".into());
        scheduler
            .send(&ToHost::Arrived { request, params, tokens: 40, prompt_hash: None })
            .expect("the host hears");
        said.extend(heard(&mut scheduler, 2));
    }
    assert_eq!(said, then("scheduler"));
    let (request, reason) = ("d-1".into(), FinishReason::Aborted);
    let finished = ToHost::Decode(DecodeHook::Finished { request, reason });
    scheduler.send(&finished).expect("the host hears");
    let mut observer = link(&socket, ClientIdentity::Observer);
    assert_eq!(heard(&mut observer, 1), then("observer"));
    host.join().expect("it heard what it expects");
}

#[test]
fn a_host_of_version_5_serves_a_connector_of_today() {
    serves_a_connector_of_today("host-of-version-5", VERSION_5);
}

#[test]
fn a_host_of_the_version_before_serves_a_connector_of_today() {
    serves_a_connector_of_today("host-of-the-version-before", VERSION_9);
}

#[test]
fn what_a_host_of_version_5_does_not_know_is_not_asked_of_it() {
    let parts = &[("worker", 2), ("scheduler", 2)];
    let (socket, host) = old_host("limits-of-version-5", VERSION_5, parts);
    let pool = MemfdPool::new(2 * BLOCKS * BLOCK, HugePages::No).expect("some memory");
    let _worker = link(&socket, ClientIdentity::Worker(Box::new(worker(&pool, 32))));
    let engine = engine(Role::Decode, Mode::Pull, Sidecar);
    let mut scheduler = link(&socket, ClientIdentity::Scheduler(Box::new(engine)));
    let why = scheduler.wait(PATIENCE, &mut Vec::new()).expect_err("it has no limits");
    let why = why.to_string();
    assert!(why.contains("version 5") && why.contains("install one version"), "{why}");
    host.join().expect("it heard what it expects");
}
