//! The machines as actix actors.
//!
//! A [`Driver`] owns one machine and a [`PlaneAdapter`], performs the effects and feeds the
//! machine. The machine of a deployed engine is an [`Instance`](crate::core::instance::Instance),
//! core and ranks, and its adapter an [`InstanceAdapter`]: the [`LocalPlanes`], and an
//! [`EffectHandler`] for what the engine is to hear. The simulator gives the same actor an adapter
//! of its world. Time comes from the [`Clock`].
//!
//! A serving engine makes its instance with an [`InstanceBuilder`]:
//!
//! ```
//! use kvferry_engine::actors::{EffectHandler, Input, InputQueue, InstanceBuilder};
//! use kvferry_engine::core::config::CoreConfig;
//! use kvferry_engine::core::instance::{Instance, InstanceInput};
//! use kvferry_engine::core::layout::LayerLayout;
//! use kvferry_engine::core::message::{DecodeAnswer, DecodeHook, FinishReason};
//! use kvferry_engine::core::transfer::TransferSettings;
//! use kvferry_engine::fabric::{ControlPlane, DataPlane, Memory};
//!
//! struct Scheduler;
//!
//! impl EffectHandler for Scheduler {
//!     fn decode(&mut self, answer: DecodeAnswer, inputs: &mut InputQueue<Instance>) {
//!         // Allocates blocks, runs the request whose KV is there, frees what failed.
//!         if let DecodeAnswer::Loaded { request } = answer {
//!             let reason = FinishReason::Length;
//!             inputs.push_back(DecodeHook::Finished { request, reason }.into());
//!         }
//!     }
//! }
//!
//! /// Within an actix system.
//! fn start(
//!     config: CoreConfig,
//!     wire: Box<dyn ControlPlane>,
//!     plane: Box<dyn DataPlane>,
//!     kv: (Vec<Memory>, Vec<LayerLayout>),
//!     arrived: DecodeHook,
//! ) {
//!     let instance = InstanceBuilder::new(config).with_core(wire);
//!     let instance = instance.with_rank(0, plane, kv, TransferSettings::default());
//!     let actor = instance.start(|_address| Scheduler);
//!     actor.do_send(Input(arrived.into()));
//! }
//! ```
//!
//! Nothing queues without bound at a driver. New requests reach it through a [`MailboxSender`],
//! with a [`MailboxPermit`] for each, and are refused when few are left. News of those under way
//! waits for a credit, or is sent past them where the requests that were taken bound it. What
//! drivers tell themselves (that a plane has news) is one message at a time.

mod driver;
mod input_counters;
mod instance_adapter;
mod instance_builder;
mod mailbox;
mod planes;

pub use driver::{Driver, Input, InputQueue, PlaneAdapter, Query};
pub use input_counters::{COUNT_INPUTS, CountedInput, input_counts};
pub use instance_adapter::{EffectHandler, InstanceAdapter};
pub use instance_builder::{InstanceBuilder, InstanceDriver};
pub use mailbox::{MailboxMessage, MailboxPermit, MailboxSender};
pub use planes::{LocalPlanes, PlaneSet};

use crate::core::time::Nanos;
use std::sync::Arc;

/// Where a driver gets the time from.
pub type Clock = Arc<dyn Fn() -> Nanos + Send + Sync>;

/// The time since this call, by the system's monotonic clock.
pub fn monotonic_clock() -> Clock {
    #[allow(clippy::disallowed_types)] // Time enters here.
    let start = std::time::Instant::now();
    Arc::new(move || Nanos(start.elapsed().as_nanos() as u64))
}
