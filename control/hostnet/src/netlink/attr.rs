//! Attributes (type, length, value) as netlink carries them. Used where the
//! message family has no typed crate.

const NLA_TYPE_MASK: u16 = 0x3fff;

/// One attribute: type without its flag bits, and value.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attr<'a> {
    pub(crate) kind: u16,
    pub(crate) value: &'a [u8],
}

/// Walks over attributes; stops at the first that does not fit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attrs<'a>(pub(crate) &'a [u8]);

impl<'a> Iterator for Attrs<'a> {
    type Item = Attr<'a>;

    fn next(&mut self) -> Option<Attr<'a>> {
        let length = u16::from_ne_bytes([*self.0.first()?, *self.0.get(1)?]) as usize;
        let kind = u16::from_ne_bytes([*self.0.get(2)?, *self.0.get(3)?]) & NLA_TYPE_MASK;
        let value = self.0.get(4..length)?;
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(Attr { kind, value })
    }
}

/// Walks over attributes as they lie, headers included.
pub(crate) fn raw(mut bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let length = u16::from_ne_bytes([*bytes.first()?, *bytes.get(1)?]) as usize;
        let attribute = bytes.get(..length).filter(|attribute| attribute.len() >= 4)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(attribute)
    })
}

/// The nested flag of an attribute's type.
const NLA_F_NESTED: u16 = 0x8000;

/// Appends attributes to a message.
#[derive(Debug)]
pub(crate) struct Writer<'a>(pub(crate) &'a mut Vec<u8>);

impl Writer<'_> {
    /// An attribute with its value as bytes.
    pub(crate) fn bytes(&mut self, kind: u16, value: &[u8]) {
        let length = (4 + value.len()) as u16;
        self.0.extend_from_slice(&length.to_ne_bytes());
        self.0.extend_from_slice(&kind.to_ne_bytes());
        self.0.extend_from_slice(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }

    /// A string with the NUL the kernel wants.
    pub(crate) fn string(&mut self, kind: u16, value: &str) {
        let mut bytes = value.as_bytes().to_vec();
        bytes.push(0);
        self.bytes(kind, &bytes);
    }

    /// A number in network byte order, as netfilter uses throughout.
    pub(crate) fn be32(&mut self, kind: u16, value: u32) {
        self.bytes(kind, &value.to_be_bytes());
    }

    /// A 64-bit number in network byte order.
    pub(crate) fn be64(&mut self, kind: u16, value: u64) {
        self.bytes(kind, &value.to_be_bytes());
    }

    /// A 16-bit number in network byte order.
    pub(crate) fn be16(&mut self, kind: u16, value: u16) {
        self.bytes(kind, &value.to_be_bytes());
    }

    /// A number in the machine's byte order, as traffic control uses.
    pub(crate) fn ne32(&mut self, kind: u16, value: u32) {
        self.bytes(kind, &value.to_ne_bytes());
    }

    /// An attribute that holds attributes.
    pub(crate) fn nest(&mut self, kind: u16, fill: impl FnOnce(&mut Writer<'_>)) {
        let start = self.0.len();
        self.0.extend_from_slice(&[0, 0]);
        self.0.extend_from_slice(&(kind | NLA_F_NESTED).to_ne_bytes());
        fill(&mut Writer(self.0));
        let length = (self.0.len() - start) as u16;
        self.0[start..start + 2].copy_from_slice(&length.to_ne_bytes());
    }
}

impl Attr<'_> {
    /// The value as a number in network byte order.
    pub(crate) fn as_be32(&self) -> Option<u32> {
        Some(u32::from_be_bytes(self.value.get(..4)?.try_into().ok()?))
    }

    /// The value as a 64-bit number in network byte order.
    pub(crate) fn as_be64(&self) -> Option<u64> {
        Some(u64::from_be_bytes(self.value.get(..8)?.try_into().ok()?))
    }

    /// The value as a 16-bit number in network byte order.
    pub(crate) fn as_be16(&self) -> Option<u16> {
        Some(u16::from_be_bytes(self.value.get(..2)?.try_into().ok()?))
    }

    /// The value as text, up to the NUL.
    pub(crate) fn as_text(&self) -> String {
        let end = self.value.iter().position(|byte| *byte == 0).unwrap_or(self.value.len());
        String::from_utf8_lossy(&self.value[..end]).into_owned()
    }
}

impl<'a> Attrs<'a> {
    /// The first attribute of a type.
    pub(crate) fn get(self, kind: u16) -> Option<Attr<'a>> {
        let mut attrs = self;
        attrs.find(|attr| attr.kind == kind)
    }
}
