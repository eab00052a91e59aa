//! Which source wins, and what is said of mistakes.

use super::*;
use crate::sidecar::mori_settings::StageFabric;
use clap::Parser;

#[derive(Parser)]
struct Program {
    #[command(flatten)]
    args: HostArgs,
}

fn parsed(flags: &[&str]) -> HostArgs {
    let words = ["host"].iter().chain(flags);
    Program::try_parse_from(words).unwrap_or_else(|why| panic!("{flags:?}: {why}")).args
}

fn env(variables: &[(String, &str)]) -> Vec<(OsString, OsString)> {
    variables.iter().map(|(name, value)| (name.into(), value.into())).collect()
}

/// A file that is removed with it.
struct TempFile(PathBuf);

impl TempFile {
    fn new(name: &str, text: &str) -> TempFile {
        let name = format!("kvferry-config-{}-{name}.toml", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::write(&path, text).expect("a file can be written");
        TempFile(path)
    }

    fn flags(&self) -> [&str; 2] {
        ["--config", self.0.to_str().expect("UTF-8")]
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Of each key: the default, and what a file, the environment and a flag say.
const SAID: [(&str, &str, [&str; 3]); 23] = [
    ("socket", "", ["/run/file", "/run/env", "/run/flag"]),
    ("metrics", "", ["h:1", "h:2", "h:3"]),
    ("secret_file", "", ["/run/file", "/run/env", "/run/flag"]),
    ("encrypt", "false", ["true", "false", "true"]),
    ("insecure_network", "false", ["true", "false", "true"]),
    ("log_format", "text", ["json", "text", "json"]),
    ("log_level", "info", ["error", "debug", "trace"]),
    ("copiers", "2", ["3", "4", "5"]),
    ("streams", "2", ["1", "4", "8"]),
    ("spin_us", "50", ["0", "7", "8"]),
    ("paths", "shared-memory,cross-memory,tcp", ["tcp", "cross-memory,tcp", "shared-memory"]),
    ("slower", "false", ["true", "false", "true"]),
    ("uids", "", ["7", "8,9", "10"]),
    (
        "set",
        "protocol.lease_ms=30000",
        ["protocol.lease_ms=20000", "protocol.lease_ms=10000", "protocol.lease_ms=5000"],
    ),
    ("state", "kvferry", ["/file", "/env", "/flag"]),
    ("payload_pool", "", ["4096", "8192", "1"]),
    ("payload_hold_ms", "300000", ["0", "7", "8"]),
    ("payload_mori_listen", "", ["h:1", "h:2", "h:3"]),
    ("payload_mori_deployment", "", ["a", "b", "c"]),
    ("payload_mori_backend", "", ["mori-rdma", "host", "mori-rdma"]),
    ("idle_s", "", ["0", "7", "8"]),
    ("payload_listen", "", ["h:1", "[::1]:2", "h:0"]),
    ("payload_hosts", "", ["h:1", "h:2,[::1]:3", "i:1"]),
];

/// What is said of payloads, which is there with a pool only.
fn of_payloads<T: Display>(
    config: &SidecarConfig,
    of: impl FnOnce(&PayloadSettings) -> Option<T>,
) -> String {
    let said = config.payloads.as_ref().and_then(of);
    said.map_or(String::new(), |said| said.to_string())
}

fn shown(PoolAddress { host, port }: &PoolAddress) -> String {
    format!("{}:{port}", kvferry_engine::fabric::bracketed(host))
}

fn value(config: &SidecarConfig, key: &str) -> String {
    let SidecarConfig { socket, metrics, logs, operator, .. } = config;
    let OperatorConfig { fabric, limits, state } = operator;
    match key {
        "socket" => socket.as_ref().map_or(String::new(), |path| path.display().to_string()),
        "metrics" => metrics.clone().unwrap_or_default(),
        "encrypt" => fabric.trust.encrypt.to_string(),
        "log_format" => format!("{:?}", logs.log_format).to_lowercase(),
        "log_level" => logs.log_level.to_string(),
        "secret_file" => fabric
            .trust
            .secret_file
            .as_ref()
            .map_or(String::new(), |path| path.display().to_string()),
        "insecure_network" => fabric.trust.insecure_network.to_string(),
        "copiers" => fabric.copiers.to_string(),
        "streams" => fabric.streams.to_string(),
        "spin_us" => fabric.spin_us.to_string(),
        "paths" => fabric.paths.iter().map(|path| path.name()).collect::<Vec<_>>().join(","),
        "slower" => fabric.slower.to_string(),
        "uids" => fabric.trust.uids.iter().map(u32::to_string).collect::<Vec<_>>().join(","),
        "set" => {
            let limits = limits.limits().expect("they go together");
            format!("protocol.lease_ms={}", limits.protocol.lease.0 / 1_000_000)
        }
        // The default is below the home of whoever runs this.
        "state" => match state {
            Some(path) if path.ends_with("kvferry") => "kvferry".into(),
            state => state.as_ref().map_or("kvferry".into(), |path| path.display().to_string()),
        },
        "payload_pool" => of_payloads(config, |payloads| Some(payloads.pool)),
        "payload_hold_ms" => of_payloads(config, |payloads| Some(payloads.hold.0 / 1_000_000)),
        "payload_listen" => {
            of_payloads(config, |payloads| Some(shown(&payloads.peers.as_ref()?.0)))
        }
        "payload_hosts" => of_payloads(config, |payloads| {
            let hosts = &payloads.peers.as_ref()?.1;
            Some(hosts.iter().map(shown).collect::<Vec<_>>().join(","))
        }),
        "idle_s" => of_payloads(config, |payloads| Some(payloads.idle?.as_secs())),
        "payload_mori_listen" => {
            of_payloads(config, |payloads| Some(shown(&payloads.mori.as_ref()?.listen)))
        }
        "payload_mori_deployment" => {
            of_payloads(config, |payloads| Some(payloads.mori.as_ref()?.deployment.clone()))
        }
        "payload_mori_backend" => of_payloads(config, |payloads| {
            Some(match payloads.mori.as_ref()?.fabric {
                StageFabric::Host => "host",
                StageFabric::MoriRdma => "mori-rdma",
            })
        }),
        _ => panic!("{key} is not looked at"),
    }
}

#[test]
fn each_key_is_taken_from_the_source_that_comes_first() {
    assert_eq!(SAID.map(|(key, ..)| key), KEYS);
    for (key, default, [file, variable_text, flag]) in SAID {
        // All numbers and truth values are taken as texts, too.
        let needed: &[(&str, &str)] = match key {
            "payload_hold_ms" | "idle_s" | "payload_listen" => &[("payload_pool", "1")],
            "payload_hosts" => &[("payload_pool", "1"), ("payload_listen", "h:0")],
            "payload_mori_listen" => &[("payload_pool", "1"), ("payload_mori_deployment", "z")],
            "payload_mori_deployment" => &[("payload_pool", "1"), ("payload_mori_listen", "h:9")],
            "payload_mori_backend" => &[
                ("payload_pool", "1"),
                ("payload_mori_listen", "h:9"),
                ("payload_mori_deployment", "z"),
            ],
            _ => &[],
        };
        let lines = needed.iter().map(|(key, value)| format!("{key} = \"{value}\"\n"));
        let file =
            TempFile::new(key, &format!("{key} = \"{file}\"\n{}", lines.collect::<String>()));
        let from_file = value(&parsed(&file.flags()).resolve([]).expect("valid"), key);
        let set = env(&[(variable(key), variable_text)]);
        let flag = format!("--{}={flag}", key.replace('_', "-"));
        let [config, path] = file.flags();
        let got = |flags: &[&str], env: &[(OsString, OsString)]| {
            value(&parsed(flags).resolve(env.to_vec()).expect("valid"), key)
        };
        let said = SAID.iter().find(|said| said.0 == key).expect("itself").2;
        // Those of MoRI are given together or not at all.
        let alone = if key.starts_with("payload_mori") { &needed[..1] } else { needed };
        let flags = alone.iter().map(|(key, value)| format!("--{}={value}", key.replace('_', "-")));
        let flags: Vec<String> = flags.collect();
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        assert_eq!(got(&flags, &[]), default, "{key}");
        assert_eq!(from_file, said[0], "{key}");
        assert_eq!(got(&[config, path], &set), said[1], "{key}: the environment before the file");
        assert_eq!(got(&[config, path, &flag], &set), said[2], "{key}: a flag before all");
        assert_eq!(got(&[config, path, &flag], &[]), said[2], "{key}: a flag before the file");
    }
}

/// Keys that say how a pool is to be, with a value each.
const OF_A_POOL: [(&str, &str); 7] = [
    ("payload_hold_ms", "7"),
    ("idle_s", "7"),
    ("payload_listen", "h:1"),
    ("payload_hosts", "h:1"),
    ("payload_mori_listen", "h:1"),
    ("payload_mori_deployment", "a"),
    ("payload_mori_backend", "host"),
];

#[test]
fn what_is_said_of_a_pool_that_there_is_not_is_a_mistake_in_flags_and_ignored_elsewhere() {
    let flag = |(key, value): &(&str, &str)| format!("--{}={value}", key.replace('_', "-"));
    for said in &OF_A_POOL {
        let (key, value) = *said;
        let why = parsed(&[&flag(said)]).resolve([]).expect_err("there is no pool");
        assert!(why.starts_with(&format!("--{}: of a pool", key.replace('_', "-"))), "{why}");
        assert!(why.contains("--payload-pool BYTES") && !why.contains('\n'), "{why}");
        let file = TempFile::new(&format!("no-pool-{key}"), &format!("{key} = \"{value}\""));
        let of_file = parsed(&file.flags()).resolve([]).expect("another host's");
        let of_env = parsed(&[]).resolve(env(&[(variable(key), value)])).expect("another host's");
        for config in [of_file, of_env] {
            assert!(config.payloads.is_none());
            assert_eq!(config.ignored, [key]);
        }
        // A pool that another source gives is one.
        let config = parsed(&["--payload-pool=1"]).resolve(env(&[(variable("idle_s"), "7")]));
        assert!(config.expect("valid").ignored.is_empty());
    }
    let flags = OF_A_POOL.each_ref().map(flag);
    let flags = flags.each_ref().map(String::as_str);
    let why = parsed(&flags).resolve([]).expect_err("there is no pool");
    assert!(why.starts_with("--payload-hold-ms, --idle-s, --payload-listen, --payload-hosts, --p"));
    let pool = env(&[(variable("payload_pool"), "1")]);
    assert!(parsed(&flags).resolve(pool).expect("there is one").payloads.is_some());
}

#[test]
fn the_fleet_s_variable_names_the_secret_where_nothing_else_does() {
    let fleet = (String::from(VARIABLE), "/run/fleet");
    let own = (variable("secret_file"), "/run/own");
    for (set, expected) in [
        (vec![], None),
        (vec![fleet.clone()], Some("/run/fleet")),
        (vec![fleet, own], Some("/run/own")),
    ] {
        let config = parsed(&[]).resolve(env(&set)).expect("valid");
        assert_eq!(config.operator.fabric.trust.secret_file.as_deref(), expected.map(Path::new));
    }
}

#[test]
fn the_fleet_s_variable_says_insecure_where_nothing_else_does() {
    let fleet = |value| (String::from(INSECURE_VARIABLE), value);
    let own = (variable("insecure_network"), "false");
    for (set, expected) in [
        (vec![fleet("")], false),
        (vec![fleet("1")], true),
        (vec![fleet("true")], true),
        (vec![fleet("1"), own], false),
    ] {
        let config = parsed(&[]).resolve(env(&set)).expect("valid");
        assert_eq!(config.operator.fabric.trust.insecure_network, expected, "{set:?}");
    }
    let why = parsed(&[]).resolve(env(&[fleet("on")])).expect_err("neither");
    assert_eq!(why, "KVFERRY_INSECURE_NETWORK = \"on\": it has to be true or false");
}

#[test]
fn a_file_has_values_of_their_own_types() {
    let text = "copiers = 1_6\nspin_us = 0x10\nslower = true\npaths = [\"tcp\", \"shared-memory\"]\n\
        uids = [1000, 1_001]\n\
        [protocol]\nlease_ms = 20.5\n[channel]\nlinks_max = 7\n";
    let file = TempFile::new("types", text);
    let config = parsed(&file.flags()).resolve([]).expect("valid");
    let expected = HostConfig {
        copiers: 16,
        spin_us: 16,
        slower: true,
        paths: vec![DataPath::Tcp, DataPath::SharedMemory],
        trust: PeerTrust { uids: vec![1_000, 1_001], ..PeerTrust::default() },
        ..HostConfig::default()
    };
    assert_eq!(config.operator.fabric, expected);
    let limits = config.operator.limits.limits().expect("they go together");
    assert_eq!((limits.protocol.lease.0, limits.channel.links_max), (20_500_000, 7));
    assert_eq!(config.file.as_deref(), Some(&*file.0));
}

#[test]
fn a_file_may_have_both_tables_and_a_text_of_settings() {
    let text = "set = \"channel.links_max=7, protocol.claim_ms=900\"\n\
        [protocol]\nlease_ms = 20000\nclaim_ms = 800\n[operations]\nretries_max = \" 5 \"\n";
    let given = ConfigLayer::from_file(text, "host.toml").expect("valid");
    let limits = given.set.expect("given").limits().expect("they go together");
    assert_eq!((limits.protocol.lease.0, limits.channel.links_max), (20_000_000_000, 7));
    assert_eq!((limits.protocol.claim.0, limits.operations.retries_max), (900_000_000, 5));
}

#[test]
fn a_value_of_a_table_is_one_value() {
    let text = "[protocol]\nlease_ms = \"20000,channel.links_max=7\"\n";
    let why = ConfigLayer::from_file(text, "host.toml").expect_err("two");
    let said = "host.toml:1: protocol.lease_ms = 20000,channel.links_max=7: it has to be a time";
    assert!(why.starts_with(said), "{why}");
}

#[test]
fn the_file_is_named_by_a_flag_or_by_the_environment() {
    let [one, other] = [TempFile::new("one", "copiers = 7"), TempFile::new("other", "copiers = 9")];
    let set = [(FILE.into(), one.0.clone().into_os_string())];
    let copiers =
        |flags: &[&str]| parsed(flags).resolve(set.clone()).expect("valid").operator.fabric.copiers;
    assert_eq!(copiers(&[]), 7);
    assert_eq!(copiers(&other.flags()), 9);
    let set = [(FILE.into(), "/nonexistent/host.toml".into())];
    let why = parsed(&[]).resolve(set).expect_err("there is none");
    assert!(why.starts_with("KVFERRY_HOST_CONFIG /nonexistent/host.toml: cannot read it"), "{why}");
}

#[test]
fn mistakes_in_a_file_are_named_with_their_line() {
    for (text, said) in [
        ("copier = 2", ":1: copier: there is no such key; did you mean \"copiers\"?"),
        ("\nfoo = 2", ":2: foo: there is no such key; there are socket, metrics"),
        ("[fabric]\ncopiers = 2", ":1: fabric: there is no such key"),
        ("\n\ncopiers = 0", ":3: copiers = 0: it has to be 1 or more"),
        ("copiers = 257", ":1: copiers = 257: it may be 256 at most"),
        ("copiers = -1", ":1: copiers = \"-1\": it has to be a whole number, 0 or more"),
        ("copiers = 1.5", ":1: copiers: a text, a whole number, true, false or a list"),
        ("paths = []", ":1: paths = []: name at least one of shared-memory"),
        ("paths = [\"rdma\"]", "\"rdma\" is none of shared-memory, cross-memory, tcp"),
        ("slower = 1", ":1: slower = \"1\": it has to be true or false"),
        ("encrypt = \"yes\"", ":1: encrypt = \"yes\": it has to be true or false"),
        ("socket = \"\"", ":1: socket = \"\": it has to be a path"),
        ("log_level = \"loud\"", ":1: log_level = \"loud\": it has to be off, error, warn"),
        ("log_format = \"xml\"", ":1: log_format = \"xml\": it has to be text or json"),
        ("socket = \"a\"\ncopiers", ":2: not TOML: "),
        ("\n[protocol]\nlease = 2", ":2: protocol.lease: there is no such key; did you mean"),
        ("[channel]\nlinks_max = []", ":1: channel.links_max = : it has to be a whole number"),
        ("operations = 2", ":1: a table of times and limits is expected"),
    ] {
        let why = ConfigLayer::from_file(text, "host.toml").expect_err(text);
        assert!(why.starts_with("host.toml:") && why.contains(said), "{text:?}: {why}");
    }
}

#[test]
fn mistakes_in_the_environment_are_named_with_their_variable() {
    let resolved = |set: &[(String, &str)]| parsed(&[]).resolve(env(set));
    let why = resolved(&[(variable("copiers"), "0")]).expect_err("too few");
    assert_eq!(why, "KVFERRY_HOST_COPIERS: copiers = 0: it has to be 1 or more");
    let why = resolved(&[(variable("paths"), "")]).expect_err("none");
    assert!(why.starts_with("KVFERRY_HOST_PATHS: paths = []: name at least one"), "{why}");
    let config = resolved(&[(variable("copier"), "3"), ("HOME".into(), "/")]).expect("valid");
    assert_eq!(config.strangers, ["KVFERRY_HOST_COPIER"]);
}

#[test]
fn mistakes_in_flags_are_named_with_their_flag() {
    for (flag, said) in [
        ("--copiers=0", "'--copiers <N>': copiers = 0: it has to be 1 or more"),
        ("--paths=tcp,rdma", "\"rdma\" is none of shared-memory, cross-memory, tcp"),
        ("--copier=2", "--copiers"),
    ] {
        let Err(why) = Program::try_parse_from(["host", flag]) else { panic!("{flag} is taken") };
        assert!(why.to_string().contains(said), "{flag}: {why}");
    }
    assert!(parsed(&["--slower"]).given.slower.expect("given"));
}
