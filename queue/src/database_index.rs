//! The database of a job, batch or file, which its id names.
//!
//! | bits of an id | of the first database (UUIDv7) | of another one (UUIDv8) |
//! | --- | --- | --- |
//! | 80 to 127 | milliseconds since 1970 | the same |
//! | 76 to 79 | version 7 | version 8 |
//! | 70 to 75 | counter | index of the database, from 1 |
//! | 64 to 69 and 32 to 61 | counter | the same |
//! | 62 and 63 | variant | the same |
//! | 0 to 31 | random; line of a batch | the same |
//!
//! So ids are in order of time across databases, ids of a single database are plain UUIDv7, and an id finds its
//! database when more databases were added since.

use uuid::Uuid;

/// Bits of the version.
const VERSION_BITS: u128 = 0xf << 76;
/// Version of ids that have an index: the custom one of RFC 9562.
const VERSION_WITH_INDEX: u128 = 8 << 76;
/// Version of ids of the first database.
const VERSION_OF_FIRST: u128 = 7 << 76;
/// Position of the lowest bit of the index.
const INDEX_SHIFT: u32 = 70;

/// Index of one of the databases of an installation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct DatabaseIndex(u8);

impl DatabaseIndex {
    /// The first database; the only one of most installations.
    pub const FIRST: Self = Self(0);
    /// Maximum number of databases.
    pub const COUNT_MAX: usize = 64;

    /// Returns the database with this number, from 0; `None` if it is too high.
    pub fn new(number: usize) -> Option<Self> {
        u8::try_from(number).ok().filter(|_| number < Self::COUNT_MAX).map(Self)
    }

    /// Returns the number, from 0.
    pub fn number(self) -> usize {
        usize::from(self.0)
    }

    /// Returns the database of an id.
    pub(crate) fn of(id: Uuid) -> Self {
        let bits = id.as_u128();
        match bits & VERSION_BITS == VERSION_WITH_INDEX {
            true => Self((bits >> INDEX_SHIFT) as u8 % Self::COUNT_MAX as u8),
            false => Self::FIRST,
        }
    }

    /// Returns the same id in this database.
    pub(crate) fn mark(self, id: Uuid) -> Uuid {
        let index_bits = (Self::COUNT_MAX as u128 - 1) << INDEX_SHIFT;
        let bits = id.as_u128() & !VERSION_BITS;
        Uuid::from_u128(match self {
            Self::FIRST => bits | VERSION_OF_FIRST,
            Self(index) => {
                bits & !index_bits | VERSION_WITH_INDEX | u128::from(index) << INDEX_SHIFT
            }
        })
    }

    /// Generates a new id of this database. The generator counts in the bits above the last 32.
    pub(crate) fn generate(self) -> Uuid {
        self.mark(Uuid::now_v7())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn id_names_its_database() {
        let id = Uuid::now_v7();
        assert_eq!(DatabaseIndex::FIRST.mark(id), id, "a single database has plain ids");
        for number in 0..DatabaseIndex::COUNT_MAX {
            let database = DatabaseIndex::new(number).expect("it is below the maximum");
            let marked = database.mark(id);
            assert_eq!((DatabaseIndex::of(marked), database.number()), (database, number));
            assert_eq!(marked.get_version_num(), if number == 0 { 7 } else { 8 });
            assert_eq!(marked.get_variant(), uuid::Variant::RFC4122);
            assert_eq!(marked.as_u128() >> 80, id.as_u128() >> 80, "the time");
            assert_eq!(marked.as_u128() << 58, id.as_u128() << 58, "the counter and the rest");
        }
        assert_eq!(DatabaseIndex::new(DatabaseIndex::COUNT_MAX), None);
    }
}
