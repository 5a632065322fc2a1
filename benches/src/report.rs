//! Medians, tables and plots.

use anyhow::{Context, Result};
use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

/// The median of some measurements; nothing of none.
#[must_use]
pub fn median(mut all: Vec<Duration>) -> Option<Duration> {
    all.sort_unstable();
    all.get(all.len() / 2).copied()
}

/// Where results go: the folder given by `BENCH_OUT`, else `target/bench`.
///
/// # Errors
/// It cannot be made.
pub fn folder() -> Result<PathBuf> {
    let folder = std::env::var_os("BENCH_OUT").map_or_else(|| PathBuf::from("target/bench"), PathBuf::from);
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    Ok(folder)
}

/// Writes a file of results.
///
/// # Errors
/// It cannot be written.
pub fn write(folder: &Path, name: &str, text: &str) -> Result<()> {
    let path = folder.join(name);
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// A bar chart of named values.
#[must_use]
pub fn bars(title: &str, unit: &str, values: &[(String, f64)]) -> String {
    let most = values.iter().map(|(_, value)| *value).fold(f64::MIN_POSITIVE, f64::max);
    let height = 60 + 26 * values.len();
    let mut svg = head(860, height, title);
    for (index, (name, value)) in values.iter().enumerate() {
        let y = 50 + 26 * index;
        let width = value / most * 400.0;
        let _ = writeln!(svg, r#"<text x="330" y="{}" text-anchor="end">{}</text>"#, y + 13, escaped(name));
        let _ = writeln!(svg, r##"<rect x="340" y="{y}" width="{width:.1}" height="18" fill="#466bb0"/>"##);
        let _ = writeln!(svg, r#"<text x="{:.1}" y="{}">{value:.2} {unit}</text>"#, 346.0 + width, y + 13);
    }
    svg.push_str("</svg>\n");
    svg
}

/// A line of a chart: its name and one value per place on the horizontal axis.
pub type Line = (String, Vec<f64>);

/// A chart of lines over named places.
#[must_use]
pub fn lines(title: &str, unit: &str, places: &[String], lines: &[Line]) -> String {
    const COLOURS: [&str; 4] = ["#466bb0", "#c0504d", "#6a9a3a", "#7f5fa8"];
    let most = lines.iter().flat_map(|(_, values)| values).copied().fold(f64::MIN_POSITIVE, f64::max);
    let step = 480.0 / places.len().saturating_sub(1).max(1) as f64;
    let point = |index: usize, value: f64| (100.0 + step * index as f64, 330.0 - value / most * 260.0);
    let mut svg = head(860, 390, title);
    let _ = writeln!(svg, r##"<path d="M100 60V330H600" fill="none" stroke="#888"/>"##);
    let _ = writeln!(svg, r#"<text x="94" y="74" text-anchor="end">{most:.0}</text>"#);
    let _ =
        writeln!(svg, r#"<text x="94" y="334" text-anchor="end">0</text><text x="20" y="200">{unit}</text>"#);
    for (index, place) in places.iter().enumerate() {
        let (x, _) = point(index, 0.0);
        let _ = writeln!(svg, r#"<text x="{x:.1}" y="352" text-anchor="middle">{}</text>"#, escaped(place));
    }
    for ((name, values), colour) in lines.iter().zip(COLOURS) {
        let points: Vec<String> = values
            .iter()
            .enumerate()
            .map(|(index, value)| {
                let (x, y) = point(index, *value);
                format!("{x:.1},{y:.1}")
            })
            .collect();
        let points = points.join(" ");
        let _ =
            writeln!(svg, r#"<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>"#);
        let y = values.last().map_or(330.0, |value| point(0, *value).1);
        let _ = writeln!(svg, r#"<text x="612" y="{:.1}" fill="{colour}">{}</text>"#, y + 4.0, escaped(name));
    }
    svg.push_str("</svg>\n");
    svg
}

fn head(width: usize, height: usize, title: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"20\" y=\"28\" font-size=\"16\">{}</text>\n",
        escaped(title)
    )
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_is_the_middle_one() {
        let all = [9, 1, 5].map(Duration::from_secs);
        assert_eq!(median(all.into()), Some(Duration::from_secs(5)));
        assert_eq!(median(Vec::new()), None);
    }
}
