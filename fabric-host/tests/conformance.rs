//! The conformance suite of data planes, over each path, within a process and between two.

mod common;

use common::remote::serve_if_child;
use common::{TestWay, apart, by_threads, here};
use kvferry_engine::conformance::data_plane;
use kvferry_fabric_host::DataPath;

/// The other process: this test, executed again by the others.
#[test]
fn child() {
    serve_if_child();
}

#[test]
fn shared_memory_conforms() {
    data_plane(&mut || Box::new(here(DataPath::SharedMemory)));
}

#[test]
fn cross_memory_conforms() {
    data_plane(&mut || Box::new(here(DataPath::CrossMemory)));
}

#[test]
fn tcp_conforms() {
    data_plane(&mut || Box::new(here(DataPath::Tcp)));
}

#[test]
fn encrypted_tcp_conforms() {
    data_plane(&mut || Box::new(here(TestWay::ENCRYPTED)));
}

#[test]
fn shared_memory_between_processes_conforms() {
    data_plane(&mut || Box::new(apart(DataPath::SharedMemory)));
}

#[test]
fn cross_memory_between_processes_conforms() {
    data_plane(&mut || Box::new(apart(DataPath::CrossMemory)));
}

#[test]
fn tcp_between_processes_conforms() {
    data_plane(&mut || Box::new(apart(DataPath::Tcp)));
}

#[test]
fn encrypted_tcp_between_processes_conforms() {
    data_plane(&mut || Box::new(apart(TestWay::ENCRYPTED)));
}

#[test]
fn shared_memory_that_threads_read_conforms() {
    data_plane(&mut || Box::new(by_threads(DataPath::SharedMemory)));
}

#[test]
fn cross_memory_that_threads_read_conforms() {
    data_plane(&mut || Box::new(by_threads(DataPath::CrossMemory)));
}
