//! TLS of both servers, with a private authority made for the test.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use tempfile::TempDir;
use tritmill_servers::{Port, Postgres, Redis};

use crate::{
    fleet::Fleet,
    rig::{self, LINE},
};

/// Keys and certificates, by file name.
struct Authority {
    folder: TempDir,
}

impl Authority {
    /// Nothing if this machine cannot make any.
    fn new() -> Option<Self> {
        if Command::new("openssl").arg("version").output().is_err() {
            rig::skip("openssl is not installed");
            return None;
        }
        let authority = Self { folder: rig::folder() };
        let names = "subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=CA:FALSE\n";
        rig::file(authority.folder.path(), "leaf", names);
        for name in ["ca", "stranger"] {
            let usage = ["-addext", "keyUsage=critical,keyCertSign"];
            let subject = format!("/CN={name}");
            authority.make(name, &[&["-x509", "-days", "9", "-subj", &subject][..], &usage]);
        }
        for name in ["server", "client"] {
            authority.make(name, &[&["-subj", &format!("/CN={name}")]]);
            authority.openssl(&[
                "x509",
                "-req",
                "-in",
                &authority.path(name, "crt"),
                "-CA",
                &authority.path("ca", "crt"),
                "-CAkey",
                &authority.path("ca", "key"),
                "-set_serial",
                "7",
                "-days",
                "9",
                "-extfile",
                &authority.path("leaf", ""),
                "-out",
                &authority.path(name, "crt"),
            ]);
        }
        Some(authority)
    }

    /// A key, and a request or a certificate signed with it.
    fn make(&self, name: &str, more: &[&[&str]]) {
        let (key, out) = (self.path(name, "key"), self.path(name, "crt"));
        let curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];
        let files = ["req", "-keyout", &key, "-out", &out];
        self.openssl(&[&files[..], &curve, &more.concat()].concat());
    }

    fn openssl(&self, arguments: &[&str]) {
        let output = Command::new("openssl").args(arguments).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    fn path(&self, name: &str, kind: &str) -> String {
        let file: PathBuf = self.folder.path().join(name);
        file.with_extension(kind).to_str().unwrap().to_owned()
    }
}

/// A fleet whose Redis speaks TLS at another port, too, and wants certificates of its clients.
fn fleet_with_redis(authority: &Authority) -> (Fleet, Port) {
    let port = Port::claim().unwrap();
    let redis = Redis::start_with(&[
        "--save",
        "",
        "--requirepass",
        "",
        "--tls-port",
        &port.number().to_string(),
        "--tls-cert-file",
        &authority.path("server", "crt"),
        "--tls-key-file",
        &authority.path("server", "key"),
        "--tls-ca-cert-file",
        &authority.path("ca", "crt"),
        "--tls-auth-clients",
        "yes",
    ]);
    let fleet = Fleet { redis: redis.unwrap(), postgres: Postgres::start().unwrap() };
    let (code, _, stderr) = fleet.run(&["migrate"]);
    assert_eq!(code, Some(0), "{stderr}");
    (fleet, port)
}

#[test]
fn a_redis_with_a_private_authority_is_spoken_to() {
    let Some(authority) = Authority::new() else { return };
    let (fleet, claim) = fleet_with_redis(&authority);
    let port = claim.number();
    let (ca, cert, key) = (
        authority.path("ca", "crt"),
        authority.path("client", "crt"),
        authority.path("client", "key"),
    );
    let url = format!("rediss://127.0.0.1:{port}/0?sslrootcert={ca}&sslcert={cert}&sslkey={key}");
    let worker = fleet.worker(&["--redis", &url]);
    let (ids, said) = rig::submit(&fleet, LINE, &["--redis", &url]);
    assert!(!said.contains("not announced"), "{said}");
    let (code, stdout, stderr) = fleet.run(&["watch", &ids[0], "--timeout", "60", "--redis", &url]);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stdout.contains("2024-03-03"), "{stdout}");
    assert_eq!(worker.get("/readyz").0, 200);
    // The same with the environment's authorities, where the server wants no certificate.
    rig::redis(&fleet, "CONFIG SET tls-auth-clients no");
    let mut command = fleet.command(&["submit", "-"]);
    command.env("SSL_CERT_FILE", &ca);
    let address = format!("rediss://127.0.0.1:{port}");
    let (_, said) = rig::submit_with(command, LINE, &["--redis", &address]);
    assert!(!said.contains("not announced"), "{said}");
}

#[test]
fn what_is_wrong_with_the_tls_of_redis_is_said_without_the_password() {
    let Some(authority) = Authority::new() else { return };
    let (fleet, claim) = fleet_with_redis(&authority);
    let port = claim.number();
    rig::redis(&fleet, "CONFIG SET tls-auth-clients no");
    let (plain, stranger) = (fleet.redis.port(), authority.path("stranger", "crt"));
    let ca = authority.path("ca", "crt");
    // Jobs are accepted whatever Redis does; the line says why nobody was told.
    let check = |url: String, expect: &str| {
        let (ids, said) = rig::submit(&fleet, LINE, &["--redis", &url]);
        assert_eq!(ids.len(), 1);
        let warnings: Vec<&str> = said.lines().filter(|l| l.contains("not announced")).collect();
        assert_eq!(warnings.len(), 1, "{said}");
        assert!(warnings[0].contains(expect) && warnings[0].contains("127.0.0.1:"), "{said}");
        assert!(!said.contains("s3cr3t") && !said.contains('\u{1b}'), "{said}");
    };
    let tls = format!("rediss://:s3cr3t@127.0.0.1:{port}");
    check(format!("{tls}/0?sslrootcert={stranger}"), "UnknownIssuer");
    check(tls.clone(), "UnknownIssuer");
    check(format!("redis://:s3cr3t@127.0.0.1:{port}"), "that is rediss://");
    check(format!("rediss://:s3cr3t@127.0.0.1:{plain}/0?sslrootcert={ca}"), "the server may not use TLS");
    // What is wrong with the URL itself ends the command.
    let refuse = |query: &str, expect: &str| {
        let (code, _, stderr) = fleet.run(&["submit", "-", "--redis", &format!("{tls}/0?{query}")]);
        assert_eq!(code, Some(1));
        assert!(rig::is_one_clear_line(&stderr), "{stderr}");
        assert!(stderr.contains(expect) && !stderr.contains("s3cr3t"), "{stderr}");
    };
    refuse("sslrootcert=/nowhere/ca.crt", "/nowhere/ca.crt");
    refuse("sslcert=/nowhere/ca.crt", "need one another");
    refuse("sslverify=no", "unknown parameter");
    let nonsense = rig::file(authority.folder.path(), "nonsense", "no certificate");
    refuse(&format!("sslrootcert={}", nonsense.display()), "certificates");
}

/// Gives the server a certificate, which must be its user's own.
fn certify(fleet: &Fleet, authority: &Authority) {
    for kind in ["crt", "key"] {
        let source = authority.path("server", kind);
        open_to_all(Path::new(&source));
        rig::beside_postgres(fleet, &format!("install -m 600 {source} server.{kind}"));
    }
    rig::sql(fleet, "ALTER SYSTEM SET ssl = on");
    rig::sql(fleet, "SELECT pg_reload_conf()");
}

fn open_to_all(path: &Path) {
    use std::os::unix::fs::PermissionsExt as _;
    fs::set_permissions(path, fs::Permissions::from_mode(0o644)).unwrap();
}

#[test]
fn a_postgres_with_a_private_authority_is_verified() {
    let Some(authority) = Authority::new() else { return };
    let fleet = Fleet::start();
    let url = |query: &str| {
        format!("postgres://postgres:s3cr3t@127.0.0.1:{}/postgres?{query}", fleet.postgres.port())
    };
    let ca = authority.path("ca", "crt");
    let right = url(&format!("sslmode=verify-full&sslrootcert={ca}"));
    let (code, _, stderr) = fleet.run(&["queue", "list", "--database", &right]);
    assert_eq!(code, Some(1), "the server has no TLS yet");
    assert!(rig::is_one_clear_line(&stderr) && stderr.contains("TLS"), "{stderr}");
    certify(&fleet, &authority);
    crate::fleet::eventually("the server speaks TLS", || {
        fleet.run(&["queue", "list", "--database", &right]).0 == Some(0)
    });
    let _worker = fleet.worker(&["--database", &right]);
    let (ids, _) = rig::submit(&fleet, LINE, &["--database", &right]);
    let (code, _, stderr) = fleet.run(&["watch", &ids[0], "--timeout", "60", "--database", &right]);
    assert_eq!(code, Some(0), "{stderr}");
    let stranger = authority.path("stranger", "crt");
    for (query, expect) in [
        (format!("sslmode=verify-full&sslrootcert={stranger}"), "UnknownIssuer"),
        ("sslmode=verify-full".to_owned(), "UnknownIssuer"),
        ("sslmode=verify-full&sslrootcert=/nowhere/ca.crt".to_owned(), "/nowhere/ca.crt"),
        ("sslmode=sometimes".to_owned(), "sometimes"),
        ("sslrotcert=x".to_owned(), "unknown parameter"),
    ] {
        let (code, _, stderr) = fleet.run(&["submit", "-", "--database", &url(&query)]);
        assert_eq!(code, Some(1), "{query}");
        assert!(rig::is_one_clear_line(&stderr), "{stderr}");
        assert!(stderr.contains(expect) && !stderr.contains("s3cr3t"), "{query}: {stderr}");
    }
}
