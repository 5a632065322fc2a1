//! A document as HTML: links lead to pages, headings have the names that GitHub gives them, and tables scroll by themselves.

// The parser has many events, most of them of no interest here; they are not our enum.
#![allow(clippy::wildcard_enum_match_arm)]

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use anyhow::{Result, bail};
use pulldown_cmark::{CowStr, Event, HeadingLevel, Options, Parser, Tag, TagEnd, html};

/// A document.
pub(crate) struct Page {
    pub(crate) title: String,
    pub(crate) html: String,
    pub(crate) sections: Vec<Section>,
    /// What it shows besides: pictures, and other files that it links to.
    pub(crate) files: BTreeSet<PathBuf>,
}

/// What stands under a heading.
#[derive(Default)]
pub(crate) struct Section {
    pub(crate) anchor: String,
    pub(crate) heading: String,
    pub(crate) text: String,
}

/// A document of this name among these.
pub(crate) fn page(text: &str, name: &str, names: &[&str]) -> Result<Page> {
    let options = Options::ENABLE_TABLES | Options::ENABLE_STRIKETHROUGH;
    let mut events: Vec<Event<'_>> = Parser::new_ext(text, options).collect();
    let sections = named_headings(&mut events);
    let mut files = BTreeSet::new();
    let mut written = Vec::new();
    for event in events {
        match event {
            Event::Start(Tag::Link { link_type, dest_url, title, id }) => {
                let dest_url = led(&dest_url, name, names, &mut files)?.into();
                written.push(Event::Start(Tag::Link { link_type, dest_url, title, id }));
            }
            Event::Start(Tag::Image { link_type, dest_url, title, id }) => {
                let dest_url = led(&dest_url, name, names, &mut files)?.into();
                written.push(Event::Start(Tag::Image { link_type, dest_url, title, id }));
            }
            Event::Start(Tag::Table(_)) => {
                // Cells are aligned by the style sheet: an attribute would be style in the page.
                let open = "<div class=\"wide\" tabindex=\"0\" role=\"region\" aria-label=\"Table\">";
                written.push(Event::Html(open.into()));
                written.push(Event::Start(Tag::Table(Vec::new())));
            }
            Event::End(TagEnd::Table) => written.extend([event, Event::Html("</div>\n".into())]),
            // Marks for those who generate parts of the documents.
            Event::Html(ref html) if html.trim_start().starts_with("<!--") => {}
            Event::Html(html) | Event::InlineHtml(html) => bail!("{name}: has HTML: {html}"),
            event => written.push(event),
        }
    }
    let mut page = String::new();
    html::push_html(&mut page, written.into_iter());
    let title = sections.first().map(|section| section.heading.clone()).unwrap_or_default();
    Ok(Page { title, html: page, sections, files })
}

/// Gives headings their names, and collects what stands under each.
fn named_headings(events: &mut [Event<'_>]) -> Vec<Section> {
    let mut sections: Vec<Section> = Vec::new();
    let mut names = BTreeSet::new();
    let mut heading = None;
    for at in 0..events.len() {
        match &events[at] {
            Event::Start(Tag::Heading { .. }) => {
                heading = Some(at);
                sections.push(Section::default());
            }
            Event::End(TagEnd::Heading(level)) => {
                let (level, start) = (*level, heading.take());
                let Some((section, start)) = sections.last_mut().zip(start) else { continue };
                section.anchor = anchor(&section.heading, &mut names);
                events[start] = named(level, &section.anchor);
            }
            Event::Text(text) | Event::Code(text) => {
                if let Some(section) = sections.last_mut() {
                    let into = if heading.is_some() { &mut section.heading } else { &mut section.text };
                    into.push_str(text);
                    // Cells of a table and lines are words of their own.
                    if heading.is_none() && !text.ends_with(' ') {
                        into.push(' ');
                    }
                }
            }
            Event::SoftBreak if heading.is_none() => {}
            _ => {}
        }
    }
    sections
}

fn named(level: HeadingLevel, anchor: &str) -> Event<'static> {
    let id = Some(CowStr::from(anchor.to_owned()));
    Event::Start(Tag::Heading { level, id, classes: Vec::new(), attrs: Vec::new() })
}

/// The name that GitHub gives a heading: lower case, without punctuation, `-` for each space, and a number where it comes again.
fn anchor(heading: &str, names: &mut BTreeSet<String>) -> String {
    let kept = heading.trim().chars().filter(|letter| letter.is_alphanumeric() || " -_".contains(*letter));
    let anchor = kept.collect::<String>().to_lowercase().replace(' ', "-");
    let mut name = anchor.clone();
    let mut number = 0;
    while !names.insert(name.clone()) {
        number += 1;
        name = format!("{anchor}-{number}");
    }
    name
}

/// Where a link of a page leads: to another page, to a file that is shown beside the pages, or out.
fn led(link: &str, name: &str, names: &[&str], files: &mut BTreeSet<PathBuf>) -> Result<String> {
    if link.contains("://") || link.starts_with("mailto:") || link.starts_with('#') {
        return Ok(link.to_owned());
    }
    let (path, anchor) =
        link.split_once('#').map_or((link, String::new()), |(path, anchor)| (path, format!("#{anchor}")));
    let own = Path::new(name).parent().unwrap_or(Path::new(""));
    let target = plain(&own.join(path));
    let Some(text) = target.to_str() else { bail!("{name}: {link} is not a link") };
    if names.contains(&text) {
        let up = "../".repeat(own.components().count());
        return Ok(format!("{up}{}{anchor}", address(text).display()));
    }
    if text.ends_with(".md") {
        bail!("{name}: {link} leads to a document that is not a page");
    }
    files.insert(target);
    Ok(link.to_owned())
}

/// A path without `..`.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                plain.pop();
            }
            Component::CurDir => {}
            Component::Prefix(_) | Component::RootDir | Component::Normal(_) => plain.push(part),
        }
    }
    plain
}

/// Text as HTML.
pub(crate) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// The file of a document's page.
pub(crate) fn address(name: &str) -> PathBuf {
    match name.strip_suffix("README.md") {
        Some(folder) => Path::new(folder).join("index.html"),
        None => Path::new(name).with_extension("html"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: &[&str] = &["README.md", "docs/a.md", "docs/b.md", "lib/README.md"];

    fn html(text: &str, name: &str) -> String {
        page(text, name, NAMES).expect("a page").html
    }

    #[test]
    fn links_lead_to_pages() {
        for (name, link, leads) in [
            ("README.md", "docs/a.md#x-y", "docs/a.html#x-y"),
            ("docs/a.md", "b.md", "../docs/b.html"),
            ("docs/a.md", "../README.md", "../index.html"),
            ("docs/a.md", "../lib/README.md#z", "../lib/index.html#z"),
            ("docs/a.md", "#here", "#here"),
            ("docs/a.md", "https://docs.rs/x", "https://docs.rs/x"),
        ] {
            let html = html(&format!("[words]({link})"), name);
            assert!(html.contains(&format!("href=\"{leads}\"")), "{name} {link}: {html}");
        }
        assert!(page("[a](gone.md)", "docs/a.md", NAMES).is_err());
        let page = page("![a](picture/a.svg)", "docs/a.md", NAMES).expect("a page");
        assert_eq!(page.files.into_iter().collect::<Vec<_>>(), [PathBuf::from("docs/picture/a.svg")]);
    }

    #[test]
    fn headings_have_the_names_that_links_use() {
        let html = html("# A b\n## A, b?\n### `C`'s d_e & f\n## A b\n", "README.md");
        for anchor in ["a-b", "a-b-1", "cs-d_e--f", "a-b-2"] {
            assert!(html.contains(&format!("id=\"{anchor}\"")), "{anchor}: {html}");
        }
    }

    #[test]
    fn documents_have_no_html_of_their_own() {
        assert!(page("<script>alert(1)</script>", "README.md", NAMES).is_err());
        assert!(page("a <b>c</b>", "README.md", NAMES).is_err());
        assert!(!html("<!-- generated -->\n\ntext\n", "README.md").contains("generated"));
        assert!(!html("| a |\n|---:|\n| b |\n", "README.md").contains("style="));
    }
}
