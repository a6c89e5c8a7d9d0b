//! The file of one block.
//!
//! | bytes | content |
//! | --- | --- |
//! | 0 to 7 | `TMKVBLK1`: the version of this layout and of the backends' block layout |
//! | 8 to 39 | hash of the block |
//! | 40 to 47 | length of the content, little-endian |
//! | 48 to 79 | BLAKE3 of bytes 0 to 47 and of the content |
//! | 80 to the end | the content: keys and values of all layers, or the state of all recurrent layers, as the backend stores them |

use std::{
    fs::File,
    io::{self, Read as _},
    path::Path,
};

use crate::kv::BlockHash;

/// First bytes of every file. To be raised with each change of a backend's block layout.
const MAGIC: &[u8; 8] = b"TMKVBLK1";
/// Bytes before the content.
pub(super) const HEAD_BYTES: usize = 80;
/// Bytes of the head that the checksum covers.
const COVERED: usize = 48;

/// Returns the head of a file.
pub(super) fn head(hash: &BlockHash, content: &[u8]) -> [u8; HEAD_BYTES] {
    let mut head = [0; HEAD_BYTES];
    head[..8].copy_from_slice(MAGIC);
    head[8..40].copy_from_slice(hash.as_bytes());
    head[40..COVERED].copy_from_slice(&(content.len() as u64).to_le_bytes());
    let checksum = checksum(&head[..COVERED], content);
    head[COVERED..].copy_from_slice(&checksum);
    head
}

fn checksum(covered: &[u8], content: &[u8]) -> [u8; 32] {
    *blake3::Hasher::new().update(covered).update(content).finalize().as_bytes()
}

/// Reads the head, as far as the file has one, and the content, into the memory of an earlier one.
///
/// # Errors
/// If the file cannot be read.
pub(super) fn read(path: &Path, mut content: Vec<u8>) -> io::Result<(Vec<u8>, Vec<u8>)> {
    let mut file = File::open(path)?;
    let bytes = file.metadata()?.len();
    let mut head = Vec::with_capacity(HEAD_BYTES);
    (&mut file).take(HEAD_BYTES as u64).read_to_end(&mut head)?;
    // One byte more, so that the end is noticed without a larger buffer.
    content.clear();
    content.reserve((bytes as usize).saturating_sub(HEAD_BYTES) + 1);
    file.read_to_end(&mut content)?;
    Ok((head, content))
}

/// Returns whether every byte of a file is as it was written for this block.
pub(super) fn is_intact(hash: &BlockHash, head: &[u8], content: &[u8]) -> bool {
    let Some((covered, checksum_read)) = head.split_at_checked(COVERED) else { return false };
    let is_ours = covered[..8] == *MAGIC
        && covered[8..40] == *hash.as_bytes()
        && covered[40..] == (content.len() as u64).to_le_bytes();
    is_ours && checksum(covered, content) == checksum_read
}

/// Returns the content of a whole file if every byte is as it was written for this block.
pub(super) fn content<'a>(hash: &BlockHash, file: &'a [u8]) -> Option<&'a [u8]> {
    let (head, content) = file.split_at_checked(HEAD_BYTES)?;
    is_intact(hash, head, content).then_some(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_changed_byte_or_length_is_a_miss() {
        let hash = BlockHash::root("class", b"");
        let bytes: Vec<u8> = (0..100).collect();
        let file = [&head(&hash, &bytes)[..], &bytes].concat();
        assert_eq!(content(&hash, &file), Some(&bytes[..]));
        assert_eq!(content(&BlockHash::root("other", b""), &file), None);
        for at in 0..file.len() {
            let mut changed = file.clone();
            changed[at] ^= 0x10;
            assert_eq!(content(&hash, &changed), None, "byte {at}");
            assert_eq!(content(&hash, &file[..at]), None, "{at} bytes");
        }
        assert_eq!(content(&hash, &[&file[..], &[0]].concat()), None);
    }
}
