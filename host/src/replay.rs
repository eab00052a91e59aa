//! `replay`: a recording is played to the protocol again.

use crate::attempt::{guarded, quiet_panics};
use crate::cli::{ReplayArgs, complain};
use crate::exit::{Exit, Stop};
use crate::table::grouped;
use fabric_sim::replay::{ReplayError, Replayed, replay};
use fabric_sim::world::Recording;
use std::io::Write;

/// Replays a recording and says whether the protocol does the same again.
///
/// # Errors
/// A file that is no recording, or output that cannot be written.
pub(crate) fn command(args: &ReplayArgs, out: &mut dyn Write) -> Result<Exit, Stop> {
    let name = args.recording.display();
    let bytes = std::fs::read(&args.recording).map_err(|why| {
        let text = format!("{name}: cannot read the recording: {why}");
        Stop::Input(format!("{text}; make one with `kvferry run FILE --record {name}`"))
    })?;
    quiet_panics();
    match guarded(|| replay(&Recording(bytes))) {
        Ok(Ok(Replayed { scenario, seed, inputs, effects })) => {
            let (inputs, effects) = (grouped(inputs), grouped(effects));
            writeln!(out, "{scenario} seed {seed}: {inputs} inputs, the same {effects} effects")?;
            Ok(Exit::Held)
        }
        Ok(Err(ReplayError::Damaged { records: 0, why })) => {
            let text = format!("{name}: not a recording: {why}");
            Err(Stop::Input(format!("{text}; make one with `kvferry run FILE --record {name}`")))
        }
        Ok(Err(why @ ReplayError::Differs { .. })) => {
            complain(&format!("{name}: {why}"));
            Ok(Exit::NotDeterministic)
        }
        Ok(Err(why)) => Err(Stop::Input(format!("{name}: {why}"))),
        Err(text) => {
            complain(&format!("{name}: {text}"));
            Ok(Exit::Panic)
        }
    }
}
