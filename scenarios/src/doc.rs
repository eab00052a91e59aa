//! Reading TOML with the place of everything at hand.

use crate::error::ScenarioError;
use crate::value::{Distribution, MalformedValue, ScenarioValue, one_of};
use kvferry_engine::text::nearest;
use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// The name of a file, to say where an error is.
#[derive(Clone, Debug)]
pub(crate) struct FileName(pub(crate) Arc<str>);

impl FileName {
    /// An error at a line.
    pub(crate) fn error(
        &self,
        line: u32,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) -> ScenarioError {
        ScenarioError { file: self.0.clone(), line, what: what.into(), remedy: remedy.into() }
    }
}

/// A file and its text.
pub(crate) struct TomlDoc<'a> {
    pub(crate) file: FileName,
    pub(crate) text: &'a str,
}

impl TomlDoc<'_> {
    /// The line of a byte offset, from 1.
    pub(crate) fn line(&self, offset: usize) -> u32 {
        let before = &self.text.as_bytes()[..offset.min(self.text.len())];
        1 + before.iter().filter(|byte| **byte == b'\n').count() as u32
    }

    /// Parses the text.
    pub(crate) fn parse(&self) -> Result<Spanned<DeTable<'_>>, ScenarioError> {
        DeTable::parse(self.text).map_err(|error| {
            let line = error.span().map_or(0, |span| self.line(span.start));
            let what = format!("not TOML: {}", error.message().replace('\n', ", "));
            self.file.error(line, what, "see https://toml.io for the syntax")
        })
    }
}

/// A table; remembers which keys were asked for, the others are unknown.
pub(crate) struct TomlSection<'a> {
    pub(crate) doc: &'a TomlDoc<'a>,
    /// Path in the file, empty for the file itself.
    path: String,
    table: Option<&'a DeTable<'a>>,
    pub(crate) line: u32,
    asked: RefCell<Vec<&'static str>>,
}

/// The value of a key.
pub(crate) struct TomlField<'a> {
    doc: &'a TomlDoc<'a>,
    path: String,
    value: &'a DeValue<'a>,
    pub(crate) line: u32,
}

impl<'a> TomlSection<'a> {
    /// A table, or one that is not there and has nothing in it.
    pub(crate) fn new(
        doc: &'a TomlDoc<'a>,
        path: impl Into<String>,
        table: Option<&'a DeTable<'a>>,
        line: u32,
    ) -> TomlSection<'a> {
        TomlSection { doc, path: path.into(), table, line, asked: RefCell::default() }
    }

    /// True if the table is in the file.
    pub(crate) fn is_there(&self) -> bool {
        self.table.is_some()
    }

    pub(crate) fn path(&self, key: &str) -> String {
        if self.path.is_empty() { key.into() } else { format!("{}.{key}", self.path) }
    }

    /// The value of a key.
    pub(crate) fn get(&self, key: &'static str) -> Option<TomlField<'a>> {
        if !self.asked.borrow().contains(&key) {
            self.asked.borrow_mut().push(key);
        }
        let (name, value) = self.table?.get_key_value(key)?;
        let line = self.doc.line(name.span().start);
        Some(TomlField { doc: self.doc, path: self.path(key), value: value.get_ref(), line })
    }

    /// A value in one of its three forms.
    pub(crate) fn draw<T: ScenarioValue>(
        &self,
        key: &'static str,
    ) -> Result<Option<Distribution<T>>, ScenarioError> {
        self.get(key).map(|field| field.draw()).transpose()
    }

    /// A value in one of its three forms, or its default.
    pub(crate) fn draw_or<T: ScenarioValue>(
        &self,
        key: &'static str,
        default: T,
    ) -> Result<Distribution<T>, ScenarioError> {
        Ok(self.draw(key)?.unwrap_or_else(|| Distribution::fixed(default)))
    }

    /// A value of which every possible outcome is from `min` to `max`.
    pub(crate) fn limited<T: ScenarioValue + fmt::Display>(
        &self,
        key: &'static str,
        min: T,
        max: T,
    ) -> Result<Option<Distribution<T>>, ScenarioError> {
        let Some(draw) = self.draw::<T>(key)? else { return Ok(None) };
        let outside = draw.ends().find(|end| **end < min || **end > max).cloned();
        match outside {
            None => Ok(Some(draw)),
            Some(wrong) => {
                let what = format!("`{}` is {wrong}", self.path(key));
                Err(self.doc.file.error(draw.line, what, format!("give {min} to {max}")))
            }
        }
    }

    /// As [`TomlSection::limited`], with a default.
    pub(crate) fn limited_or<T: ScenarioValue + fmt::Display>(
        &self,
        key: &'static str,
        default: T,
        (min, max): (T, T),
    ) -> Result<Distribution<T>, ScenarioError> {
        Ok(self.limited(key, min, max)?.unwrap_or_else(|| Distribution::fixed(default)))
    }

    /// A value that is the same for every seed.
    pub(crate) fn literal<T: ScenarioValue>(
        &self,
        key: &'static str,
    ) -> Result<Option<T>, ScenarioError> {
        self.get(key).map(|field| field.literal()).transpose()
    }

    /// A table below this one; nothing is in it if it is not there.
    pub(crate) fn section(&self, key: &'static str) -> Result<TomlSection<'a>, ScenarioError> {
        match self.get(key) {
            Some(field) => field.section(),
            None => Ok(TomlSection::new(self.doc, self.path(key), None, self.line)),
        }
    }

    /// An array of tables.
    pub(crate) fn sections(
        &self,
        key: &'static str,
    ) -> Result<Vec<TomlSection<'a>>, ScenarioError> {
        self.get(key).map_or(Ok(Vec::new()), |field| field.sections())
    }

    /// Every key of the table.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.table.into_iter().flat_map(|table| table.keys()).map(|key| key.get_ref().as_ref())
    }

    /// The line of a key, or of the table if it has no such key.
    pub(crate) fn line_of(&self, key: &str) -> u32 {
        let entry = self.table.and_then(|table| table.get_key_value(key));
        entry.map_or(self.line, |(name, _)| self.doc.line(name.span().start))
    }

    /// The table in one spelling, whatever its layout and order of keys.
    pub(crate) fn canonical(&self) -> String {
        let mut text = String::new();
        if let Some(table) = self.table {
            spell_table(table, &mut text);
        }
        text
    }

    /// Refuses the first key that nobody asked for.
    pub(crate) fn finish(&self) -> Result<(), ScenarioError> {
        let asked = self.asked.borrow();
        let keys = self.table.into_iter().flat_map(|table| table.keys());
        let unknown = keys.filter(|key| !asked.iter().any(|known| known == key.get_ref()));
        let Some(first) = unknown.min_by_key(|key| key.span().start) else { return Ok(()) };
        let remedy = match nearest(first.get_ref(), &asked) {
            Some(known) => format!("did you mean `{known}`?"),
            None => format!("known here: {}", asked.join(", ")),
        };
        let place = if self.path.is_empty() { "the file" } else { &self.path };
        let what = format!("unknown key `{}` in {place}", first.get_ref());
        Err(self.doc.file.error(self.doc.line(first.span().start), what, remedy))
    }

    /// An error about the section as a whole.
    pub(crate) fn error(
        &self,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) -> ScenarioError {
        self.doc.file.error(self.line, what, remedy)
    }
}

impl<'a> TomlField<'a> {
    /// A value in one of its three forms.
    pub(crate) fn draw<T: ScenarioValue>(&self) -> Result<Distribution<T>, ScenarioError> {
        let text = match self.value {
            DeValue::String(text) => text.to_string(),
            DeValue::Integer(number) if number.radix() == 10 => number.as_str().into(),
            DeValue::Float(number) => number.as_str().into(),
            DeValue::Boolean(value) => value.to_string(),
            other => return Err(self.wrong(type_name(other), &T::form())),
        };
        Distribution::parse(&text, self.line).map_err(|why| match why {
            MalformedValue::Part(part) => self.wrong(&format!("`{part}`"), &T::form()),
            MalformedValue::Backward(range) => {
                let what = format!("range `{range}` of `{}` starts behind its end", self.path);
                self.error(what, "put the smaller value first")
            }
            MalformedValue::NoRange(range) => {
                let what = format!("`{}` cannot be the range `{range}`", self.path);
                self.error(what, "list the values as a choice, \"a|b\"")
            }
        })
    }

    /// A value that is the same for every seed.
    pub(crate) fn literal<T: ScenarioValue>(&self) -> Result<T, ScenarioError> {
        let draw = self.draw::<T>()?;
        draw.literal().cloned().ok_or_else(|| {
            let what = format!("`{}` cannot be drawn", self.path);
            self.error(what, "give one value")
        })
    }

    pub(crate) fn text(&self) -> Result<&'a str, ScenarioError> {
        match self.value {
            DeValue::String(text) => Ok(text),
            other => Err(self.wrong(type_name(other), "a text in quotes")),
        }
    }

    /// A text that is one of a closed list; `lookup` finds it.
    pub(crate) fn entry<T>(
        &self,
        names: &[&str],
        lookup: impl Fn(&str) -> Option<T>,
    ) -> Result<T, ScenarioError> {
        let text = self.text()?;
        lookup(text).ok_or_else(|| self.no_entry(text, names))
    }

    /// Texts that are all of a closed list.
    pub(crate) fn entries<T>(
        &self,
        names: &[&str],
        lookup: impl Fn(&str) -> Option<T>,
    ) -> Result<Vec<T>, ScenarioError> {
        let DeValue::Array(items) = self.value else {
            return Err(self.wrong(type_name(self.value), "a list of texts"));
        };
        let mut found = Vec::new();
        for item in items.iter() {
            let line = self.doc.line(item.span().start);
            let field =
                TomlField { doc: self.doc, path: self.path.clone(), value: item.get_ref(), line };
            found.push(field.entry(names, &lookup)?);
        }
        Ok(found)
    }

    /// A choice of texts that are all of a closed list.
    pub(crate) fn choice<T>(
        &self,
        names: &[&str],
        lookup: impl Fn(&str) -> Option<T>,
    ) -> Result<Vec<T>, ScenarioError> {
        let parts = self.text()?.split('|').map(str::trim);
        parts.map(|text| lookup(text).ok_or_else(|| self.no_entry(text, names))).collect()
    }

    fn no_entry(&self, text: &str, names: &[&str]) -> ScenarioError {
        let remedy = match nearest(text, names) {
            Some(known) => format!("did you mean \"{known}\"?"),
            None => format!("use {}", one_of(names)),
        };
        self.error(format!("`{}` is \"{text}\", which does not exist", self.path), remedy)
    }

    pub(crate) fn section(&self) -> Result<TomlSection<'a>, ScenarioError> {
        match self.value {
            DeValue::Table(table) => {
                Ok(TomlSection::new(self.doc, self.path.clone(), Some(table), self.line))
            }
            other => Err(self.wrong(type_name(other), "a table")),
        }
    }

    /// An array of tables.
    pub(crate) fn sections(&self) -> Result<Vec<TomlSection<'a>>, ScenarioError> {
        let DeValue::Array(items) = self.value else {
            return Err(self.wrong(type_name(self.value), "a list of tables"));
        };
        let mut sections = Vec::new();
        for (index, item) in items.iter().enumerate() {
            let line = self.doc.line(item.span().start);
            let path = format!("{}[{index}]", self.path);
            let field = TomlField { doc: self.doc, path, value: item.get_ref(), line };
            sections.push(field.section()?);
        }
        Ok(sections)
    }

    fn wrong(&self, is: &str, form: &str) -> ScenarioError {
        self.error(format!("`{}` cannot be {is}", self.path), format!("write {form}"))
    }

    /// An error at the key.
    pub(crate) fn error(
        &self,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) -> ScenarioError {
        self.doc.file.error(self.line, what, remedy)
    }
}

fn type_name(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a text",
        DeValue::Integer(_) | DeValue::Float(_) => "a number",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

fn spell_table(table: &DeTable<'_>, text: &mut String) {
    let mut entries: Vec<_> = table.iter().map(|(key, value)| (key.get_ref(), value)).collect();
    entries.sort_by_key(|(key, _)| *key);
    text.push('{');
    for (key, value) in entries {
        text.push_str(&format!("{key:?}="));
        spell(value.get_ref(), text);
    }
    text.push('}');
}

fn spell(value: &DeValue<'_>, text: &mut String) {
    match value {
        DeValue::String(value) => text.push_str(&format!("{value:?};")),
        DeValue::Integer(value) => text.push_str(&format!("{value};")),
        DeValue::Float(value) => text.push_str(&format!("{value};")),
        DeValue::Boolean(value) => text.push_str(&format!("{value};")),
        DeValue::Datetime(value) => text.push_str(&format!("{value};")),
        DeValue::Array(items) => {
            text.push('[');
            for item in items.iter() {
                spell(item.get_ref(), text);
            }
            text.push(']');
        }
        DeValue::Table(table) => spell_table(table, text),
    }
}
