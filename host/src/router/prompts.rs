//! Prompts of a body: their ranges in its text, and their estimated load.

use super::api::Api;
use super::error::HttpError;
use super::fields::{JsonFields, elements};
use kvferry_engine::core::router::RoutedPrompt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

/// Bytes of text that count as a token in estimates of load.
const TOKEN_BYTES: usize = 4;

/// A prompt in the body.
#[derive(Clone, Debug)]
pub(crate) struct PromptRange {
    pub(crate) field: &'static str,
    pub(crate) value: Range<usize>,
}

/// The prompts of a body.
pub(super) struct PromptRanges {
    /// Ranges of the prompts, up to the limit.
    pub(super) ranges: Vec<PromptRange>,
    /// Number of all prompts.
    count: usize,
    /// The field that has most of them.
    field: &'static str,
}

/// Rejects more transfers than `--parts-max`; the error names the field that causes them.
pub(super) fn check_parts(
    prompts: &PromptRanges,
    samples: u32,
    parts_max: u32,
) -> Result<(), HttpError> {
    let count = prompts.count as u64;
    if count * u64::from(samples) <= u64::from(parts_max) {
        return Ok(());
    }
    let is_prompts = samples == 1 || count > u64::from(parts_max);
    let message = format!(
        "{count} prompts with {samples} samples each are more than {parts_max} transfers, the \
         limit of --parts-max; send several requests"
    );
    Err(HttpError::bad(&message, if is_prompts { prompts.field } else { "n" }))
}

/// Finds the prompts: at least one, and at most `most` of them.
pub(super) fn prompts(
    api: Api,
    fields: &JsonFields,
    most: usize,
) -> Result<PromptRanges, HttpError> {
    let key = api.prompt_key();
    if api != Api::Completions {
        let value = fields.range(key);
        let value = value.ok_or_else(|| HttpError::bad(&format!("{key} is missing"), key))?;
        return Ok(PromptRanges {
            ranges: vec![PromptRange { field: key, value }],
            count: 1,
            field: key,
        });
    }
    // In the order in which vLLM answers them.
    let fields_of = ["prompt_embeds", key];
    let mut all = PromptRanges { ranges: Vec::new(), count: 0, field: key };
    for field in fields_of {
        let before = all.count;
        all.add(fields, field, most)?;
        if all.count - before > before {
            all.field = field;
        }
    }
    match all.count {
        0 if fields.range(key).is_some() => Err(HttpError::bad("prompt is an empty list", key)),
        0 => Err(HttpError::bad(&format!("{key} is missing"), key)),
        _ => Ok(all),
    }
}

impl PromptRanges {
    /// Adds the prompts of a field of completions: a text, a list of token ids, or a list of those.
    fn add(
        &mut self,
        fields: &JsonFields,
        field: &'static str,
        most: usize,
    ) -> Result<(), HttpError> {
        let Some(value) = fields.range(field) else { return Ok(()) };
        let text = &fields.text()[value.clone()];
        let first = text.strip_prefix(b"[").map(|inner| inner.trim_ascii_start().first());
        let is_one = match first {
            // The instance checks the token ids.
            Some(Some(b'0'..=b'9' | b'-' | b't' | b'f')) if field == "prompt" => true,
            Some(Some(b'"')) => false,
            Some(Some(b'[')) if field == "prompt" => false,
            Some(Some(b']')) => return Ok(()),
            None if text.starts_with(b"\"") => true,
            _ => {
                let kinds = if field == "prompt" { ", a list of token ids," } else { "" };
                let message = format!("{field} is not a string{kinds} or a list of those");
                return Err(HttpError::bad(&message, field));
            }
        };
        if is_one {
            self.ranges.push(PromptRange { field, value });
            self.count += 1;
            return Ok(());
        }
        let (found, count) = elements(fields.text(), value, most)
            .map_err(|why| HttpError::bad(&format!("{field}: {why}"), field))?;
        self.ranges.extend(found.into_iter().map(|value| PromptRange { field, value }));
        self.count += count;
        Ok(())
    }
}

/// Estimate of a prompt's load: its text is not tokenised, and prefixes are pieces of text.
pub(super) fn estimate(prompt: &[u8], prefix_tokens: u32) -> RoutedPrompt {
    let is_ids = prompt.starts_with(b"[") && memchr::memchr2(b'"', b'{', prompt).is_none();
    let tokens = match is_ids {
        true => memchr::memchr_iter(b',', prompt).count() + 1,
        false => prompt.len() / TOKEN_BYTES,
    };
    let run = (prefix_tokens as usize).saturating_mul(TOKEN_BYTES).max(1);
    let mut hasher = DefaultHasher::new();
    let runs = prompt.chunks_exact(run).map(|run| {
        run.hash(&mut hasher);
        hasher.finish()
    });
    let prefix: Vec<u64> = runs.collect();
    RoutedPrompt { tokens: u32::try_from(tokens).unwrap_or(u32::MAX).max(1), prefix: prefix.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_beginnings_have_equal_prefixes() {
        let ids = estimate(b"[1,2,3,4]", 2);
        assert_eq!(ids.tokens, 4);
        let (one, two) =
            (estimate(b"\"abcdefghijklmnopq\"", 2), estimate(b"\"abcdefghijklmn_pq\"", 2));
        assert_eq!((one.tokens, one.prefix.len()), (4, 2));
        assert_eq!(one.prefix[0], two.prefix[0]);
        assert_ne!(one.prefix[1], two.prefix[1]);
    }
}
