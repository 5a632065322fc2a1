//! What the plugin makes of any input.

mod any_input;
mod second_opinion;
