//! Writes the seeds of a target into a folder: `seeds TARGET FOLDER`.

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let result = match &words[..] {
        [name, folder] => write(name, Path::new(folder)),
        _ => Err("usage: seeds TARGET FOLDER".into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            let _ = std::io::Write::write_all(&mut std::io::stderr(), (why + "\n").as_bytes());
            ExitCode::FAILURE
        }
    }
}

fn write(name: &str, folder: &Path) -> Result<(), String> {
    let target = kvferry_fuzz::target(name)?;
    std::fs::create_dir_all(folder).map_err(|why| format!("cannot make {folder:?}: {why}"))?;
    for (n, seed) in (target.seeds)().iter().enumerate() {
        let path = folder.join(format!("seed-{n:04}"));
        std::fs::write(&path, seed).map_err(|why| format!("cannot write {path:?}: {why}"))?;
    }
    Ok(())
}
