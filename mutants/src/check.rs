//! Pass that leaves out the sites that do not compile.

use crate::rewrite::RewrittenFile;
use crate::site::MutationSite;
use crate::tree::MutantTree;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;

/// Most rounds: the compiler tells the errors of types, and then those of borrows.
pub(crate) const ROUNDS_MAX: usize = 16;

/// List of sites that did not compile in former builds, so that the next one writes the same text and
/// Cargo has nothing to do.
#[derive(Debug)]
pub(crate) struct RefusedSites {
    pub(crate) path: PathBuf,
}

impl RefusedSites {
    /// Leaves out the sites that are known not to compile.
    pub(crate) fn leave_out(&self, sites: &mut BTreeMap<u32, MutationSite>) {
        let text = fs::read_to_string(&self.path).unwrap_or_default();
        let known: BTreeSet<&str> = text.lines().collect();
        sites.retain(|_, site| !known.contains(site.hash().as_str()));
    }

    /// Leaves these sites of the tree out, in this build and those to come.
    ///
    /// # Errors
    /// The list cannot be written.
    pub(crate) fn add(&self, tree: &mut MutantTree, gone: &BTreeSet<u32>) -> Result<(), String> {
        let mut text = fs::read_to_string(&self.path).unwrap_or_default();
        for site in gone.iter().filter_map(|id| tree.sites.remove(id)) {
            text.push_str(&site.hash());
            text.push('\n');
        }
        fs::write(&self.path, text).map_err(|why| format!("{}: {why}", self.path.display()))
    }
}

/// Sites of the tree that the compiler refuses, as its messages say.
///
/// # Errors
/// An error that is at no site: the tree cannot be built.
pub(crate) fn refused(tree: &MutantTree, messages: &str) -> Result<BTreeSet<u32>, String> {
    let mut refused = BTreeSet::new();
    for line in messages.lines() {
        let Ok(message) = serde_json::from_str::<Value>(line) else { continue };
        let message = &message["message"];
        // The last error only counts the others.
        let has_spans = message["spans"].as_array().is_some_and(|spans| !spans.is_empty());
        if message["level"] != "error" || !has_spans {
            continue;
        }
        let at = sites_of(tree, message);
        if at.is_empty() {
            return Err(message["rendered"].as_str().unwrap_or("an error at no site").into());
        }
        refused.extend(at);
    }
    Ok(refused)
}

/// Sites that an error is at: its main place if one is there, or else any that it names, or else any that
/// its notes name, such as an assignment that may be skipped.
fn sites_of(tree: &MutantTree, message: &Value) -> BTreeSet<u32> {
    let (main, others): (Vec<&Value>, Vec<&Value>) =
        list(&message["spans"]).iter().partition(|span| span["is_primary"] == true);
    let notes = list(&message["children"]).iter().flat_map(|note| list(&note["spans"])).collect();
    for spans in [main, others, notes] {
        let ids: BTreeSet<u32> = spans.iter().flat_map(|span| sites_at(tree, span)).collect();
        if !ids.is_empty() {
            return ids;
        }
    }
    BTreeSet::new()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

fn sites_at(tree: &MutantTree, span: &Value) -> BTreeSet<u32> {
    let place = |key: &str| span[key].as_u64().and_then(|it| usize::try_from(it).ok());
    let file = span["file_name"].as_str().unwrap_or_default();
    let (Some(start), Some(end)) = (place("byte_start"), place("byte_end")) else {
        return BTreeSet::new();
    };
    tree.written(file).map(|it| at(it, start, end)).unwrap_or_default()
}

/// Sites at these bytes: the one whose change has them, or else all around them, or those within.
fn at(file: &RewrittenFile, start: usize, end: usize) -> BTreeSet<u32> {
    let places = &file.places;
    let ids = |is_meant: &dyn Fn(&crate::rewrite::SitePlace) -> bool| {
        places.iter().filter(|it| is_meant(it)).map(|it| it.id).collect::<BTreeSet<u32>>()
    };
    let changed =
        ids(&|it| !it.change.is_empty() && it.change.start <= start && end <= it.change.end);
    if !changed.is_empty() {
        return changed;
    }
    let around = ids(&|it| it.whole.start <= start && end <= it.whole.end);
    if !around.is_empty() {
        return around;
    }
    ids(&|it| start <= it.whole.start && it.whole.end <= end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::find::find;
    use serde_json::json;

    const TEXT: &str = "fn f(a: &str) -> String { g(1); a.to_owned() + \"x\" }\n";

    fn tree(text: &str) -> MutantTree {
        let folder = std::env::temp_dir().join(format!("kvferry-mutants-{}", std::process::id()));
        let folder = folder.join(format!("{:?}", std::thread::current().id()));
        std::fs::create_dir_all(&folder).expect("it can be created");
        let sites = find("a.rs", text).expect("it parses").sites;
        let sources = BTreeMap::from([("a.rs".to_owned(), text.to_owned())]);
        let sites = (0..).zip(sites).collect();
        let mut tree =
            MutantTree::copy(&folder, folder.clone(), &[], sources, sites).expect("it is written");
        tree.write_sources().expect("they are written");
        tree
    }

    fn span(tree: &MutantTree, text: &str, is_primary: bool) -> Value {
        let written = &tree.written("a.rs").expect("it is there").text;
        let start = written.find(text).expect("it has it");
        json!({
            "file_name": "a.rs", "is_primary": is_primary,
            "byte_start": start, "byte_end": start + text.len(),
        })
    }

    fn error(tree: &MutantTree, text: &str) -> String {
        let spans = [span(tree, text, true)];
        json!({"message": {"level": "error", "rendered": "no", "spans": spans}}).to_string()
    }

    #[test]
    fn site_whose_change_does_not_compile_is_left_out() {
        let mut tree = tree(TEXT);
        let minus = "(a . to_owned ()) - (\"x\")".to_owned();
        let gone = refused(&tree, &error(&tree, &minus)).expect("it is at a site");
        assert_eq!(gone.len(), 1);
        let mut all = tree.sites.clone();
        let list = RefusedSites { path: tree.folder.join("refused") };
        list.add(&mut tree, &gone).expect("it is kept");
        tree.write_sources().expect("they are written");
        let written = &tree.written("a.rs").expect("it is there").text;
        assert!(!written.contains(&minus) && written.contains("g((if"), "{written}");
        list.leave_out(&mut all);
        assert_eq!(all, tree.sites, "the next build");
        std::fs::remove_dir_all(&tree.folder).expect("it can be removed");
    }

    #[test]
    fn site_that_only_a_note_of_an_error_names_is_left_out() {
        let tree = tree(TEXT);
        let note = json!({"spans": [span(&tree, "(a . to_owned ()) - (\"x\")", false)]});
        let spans = [span(&tree, "fn f(a: &str)", true)];
        let message = json!({"level": "error", "spans": spans, "children": [note]});
        let gone = refused(&tree, &json!({"message": message}).to_string());
        assert_eq!(gone.map(|gone| gone.len()), Ok(1));
        std::fs::remove_dir_all(&tree.folder).expect("it can be removed");
    }

    #[test]
    fn error_beyond_all_sites_ends_the_pass() {
        let tree = tree(TEXT);
        assert_eq!(refused(&tree, &error(&tree, "fn f(a: &str)")), Err("no".into()));
        std::fs::remove_dir_all(&tree.folder).expect("it can be removed");
    }
}
