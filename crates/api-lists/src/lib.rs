//! Lists of the Kubernetes API, read object by object: no list is ever in memory as a whole.
//!
//! In: the text of each page. Out: what is kept of its objects, and the token of the next page. A response that is not the list of the
//! requested kind is an error, never an empty list: who follows a list gives up every object that it lacks. A list has [`ListLimits`], which all of
//! its pages share.

mod page;

use std::cell::{Cell, RefCell};
use std::io::{self, BufReader, Read};

use serde::de::DeserializeSeed as _;
use serde_json::Value;

/// How many pages a list may have. With selectors, an API server may send pages without objects.
const MOST_PAGES: usize = 1000;
/// How many bytes one object may have. The store behind an API server takes 1.5 MiB.
const MOST_OBJECT: u64 = 4 << 20;
/// How many characters of another kind an error shows.
const MOST_KIND: usize = 100;

/// How much a list may have, all pages together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListLimits {
    /// How many objects.
    pub objects: usize,
    /// How many bytes, as JSON.
    pub bytes: u64,
}

impl ListLimits {
    /// For the pods of one node. A kubelet starts a few hundred at most.
    pub const OF_NODE: Self = Self { objects: 5000, bytes: 64 << 20 };
    /// For nodes, or what each node has one of. The largest clusters have 65,000.
    pub const OF_NODES: Self = Self { objects: 100_000, bytes: 8 << 30 };
}

/// Decides what is kept of the objects of a list.
pub trait Keep {
    /// What is kept of one.
    type Kept;

    /// What is kept of an object according to its metadata alone, which come first: the rest is passed over then.
    fn by_metadata(&self, _metadata: &Value) -> Option<Self::Kept> {
        None
    }

    /// What is kept of an object.
    fn of(&self, object: &Value) -> Option<Self::Kept>;
}

impl<T, F: Fn(&Value) -> Option<T>> Keep for F {
    type Kept = T;

    fn of(&self, object: &Value) -> Option<T> {
        self(object)
    }
}

/// What was kept of a page, what continues it, and which version it shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page<T> {
    /// What was kept.
    pub kept: Vec<T>,
    /// The token of the next page; none on the last one.
    pub rest: Option<String>,
    /// The version of the collection.
    pub version: String,
}

/// Why a response is not a page of the list.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ListError {
    /// It is something else.
    #[error("the response is not a {kind}: {why}")]
    Other {
        /// The list's kind.
        kind: &'static str,
        /// What it is instead.
        why: String,
    },
    /// The list has too much.
    #[error("the {kind} has more than {most}, the limit of a list; is this the API server?")]
    TooLarge {
        /// The list's kind.
        kind: &'static str,
        /// The limit and its unit.
        most: String,
    },
}

/// A list whose pages are being read.
#[derive(Debug)]
pub struct Listing {
    kind: &'static str,
    limits: ListLimits,
    pages: usize,
    budget: Budget,
}

/// What is left, and what went beyond it.
#[derive(Debug)]
struct Budget {
    objects: Cell<usize>,
    bytes: Cell<u64>,
    /// Of the object that is being read.
    object: Cell<u64>,
    exceeded: RefCell<Option<String>>,
}

impl Listing {
    /// No page yet, of a list of this kind, such as `PodList`.
    #[must_use]
    pub const fn new(kind: &'static str, limits: ListLimits) -> Self {
        let budget = Budget {
            objects: Cell::new(limits.objects),
            bytes: Cell::new(limits.bytes),
            object: Cell::new(MOST_OBJECT),
            exceeded: RefCell::new(None),
        };
        Self { kind, limits, pages: 0, budget }
    }

    /// How many bytes the next page may have.
    #[must_use]
    pub const fn left(&self) -> u64 {
        self.budget.bytes.get()
    }

    /// Reads the next page.
    ///
    /// # Errors
    /// It is something else, or the list reached a limit.
    pub fn page<K: Keep>(&mut self, text: impl Read, keep: &K) -> Result<Page<K::Kept>, ListError> {
        let kind = self.kind;
        if self.pages == MOST_PAGES {
            return Err(ListError::TooLarge { kind, most: format!("{MOST_PAGES} pages") });
        }
        self.pages += 1;
        self.budget.object.set(MOST_OBJECT);
        let text = BufReader::new(Counted { text, limits: self.limits, budget: &self.budget });
        let seed = page::PageSeed { keep, limits: self.limits, budget: &self.budget };
        let mut reader = serde_json::Deserializer::from_reader(text);
        let read = seed.deserialize(&mut reader).and_then(|page| reader.end().map(|()| page));
        if let Some(most) = self.budget.exceeded.take() {
            return Err(ListError::TooLarge { kind, most });
        }
        let other = |why: String| ListError::Other { kind, why };
        let page = read.map_err(|error| other(error.to_string()))?;
        match page.kind {
            Some(found) if found == kind => {}
            Some(found) => {
                return Err(other(format!(
                    "its kind is {:?}",
                    found.chars().take(MOST_KIND).collect::<String>()
                )));
            }
            None => return Err(other("it has no kind".to_owned())),
        }
        let kept = page.items.ok_or_else(|| other("it has no items".to_owned()))?;
        Ok(Page { kept, rest: page.rest, version: page.version })
    }
}

/// Text whose bytes are counted.
struct Counted<'a, R> {
    text: R,
    limits: ListLimits,
    budget: &'a Budget,
}

impl<R: Read> Read for Counted<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.text.read(into)?;
        let bytes = count as u64;
        for (left, most, what) in [
            (&self.budget.bytes, self.limits.bytes, "bytes"),
            (&self.budget.object, MOST_OBJECT, "bytes in one object"),
        ] {
            match left.get().checked_sub(bytes) {
                Some(rest) => left.set(rest),
                None => return Err(io::Error::other(self.budget.exceed(format!("{most} {what}")))),
            }
        }
        Ok(count)
    }
}

impl Budget {
    /// Notes which limit was reached; the same text for the parser, which ends with it.
    fn exceed(&self, most: String) -> String {
        self.exceeded.borrow_mut().get_or_insert(most).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const KIND: &str = "PodList";
    const SMALL: ListLimits = ListLimits { objects: 3, bytes: 1 << 20 };

    fn names(pod: &Value) -> Option<String> {
        pod["metadata"]["name"].as_str().map(str::to_owned)
    }

    /// Text that comes in pieces of seven bytes.
    struct Pieces<'a>(&'a [u8]);

    impl Read for Pieces<'_> {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            let room = into.len().min(7);
            self.0.read(&mut into[..room])
        }
    }

    fn read(text: &str) -> Result<Page<String>, String> {
        Listing::new(KIND, SMALL).page(Pieces(text.as_bytes()), &names).map_err(|error| error.to_string())
    }

    #[test]
    fn a_list_is_read_item_by_item_in_pieces_of_any_size() {
        let list = r#"{"kind":"PodList","metadata":{"resourceVersion":"7","continue":"abc"},
            "items":[{"metadata":{"name":"a"}},{"metadata":{}},{"metadata":{"name":"\u00fc b"}}],"more":[{}]}"#;
        let page = read(list).expect("a list");
        assert_eq!((page.rest.as_deref(), page.version.as_str()), (Some("abc"), "7"));
        assert_eq!(page.kept, ["a", "ü b"]);
        // The API server writes null for none, and any order is JSON.
        let empty = read(r#"{"items":null,"metadata":{"continue":""},"kind":"PodList"}"#).expect("a list");
        assert_eq!((empty.kept.len(), empty.rest), (0, None));
    }

    #[test]
    fn what_is_not_the_list_is_an_error_and_never_an_empty_list() {
        for (text, words) in [
            ("{}", "it has no kind"),
            (r#"{"items":[]}"#, "it has no kind"),
            (r#"{"kind":"PodList","metadata":{}}"#, "it has no items"),
            (r#"{"kind":"Status","status":"Success"}"#, "its kind is \"Status\""),
            (r#"{"kind":"NodeList","items":[]}"#, "its kind is \"NodeList\""),
            (r#"{"kind":"Pod","metadata":{"name":"a"}}"#, "its kind is \"Pod\""),
            (r#"{"kind":"Table","rows":[],"items":[]}"#, "its kind is \"Table\""),
            (r#"{"kind":"PodList","items":{}}"#, "expected a list of objects"),
            (r#"{"kind":"PodList","items":[null]}"#, "expected an object"),
            (r#"{"kind":"PodList","items":[7]}"#, "expected an object"),
            (r#"{"kind":7,"items":[]}"#, "expected a string"),
            (r#"{"kind":"PodList","items":[{}],"items":null}"#, "duplicate field `items`"),
            (r#"{"kind":"PodList","items":[]} {}"#, "trailing characters"),
            (r#"{"kind":"PodList","items":[{"metadata":{"name":"a"}},"#, "EOF"),
            ("[]", "expected a list"),
            ("", "EOF"),
        ] {
            let error = read(text).expect_err(text);
            assert!(
                error.starts_with("the response is not a PodList: ") && error.contains(words),
                "{text}: {error}"
            );
        }
        let long =
            read(&format!(r#"{{"kind":"\u001b{}","items":[]}}"#, "x".repeat(500))).expect_err("no list");
        assert!(long.len() < 200 && !long.contains('\u{1b}'), "{long:?}");
    }

    #[test]
    fn objects_are_whole_but_for_their_managed_fields() {
        let whole = |object: &Value| Some(object.clone());
        let read = |object: &str| {
            let list = format!(r#"{{"kind":"PodList","items":[{object}]}}"#);
            Listing::new(KIND, SMALL).page(list.as_bytes(), &whole).map(|page| page.kept)
        };
        let object = r#"{"metadata":{"name":"a","managedFields":[{"f":{"b":["}"]}}],"labels":{"managedFields":"x"}},"spec":{"managedFields":[1]}}"#;
        let wanted = json!({"metadata": {"name": "a", "labels": {"managedFields": "x"}}, "spec": {"managedFields": [1]}});
        assert_eq!(read(object), Ok(vec![wanted]));
        for invalid in ["7", r#"{"metadata":7}"#, r#"{"metadata":{"managedFields":[}}"#] {
            assert!(read(invalid).is_err(), "{invalid}");
        }
    }

    /// Keeps names, of known objects according to the metadata alone.
    struct Names;

    impl Keep for Names {
        type Kept = String;

        fn by_metadata(&self, metadata: &Value) -> Option<String> {
            (metadata["name"] == "known").then(|| "known, by its metadata".to_owned())
        }

        fn of(&self, object: &Value) -> Option<String> {
            Some(format!("{} {}", object["metadata"]["name"], object["spec"]))
        }
    }

    #[test]
    fn the_rest_of_a_known_object_is_passed_over() {
        let list = r#"{"kind":"PodList","items":[{"metadata":{"name":"known"},"spec":{"a":[1,{"b":"}"}]},"status":{}},
            {"spec":1,"metadata":{"name":"known"}},{"metadata":{"name":"new"},"spec":2}]}"#;
        let page = Listing::new(KIND, SMALL).page(list.as_bytes(), &Names).expect("a list");
        assert_eq!(page.kept, ["known, by its metadata", "known, by its metadata", "\"new\" 2"]);
    }

    fn page(objects: usize) -> String {
        json!({"kind": KIND, "metadata": {"continue": "x"}, "items": vec![json!({"metadata": {"name": "a"}}); objects]}).to_string()
    }

    #[test]
    fn all_pages_together_have_limits() {
        let mut listing = Listing::new(KIND, SMALL);
        let mut next = |objects| listing.page(page(objects).as_bytes(), &names).map(|page| page.kept.len());
        assert_eq!((next(2), next(1), next(0)), (Ok(2), Ok(1), Ok(0)));
        let error = next(1).expect_err("too many").to_string();
        assert_eq!(
            error,
            "the PodList has more than 3 objects, the limit of a list; is this the API server?"
        );

        let most = |limits: ListLimits, text: &str| {
            let mut listing = Listing::new(KIND, limits);
            for page in 0.. {
                match listing.page(text.as_bytes(), &names) {
                    Ok(_) => {}
                    Err(ListError::TooLarge { most, .. }) => return (page, most),
                    Err(other) => panic!("{other}"),
                }
            }
            unreachable!("it ends")
        };
        let large = ListLimits { objects: 1 << 30, bytes: 1 << 40 };
        assert_eq!(most(large, &page(0)), (MOST_PAGES, "1000 pages".to_owned()));
        let bytes = page(1).len() as u64;
        let few = ListLimits { bytes: 3 * bytes + 1, ..large };
        assert_eq!(most(few, &page(1)), (3, format!("{} bytes", few.bytes)));
        let long = page(0).replace('x', &"x".repeat(5 << 20));
        assert_eq!(most(large, &long), (0, "4194304 bytes in one object".to_owned()));
        let object = page(1).replace("\"a\"", &format!("\"a\",\"y\":[{}1]", "1,".repeat(3 << 20)));
        assert_eq!(most(large, &object).1, "4194304 bytes in one object");
    }
}
