//! Connectors of the version before, as they were recorded with hosts of that version.

use crate::rig::*;
use engine::core::message::DecodeAnswer;
use kvferry::embed::proto::FromHost;
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::mem::discriminant;
use std::os::unix::net::UnixStream;

/// Lines of who spoke, `>` to the host or `<` from it, and the frame in hex. A decode with one
/// worker, whose memory nobody touches: two requests that cannot be served, and an onlooker.
const CONVERSATION: &str = include_str!("../fixtures/embed/conversation-v5.txt");

fn frames() -> Vec<(&'static str, bool, Vec<u8>)> {
    let frame = |line: &'static str| {
        let mut words = line.split(' ');
        let (who, way, hex) = (words.next(), words.next(), words.next().expect("three words"));
        let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex");
        let bytes = (0..hex.len()).step_by(2).map(byte).collect();
        (who.expect("three words"), way == Some(">"), bytes)
    };
    CONVERSATION.lines().map(frame).collect()
}

fn receive(stream: &mut UnixStream) -> Vec<u8> {
    let mut head = [0; 4];
    stream.read_exact(&mut head).expect("a frame");
    let mut body = vec![0; u32::from_be_bytes(head) as usize];
    stream.read_exact(&mut body).expect("a frame");
    body
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

#[test]
fn a_connector_of_version_5_is_served_as_it_was() {
    let host = Host::start("version-5");
    let mut streams: BTreeMap<&str, UnixStream> = BTreeMap::new();
    let (mut said, mut heard) = (0, 0);
    for (who, is_said, frame) in frames() {
        let stream = streams.entry(who).or_insert_with(|| {
            let stream = UnixStream::connect(&host.socket).expect("the host listens");
            stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
            stream
        });
        if is_said {
            stream.write_all(&(frame.len() as u32).to_be_bytes()).expect("the host reads");
            stream.write_all(&frame).expect("the host reads");
            said += 1;
            continue;
        }
        let read = |bytes: &[u8]| -> FromHost { rmp_serde::from_slice(bytes).expect("an answer") };
        let (now, then) = (read(&receive(stream)), read(&frame));
        assert_eq!(discriminant(&now), discriminant(&then), "{now:?} in place of {then:?}");
        assert_eq!(gist(&now), gist(&then));
        heard += 1;
    }
    assert!(said >= 6 && heard >= 6, "{said} {heard}");
}
