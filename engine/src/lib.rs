//! The KV transfer protocol of kvferry: it moves the KV cache of prompts from the serving engines
//! that compute it (prefill) to those that generate tokens (decode).
//!
//! ```text
//!  serving engine of the prefill                        serving engine of the decode
//!      | PrefillHook    ^ PrefillAnswer                     | DecodeHook     ^ DecodeAnswer
//!      v                |                                   v                |
//!  +---------- Driver (actor) ----------+              +---------- Driver (actor) ----------+
//!  |  Instance                          |              |                        Instance    |
//!  |   Prefill core                     |              |                    Decode core     |
//!  |    | TransferJob  ^ TransferReport |              | TransferJob |  ^ TransferReport    |
//!  |    v              |                |              |             v  |                   |
//!  |   Transfer of rank 0, 1, ...       |              |   Transfer of rank 0, 1, ...       |
//!  +-----|----------------|-------------+              +-----|----------------|-------------+
//!        |           ControlPlane <== Ask, Begun, Announce, ==> ControlPlane  |
//!        |                            Delivered, ...                          |
//!    DataPlane <===================== bytes of KV blocks ================> DataPlane
//! ```
//!
//! [`core`] holds the protocol as state machines without IO, clock, randomness or async;
//! [`fabric`] the two traits through which bytes and frames leave the process; [`effects`] performs
//! the effects of a machine on a plane. With the feature `actors` (the default) the same machines
//! run as actix [`actors`], which is how a serving engine embeds them; the packages
//! `kvferry-fabric-host` and `kvferry-fabric-mori` have data planes, `kvferry-wire` a control plane
//! and the example `connector`: two engines, two processes, 150 lines. The feature `conformance`
//! has the checks that every plane has to pass.
//!
//! A machine is told what happened and when, and says what it wants done. Nothing else is needed to
//! try one:
//!
//! ```
//! use kvferry_engine::core::config::CoreConfig;
//! use kvferry_engine::core::ids::{Incarnation, TransferKey};
//! use kvferry_engine::core::layout::{Geometry, KvGroup};
//! use kvferry_engine::core::message::{Mode, PrefillAnswer, PrefillHook, PrefillLeg, Role};
//! use kvferry_engine::core::prefill::{Prefill, PrefillEffect, PrefillInput};
//! use kvferry_engine::core::prompt_hash::PromptHash;
//! use kvferry_engine::core::{Machine, Nanos, Outbox};
//!
//! let geometry = Geometry::new("llama", 8, vec![KvGroup::full(16, 0..32)]);
//! let control = "tcp://10.0.0.1:6301".into();
//! let config = CoreConfig::new(Role::Prefill, "prefill-0", Incarnation(1), geometry, control);
//! let (mut prefill, mut out) = (Prefill::new(config), Outbox::new());
//!
//! // Two requests with one key: the second one is not taken.
//! for request in ["a", "b"] {
//!     let leg = PrefillLeg::new(TransferKey { id: "t".into(), prompt: 0 }, Mode::Push);
//!     let (request, prompt_hash) = (request.into(), PromptHash::of_tokens(&[7; 100]));
//!     let hook = PrefillHook::Arrived { request, leg, tokens: 100, prompt_hash };
//!     prefill.handle(Nanos::from_ms(5), PrefillInput::Hook(hook), &mut out);
//! }
//! let [PrefillEffect::Answer(PrefillAnswer::Rejected { request, failure })] = out.as_slice() else {
//!     panic!("{out:?}");
//! };
//! assert_eq!((&*request.0, failure.kind()), ("b", "duplicate-key"));
//! ```

// First, for its macro.
#[cfg(not(feature = "planted"))]
#[macro_use]
mod planted;
#[cfg(feature = "planted")]
#[macro_use]
pub mod planted;

#[cfg(feature = "actors")]
#[warn(missing_docs)]
pub mod actors;
mod authority;
#[cfg(feature = "conformance")]
#[warn(missing_docs)]
pub mod conformance;
pub mod core;
pub mod effects;
#[warn(missing_docs)]
pub mod fabric;
#[warn(missing_docs)]
pub mod source;
#[warn(missing_docs)]
pub mod text;
