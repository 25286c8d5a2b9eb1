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
