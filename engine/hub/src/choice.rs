//! Which files of a repository are the model.
//!
//! A folder of safetensors is a model by itself, unless a file says that its weights are in another basis. Of GGUF files one is
//! chosen: the only one, or of those with a ternary type in their names ([`crate::variants`]) the one that runs fastest, if their
//! names differ by the type alone. The others are passed over, each with a reason. The engine checks the content.

use crate::{
    digest::Digest,
    error::{FileList, PullError},
    reference::Reference,
    variants::{self, PassedOver, WhyNot},
};

/// Files that say how the weights of a folder were changed. The engine refuses such folders, too, but would not see the file if only the
/// model's own files were pulled.
const CHANGING_FILES: [&str; 2] = ["hadamard_packing.json", "hadamard.json"];

const WEIGHTS: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";
const CONFIG: &str = "config.json";
/// Files of a safetensors model besides config and weights, where they exist.
const TEXTS: [&str; 12] = [
    "1_Pooling/config.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "modules.json",
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
    /// One GGUF file, and those that were passed over.
    Gguf(RemoteFile, Vec<PassedOver>),
    /// A safetensors folder; the weights are last, so that a snapshot with weights has the rest too.
    Folder(Vec<RemoteFile>),
}

impl Choice {
    /// Returns the files, in the order of their download.
    pub fn files(&self) -> &[RemoteFile] {
        match self {
            Self::Gguf(file, _) => std::slice::from_ref(file),
            Self::Folder(files) => files,
        }
    }

    /// Returns the files that were passed over, with the reasons.
    pub fn passed_over(&self) -> &[PassedOver] {
        match self {
            Self::Gguf(_, others) => others,
            Self::Folder(_) => &[],
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
        let chosen = found.cloned().map(|file| Choice::Gguf(file, Vec::new()));
        return chosen.ok_or_else(|| PullError::NoFile {
            repository,
            file: wanted.to_owned(),
            revision: reference.revision().to_owned(),
        });
    }
    let changing = files.iter().find(|file| CHANGING_FILES.contains(&file.name.as_str()));
    if let (Some(folder), None) = (folder(files), changing) {
        return Ok(Choice::Folder(folder));
    }
    let ggufs: Vec<&RemoteFile> = files.iter().filter(|file| is_gguf(&file.name)).collect();
    match (ggufs.as_slice(), changing) {
        ([], Some(file)) => {
            let why =
                "the weights are in a rotated (Hadamard) basis, and inputs are not transformed";
            Err(PullError::Unsupported { repository, file: file.name.clone(), why })
        }
        ([], None) => Err(PullError::NoModel { repository }),
        (all, _) => of_ggufs(all, repository),
    }
}

/// Chooses among GGUF files, of which there are some.
fn of_ggufs(all: &[&RemoteFile], repository: String) -> Result<Choice, PullError> {
    let (mut candidates, mut others) = (Vec::new(), Vec::new());
    for &file in all {
        match variants::excluded(&file.name) {
            None => candidates.push(file),
            Some(why) => others.push(PassedOver { file: file.name.clone(), why }),
        }
    }
    let several = |files: &[&RemoteFile]| {
        let files = FileList(files.iter().copied().cloned().collect());
        Err(PullError::Several { repository: repository.clone(), files })
    };
    // A file with a name that says nothing is taken if it is the only model.
    if candidates.is_empty() {
        let is_unnamed = |other: &&PassedOver| other.why == WhyNot::OtherType;
        let unnamed: Vec<&PassedOver> = others.iter().filter(is_unnamed).collect();
        let only = match unnamed.as_slice() {
            [only] => *only,
            [] => {
                let PassedOver { file, why } = others.swap_remove(0);
                return Err(PullError::Unsupported { repository, file, why: why.text() });
            }
            _ => return several(all),
        };
        let name = only.file.clone();
        others.retain(|other| other.file != name);
        candidates.extend(all.iter().copied().filter(|file| file.name == name));
    }
    let is_one_model = |file: &&RemoteFile| {
        variants::without_type(&file.name) == variants::without_type(&candidates[0].name)
    };
    if !candidates.iter().all(is_one_model) {
        return several(&candidates);
    }
    candidates.sort_by_key(|file| variants::rank(&file.name));
    let chosen = candidates.remove(0);
    if candidates.iter().any(|file| variants::rank(&file.name) == variants::rank(&chosen.name)) {
        candidates.insert(0, chosen);
        return several(&candidates);
    }
    let slower = candidates
        .iter()
        .map(|file| PassedOver { file: file.name.clone(), why: variants::slower_than(&file.name) });
    others.splice(0..0, slower);
    Ok(Choice::Gguf(chosen.clone(), others))
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
    fn fastest_encoding_of_one_model_is_chosen_and_the_others_have_reasons() {
        let bonsai = [
            "Ternary-Bonsai-8B-F16.gguf",
            "Ternary-Bonsai-8B-PQ2_0.gguf",
            "Ternary-Bonsai-8B-PTQ1_0.gguf",
            "Ternary-Bonsai-8B-Q2_0.gguf",
            "Ternary-Bonsai-8B-Q2_0_g64.gguf",
            "Ternary-Bonsai-8B-mmproj-BF16.gguf",
            "imatrix.gguf",
        ];
        let reference: Reference = "o/n".parse().expect("a good reference");
        let choice = choose(&files(&bonsai), &reference).expect("a file");
        assert_eq!(choice.files()[0].name, "Ternary-Bonsai-8B-PQ2_0.gguf");
        let others: Vec<String> = choice.passed_over().iter().map(ToString::to_string).collect();
        assert_eq!(others.len(), bonsai.len() - 1, "{others:?}");
        for (file, why) in [
            ("8B-F16", "no ternary type"),
            ("PTQ1_0", "slower to start"),
            ("8B-Q2_0.gguf", "PQ2_0"),
            ("Q2_0_g64", "larger"),
            ("mmproj", "images"),
            ("imatrix", "quantize"),
        ] {
            let said = others.iter().find(|other| other.contains(file)).expect("it is passed over");
            assert!(said.contains(why), "{said}");
        }
        for (names, expect) in [
            (["B-27B-Q2_g64.gguf", "B-27B-PTQ1_0.gguf"], "B-27B-Q2_g64.gguf"),
            (["m-Q2_0_g64.gguf", "m-Q2_K.gguf"], "m-Q2_0_g64.gguf"),
            (["m.TQ1_0.gguf", "m.TQ2_0.gguf"], "m.TQ2_0.gguf"),
            (["m-F16.gguf", "m-ptq1_0.gguf"], "m-ptq1_0.gguf"),
            (["mmproj-m.gguf", "m.gguf"], "m.gguf"),
        ] {
            assert_eq!(chosen(&names, "o/n").expect("a file"), [expect]);
        }
    }

    #[test]
    fn folder_in_a_rotated_basis_is_refused_by_the_file_that_says_so() {
        for file in ["hadamard.json", "hadamard_packing.json"] {
            let names = ["config.json", file, "model.safetensors"];
            let error = chosen(&names, "o/n").expect_err("the engine would not see the file");
            assert!(error.contains(file) && error.contains("Hadamard"), "{error}");
            let with_gguf = ["config.json", file, "model.safetensors", "m-PQ2_0.gguf"];
            assert_eq!(chosen(&with_gguf, "o/n").expect("a file"), ["m-PQ2_0.gguf"]);
        }
    }

    #[test]
    fn several_files_are_listed_with_sizes() {
        let error = chosen(&["m-4b.TQ2_0.gguf", "m-8b.TQ2_0.gguf", "m.F16.gguf"], "o/n");
        assert_eq!(
            error.expect_err("two models"),
            "o/n has several models, choose one with --file: m-4b.TQ2_0.gguf (1.25 GB), m-8b.TQ2_0.gguf (1.25 GB)"
        );
        let parts = ["m-PQ2_0-00001-of-00002.gguf", "m-PQ2_0-00002-of-00002.gguf"];
        let error = chosen(&parts, "o/n").expect_err("parts of a file are not models");
        assert!(error.contains(parts[0]) && error.contains("llama-gguf-split"), "{error}");
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
