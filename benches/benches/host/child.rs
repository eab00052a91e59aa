//! The other process: it holds the targets and does what a line on its standard input says.

use super::work::{POOL, ROWS, attach, fill, is_filled};
use engine::core::time::Nanos;
use engine::fabric::{DataEvent, DataPlane, RegionId};
use fabric_host::{HostConfig, HostPlane, HugePages, Path, Pool};
use std::collections::BTreeMap;
use std::io::{BufRead, Read, Write};
use std::net::TcpListener;
use std::time::Duration;

pub(crate) const CHILD: &str = "KVFERRY_BENCH_CHILD";

/// CPU time of this process so far.
pub(crate) fn cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// A plane that takes one path, and its region over a pool.
pub(crate) fn plane(path: Path, pool: &Pool) -> (HostPlane, Vec<u8>) {
    let config = HostConfig { paths: vec![path], open_door: true, ..HostConfig::default() };
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

/// True if this was the child, which then has ended.
pub(crate) fn run_if_child() -> bool {
    if std::env::var_os(CHILD).is_none() {
        return false;
    }
    let pool = Pool::new(POOL, HugePages::No).expect("a pool");
    let planes = Path::ALL.map(|path| plane(path, &pool));
    for (plane, desc) in &planes {
        println!("{} {}", hex(&plane.address().0), hex(desc));
    }
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    println!("{} {}", pool.start() as u64, listener.local_addr().expect("bound").port());
    std::thread::spawn(move || echo(&listener));
    let mut drawn = BTreeMap::new();
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let mut words = line.split(' ');
        match words.next() {
            Some("cpu") => println!("{}", cpu().as_nanos()),
            Some("clear") => {
                // SAFETY: The whole pool; nothing is under way.
                unsafe { std::ptr::write_bytes(pool.start(), 0, pool.len() as usize) };
                println!("cleared");
            }
            Some("readv") => {
                let name = words.next();
                let row = ROWS.iter().find(|row| Some(row.name) == name).expect("a row");
                let mut number = || words.next().and_then(|word| word.parse().ok());
                let (base, times): (u64, u64) =
                    (number().expect("a base"), number().expect("a count"));
                // Drawn when the row was verified, and not while it is measured.
                let [from, to] = drawn.entry(row.name).or_insert_with(|| row.blocks());
                let parent = std::os::unix::process::parent_id();
                for _ in 0..times {
                    let sides = [(pool.start() as u64, &to[..]), (base, &from[..])];
                    // SAFETY: Blocks of a row are inside both pools, and nothing is under way.
                    unsafe { attach(libc::process_vm_readv, parent, sides, row.size) };
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
