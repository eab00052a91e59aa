//! The conformance suite of data planes, over both backends, within a process and between two.

#[path = "../common/mod.rs"]
mod common;
mod limits;
mod long_ranges;
mod mixed;

use common::{apart, here, serve_if_child};
use kvferry_engine::conformance::data_plane;
use kvferry_fabric_mori::MoriBackend;
use std::sync::{Mutex, PoisonError};

/// The port of the network card, which goes down, is that of the process.
static PORT: Mutex<()> = Mutex::new(());

#[test]
fn again_over_the_older_layout() {
    common::again_over_the_older_layout();
}

/// The other process: this test, executed again by the others.
#[test]
fn child() {
    serve_if_child();
}

#[test]
fn rdma_conforms() {
    let _alone = PORT.lock().unwrap_or_else(PoisonError::into_inner);
    data_plane(&mut || Box::new(here(MoriBackend::Rdma)));
}

#[test]
fn xgmi_conforms() {
    data_plane(&mut || Box::new(here(MoriBackend::Xgmi)));
}

#[test]
fn rdma_between_processes_conforms() {
    let _alone = PORT.lock().unwrap_or_else(PoisonError::into_inner);
    data_plane(&mut || Box::new(apart(MoriBackend::Rdma)));
}

#[test]
fn xgmi_between_processes_conforms() {
    data_plane(&mut || Box::new(apart(MoriBackend::Xgmi)));
}

/// The check of flaps as it runs over MoRI itself.
#[test]
fn a_command_takes_the_port_down_and_up() {
    common::again_with_a_port_command("rdma_conforms", 10);
}
