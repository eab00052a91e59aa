//! Prints where the shim for the stand-in is, for what is not written in Rust.

// That is what it is for.
#![allow(clippy::print_stdout)]

fn main() {
    let newest = mori_double::INSTALLS[1];
    println!("{}", newest.shim);
}
