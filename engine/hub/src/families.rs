//! [`FAMILIES`]: the published models that this build can load. The only list of them.
//!
//! A new row needs the layout in the engine, with a test on a small model of that layout. Sizes follow from the shapes
//! (`tritmill model synth --shape`), and a test holds both together.

/// A published model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Family {
    /// Name that people use.
    pub name: &'static str,
    /// `ORG/NAME` on the hub.
    pub repository: &'static str,
    /// File to choose, where the repository has several models.
    pub file: Option<&'static str>,
    /// Container, and type of the ternary weights.
    pub format: &'static str,
    /// Size of the files, about.
    pub download_bytes: u64,
    /// Memory of the weights with the default options, about: packed linears, head with its 8-bit copy, embedding. The KV
    /// cache comes on top.
    pub memory_bytes: u64,
    /// Licence that the repository states.
    pub licence: &'static str,
    /// Shape of `tritmill model synth` with the same sizes.
    pub shape: &'static str,
}

const FALCON: &str = "TII Falcon License 2.0";
const APACHE: &str = "Apache 2.0";
const BONSAI: &str = "GGUF PQ2_0";
const TQ2_0: &str = "GGUF TQ2_0";
const PACKED: &str = "safetensors, packed";

/// All of them, by size within a family.
#[rustfmt::skip]
pub const FAMILIES: &[Family] = &[
    Family { name: "BitNet b1.58 2B4T", repository: "microsoft/bitnet-b1.58-2B-4T", file: None, format: PACKED, download_bytes: 1_180_000_000, memory_bytes: 1_510_000_000, licence: "MIT", shape: "bitnet-2b" },
    Family { name: "BitNet b1.58 2B4T", repository: "microsoft/bitnet-b1.58-2B-4T-gguf", file: None, format: "GGUF I2_S", download_bytes: 1_190_000_000, memory_bytes: 1_510_000_000, licence: "MIT", shape: "bitnet-2b" },
    Family { name: "Llama3 8B 1.58", repository: "HF1BitLLM/Llama3-8B-1.58-100B-tokens", file: None, format: PACKED, download_bytes: 3_850_000_000, memory_bytes: 4_370_000_000, licence: "none stated; Llama 3's for the base model", shape: "llama-8b" },
    Family { name: "Falcon3 1B 1.58bit", repository: "tiiuae/Falcon3-1B-Instruct-1.58bit", file: None, format: PACKED, download_bytes: 1_360_000_000, memory_bytes: 1_630_000_000, licence: FALCON, shape: "falcon3-1b" },
    Family { name: "Falcon3 3B 1.58bit", repository: "tiiuae/Falcon3-3B-Instruct-1.58bit", file: None, format: PACKED, download_bytes: 2_220_000_000, memory_bytes: 2_620_000_000, licence: FALCON, shape: "falcon3-3b" },
    Family { name: "Falcon3 7B 1.58bit", repository: "tiiuae/Falcon3-7B-Instruct-1.58bit", file: None, format: PACKED, download_bytes: 3_270_000_000, memory_bytes: 3_680_000_000, licence: FALCON, shape: "falcon3-7b" },
    Family { name: "Falcon3 10B 1.58bit", repository: "tiiuae/Falcon3-10B-Instruct-1.58bit", file: None, format: PACKED, download_bytes: 3_990_000_000, memory_bytes: 4_390_000_000, licence: FALCON, shape: "falcon3-10b" },
    Family { name: "Ternary Bonsai 1.7B", repository: "prism-ml/Ternary-Bonsai-1.7B-gguf", file: Some("Ternary-Bonsai-1.7B-PQ2_0.gguf"), format: BONSAI, download_bytes: 460_000_000, memory_bytes: 460_000_000, licence: APACHE, shape: "bonsai-1.7b" },
    Family { name: "Ternary Bonsai 4B", repository: "prism-ml/Ternary-Bonsai-4B-gguf", file: Some("Ternary-Bonsai-4B-PQ2_0.gguf"), format: BONSAI, download_bytes: 1_070_000_000, memory_bytes: 1_070_000_000, licence: APACHE, shape: "bonsai-4b" },
    Family { name: "Ternary Bonsai 8B", repository: "prism-ml/Ternary-Bonsai-8B-gguf", file: Some("Ternary-Bonsai-8B-PQ2_0.gguf"), format: BONSAI, download_bytes: 2_180_000_000, memory_bytes: 2_010_000_000, licence: APACHE, shape: "bonsai-8b" },
    Family { name: "Ternary Bonsai 27B", repository: "prism-ml/Ternary-Bonsai-27B-gguf", file: Some("Ternary-Bonsai-27B-PQ2_0.gguf"), format: BONSAI, download_bytes: 7_165_000_000, memory_bytes: 6_860_000_000, licence: APACHE, shape: "bonsai2-27b" },
    Family { name: "Ternary Bonsai 2 27B", repository: "prism-ml/Ternary-Bonsai-2-27B-gguf", file: Some("Ternary-Bonsai-2-27B-PQ2_0.gguf"), format: BONSAI, download_bytes: 7_207_000_000, memory_bytes: 6_900_000_000, licence: "in the file LICENSE of the repository", shape: "bonsai2-27b" },
    Family { name: "BitCPM 0.5B", repository: "openbmb/BitCPM-CANN-0.5B-gguf", file: Some("bitcpm4-0.5b-tq2_0.gguf"), format: TQ2_0, download_bytes: 245_000_000, memory_bytes: 321_000_000, licence: APACHE, shape: "bitcpm-0.5b" },
    Family { name: "BitCPM 1B", repository: "openbmb/BitCPM-CANN-1B-gguf", file: Some("bitcpm4-1b-tq2_0.gguf"), format: TQ2_0, download_bytes: 551_000_000, memory_bytes: 625_000_000, licence: APACHE, shape: "bitcpm-1b" },
    Family { name: "BitCPM 3B", repository: "openbmb/BitCPM-CANN-3B-gguf", file: Some("bitcpm4-3b-tq2_0.gguf"), format: TQ2_0, download_bytes: 1_094_000_000, memory_bytes: 1_200_000_000, licence: APACHE, shape: "bitcpm-3b" },
    Family { name: "BitCPM 8B", repository: "openbmb/BitCPM-CANN-8B-gguf", file: Some("bitcpm4-8b-tq2_0.gguf"), format: TQ2_0, download_bytes: 2_372_000_000, memory_bytes: 2_560_000_000, licence: APACHE, shape: "bitcpm-8b" },
    Family { name: "Maple Preview 20B-A1B", repository: "deepgrove/maple-preview-GGUF", file: Some("maple-preview-TQ2_0-head-F16.gguf"), format: TQ2_0, download_bytes: 6_320_000_000, memory_bytes: 6_190_000_000, licence: "MIT", shape: "maple-20b-a1b" },
    Family { name: "BitNet embedding 0.6B", repository: "microsoft/bitnet-embedding-0.6b", file: Some("bitnet-embeddings-0.6b-bf16-i2_s.gguf"), format: "GGUF I2_S", download_bytes: 428_000_000, memory_bytes: 111_000_000, licence: "MIT", shape: "bitnet-embedding-0.6b" },
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Reference;

    #[test]
    fn rows_are_references_and_differ() {
        for (index, family) in FAMILIES.iter().enumerate() {
            let reference = Reference::new(family.repository).expect("a repository");
            if let Some(file) = family.file {
                reference.with_file(file).expect("a file");
            }
            let place = (family.repository, family.file);
            assert!(FAMILIES[..index].iter().all(|other| (other.repository, other.file) != place));
        }
    }
}
