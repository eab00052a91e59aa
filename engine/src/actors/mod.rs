//! The machines as actix actors.
//!
//! A [`Shell`] owns one machine: it takes a [`Turn`], calls the machine, and hands the [`Effects`]
//! to the outlet it was given. A [`Driver`] owns the plane of one machine ([`DataSeat`] that of a
//! transfer actor, [`ControlSeat`] that of a prefill, decode or router actor), performs the
//! effects and feeds the machine. Time comes from the [`Clock`] of the drivers; shells have none.
//!
//! Nothing queues without bound: every turn needs a [`Credit`] of the shell's [`Port`], and the
//! credit travels with the effects until they are performed.

mod credit;
mod driver;
mod seats;
mod shell;

pub use credit::{Credit, Full, Port};
pub use driver::{Driver, Give, Seat};
pub use seats::{ControlSeat, CoreMachine, DataSeat, Foreign, RankReport};
pub use shell::{Effects, Look, Shell, Turn};

use crate::core::time::Nanos;
use std::sync::Arc;

/// Where a driver gets the time from.
pub type Clock = Arc<dyn Fn() -> Nanos + Send + Sync>;
