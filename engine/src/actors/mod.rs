//! The machines as actix actors.
//!
//! A [`Driver`] owns one machine and its plane ([`DataSeat`] that of a transfer actor,
//! [`ControlSeat`] that of a prefill or decode actor), performs the effects and feeds the machine.
//! A [`Shell`] owns a machine alone: it takes a [`Turn`], calls the machine, and hands the
//! [`Effects`] to the outlet it was given. Time comes from the [`Clock`] of the drivers; shells
//! have none.
//!
//! Nothing queues without bound at a shell: every turn needs a [`Credit`] of its [`Port`], and the
//! credit travels with the effects until they are performed.

mod credit;
mod driver;
mod seats;
mod shell;

pub use credit::{Credit, Full, Port};
pub use driver::{Driver, Give, Look, Seat};
pub use seats::{ControlSeat, CoreMachine, DataSeat, Foreign, RankReport};
pub use shell::{Effects, Shell, Turn};

use crate::core::time::Nanos;
use std::sync::Arc;

/// Where a driver gets the time from.
pub type Clock = Arc<dyn Fn() -> Nanos + Send + Sync>;
