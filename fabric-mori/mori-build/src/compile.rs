//! The compiler's run.

use crate::installation::MoriInstallation;
use crate::sources;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fmt, io};

/// The name of what is compiled.
pub const SHIM_FILE: &str = "libkf_mori_shim.so";

/// Lines of the compiler's output that an error has: so many from the first one with an error on, which
/// the others may follow from, and so many at the end.
const LINES: usize = 10;

/// Why there is no shim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompileError {
    pub command: String,
    pub output: String,
}

/// Headers whose absence is the most likely reason, by what the compiler then says, and what to do.
const REMEDIES: [(&str, &str); 3] = [
    ("msgpack.hpp", "install msgpack-c's C++ headers (libmsgpack-cxx-dev), or MoRI with its own"),
    ("infiniband/verbs.h", "install the headers of libibverbs (libibverbs-dev, rdma-core-devel)"),
    ("hsakmt/hsakmt.h", "this is MoRI v1.2.0; install v1.2.1 or later"),
];

impl fmt::Display for CompileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "the shim for MoRI does not compile")?;
        for (name, remedy) in REMEDIES {
            let said = |line: &str| line.contains("error") && line.contains(name);
            if self.output.lines().any(said) {
                writeln!(f, "{remedy}")?;
            }
        }
        let lines: Vec<&str> = self.output.trim_end().lines().collect();
        let end = lines.len().saturating_sub(LINES);
        let first = lines.iter().position(|line| line.contains("error")).unwrap_or(end).min(end);
        write!(f, "{}", self.command)?;
        for line in lines[first..end].iter().take(LINES).chain(&lines[end..]) {
            write!(f, "\n{line}")?;
        }
        Ok(())
    }
}

impl std::error::Error for CompileError {}

/// Compiles the shim for a MoRI into the folder `out`, with `CXX` or `c++`, `CXXFLAGS` and then
/// `flags`; the path of the library. Two MoRIs need two folders.
pub fn compile(
    found: &MoriInstallation,
    out: &Path,
    flags: &[&str],
) -> Result<PathBuf, CompileError> {
    let folder = out.join("kf_mori_shim");
    let library = out.join(SHIM_FILE);
    let source = sources::write(&folder).map_err(|why| CompileError {
        command: format!("writing the sources to {}", folder.display()),
        output: why.to_string(),
    })?;
    let mut command = compiler();
    command.args(["-std=c++20", "-O3", "-g", "-fPIC", "-shared", "-fvisibility=hidden"]);
    command.args(words("CXXFLAGS"));
    command.args(defines(found));
    command.args(includes(found, &folder));
    command.args(flags);
    command.arg(source).arg("-o").arg(&library);
    command.args(link(found));
    command.arg(format!("-Wl,-soname,{SHIM_FILE}"));
    run(command)?;
    Ok(library)
}

/// What a C++ compiler is told before the sources of a program that uses a MoRI. Headers that the
/// system may lack go to the folder `out`.
///
/// # Errors
/// The folder cannot be written to.
pub fn arguments(found: &MoriInstallation, out: &Path) -> io::Result<Vec<OsString>> {
    let folder = out.join("kf_mori_shim");
    sources::write(&folder)?;
    let mut all = vec![OsString::from("-std=c++20")];
    all.extend(includes(found, &folder));
    all.extend(link(found));
    Ok(all)
}

fn words(variable: &str) -> Vec<String> {
    let value = std::env::var(variable).unwrap_or_default();
    value.split_whitespace().map(str::to_owned).collect()
}

/// `CXX` may be a compiler with a launcher before it.
fn compiler() -> Command {
    let words = words("CXX");
    let mut command = Command::new(words.first().map_or("c++", String::as_str));
    command.args(words.iter().skip(1));
    command
}

fn defines(found: &MoriInstallation) -> Vec<String> {
    let literal = |text: &str| text.replace('\\', "\\\\").replace('"', "\\\"");
    vec![
        format!("-DKF_MORI_LAYOUT={}", found.layout),
        format!("-DKF_MORI_IDENTITY=\"{}\"", literal(&found.identity)),
        format!("-DKF_MORI_PATH=\"{}\"", literal(&found.library.to_string_lossy())),
    ]
}

fn includes(found: &MoriInstallation, folder: &Path) -> Vec<OsString> {
    let mut args = ["-D__HIP_PLATFORM_AMD__=1", "-DMSGPACK_NO_BOOST"].map(OsString::from).to_vec();
    args.extend(found.includes.iter().flat_map(|dir| ["-I".into(), dir.into()]));
    // After the system's own headers, which are the better ones.
    args.extend(["-idirafter".into(), folder.join(sources::STAND_IN).into()]);
    args
}

fn link(found: &MoriInstallation) -> Vec<OsString> {
    let mut args: Vec<OsString> = Vec::new();
    for dir in &found.library_dirs {
        args.extend(["-L".into(), dir.into()]);
        args.extend(["-Xlinker", "-rpath", "-Xlinker"].map(OsString::from));
        args.push(dir.into());
    }
    // DT_RPATH and not DT_RUNPATH: the shim is for this library, whatever LD_LIBRARY_PATH says.
    args.push("-Wl,--disable-new-dtags,--no-as-needed,--build-id".into());
    args.push(format!("-l:{}", crate::LIBRARY).into());
    if found.application {
        // MoRI's own search path need not lead to it.
        args.push(format!("-l:{}", crate::APPLICATION).into());
    }
    args.push("-ldl".into());
    args
}

fn run(mut command: Command) -> Result<(), CompileError> {
    let line = command_line(&command);
    let output = match command.output() {
        Ok(output) if output.status.success() => return Ok(()),
        Ok(output) => {
            String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
        }
        Err(why) => format!(
            "{}: cannot be started: {why}; install a C++ compiler, or name one by CXX",
            command.get_program().to_string_lossy()
        ),
    };
    Err(CompileError { command: line, output })
}

fn command_line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let quoted = words.map(|word| {
        let word = word.to_string_lossy();
        let plain = |c: char| c.is_ascii_alphanumeric() || "/_-.,=+:".contains(c);
        if word.chars().all(plain) {
            word.into_owned()
        } else {
            format!("'{}'", word.replace('\'', "'\\''"))
        }
    });
    quoted.collect::<Vec<_>>().join(" ")
}
