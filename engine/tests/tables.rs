//! Every table of the machines is counted by their gauges, or is listed here with the reason why
//! not.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Files and folders of `engine/src/core` that hold the state of machines.
const STATE: [&str; 15] = [
    "heartbeat.rs",
    "block_ledger.rs",
    "by_peer.rs",
    "channel.rs",
    "decode",
    "hash_index.rs",
    "moriio",
    "payload",
    "peers",
    "prefill",
    "recent_set.rs",
    "router",
    "peer_manager.rs",
    "timers.rs",
    "transfer",
];

/// Types that hold any number of things.
const TABLES: [&str; 16] = [
    "AbandonQueue",
    "BTreeMap",
    "BTreeSet",
    "ByPeer",
    "Channel",
    "HashIndex",
    "BlockLedger",
    "NoticeSender",
    "PrefixMemory",
    "RecentMap",
    "RecentSet",
    "Rejections",
    "SlotTable",
    "Timers",
    "Vec",
    "VecDeque",
];

/// Functions that count entries, for the gauges.
const COUNTERS: [&str; 17] = [
    "early",
    "entries",
    "flows",
    "gauges",
    "legs",
    "len",
    "lines",
    "links",
    "pending_len",
    "owners",
    "pending",
    "places",
    "queued",
    "receiving",
    "remembered",
    "sizes",
    "waits",
];

/// Tables that no gauge counts: file, struct and field, and why they cannot grow unseen.
const UNCOUNTED: [(&str, &str); 40] = [
    ("heartbeat.rs Heartbeat.router_events", "taken after each input"),
    ("block_ledger.rs BlockClaims.destinations", "what is received or quarantined"),
    ("block_ledger.rs BlockLedger.groups", "as many as the engine has"),
    ("block_ledger.rs BlockLedger.spare", "some of the places"),
    ("block_ledger.rs PagedCells.pages", "a cell per block of the engine"),
    ("hash_index.rs HashIndex.places", "at most four per entry"),
    ("moriio/config.rs MoriioConfig.layer_names", "a setting"),
    ("moriio/decode_proxy.rs DecodeProxy.released", "as many as a decode has TP ranks"),
    ("moriio/handshake.rs MoriioConnection.ranks", "one per TP rank of a peer"),
    ("moriio/handshake.rs MoriioConnection.replies", "one per TP rank of a peer"),
    ("moriio/mod.rs MoriioPeers.ranks", "one per TP rank"),
    ("moriio/mod.rs MoriioPeers.replies", "one per TP rank"),
    ("moriio/prefill_proxy.rs PrefillProxy.written", "one per TP rank"),
    ("moriio/prefill_proxy.rs RankWriters.links", "as many as a prefill has TP ranks"),
    ("payload/holes.rs HoleTrie.nodes", "twice the holes at most"),
    ("payload/holes.rs HoleTrie.spare", "some of the nodes"),
    ("payload/pool.rs PayloadPool.by_size", "at most one hole more than payloads"),
    ("peers/mod.rs PeerTurn.events", "not kept"),
    ("peers/mod.rs PeerInfo.ranks", "one per TP rank of a peer"),
    ("peers/mod.rs Peers.ranks", "one per TP rank"),
    ("prefill/request.rs PrefillRequest.blocks", "the blocks that are held"),
    ("router/io.rs ClientRequest.prompts", "the works of a request"),
    ("router/mod.rs Router.paused", "counted by `waits`"),
    ("router/prefixes.rs PrefixMemory.places", "the same hashes as the nodes"),
    ("router/queue.rs RequestQueue.lines", "who waits is counted by `waits`, and no line is empty"),
    ("peer_manager.rs PeerManager.events", "taken after each input"),
    ("peer_manager.rs PeerManager.peer_events", "taken after each input"),
    ("peer_manager.rs PeerManager.layouts", "one per TP rank"),
    ("recent_set.rs RecentMap.values", "the same names"),
    ("recent_set.rs RecentSet.order", "the same names in another order"),
    ("timers.rs Timers.queue", "the same deadlines in another order"),
    ("transfer/flow.rs Flow.pieces", "the pieces of all flows are counted in one number"),
    ("transfer/flow.rs Flow.remote", "what one message says"),
    ("transfer/session.rs TransferPeer.layout", "one per TP rank of a peer, and its groups"),
    ("transfer/verify.rs DigestRequest.blocks", "blocks of one layer of a flow"),
    ("transfer/mod.rs Transfer.regions", "one per region of the engine"),
    ("transfer/mod.rs TransferConfig.layers", "a setting"),
    ("transfer/mod.rs TransferConfig.memory", "a setting"),
    ("transfer/stripe.rs Stripe.layers", "the layers of the engine"),
    ("transfer/source.rs PushSource.blocks", "blocks that are held"),
];

/// A table of a machine.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct CoreTable {
    /// Below `engine/src/core`.
    file: String,
    holder: String,
    field: String,
}

impl CoreTable {
    fn name(&self) -> String {
        format!("{} {}.{}", self.file, self.holder, self.field)
    }
}

fn core() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/core")
}

/// The files that hold state with their text, tests left out.
fn sources() -> Vec<(String, String)> {
    let mut open: Vec<PathBuf> = STATE.iter().map(|name| core().join(name)).collect();
    let mut found = Vec::new();
    while let Some(path) = open.pop() {
        if path.is_dir() {
            let entries = fs::read_dir(&path).unwrap();
            open.extend(entries.map(|entry| entry.unwrap().path()));
        } else if path.file_name().is_some_and(|name| name != "tests.rs") {
            let text = fs::read_to_string(&path).unwrap();
            let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
            let name = path.strip_prefix(core()).unwrap().to_string_lossy().into_owned();
            found.push((name, code.to_owned()));
        }
    }
    found.sort();
    found
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !(c.is_alphanumeric() || c == '_'))
}

fn is_table(of: &str) -> bool {
    words(of).any(|word| TABLES.contains(&word))
}

/// The tables among the fields of all structs of a file.
fn tables(file: &str, code: &str) -> Vec<CoreTable> {
    let mut found = Vec::new();
    let mut holder = None;
    for line in code.lines() {
        let bare = line.trim_start_matches("pub(super) ").trim_start_matches("pub ");
        if let Some(rest) = bare.strip_prefix("struct ") {
            let name = words(rest).next().unwrap_or_default().to_owned();
            let table = |field: &str| CoreTable {
                file: file.to_owned(),
                holder: name.clone(),
                field: field.to_owned(),
            };
            if let Some((_, of)) = rest.split_once('(') {
                found.extend(is_table(of).then(|| table("0")));
            } else {
                holder = rest.ends_with('{').then_some(name);
            }
        } else if line.starts_with('}') {
            holder = None;
        } else if let Some(holder) = &holder
            && !line.trim_start().starts_with("//")
            && let Some((field, of)) = line.split_once(": ")
            && is_table(of)
        {
            let field = words(field).last().unwrap_or_default().to_owned();
            found.push(CoreTable { file: file.to_owned(), holder: holder.clone(), field });
        }
    }
    found
}

/// The bodies of the functions of a file that count.
fn counters(code: &str) -> String {
    let mut bodies = String::new();
    let mut end = None;
    for line in code.lines() {
        if let Some(close) = &end {
            bodies += line;
            if line == close {
                end = None;
            }
        } else if let Some((before, rest)) = line.split_once("fn ")
            && line.trim_end().ends_with('{')
            && COUNTERS.contains(&words(rest).next().unwrap_or_default())
        {
            let depth = before.len() - before.trim_start().len();
            end = Some(format!("{}}}", " ".repeat(depth)));
        }
    }
    bodies
}

/// What counts the tables of a file: its own functions and those of its child modules, or if it has
/// none those of the module that it is in.
fn counted_by(file: &str, sources: &[(String, String)]) -> String {
    let children = format!("{}/", file.trim_end_matches(".rs"));
    let own = sources.iter().filter(|(name, _)| name == file || name.starts_with(&children));
    let own: String = own.map(|(_, code)| counters(code)).collect();
    if !own.is_empty() {
        return own;
    }
    let parent = file.rsplit_once('/').map(|(folder, _)| format!("{folder}/mod.rs"));
    let parent = sources.iter().find(|(name, _)| Some(name) == parent.as_ref());
    parent.map(|(_, code)| counters(code)).unwrap_or_default()
}

/// True if a table is asked for its size, or for that of what is in it.
fn counts(bodies: &str, field: &str) -> bool {
    let size = ["len()", "values()", "iter()", "gauges()", "queued()", "early()", "links()"];
    let more = ["lines()", "owners()", "receiving()", "places()"];
    let asked = |what: &&str| bodies.contains(&format!(".{field}.{what}"));
    size.iter().chain(&more).any(asked)
}

#[test]
fn every_table_is_counted_or_listed_with_its_reason() {
    let sources = sources();
    let mut uncounted = BTreeSet::new();
    for (file, code) in &sources {
        let bodies = counted_by(file, &sources);
        let open = tables(file, code).into_iter().filter(|table| !counts(&bodies, &table.field));
        uncounted.extend(open.map(|table| table.name()));
    }
    let listed: BTreeSet<String> = UNCOUNTED.iter().map(|(name, _)| (*name).to_owned()).collect();
    let new: Vec<_> = uncounted.difference(&listed).collect();
    assert!(new.is_empty(), "tables that no gauge counts: {new:#?}");
    let old: Vec<_> = listed.difference(&uncounted).collect();
    assert!(old.is_empty(), "listed here, but counted or gone: {old:#?}");
}
