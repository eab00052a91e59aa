//! Search for the places of a source file that can be changed.

use crate::changes::{begins, method_change, operator_change};
use crate::site::{MutationSite, SiteEdit};
use proc_macro2::TokenStream;
use std::collections::BTreeMap;
use std::ops::Range;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, Block, Expr, Item, Pat, ReturnType, Signature, Stmt};

/// Longest text in the name of a change, in characters.
const PLAIN_MAX: usize = 100;

/// Calls whose arguments only say how much memory to take, or a text.
const HINTS: [&str; 6] =
    ["with_capacity", "reserve", "reserve_exact", "shrink_to_fit", "expect", "context"];

/// Traits whose functions only make text.
const TEXTS: [&str; 5] = ["Display", "Debug", "Error", "LowerHex", "UpperHex"];

/// What a source file has.
#[derive(Debug, Default)]
pub(crate) struct FoundSites {
    pub(crate) sites: Vec<MutationSite>,
    /// Modules in other files that are compiled for tests alone.
    pub(crate) test_modules: Vec<String>,
}

/// Finds the sites of a source file.
///
/// # Errors
/// The text is not Rust.
pub(crate) fn find(file: &str, text: &str) -> syn::Result<FoundSites> {
    let parsed = syn::parse_file(text)?;
    let mut finder = SiteFinder { file, text, ..SiteFinder::default() };
    if !parsed.attrs.iter().any(is_off) {
        finder.visit_file(&parsed);
    }
    Ok(FoundSites { sites: finder.sites, test_modules: finder.test_modules })
}

/// True for code that is not part of what is tested.
fn is_off(attribute: &Attribute) -> bool {
    let path = attribute.path();
    let name = path.segments.last().map(|one| one.ident.to_string()).unwrap_or_default();
    match name.as_str() {
        "test" => true,
        "cfg" => {
            let text = attribute.meta.require_list().map(|list| list.tokens.to_string());
            let text = text.unwrap_or_default();
            let off = ["test", "loom", "planted", "fuzz", "target_os", "not"];
            off.iter().any(|word| text.contains(word))
        }
        _ => false,
    }
}

/// A text on one line, without comments.
fn flat(text: &str) -> String {
    text.parse::<TokenStream>().map(|tokens| tokens.to_string()).unwrap_or_default()
}

/// A text as a person reads it on one line, without comments.
fn plain(text: &str) -> String {
    let lines = text.lines().map(|line| line.split("// ").next().unwrap_or_default().trim());
    let line = lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ");
    let letters: Vec<char> = line.chars().collect();
    if letters.len() <= PLAIN_MAX {
        return line;
    }
    let (begin, end) = (&letters[..PLAIN_MAX / 2], &letters[letters.len() - PLAIN_MAX / 2..]);
    format!("{}...{}", begin.iter().collect::<String>(), end.iter().collect::<String>())
}

/// Bytes of a part of the file.
fn bytes(of: &impl Spanned) -> Range<usize> {
    of.span().byte_range()
}

#[derive(Default)]
struct SiteFinder<'a> {
    file: &'a str,
    text: &'a str,
    sites: Vec<MutationSite>,
    test_modules: Vec<String>,
    /// Type or trait of the functions that are visited.
    owner: String,
    /// Names of the functions around, and the text of the outermost one.
    functions: Vec<String>,
    body: &'a str,
    /// How often each change was found in a function.
    counts: BTreeMap<(String, String), usize>,
    /// Numbers of the function so far.
    literals: usize,
}

impl<'a> SiteFinder<'a> {
    fn slice(&self, of: &impl Spanned) -> &'a str {
        &self.text[bytes(of)]
    }

    fn add(&mut self, span: Range<usize>, change: String, edit: SiteEdit) {
        if self.functions.is_empty() {
            return;
        }
        let name = self.functions.join("::");
        let owner = if self.owner.is_empty() { name } else { format!("{}::{name}", self.owner) };
        let nth = self.counts.entry((owner.clone(), change.clone())).or_default();
        self.sites.push(MutationSite {
            file: self.file.into(),
            function: owner,
            change,
            nth: *nth,
            line: self.text[..span.start].matches('\n').count() + 1,
            span,
            edit,
            body: self.body.into(),
        });
        *nth += 1;
    }

    /// Writes another expression in place of this one.
    fn replace(&mut self, of: &Expr, change: &str) {
        let was = self.slice(of);
        if was.contains("planted!(") {
            return;
        }
        let code = flat(change);
        if code.is_empty() || code == flat(was) {
            return;
        }
        let name = format!("`{}` -> `{}`", plain(was), plain(change));
        self.add(bytes(of), name, SiteEdit::Replace(code));
    }

    /// Changes of an expression that decides.
    fn condition(&mut self, of: &'a Expr, fixed: &[&str]) {
        match of {
            Expr::Let(of) => self.visit_expr(&of.expr),
            Expr::Binary(and) if has_let(of) => {
                self.condition(&and.left, fixed);
                self.condition(&and.right, fixed);
            }
            _ => {
                for value in fixed {
                    self.replace(of, value);
                }
                self.visit_expr(of);
            }
        }
    }

    fn function(&mut self, attributes: &[Attribute], signature: &Signature, block: &'a Block) {
        let name = signature.ident.to_string();
        if signature.constness.is_some() || attributes.iter().any(is_off) || name == "main" {
            return;
        }
        if self.functions.is_empty() {
            self.body = self.slice(block);
            self.literals = 0;
        }
        self.functions.push(name);
        let is_bool = match &signature.output {
            ReturnType::Type(_, of) => self.slice(&**of) == "bool",
            ReturnType::Default => false,
        };
        if !block.stmts.is_empty() {
            let output = match &signature.output {
                ReturnType::Default => String::new(),
                ReturnType::Type(_, of) => flat(self.slice(&**of)),
            };
            let start = block.brace_token.span.open().byte_range().end;
            for begin in begins(&output) {
                let change = format!("begins with `{begin}`");
                self.add(start..start, change, SiteEdit::Begin((*begin).into()));
            }
        }
        if let Some(Stmt::Expr(tail, None)) = block.stmts.last()
            && is_bool
            && matches!(tail, Expr::Macro(_) | Expr::MethodCall(_) | Expr::Call(_) | Expr::Field(_))
        {
            self.replace(tail, &format!("!({})", self.slice(tail)));
        }
        self.visit_block(block);
        self.functions.pop();
    }

    fn statement(&mut self, of: &'a Stmt) {
        let expression = match of {
            Stmt::Expr(expression, Some(_)) => expression,
            Stmt::Local(local) if matches!(local.pat, Pat::Wild(_)) => match &local.init {
                Some(init) => &*init.expr,
                None => return,
            },
            _ => return,
        };
        let inner = match expression {
            Expr::Try(of) => &*of.expr,
            Expr::Await(of) => &*of.base,
            of => of,
        };
        let is_dropped = match inner {
            Expr::MethodCall(call) => !HINTS.contains(&call.method.to_string().as_str()),
            Expr::Call(call) => self.slice(&*call.func) != "drop",
            Expr::Binary(of) => operator_change(&of.op).is_some_and(|it| it.assigns),
            Expr::Assign(_) | Expr::Continue(_) => true,
            Expr::Return(of) => of.expr.is_none(),
            _ => false,
        };
        let text = self.slice(of);
        if is_dropped && !text.contains("planted!(") {
            self.add(bytes(of), format!("drop `{}`", plain(text)), SiteEdit::Drop);
        }
    }
}

/// True if a chain of conditions binds something.
fn has_let(of: &Expr) -> bool {
    match of {
        Expr::Let(_) => true,
        Expr::Binary(of) if matches!(of.op, syn::BinOp::And(_)) => {
            has_let(&of.left) || has_let(&of.right)
        }
        _ => false,
    }
}

impl<'a> Visit<'a> for SiteFinder<'a> {
    fn visit_attribute(&mut self, _: &'a Attribute) {}
    fn visit_pat(&mut self, _: &'a Pat) {}
    fn visit_type(&mut self, _: &'a syn::Type) {}
    fn visit_path(&mut self, _: &'a syn::Path) {}
    fn visit_item_const(&mut self, _: &'a syn::ItemConst) {}
    fn visit_impl_item_const(&mut self, _: &'a syn::ImplItemConst) {}
    fn visit_trait_item_const(&mut self, _: &'a syn::TraitItemConst) {}
    fn visit_item_static(&mut self, _: &'a syn::ItemStatic) {}
    fn visit_item_enum(&mut self, _: &'a syn::ItemEnum) {}
    fn visit_expr_const(&mut self, _: &'a syn::ExprConst) {}
    fn visit_macro(&mut self, _: &'a syn::Macro) {}

    fn visit_expr_repeat(&mut self, of: &'a syn::ExprRepeat) {
        self.visit_expr(&of.expr);
    }

    fn visit_item(&mut self, of: &'a Item) {
        let attributes: &[Attribute] = match of {
            Item::Mod(of) => {
                if of.attrs.iter().any(is_off) && of.content.is_none() {
                    self.test_modules.push(of.ident.to_string());
                }
                &of.attrs
            }
            Item::Impl(of) => &of.attrs,
            Item::Trait(of) => &of.attrs,
            _ => &[],
        };
        if !attributes.iter().any(is_off) {
            visit::visit_item(self, of);
        }
    }

    fn visit_item_impl(&mut self, of: &'a syn::ItemImpl) {
        if let Some((path, _)) = &of.trait_
            && path.segments.last().is_some_and(|one| TEXTS.iter().any(|name| one.ident == name))
        {
            return;
        }
        let owner = flat(self.slice(&*of.self_ty)).replace(' ', "");
        let before = std::mem::replace(&mut self.owner, owner);
        visit::visit_item_impl(self, of);
        self.owner = before;
    }

    fn visit_item_trait(&mut self, of: &'a syn::ItemTrait) {
        let before = std::mem::replace(&mut self.owner, of.ident.to_string());
        visit::visit_item_trait(self, of);
        self.owner = before;
    }

    fn visit_item_fn(&mut self, of: &'a syn::ItemFn) {
        let owner = std::mem::take(&mut self.owner);
        self.function(&of.attrs, &of.sig, &of.block);
        self.owner = owner;
    }

    fn visit_impl_item_fn(&mut self, of: &'a syn::ImplItemFn) {
        self.function(&of.attrs, &of.sig, &of.block);
    }

    fn visit_trait_item_fn(&mut self, of: &'a syn::TraitItemFn) {
        if let Some(block) = &of.default {
            self.function(&of.attrs, &of.sig, block);
        }
    }

    fn visit_arm(&mut self, of: &'a syn::Arm) {
        if of.attrs.iter().any(is_off) {
            return;
        }
        if let Pat::Guard(guard) = &of.pat {
            self.condition(&guard.guard, &["true", "false"]);
        }
        self.visit_expr(&of.body);
    }

    fn visit_stmt(&mut self, of: &'a Stmt) {
        if self.slice(of).starts_with("#[cfg") {
            return;
        }
        self.statement(of);
        visit::visit_stmt(self, of);
    }

    fn visit_expr_if(&mut self, of: &'a syn::ExprIf) {
        self.condition(&of.cond, &["true", "false"]);
        if !self.slice(&*of.cond).starts_with("planted!(") {
            self.visit_block(&of.then_branch);
        }
        if let Some((_, other)) = &of.else_branch {
            self.visit_expr(other);
        }
    }

    fn visit_expr_while(&mut self, of: &'a syn::ExprWhile) {
        self.condition(&of.cond, &["false"]);
        self.visit_block(&of.body);
    }

    fn visit_expr_binary(&mut self, of: &'a syn::ExprBinary) {
        if let Some(change) = operator_change(&of.op) {
            let (left, right) = (self.slice(&*of.left), self.slice(&*of.right));
            let left = if change.assigns { left.into() } else { format!("({left})") };
            let whole = Expr::Binary(of.clone());
            for operator in change.to {
                self.replace(&whole, &format!("{left} {operator} ({right})"));
            }
        }
        visit::visit_expr_binary(self, of);
    }

    fn visit_expr_unary(&mut self, of: &'a syn::ExprUnary) {
        if matches!(of.op, syn::UnOp::Not(_) | syn::UnOp::Neg(_)) {
            self.replace(&Expr::Unary(of.clone()), self.slice(&*of.expr));
        }
        visit::visit_expr_unary(self, of);
    }

    fn visit_expr_call(&mut self, of: &'a syn::ExprCall) {
        let called = self.slice(&*of.func);
        if called == "Some" {
            self.replace(&Expr::Call(of.clone()), "None");
        }
        let last = called.rsplit("::").next().unwrap_or_default();
        if !HINTS.contains(&last) {
            visit::visit_expr_call(self, of);
        }
    }

    fn visit_expr_method_call(&mut self, of: &'a syn::ExprMethodCall) {
        let name = of.method.to_string();
        let receiver = self.slice(&*of.receiver);
        let whole = Expr::MethodCall(of.clone());
        let text = self.slice(of);
        let name_end = of.method.span().byte_range().end - bytes(of).start;
        let rest = text.get(name_end..).unwrap_or_default();
        for change in method_change(&name, receiver, rest) {
            self.replace(&whole, &change);
        }
        if HINTS.contains(&name.as_str()) {
            self.visit_expr(&of.receiver);
        } else {
            visit::visit_expr_method_call(self, of);
        }
    }

    fn visit_expr_lit(&mut self, of: &'a syn::ExprLit) {
        let whole = Expr::Lit(of.clone());
        match &of.lit {
            syn::Lit::Bool(value) => self.replace(&whole, &(!value.value).to_string()),
            syn::Lit::Int(value) => {
                let Ok(number) = value.base10_parse::<u128>() else { return };
                // One of both, so that numbers are not most of what is drawn.
                self.literals += 1;
                let is_more = self.literals.is_multiple_of(2) || number == 0;
                let number = if is_more { number + 1 } else { number - 1 };
                self.replace(&whole, &format!("{number}{}", value.suffix()));
            }
            _ => {}
        }
    }
}
