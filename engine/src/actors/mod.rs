//! The machines as actix actors.
//!
//! A [`Driver`] owns one machine and a [`PlaneAdapter`], performs the effects and feeds the
//! machine. The machine of a deployed engine is an [`Instance`](crate::core::instance::Instance),
//! core and ranks, and its adapter an [`InstanceAdapter`]: the [`LocalPlanes`], and an
//! [`EffectHandler`] for what the engine is to hear. The simulator gives the same actor an adapter
//! of its world. Time comes from the [`Clock`].
//!
//! Nothing queues without bound at a driver. New requests reach it through a [`MailboxSender`],
//! with a [`MailboxPermit`] for each, and are refused when few are left. News of those under way
//! waits for a credit, or is sent past them where the requests that were taken bound it. What
//! drivers tell themselves (that a plane has news) is one message at a time.

mod driver;
mod input_counters;
mod instance_adapter;
mod mailbox;
mod planes;

pub use driver::{Driver, Input, InputQueue, PlaneAdapter, Query};
pub use input_counters::{COUNT_INPUTS, CountedInput, input_counts};
pub use instance_adapter::{EffectHandler, InstanceAdapter};
pub use mailbox::{MailboxMessage, MailboxPermit, MailboxSender};
pub use planes::{LocalPlanes, PlaneSet};

use crate::core::time::Nanos;
use std::sync::Arc;

/// Where a driver gets the time from.
pub type Clock = Arc<dyn Fn() -> Nanos + Send + Sync>;
