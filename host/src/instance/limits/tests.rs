//! Every field is a key, and mistakes are named with what to do.

use super::*;
use std::collections::BTreeSet;
use std::path::Path;

/// A value of a key other than its default.
fn another(key: &LimitKey) -> String {
    match key.kind {
        FieldKind::Time(time) => format!("{}", time.0 as f64 / 1e6 + 0.5),
        FieldKind::Number { value, .. } => (value + 1).to_string(),
        FieldKind::Flag(flag) => (!flag).to_string(),
    }
}

#[test]
fn every_field_can_be_set() {
    for key in keys() {
        let mut set = Overrides::default();
        set.assign(&format!("{}={}", key.path(), another(&key))).expect("the key is there");
        let limits = set.limits().expect("it goes together with the defaults");
        let got: Vec<(&str, FieldKind)> = match key.table {
            PROTOCOL => fields(&limits.protocol),
            CHANNEL => fields(&limits.channel),
            _ => fields(&limits.operations),
        };
        let (_, now) = got.into_iter().find(|(name, _)| *name == key.field).expect("a field");
        let said = match now {
            FieldKind::Time(time) => format!("{}", time.0 as f64 / 1e6),
            FieldKind::Number { value, .. } => value.to_string(),
            FieldKind::Flag(flag) => flag.to_string(),
        };
        assert_eq!(said, another(&key), "{}", key.path());
    }
}

#[test]
fn nothing_set_is_the_defaults() {
    let limits = Overrides::default().limits().expect("the defaults go together");
    assert_eq!(limits, ProtocolLimits::default());
}

#[test]
fn mistakes_are_named_with_the_remedy() {
    for (given, said) in [
        ("protocol.lease_m=1", "there is no such key; did you mean \"protocol.lease_ms\"?"),
        (
            "protocol.quux=1",
            "protocol.quux: there is no such key; protocol has heartbeat_ms, lease_ms",
        ),
        ("quux.lease_ms=1", "there is no table \"quux\"; there are protocol, channel, operations"),
        ("lease_ms=1", "\"lease_ms=1\" is not of the form TABLE.KEY=VALUE"),
        (
            "protocol.lease_ms=0",
            "protocol.lease_ms = 0: it has to be a time from 0.001 to 86400000",
        ),
        ("protocol.lease_ms=soon", "protocol.lease_ms = soon: it has to be a time"),
        ("protocol.lease_ms=1e99", "protocol.lease_ms = 1e99: it has to be a time"),
        ("protocol.early_max=0", "protocol.early_max = 0: it has to be a whole number from 1 to"),
        ("operations.layers_per_op=65536", "a whole number from 1 to 65535"),
        ("protocol.drift_percent=91", "protocol.drift_percent = 91: so much off a lease"),
        (
            "protocol.heartbeat_ms=60000",
            "protocol.heartbeat_ms = 60000: routers forget an instance",
        ),
        ("channel.retransmit_ms=2000", "channel.retransmit_ms = 2000: it is the first wait"),
        (
            "operations.operation_bytes_min=20000000",
            "operations.operation_bytes_min = 20000000: it is more than",
        ),
        ("channel.silent_ms=1000", "channel.silent_ms = 1000: peers are asked every"),
    ] {
        let mut set = Overrides::default();
        let why = set.assign(given).and_then(|()| set.limits()).expect_err(given);
        assert!(why.contains(said), "{given}: {why}");
    }
}

#[test]
fn the_nearer_source_wins_key_by_key() {
    let given = |text: &str| {
        let mut set = Overrides::default();
        set.assign(text).expect("keys");
        set
    };
    let both = given("protocol.lease_ms=9000, operations.retries_max=0")
        .or(&given("protocol.lease_ms=8000,protocol.orphan_ms=7000"));
    let limits = both.limits().expect("they go together");
    let times = (limits.protocol.lease, limits.protocol.orphan, limits.operations.retries_max);
    assert_eq!(times, (Nanos::from_secs(9), Nanos::from_secs(7), 0));
}

/// What another version may have sent.
#[test]
fn a_key_of_another_version_is_refused_by_name() {
    let sent = r#"{"protocol.lease_ms": 5000000000, "protocol.leas": 1}"#;
    let set: Overrides = serde_json::from_str(sent).expect("names and numbers");
    let why = set.limits().expect_err("there is no such key");
    assert!(why.contains("did you mean \"protocol.lease_ms\"?"), "{why}");
}

/// The tables of docs/connector.md have each key with its default.
#[test]
fn the_documented_defaults_are_the_ones_of_the_code() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/connector.md");
    let text = std::fs::read_to_string(path).expect("the documentation");
    let row = |line: &str| {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let name = cells.first()?.strip_prefix('`')?.strip_suffix('`')?;
        let (table, _) = name.split_once('.')?;
        TABLES.contains(&table).then(|| (name.to_owned(), (*cells.get(1)?).to_owned()).into())?
    };
    let documented: BTreeSet<(String, String)> =
        text.lines().filter(|line| line.starts_with('|')).filter_map(row).collect();
    let default = |key: &LimitKey| match key.kind {
        FieldKind::Time(time) => format!("{}", time.0 as f64 / 1e6),
        FieldKind::Number { value, .. } => value.to_string(),
        FieldKind::Flag(flag) => flag.to_string(),
    };
    let there: BTreeSet<(String, String)> =
        keys().iter().map(|key| (key.path(), default(key))).collect();
    let missing: Vec<_> = there.difference(&documented).collect();
    let wrong: Vec<_> = documented.difference(&there).collect();
    assert!(
        missing.is_empty() && wrong.is_empty(),
        "rows that docs/connector.md lacks: {missing:?}; rows that are not so: {wrong:?}"
    );
}
