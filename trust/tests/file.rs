//! A secret file that others can read or change is none, and a changed one counts at once.

use kvferry_trust::SecretFile;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

const OLD: &str = "0123456789abcdef0123456789abcdef\n";
const NEW: &str = "fedcba9876543210fedcba9876543210\n";

/// A folder that is gone afterwards.
struct SecretTestFolder(PathBuf);

impl SecretTestFolder {
    fn new(name: &str) -> SecretTestFolder {
        let path = std::env::temp_dir().join(format!("kvferry-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).expect("a folder");
        SecretTestFolder(path)
    }

    fn write(&self, text: &str, mode: u32) -> PathBuf {
        // As an operator does who does not want a moment in which it is half written.
        let (path, new) = (self.0.join("secret"), self.0.join("new"));
        fs::write(&new, text).expect("a file");
        fs::set_permissions(&new, Permissions::from_mode(mode)).expect("its mode");
        fs::rename(&new, &path).expect("it is in its place");
        path
    }
}

impl Drop for SecretTestFolder {
    fn drop(&mut self) {
        let _gone = fs::remove_dir_all(&self.0);
    }
}

fn refused(path: &Path) -> String {
    let why = SecretFile::open(path).expect_err("it is refused");
    assert!(why.contains(&*path.to_string_lossy()), "the path is named: {why}");
    why
}

#[test]
fn who_else_can_read_or_change_it_knows_it() {
    let folder = SecretTestFolder::new("modes");
    for mode in [0o400, 0o600, 0o440, 0o640] {
        SecretFile::open(&folder.write(OLD, mode)).expect("nobody else can read it");
    }
    for mode in [0o444, 0o604, 0o620, 0o660, 0o602, 0o601] {
        let why = refused(&folder.write(OLD, mode));
        assert!(why.contains(&format!("mode {mode:03o}")) && why.contains("chmod 400"), "{why}");
    }
}

#[test]
fn what_is_no_file_is_not_waited_for() {
    let folder = SecretTestFolder::new("kinds");
    assert!(refused(&folder.0).contains("no regular file"));
    assert!(refused(&folder.0.join("absent")).contains("cannot be read"));
    let fifo = folder.0.join("fifo");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &fifo,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .expect("a FIFO");
    assert!(refused(&fifo).contains("no regular file"));
    let binary = folder.0.join("binary");
    fs::write(&binary, [0xff; 64]).expect("a file");
    fs::set_permissions(&binary, Permissions::from_mode(0o400)).expect("its mode");
    assert!(refused(&binary).contains("as text"));
}

#[test]
fn a_changed_file_counts_from_the_next_proof_on() {
    let folder = SecretTestFolder::new("changes");
    let file = SecretFile::open(&folder.write(OLD, 0o400)).expect("a secret");
    let silent = |why: &str| panic!("nothing is wrong: {why}");
    let first = file.secret(silent);
    folder.write(&format!("{OLD}{NEW}"), 0o400);
    let both = file.secret(silent);
    assert_ne!(first, both, "it was read anew");
    assert_eq!(both, file.secret(silent), "it is read once");
    // One that others can read, one without a secret, and none: the last that was good counts.
    let mut told = Vec::new();
    for (text, mode) in [(NEW, 0o444), ("", 0o400)] {
        folder.write(text, mode);
        for _ in 0..2 {
            assert_eq!(file.secret(|why| told.push(why.to_string())), both, "mode {mode:o}");
        }
    }
    fs::remove_file(folder.0.join("secret")).expect("it was there");
    for _ in 0..2 {
        assert_eq!(file.secret(|why| told.push(why.to_string())), both, "absent");
    }
    assert_eq!(told.len(), 3, "each is told once: {told:?}");
    folder.write(NEW, 0o400);
    assert_ne!(file.secret(silent), both, "a good one counts again");
}
