//! `./test --mutants`: draws small changes of the sources, builds all of them at once, each behind a
//! switch that the environment sets, and tells which of them no test finds.
#![allow(clippy::print_stdout, clippy::print_stderr)]

mod cache;
mod changes;
mod check;
mod find;
mod hunt;
mod programs;
mod report;
mod rewrite;
mod scope;
mod site;
mod tree;

use cache::{MutantResult, ResultCache, TestVersions};
use check::RefusedSites;
use clap::Parser;
use report::{EquivalentMutants, MutantTotals, Outcome};
use site::MutationSite;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::ExitCode;
use tree::MutantTree;

/// Heading of the table in the list of results.
const ALL: &str = "\n## All\n";

/// Plants a sample of small changes of the sources, and tells which no test finds.
#[derive(Debug, Parser)]
struct MutantArgs {
    /// Seed of the sample
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Mutants that are run
    #[arg(long, default_value_t = 100)]
    count: usize,
    /// Mutants that are drawn and built
    #[arg(long, default_value_t = 400)]
    drawn: usize,
    /// Only mutants whose name contains this
    #[arg(long)]
    only: Option<String>,
    /// Mutants that are run at a time
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Write the results to mutants/RESULTS.md
    #[arg(long)]
    write: bool,
    /// List what would be run, without building anything
    #[arg(long)]
    list: bool,
}

fn main() -> ExitCode {
    match run(&MutantArgs::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::from(2)
        }
    }
}

/// Draws, builds and runs; true if the tier passes.
fn run(args: &MutantArgs) -> Result<bool, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let root = root.canonicalize().map_err(|why| format!("{}: {why}", root.display()))?;
    let files = tree::tracked(&root)?;
    let sources = scope::sources(&root, &files)?;
    let mut sites = scope::draw(scope::sites(&sources)?, args.seed);
    println!("{} places can be changed", sites.len());
    if let Some(only) = &args.only {
        sites.retain(|site| site.key().contains(only.as_str()));
    }
    sites.truncate(args.drawn.max(args.count));
    let folder = root.join("target/mutants");
    let mut numbered: BTreeMap<u32, MutationSite> = (0..).zip(sites).collect();
    let refused = RefusedSites { path: folder.join("refused") };
    refused.leave_out(&mut numbered);
    if args.list {
        for site in numbered.values().take(args.count) {
            println!("{}:{} {}: {}", site.file, site.line, site.function, site.change);
        }
        return Ok(true);
    }
    let mut tree = MutantTree::copy(&root, folder.join("tree"), &files, sources, numbered)?;
    let build = folder.join("build");
    let programs = programs::build(&mut tree, &build, &refused)?;
    let programs = hunt::measure(programs, &folder)?;
    let versions = TestVersions::read(&root, &files)?;
    let cache = ResultCache { folder: folder.join("cache"), versions };
    let list = root.join("mutants/equivalent.toml");
    let text = fs::read_to_string(&list).map_err(|why| format!("{}: {why}", list.display()))?;
    let equivalent = EquivalentMutants::parse(&text)?;
    let mutants = tree.sites.iter().take(args.count).map(|(id, site)| (*id, site));
    let (known, open): (Vec<_>, Vec<_>) =
        mutants.partition(|(_, site)| equivalent.why(site).is_some());
    let results = hunt::hunt(&open, &programs, &cache, &folder, args.jobs)?;
    let mut outcomes: Vec<Outcome<'_>> = open.iter().map(|(_, site)| *site).zip(results).collect();
    outcomes.extend(known.iter().map(|(_, site)| (*site, MutantResult::Survived)));
    tell(&root, &folder, (&outcomes, &equivalent), args.write)
}

/// Writes the table and prints the totals; true if the tier passes.
fn tell(
    root: &Path,
    folder: &Path,
    (outcomes, equivalent): (&[Outcome<'_>], &EquivalentMutants),
    write: bool,
) -> Result<bool, String> {
    let table = report::table(outcomes, equivalent);
    let path = folder.join("results.md");
    fs::write(&path, &table).map_err(|why| format!("{}: {why}", path.display()))?;
    if write {
        let path = root.join("mutants/RESULTS.md");
        let told = |why: std::io::Error| format!("{}: {why}", path.display());
        let text = fs::read_to_string(&path).map_err(told)?;
        let (head, _) = text.split_once(ALL).ok_or("RESULTS.md has no list of all mutants")?;
        fs::write(&path, format!("{head}{ALL}\n{table}")).map_err(told)?;
    }
    for row in table.lines().filter(|row| row.ends_with("** |")) {
        println!("{row}");
    }
    let totals = MutantTotals::of(outcomes, equivalent);
    let (all, found, known) = (totals.all, totals.found, totals.equivalent);
    let (percent, survivors) = (totals.percent(), totals.survivors());
    println!("{found} of {all} found, {known} are equivalent: {percent:.1} % of the others");
    println!("{survivors} that nothing finds; the table is {}", path.display());
    Ok(totals.passes())
}
