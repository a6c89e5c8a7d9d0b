//! `--tls-cert` and `--tls-key`, with a certificate made for the test.

use std::{path::Path, process::Command};

use crate::{fleet::Fleet, rig::Admin};

fn run(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{program}: {said}");
    Some(String::from_utf8(output.stdout).unwrap())
}

/// Makes a certificate for this machine and its key; `None` without openssl.
fn certificate(folder: &Path) -> Option<[String; 2]> {
    let [cert, key] = ["cert.pem", "key.pem"].map(|name| folder.join(name).display().to_string());
    let words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 9 \
                 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1";
    let mut words: Vec<&str> = words.split_whitespace().collect();
    words.extend(["-keyout", &key, "-out", &cert]);
    run("openssl", &words)?;
    Some([cert, key])
}

#[test]
fn certificate_secures_api_and_dashboard() {
    let folder = tempfile::tempdir().unwrap();
    let Some([cert, key]) = certificate(folder.path()) else {
        return tritmill_servers::skip("openssl (apt install openssl)");
    };
    let fleet = Fleet::start();
    let admin = Admin::start(&fleet, &["--tls-cert", &cert, "--tls-key", &key]);
    let url = |path: &str| format!("https://{}{path}", admin.listen);
    let secret = admin.first_key.as_deref().unwrap();
    let curl = |more: &[&str]| {
        let with = ["--silent", "--show-error", "--max-time", "60", "--cacert", &cert];
        run("curl", &[&with[..], more].concat())
    };
    let bearer = format!("Authorization: Bearer {secret}");
    let Some(models) = curl(&["-H", &bearer, &url("/v1/models")]) else {
        return tritmill_servers::skip("curl (apt install curl)");
    };
    assert!(models.contains("\"object\":\"list\""), "{models}");
    let origin = format!("Origin: {}", url(""));
    let form = format!("key={secret}");
    let login = url("/dashboard/login");
    let opened = curl(&["-D", "-", "-o", "/dev/null", "-H", &origin, "-d", &form, &login]);
    let opened = opened.unwrap().to_lowercase();
    assert!(opened.contains("303") && opened.contains("; secure"), "{opened}");
    // A connection without TLS is closed, and others are served.
    let mut plain = admin.first().open(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n");
    let mut said = Vec::new();
    let _ = std::io::Read::read_to_end(&mut plain, &mut said);
    assert!(!String::from_utf8_lossy(&said).contains("200 OK"));
    assert_eq!(curl(&[&url("/healthz")]).unwrap(), "ok\n");
}

#[test]
fn invalid_certificate_is_named_at_start() {
    let fleet = Fleet::empty();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("none.pem").display().to_string();
    std::fs::write(&file, "nothing").unwrap();
    let (code, _, said) = fleet.run(&["admin", "--tls-cert", &file, "--tls-key", &file]);
    assert_eq!(code, Some(1));
    assert!(said.contains("none.pem") && said.contains("no certificate"), "{said}");
    let (code, _, said) = fleet.run(&["admin", "--tls-cert", &file]);
    assert!(code != Some(0) && said.contains("--tls-key"), "{said}");
}
