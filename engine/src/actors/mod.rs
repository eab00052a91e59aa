//! The machines as actix actors.
//!
//! A [`Driver`] owns one machine and a [`Seat`], performs the effects and feeds the machine. The machine
//! of a deployed engine is an [`Instance`](crate::core::instance::Instance), core and ranks, and its
//! seat a [`Site`]: the [`Planes`], and an [`Outlet`] for what the engine is to hear. The simulator
//! seats the same actor on its world. Time comes from the [`Clock`].
//!
//! Nothing queues without bound at a driver. New requests reach it through a [`Port`], with a
//! [`Credit`] for each, and are refused when few are left. News of those under way waits for a credit,
//! or is sent past them where the requests that were taken bound it. What drivers tell themselves (that
//! a plane has news) is one message at a time.

mod credit;
mod driver;
mod heard;
mod planes;
mod site;

pub use credit::{Credit, Port, Posted};
pub use driver::{Driver, Give, Inputs, Look, Seat};
pub use heard::{HEARD, Heard, heard};
pub use planes::{Fabric, Planes};
pub use site::{Outlet, Site};

use crate::core::time::Nanos;
use std::sync::Arc;

/// Where a driver gets the time from.
pub type Clock = Arc<dyn Fn() -> Nanos + Send + Sync>;
