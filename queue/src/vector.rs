//! The vectors of texts.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

/// How an answer writes vectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VectorFormat {
    /// As lists of numbers.
    #[default]
    Float,
    /// As [`Vector::to_base64`].
    Base64,
}

impl VectorFormat {
    /// OpenAI's name of the format.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Float => "float",
            Self::Base64 => "base64",
        }
    }
}

/// The vector of a text. Results store it as [base64](Self::to_base64), which keeps every bit in few bytes.
#[derive(Debug, Clone, PartialEq)]
pub struct Vector(pub Vec<f32>);

impl Vector {
    /// Returns the base64 of its elements, each 4 bytes in little-endian order.
    pub fn to_base64(&self) -> String {
        let bytes: Vec<u8> = self.0.iter().flat_map(|x| x.to_le_bytes()).collect();
        BASE64_STANDARD.encode(bytes)
    }

    /// Reads [`to_base64`](Self::to_base64); `None` for other texts.
    pub fn from_base64(text: &str) -> Option<Self> {
        let bytes = BASE64_STANDARD.decode(text).ok()?;
        let (elements, rest) = bytes.as_chunks::<4>();
        rest.is_empty().then(|| Self(elements.iter().map(|x| f32::from_le_bytes(*x)).collect()))
    }
}

impl Serialize for Vector {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.to_base64())
    }
}

impl<'de> Deserialize<'de> for Vector {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::from_base64(&text).ok_or_else(|| D::Error::custom("not a vector in base64"))
    }
}

/// The vectors of a job's texts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Embedded {
    /// How the caller wants them written.
    pub format: VectorFormat,
    /// The vectors, in the order of the texts.
    pub vectors: Vec<Vector>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_keeps_every_bit() {
        let vector = Vector(vec![0.1, -1.5e-40, f32::MAX, -0.0]);
        let read = Vector::from_base64(&vector.to_base64()).expect("its own text");
        let bits = |vector: &Vector| vector.0.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&read), bits(&vector));
        // OpenAI's: 1.0 and 2.0 in little-endian order.
        assert_eq!(Vector(vec![1.0, 2.0]).to_base64(), "AACAPwAAAEA=");
        assert_eq!(Vector::from_base64("AACAPw"), None);
        assert_eq!(Vector::from_base64("AACA"), None, "three bytes");
    }
}
