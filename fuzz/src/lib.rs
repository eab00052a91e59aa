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
}

pub const TARGETS: &[FuzzTarget] = &[
    FuzzTarget { name: "moriio", run: moriio::run, seeds: seeds::moriio },
    FuzzTarget { name: "native", run: native::run, seeds: seeds::native },
    FuzzTarget { name: "omni_mori", run: omni_mori::run, seeds: seeds::omni_mori },
    FuzzTarget { name: "descriptors", run: descriptors::run, seeds: seeds::descriptors },
    FuzzTarget { name: "request_id", run: request_id::run, seeds: seeds::request_ids },
    FuzzTarget { name: "scenario", run: scenario::run, seeds: seeds::scenarios },
    FuzzTarget { name: "sequence", run: sequence::run, seeds: seeds::sequences },
    FuzzTarget { name: "admitted", run: admitted::run, seeds: seeds::admitted },
    FuzzTarget { name: "zmtp", run: zmtp::run, seeds: seeds::zmtp },
    FuzzTarget { name: "router", run: router::run, seeds: router::seeds },
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
