//! What this crate writes for people.

mod settings_docs;
