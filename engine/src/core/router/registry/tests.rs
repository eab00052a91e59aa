use super::well_formed::{TEXT_MAX, is_endpoint};
use super::*;
use crate::core::message::Mode;

pub(in crate::core::router) fn registration(engine: &str, incarnation: u64) -> Registration {
    Registration::new(
        engine.into(),
        Incarnation(incarnation),
        if engine.starts_with('p') { Role::Prefill } else { Role::Decode },
        Mode::Push,
        "h:1".into(),
        "c".into(),
    )
}

#[test]
fn names_and_pairs_of_instances_that_left_are_bounded() {
    let config = RouterConfig { instances_max: 3, ..RouterConfig::default() };
    let mut registry = Registry::new(config.instances_max);
    let enter = |registry: &mut Registry, name: &str, incarnation| match registry.register(
        Nanos::ZERO,
        (RegistrationEntry::native(registration(name, incarnation)), None),
        &config,
    ) {
        Ok(RegisterOutcome::Current { instance_id: Some(instance_id), .. }) => Some(instance_id),
        _ => None,
    };
    let prefill = enter(&mut registry, "p", 1).unwrap();
    for round in 0..20 {
        let decode = enter(&mut registry, &format!("d{round}"), 5).unwrap();
        registry.note_pair(prefill, decode);
        registry.remove(decode);
        assert!(registry.left.len() <= 3 && registry.known.len() <= 4);
    }
    assert!(registry.get(prefill).unwrap().paired.is_empty());
    assert_eq!(enter(&mut registry, "d19", 4), None, "an old incarnation is remembered");
    assert!(enter(&mut registry, "d19", 6).is_some());
    assert_eq!(registry.left.len(), 2);
}

#[test]
fn endpoints_that_cannot_be_dialled_are_refused() {
    for good in ["p0", "10.0.0.1:80", "tcp://[::1]:6301", "[::1]", "sim://p0"] {
        assert!(is_endpoint(good), "{good}");
    }
    for bad in [
        "",
        "a:0",
        "a:65536",
        "a b:1",
        "a:1\n",
        "a:99999999999999999999",
        "http://evil/:80",
        "[::1]:80@evil:80",
        "tcp://tcp://a:1",
        "file://a",
        "\u{202e}a:1",
    ] {
        assert!(!is_endpoint(bad), "{bad}");
    }
    assert!(!is_endpoint(&"a".repeat(TEXT_MAX + 1)));
}
