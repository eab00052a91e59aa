//! The kvferry command line.

fn main() {}
