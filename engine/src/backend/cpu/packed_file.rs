//! Packed weights on disk, beside the model: the second start of a model reads them instead of decoding the file again.
//!
//! `MODEL_FOLDER/.tritmill/NAME.FORMAT-HEAD.packed` holds the matrices, the copies of the head that are not in the model
//! file, the scales, and the model's fingerprint. It is a copy: deleting it is always safe. It is used only if its key
//! is that of the model as it was opened: the version of the layout and of the program, the configuration and the tokenizer by
//! content, and each weight file by length, inode and the times that the system sets with every write. Every byte is
//! verified by BLAKE3 hashes while it is read; what is not intact is written again.
//!
//! The bytes are read into huge pages and not mapped: with the small pages of a mapped file, steps would be slower. The matrices
//! of experts may be mapped all the same ([`PackedCache::Mapped`]): a token goes through few of them, and the system keeps in memory
//! what it has room for. Then the first start packs one layer at a time into the file before it reads it, so that a model of which the
//! experts do not fit in memory starts.
//!
//! See also: [`sections`](super::sections), the layout of the file.

#[cfg(test)]
mod tests;

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    HeadMode, memory,
    sections::{Damaged, Head, PackedReader, PackedWriter, Scales, Written},
    weights::Weights,
};
use crate::{
    files::{FileState, Fingerprint, Model, ModelError, roles::linears},
    formats::{Format, memory::MappedFile},
    kernels::screen,
};

/// To be raised with each change of a packing, of the head's copies or of what decoding gives.
const VERSION: u32 = 1;
/// Folder beside the model.
const FOLDER: &str = ".tritmill";
/// Weights that take less memory are not kept: they are packed within a fraction of a second.
const KEPT_BYTES_MIN: usize = 64 << 20;
/// Bytes of the disk that are left free.
const FREE_BYTES_MIN: u64 = 1 << 30;

/// The packed file of a model for a format and a head.
pub(super) struct PackedFile {
    path: PathBuf,
    key: [u8; 32],
}

impl PackedFile {
    /// Returns where the packed weights of a model lie; `None` for one that is not in files.
    pub fn locate(model: &Model, format: Format, head: HeadMode) -> Option<Self> {
        let sources = model.sources()?;
        let first = sources.first()?;
        let name = first.path.file_name()?.to_str()?;
        // Machines that share a folder may differ in this.
        let six = if head == HeadMode::Exact && screen::machine_has_six() { "-six" } else { "" };
        let kind = format!("{format}-{}{six}", head.name());
        let mut key = blake3::Hasher::new_derive_key("tritmill packed weights");
        key.update(&VERSION.to_le_bytes());
        for part in [env!("CARGO_PKG_VERSION"), std::env::consts::ARCH, &kind] {
            key.update(part.as_bytes()).update(&[0]);
        }
        key.update(&model.plan_digest());
        for source in &sources {
            key.update(format!("{:?} {:?}", source.path.file_name(), source.state).as_bytes());
        }
        let path = first.path.parent()?.join(FOLDER).join(format!("{name}.{kind}.packed"));
        Some(Self { path, key: *key.finalize().as_bytes() })
    }

    /// Opens the file and reads its head; `None` if this model has no such file.
    fn open(&self) -> Result<Option<(File, Head)>, Damaged> {
        let file = match File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let head = Head::read(&file)?;
        Ok((head.index.key == self.key).then_some((file, head)))
    }

    /// Reads the weights; `None` if this model has no such file.
    fn read(&self, model: &Arc<Model>, packing: Packing) -> Result<Option<Weights>, Damaged> {
        let Some((file, file_head)) = self.open()? else { return Ok(None) };
        let Packing { format, head, maps_experts } = packing;
        let mut reader = PackedReader::new(&file, &file_head, maps_experts)?;
        let weights = Weights::read(Arc::clone(model), format, head, &mut reader)?;
        reader.finish()?;
        Ok(Some(weights))
    }

    /// As [`Self::read`]; damage is logged.
    fn read_if_intact(&self, model: &Arc<Model>, packing: Packing) -> Option<Weights> {
        let path = self.path.display();
        match self.read(model, packing) {
            Ok(Some(weights)) => {
                tracing::debug!(%path, "packed weights read");
                Some(weights)
            }
            Ok(None) => None,
            Err(error) => {
                tracing::warn!(%path, %error, "packed weights are not intact and are packed again");
                None
            }
        }
    }

    /// Writes the weights for the next start. What hinders is logged.
    fn keep(&self, weights: &Weights) {
        let path = self.path.display();
        let kept = self.write(&weights.model, weights.size_bytes(), Busy::Leave, |to| {
            to.append(&weights.sections())?;
            Ok(weights.scales())
        });
        match kept {
            Ok(true) => tracing::info!(%path, "packed weights kept for the next start"),
            Ok(false) => tracing::debug!(%path, "packed weights are written by another process"),
            Err(error) => tracing::info!(%path, %error, "packed weights are not kept"),
        }
    }

    /// Packs a model into the file, one layer at a time, or waits for another process that does. What hinders is logged.
    ///
    /// # Errors
    /// If a tensor cannot be decoded.
    fn pack(&self, model: &Model, (format, head): (Format, HeadMode)) -> Result<(), ModelError> {
        let path = self.path.display();
        tracing::info!(%path, "packing the model layer by layer into its file");
        let bytes = memory::weight_bytes(model, format, head);
        let pack = |to: &mut PackedWriter<'_>| Weights::pack(model, (format, head), to);
        match self.write(model, bytes, Busy::Wait, pack) {
            Ok(_) => {}
            Err(Damaged::Model(error)) => return Err(error),
            Err(error) => tracing::info!(%path, %error, "packed weights are not kept"),
        }
        Ok(())
    }

    /// Writes what `content` writes, some `bytes`. Returns false if another process writes it, or has written it, or if the model has
    /// changed since it was opened.
    fn write(
        &self,
        model: &Model,
        bytes: usize,
        busy: Busy,
        content: impl FnOnce(&mut PackedWriter<'_>) -> Result<Scales, Damaged>,
    ) -> Result<bool, Damaged> {
        let fingerprint = *model.fingerprint()?.as_bytes();
        let folder = self.path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder)?;
        if fs4::available_space(folder)? < bytes as u64 + FREE_BYTES_MIN {
            return Err(io::Error::from(io::ErrorKind::StorageFull).into());
        }
        let temporary = self.path.with_extension("tmp");
        let open = OpenOptions::new().write(true).create(true).truncate(false).open(&temporary)?;
        // The lock of a process that ended is free, and what it left is overwritten.
        let is_locked = match busy {
            Busy::Wait => open.lock().map(|()| true)?,
            Busy::Leave => match open.try_lock() {
                Ok(()) => true,
                Err(TryLockError::WouldBlock) => false,
                Err(TryLockError::Error(error)) => return Err(error.into()),
            },
        };
        if !is_locked || !is_at(&open, &temporary)? {
            return Ok(false);
        }
        open.set_len(0)?;
        let linears = linears(model.config()).count();
        // Scales of small groups that do not pair up take more than was foreseen.
        let mut to = PackedWriter::new(&open, linears, bytes + bytes / 8);
        let written = content(&mut to).and_then(|scales| {
            let key = self.key;
            Ok(to.finish(Written { key, fingerprint, scales })?)
        });
        if written.is_err() || !is_unchanged(model) {
            fs::remove_file(&temporary)?;
            return written.map(|()| false);
        }
        fs::rename(&temporary, &self.path)?;
        Ok(true)
    }
}

/// What to do while another process writes the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Busy {
    /// Leave it alone.
    Leave,
    /// Wait until it has ended.
    Wait,
}

/// Returns whether an open file is the one at a path.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let inode = |metadata: fs::Metadata| FileState::from(&metadata).inode;
    match fs::metadata(path) {
        Ok(metadata) => Ok(inode(metadata) == inode(file.metadata()?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns whether the files of a model are as they were when it was opened.
fn is_unchanged(model: &Model) -> bool {
    let sources = model.sources().unwrap_or_default();
    sources.iter().all(|source| {
        fs::metadata(&source.path).is_ok_and(|now| FileState::from(&now) == source.state)
    })
}

/// Sets the fingerprint of a model from its packed file, if there is one, so that the model need not be read.
pub(crate) fn recall_fingerprint(model: &Model, format: Format, head: HeadMode) {
    if model.knows_fingerprint() {
        return;
    }
    let file = PackedFile::locate(model, format, head);
    // A damaged file is reported by the load.
    if let Some((_, head)) = file.and_then(|file| file.open().ok().flatten()) {
        model.set_fingerprint(Fingerprint::from_bytes(head.index.fingerprint));
    }
}

/// The experts in the packed file of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertsInFile {
    /// Their bytes.
    pub bytes: u64,
    /// Bytes that the system has in memory now; `None` if it does not say.
    pub resident_bytes: Option<u64>,
}

/// Returns what a model's packed file has of experts; `None` without experts or such a file.
pub(crate) fn experts_in_file(
    model: &Model,
    format: Format,
    head: HeadMode,
) -> Option<ExpertsInFile> {
    let config = model.config();
    config.experts.as_ref()?;
    let (file, head) = PackedFile::locate(model, format, head)?.open().ok()??;
    let map = MappedFile::open(&file).ok()?;
    let mut places = head.places();
    let mut found = ExpertsInFile { bytes: 0, resident_bytes: Some(0) };
    for ((_, linear), scale) in linears(config).zip(&head.index.scales.linears) {
        // The trits, and the scales of groups.
        for place in places.by_ref().take(1 + usize::from(scale.group.is_some())) {
            if linear.is_of_experts() {
                found.bytes += place.len() as u64;
                let resident = map.resident_bytes(place).map(|bytes| bytes as u64);
                found.resident_bytes = found.resident_bytes.zip(resident).map(|(a, b)| a + b);
            }
        }
    }
    Some(found)
}

/// How weights are packed, and where they are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Packing {
    pub format: Format,
    pub head: HeadMode,
    /// Whether the matrices of experts stay in the packed file.
    pub maps_experts: bool,
}

/// Reads the packed weights of a model; without them, decodes the model and keeps them for the next start.
///
/// # Errors
/// If a tensor cannot be decoded. That packed weights cannot be read or kept is only logged.
pub(super) fn load(model: Arc<Model>, packing: Packing) -> Result<Weights, ModelError> {
    load_at_least(KEPT_BYTES_MIN, model, packing)
}

/// As [`load`]; weights of fewer bytes are not kept.
fn load_at_least(
    kept_bytes_min: usize,
    model: Arc<Model>,
    packing: Packing,
) -> Result<Weights, ModelError> {
    let Packing { format, head, .. } = packing;
    let Some(file) = PackedFile::locate(&model, format, head) else {
        return Weights::load(model, format, head);
    };
    if let Some(weights) = file.read_if_intact(&model, packing) {
        return Ok(weights);
    }
    let is_kept = memory::weight_bytes(&model, format, head) >= kept_bytes_min;
    let maps_experts = packing.maps_experts && model.config().experts.is_some();
    if maps_experts && is_kept {
        file.pack(&model, (format, head))?;
        if let Some(weights) = file.read_if_intact(&model, packing) {
            return Ok(weights);
        }
    }
    let weights = Weights::load(model, format, head)?;
    if maps_experts {
        tracing::warn!("all experts are in memory: they have no packed file to stay in");
    } else if is_kept {
        file.keep(&weights);
    }
    Ok(weights)
}
