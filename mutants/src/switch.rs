//! Switch of the mutants in a build: `KVFERRY_MUTANT` names the one that is on, or `record`, with
//! which the sites that the process reaches are appended to the file `KVFERRY_MUTANT_REACHED`.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const UNREAD: u32 = u32::MAX;
const RECORD: u32 = u32::MAX - 1;
const NONE: u32 = u32::MAX - 2;

/// Most sites of a build.
const SITES_MAX: usize = 1 << 16;

static CHOSEN: AtomicU32 = AtomicU32::new(UNREAD);
static REACHED: [AtomicU64; SITES_MAX / 64] = [const { AtomicU64::new(0) }; SITES_MAX / 64];
static FILE: OnceLock<Option<File>> = OnceLock::new();

/// True if this mutant is on in this process.
#[inline]
pub fn is(site: u32) -> bool {
    match CHOSEN.load(Ordering::Relaxed) {
        UNREAD | RECORD => slow(site),
        chosen => chosen == site,
    }
}

#[cold]
fn slow(site: u32) -> bool {
    if CHOSEN.load(Ordering::Relaxed) == UNREAD {
        let value = std::env::var("KVFERRY_MUTANT").unwrap_or_default();
        let chosen = if value == "record" { RECORD } else { value.parse().unwrap_or(NONE) };
        CHOSEN.store(chosen, Ordering::Relaxed);
        if chosen != RECORD {
            return chosen == site;
        }
    }
    record(site);
    false
}

fn record(site: u32) {
    let Some(word) = REACHED.get(site as usize / 64) else { return };
    let bit = 1 << (site % 64);
    if word.fetch_or(bit, Ordering::Relaxed) & bit != 0 {
        return;
    }
    let file = FILE.get_or_init(|| {
        let path = std::env::var_os("KVFERRY_MUTANT_REACHED")?;
        OpenOptions::new().append(true).create(true).open(path).ok()
    });
    if let Some(mut file) = file.as_ref() {
        // One write a site, which appends as a whole though several processes share the file.
        let _ = file.write_all(&site.to_le_bytes());
    }
}
