//! Configuration of `kvferry host`: a file, the environment and flags.
//!
//! Every key can be said by each of them under one name: `log_level` is a key of the file,
//! `KVFERRY_HOST_LOG_LEVEL` a variable and `--log-level` a flag. Flags win over the environment,
//! which wins over the file, which wins over the default.

use super::pool_peers::PoolAddress;
use super::pool_settings::{PayloadSettings, PoolGiven, PoolResolved};
use crate::instance::limits::{self, limits_given};
use crate::instance::{Overrides, incarnations};
use crate::process::address;
use crate::process::logs::{LogArgs, LogFormat};
use clap::{Args, ValueEnum};
use kvferry_engine::text::nearest;
use kvferry_fabric_host::{DataPath, HostConfig, PeerTrust};
use kvferry_trust::{INSECURE_VARIABLE, VARIABLE};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use toml::de::{DeTable, DeValue};
use tracing::level_filters::LevelFilter;

/// Variables of the environment are this and the key in capitals.
const PREFIX: &str = "KVFERRY_HOST_";
/// The variable that names the file.
pub(crate) const FILE: &str = "KVFERRY_HOST_CONFIG";

const AFTER: &str = "Every option but --config is also a key of the configuration file (--log-level \
    is log_level), and all are variables of the environment (KVFERRY_HOST_LOG_LEVEL). Options win \
    over the environment, which wins over the file.";

const KEYS: [&str; 23] = [
    "socket",
    "metrics",
    "secret_file",
    "encrypt",
    "insecure_network",
    "log_format",
    "log_level",
    "copiers",
    "streams",
    "spin_us",
    "paths",
    "slower",
    "uids",
    "set",
    "state",
    "payload_pool",
    "payload_hold_ms",
    "payload_mori_listen",
    "payload_mori_deployment",
    "payload_mori_backend",
    "idle_s",
    "payload_listen",
    "payload_hosts",
];

/// Arguments of `host`.
#[derive(Clone, Debug, Default, Args)]
#[command(after_help = AFTER)]
pub(crate) struct HostArgs {
    /// TOML file with the configuration
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) given: ConfigLayer,
}

/// What one source says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub(crate) struct ConfigLayer {
    /// Where the connector finds the host; has to be given
    #[arg(long, value_name = "PATH", value_parser = socket)]
    socket: Option<PathBuf>,
    /// Where metrics are scraped, at /metrics; port 0 takes a free one, which is logged; nowhere
    /// if not given
    #[arg(long, value_name = "HOST:PORT", value_parser = metrics)]
    metrics: Option<String>,
    /// File of the fleet's secret, which peers have to prove that they know, and the host to them;
    /// $KVFERRY_SECRET_FILE by default
    #[arg(long, value_name = "FILE", value_parser = secret_file)]
    secret_file: Option<PathBuf>,
    /// Encrypt KV between hosts, which both sides have to; needs a secret
    #[arg(long, value_name = "BOOL", value_parser = encrypt,
        num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    encrypt: Option<bool>,
    /// Listen where others reach the host though there is no secret, so that whoever does is
    /// believed; $KVFERRY_INSECURE_NETWORK by default
    #[arg(long, value_name = "BOOL", value_parser = insecure_network,
        num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    insecure_network: Option<bool>,
    /// Form of the log, which goes to stderr: text (the default) or json
    #[arg(long, value_name = "FORM", value_parser = log_format)]
    log_format: Option<LogFormat>,
    /// Least severity that is logged: off, error, warn, info (the default), debug or trace
    #[arg(long, value_name = "LEVEL", value_parser = log_level)]
    log_level: Option<LevelFilter>,
    /// Threads that share one long copy by cross-memory attach, 1 to 256; 2 by default
    #[arg(long, value_name = "N", value_parser = copiers)]
    copiers: Option<u32>,
    /// Connections by TCP to each peer, which share long transfers, 1 to 64; 2 by default
    #[arg(long, value_name = "N", value_parser = streams)]
    streams: Option<u32>,
    /// Microseconds for which a thread looks for work before it sleeps; 50 by default
    #[arg(long, value_name = "N", value_parser = spin_us)]
    spin_us: Option<u32>,
    /// How bytes may be moved, with commas between: shared-memory, cross-memory, tcp; all by
    /// default
    #[arg(long, value_name = "PATHS", value_parser = paths)]
    paths: Option<Paths>,
    /// Take a slower one of these paths where the one that memory and hosts call for cannot be had;
    /// both sides have to
    #[arg(long, value_name = "BOOL", value_parser = slower,
        num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    slower: Option<bool>,
    /// Ids of users beside the own one whose processes may connect to the data plane on this host,
    /// with commas between; none by default
    #[arg(long, value_name = "UIDS", value_parser = uids)]
    uids: Option<Uids>,
    /// Times and limits of the protocol where the connector says nothing of them, with commas
    /// between: protocol.lease_ms=20000; a file has them as tables
    #[arg(long, value_name = "TABLE.KEY=VALUE", value_parser = limits_given)]
    set: Option<Overrides>,
    /// Folder in which the engine's incarnations are noted, so that a restarted one is known as
    /// such though the clock went back; kvferry in $XDG_STATE_HOME or ~/.local/state by default
    #[arg(long, value_name = "FOLDER", value_parser = state)]
    state: Option<PathBuf>,
    #[command(flatten)]
    pool: PoolGiven,
}

/// Ways that bytes may go within and between hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Paths(pub(crate) Vec<DataPath>);

impl Paths {
    /// As an argument has them.
    pub(crate) fn names(&self) -> String {
        self.0.iter().map(|path| path.name()).collect::<Vec<_>>().join(",")
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Uids(Vec<u32>);

/// How a host is to be.
#[derive(Clone, Debug)]
pub(crate) struct SidecarConfig {
    /// Where the connector finds the host; none if no source says it.
    pub(crate) socket: Option<PathBuf>,
    /// Where metrics are scraped, if anywhere.
    pub(crate) metrics: Option<String>,
    pub(crate) logs: LogArgs,
    pub(crate) operator: OperatorConfig,
    /// What it serves in place of an engine, if it does.
    pub(crate) payloads: Option<PayloadSettings>,
    /// The file that was read.
    pub(crate) file: Option<PathBuf>,
    /// Variables that look like keys and are none.
    pub(crate) strangers: Vec<String>,
    /// Keys of the file and the environment that say something of a pool that the host does not have.
    pub(crate) ignored: Vec<&'static str>,
}

/// What the operator of a host says of how it serves an engine.
#[derive(Clone, Debug)]
pub(crate) struct OperatorConfig {
    /// Limits of the data planes; what an engine says of itself is not in it yet.
    pub(crate) fabric: HostConfig,
    /// Times and limits where an engine says nothing of them.
    pub(crate) limits: Overrides,
    /// Folder in which lives are noted.
    pub(crate) state: Option<PathBuf>,
}

/// A text that is not empty.
pub(super) fn filled<T: for<'a> From<&'a str>>(
    key: &str,
    what: &str,
    text: &str,
) -> Result<T, String> {
    match text {
        "" => Err(format!("{key} = \"\": it has to be {what}")),
        text => Ok(text.into()),
    }
}

fn socket(text: &str) -> Result<PathBuf, String> {
    filled("socket", "a path", text)
}

fn secret_file(text: &str) -> Result<PathBuf, String> {
    filled("secret_file", "the path of a file", text)
}

fn state(text: &str) -> Result<PathBuf, String> {
    filled("state", "the path of a folder", text)
}

fn metrics(text: &str) -> Result<String, String> {
    address::listened(text).map_err(|why| format!("metrics = {text:?}: {why}"))
}

fn log_format(text: &str) -> Result<LogFormat, String> {
    LogFormat::from_str(text, false)
        .map_err(|_| format!("log_format = {text:?}: it has to be text or json"))
}

fn log_level(text: &str) -> Result<LevelFilter, String> {
    text.parse().map_err(|_| {
        format!("log_level = {text:?}: it has to be off, error, warn, info, debug or trace")
    })
}

pub(super) fn number<T: FromStr>(key: &str, text: &str) -> Result<T, String> {
    let wrong = |_| format!("{key} = {text:?}: it has to be a whole number, 0 or more");
    text.parse().map_err(wrong)
}

fn copiers(text: &str) -> Result<u32, String> {
    let copiers = number("copiers", text)?;
    HostConfig { copiers, ..HostConfig::default() }.check()?;
    Ok(copiers)
}

fn streams(text: &str) -> Result<u32, String> {
    let streams = number("streams", text)?;
    HostConfig { streams, ..HostConfig::default() }.check()?;
    Ok(streams)
}

fn spin_us(text: &str) -> Result<u32, String> {
    number("spin_us", text)
}

pub(super) fn pool_address(key: &str, text: &str) -> Result<PoolAddress, String> {
    PoolAddress::parse(text)
        .ok_or_else(|| format!("{key} = {text:?}: it has to be HOST:PORT, with IPv6 in brackets"))
}

pub(crate) fn paths(text: &str) -> Result<Paths, String> {
    let known = DataPath::ALL.map(DataPath::name).join(", ");
    let path = |name: &str| {
        let found = DataPath::ALL.into_iter().find(|path| path.name() == name);
        found.ok_or_else(|| format!("paths = {text:?}: {name:?} is none of {known}"))
    };
    let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
    let paths = names.map(path).collect::<Result<Vec<_>, _>>()?;
    HostConfig { paths: paths.clone(), ..HostConfig::default() }.check()?;
    Ok(Paths(paths))
}

fn flag(key: &str, text: &str) -> Result<bool, String> {
    text.parse().map_err(|_| format!("{key} = {text:?}: it has to be true or false"))
}

fn encrypt(text: &str) -> Result<bool, String> {
    flag("encrypt", text)
}

fn slower(text: &str) -> Result<bool, String> {
    flag("slower", text)
}

fn insecure_network(text: &str) -> Result<bool, String> {
    flag("insecure_network", text)
}

fn uids(text: &str) -> Result<Uids, String> {
    let uid = |uid: &str| {
        uid.parse()
            .map_err(|_| format!("uids = {text:?}: {uid:?} is no number of a user, see id -u"))
    };
    let uids = text.split(',').map(str::trim).filter(|uid| !uid.is_empty());
    uids.map(uid).collect::<Result<_, _>>().map(Uids)
}

/// What to say of a key that there is not.
fn unknown(key: &str, known: &[&str]) -> String {
    match nearest(key, known) {
        Some(known) => format!("there is no such key; did you mean {known:?}?"),
        None => format!("there is no such key; there are {}", known.join(", ")),
    }
}

fn variable(key: &str) -> String {
    format!("{PREFIX}{}", key.to_uppercase())
}

impl ConfigLayer {
    fn set(&mut self, key: &str, text: &str) -> Result<(), String> {
        match key {
            "socket" => self.socket = Some(socket(text)?),
            "metrics" => self.metrics = Some(metrics(text)?),
            "secret_file" => self.secret_file = Some(secret_file(text)?),
            "encrypt" => self.encrypt = Some(encrypt(text)?),
            "insecure_network" => self.insecure_network = Some(insecure_network(text)?),
            "log_format" => self.log_format = Some(log_format(text)?),
            "log_level" => self.log_level = Some(log_level(text)?),
            "copiers" => self.copiers = Some(copiers(text)?),
            "streams" => self.streams = Some(streams(text)?),
            "spin_us" => self.spin_us = Some(spin_us(text)?),
            "paths" => self.paths = Some(paths(text)?),
            "slower" => self.slower = Some(slower(text)?),
            "uids" => self.uids = Some(uids(text)?),
            // Tables of a file may have been taken before.
            "set" => self.set.get_or_insert_default().assign(text)?,
            "state" => self.state = Some(state(text)?),
            key if self.pool.set(key, text)? => {}
            _ => return Err(format!("{key}: {}", unknown(key, &KEYS))),
        }
        Ok(())
    }

    fn or(self, other: ConfigLayer) -> ConfigLayer {
        ConfigLayer {
            socket: self.socket.or(other.socket),
            metrics: self.metrics.or(other.metrics),
            secret_file: self.secret_file.or(other.secret_file),
            encrypt: self.encrypt.or(other.encrypt),
            insecure_network: self.insecure_network.or(other.insecure_network),
            log_format: self.log_format.or(other.log_format),
            log_level: self.log_level.or(other.log_level),
            copiers: self.copiers.or(other.copiers),
            streams: self.streams.or(other.streams),
            spin_us: self.spin_us.or(other.spin_us),
            paths: self.paths.or(other.paths),
            slower: self.slower.or(other.slower),
            uids: self.uids.or(other.uids),
            set: match (self.set, other.set) {
                (Some(first), Some(then)) => Some(first.or(&then)),
                (first, then) => first.or(then),
            },
            state: self.state.or(other.state),
            pool: self.pool.or(other.pool),
        }
    }

    fn from_env(env: &BTreeMap<String, OsString>) -> Result<ConfigLayer, String> {
        let mut given = ConfigLayer::default();
        for key in KEYS {
            let name = variable(key);
            let Some(value) = env.get(&name) else { continue };
            let fail = |why: &dyn Display| format!("{name}: {why}");
            let text = value.to_str().ok_or_else(|| fail(&"it is no UTF-8: write it anew"))?;
            given.set(key, text).map_err(|why| fail(&why))?;
        }
        Ok(given)
    }

    /// `name` is how the file was named, and by what.
    fn from_file(text: &str, name: &str) -> Result<ConfigLayer, String> {
        let line = |at: usize| 1 + text[..at].matches('\n').count();
        let table = DeTable::parse(text).map_err(|why| {
            let at = why.span().map_or(0, |span| span.start.min(text.len()));
            let what = why.message().replace('\n', ", ");
            format!("{name}:{}: not TOML: {what}; see https://toml.io for the syntax", line(at))
        })?;
        let mut given = ConfigLayer::default();
        for (key, value) in table.get_ref() {
            let key_text: &str = key.get_ref();
            let fail = |why: String| format!("{name}:{}: {why}", line(key.span().start));
            if limits::TABLES.contains(&key_text) {
                let set = given.set.get_or_insert_default();
                for (name, text) in entries(value.get_ref()).map_err(fail)? {
                    set.set(key_text, &name, text.trim()).map_err(fail)?;
                }
                continue;
            }
            let Some(text) = plain(value.get_ref()) else {
                let why = match KEYS.contains(&key_text) {
                    true => {
                        "a text, a whole number, true, false or a list of texts or whole numbers is expected"
                    }
                    false => &unknown(key_text, &KEYS),
                };
                return Err(fail(format!("{key_text}: {why}")));
            };
            given.set(key_text, &text).map_err(fail)?;
        }
        Ok(given)
    }
}

/// Keys and values of a table.
fn entries(value: &DeValue<'_>) -> Result<Vec<(String, String)>, String> {
    let DeValue::Table(table) = value else {
        return Err("a table of times and limits is expected".into());
    };
    let mut entries = Vec::with_capacity(table.len());
    for (key, value) in table {
        let text = match value.get_ref() {
            DeValue::Float(number) => Some(number.as_str().to_owned()),
            other => plain(other),
        };
        let key = key.get_ref().to_string();
        let text = text.ok_or_else(|| format!("{key}: a number is expected"))?;
        entries.push((key, text));
    }
    Ok(entries)
}

/// A value as it would be written into a variable; none for what no key takes.
fn plain(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Integer(number) => {
            let number = i64::from_str_radix(number.as_str(), number.radix());
            number.ok().map(|number| number.to_string())
        }
        DeValue::Boolean(flag) => Some(flag.to_string()),
        DeValue::Array(entries) => {
            let texts = entries.iter().map(|entry| match entry.get_ref() {
                entry @ (DeValue::String(_) | DeValue::Integer(_)) => plain(entry),
                _ => None,
            });
            Some(texts.collect::<Option<Vec<_>>>()?.join(","))
        }
        _ => None,
    }
}

impl HostArgs {
    /// What the flags, this environment and the file say together.
    ///
    /// # Errors
    /// Where something is wrong, what, and what it may be.
    pub(crate) fn resolve(
        &self,
        env: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<SidecarConfig, String> {
        let env: Vec<_> = env.into_iter().collect();
        let of_fleet = env.iter().find(|(name, value)| name == VARIABLE && !value.is_empty());
        let of_fleet = of_fleet.map(|(_, path)| PathBuf::from(path));
        let insecure = env.iter().find(|(name, _)| name == INSECURE_VARIABLE);
        let insecure = insecure.map(|(_, value)| value.to_string_lossy());
        let insecure = kvferry_trust::is_insecure(insecure.as_deref())?;
        let ours = |(name, value): (OsString, OsString)| {
            let name = name.into_string().ok()?;
            name.starts_with(PREFIX).then_some((name, value))
        };
        let env: BTreeMap<String, OsString> = env.into_iter().filter_map(ours).collect();
        let file = match (&self.config, env.get(FILE)) {
            (Some(path), _) => Some(("--config", path.clone())),
            (None, Some(path)) => Some((FILE, PathBuf::from(path))),
            (None, None) => None,
        };
        let mut given = self.given.clone().or(ConfigLayer::from_env(&env)?);
        if let Some((by, path)) = &file {
            given = given.or(read(path, by)?);
        }
        let limits = given.set.clone().unwrap_or_default();
        limits.limits()?;
        let variables = KEYS.map(variable);
        let mut known: Vec<&str> = variables.iter().map(String::as_str).collect();
        known.push(FILE);
        let strangers = env.into_keys().filter(|name| !known.contains(&&**name)).collect();
        let PoolResolved { payloads, ignored } = given.pool.resolve(&self.given.pool)?;
        let (default, logs) = (HostConfig::default(), LogArgs::default());
        Ok(SidecarConfig {
            socket: given.socket,
            metrics: given.metrics,
            logs: LogArgs {
                log_format: given.log_format.unwrap_or(logs.log_format),
                log_level: given.log_level.unwrap_or(logs.log_level),
            },
            operator: OperatorConfig {
                fabric: HostConfig {
                    copiers: given.copiers.unwrap_or(default.copiers),
                    streams: given.streams.unwrap_or(default.streams),
                    spin_us: given.spin_us.unwrap_or(default.spin_us),
                    paths: given.paths.map_or(default.paths, |Paths(paths)| paths),
                    slower: given.slower.unwrap_or(default.slower),
                    trust: PeerTrust {
                        uids: given.uids.map_or(Vec::new(), |Uids(uids)| uids),
                        secret_file: given.secret_file.or(of_fleet),
                        encrypt: given.encrypt.unwrap_or_default(),
                        insecure_network: given.insecure_network.unwrap_or(insecure),
                    },
                    ..HostConfig::default()
                },
                limits,
                state: given.state.or_else(incarnations::own_folder),
            },
            payloads,
            file: file.map(|(_, path)| path),
            strangers,
            ignored,
        })
    }
}

fn read(path: &Path, by: &str) -> Result<ConfigLayer, String> {
    let text = fs::read_to_string(path).map_err(|why| {
        let path = path.display();
        format!("{by} {path}: cannot read it: {why}; name a TOML file that this user can read")
    })?;
    ConfigLayer::from_file(&text, &path.display().to_string())
}

#[cfg(test)]
mod tests;
