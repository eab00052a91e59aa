//! Changes by kind: operators, methods, what a function returns at once.

use syn::BinOp;

/// Operators that may stand in place of one.
pub(crate) struct OperatorChange {
    pub(crate) to: &'static [&'static str],
    /// The left side is assigned to.
    pub(crate) assigns: bool,
}

/// Operators in place of this one, which take the same types as a rule.
pub(crate) fn operator_change(operator: &BinOp) -> Option<OperatorChange> {
    let (to, assigns): (&[&str], bool) = match operator {
        BinOp::Lt(_) => (&["<=", ">="], false),
        BinOp::Le(_) => (&["<", ">"], false),
        BinOp::Gt(_) => (&[">=", "<="], false),
        BinOp::Ge(_) => (&[">", "<"], false),
        BinOp::Eq(_) => (&["!="], false),
        BinOp::Ne(_) => (&["=="], false),
        BinOp::And(_) => (&["||"], false),
        BinOp::Or(_) => (&["&&"], false),
        BinOp::Add(_) => (&["-"], false),
        BinOp::Sub(_) => (&["+"], false),
        BinOp::Mul(_) => (&["/"], false),
        BinOp::Div(_) | BinOp::Rem(_) => (&["*"], false),
        BinOp::BitAnd(_) => (&["|"], false),
        BinOp::BitOr(_) => (&["&"], false),
        BinOp::Shl(_) => (&[">>"], false),
        BinOp::Shr(_) => (&["<<"], false),
        BinOp::AddAssign(_) => (&["-="], true),
        BinOp::SubAssign(_) => (&["+="], true),
        BinOp::MulAssign(_) => (&["/="], true),
        BinOp::BitOrAssign(_) => (&["&="], true),
        BinOp::BitAndAssign(_) => (&["|="], true),
        _ => return None,
    };
    Some(OperatorChange { to, assigns })
}

/// Methods that may stand in place of each other.
const PAIRS: [(&str, &str); 16] = [
    ("min", "max"),
    ("min_by_key", "max_by_key"),
    ("is_some", "is_none"),
    ("is_some_and", "is_none_or"),
    ("is_ok", "is_err"),
    ("any", "all"),
    ("push_back", "push_front"),
    ("pop_back", "pop_front"),
    ("first", "last"),
    ("front", "back"),
    ("pop_first", "pop_last"),
    ("first_key_value", "last_key_value"),
    ("saturating_add", "saturating_sub"),
    ("checked_add", "checked_sub"),
    ("wrapping_add", "wrapping_sub"),
    ("starts_with", "ends_with"),
];

/// Methods that say yes or no, without a counterpart.
const QUESTIONS: [&str; 4] = ["is_empty", "contains", "contains_key", "eq"];

/// Expressions in place of a call of this method; `rest` is what follows its name.
pub(crate) fn method_change(name: &str, receiver: &str, rest: &str) -> Vec<String> {
    let other = PAIRS.iter().find_map(|(one, two)| match name {
        name if name == *one => Some(*two),
        name if name == *two => Some(*one),
        _ => None,
    });
    if let Some(other) = other {
        return vec![format!("{receiver}.{other}{rest}")];
    }
    if QUESTIONS.contains(&name) {
        return vec![format!("!({receiver}.{name}{rest})")];
    }
    match name {
        "div_ceil" => vec![format!("({receiver}) / {rest}")],
        "saturating_mul" => vec![format!("({receiver}) / {rest}.max(1)")],
        _ => Vec::new(),
    }
}

/// Statements that a function of this type may begin with, so that nothing else in it is run.
pub(crate) fn begins(output: &str) -> &'static [&'static str] {
    let generic = output.split(" <").next().unwrap_or_default();
    match (output, generic) {
        ("", _) => &["return;"],
        ("bool", _) => &["return true;", "return false;"],
        ("u8" | "u16" | "u32" | "u64" | "usize" | "i64" | "i32", _) => &["return 0;"],
        (_, "Option") => &["return None;"],
        (_, "Vec") => &["return Vec::new();"],
        _ if output.starts_with("Result < () ,") || output == "io :: Result < () >" => {
            &["return Ok(());"]
        }
        _ => &[],
    }
}
