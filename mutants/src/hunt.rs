//! Runs of the test programs: without a mutant, and with each.

use crate::cache::{MutantResult, ResultCache};
use crate::programs::{ProgramEnd, RunLimits, TestProgram};
use crate::site::{MutationSite, hash};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

/// Variables that the switch reads.
const VARIABLE: &str = "KVFERRY_MUTANT";
const REACHED: &str = "KVFERRY_MUTANT_REACHED";

/// Time of a test program without a mutant, and the sites that it reaches.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Baseline {
    seconds: f64,
    reached: BTreeSet<u32>,
}

/// A test program that passed without a mutant.
#[derive(Clone, Debug)]
pub(crate) struct MeasuredProgram {
    program: TestProgram,
    baseline: Baseline,
}

/// Runs each test program without a mutant; what is known of the same program is not run again.
/// The cheapest is the first.
///
/// # Errors
/// A test program fails.
pub(crate) fn measure(
    programs: Vec<TestProgram>,
    folder: &Path,
) -> Result<Vec<MeasuredProgram>, String> {
    let kept = folder.join("baseline");
    fs::create_dir_all(&kept).map_err(|why| format!("{}: {why}", kept.display()))?;
    let mut measured = Vec::new();
    for program in programs {
        let text =
            fs::read(&program.path).map_err(|why| format!("{}: {why}", program.path.display()))?;
        let path = kept.join(hash(&[program.name.as_bytes(), &text]));
        let known = fs::read_to_string(&path).ok().and_then(|it| serde_json::from_str(&it).ok());
        let baseline = match known {
            Some(baseline) => baseline,
            None => {
                let baseline = baseline(&program, folder)?;
                let text = serde_json::to_string(&baseline).map_err(|why| why.to_string())?;
                fs::write(&path, text).map_err(|why| format!("{}: {why}", path.display()))?;
                baseline
            }
        };
        let (seconds, reached) = (baseline.seconds, baseline.reached.len());
        println!("{:<34} {seconds:>7.2} s, reaches {reached} sites", program.name);
        measured.push(MeasuredProgram { program, baseline });
    }
    measured.sort_by(|one, other| one.baseline.seconds.total_cmp(&other.baseline.seconds));
    Ok(measured)
}

fn baseline(program: &TestProgram, folder: &Path) -> Result<Baseline, String> {
    let list = folder.join("reached");
    let _ = fs::remove_file(&list);
    let environment = [(VARIABLE, "record".into()), (REACHED, list.display().to_string())];
    let limits = RunLimits { scratch: &folder.join("baseline-run"), time: Duration::MAX };
    let started = Instant::now();
    let end = program.run(&[], &environment, &limits)?;
    let failed = |end| Err(format!("{} without a mutant: {end:?}", program.name));
    match &end {
        ProgramEnd::Passed => {}
        // Now and then a test fails by itself.
        ProgramEnd::Failed(tests) if !tests.is_empty() => {
            println!("{} without a mutant: {tests:?} failed, run again", program.name);
            if !matches!(program.run(tests, &environment, &limits)?, ProgramEnd::Passed) {
                return failed(end);
            }
        }
        _ => return failed(end),
    }
    let seconds = started.elapsed().as_secs_f64();
    let ids = fs::read(&list).unwrap_or_default();
    let id = |bytes: &[u8]| bytes.try_into().map(u32::from_le_bytes).ok();
    Ok(Baseline { seconds, reached: ids.chunks(4).filter_map(id).collect() })
}

impl MeasuredProgram {
    /// Time after which a run with a mutant does not end any more.
    fn limit(&self) -> Duration {
        Duration::from_secs_f64(10.0 * self.baseline.seconds + 30.0)
    }

    /// Runs the program with a mutant; what found it, if anything did.
    fn try_mutant(&self, id: u32, scratch: &Path) -> Result<Option<String>, String> {
        let environment = [(VARIABLE, id.to_string())];
        let limits = RunLimits { scratch, time: self.limit() };
        match self.program.run(&[], &environment, &limits)? {
            ProgramEnd::Passed => Ok(None),
            ProgramEnd::Hung => Ok(Some("does not end".into())),
            ProgramEnd::Large => Ok(Some("takes too much memory".into())),
            ProgramEnd::Failed(tests) => {
                let Some(first) = tests.first() else {
                    return Ok(Some("the program dies".into()));
                };
                // A test that now and then fails by itself finds nothing.
                let again = self.program.run(&tests, &environment, &limits)?;
                Ok((!matches!(again, ProgramEnd::Passed)).then(|| first.clone()))
            }
        }
    }
}

/// Runs the test programs that reach a mutant until one finds it.
fn hunt_one(id: u32, programs: &[MeasuredProgram], scratch: &Path) -> Result<MutantResult, String> {
    let reaching: Vec<&MeasuredProgram> =
        programs.iter().filter(|it| it.baseline.reached.contains(&id)).collect();
    for one in &reaching {
        if let Some(by) = one.try_mutant(id, scratch)? {
            return Ok(MutantResult::Found { program: one.program.name.clone(), by });
        }
    }
    Ok(if reaching.is_empty() { MutantResult::Unreached } else { MutantResult::Survived })
}

/// Mutants by their number in the build.
pub(crate) type Mutants<'a> = [(u32, &'a MutationSite)];

/// What became of each of these mutants, in their order.
///
/// # Errors
/// A test program cannot be started, or a result not kept.
pub(crate) fn hunt(
    mutants: &Mutants<'_>,
    programs: &[MeasuredProgram],
    cache: &ResultCache,
    folder: &Path,
    jobs: usize,
) -> Result<Vec<MutantResult>, String> {
    let results: Vec<Mutex<Option<MutantResult>>> =
        mutants.iter().map(|(_, site)| Mutex::new(cache.get(site))).collect();
    let is_open = |at: &usize| results[*at].lock().is_ok_and(|it| it.is_none());
    let open: Vec<usize> = (0..mutants.len()).filter(is_open).collect();
    println!("{} mutants, {} of them known", mutants.len(), mutants.len() - open.len());
    let queue = Mutex::new(open.into_iter());
    let work = |job: usize| -> Result<(), String> {
        let scratch: PathBuf = folder.join(format!("job{job}"));
        loop {
            let next = queue.lock().ok().and_then(|mut queue| queue.next());
            let Some(at) = next else { return Ok(()) };
            let (id, site) = mutants[at];
            let started = Instant::now();
            let result = hunt_one(id, programs, &scratch)?;
            let seconds = started.elapsed().as_secs_f64();
            println!("{seconds:>7.1} s  {result:?}  {} (line {})", site.key(), site.line);
            cache.put(site, &result)?;
            if let Ok(mut place) = results[at].lock() {
                *place = Some(result);
            }
        }
    };
    thread::scope(|scope| {
        let work = &work;
        let all: Vec<_> = (0..jobs.max(1)).map(|job| scope.spawn(move || work(job))).collect();
        all.into_iter().try_for_each(|one| one.join().unwrap_or(Err("a job panicked".into())))
    })?;
    let done = results.into_iter().map(|it| it.into_inner().ok().flatten());
    done.collect::<Option<Vec<_>>>().ok_or_else(|| "a mutant was not run".into())
}
