//! The modules of a crate, and the paths in them. Read from tokens, because macros hold paths too.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// A module's path from the crate's root, which is empty.
pub type ModulePath = Vec<String>;

/// All modules of a crate that have a file.
pub type Modules = BTreeMap<ModulePath, Module>;

/// One file.
#[derive(Debug, Default)]
pub struct Module {
    /// Paths that begin at the crate's root.
    pub uses: Vec<ModulePath>,
    /// Names that a `use` brings here, with what each stands for.
    pub imports: BTreeMap<String, ModulePath>,
}

/// Reads a crate from the file it begins with.
///
/// # Errors
/// A file is missing or is not Rust.
pub fn read(root: &Path) -> anyhow::Result<Modules> {
    let mut modules = Modules::new();
    let folder = root.parent().context("a file in a folder")?;
    read_file(root, folder, &[], &mut modules)?;
    Ok(modules)
}

/// `folder` is where the files of the module's children are.
fn read_file(file: &Path, folder: &Path, path: &[String], modules: &mut Modules) -> anyhow::Result<()> {
    let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
    let tokens: TokenStream = text.parse().map_err(|error| anyhow!("{}: {error}", file.display()))?;
    let mut module = Module::default();
    let mut children = Vec::new();
    Walk { path, module: &mut module, children: &mut children }.tokens(tokens);
    modules.insert(path.to_vec(), module);
    for child in children {
        let inner = folder.join(&child);
        let candidates: [PathBuf; 2] = [folder.join(format!("{child}.rs")), inner.join("mod.rs")];
        let file = candidates.iter().find(|file| file.exists());
        let file = file.with_context(|| format!("{}: no file for mod {child}", file_name(&candidates)))?;
        read_file(file, &inner, &[path, &[child]].concat(), modules)?;
    }
    Ok(())
}

fn file_name(candidates: &[PathBuf]) -> String {
    candidates.iter().map(|file| file.display().to_string()).collect::<Vec<_>>().join(" or ")
}

/// Goes through the tokens of one file.
struct Walk<'a> {
    path: &'a [String],
    module: &'a mut Module,
    children: &'a mut Vec<String>,
}

impl Walk<'_> {
    fn tokens(&mut self, tokens: TokenStream) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut at = 0;
        while at < tokens.len() {
            let rest = &tokens[at..];
            at += self.item(rest).max(1);
        }
    }

    /// How many tokens were dealt with.
    fn item(&mut self, rest: &[TokenTree]) -> usize {
        if is_left_out(rest) {
            return 2 + end_of_item(&rest[2..]);
        }
        match &rest[0] {
            TokenTree::Group(group) => {
                self.tokens(group.stream());
                1
            }
            TokenTree::Ident(word) if word == "mod" => match rest {
                [_, TokenTree::Ident(name), TokenTree::Punct(end), ..] if end.as_char() == ';' => {
                    self.children.push(name.to_string());
                    3
                }
                _ => 1,
            },
            TokenTree::Ident(word) if word == "use" => {
                let length = rest.iter().position(|token| is_punct(token, ';')).unwrap_or(rest.len());
                self.use_tree(&rest[1..length], &[]);
                length
            }
            TokenTree::Ident(_) => self.path(rest),
            TokenTree::Punct(_) | TokenTree::Literal(_) => 1,
        }
    }

    /// A path within an expression or a type.
    fn path(&mut self, rest: &[TokenTree]) -> usize {
        let mut segments = Vec::new();
        let mut at = 0;
        while let Some(TokenTree::Ident(word)) = rest.get(at) {
            segments.push(word.to_string());
            at += 1;
            if !is_double_colon(&rest[at..]) {
                break;
            }
            at += 2;
        }
        self.note(&segments);
        at
    }

    /// One tree of a `use`, after the segments that lead to it.
    fn use_tree(&mut self, tree: &[TokenTree], before: &[String]) {
        let mut segments = before.to_vec();
        let mut at = 0;
        loop {
            match tree.get(at) {
                Some(TokenTree::Ident(word)) => segments.push(word.to_string()),
                Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
                    let tokens: Vec<TokenTree> = group.stream().into_iter().collect();
                    for part in tokens.split(|token| is_punct(token, ',')) {
                        self.use_tree(part, &segments);
                    }
                    return;
                }
                Some(TokenTree::Punct(_) | TokenTree::Group(_) | TokenTree::Literal(_)) | None => return,
            }
            at += 1;
            if !is_double_colon(&tree[at..]) {
                break;
            }
            at += 2;
            // A glob brings what the module has, so it depends on that module.
            if tree.get(at).is_some_and(|token| is_punct(token, '*')) {
                self.note(&segments);
                return;
            }
        }
        if segments.last().is_some_and(|last| last == "self") && segments.len() > 1 {
            segments.pop();
        }
        self.note(&segments);
        let alias = match tree.get(at..) {
            Some([TokenTree::Ident(word), TokenTree::Ident(alias), ..]) if word == "as" => alias.to_string(),
            _ => segments.last().cloned().unwrap_or_default(),
        };
        if let Some(target) = self.absolute(&segments).or_else(|| self.of_child(&segments)) {
            self.module.imports.insert(alias, target);
        }
    }

    fn note(&mut self, segments: &[String]) {
        if segments.len() > 1
            && let Some(path) = self.absolute(segments)
        {
            self.module.uses.push(path);
        }
    }

    /// From the crate's root; none for what begins elsewhere.
    fn absolute(&self, segments: &[String]) -> Option<ModulePath> {
        let (first, mut rest) = segments.split_first()?;
        let mut base = self.path.to_vec();
        match first.as_str() {
            "crate" => base.clear(),
            "self" => {}
            "super" => {
                base.pop();
                while rest.first().is_some_and(|next| next == "super") {
                    base.pop();
                    rest = &rest[1..];
                }
            }
            _ => return None,
        }
        base.extend_from_slice(rest);
        Some(base)
    }

    /// `use child::Item`, as parents re-export.
    fn of_child(&self, segments: &[String]) -> Option<ModulePath> {
        (segments.len() > 1).then(|| [self.path, segments].concat())
    }
}

fn is_punct(token: &TokenTree, wanted: char) -> bool {
    matches!(token, TokenTree::Punct(punct) if punct.as_char() == wanted)
}

fn is_double_colon(rest: &[TokenTree]) -> bool {
    matches!(rest, [one, two, ..] if is_punct(one, ':') && is_punct(two, ':'))
}

/// Whether what follows is for tests, or is the file of another crate: `#[cfg(test)]`, `#[path = "../other/file.rs"]`.
fn is_left_out(rest: &[TokenTree]) -> bool {
    let [hash, TokenTree::Group(group), ..] = rest else { return false };
    let attribute = group.stream().to_string().replace(' ', "");
    is_punct(hash, '#') && (attribute == "cfg(test)" || attribute.starts_with("path="))
}

/// Where what the attribute is about ends: behind its braces, a semicolon or a comma.
fn end_of_item(rest: &[TokenTree]) -> usize {
    let is_end = |token: &TokenTree| match token {
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        TokenTree::Punct(_) => is_punct(token, ';') || is_punct(token, ','),
        TokenTree::Ident(_) | TokenTree::Literal(_) => false,
    };
    // The braces of `use a::{b};` end nothing.
    let is_use = rest.iter().take(4).any(|token| matches!(token, TokenTree::Ident(word) if word == "use"));
    let end = if is_use {
        rest.iter().position(|token| is_punct(token, ';'))
    } else {
        rest.iter().position(is_end)
    };
    end.map_or(rest.len(), |end| end + 1)
}
