//! The formats in which metrics are scraped, and which of them a client gets. Samples and their names are the same in all.

use std::collections::BTreeSet;

use hyper::header::{ACCEPT, HeaderMap};
use prometheus_client::encoding::text::{encode, encode_registry};
use prometheus_client::registry::Registry;

/// A format in which metrics are scraped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScrapeFormat {
    /// Prometheus' own text.
    Text,
    /// OpenMetrics 1.0.0.
    OpenMetrics,
    /// OpenMetrics 0.0.1, which older servers ask for: the same text.
    EarlyOpenMetrics,
}

impl ScrapeFormat {
    /// The first format of the client's preference that exists, as the Prometheus client library for Go chooses it: a wildcard, like no
    /// header at all, gets Prometheus' text.
    #[must_use]
    pub fn wanted(headers: &HeaderMap) -> Self {
        let accepted = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
        let mut ranges: Vec<_> = accepted.flat_map(|value| value.split(',')).filter_map(range).collect();
        // Stable: of two equal preferences the first counts.
        ranges.sort_by(|(one, _), (other, _)| other.total_cmp(one));
        ranges.into_iter().find_map(|(_, format)| format).unwrap_or(Self::Text)
    }

    /// The value of Content-Type.
    #[must_use]
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::EarlyOpenMetrics => "application/openmetrics-text; version=0.0.1; charset=utf-8",
        }
    }

    /// All metrics in this format.
    #[must_use]
    pub fn write(self, registry: &Registry) -> String {
        let mut text = String::new();
        // Writing to a String does not fail.
        match self {
            Self::Text => {
                let _ = encode_registry(&mut text, registry);
                prometheus_text(&text)
            }
            Self::OpenMetrics | Self::EarlyOpenMetrics => {
                let _ = encode(&mut text, registry);
                text
            }
        }
    }
}

/// A media range with its preference: none if it is refused, and no format if it names none of ours.
fn range(range: &str) -> Option<(f32, Option<ScrapeFormat>)> {
    let mut parts = range.split(';').map(str::trim);
    let media_type = parts.next()?.to_ascii_lowercase();
    let parameters: Vec<_> = parts.filter_map(|part| part.split_once('=')).collect();
    let parameter = |wanted: &str| {
        let mut found = parameters.iter().filter(|(name, _)| name.trim().eq_ignore_ascii_case(wanted));
        found.next().map(|(_, value)| value.trim().trim_matches('"'))
    };
    let preference = parameter("q").map_or(1.0, |value| value.parse().unwrap_or(0.0));
    let format = match (media_type.as_str(), parameter("version")) {
        ("text/plain", None | Some("0.0.4")) => Some(ScrapeFormat::Text),
        ("application/openmetrics-text", None | Some("1.0.0")) => Some(ScrapeFormat::OpenMetrics),
        ("application/openmetrics-text", Some("0.0.1")) => Some(ScrapeFormat::EarlyOpenMetrics),
        _ => None,
    };
    (preference > 0.0).then_some((preference, format))
}

/// OpenMetrics without its end as Prometheus' text: there a counter has its whole name also where it is described.
fn prometheus_text(open_metrics: &str) -> String {
    let counter = |line| str::strip_prefix(line, "# TYPE ")?.strip_suffix(" counter");
    let counters: BTreeSet<&str> = open_metrics.lines().filter_map(counter).collect();
    let whole = |line: &str| {
        let (keyword, rest) =
            ["# HELP ", "# TYPE "].iter().find_map(|keyword| Some((keyword, line.strip_prefix(keyword)?)))?;
        let (name, rest) = rest.split_once(' ')?;
        counters.contains(name).then(|| format!("{keyword}{name}_total {rest}"))
    };
    let mut text = String::with_capacity(open_metrics.len());
    for line in open_metrics.lines() {
        text += whole(line).as_deref().unwrap_or(line);
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::metrics::counter::Counter;
    use prometheus_client::metrics::gauge::Gauge;
    use prometheus_client::metrics::histogram::Histogram;

    fn wanted(accept: &[&str]) -> ScrapeFormat {
        let mut headers = HeaderMap::new();
        for value in accept {
            headers.append(ACCEPT, value.parse().expect("a value"));
        }
        ScrapeFormat::wanted(&headers)
    }

    #[test]
    fn a_client_gets_the_format_it_prefers() {
        use ScrapeFormat::{EarlyOpenMetrics, OpenMetrics, Text};
        const PROMETHEUS_2: &str = "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,\
            text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        const PROMETHEUS_3: &str = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.7,\
            application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        for (accept, format) in [
            (&[][..], Text),
            (&["*/*"], Text),
            (&["text/plain"], Text),
            (&["text/*;q=0.5, */*;q=0.1"], Text),
            (&["text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"], Text),
            (&["application/json"], Text),
            (&["nonsense"], Text),
            (&[""], Text),
            (&["application/openmetrics-text"], OpenMetrics),
            (&["application/openmetrics-text; version=\"1.0.0\"; charset=utf-8"], OpenMetrics),
            (&["Application/OpenMetrics-Text;Version=0.0.1"], EarlyOpenMetrics),
            (&["application/openmetrics-text;version=2.0.0"], Text),
            (&[PROMETHEUS_2], OpenMetrics),
            (&[PROMETHEUS_3], OpenMetrics),
            (&["text/plain;version=0.0.4;q=0.3", "application/openmetrics-text;q=0.4"], OpenMetrics),
            (&["application/openmetrics-text;q=0.3,text/plain;q=0.4"], Text),
            (&["text/plain,application/openmetrics-text"], Text),
            (&["application/openmetrics-text,text/plain"], OpenMetrics),
            (&["application/openmetrics-text;q=0,text/plain;q=0.1"], Text),
            (&["application/openmetrics-text;q=0"], Text),
            (&["application/openmetrics-text;q=much"], Text),
        ] {
            assert_eq!(wanted(accept), format, "{accept:?}");
        }
    }

    #[test]
    fn samples_are_the_same_and_counters_are_described_by_their_whole_name() {
        let mut registry = Registry::default();
        registry.register("reads", "Reads", Counter::<u64>::default());
        registry.register("reads_open", "Open reads", Gauge::<i64>::default());
        registry.register("read_seconds", "Time", Histogram::new([1.0]));
        let open_metrics = "# HELP reads Reads.\n# TYPE reads counter\nreads_total 0\n\
            # HELP reads_open Open reads.\n# TYPE reads_open gauge\nreads_open 0\n\
            # HELP read_seconds Time.\n# TYPE read_seconds histogram\nread_seconds_sum 0.0\nread_seconds_count 0\n\
            read_seconds_bucket{le=\"1.0\"} 0\nread_seconds_bucket{le=\"+Inf\"} 0\n# EOF\n";
        assert_eq!(ScrapeFormat::OpenMetrics.write(&registry), open_metrics);
        assert_eq!(ScrapeFormat::EarlyOpenMetrics.write(&registry), open_metrics);
        let text = open_metrics
            .replace(" reads Reads", " reads_total Reads")
            .replace(" reads counter", " reads_total counter");
        assert_eq!(ScrapeFormat::Text.write(&registry), text.replace("# EOF\n", ""));
    }
}
