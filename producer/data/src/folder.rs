//! A folder of this machine as an object store: a file per object, there when it is whole.

use std::{
    io::{self, SeekFrom},
    ops::Range,
    path::{Path, PathBuf},
    time::UNIX_EPOCH,
};

use bytes::Bytes;
use futures_util::stream::{self, BoxStream, StreamExt as _};
use object_store::path::Path as Key;
use tokio::{
    fs::{self, File},
    io::{AsyncReadExt as _, AsyncSeekExt as _, AsyncWriteExt as _},
};

use crate::objects::Object;

/// Bytes read at once.
const PIECE_BYTES: usize = 1 << 18;
/// End of the names of unfinished files.
const UNFINISHED: &str = ".tritmill-tmp";

/// A folder.
#[derive(Debug, Clone)]
pub(crate) struct Folder(PathBuf);

impl Folder {
    /// Makes the folder, unless it is there.
    pub fn open(path: &Path) -> io::Result<Self> {
        std::fs::create_dir_all(path)?;
        Ok(Self(path.to_owned()))
    }

    /// A key has no `..`.
    fn path(&self, key: &Key) -> PathBuf {
        self.0.join(key.as_ref())
    }

    pub async fn find(&self, key: &Key) -> io::Result<Object> {
        Ok(object(key.clone(), &fs::metadata(self.path(key)).await?))
    }

    pub fn list(&self) -> BoxStream<'static, io::Result<Object>> {
        let mut found = Vec::new();
        let listed = list(&self.0, &self.0, &mut found);
        let failed = listed.err().map(Err);
        stream::iter(found.into_iter().map(Ok).chain(failed)).boxed()
    }

    pub async fn read(
        &self,
        key: &Key,
        range: Option<Range<u64>>,
    ) -> io::Result<BoxStream<'static, io::Result<Bytes>>> {
        let mut file = File::open(self.path(key)).await?;
        let Range { start, end } = range.unwrap_or(0..u64::MAX);
        file.seek(SeekFrom::Start(start)).await?;
        let pieces = stream::try_unfold(file.take(end.saturating_sub(start)), async |mut file| {
            let mut piece = Vec::with_capacity(PIECE_BYTES);
            let read = (&mut file).take(PIECE_BYTES as u64).read_to_end(&mut piece).await?;
            Ok((read > 0).then(|| (Bytes::from(piece), file)))
        });
        Ok(pieces.boxed())
    }

    pub async fn write(&self, key: &Key) -> io::Result<Unfinished> {
        let path = self.path(key);
        fs::create_dir_all(path.parent().unwrap_or(&self.0)).await?;
        let mut temporary = path.clone().into_os_string();
        temporary.push(UNFINISHED);
        let temporary = PathBuf::from(temporary);
        Ok(Unfinished { file: File::create(&temporary).await?, temporary, path })
    }

    pub async fn delete(&self, key: &Key) -> io::Result<()> {
        fs::remove_file(self.path(key)).await
    }
}

fn object(key: Key, meta: &std::fs::Metadata) -> Object {
    let written = meta.modified().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    let written = written.unwrap_or_default();
    Object {
        key,
        bytes: meta.len(),
        version: written.as_nanos().to_string(),
        written_ms: i64::try_from(written.as_millis()).unwrap_or(i64::MAX),
    }
}

fn list(root: &Path, folder: &Path, found: &mut Vec<Object>) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let meta = match std::fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            meta => meta?,
        };
        if meta.is_dir() {
            list(root, &path, found)?;
        } else if let Some(name) = path.strip_prefix(root).ok().and_then(Path::to_str)
            && let Ok(key) = Key::parse(name)
        {
            found.push(object(key, &meta));
        }
    }
    Ok(())
}

/// A file that is being written.
#[derive(Debug)]
pub(crate) struct Unfinished {
    file: File,
    temporary: PathBuf,
    path: PathBuf,
}

impl Unfinished {
    pub async fn add(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes).await
    }

    /// Makes the file durable under its name.
    pub async fn finish(mut self) -> io::Result<()> {
        self.file.flush().await?;
        self.file.sync_all().await?;
        fs::rename(&self.temporary, &self.path).await?;
        match self.path.parent() {
            Some(folder) => File::open(folder).await?.sync_all().await,
            None => Ok(()),
        }
    }

    pub async fn abort(self) {
        // The sweep of a store deletes what this leaves.
        let _ = fs::remove_file(&self.temporary).await;
    }
}
