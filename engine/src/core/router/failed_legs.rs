//! Why legs went without their KV, in the words of their decodes.

use super::io::RouterEffect;
use crate::core::message::{FAILED_LEG_ID_MAX, FAILED_LEGS_MAX, Registration, Role};
use std::mem;

/// Takes the failed legs out of a registration, which is kept without them; none if there are none.
/// The effect is for the shell once the registration is taken.
pub(super) fn take(registration: &mut Registration) -> Option<RouterEffect> {
    let mut failed = mem::take(&mut registration.failed);
    failed.truncate(FAILED_LEGS_MAX);
    failed.retain(|leg| leg.key.id.0.len() <= FAILED_LEG_ID_MAX);
    failed.iter_mut().for_each(|leg| leg.failure = leg.failure.clipped());
    let is_told = registration.role == Role::Decode && !failed.is_empty();
    is_told.then(|| RouterEffect::LegCauses { engine: registration.engine.clone(), failed })
}
