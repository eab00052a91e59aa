//! Rewriting of a source file: each site gets a switch between its original and its change. Lines
//! keep their numbers.

use crate::site::{MutationSite, SiteEdit};
use std::collections::BTreeMap;
use std::ops::Range;

/// Path of the switch in a rewritten crate.
const SWITCH: &str = "::kvferry_mutant_switch::is";

/// Rewritten text of a file, and where each site is in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RewrittenFile {
    pub(crate) text: String,
    pub(crate) places: Vec<SitePlace>,
}

/// Where a site is in a rewritten text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SitePlace {
    pub(crate) id: u32,
    /// The changed text.
    pub(crate) change: Range<usize>,
    /// The change and the original.
    pub(crate) whole: Range<usize>,
}

/// Sites of the same bytes, in the order in which they are opened: outer ones first.
type Groups<'a> = BTreeMap<(usize, std::cmp::Reverse<usize>), Vec<(u32, &'a MutationSite)>>;

/// Sites whose original is being written.
struct OpenGroup {
    /// End of the original.
    end: usize,
    /// What is written behind it.
    suffix: &'static str,
    /// Where the sites are in the list of places.
    places: Vec<usize>,
}

/// Rewrites a text so that each of these sites has a switch, named by its number.
pub(crate) fn rewrite(text: &str, sites: &[(u32, &MutationSite)]) -> RewrittenFile {
    let mut groups = Groups::new();
    for (id, site) in sites {
        let end = if site.span.is_empty() { usize::MAX } else { site.span.end };
        groups.entry((site.span.start, std::cmp::Reverse(end))).or_default().push((*id, site));
    }
    let mut out = RewrittenFile::default();
    let mut open: Vec<OpenGroup> = Vec::new();
    let mut at = 0;
    for ((start, end), group) in &groups {
        while open.last().is_some_and(|group| group.end <= *start) {
            close(&mut out, text, &mut at, &mut open);
        }
        out.text.push_str(&text[at..*start]);
        at = *start;
        let first = out.places.len();
        let suffix = begin(&mut out, group);
        let opened = (first..out.places.len()).collect();
        match suffix {
            Some(suffix) => open.push(OpenGroup { end: end.0, suffix, places: opened }),
            None => end_places(&mut out, opened),
        }
    }
    while !open.is_empty() {
        close(&mut out, text, &mut at, &mut open);
    }
    out.text.push_str(&text[at..]);
    out
}

fn close(out: &mut RewrittenFile, text: &str, at: &mut usize, open: &mut Vec<OpenGroup>) {
    let Some(OpenGroup { end, suffix, places }) = open.pop() else { return };
    out.text.push_str(&text[*at..end]);
    out.text.push_str(suffix);
    *at = end;
    end_places(out, places);
}

fn end_places(out: &mut RewrittenFile, places: Vec<usize>) {
    for place in places {
        out.places[place].whole.end = out.text.len();
    }
}

/// Writes what is before the original, and returns what comes behind it.
fn begin(out: &mut RewrittenFile, group: &[(u32, &MutationSite)]) -> Option<&'static str> {
    let start = out.text.len();
    let mut replaced = 0;
    let mut suffix = None;
    for (id, site) in group {
        let mut from = start;
        let mut to = start;
        match &site.edit {
            SiteEdit::Replace(change) => {
                let word = if replaced == 0 { "(if" } else { " else if" };
                out.text.push_str(&format!("{word} {SWITCH}({id}) {{ "));
                from = out.text.len();
                out.text.push_str(change);
                to = out.text.len();
                out.text.push_str(" }");
                replaced += 1;
                suffix = Some(" })");
            }
            SiteEdit::Drop => {
                out.text.push_str(&format!("if !{SWITCH}({id}) {{ "));
                suffix = Some(" }");
            }
            SiteEdit::Begin(change) => {
                out.text.push_str(&format!(" if {SWITCH}({id}) {{ "));
                from = out.text.len();
                out.text.push_str(change);
                to = out.text.len();
                out.text.push_str(" }");
            }
        }
        out.places.push(SitePlace { id: *id, change: from..to, whole: start..to });
    }
    if replaced > 0 {
        out.text.push_str(" else { ");
    }
    suffix
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::find::find;

    fn rewritten(text: &str) -> RewrittenFile {
        let sites = find("a.rs", text).expect("it parses").sites;
        let numbered: Vec<(u32, &MutationSite)> = (0..).zip(&sites).collect();
        rewrite(text, &numbered)
    }

    #[test]
    fn lines_keep_their_numbers_and_the_result_parses() {
        let text = "fn f(a: u32,\n b: u32) -> bool {\n    g(a + // one\n    1);\n    \
                    if a <\n b && // two\n    a != 3 { return false; }\n    a.max(b) == 4\n}\n";
        let out = rewritten(text);
        assert!(out.places.len() > 10, "{out:?}");
        syn::parse_file(&out.text).unwrap_or_else(|why| panic!("{why}: {}", out.text));
        assert_eq!(out.text.lines().count(), text.lines().count());
        for (line, before) in out.text.lines().zip(text.lines()) {
            let mut words = before.split(|c: char| !c.is_alphanumeric());
            assert!(words.all(|word| line.contains(word)), "{line} of {before}");
        }
    }

    #[test]
    fn changes_of_nested_expressions_are_in_each_other() {
        let out = rewritten("fn f(a: u8) { let b = a + 2; }");
        let whole = |id: usize| &out.text[out.places[id].whole.clone()];
        let outer = (0..out.places.len()).find(|id| whole(*id).contains("(a) - (2)"));
        let outer = outer.unwrap_or_else(|| panic!("{out:?}"));
        assert!(whole(outer).starts_with("(if") && whole(outer).ends_with("})"));
        assert!(whole(outer).contains("a + (if"), "{}", whole(outer));
        assert_eq!(&out.text[out.places[outer].change.clone()], "(a) - (2)");
    }
}
