//! Reading TOML with the place of everything at hand.

use crate::error::ScenarioError;
use crate::value::{Distribution, MalformedValue, ScenarioValue, one_of};
use kvferry_engine::text::nearest;
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// The name of a file, to say where an error is.
#[derive(Clone, Debug)]
pub struct FileName(pub Arc<str>);

impl FileName {
    /// An error at a line.
    pub fn error(
        &self,
        line: u32,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) -> ScenarioError {
        ScenarioError { file: self.0.clone(), line, what: what.into(), remedy: remedy.into() }
    }
}

/// A file and its text.
pub struct TomlDoc<'a> {
    pub file: FileName,
    text: &'a str,
}

impl<'a> TomlDoc<'a> {
    pub fn new(file: &str, text: &'a str) -> TomlDoc<'a> {
        TomlDoc { file: FileName(file.into()), text }
    }

    /// The line of a byte offset, from 1.
    fn line(&self, offset: usize) -> u32 {
        let before = &self.text.as_bytes()[..offset.min(self.text.len())];
        1 + before.iter().filter(|byte| **byte == b'\n').count() as u32
    }

    /// Reads the whole file.
    pub fn read<T: FromSection>(&self) -> Result<T, ScenarioError> {
        let table = DeTable::parse(self.text).map_err(|error| {
            let line = error.span().map_or(0, |span| self.line(span.start));
            let what = format!("not TOML: {}", error.message().replace('\n', ", "));
            self.file.error(line, what, "see https://toml.io for the syntax")
        })?;
        let table = Some(table.get_ref());
        T::from_section(&TomlSection::new(self, String::new(), table, 1))
    }
}

/// A table; remembers which keys were asked for, the others are unknown.
pub struct TomlSection<'a> {
    pub doc: &'a TomlDoc<'a>,
    /// Path in the file, empty for the file itself.
    path: String,
    /// `None` if it is not in the file: it has no key then.
    table: Option<&'a DeTable<'a>>,
    pub line: u32,
    asked: RefCell<Vec<&'static str>>,
}

/// The value of a key.
pub struct TomlField<'a> {
    doc: &'a TomlDoc<'a>,
    pub path: String,
    value: &'a DeValue<'a>,
    pub line: u32,
    bytes: Range<usize>,
}

/// What a table can be read into; `section!` makes them.
pub trait FromSection: Sized {
    fn from_section(section: &TomlSection<'_>) -> Result<Self, ScenarioError>;
}

/// What a key can be read into.
pub trait FromKey: Sized {
    fn from_field(field: &TomlField<'_>) -> Result<Self, ScenarioError>;

    /// A list of them.
    fn from_list(field: &TomlField<'_>) -> Result<Vec<Self>, ScenarioError> {
        let items = field.items("a list of texts", |path, _| path.into())?;
        items.iter().map(Self::from_field).collect()
    }

    /// What stands for a key that is not in the section; `None` if it cannot be left out.
    fn absent(_: &TomlSection<'_>, _: &'static str) -> Result<Option<Self>, ScenarioError> {
        Ok(None)
    }
}

impl<'a> TomlSection<'a> {
    fn new(
        doc: &'a TomlDoc<'a>,
        path: String,
        table: Option<&'a DeTable<'a>>,
        line: u32,
    ) -> TomlSection<'a> {
        TomlSection { doc, path, table, line, asked: RefCell::default() }
    }

    pub fn path(&self, key: &str) -> String {
        if self.path.is_empty() { key.into() } else { format!("{}.{key}", self.path) }
    }

    /// The section below this one that is not in the file.
    pub fn nothing(&self, key: &str) -> TomlSection<'a> {
        TomlSection::new(self.doc, self.path(key), None, self.line)
    }

    fn get(&self, key: &'static str) -> Option<TomlField<'a>> {
        if !self.asked.borrow().contains(&key) {
            self.asked.borrow_mut().push(key);
        }
        let (name, value) = self.table?.get_key_value(key)?;
        let line = self.doc.line(name.span().start);
        let bytes = value.span();
        Some(TomlField { doc: self.doc, path: self.path(key), value: value.get_ref(), line, bytes })
    }

    /// The value of a key, if it is there.
    pub fn read<T: FromKey>(&self, key: &'static str) -> Result<Option<T>, ScenarioError> {
        self.get(key).map(|field| T::from_field(&field)).transpose()
    }

    /// What stands for a key that is not there and has no default; `error` is what is wrong then
    /// and what to do.
    pub fn absent<T: FromKey>(
        &self,
        key: &'static str,
        error: Option<&(&str, &str)>,
    ) -> Result<T, ScenarioError> {
        T::absent(self, key)?.ok_or_else(|| match error {
            Some((what, remedy)) => self.error(*what, *remedy),
            None => self.error(format!("`{}` is not there", self.path(key)), "add it"),
        })
    }

    /// Every key of the table.
    pub fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.table.into_iter().flat_map(|table| table.keys()).map(|key| key.get_ref().as_ref())
    }

    /// The bytes of the file that hold the value of a key; none if it has no such key.
    pub fn bytes_of(&self, key: &str) -> Range<usize> {
        let value = self.table.and_then(|table| table.get(key));
        value.map_or(0..0, |value| value.span())
    }

    /// The line of a key, or of the table if it has no such key.
    pub fn line_of(&self, key: &str) -> u32 {
        let entry = self.table.and_then(|table| table.get_key_value(key));
        entry.map_or(self.line, |(name, _)| self.doc.line(name.span().start))
    }

    /// The table in one spelling, whatever its layout and order of keys.
    pub fn canonical(&self) -> String {
        let mut text = String::new();
        if let Some(table) = self.table {
            spell_table(table, &mut text);
        }
        text
    }

    /// Refuses the first key that nobody asked for.
    pub fn finish(&self) -> Result<(), ScenarioError> {
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
        Err(self.error_at(self.doc.line(first.span().start), what, remedy))
    }

    /// An error about the section as a whole.
    pub fn error(&self, what: impl Into<String>, remedy: impl Into<String>) -> ScenarioError {
        self.error_at(self.line, what, remedy)
    }

    pub fn error_at(
        &self,
        line: u32,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) -> ScenarioError {
        self.doc.file.error(line, what, remedy)
    }
}

impl<'a> TomlField<'a> {
    /// A value in one of its three forms.
    pub fn draw<T: ScenarioValue>(&self) -> Result<Distribution<T>, ScenarioError> {
        let text = match self.value {
            DeValue::String(text) => text.to_string(),
            DeValue::Integer(number) if number.radix() == 10 => number.as_str().into(),
            DeValue::Float(number) => number.as_str().into(),
            DeValue::Boolean(value) => value.to_string(),
            other => return Err(self.wrong(type_name(other), &T::form())),
        };
        let mut draw = Distribution::parse(&text, self.line).map_err(|why| match why {
            MalformedValue::Part(part) => self.wrong(&format!("`{part}`"), &T::form()),
            MalformedValue::Backward(range) => {
                let what = format!("range `{range}` of `{}` starts behind its end", self.path);
                self.error(what, "put the smaller value first")
            }
            MalformedValue::NoRange(range) => {
                let what = format!("`{}` cannot be the range `{range}`", self.path);
                self.error(what, "list the values as a choice, \"a|b\"")
            }
        })?;
        if let Some((is, remedy)) = draw.ends().find_map(T::refused) {
            return Err(self.error(format!("`{}` is {is}", self.path), remedy));
        }
        draw.bytes = self.bytes.clone();
        Ok(draw)
    }

    /// A value that is the same for every seed.
    pub fn literal<T: ScenarioValue>(&self) -> Result<T, ScenarioError> {
        let draw = self.draw::<T>()?;
        draw.literal().cloned().ok_or_else(|| {
            let what = format!("`{}` cannot be drawn", self.path);
            self.error(what, "give one value")
        })
    }

    /// The bytes of the file that hold it.
    pub fn bytes(&self) -> Range<usize> {
        self.bytes.clone()
    }

    pub fn text(&self) -> Result<&'a str, ScenarioError> {
        match self.value {
            DeValue::String(text) => Ok(text),
            other => Err(self.wrong(type_name(other), "a text in quotes")),
        }
    }

    /// The entry of a closed list that this text, or this part of it, names.
    pub fn entry<T: ClosedList>(&self, text: &str) -> Result<T, ScenarioError> {
        let named = T::named();
        let found = named.iter().copied().chain(T::other()).find(|(name, _)| *name == text);
        found.map(|(_, entry)| entry).ok_or_else(|| {
            let names: Vec<&str> = named.iter().map(|(name, _)| *name).collect();
            let remedy = match nearest(text, &names) {
                Some(known) => format!("did you mean \"{known}\"?"),
                None => format!("use {}", one_of(&names)),
            };
            self.error(format!("`{}` is \"{text}\", which does not exist", self.path), remedy)
        })
    }

    /// The values of a list, each with the path that `path` makes of the list's and its index.
    fn items(
        &self,
        of: &str,
        path: impl Fn(&str, usize) -> String,
    ) -> Result<Vec<TomlField<'a>>, ScenarioError> {
        let DeValue::Array(items) = self.value else {
            return Err(self.wrong(type_name(self.value), of));
        };
        let field = |(index, item): (usize, &'a Spanned<DeValue<'a>>)| TomlField {
            doc: self.doc,
            path: path(&self.path, index),
            value: item.get_ref(),
            line: self.doc.line(item.span().start),
            bytes: item.span(),
        };
        Ok(items.iter().enumerate().map(field).collect())
    }

    /// A table without keys in place of this value.
    pub fn nothing(&self) -> TomlSection<'a> {
        TomlSection::new(self.doc, self.path.clone(), None, self.line)
    }

    /// An array of tables.
    pub fn sections<T: FromSection>(&self) -> Result<Vec<T>, ScenarioError> {
        let items = self.items("a list of tables", |path, index| format!("{path}[{index}]"))?;
        items.iter().map(TomlField::section).collect()
    }

    /// The table as what it is read into.
    pub fn section<T: FromSection>(&self) -> Result<T, ScenarioError> {
        match self.value {
            DeValue::Table(table) => {
                let path = self.path.clone();
                T::from_section(&TomlSection::new(self.doc, path, Some(table), self.line))
            }
            other => Err(self.wrong(type_name(other), "a table")),
        }
    }

    fn wrong(&self, is: &str, form: &str) -> ScenarioError {
        self.error(format!("`{}` cannot be {is}", self.path), format!("write {form}"))
    }

    /// An error at the key.
    pub fn error(&self, what: impl Into<String>, remedy: impl Into<String>) -> ScenarioError {
        self.doc.file.error(self.line, what, remedy)
    }
}

/// A type of which a text names one of some values.
pub trait ClosedList: Copy {
    /// The values and their names.
    fn named() -> Vec<(&'static str, Self)>;

    /// A value that has one more name.
    fn other() -> Option<(&'static str, Self)> {
        None
    }
}

impl<T: ClosedList> FromKey for T {
    fn from_field(field: &TomlField<'_>) -> Result<T, ScenarioError> {
        field.entry(field.text()?)
    }
}

impl<T: ScenarioValue> FromKey for Distribution<T> {
    fn from_field(field: &TomlField<'_>) -> Result<Distribution<T>, ScenarioError> {
        field.draw()
    }
}

impl FromKey for String {
    fn from_field(field: &TomlField<'_>) -> Result<String, ScenarioError> {
        field.text().map(Into::into)
    }
}

impl<T: FromKey> FromKey for Option<T> {
    fn from_field(field: &TomlField<'_>) -> Result<Option<T>, ScenarioError> {
        T::from_field(field).map(Some)
    }

    fn absent(_: &TomlSection<'_>, _: &'static str) -> Result<Option<Self>, ScenarioError> {
        Ok(Some(None))
    }
}

impl<T: FromKey> FromKey for Vec<T> {
    fn from_field(field: &TomlField<'_>) -> Result<Vec<T>, ScenarioError> {
        T::from_list(field)
    }

    fn absent(_: &TomlSection<'_>, _: &'static str) -> Result<Option<Self>, ScenarioError> {
        Ok(Some(Vec::new()))
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
