//! What inputs and effects are called, and what they name.

use super::DETAIL_MAX;
use kvferry_engine::core::command::ControlCommand;
use kvferry_engine::core::decode::{DecodeEffect, DecodeInput};
use kvferry_engine::core::dialect::native::{self, Frame};
use kvferry_engine::core::prefill::{PrefillEffect, PrefillInput};
use kvferry_engine::core::router::{RouterEffect, RouterInput};
use kvferry_engine::fabric::ControlEvent;
use kvferry_sim::world::{MachineEffect, MachineInput, RecordedDetail};
use serde::Serialize;
use serde_json::Value;
use std::fmt::Debug;

/// What an input or effect is called, what it says, and what it names.
#[derive(Debug, Default)]
pub(super) struct EventWords {
    pub(super) label: String,
    pub(super) detail: String,
    pub(super) is_minor: bool,
    pub(super) names: Names,
}

/// Identifiers in an input or effect.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Names {
    /// Transfers, as `ID/PROMPT`.
    pub(super) keys: Vec<String>,
    /// Requests of the engine.
    pub(super) requests: Vec<String>,
    /// The first number of each of [`NUMBERS`].
    pub(super) numbers: Vec<(&'static str, u64)>,
}

/// Fields that hold numbers by which things are known.
const NUMBERS: [&str; 7] = ["op", "ticket", "flow", "session", "client", "leg", "region"];

/// What is said all the time, of whatever comes in front of the label.
const MINOR: [&str; 9] =
    ["Tick", "Layers", "Ack", "Probe", "Register", "Probed", "Start", "AskLoad", "Load"];

impl Names {
    pub(super) fn number(&self, name: &str) -> Option<u64> {
        self.numbers.iter().find(|(known, _)| *known == name).map(|(_, number)| *number)
    }

    fn collect(&mut self, value: &Value) {
        match value {
            Value::Array(items) => items.iter().for_each(|item| self.collect(item)),
            Value::Object(fields) => {
                if let (Some(Value::String(id)), Some(prompt)) =
                    (fields.get("id"), fields.get("prompt").and_then(Value::as_u64))
                {
                    push_new(&mut self.keys, format!("{id}/{prompt}"));
                }
                for (name, value) in fields {
                    self.field(name, value);
                    self.collect(value);
                }
            }
            _ => {}
        }
    }

    fn field(&mut self, name: &str, value: &Value) {
        match value {
            Value::String(request) if name == "request" => {
                push_new(&mut self.requests, request.clone());
            }
            Value::Number(number) => {
                let known = NUMBERS.iter().find(|known| **known == name);
                if let (Some(known), Some(number)) = (known, number.as_u64())
                    && self.number(known).is_none()
                {
                    self.numbers.push((known, number));
                }
            }
            _ => {}
        }
    }
}

fn push_new(list: &mut Vec<String>, text: String) {
    if !list.contains(&text) {
        list.push(text);
    }
}

/// The frame of a record, if it sends or gets one.
pub(super) fn frame(detail: &RecordedDetail) -> Option<&[u8]> {
    let sent = |command: &'_ ControlCommand| matches!(command, ControlCommand::Send { .. });
    let event = match detail {
        RecordedDetail::Input(MachineInput::Router(RouterInput::Control(event)))
        | RecordedDetail::Input(MachineInput::Prefill(PrefillInput::Control(event)))
        | RecordedDetail::Input(MachineInput::Decode(DecodeInput::Control(event))) => event,
        RecordedDetail::Effect(MachineEffect::Router(RouterEffect::Control(command)))
        | RecordedDetail::Effect(MachineEffect::Prefill(PrefillEffect::Control(command)))
        | RecordedDetail::Effect(MachineEffect::Decode(DecodeEffect::Control(command)))
            if sent(command) =>
        {
            let ControlCommand::Send { frame, .. } = command else { return None };
            return Some(frame);
        }
        _ => return None,
    };
    match event {
        ControlEvent::Frame { parts, .. } => parts.last().map(Vec::as_slice),
        _ => None,
    }
}

/// The words for an input or effect.
pub(super) fn words(detail: &RecordedDetail) -> EventWords {
    if let Some(bytes) = frame(detail) {
        return frame_words(bytes, matches!(detail, RecordedDetail::Input(_)));
    }
    match detail {
        RecordedDetail::Input(input) => plain(input),
        RecordedDetail::Effect(effect) => plain(effect),
        _ => EventWords::default(),
    }
}

fn plain<T: Debug + Serialize>(what: &T) -> EventWords {
    let text = format!("{what:?}");
    // Machines have their inputs and effects inside of a variant of their own.
    let inner = text.split_once('(').map_or(text.as_str(), |(_, inner)| inner);
    let inner = inner.strip_suffix(')').unwrap_or(inner);
    let label = label(inner);
    let is_minor = MINOR.iter().any(|word| label.split(' ').next() == Some(word));
    let mut names = Names::default();
    // What cannot be JSON names nothing.
    names.collect(&serde_json::to_value(what).unwrap_or_default());
    EventWords { label, detail: cut(inner), is_minor, names }
}

fn frame_words(bytes: &[u8], arrives: bool) -> EventWords {
    let verb = if arrives { "gets" } else { "sends" };
    let Ok(frame) = native::decode(bytes) else {
        let label = format!("{verb} a frame that is none");
        return EventWords {
            label,
            detail: format!("{} bytes", bytes.len()),
            ..EventWords::default()
        };
    };
    let mut names = Names::default();
    let (name, text) = match &frame {
        Frame::Data { message, .. } => {
            names.collect(&serde_json::to_value(message).unwrap_or_default());
            let text = format!("{message:?}");
            (label(&text), text)
        }
        Frame::Abandon { keys } => {
            names.collect(&serde_json::to_value(keys).unwrap_or_default());
            ("Abandon".into(), format!("{frame:?}"))
        }
        frame => {
            let text = format!("{frame:?}");
            (label(&text), text)
        }
    };
    let is_minor = MINOR.contains(&name.as_str());
    EventWords { label: format!("{verb} {name}"), detail: cut(&text), is_minor, names }
}

/// The variants in front of a text in Rust's form, from outside in, and of what is about a leg or a
/// rank what it says.
fn label(text: &str) -> String {
    let (mut words, mut rest) = (Vec::new(), text);
    loop {
        let end = rest.find(|c: char| !c.is_alphanumeric()).unwrap_or(rest.len());
        let (word, behind) = rest.split_at(end);
        if !word.starts_with(|c: char| c.is_uppercase()) {
            break;
        }
        words.push(word);
        match behind.strip_prefix('(') {
            Some(inside) => rest = inside,
            None => break,
        }
    }
    for field in [" event: ", " report: "] {
        if let (["Leg" | "Report"], Some((_, said))) = (words.as_slice(), text.split_once(field)) {
            let end = said.find(|c: char| !c.is_alphanumeric()).unwrap_or(said.len());
            words.push(&said[..end]);
        }
    }
    words.join(" ")
}

/// The beginning of a text that is long.
pub(super) fn cut(text: &str) -> String {
    if text.len() <= DETAIL_MAX {
        return text.into();
    }
    let end = (0..=DETAIL_MAX).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    format!("{} ... ({} more bytes)", &text[..end], text.len() - end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_the_variants_from_outside_in() {
        assert_eq!(label("Hook(Arrived { request: 1 })"), "Hook Arrived");
        assert_eq!(label("Tick"), "Tick");
        assert_eq!(label("Leg { leg: 4, event: FirstToken }"), "Leg FirstToken");
        assert_eq!(label("Report { rank: 0, report: Flow { flow: 1 } }"), "Report Flow");
    }

    #[test]
    fn names_are_found_wherever_they_are() {
        let mut names = Names::default();
        let tag = serde_json::json!({ "key": { "id": "tx", "prompt": 1 }, "attempt": 7 });
        names.collect(
            &serde_json::json!([{ "tag": tag, "flow": 3 }, { "request": "r", "flow": 4 }]),
        );
        assert_eq!(
            (names.keys.as_slice(), names.requests.as_slice()),
            (&["tx/1".to_string()][..], &["r".to_string()][..])
        );
        assert_eq!((names.number("flow"), names.number("op")), (Some(3), None));
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        let text = "\u{e9}".repeat(DETAIL_MAX);
        let short = cut(&text);
        assert!(short.len() < DETAIL_MAX + 40 && short.contains("more bytes"), "{short}");
        assert_eq!(cut("short"), "short");
    }
}
