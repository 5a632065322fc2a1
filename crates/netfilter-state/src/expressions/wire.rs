//! Bytes of netlink: messages of nested attributes, written and read.

use super::abi::{NFTABLES, attribute, family, flags, kind};
use crate::ruleset::{name_bytes, name_of_bytes};

/// Size of `nlmsghdr`.
const HEADER: usize = 16;
/// Size of `nfgenmsg`, behind the header of every netfilter message.
const NETFILTER_HEADER: usize = 4;
/// Size of the header of an attribute.
const ATTRIBUTE_HEADER: usize = 4;
/// The attribute holds attributes.
const NESTED: u16 = 0x8000;
/// The type without its flags.
const TYPE_MASK: u16 = 0x3fff;

/// Writes messages one behind the other.
#[derive(Debug, Default)]
pub(crate) struct MessageWriter {
    bytes: Vec<u8>,
    /// Where the last message starts.
    last: usize,
    /// An attribute or message is longer than its length field can say.
    too_long: bool,
}

impl MessageWriter {
    /// Appends a message: `nlmsghdr`, `nfgenmsg` and the attributes that `body` writes.
    pub(crate) fn message(&mut self, head: Head, body: impl FnOnce(&mut Self)) {
        let start = self.bytes.len();
        self.last = start;
        self.raw(&[0; 4]);
        self.raw(&head.kind.to_ne_bytes());
        self.raw(&head.flags.to_ne_bytes());
        self.raw(&head.sequence.to_ne_bytes());
        self.raw(&[0; 4]);
        self.raw(&[head.family, 0]);
        self.raw(&head.resource.to_be_bytes());
        body(self);
        match u32::try_from(self.bytes.len().saturating_sub(start)) {
            Ok(length) => write_at(&mut self.bytes, start, &length.to_ne_bytes()),
            Err(_) => self.too_long = true,
        }
    }

    /// An attribute of bytes.
    pub(crate) fn bytes(&mut self, kind: u16, value: &[u8]) {
        self.attribute(kind, |writer| writer.raw(value));
    }

    /// An attribute of 32 bits; netfilter's are in network order.
    pub(crate) fn u32(&mut self, kind: u16, value: u32) {
        self.bytes(kind, &value.to_be_bytes());
    }

    /// An attribute of 64 bits.
    pub(crate) fn u64(&mut self, kind: u16, value: u64) {
        self.bytes(kind, &value.to_be_bytes());
    }

    /// A text, with the NUL that ends it.
    pub(crate) fn text(&mut self, kind: u16, value: &str) {
        self.attribute(kind, |writer| {
            writer.bytes.extend(name_bytes(value));
            writer.raw(&[0]);
        });
    }

    /// Data of nf_tables: an attribute of a value.
    pub(crate) fn value(&mut self, kind: u16, value: &[u8]) {
        self.nested(kind, |data| data.bytes(attribute::data::VALUE, value));
    }

    /// An attribute of attributes.
    pub(crate) fn nested(&mut self, kind: u16, body: impl FnOnce(&mut Self)) {
        self.attribute(kind | NESTED, body);
    }

    /// Adds a flag to the last message.
    pub(crate) fn flag_last(&mut self, flag: u16) {
        let offset = self.last.saturating_add(6);
        let flags = read_array(&self.bytes, offset).map_or(0, u16::from_ne_bytes);
        write_at(&mut self.bytes, offset, &(flags | flag).to_ne_bytes());
    }

    /// The bytes; `None` when something is longer than its length field can say.
    pub(crate) fn finish(self) -> Option<Vec<u8>> {
        (!self.too_long).then_some(self.bytes)
    }

    /// What was written, in its exact length, as [`finish`](Self::finish) says it; the room stays for what is written next.
    pub(crate) fn take(&mut self) -> Option<Vec<u8>> {
        let written = (!self.too_long).then(|| self.bytes.as_slice().into());
        self.bytes.clear();
        (self.last, self.too_long) = (0, false);
        written
    }

    /// What was written, read back.
    pub(crate) fn attributes(&self) -> Attributes<'_> {
        Attributes { bytes: &self.bytes }
    }

    fn attribute(&mut self, kind: u16, body: impl FnOnce(&mut Self)) {
        let start = self.bytes.len();
        self.raw(&[0; 2]);
        self.raw(&kind.to_ne_bytes());
        body(self);
        match u16::try_from(self.bytes.len().saturating_sub(start)) {
            Ok(length) => write_at(&mut self.bytes, start, &length.to_ne_bytes()),
            Err(_) => self.too_long = true,
        }
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    /// Bytes as they are, without padding.
    pub(crate) fn raw(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }
}

/// What the headers of a message say.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Head {
    pub(crate) kind: u16,
    pub(crate) flags: u16,
    pub(crate) sequence: u32,
    pub(crate) family: u8,
    pub(crate) resource: u16,
}

impl Head {
    /// That of the message of this type that begins or ends a transaction of nf_tables.
    pub(crate) const fn of_transaction(kind: u16, sequence: u32) -> Self {
        Self { kind, flags: flags::REQUEST, sequence, family: family::UNSPECIFIED, resource: NFTABLES }
    }
}

/// A message as received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message<'a> {
    /// Its type.
    pub kind: u16,
    /// Its flags.
    pub flags: u16,
    /// The number of the request it answers.
    pub sequence: u32,
    /// The netfilter family; 0 in messages that have none.
    pub family: u8,
    /// What follows the headers: attributes.
    body: &'a [u8],
}

impl<'a> Message<'a> {
    /// Its attributes.
    pub(crate) fn attributes(&self) -> Attributes<'a> {
        Attributes { bytes: self.body.get(NETFILTER_HEADER..).unwrap_or_default() }
    }

    /// What follows netlink's own header: a header of the protocol, then attributes.
    #[must_use]
    pub const fn payload(&self) -> &'a [u8] {
        self.body
    }

    /// Appends the message, for [`Messages`] to read again.
    pub(crate) fn append_to(&self, bytes: &mut Vec<u8>) {
        let length = HEADER.saturating_add(self.body.len());
        bytes.extend(u32::try_from(length).unwrap_or(u32::MAX).to_ne_bytes());
        bytes.extend(self.kind.to_ne_bytes());
        bytes.extend(self.flags.to_ne_bytes());
        bytes.extend(self.sequence.to_ne_bytes());
        // A socket's port, which no reader uses.
        bytes.extend([0; 4]);
        bytes.extend(self.body);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }

    /// Whether the kernel reports that its dump changed concurrently.
    #[must_use]
    pub const fn is_interrupted(&self) -> bool {
        self.flags & flags::DUMP_INTERRUPTED != 0
    }

    /// What an error message or the end of a dump says.
    #[must_use]
    pub fn answer(&self) -> Option<AnswerEnd> {
        let (without_code, text) = match self.kind {
            kind::DONE => (0, None),
            kind::ERROR => (i32::MIN, self.explanation()),
            _ => return None,
        };
        let code = read_array(self.body, 0).map_or(without_code, i32::from_ne_bytes);
        Some(AnswerEnd { sequence: self.sequence, code, text })
    }

    /// The kernel's words about an error: behind the request, or only its header, that the message repeats.
    fn explanation(&self) -> Option<String> {
        if self.flags & flags::ACK_ATTRIBUTES == 0 {
            return None;
        }
        let repeated = if self.flags & flags::CAPPED != 0 {
            HEADER
        } else {
            let length = read_array(self.body, 4).map(u32::from_ne_bytes)?;
            usize::try_from(length).ok()?.checked_next_multiple_of(4)?
        };
        let bytes = self.body.get(repeated.checked_add(4)?..)?;
        (Attributes { bytes }).find(attribute::ERROR_TEXT)?.text().map(String::from)
    }
}

/// The end of an answer: a confirmation, the end of a dump, or an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AnswerEnd {
    /// The number of the request.
    pub sequence: u32,
    /// 0, or a negative error number.
    pub code: i32,
    /// The kernel's words.
    pub text: Option<String>,
}

/// The messages in a received datagram.
#[derive(Debug, Clone, Copy)]
pub struct Messages<'a> {
    bytes: &'a [u8],
}

impl<'a> Messages<'a> {
    /// The messages in these bytes.
    #[must_use]
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }
}

impl<'a> Iterator for Messages<'a> {
    type Item = Message<'a>;

    /// The next message. Bytes that are none end the iteration.
    fn next(&mut self) -> Option<Message<'a>> {
        let length = usize::try_from(u32::from_ne_bytes(read_array(self.bytes, 0)?)).ok()?;
        let body = self.bytes.get(HEADER..length)?;
        let message = Message {
            kind: u16::from_ne_bytes(read_array(self.bytes, 4)?),
            flags: u16::from_ne_bytes(read_array(self.bytes, 6)?),
            sequence: u32::from_ne_bytes(read_array(self.bytes, 8)?),
            family: body.first().copied().unwrap_or_default(),
            body,
        };
        self.bytes =
            length.checked_next_multiple_of(4).and_then(|end| self.bytes.get(end..)).unwrap_or_default();
        Some(message)
    }
}

/// The attributes of a message, or of an attribute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Attributes<'a> {
    bytes: &'a [u8],
}

impl<'a> Attributes<'a> {
    /// Their bytes.
    pub(crate) const fn raw(self) -> &'a [u8] {
        self.bytes
    }

    /// The first attribute of this type.
    pub(crate) fn find(&self, kind: u16) -> Option<Attribute<'a>> {
        let mut all = *self;
        all.find_map(|(found, value)| (found == kind).then_some(value))
    }

    /// Likewise as a number, ...
    pub(crate) fn u32(&self, kind: u16) -> Option<u32> {
        self.find(kind)?.u32()
    }

    pub(crate) fn u64(&self, kind: u16) -> Option<u64> {
        self.find(kind)?.u64()
    }

    /// ... a text, ...
    pub(crate) fn text(&self, kind: u16) -> Option<&'a str> {
        self.find(kind)?.text()
    }

    /// ... a name that a program chose, ...
    pub(crate) fn name(&self, kind: u16) -> Option<String> {
        self.find(kind).map(Attribute::name)
    }

    /// ... attributes, ...
    pub(crate) fn nested(&self, kind: u16) -> Option<Self> {
        self.find(kind).map(Attribute::attributes)
    }

    /// ... and data of nf_tables.
    pub(crate) fn value(&self, kind: u16) -> Option<&'a [u8]> {
        Some(self.nested(kind)?.find(attribute::data::VALUE)?.0)
    }
}

impl<'a> Iterator for Attributes<'a> {
    type Item = (u16, Attribute<'a>);

    /// The next attribute, with its type. Bytes that are none end the iteration.
    fn next(&mut self) -> Option<Self::Item> {
        let length = usize::from(u16::from_ne_bytes(read_array(self.bytes, 0)?));
        let kind = u16::from_ne_bytes(read_array(self.bytes, 2)?) & TYPE_MASK;
        let value = self.bytes.get(ATTRIBUTE_HEADER..length)?;
        self.bytes = self.bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, Attribute(value)))
    }
}

/// The value of an attribute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Attribute<'a>(pub(crate) &'a [u8]);

impl<'a> Attribute<'a> {
    pub(crate) fn u32(self) -> Option<u32> {
        <[u8; 4]>::try_from(self.0).ok().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(self) -> Option<u64> {
        <[u8; 8]>::try_from(self.0).ok().map(u64::from_be_bytes)
    }

    /// A text, up to its NUL if it has one.
    pub(crate) fn text(self) -> Option<&'a str> {
        std::str::from_utf8(self.text_bytes()).ok()
    }

    /// A name that a program chose: of any bytes, up to its NUL if it has one.
    pub(crate) fn name(self) -> String {
        name_of_bytes(self.text_bytes())
    }

    /// The bytes of a text that is only compared with others: whether it is UTF-8 is not asked.
    pub(crate) fn text_bytes(self) -> &'a [u8] {
        let end = self.0.iter().position(|byte| *byte == 0);
        end.and_then(|end| self.0.get(..end)).unwrap_or(self.0)
    }

    pub(crate) fn attributes(self) -> Attributes<'a> {
        Attributes { bytes: self.0 }
    }
}

/// The bytes of a fixed size that stand at an offset.
pub(crate) fn read_array<const N: usize>(bytes: &[u8], offset: usize) -> Option<[u8; N]> {
    bytes.get(offset..)?.first_chunk().copied()
}

/// Puts a field where it belongs; none that would end behind the bytes.
pub(crate) fn write_at(bytes: &mut [u8], offset: usize, field: &[u8]) {
    let hole = bytes.get_mut(offset..).and_then(|rest| rest.get_mut(..field.len()));
    if let Some(hole) = hole {
        hole.copy_from_slice(field);
    }
}

/// The number of which these are the bytes, the most significant first.
pub(crate) fn big_endian(bytes: impl Iterator<Item = u8>) -> u128 {
    bytes.fold(0, |number, byte| number << 8 | u128::from(byte))
}

/// A number of four bytes, in the order of this machine.
pub(crate) fn number(value: &[u8]) -> Option<u32> {
    <[u8; 4]>::try_from(value).ok().map(u32::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HEAD: Head = Head { kind: 0xa06, flags: 5, sequence: 7, family: 2, resource: 0 };

    #[test]
    fn a_message_is_laid_out_as_the_kernel_wants_it() {
        let mut writer = MessageWriter::default();
        writer.message(HEAD, |body| {
            body.text(1, "nat");
            body.nested(4, |inner| inner.bytes(1, &[6]));
        });
        let wanted = [
            40, 0, 0, 0, 6, 10, 5, 0, 7, 0, 0, 0, 0, 0, 0, 0, // nlmsghdr
            2, 0, 0, 0, // nfgenmsg
            8, 0, 1, 0, b'n', b'a', b't', 0, // a text
            12, 0, 4, 0x80, 5, 0, 1, 0, 6, 0, 0, 0, // a nested attribute, padded
        ];
        #[cfg(target_endian = "little")]
        assert_eq!(writer.finish().unwrap(), wanted);
    }

    #[test]
    fn what_does_not_fit_its_length_is_refused() {
        let mut writer = MessageWriter::default();
        writer.message(HEAD, |body| body.bytes(1, &[0; 70_000]));
        assert_eq!(writer.finish(), None);
    }

    #[test]
    fn what_is_taken_is_gone_and_what_was_too_long_with_it() {
        let mut writer = MessageWriter::default();
        writer.bytes(1, &[0; 70_000]);
        assert_eq!(writer.take(), None);
        for byte in [6, 7] {
            writer.bytes(1, &[byte]);
            let taken = writer.take().unwrap();
            let (kind, value) = Attribute(&taken).attributes().next().unwrap();
            assert_eq!((taken.len(), taken.capacity(), kind, value.0), (8, 8, 1, &[byte][..]));
        }
    }

    #[test]
    fn a_dump_that_changed_meanwhile_says_so() {
        let interrupted = |flags: u16| {
            let mut writer = MessageWriter::default();
            writer.message(Head { flags, ..HEAD }, |_| {});
            Messages::new(&writer.finish().unwrap()).next().unwrap().is_interrupted()
        };
        assert!(interrupted(flags::DUMP_INTERRUPTED) && interrupted(flags::DUMP_INTERRUPTED | flags::ACK));
        assert!(!interrupted(0) && !interrupted(flags::ACK | flags::DUMP));
    }

    #[test]
    fn an_error_carries_the_kernels_words() {
        let answer = |kind: u16, flags: u16, repeated: u32| {
            let mut body = Vec::new();
            body.extend((-2_i32).to_ne_bytes());
            body.extend(repeated.to_ne_bytes());
            body.resize(4 + usize::try_from(repeated.next_multiple_of(4)).unwrap(), 0);
            body.extend([10, 0, 1, 0]);
            body.extend(b"oh no\0\0\0");
            let mut bytes = Vec::new();
            bytes.extend(u32::try_from(HEADER + body.len()).unwrap().to_ne_bytes());
            bytes.extend(kind.to_ne_bytes());
            bytes.extend(flags.to_ne_bytes());
            bytes.extend(9_u32.to_ne_bytes());
            bytes.extend([0; 4]);
            bytes.extend(body);
            Messages::new(&bytes).next().unwrap().answer()
        };
        let says =
            |text: Option<&str>| Some(AnswerEnd { sequence: 9, code: -2, text: text.map(String::from) });
        let header = u32::try_from(HEADER).unwrap();
        assert_eq!(answer(kind::ERROR, flags::CAPPED | flags::ACK_ATTRIBUTES, header), says(Some("oh no")));
        assert_eq!(answer(kind::ERROR, flags::CAPPED, header), says(None));
        for request in [header, header + 4, header + 7] {
            assert_eq!(answer(kind::ERROR, flags::ACK_ATTRIBUTES, request), says(Some("oh no")));
            assert_eq!(answer(kind::ERROR, 0, request), says(None));
        }
        assert_eq!(answer(kind::DONE, flags::ACK_ATTRIBUTES, header), says(None));
        assert_eq!(answer(kind::NEW_TABLE, flags::ACK_ATTRIBUTES, header), None);
    }

    proptest! {
        #[test]
        fn any_bytes_can_be_read(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            for message in Messages::new(&bytes) {
                let _ = message.answer();
                for (_, value) in message.attributes() {
                    let _ = (value.u32(), value.u64(), value.text(), value.attributes().count());
                }
            }
        }
    }
}
