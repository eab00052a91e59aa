//! What the fuzzer calls: one module per target, whose `run` takes the fuzzer's bytes and panics on
//! a finding; and the seeds that it starts from. Ordinary tests run the seeds without a fuzzer.

pub mod admitted;
pub mod allocated;
pub mod descriptors;
pub mod moriio;
pub mod native;
pub mod omni_mori;
pub mod request_id;
pub mod router;
pub mod scenario;
pub mod seeds;
pub mod sequence;
pub mod zmtp;

/// A target of the fuzzer.
#[derive(Clone, Copy, Debug)]
pub struct FuzzTarget {
    /// Name of its binary.
    pub name: &'static str,
    /// Takes the fuzzer's bytes; panics on a finding.
    pub run: fn(&[u8]),
    /// Inputs to start from.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Places of each seed at which tests cut it and hit a byte: fewer where a run has sockets.
    pub places: usize,
}

impl FuzzTarget {
    const fn new(name: &'static str, run: fn(&[u8]), seeds: fn() -> Vec<Vec<u8>>) -> FuzzTarget {
        FuzzTarget { name, run, seeds, places: 16 }
    }
}

pub const TARGETS: &[FuzzTarget] = &[
    FuzzTarget::new("moriio", moriio::run, seeds::moriio),
    FuzzTarget::new("native", native::run, seeds::native),
    FuzzTarget::new("omni_mori", omni_mori::run, seeds::omni_mori),
    FuzzTarget::new("descriptors", descriptors::run, seeds::descriptors),
    FuzzTarget::new("request_id", request_id::run, seeds::request_ids),
    FuzzTarget::new("scenario", scenario::run, seeds::scenarios),
    FuzzTarget::new("sequence", sequence::run, seeds::sequences),
    FuzzTarget::new("admitted", admitted::run, seeds::admitted),
    FuzzTarget::new("zmtp", zmtp::run, seeds::zmtp),
    FuzzTarget { places: 2, ..FuzzTarget::new("router", router::run, router::seeds) },
];

/// The target of this name.
///
/// # Errors
/// There is none; names those that there are.
pub fn target(name: &str) -> Result<&'static FuzzTarget, String> {
    let names: Vec<_> = TARGETS.iter().map(|target| target.name).collect();
    let found = TARGETS.iter().find(|target| target.name == name);
    found.ok_or_else(|| format!("no target {name}; there are {}", names.join(", ")))
}
