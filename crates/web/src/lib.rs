//! The program behind the web page: a question in, an answer out, both JSON.
//!
//! It is `redirectctl`'s plan, diff and trace without a machine: the pasted text is read, planned and traced by the same
//! functions ([`presentation`]), so page and program say the same. A test compares them. The page is in `static/`; it puts what is
//! answered on the screen and concludes nothing.

mod answer;
mod input;
mod rules;

pub use answer::{Diff, PageAnswer, PageQuestion, PageTrace, answer};
pub use input::{Form, Side};
pub use presentation::packet::PacketQuestion;
pub use rules::{PageChain, PageTable, Row};

/// The answer to a question in JSON. What is not a question is answered as one about nothing, with the error.
#[must_use]
pub fn answer_json(question: &str) -> String {
    let answered = match serde_json::from_str(question) {
        Ok(question) => answer(&question),
        Err(error) => PageAnswer::not_understood(&error.to_string()),
    };
    // Strings and numbers only: nothing in it can fail.
    serde_json::to_string(&answered).unwrap_or_default()
}

#[cfg(target_arch = "wasm32")]
mod exported {
    use wasm_bindgen::prelude::wasm_bindgen;

    /// What the page calls.
    #[wasm_bindgen]
    #[must_use]
    pub fn answer(question: &str) -> String {
        super::answer_json(question)
    }
}
