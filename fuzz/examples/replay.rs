//! Runs a target on files, without a fuzzer: `replay TARGET FILE...`.

use std::process::ExitCode;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match replay(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            let _ = std::io::Write::write_all(&mut std::io::stderr(), (why + "\n").as_bytes());
            ExitCode::FAILURE
        }
    }
}

fn replay(words: &[String]) -> Result<(), String> {
    let [name, files @ ..] = words else { return Err("usage: replay TARGET FILE...".into()) };
    let target = kvferry_fuzz::target(name)?;
    for file in files {
        let data = std::fs::read(file).map_err(|why| format!("cannot read {file}: {why}"))?;
        (target.run)(&data);
    }
    Ok(())
}
