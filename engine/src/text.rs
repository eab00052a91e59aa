//! Text for people: of a word that readers of settings do not know, and of what peers say.
//!
//! ```
//! use kvferry_engine::text::{nearest, printable};
//!
//! assert_eq!(nearest("heartbaet", &["heartbeat", "lease"]), Some("heartbeat"));
//! assert_eq!(nearest("colour", &["heartbeat", "lease"]), None);
//! assert_eq!(printable("a\r\nline", 4), "a\u{fffd}\u{fffd}l");
//! // Reverses the text on terminals that support it.
//! assert_eq!(printable("ab\u{202e}cd", 9), "ab\u{fffd}cd");
//! ```

/// True if a terminal and a log print the character as plain text. False for characters that
/// control the terminal or that reorder others, as the marks of bidirectional text do.
pub fn is_printable(c: char) -> bool {
    let is_invisible = matches!(
        c,
        '\u{ad}'
            | '\u{61c}'
            | '\u{180e}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{feff}'
            | '\u{fff9}'..='\u{fffb}'
            | '\u{e0000}'..='\u{e007f}'
    );
    !c.is_control() && !is_invisible
}

/// What of a peer's text is shown to people: `most` characters, and none that a terminal or a log
/// would take for more than text.
pub fn printable(text: &str, most: usize) -> String {
    let shown = |c: char| if is_printable(c) { c } else { '\u{fffd}' };
    text.chars().take(most).map(shown).collect()
}

/// Same as [`printable`], for a text that may contain line ends.
pub fn printable_lines(text: &str, most: usize) -> String {
    let shown = |c: char| if is_printable(c) || c == '\n' || c == '\t' { c } else { '\u{fffd}' };
    text.chars().take(most).map(shown).collect()
}

/// The entry of `known` that is nearest to `word` by edit distance, if one is near.
pub fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let limit = (word.chars().count() / 3).max(1) + 1;
    known
        .iter()
        .map(|entry| (distance(word, entry), *entry))
        .filter(|(distance, _)| *distance <= limit)
        .min()
        .map(|(_, entry)| entry)
}

/// Levenshtein distance in characters.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}
