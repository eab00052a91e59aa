//! Programs of inputs for a prefill or decode core: a peer that may say anything at any time, an
//! engine and ranks that keep to the contract of the hooks and reports, and time that passes.

mod decode;
pub(crate) mod frames;
mod network;
mod prefill;
mod ranks;
mod step;
mod world;

use arbitrary::{Arbitrary, Unstructured};
use decode::DecodeEngine;
use kvferry_engine::core::message::Mode;
use prefill::PrefillEngine;
use step::FuzzStep;
use world::{FuzzEngine, FuzzWorld};

/// Steps of one program.
const STEPS_MAX: usize = 400;

/// Plays the program that the bytes are; the first says what kind of core it is for.
///
/// # Panics
/// If a core panics, calls for more than it should at once, holds more than its limits, answers its
/// engine out of turn, or owes it an answer after all links are down and all times have passed.
pub fn run(data: &[u8]) {
    let Some((kind, program)) = data.split_first() else { return };
    let bit = |at: u8| kind >> at & 1 == 1;
    let mode = if bit(1) { Mode::Pull } else { Mode::Push };
    if bit(0) {
        play(FuzzWorld::<DecodeEngine>::new(mode, bit(2), bit(3)), program);
    } else {
        play(FuzzWorld::<PrefillEngine>::new(mode, bit(2), bit(3)), program);
    }
}

fn play<E: FuzzEngine>(mut world: FuzzWorld<E>, program: &[u8]) {
    let mut program = Unstructured::new(program);
    for _ in 0..STEPS_MAX {
        if program.is_empty() || world.is_tired() {
            break;
        }
        let Ok(step) = FuzzStep::arbitrary(&mut program) else { break };
        world.step(step);
    }
    world.settle();
}
