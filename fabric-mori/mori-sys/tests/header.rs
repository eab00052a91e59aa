//! The bindings say what `kf_mori.h` says.

use mori_sys::{Backend, Code, Direction, Functions, Info, Kind, Location, MORI_ABI, Rdma, Text};
use std::fmt::Write;
use std::fs;
use std::mem::{offset_of, size_of};
use std::path::Path;
use std::process::Command;

const HEADER: &str = include_str!("../shim/kf_mori.h");

#[test]
fn the_functions_are_those_of_the_header() {
    let declared: Vec<&str> = HEADER
        .lines()
        .filter_map(|line| line.strip_prefix("int32_t ")?.split('(').next())
        .collect();
    assert_eq!(declared, Functions::NAMES);
}

macro_rules! constants {
    ($text:expr, $($group:ident::$name:ident => $c:literal),* $(,)?) => {
        $(assert_holds($text, &format!("{} == {}", $c, $group::$name));)*
    };
}

macro_rules! fields {
    ($text:expr, $type:ident is $c:literal: $($field:ident),*) => {
        assert_holds($text, &format!("sizeof({}) == {}", $c, size_of::<$type>()));
        $({
            let field = stringify!($field);
            let offset = offset_of!($type, $field);
            assert_holds($text, &format!("offsetof({}, {field}) == {offset}", $c));
        })*
    };
}

fn assert_holds(text: &mut String, condition: &str) {
    writeln!(text, "_Static_assert({condition}, \"{condition}\");").expect("text");
}

fn all_constants(text: &mut String) {
    assert_holds(text, &format!("KF_MORI_ABI == {MORI_ABI}"));
    constants!(text,
        Kind::OK => "KF_OK", Kind::EXCEPTION => "KF_EXCEPTION", Kind::SYSTEM => "KF_SYSTEM",
        Kind::DESCRIPTOR => "KF_DESCRIPTOR", Kind::ARGUMENT => "KF_ARGUMENT",
        Kind::ABI => "KF_ABI", Kind::NO_ROUTE => "KF_NO_ROUTE", Kind::STALE => "KF_STALE",
        Kind::MISSING => "KF_MISSING",
        Backend::XGMI => "KF_XGMI", Backend::RDMA => "KF_RDMA",
        Location::CPU => "KF_CPU", Location::GPU => "KF_GPU",
        Direction::READ => "KF_READ", Direction::WRITE => "KF_WRITE",
        Code::SUCCESS => "KF_SUCCESS", Code::INIT => "KF_INIT",
        Code::IN_PROGRESS => "KF_IN_PROGRESS",
        Code::ERR_INVALID_ARGS => "KF_ERR_INVALID_ARGS",
        Code::ERR_NOT_FOUND => "KF_ERR_NOT_FOUND", Code::ERR_RDMA_OP => "KF_ERR_RDMA_OP",
        Code::ERR_BAD_STATE => "KF_ERR_BAD_STATE", Code::ERR_GPU_OP => "KF_ERR_GPU_OP",
    );
}

#[test]
fn constants_and_layouts_are_those_of_the_header() {
    let mut text = "#include \"kf_mori.h\"\n".to_owned();
    all_constants(&mut text);
    fields!(&mut text, Text is "kf_text": data, room);
    fields!(&mut text, Info is "kf_info": abi, layout, engine_desc, memory_desc, transfer_status,
        rdma_config, engine, compiled_for, compiled_at);
    fields!(&mut text, Rdma is "kf_rdma": qp_per_transfer, post_batch_size, num_workers,
        poll_events, chunking, chunk_bytes, chunks_max, nics_per_transfer, send_wr_max, cqe_max,
        sge_max);
    let source = Path::new(env!("CARGO_TARGET_TMPDIR")).join("header.c");
    fs::write(&source, text).expect("a source");
    let shim = Path::new(env!("CARGO_MANIFEST_DIR")).join("shim");
    let mut compiler = Command::new("cc");
    compiler.args(["-std=c11", "-fsyntax-only", "-Wall", "-Werror", "-I"]).arg(shim).arg(source);
    assert!(compiler.status().expect("a compiler").success());
}
