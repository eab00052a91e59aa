//! The conformance suite of data planes, over each path, within a process and between two.

mod common;

use common::Pair;
use common::remote::serve_if_child;
use engine::conformance::data_plane;
use fabric_host::Path;

/// The other process: this test, executed again by the others.
#[test]
fn child() {
    serve_if_child();
}

#[test]
fn shared_memory_conforms() {
    data_plane(&mut || Box::new(Pair::here(Path::SharedMemory)));
}

#[test]
fn cross_memory_conforms() {
    data_plane(&mut || Box::new(Pair::here(Path::CrossMemory)));
}

#[test]
fn tcp_conforms() {
    data_plane(&mut || Box::new(Pair::here(Path::Tcp)));
}

#[test]
fn shared_memory_between_processes_conforms() {
    data_plane(&mut || Box::new(Pair::apart(Path::SharedMemory)));
}

#[test]
fn cross_memory_between_processes_conforms() {
    data_plane(&mut || Box::new(Pair::apart(Path::CrossMemory)));
}

#[test]
fn tcp_between_processes_conforms() {
    data_plane(&mut || Box::new(Pair::apart(Path::Tcp)));
}

#[test]
fn shared_memory_that_threads_read_conforms() {
    data_plane(&mut || Box::new(Pair::by_threads(Path::SharedMemory)));
}

#[test]
fn cross_memory_that_threads_read_conforms() {
    data_plane(&mut || Box::new(Pair::by_threads(Path::CrossMemory)));
}
