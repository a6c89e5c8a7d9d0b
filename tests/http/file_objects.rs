//! The content of files in a folder and in a bucket, instead of in the database.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, SystemTime},
};

use tritmill_servers::Moto;

use crate::{
    batches::{by_name, embedded, lines},
    rig::Admin,
    standalone::alone,
};

fn standalone(folder: &Path, files: &str) -> Command {
    let words =
        ["standalone", "--json", "--threads", "1", "--api", "127.0.0.1:0", "--files", files];
    alone(folder, &words)
}

/// Returns the objects below a folder.
fn objects(folder: &Path) -> Vec<PathBuf> {
    let folders = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let files = folders.filter(|path| path.is_dir()).flat_map(|path| fs::read_dir(path).unwrap());
    files.map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn files_lie_in_a_folder_and_every_read_is_checked() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("files");
    // An object below another folder, of a file or of no file.
    let extra = |folder: &Path, digit: &str| {
        let name = format!("000000-{}-0123456789abcdef", digit.repeat(64));
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join(&name), "left").unwrap();
        folder.join(name)
    };
    let deleted = extra(&place.join(format!("file-{}", "0".repeat(32))), "0");

    let run = || Admin::run(standalone(folder.path(), place.to_str().unwrap()));
    let service = run();
    let caller = service.first();
    let content = lines(40);
    let batch = caller.finished(&caller.batch(content.as_bytes(), "24h"));
    assert_eq!(by_name(&caller.lines(&batch["output_file_id"])), embedded(&content));
    let input = batch["input_file_id"].as_str().unwrap();
    assert_eq!(caller.get(&format!("/v1/files/{input}/content")).text(), content);
    crate::fleet::eventually("the object of no file is swept", || !deleted.exists());

    // What crashes leave: one is old, the row of the other may be on its way.
    let (old, young) = (extra(&place.join(input), "1"), extra(&place.join(input), "2"));
    let days_ago = SystemTime::now() - Duration::from_secs(2 * 86_400);
    File::options().write(true).open(&old).unwrap().set_modified(days_ago).unwrap();
    let key = service.first_key.clone().unwrap();
    drop(service);
    let service = run();
    let caller = service.with(&key);
    crate::fleet::eventually("the old object is swept", || !old.exists());
    assert!(young.exists());
    fs::remove_file(young).unwrap();
    assert_eq!(caller.get(&format!("/v1/files/{input}/content")).text(), content);

    let of = |id: &str| {
        let found = objects(&place).into_iter().filter(|path| path.to_string_lossy().contains(id));
        found.collect::<Vec<_>>()
    };
    let object = of(input).remove(0);
    assert_eq!(fs::read_to_string(&object).unwrap(), content);
    fs::write(&object, content.replacen("id", "xx", 1)).unwrap();
    let damaged = caller.get(&format!("/v1/files/{input}/content"));
    assert_ne!(damaged.text().len(), content.len(), "damaged content is not served");
    assert_eq!(caller.delete(&format!("/v1/files/{input}")).status, 200);
    assert_eq!(of(input), [] as [PathBuf; 0]);
}

#[test]
fn files_lie_in_a_bucket_and_missing_rights_are_found_at_the_start() {
    if Moto::program().is_none() {
        return tritmill_servers::skip("moto_server (cargo xtask test installs it)");
    }
    let moto = Moto::start(&["files"]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let command = || {
        let mut command = standalone(folder.path(), "s3://files/of/tritmill");
        command.envs(moto.variables());
        command
    };
    let service = Admin::run(command());
    let caller = service.first();
    // Several chunks, the last one incomplete.
    let content = "x".repeat(1 << 20) + &"y".repeat(1 << 20) + "the end";
    let file = caller.upload(content.as_bytes()).json()["id"].as_str().unwrap().to_owned();
    assert_eq!(caller.get(&format!("/v1/files/{file}/content")).text(), content);
    assert_eq!(caller.delete(&format!("/v1/files/{file}")).status, 200);
    drop(service);

    moto.require_rights().unwrap();
    let refused = command().output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("--files: no right to use s3://files/of/tritmill"), "{said}");
}
