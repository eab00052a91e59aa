//! The conformance suite of data planes, over each path.

mod common;

use common::Pair;
use engine::conformance::data_plane;
use fabric_host::Path;

#[test]
fn shared_memory_conforms() {
    data_plane(&mut || Box::new(Pair::new(Path::SharedMemory)));
}

#[test]
fn cross_memory_conforms() {
    data_plane(&mut || Box::new(Pair::new(Path::CrossMemory)));
}

#[test]
fn tcp_conforms() {
    data_plane(&mut || Box::new(Pair::new(Path::Tcp)));
}
