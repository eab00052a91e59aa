//! A host with a pool, and processes of stages that put and get payloads.

mod hosts;
#[path = "../sidecar_process/mod.rs"]
mod sidecar_process;

use kvferry::sidecar::proto::{ClientIdentity, ConnectorHello, FromHost, ToHost};
use kvferry::sidecar::{ArrivedPayload, PayloadLink, PoolOffer};
use kvferry_engine::core::ids::EngineId;
use kvferry_engine::core::payload::{
    KEY_BYTES_MAX, PayloadFailure, PayloadHook, PayloadKey, PayloadStream,
};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use sidecar_process::{PATIENCE, SidecarProcess, scrape, series};
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

const POOL: u64 = 64 << 20;
const POOL_ARGS: [&str; 2] = ["--payload-pool", "67108864"];

/// A process of a stage, and its way into the pool.
struct StageProcess {
    link: PayloadLink,
    pool: File,
    /// What other hosts call its host.
    engine: Option<EngineId>,
}

impl StageProcess {
    fn of(host: &SidecarProcess, stage: &str) -> StageProcess {
        let link = PayloadLink::connect(&host.socket, "server", stage).expect("the host listens");
        let PoolOffer { bytes, file, engine, .. } =
            link.wait_ready(PATIENCE).expect("it has a pool");
        assert_eq!(bytes, POOL);
        StageProcess { link, pool: File::from(file), engine }
    }

    fn put(&self, key: &PayloadKey, bytes: &[u8]) {
        let reserved = self.link.reserve(bytes.len() as u64, PATIENCE).expect("a host");
        let reserved = reserved.expect("there is room");
        self.pool.write_all_at(bytes, reserved.offset).expect("the pool can be written");
        let stored = self.link.put(reserved.slot, key.clone(), (1, key.chunk.is_some()));
        stored.expect("a host").expect("the host takes it");
    }

    fn wait(&self, key: &PayloadKey) -> Result<ArrivedPayload, PayloadFailure> {
        self.link.want(key, None).expect("a host");
        let outcome = self.link.wait(key, PATIENCE).expect("a host");
        outcome.expect("there is an outcome").map_err(|(failure, _)| failure)
    }

    /// The first bytes of a payload that arrived.
    fn read(&self, payload: &ArrivedPayload, bytes: usize) -> Vec<u8> {
        assert!(payload.bytes >= bytes as u64);
        let mut read = vec![0; bytes];
        self.pool.read_exact_at(&mut read, payload.offset).expect("the pool can be read");
        read
    }
}

fn stream(request: &str) -> PayloadStream {
    PayloadStream::new("0", "1", request)
}

#[test]
fn what_one_process_puts_another_gets_once() {
    let (host, metrics) = SidecarProcess::with_metrics("payloads", &POOL_ARGS);
    let (thinker, talker) = (StageProcess::of(&host, "0"), StageProcess::of(&host, "1"));
    // Below and above what slots are kept for.
    for (chunk, bytes) in [(0, 3_305), (1, 1_611_713)] {
        let key = stream("r").chunk(chunk);
        assert_eq!(talker.link.poll(&key).expect("a host"), None);
        let data: Vec<u8> = (0..bytes).map(|at: usize| ((at * 7) >> 3) as u8).collect();
        thinker.put(&key, &data);
        let payload = talker.wait(&key).expect("it was put");
        assert!(talker.read(&payload, bytes) == data);
        talker.link.take(payload.claim).expect("a host");
        assert_eq!(talker.wait(&key), Err(PayloadFailure::Taken));
        talker.link.release(payload.claim).expect("a host");
    }
    thinker.link.end(stream("r"), None).expect("a host");
    assert_eq!(talker.wait(&stream("r").chunk(2)), Err(PayloadFailure::Ended));
    let page = scrape(metrics);
    for line in [
        "kvferry_payload_puts_total 2",
        "kvferry_payload_gets_total{outcome=\"arrived\"} 2",
        "kvferry_payload_gets_total{outcome=\"taken\"} 2",
        "kvferry_payload_gets_total{outcome=\"ended\"} 1",
        "kvferry_payload_pool_bytes 67108864",
        "kvferry_payload_processes 2",
        "kvferry_payload_misuses_total 0",
        "kvferry_payloads 0",
    ] {
        series(&page, line);
    }
}

#[test]
fn what_crosses_with_an_abandonment_is_for_the_next() {
    let (host, metrics) = SidecarProcess::with_metrics("abandoned-payloads", &POOL_ARGS);
    let (thinker, talker) = (StageProcess::of(&host, "0"), StageProcess::of(&host, "1"));
    for chunk in 0..500 {
        let key = stream("r").chunk(chunk);
        talker.link.want(&key, None).expect("a host");
        thinker.put(&key, b"payload");
        // It may be on its way, be there, or not be put yet.
        talker.link.abandon(&key).expect("a host");
        let payload = talker.wait(&key).expect("it was put");
        assert_eq!(talker.read(&payload, 7), b"payload");
        talker.link.release(payload.claim).expect("a host");
    }
    // What was released is so when this is answered.
    assert_eq!(talker.wait(&stream("r").chunk(1)), Err(PayloadFailure::Taken));
    let page = scrape(metrics);
    series(&page, "kvferry_payload_misuses_total 0");
    series(&page, "kvferry_payloads 0");
}

#[test]
fn who_waits_for_a_process_that_dies_is_told() {
    let host = SidecarProcess::with_args("dead-producers", &POOL_ARGS);
    let (thinker, talker) = (StageProcess::of(&host, "0"), StageProcess::of(&host, "1"));
    let key = stream("r").chunk(1);
    thinker.put(&stream("r").chunk(0), b"first");
    talker.link.want(&key, None).expect("a host");
    drop(thinker);
    assert_eq!(talker.wait(&key), Err(PayloadFailure::ProducerGone));
    // What it had put is there.
    let payload = talker.wait(&stream("r").chunk(0)).expect("it was put");
    assert_eq!(talker.read(&payload, 5), b"first");
}

#[test]
fn threads_share_a_link() {
    let host = SidecarProcess::with_args("threads", &POOL_ARGS);
    let (thinker, talker) = (StageProcess::of(&host, "0"), StageProcess::of(&host, "1"));
    let keys: Vec<_> = (0..8).map(|request| stream(&request.to_string())).collect();
    std::thread::scope(|scope| {
        for stream in &keys {
            let talker = &talker;
            scope.spawn(move || {
                for chunk in 0..100 {
                    let payload = talker.wait(&stream.chunk(chunk)).expect("it is put");
                    let expected = format!("{stream} {chunk}");
                    assert_eq!(talker.read(&payload, expected.len()), expected.as_bytes());
                    talker.link.release(payload.claim).expect("a host");
                }
            });
        }
        for chunk in 0..100 {
            for stream in &keys {
                thinker.put(&stream.chunk(chunk), format!("{stream} {chunk}").as_bytes());
            }
        }
    });
}

#[test]
fn room_is_waited_for_and_no_longer_than_was_said() {
    let host = SidecarProcess::with_args("full-pool", &POOL_ARGS);
    let thinker = StageProcess::of(&host, "0");
    let all = thinker.link.reserve(POOL - (1 << 20), PATIENCE).expect("a host").expect("room");
    let none = thinker.link.reserve(2 << 20, Duration::ZERO).expect("a host");
    assert!(matches!(none, Err(PayloadFailure::PoolFull { bytes: 2_097_152, .. })), "{none:?}");
    let none = thinker.link.reserve(POOL + 1, PATIENCE).expect("a host");
    assert_eq!(none, Err(PayloadFailure::TooLong { bytes: POOL + 1, pool: POOL }));
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| thinker.link.reserve(2 << 20, PATIENCE));
        while thinker.link.gauges().tickets == 0 {
            std::thread::yield_now();
        }
        thinker.link.give_back(all.slot).expect("a host");
        waits.join().expect("no panic").expect("a host").expect("there is room now");
    });
}

#[test]
fn nobody_waits_for_a_host_that_stands_still() {
    let host = SidecarProcess::with_args("stopped-host", &POOL_ARGS);
    let thinker = StageProcess::of(&host, "0");
    let pid = Pid::from_child(&host.child);
    kill_process(pid, Signal::STOP).expect("it runs");
    waitpid(Some(pid), WaitOptions::UNTRACED).expect("it stops");
    let why = thinker.link.reserve(1 << 20, Duration::ZERO).expect_err("it does not answer");
    assert!(why.to_string().contains("stands still"), "{why}");
    // What is told and not read ends as well, when there is no room for it.
    let told =
        (0..1_000_000).find_map(|chunk| thinker.link.end(stream(&format!("{chunk}")), None).err());
    let why = told.expect("there is an end to what can be told");
    assert!(why.to_string().contains("stands still"), "{why}");
    thinker.link.close();
}

#[test]
fn what_was_put_is_what_the_next_one_gets() {
    let host = SidecarProcess::with_args("put-twice", &POOL_ARGS);
    let (thinker, talker) = (StageProcess::of(&host, "0"), StageProcess::of(&host, "1"));
    for number in 0..1_000 {
        let key = stream(&format!("{number}")).whole();
        for text in [b"first", b"later"] {
            thinker.put(&key, text);
        }
        talker.link.want(&key, None).expect("a host");
        let outcome = talker.link.wait_for_answer(&key, Duration::ZERO).expect("a host");
        let Some(Ok(payload)) = outcome else { panic!("{outcome:?}") };
        assert_eq!(talker.read(&payload, 5), b"later");
        talker.link.release(payload.claim).expect("a host");
    }
}

#[test]
fn names_that_are_too_long_are_refused_and_nothing_else() {
    let host = SidecarProcess::with_args("long-names", &POOL_ARGS);
    let (thinker, talker) = (StageProcess::of(&host, "0"), StageProcess::of(&host, "1"));
    for bytes in [KEY_BYTES_MAX, 40_000_000, 70_000_000] {
        let key = stream(&"k".repeat(bytes)).whole();
        let slot = thinker.link.reserve(1, PATIENCE).expect("a host").expect("room").slot;
        let long = [
            thinker.link.put(slot, key.clone(), (1, false)).err(),
            talker.link.want(&key, None).err(),
            thinker.link.end(key.stream.clone(), None).err(),
            talker.link.clean_up(key.stream.clone(), false).err(),
        ];
        for why in long {
            let why = why.expect("it is too long");
            assert_eq!(why.kind(), ErrorKind::InvalidInput, "{why}");
            assert!(why.to_string().contains("give requests shorter ids"), "{why}");
        }
        thinker.link.give_back(slot).expect("a host");
    }
    thinker.put(&stream("r").whole(), b"all");
    assert!(talker.wait(&stream("r").whole()).is_ok());
}

#[test]
fn a_pulse_ends_a_wait() {
    let host = SidecarProcess::with_args("pulse", &POOL_ARGS);
    let connected = PayloadLink::connect(&host.socket, "server", "1").expect("the host listens");
    let ends = Arc::new(AtomicBool::new(false));
    let seen = ends.clone();
    let link = connected.with_pulse(move || match seen.load(Ordering::Relaxed) {
        true => Err(ErrorKind::Interrupted.into()),
        false => Ok(()),
    });
    link.wait_ready(PATIENCE).expect("it has a pool");
    let (key, other) = (stream("r").whole(), stream("s").whole());
    link.want(&key, None).expect("a host");
    link.want(&other, None).expect("a host");
    let all = link.reserve(POOL - (1 << 20), PATIENCE).expect("a host").expect("room");
    std::thread::scope(|scope| {
        let mut waits = vec![scope.spawn(|| link.wait(&key, PATIENCE).err())];
        waits.push(scope.spawn(|| link.wait(&other, PATIENCE).err()));
        waits.push(scope.spawn(|| link.reserve(2 << 20, PATIENCE).err()));
        while link.gauges().tickets == 0 {
            std::thread::yield_now();
        }
        ends.store(true, Ordering::Relaxed);
        for wait in waits {
            let why = wait.join().expect("no panic").expect("it was ended");
            assert_eq!(why.kind(), ErrorKind::Interrupted);
        }
    });
    ends.store(false, Ordering::Relaxed);
    // What comes of the reservation goes back.
    link.give_back(all.slot).expect("a host");
    link.reserve(POOL - (1 << 20), PATIENCE).expect("a host").expect("there is room");
}

#[test]
fn reservations_that_wait_together_get_slots_of_their_own() {
    let host = SidecarProcess::with_args("together", &POOL_ARGS);
    let link = PayloadLink::connect(&host.socket, "server", "1").expect("the host listens");
    link.wait_ready(PATIENCE).expect("it has a pool");
    let all = link.reserve(POOL - (1 << 20), PATIENCE).expect("a host").expect("room");
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let waits = [(); 2].map(|()| scope.spawn(|| link.reserve(2 << 20, PATIENCE)));
        while link.gauges().tickets < 2 {
            assert!(begun.elapsed() < PATIENCE, "{} tickets", link.gauges().tickets);
            std::thread::yield_now();
        }
        link.give_back(all.slot).expect("a host");
        let [one, two] =
            waits.map(|wait| wait.join().expect("no panic").expect("a host").expect("room"));
        assert_ne!(one.slot, two.slot);
        assert!(one.offset.abs_diff(two.offset) >= 2 << 20, "{one:?} {two:?}");
    });
}

#[test]
fn pulse_comes_once_in_twenty_milliseconds_at_most() {
    let host = SidecarProcess::with_args("paced", &POOL_ARGS);
    let connected = PayloadLink::connect(&host.socket, "server", "1").expect("the host listens");
    let pulses = Arc::new(AtomicU32::new(0));
    let counted = pulses.clone();
    let link = connected.with_pulse(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        Ok(())
    });
    link.wait_ready(PATIENCE).expect("it has a pool");
    let key = stream("r").whole();
    link.want(&key, None).expect("a host");
    let (begun, before) = (Instant::now(), pulses.load(Ordering::Relaxed));
    let none = link.wait(&key, Duration::from_millis(200)).expect("a host");
    let most = begun.elapsed().as_millis() / 20;
    assert!(none.is_none(), "nobody puts it: {none:?}");
    let pulses = pulses.load(Ordering::Relaxed) - before;
    assert!(u128::from(pulses) <= most, "{pulses} pulses, at most {most}");
}

#[test]
fn stage_of_the_first_version_with_payloads_is_served() {
    let host = SidecarProcess::with_args("oldest", &POOL_ARGS);
    let who = ClientIdentity::Stage { deployment: "d".into(), stage: "1".into(), pool: None };
    let (needed, _) = who.needs();
    for newest in [needed - 1, needed] {
        let hello = ConnectorHello { newest: Some(newest), ..ConnectorHello::new(who.clone()) };
        let hello = rmp_serde::to_vec(&hello).expect("it encodes");
        let mut socket = UnixStream::connect(&host.socket).expect("the host listens");
        let bytes = [&(hello.len() as u32).to_be_bytes()[..], &hello].concat();
        socket.write_all(&bytes).expect("the host reads");
        let mut len = [0; 4];
        socket.read_exact(&mut len).expect("an answer");
        let mut answer = vec![0; u32::from_be_bytes(len) as usize];
        socket.read_exact(&mut answer).expect("an answer");
        let answer = rmp_serde::from_slice(&answer).expect("a message");
        match newest == needed {
            true => assert!(matches!(answer, FromHost::Pool { .. }), "{answer:?}"),
            false => assert!(matches!(answer, FromHost::Refused { .. }), "{answer:?}"),
        }
    }
}

#[test]
fn a_host_that_stages_started_ends_for_a_pool_of_another_size() {
    let args = ["--payload-pool", "67108864", "--idle-s", "600"];
    let socket = sidecar_process::place("other-pool");
    let mut child = sidecar_process::spawn(&socket, None, &args);
    let connect = |pool| PayloadLink::connect_for(&socket, ("server", "0"), pool);
    let link = loop {
        match connect(Some(POOL)) {
            Ok(link) if link.wait_ready(PATIENCE).is_ok() => break link,
            _ => std::thread::yield_now(),
        }
    };
    // Not as long as somebody uses it, nor for who does not say which one it needs.
    for pool in [Some(2 * POOL), None] {
        let other = connect(pool).expect("the host listens");
        assert_eq!(other.wait_ready(PATIENCE).expect("it has a pool").bytes, POOL);
    }
    link.close();
    drop(link);
    // The host hears of the end of a connection in its own time.
    loop {
        let other = connect(Some(2 * POOL)).expect("the host listens");
        match other.wait_ready(PATIENCE) {
            Ok(_) => std::thread::yield_now(),
            Err(why) => break assert_eq!(why.kind(), ErrorKind::NotConnected, "{why}"),
        }
    }
    assert!(child.wait().expect("it ends").success());
}

#[test]
fn a_host_serves_stages_or_an_engine() {
    let of_engine = SidecarProcess::start("no-stages");
    let link = PayloadLink::connect(&of_engine.socket, "server", "0").expect("it listens");
    let why = link.wait_ready(PATIENCE).expect_err("it has no pool");
    assert_eq!(why.kind(), ErrorKind::ConnectionRefused);
    assert!(why.to_string().contains("--payload-pool"), "{why}");
    let of_stages = SidecarProcess::with_args("no-engine", &POOL_ARGS);
    let mut heard = Vec::new();
    of_stages.connect(ClientIdentity::Observer).wait(PATIENCE, &mut heard).expect("an answer");
    assert!(matches!(&heard[..], [FromHost::Refused { why }] if why.contains("serves no engine")));
}

#[test]
fn who_wants_a_payload_of_mori_where_that_is_not_served_is_told() {
    let host = SidecarProcess::with_args("no-mori", &POOL_ARGS);
    let talker = StageProcess::of(&host, "1");
    let key = stream("r").chunk(0);
    talker.link.fetch(&key, "tcp://127.0.0.1:50051".into()).expect("a host");
    let outcome = talker.link.wait(&key, PATIENCE).expect("a host").expect("there is an outcome");
    let Err((PayloadFailure::GivenUp(why), _)) = outcome else { panic!("{outcome:?}") };
    assert!(why.contains("payload_mori_listen"), "{why}");
}

#[test]
fn a_pool_that_memory_does_not_hold_is_refused_at_the_start() {
    let socket = sidecar_process::place("large-pool");
    let args = ["--payload-pool", "1000000000000000"];
    let host = sidecar_process::host(&socket, None, &args).output().expect("the binary runs");
    let said = String::from_utf8_lossy(&host.stderr).into_owned();
    assert_eq!(host.status.code(), Some(2), "{said}");
    assert!(said.contains("payload_pool = 1000000000000000: "), "{said}");
    assert!(said.contains("bytes of memory are available"), "{said}");
}

#[test]
fn options_of_a_pool_without_a_pool_do_not_start_a_host() {
    let socket = sidecar_process::place("no-pool");
    let args = ["--payload-listen", "127.0.0.1:0", "--payload-hold-ms", "7"];
    let host = sidecar_process::host(&socket, None, &args).output().expect("the binary runs");
    let said = String::from_utf8_lossy(&host.stderr).into_owned();
    assert_eq!(host.status.code(), Some(2), "{said}");
    assert!(said.contains("--payload-hold-ms, --payload-listen: of a pool of payloads"), "{said}");
    assert!(said.contains("give --payload-pool BYTES"), "{said}");
}

#[test]
fn settings_of_a_pool_that_hosts_share_are_said_to_be_ignored_by_those_without_one() {
    let folder = env!("CARGO_TARGET_TMPDIR");
    let file = std::path::Path::new(folder).join("shared-by-hosts.toml");
    std::fs::write(&file, "payload_hold_ms = 7\n").expect("a file");
    let socket = sidecar_process::place("ignored");
    let _ = std::fs::remove_file(&socket);
    let set = ("KVFERRY_HOST_PAYLOAD_HOSTS", "127.0.0.1:1");
    let more = ["--config", file.to_str().expect("UTF-8")];
    let mut host = sidecar_process::host(&socket, Some(set), &more);
    let mut child = host.stderr(std::process::Stdio::piped()).spawn().expect("the binary runs");
    let log = BufReader::new(child.stderr.take().expect("it is piped"));
    let host = SidecarProcess::listening(child, socket);
    // All was said before it listened, and a host that is gone says no more.
    drop(host);
    let said: Vec<String> = log.lines().map(|line| line.expect("a log")).collect();
    for key in ["payload_hold_ms", "payload_hosts"] {
        let is_about = |line: &&String| line.contains(&format!("key=\"{key}\""));
        let line = said.iter().find(is_about).unwrap_or_else(|| panic!("no {key}: {said:?}"));
        assert!(line.contains("WARN") && line.contains("there is no payload_pool"), "{line}");
    }
}

#[test]
fn who_says_what_is_not_its_to_say_is_cut_off() {
    let host = SidecarProcess::with_args("misuse", &POOL_ARGS);
    let identity =
        || ClientIdentity::Stage { deployment: "server".into(), stage: "0".into(), pool: None };
    for said in [ToHost::Payload(PayloadHook::Left), ToHost::Unable { why: "no".into() }] {
        let (mut client, mut heard) = (host.connect(identity()), Vec::new());
        client.send(&said).expect("the host reads");
        let end = loop {
            match client.wait(PATIENCE, &mut heard) {
                Ok(()) if heard.iter().any(|told| matches!(told, FromHost::Refused { .. })) => {
                    break None;
                }
                Ok(()) => heard.clear(),
                Err(why) => break Some(why),
            }
        };
        assert!(end.is_none(), "{said:?}: {end:?}");
    }
    // Others are served.
    let (thinker, talker) = (StageProcess::of(&host, "0"), StageProcess::of(&host, "1"));
    thinker.put(&stream("r").whole(), b"all");
    assert!(talker.wait(&stream("r").whole()).is_ok());
}

#[test]
fn a_closed_link_ends_who_waits_and_an_idle_host_ends() {
    let args = ["--payload-pool", "67108864", "--idle-s", "0"];
    let socket = sidecar_process::place("idle-host");
    let mut child = sidecar_process::spawn(&socket, None, &args);
    // Until somebody has come it may end at any time, so it is connected to until it has one.
    let link = loop {
        match PayloadLink::connect(&socket, "server", "0") {
            Ok(link) if link.wait_ready(PATIENCE).is_ok() => break link,
            _ if child.try_wait().expect("a child").is_some() => {
                child = sidecar_process::spawn(&socket, None, &args);
            }
            _ => std::thread::yield_now(),
        }
    };
    let key = stream("r").whole();
    link.want(&key, None).expect("a host");
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| link.wait(&key, PATIENCE));
        link.close();
        let why = waits.join().expect("no panic").expect_err("it is closed");
        assert!(why.to_string().contains("closed"), "{why}");
    });
    assert!(child.wait().expect("it ends").success());
}
