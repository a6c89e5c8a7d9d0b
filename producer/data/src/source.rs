//! The files of a source: one, or those of a folder in the order of their names.

use std::{
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
    time::UNIX_EPOCH,
};

use bytes::Bytes;
use futures_util::TryStreamExt as _;
use object_store::path::Path as Key;
use reqwest::Url;
use tokio::runtime::Handle;

use crate::{
    Address, DataError, Format,
    http::{Redirects, WebFile},
    objects::{Objects, Streamed},
};

/// Most files of a folder.
const FILES_MAX: usize = 100_000;
/// Most folders inside one another.
const DEPTH_MAX: usize = 16;

/// A file of a source.
#[derive(Debug)]
pub(crate) struct SourceFile {
    /// Its name, for messages.
    pub name: String,
    /// How its rows are written.
    pub format: Format,
    /// Changes when its content does; `None` if that is not known before it is read.
    pub version: Option<String>,
    place: Place,
}

#[derive(Debug)]
enum Place {
    Stdin,
    File(PathBuf),
    Object(Objects, Key),
    Web(Url, Redirects),
}

/// Which files to read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted<'a> {
    pub address: &'a Address,
    /// Overrides what the names of the files say.
    pub format: Option<Format>,
    /// Chooses files of a folder.
    pub split: Option<&'a str>,
    pub redirects: Redirects,
}

/// Returns whether files may have rows instead of lines of a batch, by their forms and their number.
pub(crate) fn have_rows(files: &[SourceFile]) -> bool {
    files.len() > 1 || files.iter().any(|file| file.format != Format::Lines)
}

/// Returns the files of a source.
///
/// # Errors
/// [`DataError`] if there is nothing, or it cannot be listed.
pub(crate) fn files(wanted: Wanted<'_>, runtime: &Handle) -> Result<Vec<SourceFile>, DataError> {
    let Wanted { address, format, split, redirects } = wanted;
    let name = address.to_string();
    let told = format.or_else(|| Format::of_name(address.name())).unwrap_or(Format::Lines);
    let one = |place, version| match split {
        Some(_) => Err(DataError::SplitOfFile { address: name.clone() }),
        None => Ok(vec![SourceFile { name: name.clone(), format: told, version, place }]),
    };
    let found = match address {
        Address::Stdio => return one(Place::Stdin, None),
        Address::Http(url) => return one(Place::Web(url.clone(), redirects), None),
        Address::Path(path) => {
            let unread = |source| DataError::Read { name: name.clone(), source };
            let meta = fs::metadata(path).map_err(unread)?;
            if !meta.is_dir() {
                return one(Place::File(path.clone()), version_of(&meta));
            }
            let mut found = Vec::new();
            list(path, path, 0, &mut found).map_err(unread)?;
            found
        }
        Address::Object { key, .. } => {
            let objects = Objects::open(address)?;
            if !key.is_empty()
                && !key.ends_with('/')
                && let Some(object) = runtime.block_on(objects.find(objects.place()))?
            {
                let version = Some(object.version);
                return one(Place::Object(objects, object.key), version);
            }
            let found = runtime.block_on(list_objects(&objects))?;
            if found.is_empty() {
                return Err(DataError::NotFound { address: name });
            }
            found
        }
    };
    let found = of_split(found, format, split);
    let of_split = split.map_or(String::new(), |split| format!(" of the split '{split}'"));
    match found.is_empty() {
        true => Err(DataError::EmptyFolder { address: name, of_split }),
        false => Ok(found),
    }
}

fn version_of(meta: &fs::Metadata) -> Option<String> {
    let at = meta.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
    meta.is_file().then(|| format!("{} {}", meta.len(), at.as_nanos()))
}

/// A name below the folder, and where it is.
type Found = (String, Place, Option<String>);

fn list(root: &Path, folder: &Path, depth: usize, found: &mut Vec<Found>) -> io::Result<()> {
    if depth > DEPTH_MAX || found.len() > FILES_MAX {
        return Err(io::Error::other(format!(
            "it has more than {FILES_MAX} files, or more than {DEPTH_MAX} folders inside one another"
        )));
    }
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let meta = fs::metadata(&path)?;
        let name = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
        if meta.is_dir() && !is_hidden(&name) {
            list(root, &path, depth + 1, found)?;
        } else if meta.is_file() {
            found.push((name, Place::File(path), version_of(&meta)));
        }
    }
    Ok(())
}

async fn list_objects(objects: &Objects) -> Result<Vec<Found>, DataError> {
    let mut found = Vec::new();
    let mut listed = objects.list();
    let above = objects.place().as_ref().len();
    while let Some(object) = listed.try_next().await? {
        if found.len() > FILES_MAX {
            return Err(DataError::Address {
                address: objects.place().to_string(),
                problem: format!("it has more than {FILES_MAX} objects"),
            });
        }
        let name = object.key.as_ref()[above..].trim_start_matches('/').to_owned();
        found.push((name, Place::Object(objects.clone(), object.key), Some(object.version)));
    }
    Ok(found)
}

/// Returns whether a part of the name begins with a dot or an underline, as those of caches and of markers do, or is the
/// state of a run.
fn is_hidden(name: &str) -> bool {
    name.split('/').any(|part| part.starts_with(['.', '_']) || part.contains(".tritmill"))
}

/// Chooses the files of a split: those with its name (`data/train-00000-of-00002.parquet`, `train.jsonl`,
/// `train/0.parquet`). Without a split it is `train`, if a file has that name, else all files.
fn of_split(found: Vec<Found>, format: Option<Format>, split: Option<&str>) -> Vec<SourceFile> {
    let is_of = |name: &str, split: &str| {
        name.split('/').any(|part| {
            let rest = part.strip_prefix(split);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['-', '.', '_']))
        })
    };
    let mut files: Vec<SourceFile> = found
        .into_iter()
        .filter(|(name, ..)| !is_hidden(name))
        .filter_map(|(name, place, version)| {
            let known = Format::of_name(&name)?;
            // `dataset_infos.json` and the like describe the data.
            let is_data = !name.ends_with(".json") || name.starts_with("train");
            let format = format.unwrap_or(known);
            is_data.then_some(SourceFile { name, format, version, place })
        })
        .collect();
    let has_train = files.iter().any(|file| is_of(&file.name, "train"));
    if let Some(split) = split.or(has_train.then_some("train")) {
        files.retain(|file| is_of(&file.name, split));
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    files
}

impl SourceFile {
    /// Opens the file as it is stored. A web server tells its version only now.
    ///
    /// # Errors
    /// [`DataError`] if it cannot be read.
    pub fn open(&mut self, runtime: &Handle) -> Result<Box<dyn Read + Send>, DataError> {
        Ok(match &self.place {
            Place::Stdin => Box::new(io::stdin()),
            Place::File(path) => {
                let file = File::open(path);
                Box::new(
                    file.map_err(|source| DataError::Read { name: self.name.clone(), source })?,
                )
            }
            Place::Object(objects, key) => {
                let pieces = runtime.block_on(objects.read(key, None))?;
                Box::new(Streamed { runtime: runtime.clone(), pieces, piece: Bytes::new() })
            }
            Place::Web(url, redirects) => {
                let file = WebFile::open(runtime, url, *redirects)?;
                self.version = file.version();
                Box::new(file)
            }
        })
    }

    /// Returns its path, if it is a file of this machine.
    pub fn path(&self) -> Option<&Path> {
        match &self.place {
            Place::File(path) => Some(path),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(names: &[&str], split: Option<&str>) -> Vec<String> {
        let found = names.iter().map(|name| ((*name).to_owned(), Place::Stdin, None)).collect();
        of_split(found, None, split).into_iter().map(|file| file.name).collect()
    }

    #[test]
    fn split_of_a_dataset_folder_is_read_in_the_order_of_names() {
        let names = [
            "README.md",
            "dataset_infos.json",
            ".cache/x.parquet",
            "data/train-00001-of-00002.parquet",
            "data/test-00000-of-00001.parquet",
            "data/train-00000-of-00002.parquet",
            "data/training.parquet",
        ];
        let train = ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"];
        assert_eq!(chosen(&names, None), train);
        assert_eq!(chosen(&names, Some("test")), ["data/test-00000-of-00001.parquet"]);
        assert_eq!(chosen(&["b.csv", "a.jsonl"], None), ["a.jsonl", "b.csv"]);
        assert!(chosen(&names, Some("dev")).is_empty());
    }
}
