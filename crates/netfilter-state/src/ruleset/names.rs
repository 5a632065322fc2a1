//! Names that other programs chose. For the kernel they are bytes; here they are texts, each of which stands for one name only.

use std::fmt;

/// What stands for a byte that belongs to no UTF-8: a character of an area for private use, this one or one of the 255 behind.
const FIRST_BYTE: u32 = 0x10_0000;

/// The byte that a character stands for.
fn byte(c: char) -> Option<u8> {
    u8::try_from(u32::from(c).checked_sub(FIRST_BYTE)?).ok()
}

/// The text for a name of the kernel: itself, if that is UTF-8. A name that has the characters that stand for bytes is written byte by
/// byte, too, so that no two names have one text.
#[must_use]
pub fn name_of_bytes(name: &[u8]) -> String {
    let is_plain = |text: &&str| text.is_ascii() || text.chars().all(|c| byte(c).is_none());
    if let Some(text) = std::str::from_utf8(name).ok().filter(is_plain) {
        return text.into();
    }
    let each = |byte: &u8| {
        let beyond = char::from_u32(FIRST_BYTE.saturating_add(u32::from(*byte)));
        beyond.filter(|_| !byte.is_ascii()).unwrap_or(char::from(*byte))
    };
    name.iter().map(each).collect()
}

/// The bytes of a name.
pub fn name_bytes(name: &str) -> impl Iterator<Item = u8> {
    name.chars().flat_map(|c| {
        let mut room = [0; 4];
        let length = match byte(c) {
            Some(byte) => {
                room = [byte, 0, 0, 0];
                1
            }
            None => c.encode_utf8(&mut room).len(),
        };
        room.into_iter().take(length)
    })
}

/// Another program's name, limited in length and free of anything that reads as another word: what is not printable ASCII is escaped.
pub struct Plain<'a>(pub &'a str);

impl Plain<'_> {
    /// As many characters as a table's or chain's name is printed with.
    const LONGEST: usize = 64;

    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for c in self.0.chars().take(Self::LONGEST) {
            match byte(c) {
                Some(byte) => text.push_str(&format!("\\x{byte:02x}")),
                None if c == ' ' || c.is_ascii_graphic() && c != '\\' => text.push(c),
                None => text.extend(c.escape_default()),
            }
        }
        text
    }
}

impl fmt::Display for Plain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_are_printed_escaped() {
        for (name, printed) in [
            (&b"plain name"[..], "plain name"),
            (b"X\xff", r"X\xff"),
            (br"X\xff", r"X\\xff"),
            (b"a\nb\x1b[2J", r"a\nb\u{1b}[2J"),
            ("n\u{e4}me".as_bytes(), r"n\u{e4}me"),
            ("\u{1000ff}".as_bytes(), r"\xf4\x80\x83\xbf"),
        ] {
            assert_eq!(Plain(&name_of_bytes(name)).to_string(), printed);
        }
    }

    proptest! {
        #[test]
        fn every_name_has_a_text_of_its_own(
            name in prop_oneof![any::<Vec<u8>>(), any::<String>().prop_map(String::into_bytes)],
        ) {
            prop_assert_eq!(name_bytes(&name_of_bytes(&name)).collect::<Vec<u8>>(), name);
        }
    }
}
