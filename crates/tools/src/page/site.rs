//! The pages of the documentation: their list, their links, and the frame around each.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use crate::contents::{self, CONTENTS};
use crate::markdown::{self, Page, address};

/// What is around the text of a document.
const TEMPLATE: &str = include_str!("../../../web/docs.html");

/// Writes all pages, what they show, and the index of the search.
pub(crate) fn write(project: &Path, folder: &Path) -> Result<()> {
    complete(project)?;
    let names: Vec<&str> = CONTENTS.iter().flat_map(|(_, names)| names.iter().copied()).collect();
    let mut pages = Vec::new();
    for name in &names {
        let text = fs::read_to_string(project.join(name)).with_context(|| format!("cannot read {name}"))?;
        pages.push((*name, markdown::page(&text, name, &names)?));
    }
    let mut shown = BTreeSet::new();
    for (name, page) in &pages {
        let to = folder.join(address(name));
        fs::create_dir_all(to.parent().context("a page without a folder")?)?;
        fs::write(to, whole(name, page, &pages))?;
        shown.extend(page.files.iter().cloned());
    }
    for file in shown {
        let to = folder.join(&file);
        fs::create_dir_all(to.parent().context("a file without a folder")?)?;
        fs::copy(project.join(&file), to).with_context(|| format!("cannot copy {}", file.display()))?;
    }
    fs::write(folder.join("search.json"), index(&pages).to_string())?;
    Ok(())
}

/// Whether every document has its place among the contents.
fn complete(project: &Path) -> Result<()> {
    let missing = contents::without_a_place(project)?;
    ensure!(
        missing.is_empty(),
        "no place in the contents of the page (crates/tools/src/page/contents.rs): {}",
        missing.join(", ")
    );
    Ok(())
}

/// The way from a page to the folder of all.
fn to_top(name: &str) -> String {
    "../".repeat(name.matches('/').count())
}

fn whole(name: &str, page: &Page, pages: &[(&str, Page)]) -> String {
    let top = to_top(name);
    let title = markdown::escaped(&page.title);
    let contents = contents(name, pages);
    // The text comes last: what stands in it is not checked again.
    let fields = [
        ("{{top}}", top.as_str()),
        ("{{title}}", &title),
        ("{{contents}}", &contents),
        ("{{text}}", &page.html),
    ];
    fields.iter().fold(TEMPLATE.to_owned(), |text, (field, value)| text.replace(field, value))
}

fn contents(own: &str, pages: &[(&str, Page)]) -> String {
    let top = to_top(own);
    let mut text = String::new();
    for (heading, names) in CONTENTS {
        text += &format!("<h2>{heading}</h2>\n<ul>\n");
        for name in *names {
            let title = pages.iter().find(|(of, _)| of == name).map_or("", |(_, page)| page.title.as_str());
            let current = if *name == own { " aria-current=\"page\"" } else { "" };
            let to = address(name);
            text += &format!(
                "<li><a href=\"{top}{}\"{current}>{}</a></li>\n",
                to.display(),
                markdown::escaped(title)
            );
        }
        text += "</ul>\n";
    }
    text
}

/// What the search looks through: sections with their pages.
fn index(pages: &[(&str, Page)]) -> serde_json::Value {
    let sections = pages.iter().flat_map(|(name, page)| {
        page.sections.iter().map(move |section| {
            let to = format!("{}#{}", address(name).display(), section.anchor);
            json!({"to": to, "page": page.title, "heading": section.heading, "text": section.text})
        })
    });
    sections.collect()
}
