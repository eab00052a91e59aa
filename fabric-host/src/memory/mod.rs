//! Memory of this host: regions that are registered, files that are mapped, pools that are made.

mod map;
mod pool;
mod region;
mod registration_table;

pub(crate) use map::MemfdMapping;
pub(crate) use pool::sealed;
pub use pool::{HugePages, MemfdPool};
pub(crate) use region::{HostMemoryAccess, HostRegion, PidfdProcess};
pub(crate) use registration_table::{ROWS_MAX, RegistrationTable, TABLE_BYTES};
