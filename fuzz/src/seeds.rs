//! Inputs to start from, made of the recorded captures and the scenario files of this repository.

use crate::sequence::frames;
use kvferry_engine::core::dialect::native;
use serde_json::Value;
use std::path::{Path, PathBuf};

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name)
}

/// All files below a folder with this extension, by path.
///
/// # Panics
/// If they cannot be read.
fn files(below: &Path, extension: &str) -> Vec<(PathBuf, String)> {
    let entries = std::fs::read_dir(below).unwrap_or_else(|why| panic!("{below:?}: {why}"));
    let mut paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    let mut found = Vec::new();
    for path in paths {
        if path.is_dir() {
            found.extend(files(&path, extension));
        } else if path.extension().is_some_and(|is| is == extension) {
            let text = std::fs::read_to_string(&path);
            let text = text.unwrap_or_else(|why| panic!("{path:?}: {why}"));
            found.push((path, text));
        }
    }
    found
}

/// Gives every value of all captures to `visit`.
fn captures(visit: &mut impl FnMut(&Value)) {
    for (path, text) in files(&folder("engine/tests/moriio/fixtures"), "json") {
        let json: Value =
            serde_json::from_str(&text).unwrap_or_else(|why| panic!("{path:?}: {why}"));
        walk(&json, visit);
    }
}

fn walk(value: &Value, visit: &mut impl FnMut(&Value)) {
    visit(value);
    match value {
        Value::Array(items) => items.iter().for_each(|item| walk(item, visit)),
        Value::Object(items) => items.values().for_each(|item| walk(item, visit)),
        _ => {}
    }
}

/// The bytes of a text that is nothing but hex digits.
fn unhex(text: &str) -> Option<Vec<u8>> {
    if text.len() < 2 || !text.len().is_multiple_of(2) || !text.is_ascii() {
        return None;
    }
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).ok()).collect()
}

fn frames_of_captures() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    captures(&mut |value| seeds.extend(value.as_str().and_then(unhex)));
    seeds
}

/// Recorded frames, and `kv_transfer_params`.
pub fn moriio() -> Vec<Vec<u8>> {
    let mut seeds = frames_of_captures();
    captures(&mut |value| {
        if value.get("remote_engine_id").is_some() {
            seeds.push(value.to_string().into_bytes());
        }
    });
    tidy(seeds)
}

/// What was recorded of vLLM-Omni's connector for MoRI.
///
/// # Panics
/// If it cannot be read.
pub fn omni_mori() -> Vec<Vec<u8>> {
    let path = folder("engine/tests/golden/omni-mori.txt");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|why| panic!("{path:?}: {why}"));
    tidy(text.lines().filter_map(|line| unhex(line.split_once(' ')?.1)).collect())
}

/// Recorded frames, among which are descriptors of all layouts.
pub fn descriptors() -> Vec<Vec<u8>> {
    tidy(frames_of_captures().into_iter().filter(|seed| matches!(seed[0], 0x90..=0x9f)).collect())
}

/// Recorded request ids and addresses.
pub fn request_ids() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    captures(&mut |value| {
        let marked = |text: &&str| text.contains("_addr_") || text.contains("host:");
        seeds.extend(value.as_str().filter(marked).map(|text| text.as_bytes().to_vec()));
    });
    tidy(seeds)
}

/// One frame of each kind in each version.
pub fn native() -> Vec<Vec<u8>> {
    let versions = native::VERSION_MIN..=native::VERSION;
    let frames = versions.flat_map(frames::samples);
    tidy(frames.map(|frame| native::encode(&frame)).collect())
}

/// All scenario files, with seed 0.
pub fn scenarios() -> Vec<Vec<u8>> {
    let files = files(&folder("scenarios"), "toml").into_iter();
    let scenarios = files.filter(|(path, _)| !path.ends_with("Cargo.toml"));
    tidy(scenarios.map(|(_, text)| [b"\0", text.as_bytes()].concat()).collect())
}

/// The recorded handshake of a dialler, whole and greeted before, with messages and commands.
///
/// # Panics
/// If it cannot be read.
pub fn zmtp() -> Vec<Vec<u8>> {
    let path = folder("wire/tests/fixtures/zmtp_handshake_stream.json");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|why| panic!("{path:?}: {why}"));
    let json: Value = serde_json::from_str(&text).unwrap_or_else(|why| panic!("{path:?}: {why}"));
    let dialler = json["dialler_to_listener_hex"].as_str().and_then(unhex).unwrap_or_default();
    let behind: [&[u8]; 5] = [
        b"",
        b"\x00\x02hi",
        b"\x01\x00\x01\x01a\x00\x00",
        b"\x04\x0b\x04PING\x00\x00five\x00\x01x",
        b"\x03\x00\x00\x00\x00\x00\x00\x00\x01y\x02\x00\x00\x00\x00\x7f\x00\x00\x00",
    ];
    let pieces = [1_u8, 2, 15, 254, 255];
    let seed = |how: u8, behind: &[u8]| {
        let opening: &[u8] = if how.is_multiple_of(2) { &dialler } else { &[] };
        [&[how], opening, behind].concat()
    };
    tidy(pieces.iter().flat_map(|how| behind.map(|behind| seed(*how, behind))).collect())
}

/// Pseudo-random programs (splitmix64), four of each kind of core.
pub fn sequences() -> Vec<Vec<u8>> {
    (0..64).map(program).collect()
}

/// Pseudo-random peers, half of them by TCP and half by the local socket. Half of them greet as
/// planes do.
pub fn admitted() -> Vec<Vec<u8>> {
    let peer = |seed: u64| {
        let mut peer = program(seed);
        if seed % 4 < 2 {
            peer[1] = 0;
        }
        peer
    };
    (0..64).map(peer).collect()
}

fn program(seed: u64) -> Vec<u8> {
    let words = (1..64_u64).flat_map(|n| {
        let z = (seed << 32 | n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31).to_le_bytes()
    });
    [seed as u8].into_iter().chain(words).collect()
}

fn tidy(mut seeds: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    seeds.sort();
    seeds.dedup();
    seeds
}
