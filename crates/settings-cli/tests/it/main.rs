//! What this crate writes for people.

mod reference;
mod settings_docs;
