//! Which files of a repository are the model.
//!
//! A folder of safetensors is a model by itself. Of GGUF files one is chosen: the only one, or the only one with
//! a ternary type in its name, since repositories often have other types beside it. The engine checks the content.

use crate::{
    digest::Digest,
    error::{FileList, PullError},
    reference::Reference,
};

/// Parts of file names that mean a ternary type which the engine reads.
const TERNARY_TYPES: [&str; 3] = ["i2_s", "tq1_0", "tq2_0"];

const WEIGHTS: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";
const CONFIG: &str = "config.json";
/// Files of a safetensors model besides config and weights, where they exist.
const TEXTS: [&str; 10] = [
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
];

/// A file of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteFile {
    /// Path in the repository.
    pub name: String,
    /// Size in bytes, if the hub states it.
    pub size: Option<u64>,
    pub(crate) digest: Option<Digest>,
}

/// The files of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Choice {
    /// One GGUF file.
    Gguf(RemoteFile),
    /// A safetensors folder; the weights are last, so that a snapshot with weights has the rest too.
    Folder(Vec<RemoteFile>),
}

impl Choice {
    /// Returns the files, in the order of their download.
    pub fn files(&self) -> &[RemoteFile] {
        match self {
            Self::Gguf(file) => std::slice::from_ref(file),
            Self::Folder(files) => files,
        }
    }
}

/// Chooses the files of the model among all files.
pub(crate) fn choose(files: &[RemoteFile], reference: &Reference) -> Result<Choice, PullError> {
    let repository = reference.repository();
    if let Some(wanted) = reference.file() {
        if !is_gguf(wanted) {
            return Err(PullError::NotAModel { file: wanted.to_owned() });
        }
        let found = files.iter().find(|file| file.name == wanted);
        return found.cloned().map(Choice::Gguf).ok_or_else(|| PullError::NoFile {
            repository,
            file: wanted.to_owned(),
            revision: reference.revision().to_owned(),
        });
    }
    if let Some(folder) = folder(files) {
        return Ok(Choice::Folder(folder));
    }
    let ggufs: Vec<&RemoteFile> = files.iter().filter(|file| is_gguf(&file.name)).collect();
    let ternary: Vec<&RemoteFile> =
        ggufs.iter().copied().filter(|file| is_ternary(&file.name)).collect();
    match (ggufs.as_slice(), ternary.as_slice()) {
        ([], _) => Err(PullError::NoModel { repository }),
        ([only], _) | (_, [only]) => Ok(Choice::Gguf((*only).clone())),
        (all, several) => {
            let candidates = if several.is_empty() { all } else { several };
            let files = FileList(candidates.iter().copied().cloned().collect());
            Err(PullError::Several { repository, files })
        }
    }
}

/// Returns the files of a safetensors model, if there is one.
fn folder(files: &[RemoteFile]) -> Option<Vec<RemoteFile>> {
    let named = |name: &str| files.iter().find(|file| file.name == name).cloned();
    let mut chosen = vec![named(CONFIG)?];
    chosen.extend(TEXTS.iter().filter_map(|name| named(name)));
    match named(WEIGHTS) {
        // The engine reads nothing else beside it.
        Some(weights) => chosen.push(weights),
        None => {
            chosen.push(named(INDEX)?);
            let is_shard = |file: &&RemoteFile| {
                file.name.ends_with(".safetensors") && !file.name.contains('/')
            };
            chosen.extend(files.iter().filter(is_shard).cloned());
        }
    }
    Some(chosen)
}

fn is_gguf(name: &str) -> bool {
    name.to_ascii_lowercase().ends_with(".gguf")
}

/// Returns whether a part of the name is a ternary type.
fn is_ternary(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let separates = |c: char| !c.is_ascii_alphanumeric() && c != '_';
    name.split(separates).any(|part| {
        TERNARY_TYPES.iter().any(|kind| part == *kind || part.ends_with(&format!("_{kind}")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(names: &[&str]) -> Vec<RemoteFile> {
        let file = |name: &&str| RemoteFile {
            name: (*name).to_owned(),
            size: Some(1_250_000_000),
            digest: None,
        };
        names.iter().map(file).collect()
    }

    /// Returns the names of the chosen files, or the error.
    fn chosen(names: &[&str], reference: &str) -> Result<Vec<String>, String> {
        let reference: Reference = reference.parse().expect("a good reference");
        let choice = choose(&files(names), &reference).map_err(|error| error.to_string())?;
        Ok(choice.files().iter().map(|file| file.name.clone()).collect())
    }

    #[test]
    fn folder_is_config_tokenizer_and_weights_in_this_order() {
        let names = [
            ".gitattributes",
            "README.md",
            "config.json",
            "consolidated.safetensors",
            "model.safetensors",
            "original/model.safetensors",
            "pytorch_model.bin",
            "tokenizer.json",
        ];
        let expect = ["config.json", "tokenizer.json", "model.safetensors"];
        assert_eq!(chosen(&names, "o/n").expect("a folder"), expect);
        let shards =
            ["config.json", "a.safetensors", "b.safetensors", INDEX, "x/c.safetensors", "n.gguf"];
        let expect = ["config.json", INDEX, "a.safetensors", "b.safetensors"];
        assert_eq!(chosen(&shards, "o/n").expect("a folder"), expect);
        assert_eq!(chosen(&shards, "o/n:n.gguf").expect("a file"), ["n.gguf"]);
    }

    #[test]
    fn only_ternary_file_is_chosen_among_several() {
        assert_eq!(chosen(&["README.md", "x.gguf"], "o/n").expect("a file"), ["x.gguf"]);
        let names = ["m-F16.gguf", "ggml-model-i2_s.gguf", "m-q8_0.gguf"];
        assert_eq!(chosen(&names, "o/n").expect("a file"), ["ggml-model-i2_s.gguf"]);
        assert_eq!(chosen(&["a_TQ2_0.gguf", "b.gguf"], "o/n").expect("a file"), ["a_TQ2_0.gguf"]);
    }

    #[test]
    fn several_files_are_listed_with_sizes() {
        let error = chosen(&["m.TQ1_0.gguf", "m.TQ2_0.gguf", "m.F16.gguf"], "o/n");
        assert_eq!(
            error.expect_err("two are ternary"),
            "o/n has several models, choose one with --file: m.TQ1_0.gguf (1.25 GB), m.TQ2_0.gguf (1.25 GB)"
        );
        let error = chosen(&["a.gguf", "b.gguf"], "o/n").expect_err("none is known to be ternary");
        assert!(error.contains("a.gguf") && error.contains("b.gguf"), "{error}");
    }

    #[test]
    fn repository_without_the_model_is_refused_by_name() {
        let check = |names: &[&str], reference: &str, expect: &str| {
            let error = chosen(names, reference).expect_err("nothing to choose");
            assert!(error.contains(expect), "{error}");
        };
        check(&["pytorch_model.bin", "config.json"], "o/n", "o/n has no model");
        check(&["x.gguf"], "o/n@v2:y.gguf", "o/n has no file y.gguf at revision v2");
        check(&["config.json"], "o/n:config.json", "config.json is not a .gguf file");
    }
}
