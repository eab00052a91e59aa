//! Planes with a secret serve whom they can prove to know it, and nobody else; both sides are told
//! why.

mod common;

use common::remote::HostTestMemory;
use common::{next, patient, write_secrets};
use kvferry_engine::core::dialect::moriio::descriptor::{DescLayout, MoriEngineDesc};
use kvferry_engine::fabric::{
    Address, Completion, DataEvent, DataPlane, Direction, FabricError, OpId, PeerId, RegionDesc,
    RegionId, SessionId, Submit,
};
use kvferry_fabric_host::{DataPath, HostConfig, HostError, HostPlane, PeerTrust};
use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;

const OURS: &str = "0123456789abcdef0123456789abcdef";
const THEIRS: &str = "fedcba9876543210fedcba9876543210";
const REGION: RegionId = RegionId(1);
const PEER: PeerId = PeerId(2);
const LEN: u64 = 4_096;

/// A file with secrets, gone afterwards.
struct SecretTestFile(PathBuf);

impl SecretTestFile {
    fn new(name: &str, secrets: &[&str]) -> SecretTestFile {
        let name = format!("kvferry-{}-{name}", std::process::id());
        let secret = SecretTestFile(std::env::temp_dir().join(name));
        secret.write(secrets);
        secret
    }

    fn write(&self, secrets: &[&str]) {
        write_secrets(&self.0, secrets);
    }
}

impl Drop for SecretTestFile {
    fn drop(&mut self) {
        let _gone = fs::remove_file(&self.0);
    }
}

/// A plane with memory.
struct SecretTestSide {
    plane: HostPlane,
    desc: RegionDesc,
    memory: HostTestMemory,
    /// The port at which it is dialled, in place of its own.
    via: Option<u16>,
}

impl SecretTestSide {
    fn new(path: DataPath, secret: Option<&SecretTestFile>) -> SecretTestSide {
        SecretTestSide::with(path, secret, false)
    }

    /// One that knows the secret, and encrypts or not.
    fn by_tcp(secret: &SecretTestFile, encrypt: bool) -> SecretTestSide {
        SecretTestSide::with(DataPath::Tcp, Some(secret), encrypt)
    }

    fn with(path: DataPath, secret: Option<&SecretTestFile>, encrypt: bool) -> SecretTestSide {
        let secret_file = secret.map(|secret| secret.0.clone());
        let trust = PeerTrust { secret_file, encrypt, ..PeerTrust::default() };
        let config = HostConfig { paths: vec![path], open_door: true, trust, ..patient() };
        let mut plane = HostPlane::new(config).expect("a plane at loopback");
        let mut memory = HostTestMemory::new(LEN, path == DataPath::SharedMemory);
        plane.register(REGION, memory.memory()).expect("memory is taken");
        let desc = match next(&mut plane) {
            DataEvent::Registered { result: Ok(desc), .. } => desc,
            other => panic!("{other:?}"),
        };
        SecretTestSide { plane, desc, memory, via: None }
    }

    fn address(&self) -> Address {
        let address = self.plane.address();
        let Some(port) = self.via else { return address };
        let desc = MoriEngineDesc::decode(&address.0).expect("its own address");
        let desc = MoriEngineDesc { port: port.into(), ..desc };
        Address(desc.encode(DescLayout::V1_2_2).into())
    }

    /// Names `far`, and opens a session with it; why not.
    fn open(&mut self, far: &SecretTestSide, number: u32) -> Result<SessionId, FabricError> {
        let (peer, session) = (PeerId(PEER.0 + number), SessionId(number));
        self.plane.connect(peer, &far.address(), 0).expect("a peer");
        self.plane.open(session, REGION, peer, &far.desc).expect("an open is taken");
        match next(&mut self.plane) {
            DataEvent::Opened { result, .. } => result.map(|()| session),
            other => panic!("{other:?}"),
        }
    }

    fn write(&mut self, session: SessionId, op: u64) {
        let (op, direction) = (OpId(op), Direction::Write);
        let (local, remote, len) = (&[0][..], &[0][..], &[LEN][..]);
        self.plane.submit(Submit { op, session, direction, local, remote, len }).expect("taken");
        let outcome = Completion::Done;
        assert_eq!(next(&mut self.plane), DataEvent::Completed { op, outcome });
    }
}

#[test]
fn who_knows_the_secret_is_served() {
    let secret = SecretTestFile::new("served", &[OURS]);
    for path in DataPath::ALL {
        let mut near = SecretTestSide::new(path, Some(&secret));
        let mut far = SecretTestSide::new(path, Some(&secret));
        let session = near.open(&far, 1).expect("both know it");
        near.memory.poke(0, &[0xa5; LEN as usize]);
        near.write(session, 1);
        let mut arrived = [0; LEN as usize];
        far.memory.peek(0, &mut arrived);
        assert_eq!(arrived, [0xa5; LEN as usize], "{path}");
        assert_eq!(far.plane.counters().refused, 0, "{path}");
    }
}

#[test]
fn who_does_not_know_it_is_told_why() {
    let (ours, theirs) =
        (SecretTestFile::new("ours", &[OURS]), SecretTestFile::new("theirs", &[THEIRS]));
    for path in DataPath::ALL {
        for (dialler, acceptor, encrypt, said) in [
            (Some(&theirs), Some(&ours), false, "the two sides have different secrets"),
            (Some(&theirs), Some(&ours), true, "the two sides have different secrets"),
            (None, Some(&ours), false, "a proof of the fleet's secret is demanded here"),
            (Some(&ours), None, false, "there is no secret_file where it has to come from"),
        ] {
            let mut near = SecretTestSide::with(path, dialler, encrypt);
            let far = SecretTestSide::with(path, acceptor, encrypt);
            let why = near.open(&far, 1).expect_err("they do not know each other").to_string();
            assert!(why.contains(said) && why.contains("secret_file"), "{path}: {why}");
            assert_eq!(far.plane.counters().refused, 1, "{path}");
        }
    }
}

#[test]
fn a_secret_is_changed_beside_the_work() {
    let secret = SecretTestFile::new("changed", &[OURS]);
    let late = SecretTestFile::new("late", &[OURS]);
    let mut near = SecretTestSide::new(DataPath::Tcp, Some(&secret));
    let far = SecretTestSide::new(DataPath::Tcp, Some(&late));
    let first = near.open(&far, 1).expect("both know the first");
    let mut op = 0;
    let mut others = Vec::new();
    let mut session = 1;
    let steps: [&[&str]; 3] = [&[OURS, THEIRS], &[THEIRS, OURS], &[THEIRS]];
    for step in steps {
        for file in [&secret, &late] {
            file.write(step);
            // A link of its own, so that there is a greeting.
            let other = SecretTestSide::new(DataPath::Tcp, Some(&late));
            session += 1;
            near.open(&other, session).expect("they meet at each step");
            others.push(other);
            op += 1;
            near.write(first, op);
        }
    }
    let past = SecretTestFile::new("past", &[OURS]);
    let mut stranger = SecretTestSide::new(DataPath::Tcp, Some(&past));
    stranger.open(&far, 1).expect_err("what is taken out is not accepted");
}

/// What goes by TCP is encrypted on both sides or on neither, and both are told of the setting.
#[test]
fn one_side_alone_does_not_encrypt() {
    let secret = SecretTestFile::new("one", &[OURS]);
    for (dialler, acceptor, said) in [
        (true, false, "tcp is not encrypted here, and the hello is: set encrypt on both sides"),
        (false, true, "tcp is encrypted here, and the hello is not: set encrypt on both sides"),
    ] {
        let mut near = SecretTestSide::by_tcp(&secret, dialler);
        let far = SecretTestSide::by_tcp(&secret, acceptor);
        let why = near.open(&far, 1).expect_err("one encrypts").to_string();
        assert!(why.contains(said), "{why}");
        assert_eq!(far.plane.counters().refused, 1);
    }
}

#[test]
fn a_plane_without_a_secret_does_not_encrypt() {
    let trust = PeerTrust { encrypt: true, ..PeerTrust::default() };
    match HostPlane::new(HostConfig { trust, ..patient() }) {
        Err(HostError::Config(why)) => {
            assert!(why.contains("encrypt = true") && why.contains("secret_file"), "{why}");
        }
        other => panic!("{other:?}"),
    }
}

/// What a plane says of itself in a greeting.
const KEY: &str = "kvferry";

/// Somebody who forwards what two planes say to each other; all of it, both ways in one.
fn overhear(listener: &TcpListener, to: u16) -> Vec<u8> {
    let forward = |mut from: &TcpStream, mut to: &TcpStream| {
        let (mut heard, mut bytes) = (Vec::new(), [0; 4_096]);
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            heard.extend_from_slice(&bytes[..count]);
            if to.write_all(&bytes[..count]).is_err() {
                break;
            }
        }
        let _closed = to.shutdown(Shutdown::Both);
        let _closed = from.shutdown(Shutdown::Both);
        heard
    };
    std::thread::scope(|scope| {
        let mut ways = Vec::new();
        for _ in 0..HostConfig::default().streams {
            let (near, _) = listener.accept().expect("it is dialled");
            let near = Arc::new(near);
            let far = Arc::new(TcpStream::connect(("127.0.0.1", to)).expect("a plane listens"));
            for (from, to) in [(near.clone(), far.clone()), (far, near)] {
                ways.push(scope.spawn(move || forward(&from, &to)));
            }
        }
        ways.into_iter().flat_map(|way| way.join().expect("it forwards")).collect()
    })
}

#[test]
fn who_is_on_the_path_reads_nothing_of_what_is_encrypted() {
    let secret = SecretTestFile::new("path", &[OURS]);
    for encrypt in [false, true] {
        let far = SecretTestSide::by_tcp(&secret, encrypt);
        let mut near = SecretTestSide::by_tcp(&secret, encrypt);
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        let (via, port) = (listener.local_addr().expect("bound").port(), far.plane.port());
        let heard = std::thread::spawn(move || overhear(&listener, port));
        let mut far = SecretTestSide { via: Some(via), ..far };
        let session = near.open(&far, 1).expect("both know the secret");
        let bytes: Vec<u8> = b"what nobody is to read..........".repeat(LEN as usize / 32);
        near.memory.poke(0, &bytes);
        near.write(session, 1);
        let mut arrived = vec![0; LEN as usize];
        far.memory.peek(0, &mut arrived);
        assert_eq!(arrived, bytes);
        drop((near, far));
        let heard = heard.join().expect("it forwards");
        for text in [KEY.as_bytes(), b"what nobody"] {
            let is_heard = heard.windows(text.len()).any(|heard| heard == text);
            assert_eq!(is_heard, !encrypt, "{}", text.escape_ascii());
        }
    }
}

#[test]
fn a_plane_without_the_secret_that_it_is_to_have_does_not_start() {
    let secret_file = Some(PathBuf::from("/nowhere/secret"));
    match HostPlane::new(HostConfig {
        trust: PeerTrust { secret_file, ..PeerTrust::default() },
        ..patient()
    }) {
        Err(HostError::Config(why)) => {
            assert!(why.contains("/nowhere/secret") && why.contains("cannot be read"), "{why}");
        }
        other => panic!("{other:?}"),
    }
}
