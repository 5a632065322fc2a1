//! Lists and watches against servers that answer with something else.

mod lists;
