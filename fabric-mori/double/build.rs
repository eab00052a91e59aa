//! Lays out an installation of the double for each layout class of MoRI, and kvferry's shim for it.

// A build script speaks to cargo on its standard output.
#![allow(clippy::print_stdout)]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io, thread};

const CLASSES: [u32; 2] = [9, 15];

fn main() -> Result<(), String> {
    println!("cargo:rerun-if-changed=build.rs\ncargo:rerun-if-changed=include");
    // Not the folder, that this crate's own source is in too.
    for source in fs::read_dir("src").map_err(|why| why.to_string())? {
        let source = source.map_err(|why| why.to_string())?.path();
        if source.extension().is_none_or(|name| name != "rs") {
            println!("cargo:rerun-if-changed={}", source.display());
        }
    }
    for name in kvferry_mori_build::WATCHED {
        println!("cargo:rerun-if-env-changed={name}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    let installs = CLASSES.map(|class| (class, out.join(class.to_string())));
    thread::scope(|scope| {
        let works: Vec<_> = installs
            .iter()
            .map(|(class, folder)| scope.spawn(move || install(*class, folder)))
            .collect();
        works.into_iter().try_for_each(|work| work.join().map_err(|_| "a panic".to_owned())?)
    })
}

fn install(class: u32, folder: &Path) -> Result<(), String> {
    let (include, lib) = (folder.join("include"), folder.join("lib"));
    let written = copy(Path::new("include"), &include)
        .and_then(|()| fs::create_dir_all(&lib))
        .and_then(|()| {
            let text = format!("#pragma once\n#define MORI_DOUBLE_CLASS {class}\n");
            fs::write(include.join("mori/io/double_class.hpp"), text)
        });
    written.map_err(|why| format!("{}: {why}", folder.display()))?;
    library(&include, &lib.join("libmori_io.so"))?;
    let found = kvferry_mori_build::MoriInstallation::explicit(&include, &lib)
        .map_err(|why| why.to_string())?;
    kvferry_mori_build::compile(&found, folder, &[]).map_err(|why| why.to_string())?;
    Ok(())
}

fn library(include: &Path, to: &Path) -> Result<(), String> {
    let words = env::var("CXX").unwrap_or_default();
    let mut words = words.split_whitespace();
    let mut command = Command::new(words.next().unwrap_or("c++"));
    command
        .args(words)
        .args(["-O2", "-g1", "-std=c++20", "-fPIC", "-shared", "-Wall", "-Wextra", "-pthread"])
        .args(["-Wl,--build-id", "-Wl,-soname,libmori_io.so", "-I"])
        .arg(include)
        .args(["src/all.cpp", "-o"])
        .arg(to);
    let output = command.output().map_err(|why| format!("{command:?}: {why}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    for line in said.lines() {
        println!("cargo:warning={line}");
    }
    if output.status.success() { Ok(()) } else { Err(format!("{command:?}: {}", output.status)) }
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}
