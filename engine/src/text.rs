//! What the readers of settings have to say of a word that they do not know.
//!
//! ```
//! use kvferry_engine::text::nearest;
//!
//! assert_eq!(nearest("heartbaet", &["heartbeat", "lease"]), Some("heartbeat"));
//! assert_eq!(nearest("colour", &["heartbeat", "lease"]), None);
//! ```

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
