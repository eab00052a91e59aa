//! The other process: it holds the targets and does what a line on its standard input says.

use super::raw_tcp;
use super::workload::{POOL, ROWS, attach, fill, is_filled};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{DataEvent, DataPlane, RegionId};
use kvferry_fabric_host::{DataPath, HostConfig, HostPlane, HugePages, MemfdPool, PeerTrust};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, Read, Write};
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::Duration;

/// In the environment of the child: the file of the secret that both sides have.
pub(crate) const CHILD: &str = "KVFERRY_BENCH_CHILD";

/// The paths, and whether what goes by them is encrypted.
pub(crate) const WAYS: [(DataPath, bool); 4] = [
    (DataPath::SharedMemory, false),
    (DataPath::CrossMemory, false),
    (DataPath::Tcp, false),
    (DataPath::Tcp, true),
];

/// CPU time of this process so far.
pub(crate) fn cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// A plane that takes one way, and its region over a pool.
pub(crate) fn plane(
    (path, encrypt): (DataPath, bool),
    secret: &Path,
    pool: &MemfdPool,
) -> (HostPlane, Vec<u8>) {
    let secret_file = encrypt.then(|| secret.to_owned());
    let trust = PeerTrust { secret_file, encrypt, ..PeerTrust::default() };
    let config = HostConfig { paths: vec![path], open_door: true, trust, ..HostConfig::default() };
    let mut plane = HostPlane::new(config).expect("a plane at loopback");
    plane.register(RegionId(1), pool.memory()).expect("a pool registers");
    let mut events = Vec::new();
    plane.poll(Nanos::ZERO, &mut events);
    match events.pop() {
        Some(DataEvent::Registered { result: Ok(desc), .. }) => (plane, desc.0.to_vec()),
        other => panic!("not registered: {other:?}"),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn echo(listener: &TcpListener) {
    let Ok((mut stream, _)) = listener.accept() else { return };
    let _ = stream.set_nodelay(true);
    let mut bytes = [0; 64];
    while stream.read_exact(&mut bytes).is_ok() && stream.write_all(&bytes).is_ok() {}
}

/// The parent's pool, by the number of its descriptor there.
fn map(fd: u64) -> *const u8 {
    let parent = std::os::unix::process::parent_id();
    let file = File::open(format!("/proc/{parent}/fd/{fd}")).expect("a pool of the parent");
    let (len, read, shared) = (POOL as usize, libc::PROT_READ, libc::MAP_SHARED);
    // SAFETY: A new mapping.
    let map = unsafe { libc::mmap(std::ptr::null_mut(), len, read, shared, file.as_raw_fd(), 0) };
    assert_ne!(map, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
    map.cast()
}

/// Copies blocks from a mapping into a pool.
///
/// # Safety
/// They are inside both, and nothing else is at them.
unsafe fn copy(source: *const u8, pool: &MemfdPool, [from, to]: [&[u64]; 2], size: u64) {
    for (from, to) in from.iter().zip(to) {
        // SAFETY: See above.
        unsafe {
            let target = pool.start().add(*to as usize);
            std::ptr::copy_nonoverlapping(source.add(*from as usize), target, size as usize);
        }
    }
}

/// True if this was the child, which then has ended.
pub(crate) fn run_if_child() -> bool {
    let Some(secret) = std::env::var_os(CHILD) else { return false };
    let pool = MemfdPool::new(POOL, HugePages::No).expect("a pool");
    let planes = WAYS.map(|way| plane(way, secret.as_ref(), &pool));
    for (plane, desc) in &planes {
        println!("{} {}", hex(&plane.address().0), hex(desc));
    }
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let pool_base = pool.start() as u64;
    let echo_port = listener.local_addr().expect("bound").port();
    println!("{pool_base} {echo_port} {}", raw_tcp::serve(pool_base));
    std::thread::spawn(move || echo(&listener));
    let mut drawn = BTreeMap::new();
    let mut mapped = None;
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let mut words = line.split(' ');
        match words.next() {
            Some("cpu") => println!("{}", cpu().as_nanos()),
            Some("clear") => {
                // SAFETY: The whole pool; nothing is under way.
                unsafe { std::ptr::write_bytes(pool.start(), 0, pool.len() as usize) };
                println!("cleared");
            }
            Some(what @ ("memcpy" | "readv")) => {
                let name = words.next();
                let row = ROWS.iter().find(|row| Some(row.name) == name).expect("a row");
                let mut number = || words.next().and_then(|word| word.parse().ok());
                let (source, times): (u64, u64) =
                    (number().expect("a source"), number().expect("a count"));
                // Drawn when the row was verified, and not while it is measured.
                let [from, to] = drawn.entry(row.name).or_insert_with(|| row.blocks());
                if what == "memcpy" {
                    let source = *mapped.get_or_insert_with(|| map(source));
                    // SAFETY: Blocks of a row are inside both pools, and nothing is under way.
                    (0..times).for_each(|_| unsafe { copy(source, &pool, [from, to], row.size) });
                } else {
                    let parent = std::os::unix::process::parent_id();
                    let sides = [(pool.start() as u64, &to[..]), (source, &from[..])];
                    // SAFETY: As above.
                    (0..times).for_each(|_| unsafe {
                        attach(libc::process_vm_readv, parent, sides, row.size);
                    });
                }
                println!("done");
            }
            Some(what @ ("fill" | "verify")) => {
                let name = words.next();
                let seed = words.next().and_then(|seed| seed.parse().ok()).expect("a seed");
                let row = ROWS.iter().find(|row| Some(row.name) == name).expect("a row");
                let [from, to] = row.blocks();
                // SAFETY: Blocks of a row are inside the pool, and nothing is under way.
                unsafe {
                    if what == "fill" {
                        fill(pool.start(), &from, seed, row.size);
                        println!("filled");
                    } else {
                        println!("{}", is_filled(pool.start(), &to, seed, row.size));
                    }
                }
            }
            _ => break,
        }
    }
    true
}
