//! Reads the fields of a protobuf message, one after the other. Every length is checked against the message.

use crate::files::error::Problem;

/// A field of a message.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Field<'a> {
    /// Number in the schema.
    pub number: u64,
    /// Offset of the field in the file, in bytes.
    pub offset: u64,
    pub value: FieldValue<'a>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum FieldValue<'a> {
    Varint(u64),
    Fixed64(u64),
    Bytes {
        bytes: &'a [u8],
        /// Offset of the bytes in the file.
        offset: u64,
    },
    Fixed32(u32),
}

/// Iterates over the fields of a message. It ends after an error.
#[derive(Debug, Clone)]
pub(super) struct Fields<'a> {
    bytes: &'a [u8],
    /// Offset of `bytes` in the file.
    offset: u64,
}

/// The offset of a defect in the file, and the defect.
pub(super) type Defect = (u64, Problem);

impl<'a> Fields<'a> {
    /// Reads a message that begins at `offset` of the file.
    pub fn new(bytes: &'a [u8], offset: u64) -> Self {
        Self { bytes, offset }
    }

    fn take(&mut self, len: u64) -> Result<&'a [u8], Defect> {
        let available = self.bytes.len() as u64;
        if len > available {
            return Err((self.offset, Problem::Truncated { needed: len, available }));
        }
        let (taken, rest) = self.bytes.split_at(len as usize);
        self.bytes = rest;
        self.offset += len;
        Ok(taken)
    }

    fn chunk<const N: usize>(&mut self) -> Result<[u8; N], Defect> {
        let mut chunk = [0; N];
        chunk.copy_from_slice(self.take(N as u64)?);
        Ok(chunk)
    }

    fn varint(&mut self) -> Result<u64, Defect> {
        let start = self.offset;
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let [byte] = self.chunk()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err((start, Problem::Other("a number has more than ten bytes")))
    }

    fn field(&mut self) -> Result<Field<'a>, Defect> {
        let offset = self.offset;
        let key = self.varint()?;
        let value = match key & 7 {
            0 => FieldValue::Varint(self.varint()?),
            1 => FieldValue::Fixed64(u64::from_le_bytes(self.chunk()?)),
            2 => {
                let len = self.varint()?;
                let offset = self.offset;
                FieldValue::Bytes { bytes: self.take(len)?, offset }
            }
            5 => FieldValue::Fixed32(u32::from_le_bytes(self.chunk()?)),
            _ => return Err((offset, Problem::Other("a field has an unknown wire type"))),
        };
        Ok(Field { number: key >> 3, offset, value })
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<Field<'a>, Defect>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.bytes.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_err() {
            self.bytes = &[];
        }
        Some(field)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_all_wire_types_are_read_with_their_offsets() {
        let bytes = [
            0x08, 0x96, 0x01, // 1: 150
            0x12, 0x02, b'h', b'i', // 2: "hi"
            0x1d, 0, 0, 0x80, 0x3f, // 3: the bits of 1f32
            0x21, 1, 0, 0, 0, 0, 0, 0, 0, // 4: 1
        ];
        let fields: Vec<_> = Fields::new(&bytes, 100).map(|field| field.expect("valid")).collect();
        let values: Vec<_> = fields.iter().map(|f| (f.number, f.offset, f.value)).collect();
        assert_eq!(
            values,
            [
                (1, 100, FieldValue::Varint(150)),
                (2, 103, FieldValue::Bytes { bytes: b"hi", offset: 105 }),
                (3, 107, FieldValue::Fixed32(1f32.to_bits())),
                (4, 112, FieldValue::Fixed64(1)),
            ]
        );
    }

    #[test]
    fn lengths_beyond_the_message_and_unknown_wire_types_are_refused() {
        let defect = |bytes: &[u8]| Fields::new(bytes, 7).find_map(Result::err);
        let truncated = |needed, available| Some(Problem::Truncated { needed, available });
        assert_eq!(defect(&[0x12, 0x05, b'h']).map(|(_, p)| p), truncated(5, 1));
        assert_eq!(defect(&[0x1d, 0]).map(|(_, p)| p), truncated(4, 1));
        let huge = [0x12, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01];
        assert_eq!(defect(&huge).map(|(_, p)| p), truncated(u64::MAX, 0));
        assert_eq!(defect(&[0x08, 0x01, 0x0b]).map(|(at, _)| at), Some(9));
        assert!(defect(&[0xff; 12]).is_some());
        assert_eq!(defect(&[]), None);
    }
}
