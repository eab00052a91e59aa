//! The list of effects of a machine.

use kvferry_engine::core::Outbox;

#[test]
fn outbox_is_empty_until_an_effect_is_pushed_and_once_all_are_taken() {
    let mut out = Outbox::<u32>::new();
    assert!(out.is_empty());
    out.push(1_u32);
    assert!(!out.is_empty());
    assert_eq!(out.take(), [1]);
    assert!(out.is_empty());
}
