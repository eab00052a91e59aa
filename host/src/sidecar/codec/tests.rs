//! What is said, byte by byte, and what is understood of other versions.

use super::super::proto::{ClientIdentity, ConnectorHello, FromHost, OLDEST, ToHost, VERSION};
use super::*;
use serde::Serialize;
use std::fmt::Debug;

/// The messages of a version as they are sent, a line each: kind and hex. Those of version 5 were
/// recorded with a program that spoke no other.
fn fixture(version: u16) -> String {
    let path = format!("{}/tests/fixtures/embed/v{version}.txt", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(&path).unwrap_or_else(|why| panic!("{path}: {why}"))
}

/// The lines of a kind, as bytes.
fn lines(text: &str, kind: &str) -> Vec<Vec<u8>> {
    let of_kind = |line: &str| {
        let (_, hex) = line.split_once(' ').filter(|(of, _)| *of == kind)?;
        let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex");
        Some((0..hex.len()).step_by(2).map(byte).collect())
    };
    text.lines().filter_map(of_kind).collect()
}

fn hello(who: ClientIdentity) -> ConnectorHello {
    ConnectorHello::new(who)
}

fn said<T: Serialize>(kind: &str, samples: &[T]) -> String {
    let line = |sample| {
        let bytes = encode(sample).expect("it encodes");
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{kind} {hex}\n")
    };
    samples.iter().map(line).collect()
}

/// Who changes what is said on purpose raises the version, and adds a file of its own.
#[test]
fn messages_are_the_bytes_of_their_version() {
    fn same<T: DeserializeOwned + Debug>(kind: &str, golden: &str, samples: Vec<T>) {
        for (line, sample) in lines(golden, kind).iter().zip(samples) {
            let read: T = decode(line).expect("it decodes");
            assert_eq!(format!("{read:?}"), format!("{sample:?}"), "{kind}");
        }
    }
    let hellos: Vec<ConnectorHello> = samples::parts().into_iter().map(hello).collect();
    let (to_host, from_host) = (samples::to_host(), samples::from_host());
    let said = said("hello", &hellos) + &said("to-host", &to_host) + &said("from-host", &from_host);
    let golden = fixture(VERSION);
    assert!(said == golden, "what is said now:\n{said}");
    same("hello", &golden, hellos);
    same("to-host", &golden, to_host);
    same("from-host", &golden, from_host);
}

/// What version 5 has not said of the samples, and how it is read.
const NOT_IN_5: [(&str, &str); 3] = [
    ("last_incarnation: Some(Incarnation(9))", "last_incarnation: None"),
    (r#"request: RequestId("of-flow")"#, r#"request: RequestId("")"#),
    (r#"reader: Some(EngineId("reader"))"#, "reader: None"),
];

/// The same of versions before 7.
const NOT_IN_6: (&str, &str) = (
    "backend: BackendCounts { rebuilds: 3, resets: 2, missing: 1, dead_queue_pairs: 4 }",
    "backend: BackendCounts { rebuilds: 0, resets: 0, missing: 0, dead_queue_pairs: 0 }",
);

/// The same of versions before 9.
const NOT_IN_8: [(&str, &str); 2] =
    [("dialect: Some(Native)", "dialect: None"), ("dialect: Some(Moriio)", "dialect: None")];

/// Messages that there are since versions 8, 9 and 10, by kind; the last of the samples.
const NEW: [(&str, [usize; 3]); 3] =
    [("hello", [1, 0, 0]), ("to-host", [14, 0, 2]), ("from-host", [18, 1, 3])];

fn is_understood(version: u16, absent: &[(&str, &str)]) {
    /// Equal but for what the version does not have.
    fn same<T>(version: u16, kind: &str, samples: Vec<T>, absent: &[(&str, &str)])
    where
        T: DeserializeOwned + Debug,
    {
        let recorded = lines(&fixture(version), kind);
        let added = NEW.iter().find(|(of, _)| *of == kind).expect("a kind").1;
        let later: usize =
            (8..).zip(added).filter(|(since, _)| version < *since).map(|(_, count)| count).sum();
        assert_eq!(recorded.len() + later, samples.len(), "{kind}");
        for (recorded, sample) in recorded.iter().zip(samples) {
            let read: T = MessageDecoder::new(VersionRange { oldest: 5, newest: version })
                .read(recorded)
                .expect("it decodes")
                .expect("it is known");
            let mut expected = format!("{sample:?}");
            for (there, read) in absent {
                expected = expected.replace(there, read);
            }
            assert_eq!(format!("{read:?}"), expected, "{kind}");
        }
    }
    let newest = format!("newest: Some({VERSION})");
    let read =
        if version == 5 { "newest: None".into() } else { format!("newest: Some({version})") };
    let versions = format!("newest: {VERSION} }}");
    let then = format!("newest: {version} }}");
    let mut absent = absent.to_vec();
    absent.extend([(&*newest, &*read), (&*versions, &*then)]);
    absent.extend((version < 7).then_some(NOT_IN_6));
    let offer = format!("offer: {:?}", Some(samples::offer()));
    if version < 9 {
        absent.extend(NOT_IN_8);
        absent.push((&offer, "offer: None"));
    }
    same(version, "hello", samples::parts().into_iter().map(hello).collect(), &absent);
    same(version, "to-host", samples::to_host(), &absent);
    same(version, "from-host", samples::from_host(), &absent);
}

#[test]
fn messages_of_earlier_versions_are_understood() {
    is_understood(5, &NOT_IN_5);
    is_understood(6, &[]);
    is_understood(7, &[]);
    is_understood(8, &[]);
    is_understood(9, &[]);
}

#[test]
fn the_newest_common_version_is_chosen() {
    let agree = |oldest, newest| VersionRange { oldest, newest }.agree("the other side");
    assert_eq!(agree(5, 5), Ok(5));
    assert_eq!(agree(1, VERSION), Ok(VERSION));
    assert_eq!(agree(VERSION, VERSION + 5), Ok(VERSION));
    for (oldest, newest) in [(1, 4), (VERSION + 1, VERSION + 2), (9, 1)] {
        let why = agree(oldest, newest).expect_err("none in common");
        let ranges = why.contains(&format!("{oldest} to {newest}"))
            && why.contains(&format!("{OLDEST} to {VERSION}"));
        assert!(ranges && why.contains("install one version"), "{why}");
    }
}

#[derive(Serialize)]
enum LaterMessage {
    /// With a field that is new.
    Layers {
        layers: u16,
        color: &'static str,
        step: u64,
    },
    /// There in a later version only.
    Painted {
        color: &'static str,
    },
    Repainted,
}

#[test]
fn what_is_new_in_a_later_version_is_skipped() {
    let later = VersionRange { oldest: OLDEST, newest: VERSION + 1 };
    for versions in [VersionRange::OWN, later] {
        let mut reader = MessageDecoder::new(versions);
        let known =
            encode(&LaterMessage::Layers { layers: 2, color: "red", step: 8 }).expect("it encodes");
        let Ok(Some(ToHost::Layers { step, layers: 2 })) = reader.read(&known) else { panic!() };
        assert_eq!(step.0, 8);
        for new in [LaterMessage::Painted { color: "red" }, LaterMessage::Repainted] {
            let new = encode(&new).expect("it encodes");
            assert!(matches!(reader.read::<ToHost>(&new), Ok(None)));
            assert!(matches!(reader.read::<FromHost>(&new), Ok(None)));
        }
        // A known message that cannot be read is damaged, unless the other side is later.
        let odd = encode(&("Layers", 1)).expect("it encodes");
        assert_eq!(reader.read::<ToHost>(&odd).is_err(), versions == VersionRange::OWN);
    }
}
