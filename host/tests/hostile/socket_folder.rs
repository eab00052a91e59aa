//! Others who have the folder of the socket, or the socket. Most needs root, which can be another
//! user: without, it is left out, and says so.

use crate::program::ProgramFolder;
use kvferry::sidecar::proto::ClientIdentity;
use kvferry::sidecar::{SidecarClient, prepare_socket_folder};
use std::fs::{self, Permissions};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};

/// A user that has nothing.
const STRANGER: u32 = 54_321;

#[allow(clippy::print_stderr, reason = "a check that is left out has to be seen")]
fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("not run: only root can be another user");
    }
    root
}

/// A folder where each user of the machine comes to, which Cargo's are not below a home of mode
/// 0700. It removes itself.
struct OpenFolder(ProgramFolder);

impl OpenFolder {
    /// `name` is the test's own.
    fn new(name: &str) -> OpenFolder {
        OpenFolder(ProgramFolder::new(&format!("/tmp/kvferry-{}-{name}", std::process::id())))
    }
}

impl Drop for OpenFolder {
    fn drop(&mut self) {
        let _gone = fs::remove_dir_all(self.0.path(""));
    }
}

/// Makes the calling thread one of a stranger, and no other.
fn become_stranger() {
    // SAFETY: It takes three numbers and reads no memory. glibc's `setresuid` would change all
    // threads.
    let done = unsafe { libc::syscall(libc::SYS_setresuid, STRANGER, STRANGER, STRANGER) };
    assert_eq!(done, 0, "root can be anybody");
}

fn set_mode(path: impl AsRef<Path>, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).expect("it is ours");
}

/// That a host does not begin to listen at a path, and why.
fn refusal(socket: &str) -> String {
    let mut host = Command::new(env!("CARGO_BIN_EXE_kvferry"))
        .args(["host", "--socket", socket])
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    // A host that listens is asked for something, and goes on.
    loop {
        if UnixStream::connect(socket).is_ok() {
            let _ended = (host.kill(), host.wait());
            panic!("a host listens at {socket}");
        }
        if let Some(status) = host.try_wait().expect("it is a child") {
            assert!(!status.success(), "{status}");
            let mut said = String::new();
            host.stderr.take().expect("it is a pipe").read_to_string(&mut said).expect("UTF-8");
            return said;
        }
        std::thread::yield_now();
    }
}

#[track_caller]
fn names(said: &str, all: &[&str]) {
    assert!(all.iter().all(|part| said.contains(part)), "{said}");
}

#[test]
fn a_host_does_not_listen_where_others_can_take_its_place() {
    let folder = ProgramFolder::new("open-folder");
    let (path, socket) = (folder.path(""), folder.path("host.sock"));
    let path = path.trim_end_matches('/');
    set_mode(path, 0o777);
    names(&refusal(&socket), &[path, "0777", "chmod go-w"]);
    set_mode(path, 0o700);
    if is_root() {
        chown(path, Some(STRANGER), None).expect("root gives it away");
        names(&refusal(&socket), &[path, "user 54321", "another path"]);
        chown(path, Some(0), None).expect("root takes it back");
        fs::write(folder.path("host.sock.lock"), "").expect("a file");
        chown(folder.path("host.sock.lock"), Some(STRANGER), None).expect("root gives it away");
        names(&refusal(&socket), &["host.sock.lock", "user 54321", "remove it"]);
    }
}

#[test]
fn the_folder_of_a_user_is_made_for_it_alone_or_refused() {
    let parent = ProgramFolder::new("own-folder");
    let path = parent.path("kvferry-0");
    prepare_socket_folder(Path::new(&path)).expect("it is made");
    let made = fs::symlink_metadata(&path).expect("it is there");
    assert_eq!(made.mode() & 0o7777, 0o700);
    prepare_socket_folder(Path::new(&path)).expect("it is there");
    let refusal = || {
        let why = prepare_socket_folder(Path::new(&path)).expect_err("it is not ours alone");
        assert_eq!(why.kind(), std::io::ErrorKind::PermissionDenied, "{why}");
        why.to_string()
    };
    set_mode(&path, 0o750);
    names(&refusal(), &[&path, "0750", "remove it", "XDG_RUNTIME_DIR"]);
    set_mode(&path, 0o777);
    names(&refusal(), &[&path, "0777", "remove it", "XDG_RUNTIME_DIR"]);
    set_mode(&path, 0o700);
    if is_root() {
        chown(&path, Some(STRANGER), None).expect("root gives it away");
        names(&refusal(), &[&path, "user 54321", "0700", "remove it", "XDG_RUNTIME_DIR"]);
        chown(&path, Some(0), None).expect("root takes it back");
    }
    fs::rename(&path, parent.path("elsewhere")).expect("it is ours");
    symlink(parent.path("elsewhere"), &path).expect("a link");
    names(&refusal(), &[&path, "link", "remove it"]);
    fs::remove_file(&path).expect("it is ours");
    fs::write(&path, "").expect("a file");
    names(&refusal(), &[&path, "no folder", "remove it"]);
}

/// What a host that is none hears of a connector, and what that one says of it.
fn heard_by(listener: &UnixListener, socket: &str) -> (usize, String) {
    let refused = SidecarClient::connect(Path::new(socket), ClientIdentity::Observer);
    let said = refused.map_or_else(|why| why.to_string(), |_| "connected".into());
    // By now it is closed again, and all that was said is there; if anybody came.
    let mut heard = Vec::new();
    listener.set_nonblocking(true).expect("it does not block");
    if let Ok((mut stream, _)) = listener.accept() {
        let _ended = stream.read_to_end(&mut heard);
    }
    (heard.len(), said)
}

#[test]
fn a_connector_says_nothing_to_the_host_of_a_stranger() {
    if !is_root() {
        return;
    }
    let open = OpenFolder::new("other-host");
    let folder = &open.0;
    let socket = folder.path("host.sock");
    let ours = UnixListener::bind(&socket).expect("a socket");
    chown(&socket, Some(STRANGER), None).expect("root gives it away");
    let (heard, said) = heard_by(&ours, &socket);
    assert_eq!(heard, 0, "{said}");
    names(&said, &[&socket, "user 54321", "remove it"]);
    fs::remove_file(&socket).expect("it is ours");
    // The other way round: the socket is ours, and who listens is not.
    set_mode(folder.path(""), 0o777);
    let (at, listening) = (socket.clone(), std::sync::mpsc::channel());
    let stranger = std::thread::spawn(move || {
        become_stranger();
        listening.0.send(UnixListener::bind(&at).expect("a socket")).expect("it is waited for");
    });
    let theirs = listening.1.recv().expect("it listens");
    stranger.join().expect("it listens");
    chown(&socket, Some(0), None).expect("root takes it");
    set_mode(folder.path(""), 0o700);
    let (heard, said) = heard_by(&theirs, &socket);
    assert_eq!(heard, 0, "{said}");
    names(&said, &[&socket, "user 54321"]);
}

#[test]
fn a_link_in_place_of_the_socket_is_not_followed() {
    let folder = ProgramFolder::new("linked");
    let (socket, other) = (folder.path("host.sock"), folder.path("other.sock"));
    let theirs = UnixListener::bind(&other).expect("a socket");
    symlink(&other, &socket).expect("a link");
    let (heard, said) = heard_by(&theirs, &socket);
    assert_eq!(heard, 0, "{said}");
    names(&said, &[&socket, "no socket", "remove it"]);
}

#[test]
fn a_stranger_cannot_speak_with_a_host() {
    if !is_root() {
        return;
    }
    let open = OpenFolder::new("stranger");
    let folder = &open.0;
    let socket = folder.path("host.sock");
    let mut host = Command::new(env!("CARGO_BIN_EXE_kvferry"))
        .args(["host", "--socket", &socket])
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    // Only then the socket has its rights.
    let mut log = BufReader::new(host.stderr.take().expect("it is piped")).lines();
    let begun = |line: &io::Result<String>| {
        line.as_ref().is_ok_and(|line| line.contains("waiting for an engine"))
    };
    assert!(log.any(|line| begun(&line)), "it ended");
    assert_eq!(fs::metadata(&socket).expect("it is there").mode() & 0o777, 0o600);
    // By its rights alone it would be reached.
    set_mode(folder.path(""), 0o711);
    set_mode(&socket, 0o666);
    let at = socket;
    let stranger = std::thread::spawn(move || {
        become_stranger();
        let mut heard = Vec::new();
        let mut stream = UnixStream::connect(at).expect("its rights allow it");
        stream.read_to_end(&mut heard).map_or(0, |_| heard.len())
    });
    assert_eq!(stranger.join().expect("it is cut off"), 0);
    let _ended = (host.kill(), host.wait());
}
