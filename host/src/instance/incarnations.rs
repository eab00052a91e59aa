//! Which incarnation of an engine begins: one later than all before, though the clock of the
//! machine went back.
//!
//! Peers know an engine by its name, which is its address, and take a later incarnation for a
//! restart. Who is to have the same name again notes its incarnation in a file.

use kvferry_engine::core::ids::{EngineId, Incarnation};
use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Longest text of a note in bytes: a number and the line's end.
const NOTE_MAX: u64 = 21;

/// The folder of the notes unless one is given: that of the user's programs for what is to stay.
pub(crate) fn folder(env: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let set = |name: &str| env(name).filter(|text| !text.is_empty()).map(PathBuf::from);
    let base = set("XDG_STATE_HOME").or_else(|| Some(set("HOME")?.join(".local/state")));
    Some(base?.join("kvferry"))
}

/// [`folder`] of this process.
pub(crate) fn own_folder() -> Option<PathBuf> {
    folder(|name| env::var_os(name))
}

/// Microseconds since 1970.
pub(crate) fn now_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_micros() as u64)
}

/// Begins an incarnation of an engine: after `last`, and after the one that is noted in `folder`,
/// where it is noted. A note that cannot be read or written is a warning.
pub(crate) fn begin(
    engine: &EngineId,
    last: Option<Incarnation>,
    folder: Option<&Path>,
) -> Incarnation {
    begin_at(now_us(), engine, last, folder)
}

fn begin_at(
    clock_us: u64,
    engine: &EngineId,
    last: Option<Incarnation>,
    folder: Option<&Path>,
) -> Incarnation {
    let note = folder.map(|folder| folder.join(note_of(engine)));
    let noted = note.as_deref().and_then(|note| {
        read(note).unwrap_or_else(|why| {
            let note = note.display();
            tracing::warn!(%note, %why, "the note of this engine's last incarnation cannot be used");
            None
        })
    });
    let last = last.max(noted);
    let incarnation = Incarnation::begin(clock_us, last);
    if let Some(behind) = last.and_then(|last| last.0.checked_sub(clock_us)) {
        let behind = Duration::from_micros(behind);
        tracing::warn!(?behind, "the clock went back since this engine's last incarnation");
    }
    if let Some(note) = note
        && let Err(why) = write(&note, incarnation)
    {
        let note = note.display();
        let effect = "if the clock goes back, peers take the next incarnation only when this one is over; \
            give a folder that can be written by `state`";
        tracing::warn!(%note, %why, effect, "the incarnation of this engine cannot be noted");
    }
    incarnation
}

/// Names of engines are of letters, digits and few other characters; what no file name has is
/// written as its number.
fn note_of(engine: &EngineId) -> String {
    let mut name = String::from("life-");
    for c in engine.0.chars() {
        match c {
            'a'..='z' | 'A'..='Z' | '0'..='9' | '.' | '-' | ':' => name.push(c),
            other => name.push_str(&format!("_{:x}_", u32::from(other))),
        }
    }
    name
}

/// None if there is no note.
fn read(note: &Path) -> io::Result<Option<Incarnation>> {
    let file = match File::open(note) {
        Ok(file) => file,
        Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(why) => return Err(why),
    };
    let mut text = String::new();
    file.take(NOTE_MAX).read_to_string(&mut text)?;
    let incarnation = text.trim().parse().map(Incarnation).ok();
    let damaged = || io::Error::other(format!("{text:?} is no incarnation; it is written anew"));
    incarnation
        .filter(|incarnation| *incarnation <= Incarnation::LATEST)
        .map(Some)
        .ok_or_else(damaged)
}

/// Whole or not at all: an engine may be killed at any time.
fn write(note: &Path, incarnation: Incarnation) -> io::Result<()> {
    if let Some(folder) = note.parent() {
        fs::create_dir_all(folder)?;
    }
    let mut next = note.as_os_str().to_owned();
    next.push(".next");
    let mut file = File::create(&next)?;
    writeln!(file, "{incarnation}")?;
    file.sync_all()?;
    fs::rename(&next, note)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let folder = format!("kvferry-lives-{}-{name}", std::process::id());
            let folder = env::temp_dir().join(folder);
            let _ = fs::remove_dir_all(&folder);
            Folder(folder)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn an_incarnation_is_later_than_the_one_that_is_noted() {
        let folder = Folder::new("later");
        let begin = |clock, name: &str, last: Option<u64>| {
            begin_at(clock, &name.into(), last.map(Incarnation), Some(&folder.0)).0
        };
        assert_eq!(begin(5_000, "h:1", None), 5_000);
        // The clock went back: by a file, by what a connector knows, by both.
        assert_eq!(begin(300, "h:1", None), 5_001);
        assert_eq!(begin(300, "h:1", Some(7_000)), 7_001);
        assert_eq!(begin(300, "h:1", Some(10)), 7_002);
        assert_eq!(begin(9_000, "h:1", None), 9_000);
        // Others have incarnations of their own.
        assert_eq!(begin(300, "h:2", None), 300);
    }

    #[test]
    fn a_damaged_note_is_written_anew() {
        let folder = Folder::new("damaged");
        let note = folder.0.join(note_of(&"h:1".into()));
        fs::create_dir_all(&folder.0).expect("a folder");
        for text in ["", "soon\n", "18446744073709551615\n", "123456789012345678901234567890"] {
            fs::write(&note, text).expect("a note");
            let incarnation = begin_at(5_000, &"h:1".into(), None, Some(&folder.0));
            assert_eq!(incarnation, Incarnation(5_000), "{text}");
            assert_eq!(read(&note).expect("a note"), Some(incarnation));
        }
    }

    #[test]
    fn without_a_place_for_notes_an_incarnation_begins_all_the_same() {
        let folder = Folder::new("none");
        fs::write(&folder.0, "").expect("a file");
        let begun = begin_at(5_000, &"h:1".into(), None, Some(&folder.0.join("below")));
        assert_eq!(begun, Incarnation(5_000));
        fs::remove_file(&folder.0).expect("it was there");
    }

    #[test]
    fn notes_are_where_programs_keep_what_is_to_stay() {
        let of = |set: &[(&str, &str)]| {
            let set = set.to_vec();
            folder(move |name| {
                set.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into())
            })
        };
        assert_eq!(of(&[("HOME", "/h")]), Some("/h/.local/state/kvferry".into()));
        let both = [("HOME", "/h"), ("XDG_STATE_HOME", "/s")];
        assert_eq!(of(&both), Some("/s/kvferry".into()));
        assert_eq!(of(&[("HOME", "")]), None);
    }

    #[test]
    fn names_of_engines_are_names_of_files() {
        assert_eq!(note_of(&"10.0.0.1:6301".into()), "life-10.0.0.1:6301");
        assert_eq!(note_of(&"a/b_%".into()), "life-a_2f_b_5f__25_");
    }
}
