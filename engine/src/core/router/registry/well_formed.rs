//! What a registration has to be to be of any use.

use crate::authority;
use crate::core::ids::TP_MAX;
use crate::core::message::Registration;
use crate::core::router::discovery::STATIC;
use crate::core::router::io::Dialects;
use crate::core::router::rejections::RejectReason;

/// Longest name of an engine or endpoint, in bytes.
pub(super) const TEXT_MAX: usize = 512;

/// # Errors
/// What of a registration no instance can be.
pub(super) fn check(registration: &Registration, dialects: Dialects) -> Result<(), RejectReason> {
    let Registration { engine, http, control, dp_rank, dp_size, tp, fit, models, .. } =
        registration;
    if engine.0.is_empty() || engine.0.len() > TEXT_MAX || engine.0.contains(char::is_control) {
        return Err(RejectReason::Name);
    }
    if engine.0.starts_with(STATIC) != dialects.is_static() {
        return Err(RejectReason::Name);
    }
    if !is_endpoint(&http.0) || !is_endpoint(&control.0) {
        return Err(RejectReason::Endpoint);
    }
    if dp_rank >= dp_size {
        return Err(RejectReason::DataParallel);
    }
    if !(1..=TP_MAX).contains(tp) {
        return Err(RejectReason::TensorParallel);
    }
    if fit.as_ref().is_some_and(|fit| fit.check(fit).is_err()) {
        return Err(RejectReason::Fit);
    }
    if models.as_ref().is_some_and(|models| !models.is_well_formed()) {
        return Err(RejectReason::Models);
    }
    Ok(())
}

/// Schemes that an endpoint may have: none, or those that instances and simulations use.
const SCHEMES: [&str; 3] = ["tcp://", "http://", "sim://"];

/// True for a host with an optional scheme and an optional port.
pub(super) fn is_endpoint(text: &str) -> bool {
    let bare = SCHEMES.iter().find_map(|scheme| text.strip_prefix(scheme)).unwrap_or(text);
    text.len() <= TEXT_MAX && authority::split(bare).is_some()
}
