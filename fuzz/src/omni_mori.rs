//! What stages with vLLM-Omni's connector for MoRI send: what decodes, encodes to what decodes alike,
//! and no answer is taken for another kind of answer.

use kvferry_engine::core::dialect::omni_mori::{ConnectorCall, PullAnswer, QueryAnswer};

/// Gives the bytes to every decoder.
///
/// # Panics
/// If a message changes on its way through the bytes.
pub fn run(data: &[u8]) {
    let parts = [&[][..], data];
    if let Ok(call) = ConnectorCall::decode(&parts) {
        assert_eq!(ConnectorCall::decode(&[&[][..], &call.encode()]), Ok(call));
    }
    if let Ok(answer) = QueryAnswer::decode(&parts) {
        assert_eq!(QueryAnswer::decode(&[&[][..], &answer.encode()]), Ok(answer));
    }
    if let Ok(answer) = PullAnswer::decode(&parts) {
        assert_eq!(PullAnswer::decode(&[&[][..], &answer.encode()]), Ok(answer));
    }
}
