//! Times and limits of the protocol, as a deployment sets them.
//!
//! There is a table per settings struct of the engine, and each field of the struct is a key of its
//! table, so that a new field is a new key. Times are milliseconds, and their keys end in `_ms`.

use kvferry_engine::core::channel::ChannelConfig;
use kvferry_engine::core::config::CoreSettings;
use kvferry_engine::core::router::RouterConfig;
use kvferry_engine::core::time::Nanos;
use kvferry_engine::core::transfer::TransferSettings;
use kvferry_engine::text::nearest;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fmt::Display;

mod fields;

use fields::{FieldKind, fields};

/// Table of [`CoreSettings`].
pub const PROTOCOL: &str = "protocol";
/// Table of [`ChannelConfig`].
pub const CHANNEL: &str = "channel";
/// Table of [`TransferSettings`].
pub const OPERATIONS: &str = "operations";

pub const TABLES: [&str; 3] = [PROTOCOL, CHANNEL, OPERATIONS];

/// Longest time, a day.
const TIME_MAX: Nanos = Nanos::from_secs(86_400);

/// Largest number where the field has room for more, 1 PiB if it counts bytes.
const NUMBER_MAX: u64 = 1 << 50;

/// Numbers that may be 0.
const MAY_BE_ZERO: [&str; 3] = ["drift_percent", "retries_max", "reopens_max"];

/// What a reader takes off a lease at most, in percent.
const DRIFT_MAX: u32 = 90;

/// A key of a table.
#[derive(Clone, Debug)]
struct LimitKey {
    table: &'static str,
    /// As users write it.
    name: String,
    /// As the struct has it.
    field: &'static str,
    kind: FieldKind,
}

fn table_of<T: Serialize + DeserializeOwned + Default>(
    table: &'static str,
) -> impl Iterator<Item = LimitKey> {
    fields(&T::default()).into_iter().map(move |(field, kind)| {
        let unit = if matches!(kind, FieldKind::Time(_)) { "_ms" } else { "" };
        LimitKey { table, name: format!("{field}{unit}"), field, kind }
    })
}

/// All keys, table by table.
fn keys() -> Vec<LimitKey> {
    table_of::<CoreSettings>(PROTOCOL)
        .chain(table_of::<ChannelConfig>(CHANNEL))
        .chain(table_of::<TransferSettings>(OPERATIONS))
        .collect()
}

impl LimitKey {
    fn path(&self) -> String {
        format!("{}.{}", self.table, self.name)
    }

    /// Reads a value, in the unit of the field.
    fn read(&self, text: &str) -> Result<u64, String> {
        let wrong = |what: &dyn Display| Err(format!("{} = {text}: {what}", self.path()));
        match self.kind {
            FieldKind::Time(_) => match text.parse::<f64>().map(|ms| (ms * 1e6) as u64) {
                Ok(ns @ 1_000..) if ns <= TIME_MAX.0 => Ok(ns),
                _ => wrong(&"it has to be a time from 0.001 to 86400000 milliseconds"),
            },
            FieldKind::Number { most, .. } => {
                let least = u64::from(!MAY_BE_ZERO.contains(&self.field));
                let most = most.min(NUMBER_MAX);
                match text.parse() {
                    Ok(number) if (least..=most).contains(&number) => Ok(number),
                    _ => wrong(&format!("it has to be a whole number from {least} to {most}")),
                }
            }
            FieldKind::Flag(_) => match text {
                "true" => Ok(1),
                "false" => Ok(0),
                _ => wrong(&"it has to be true or false"),
            },
        }
    }

    /// A value as the struct deserializes it.
    fn value(&self, number: u64) -> Value {
        match self.kind {
            FieldKind::Flag(_) => Value::Bool(number != 0),
            FieldKind::Time(_) | FieldKind::Number { .. } => number.into(),
        }
    }
}

/// What was set, by `table.key`, times in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Overrides(BTreeMap<String, u64>);

/// The settings of an engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProtocolLimits {
    pub protocol: CoreSettings,
    /// Of its channels to peers.
    pub channel: ChannelConfig,
    /// Of its transfer actors.
    pub operations: TransferSettings,
}

fn unknown(table: &str, name: &str, keys: &[LimitKey]) -> String {
    let of_table = || keys.iter().filter(|key| key.table == table);
    let known: Vec<&str> = of_table().map(|key| &*key.name).collect();
    // The unit is what is forgotten.
    let plain: Vec<&str> = of_table().map(|key| key.field).collect();
    let near = nearest(name, &plain).or_else(|| nearest(name.trim_end_matches("_ms"), &plain));
    let near = near.and_then(|near| of_table().find(|key| key.field == near));
    let path = format!("{table}.{name}");
    match near {
        Some(near) => format!("{path}: there is no such key; did you mean \"{}\"?", near.path()),
        None if known.is_empty() => {
            format!("{path}: there is no table {table:?}; there are {}", TABLES.join(", "))
        }
        None => format!("{path}: there is no such key; {table} has {}", known.join(", ")),
    }
}

impl Overrides {
    /// Takes the value of one key.
    ///
    /// # Errors
    /// The key and its value, and what there may be.
    pub(crate) fn set(&mut self, table: &str, name: &str, text: &str) -> Result<(), String> {
        let keys = keys();
        let key = keys.iter().find(|key| key.table == table && key.name == name);
        let key = key.ok_or_else(|| unknown(table, name, &keys))?;
        self.0.insert(key.path(), key.read(text)?);
        Ok(())
    }

    /// Takes the keys of a table, a JSON object; numbers may be texts.
    ///
    /// # Errors
    /// The key and its value, and what there may be.
    pub fn take(&mut self, table: &str, given: &Value) -> Result<(), String> {
        let Value::Object(given) = given else {
            return Err(format!("{table} = {given}: it has to be a table of keys and values"));
        };
        for (name, value) in given {
            let text = match value {
                Value::String(text) => text.trim().to_owned(),
                other => other.to_string(),
            };
            self.set(table, name, &text)?;
        }
        Ok(())
    }

    /// Takes `table.key=value`, several with commas between.
    ///
    /// # Errors
    /// The same, and a text of another form.
    pub fn assign(&mut self, text: &str) -> Result<(), String> {
        for one in text.split(',').map(str::trim).filter(|one| !one.is_empty()) {
            let parts = one.split_once('=').and_then(|(path, value)| {
                let (table, name) = path.trim().split_once('.')?;
                Some((table, name, value.trim()))
            });
            let Some((table, name, value)) = parts else {
                return Err(format!("{one:?} is not of the form TABLE.KEY=VALUE"));
            };
            self.set(table, name, value)?;
        }
        Ok(())
    }

    /// These, and those of `other` that are not among them.
    pub fn or(mut self, other: &Overrides) -> Overrides {
        for (path, value) in &other.0 {
            self.0.entry(path.clone()).or_insert(*value);
        }
        self
    }

    /// The settings with all defaults.
    ///
    /// # Errors
    /// A key that there is not, which another version of kvferry may have set, and values that do
    /// not go together.
    pub fn limits(&self) -> Result<ProtocolLimits, String> {
        let keys = keys();
        for path in self.0.keys() {
            if !keys.iter().any(|key| key.path() == *path) {
                let (table, name) = path.split_once('.').unwrap_or((path, ""));
                return Err(unknown(table, name, &keys));
            }
        }
        let limits = ProtocolLimits {
            protocol: self.settings(PROTOCOL, &keys)?,
            channel: self.settings(CHANNEL, &keys)?,
            operations: self.settings(OPERATIONS, &keys)?,
        };
        limits.check()?;
        Ok(limits)
    }

    fn settings<T: DeserializeOwned>(&self, table: &str, keys: &[LimitKey]) -> Result<T, String> {
        let of_table = keys.iter().filter(|key| key.table == table);
        let given = of_table.filter_map(|key| {
            let number = self.0.get(&key.path())?;
            Some((key.field.to_owned(), key.value(*number)))
        });
        let given: Map<String, Value> = given.collect();
        T::deserialize(Value::Object(given)).map_err(|why| format!("{table}: {why}"))
    }
}

/// Times and limits as options and variables have them.
///
/// # Errors
/// The key and its value, and what there may be.
pub(crate) fn limits_given(text: &str) -> Result<Overrides, String> {
    let mut given = Overrides::default();
    given.assign(text)?;
    Ok(given)
}

impl ProtocolLimits {
    /// # Errors
    /// What does not go together, and what to do.
    fn check(&self) -> Result<(), String> {
        let ProtocolLimits { protocol, channel, operations } = self;
        let ms = |time: Nanos| time.0 as f64 / 1e6;
        let expiry = RouterConfig::default().expiry;
        if protocol.drift_percent > DRIFT_MAX {
            return Err(format!(
                "protocol.drift_percent = {}: so much off a lease leaves too little to read; give \
                 {DRIFT_MAX} at most",
                protocol.drift_percent
            ));
        }
        if protocol.heartbeat >= expiry {
            return Err(format!(
                "protocol.heartbeat_ms = {}: routers forget an instance after {} ms without one; \
                 give less",
                ms(protocol.heartbeat),
                ms(expiry)
            ));
        }
        if channel.retransmit > channel.retransmit_max {
            return Err(format!(
                "channel.retransmit_ms = {}: it is the first wait, and channel.retransmit_max_ms = {} \
                 the longest; give less, or a longer one",
                ms(channel.retransmit),
                ms(channel.retransmit_max)
            ));
        }
        if channel.silent <= channel.retransmit_max {
            return Err(format!(
                "channel.silent_ms = {}: peers are asked every channel.retransmit_max_ms = {}, and one \
                 that lives would be given up; give more",
                ms(channel.silent),
                ms(channel.retransmit_max)
            ));
        }
        let (least, most) = (operations.operation_bytes_min, operations.operation_bytes_max);
        if least > most {
            return Err(format!(
                "operations.operation_bytes_min = {least}: it is more than \
                 operations.operation_bytes_max = {most}; give less, or a larger one"
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
