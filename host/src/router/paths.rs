//! Paths that the router passes on unchanged, in addition to those that it serves by two legs.
//!
//! The table is closed. Of vLLM 0.32.0's paths, clients can use those that only query an instance,
//! and operators those that change an engine. docs/router.md has the same table.

use axum::routing::MethodFilter;

/// Instances that a request is passed to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PathTarget {
    /// One that serves the model in the request.
    One,
    /// The one that made the response in the path.
    Maker,
    /// All, and the answer lists theirs; only at the port of operators.
    All,
}

/// Method of a path in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PathMethod {
    Get,
    Post,
}

impl PathMethod {
    pub(crate) fn filter(self) -> MethodFilter {
        match self {
            PathMethod::Get => MethodFilter::GET,
            PathMethod::Post => MethodFilter::POST,
        }
    }
}

/// A path that is passed on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PassedPath {
    pub(crate) method: PathMethod,
    /// In axum's syntax; also the label in metrics.
    pub(crate) path: &'static str,
    pub(crate) target: PathTarget,
}

const fn row(method: PathMethod, path: &'static str, target: PathTarget) -> PassedPath {
    PassedPath { method, path, target }
}

use self::PathMethod::{Get, Post};
use self::PathTarget::{All, Maker, One};

pub(crate) const PASSED: [PassedPath; 37] = [
    row(Post, "/tokenize", One),
    row(Post, "/detokenize", One),
    row(Get, "/tokenizer_info", One),
    row(Post, "/v1/chat/completions/batch", One),
    row(Post, "/v1/chat/completions/render", One),
    row(Post, "/v1/completions/render", One),
    row(Post, "/v1/messages/count_tokens", One),
    row(Post, "/v1/embeddings", One),
    row(Post, "/v2/embed", One),
    row(Post, "/pooling", One),
    row(Post, "/classify", One),
    row(Post, "/score", One),
    row(Post, "/v1/score", One),
    row(Post, "/rerank", One),
    row(Post, "/v1/rerank", One),
    row(Post, "/v2/rerank", One),
    row(Get, "/version", One),
    row(Get, "/ping", One),
    row(Post, "/ping", One),
    row(Get, "/load", One),
    row(Get, "/v1/responses/{id}", Maker),
    row(Post, "/v1/responses/{id}/cancel", Maker),
    row(Post, "/v1/load_lora_adapter", All),
    row(Post, "/v1/unload_lora_adapter", All),
    row(Post, "/reset_prefix_cache", All),
    row(Post, "/reset_mm_cache", All),
    row(Post, "/reset_encoder_cache", All),
    row(Post, "/sleep", All),
    row(Post, "/release_kv_cache_memory", All),
    row(Post, "/wake_up", All),
    row(Get, "/is_sleeping", All),
    row(Post, "/pause", All),
    row(Post, "/resume", All),
    row(Get, "/is_paused", All),
    row(Post, "/abort_requests", All),
    row(Post, "/start_profile", All),
    row(Post, "/stop_profile", All),
];

/// Rows of the table that are served to clients, or to operators.
pub(crate) fn passed(to_operators: bool) -> impl Iterator<Item = &'static PassedPath> {
    PASSED.iter().filter(move |row| (row.target == All) == to_operators)
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// docs/router.md.
    pub(crate) fn document() -> String {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/router.md");
        std::fs::read_to_string(path).expect("the document is in the repository")
    }

    /// The words in backticks of the list item with this beginning, sorted.
    pub(crate) fn documented(item: &str) -> Vec<String> {
        let document = document();
        let (_, rest) = document.split_once(item).unwrap_or_else(|| panic!("no {item}"));
        let end = rest.find("\n- ").into_iter().chain(rest.find("\n\n")).min();
        let words = rest[..end.unwrap_or(rest.len())].split('`').skip(1).step_by(2);
        let mut words: Vec<String> = words.map(str::to_owned).collect();
        words.sort();
        words
    }

    #[test]
    fn the_document_has_the_table_of_passed_paths() {
        for (target, item) in
            [(One, "- To one instance:"), (Maker, "- To the maker:"), (All, "- To all:")]
        {
            let of_target = PASSED.iter().filter(|row| row.target == target);
            let name = |row: &PassedPath| {
                let method = if row.method == Get { "GET" } else { "POST" };
                format!("{method} {}", row.path)
            };
            let mut rows: Vec<String> = of_target.map(name).collect();
            rows.sort();
            assert_eq!(documented(item), rows, "{item}");
        }
    }
}
