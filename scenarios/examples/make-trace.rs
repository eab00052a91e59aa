//! Writes the bundled trace, `scenarios/traces/chat.jsonl`.

use kvferry_scenarios::trace::generate::{CHAT, generate, to_jsonl};

fn main() -> std::io::Result<()> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/traces/chat.jsonl");
    std::fs::write(path, to_jsonl(&generate(&CHAT)))
}
