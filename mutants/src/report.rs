//! Lists of results: what is printed and kept, and what decides.

use crate::cache::MutantResult;
use crate::site::MutationSite;
use serde::Deserialize;
use std::fmt::Write;

/// Least percentage of the mutants that has to be found.
const FOUND_MIN: usize = 95;

/// Mutants that change nothing that can be seen, each with the reason.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct EquivalentMutants {
    #[serde(default)]
    mutant: Vec<EquivalentMutant>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct EquivalentMutant {
    /// Source file, names of the type and the function, and the change.
    key: String,
    why: String,
}

impl EquivalentMutants {
    /// Reads the list.
    ///
    /// # Errors
    /// It is not such a list.
    pub(crate) fn parse(text: &str) -> Result<EquivalentMutants, String> {
        toml::from_str(text).map_err(|why| why.to_string())
    }

    /// Why a mutant is equivalent, if it is.
    pub(crate) fn why(&self, site: &MutationSite) -> Option<&str> {
        let key = site.key();
        self.mutant.iter().find(|it| it.key == key).map(|it| it.why.as_str())
    }
}

/// A mutant and what became of it.
pub(crate) type Outcome<'a> = (&'a MutationSite, MutantResult);

/// Numbers of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MutantTotals {
    pub(crate) all: usize,
    pub(crate) found: usize,
    pub(crate) equivalent: usize,
}

impl MutantTotals {
    pub(crate) fn of(outcomes: &[Outcome<'_>], equivalent: &EquivalentMutants) -> MutantTotals {
        let is_found = |it: &&Outcome<'_>| matches!(it.1, MutantResult::Found { .. });
        let is_equivalent = |it: &&Outcome<'_>| !is_found(it) && equivalent.why(it.0).is_some();
        MutantTotals {
            all: outcomes.len(),
            found: outcomes.iter().filter(is_found).count(),
            equivalent: outcomes.iter().filter(is_equivalent).count(),
        }
    }

    /// Percentage found of those that can be found.
    pub(crate) fn percent(self) -> f64 {
        100.0 * self.found as f64 / (self.all - self.equivalent).max(1) as f64
    }

    /// Mutants that nothing finds and that are not known to be equivalent.
    pub(crate) fn survivors(self) -> usize {
        self.all - self.found - self.equivalent
    }

    /// True if each mutant is found or known, and enough are found.
    pub(crate) fn passes(self) -> bool {
        let possible = self.all - self.equivalent;
        self.survivors() == 0 && self.found * 100 >= possible * FOUND_MIN
    }
}

/// A text as a cell of a table.
fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

/// A table in Markdown of all mutants.
pub(crate) fn table(outcomes: &[Outcome<'_>], equivalent: &EquivalentMutants) -> String {
    let mut rows: Vec<String> = Vec::new();
    for (site, result) in outcomes {
        let became = match (result, equivalent.why(site)) {
            (MutantResult::Found { program, by }, _) => format!("`{program}`: `{by}`"),
            (_, Some(why)) => format!("equivalent: {why}"),
            (MutantResult::Unreached, _) => "**not reached**".into(),
            (MutantResult::Survived, _) => "**survived**".into(),
        };
        let nth = if site.nth == 0 { String::new() } else { format!(" (#{})", site.nth + 1) };
        let change = cell(&format!("{}{nth}", site.change));
        rows.push(format!(
            "| {} | `{}` | {change} | {} |",
            site.file,
            site.function,
            cell(&became)
        ));
    }
    rows.sort();
    let mut text = String::from("| File | Function | Change | Found by |\n|---|---|---|---|\n");
    for row in rows {
        let _ = writeln!(text, "{row}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::find::find;

    #[test]
    fn survivor_fails_the_tier_unless_it_is_listed() {
        let sites = find("a.rs", "fn f() { g(1); }").expect("it parses").sites;
        let found = || MutantResult::Found { program: "a b".into(), by: "c".into() };
        let mut outcomes: Vec<Outcome<'_>> = sites.iter().map(|it| (it, found())).collect();
        assert!(outcomes.len() >= 3, "{sites:?}");
        let none = EquivalentMutants::default();
        assert!(MutantTotals::of(&outcomes, &none).passes());
        outcomes[0].1 = MutantResult::Survived;
        let totals = MutantTotals::of(&outcomes, &none);
        assert!(!totals.passes() && totals.survivors() == 1);
        assert!(table(&outcomes, &none).contains("**survived**"));
        let list = format!("[[mutant]]\nkey = '''{}'''\nwhy = \"so\"\n", outcomes[0].0.key());
        let listed = EquivalentMutants::parse(&list).expect("it is a list");
        let totals = MutantTotals::of(&outcomes, &listed);
        assert!(totals.passes() && totals.percent() == 100.0);
        assert!(table(&outcomes, &listed).contains("equivalent: so"));
    }
}
