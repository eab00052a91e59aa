//! Memory of this host: regions that are registered, files that are mapped, pools that are made.

mod map;
mod pool;
mod region;
mod roll;

pub(crate) use map::Map;
pub(crate) use pool::sealed;
pub use pool::{HugePages, Pool};
pub(crate) use region::{Process, Reach, Region};
pub(crate) use roll::{ROLL_BYTES, ROLL_MAX, Roll};
