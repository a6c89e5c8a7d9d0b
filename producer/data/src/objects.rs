//! Object stores: S3, Google, Azure, or a folder. Credentials come from the environment.

use std::{
    io::{self, Read},
    ops::Range,
    path::Path as FilePath,
    sync::Arc,
};

use bytes::Bytes;
use futures_util::{StreamExt as _, TryStreamExt as _, stream::BoxStream};
use object_store::{
    BackoffConfig, GetOptions, ObjectMeta, ObjectStore, ObjectStoreExt as _, RetryConfig,
    WriteMultipart,
    aws::{AmazonS3Builder, Checksum},
    azure::MicrosoftAzureBuilder,
    gcp::GoogleCloudStorageBuilder,
    path::Path,
};
use tokio::runtime::Handle;

use crate::{
    DataError,
    address::{Address, Cloud},
    connector::Connector,
    folder::{Folder, Unfinished},
};

/// Size of a part of an upload.
const PART_BYTES: usize = 8 << 20;
/// Parts of an upload in flight.
const PARTS_IN_FLIGHT: usize = 4;
/// Tries of a call after the first.
const RETRIES: usize = 5;

/// A store and a place in it.
#[derive(Debug, Clone)]
pub struct Objects {
    store: Store,
    /// The key or prefix.
    place: Path,
    address: Address,
}

#[derive(Debug, Clone)]
enum Store {
    Cloud(Arc<dyn ObjectStore>),
    Folder(Folder),
}

/// What is known of an object.
#[derive(Debug, Clone)]
pub struct Object {
    /// Its key.
    pub key: Path,
    /// Its size.
    pub bytes: u64,
    /// Changes when its content does.
    pub version: String,
    /// When it was written, in milliseconds since 1970.
    pub written_ms: i64,
}

impl From<ObjectMeta> for Object {
    fn from(meta: ObjectMeta) -> Self {
        let written_ms = meta.last_modified.timestamp_millis();
        let tag = meta.e_tag.unwrap_or_else(|| written_ms.to_string());
        Self { key: meta.location, bytes: meta.size, version: tag, written_ms }
    }
}

fn retry() -> RetryConfig {
    RetryConfig {
        backoff: BackoffConfig::default(),
        max_retries: RETRIES,
        ..RetryConfig::default()
    }
}

impl Objects {
    /// Opens the store of an address; a path is a folder of this machine, which is created.
    ///
    /// # Errors
    /// [`DataError`] if the address or the environment cannot be used. The store itself is not called.
    pub fn open(address: &Address) -> Result<Self, DataError> {
        let failed = |error| sorted(address, error);
        let (store, key) = match address {
            Address::Object { cloud, bucket, key } => {
                (Store::Cloud(of_cloud(*cloud, bucket).map_err(failed)?), key.as_str())
            }
            Address::Path(path) => {
                let folder = Folder::open(path);
                let unwritten = |source| DataError::Write { path: path.clone(), source };
                (Store::Folder(folder.map_err(unwritten)?), "")
            }
            Address::Stdio | Address::Http(_) => {
                return Err(DataError::Address {
                    address: address.to_string(),
                    problem: "only folders and object stores keep files".to_owned(),
                });
            }
        };
        let place = Path::parse(key).map_err(|error| failed(error.into()))?;
        Ok(Self { store, place, address: address.clone() })
    }

    /// Returns the key of its address.
    pub fn place(&self) -> &Path {
        &self.place
    }

    /// Returns the key of a name below its address.
    ///
    /// # Errors
    /// [`DataError`] if the name has an empty or relative part.
    pub fn below(&self, name: &str) -> Result<Path, DataError> {
        let place = self.place.as_ref();
        let key = if place.is_empty() { name.to_owned() } else { format!("{place}/{name}") };
        Path::parse(key).map_err(|error| sorted(&self.address, error.into()))
    }

    /// Writes a small object and deletes it.
    ///
    /// # Errors
    /// [`DataError`] if a right is missing.
    pub async fn check(&self) -> Result<(), DataError> {
        let key = self.below("tritmill-check")?;
        self.put(&key, Bytes::from_static(b"may be deleted\n")).await?;
        self.delete(&key).await
    }

    /// Returns what is known of an object; `None` without one.
    ///
    /// # Errors
    /// [`DataError`] if the store fails.
    pub async fn find(&self, key: &Path) -> Result<Option<Object>, DataError> {
        let found = match &self.store {
            Store::Cloud(store) => {
                store.head(key).await.map(Object::from).map_err(|e| sorted(&self.address, e))
            }
            Store::Folder(folder) => folder.find(key).await.map_err(|e| local(&self.address, e)),
        };
        match found {
            Err(DataError::NotFound { .. }) => Ok(None),
            found => found.map(Some),
        }
    }

    /// Returns the objects below its address, in no order.
    pub fn list(&self) -> BoxStream<'static, Result<Object, DataError>> {
        let address = self.address.clone();
        let store = match &self.store {
            Store::Folder(folder) => {
                return folder.list().map_err(move |error| local(&address, error)).boxed();
            }
            Store::Cloud(store) => store,
        };
        let place = Some(&self.place).filter(|place| !place.as_ref().is_empty());
        let found = store.list(place).map_ok(Object::from);
        found.map_err(move |error| sorted(&address, error)).boxed()
    }

    /// Returns the content of an object, or a range of it, as it arrives. A broken connection is continued.
    ///
    /// # Errors
    /// [`DataError`] if the store fails.
    pub async fn read(
        &self,
        key: &Path,
        range: Option<Range<u64>>,
    ) -> Result<BoxStream<'static, Result<Bytes, DataError>>, DataError> {
        let address = self.address.clone();
        let store = match &self.store {
            Store::Folder(folder) => {
                let pieces = folder.read(key, range).await.map_err(|e| local(&address, e))?;
                return Ok(pieces.map_err(move |error| local(&address, error)).boxed());
            }
            Store::Cloud(store) => store,
        };
        let options = GetOptions { range: range.map(Into::into), ..GetOptions::default() };
        let found = store.get_opts(key, options).await.map_err(|e| sorted(&address, e))?;
        Ok(found.into_stream().map_err(move |error| sorted(&address, error)).boxed())
    }

    /// Begins the upload of an object, in parts with checksums. It is there when the upload is finished.
    ///
    /// # Errors
    /// [`DataError`] if the store fails.
    pub async fn write(&self, key: &Path) -> Result<Upload, DataError> {
        let address = self.address.clone();
        let parts = match &self.store {
            Store::Folder(folder) => {
                let file = folder.write(key).await;
                Parts::File(file.map_err(|error| local(&address, error))?)
            }
            Store::Cloud(store) => {
                let upload = store.put_multipart(key).await;
                let upload = upload.map_err(|error| sorted(&address, error))?;
                Parts::Cloud(WriteMultipart::new_with_chunk_size(upload, PART_BYTES))
            }
        };
        Ok(Upload { parts, address })
    }

    /// Writes a small object at once.
    ///
    /// # Errors
    /// [`DataError`] if the store fails.
    pub async fn put(&self, key: &Path, bytes: Bytes) -> Result<(), DataError> {
        let failed = |error| local(&self.address, error);
        match &self.store {
            Store::Cloud(store) => {
                let put = store.put(key, bytes.into()).await;
                put.map(drop).map_err(|error| sorted(&self.address, error))
            }
            Store::Folder(folder) => {
                let mut file = folder.write(key).await.map_err(failed)?;
                file.add(&bytes).await.map_err(failed)?;
                file.finish().await.map_err(failed)
            }
        }
    }

    /// Deletes an object, if it is there.
    ///
    /// # Errors
    /// [`DataError`] if the store fails.
    pub async fn delete(&self, key: &Path) -> Result<(), DataError> {
        let deleted = match &self.store {
            Store::Cloud(store) => {
                store.delete(key).await.map_err(|error| sorted(&self.address, error))
            }
            Store::Folder(folder) => {
                folder.delete(key).await.map_err(|error| local(&self.address, error))
            }
        };
        match deleted {
            Err(DataError::NotFound { .. }) => Ok(()),
            deleted => deleted,
        }
    }

    /// Uploads a file of this machine.
    ///
    /// # Errors
    /// [`DataError`] if the store fails or the file cannot be read.
    pub(crate) fn upload(&self, runtime: &Handle, file: &FilePath) -> Result<(), DataError> {
        let unread = |source| DataError::Read { name: file.display().to_string(), source };
        let mut from = std::fs::File::open(file).map_err(unread)?;
        let mut upload = runtime.block_on(self.write(&self.place))?;
        let mut buffer = vec![0; 1 << 20];
        loop {
            match from.read(&mut buffer) {
                Ok(0) => return runtime.block_on(upload.finish()),
                Ok(read) => runtime.block_on(upload.add(&buffer[..read]))?,
                Err(source) => {
                    runtime.block_on(upload.abort());
                    return Err(unread(source));
                }
            }
        }
    }
}

/// An upload of an object.
#[derive(Debug)]
pub struct Upload {
    parts: Parts,
    address: Address,
}

#[derive(Debug)]
enum Parts {
    Cloud(WriteMultipart),
    File(Unfinished),
}

impl Upload {
    /// Adds bytes. Waits while too many parts are on their way.
    ///
    /// # Errors
    /// [`DataError`] if the store fails.
    pub async fn add(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        match &mut self.parts {
            Parts::File(file) => file.add(bytes).await.map_err(|e| local(&self.address, e)),
            Parts::Cloud(parts) => {
                let room = parts.wait_for_capacity(PARTS_IN_FLIGHT).await;
                room.map_err(|error| sorted(&self.address, error))?;
                parts.write(bytes);
                Ok(())
            }
        }
    }

    /// Waits until the object is there.
    ///
    /// # Errors
    /// [`DataError`] if the store fails. It keeps nothing then.
    pub async fn finish(self) -> Result<(), DataError> {
        match self.parts {
            Parts::File(file) => file.finish().await.map_err(|e| local(&self.address, e)),
            Parts::Cloud(parts) => {
                parts.finish().await.map(drop).map_err(|error| sorted(&self.address, error))
            }
        }
    }

    /// Discards what was sent.
    pub async fn abort(self) {
        match self.parts {
            Parts::File(file) => file.abort().await,
            Parts::Cloud(parts) => {
                // If this fails, a rule of the bucket deletes the parts of unfinished uploads.
                let _ = parts.abort().await;
            }
        }
    }
}

fn of_cloud(cloud: Cloud, bucket: &str) -> object_store::Result<Arc<dyn ObjectStore>> {
    Ok(match cloud {
        Cloud::S3 => Arc::new(
            AmazonS3Builder::from_env()
                .with_bucket_name(bucket)
                // S3 compares the checksum of each part and refuses a damaged one.
                .with_checksum_algorithm(Checksum::SHA256)
                .with_http_connector(Connector)
                .with_retry(retry())
                .build()?,
        ),
        Cloud::Google => Arc::new(
            GoogleCloudStorageBuilder::from_env()
                .with_bucket_name(bucket)
                .with_http_connector(Connector)
                .with_retry(retry())
                .build()?,
        ),
        Cloud::Azure => Arc::new(
            MicrosoftAzureBuilder::from_env()
                .with_container_name(bucket)
                .with_http_connector(Connector)
                .with_retry(retry())
                .build()?,
        ),
    })
}

/// Names an error by what can be done about it.
fn sorted(address: &Address, error: object_store::Error) -> DataError {
    let named = address.to_string();
    let variables = match address {
        Address::Object { cloud, .. } => cloud.variables(),
        _ => "this user",
    };
    let no_bucket = ["NoSuchBucket", "bucket does not exist", "ContainerNotFound"];
    match error {
        error if no_bucket.iter().any(|said| error.to_string().contains(said)) => {
            DataError::NoBucket { address: named, cause: brief(&error) }
        }
        object_store::Error::NotFound { .. } => DataError::NotFound { address: named },
        object_store::Error::PermissionDenied { source, .. }
        | object_store::Error::Unauthenticated { source, .. } => {
            DataError::Denied { address: named, variables, cause: brief(&*source) }
        }
        // A list that is refused comes without a kind.
        error if ["code: 401", "code: 403"].iter().any(|code| error.to_string().contains(code)) => {
            DataError::Denied { address: named, variables, cause: brief(&error) }
        }
        error => DataError::Objects { address: named, cause: brief(&error) },
    }
}

/// Names an error of a folder.
fn local(address: &Address, error: io::Error) -> DataError {
    let named = address.to_string();
    match error.kind() {
        io::ErrorKind::NotFound => DataError::NotFound { address: named },
        _ => DataError::Objects { address: named, cause: error.to_string() },
    }
}

/// Returns what a store says, or else an error's text on one line, cut after some hundred letters.
fn brief(error: &dyn std::error::Error) -> String {
    let text = error.to_string();
    let within = |tag: &str| {
        let (_, rest) = text.split_once(&format!("<{tag}>"))?;
        rest.split_once(&format!("</{tag}>")).map(|(within, _)| within)
    };
    match (within("Code"), within("Message")) {
        (Some(code), Some(message)) => format!("{code}: {message}"),
        _ => {
            let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
            line.chars().take(400).collect()
        }
    }
}

/// Reads a stream of an object on a thread without tasks.
pub(crate) struct Streamed {
    pub runtime: Handle,
    pub pieces: BoxStream<'static, Result<Bytes, DataError>>,
    pub piece: Bytes,
}

impl Read for Streamed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() {
            match self.runtime.block_on(self.pieces.next()) {
                None => return Ok(0),
                Some(piece) => self.piece = piece?,
            }
        }
        let count = buffer.len().min(self.piece.len());
        buffer[..count].copy_from_slice(&self.piece.split_to(count));
        Ok(count)
    }
}
