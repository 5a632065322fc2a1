//! What the program prints, and what it must not depend on.

mod dependencies;
mod schema;
