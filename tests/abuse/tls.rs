//! TLS to both servers, with a private certificate authority.

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

/// A folder of keys and certificates.
struct Authority {
    folder: TempDir,
}

impl Authority {
    /// Makes the keys and certificates; `None` without openssl.
    fn new() -> Option<Self> {
        if Command::new("openssl").arg("version").output().is_err() {
            tritmill_servers::skip("openssl (apt install openssl)");
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
            let [request, ca, ca_key, leaf] =
                [(name, "crt"), ("ca", "crt"), ("ca", "key"), ("leaf", "")]
                    .map(|(name, kind)| authority.path(name, kind));
            let signed = "x509 -req -set_serial 7 -days 9".split(' ').collect::<Vec<_>>();
            let files = ["-in", &request, "-CA", &ca, "-CAkey", &ca_key];
            let out = ["-extfile", &leaf, "-out", &request];
            authority.openssl(&[&signed[..], &files, &out].concat());
        }
        Some(authority)
    }

    /// Makes a key, and a request or a certificate signed with it.
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

/// Returns a fleet with a second Redis port for TLS that requires client certificates.
fn fleet_with_redis(authority: &Authority) -> (Fleet, Port) {
    let port = Port::claim().unwrap();
    let (number, path) = (port.number().to_string(), |name, kind| authority.path(name, kind));
    let (cert, key, ca) = (path("server", "crt"), path("server", "key"), path("ca", "crt"));
    let plain = ["--save", "", "--requirepass", "", "--tls-port", &number];
    let files = ["--tls-cert-file", &cert, "--tls-key-file", &key, "--tls-ca-cert-file", &ca];
    let redis = Redis::start_with(&[&plain[..], &files, &["--tls-auth-clients", "yes"]].concat());
    let fleet = Fleet { redis: redis.unwrap(), postgres: Postgres::start().unwrap() };
    let (code, _, stderr) = fleet.run(&["migrate"]);
    assert_eq!(code, Some(0), "{stderr}");
    (fleet, port)
}

#[test]
fn redis_with_a_private_authority_is_verified() {
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
    // With the authorities of the environment, and no client certificate.
    rig::redis(&fleet, "CONFIG SET tls-auth-clients no");
    let mut command = fleet.command(&["submit", "-"]);
    command.env("SSL_CERT_FILE", &ca);
    let address = format!("rediss://127.0.0.1:{port}");
    let (_, said) = rig::submit_with(command, LINE, &["--redis", &address]);
    assert!(!said.contains("not announced"), "{said}");
}

#[test]
fn redis_tls_errors_are_named_without_the_password() {
    let Some(authority) = Authority::new() else { return };
    let (fleet, claim) = fleet_with_redis(&authority);
    let port = claim.number();
    rig::redis(&fleet, "CONFIG SET tls-auth-clients no");
    let (plain, stranger) = (fleet.redis.port(), authority.path("stranger", "crt"));
    let ca = authority.path("ca", "crt");
    // Jobs are stored without Redis; the warning says why they were not announced.
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
    check(format!("redis://:s3cr3t@127.0.0.1:{port}"), "try rediss://");
    check(format!("rediss://:s3cr3t@127.0.0.1:{plain}/0?sslrootcert={ca}"), "may not use TLS");
    // Errors in the URL itself end the command.
    let refuse = |query: &str, expect: &str| {
        let (code, _, stderr) = fleet.run(&["submit", "-", "--redis", &format!("{tls}/0?{query}")]);
        assert_eq!(code, Some(1));
        assert!(rig::is_one_error_line(&stderr), "{stderr}");
        assert!(stderr.contains(expect) && !stderr.contains("s3cr3t"), "{stderr}");
    };
    refuse("sslrootcert=/nowhere/ca.crt", "/nowhere/ca.crt");
    refuse("sslcert=/nowhere/ca.crt", "must be given together");
    refuse("sslverify=no", "unknown parameter");
    let nonsense = rig::file(authority.folder.path(), "nonsense", "no certificate");
    refuse(&format!("sslrootcert={}", nonsense.display()), "certificates");
}

/// Installs a certificate, owned by the server's user.
fn certify(fleet: &Fleet, authority: &Authority, name: &str) {
    for kind in ["crt", "key"] {
        let source = authority.path(name, kind);
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
fn postgres_with_a_private_authority_is_verified() {
    let Some(authority) = Authority::new() else { return };
    let fleet = Fleet::start();
    let url = |query: &str| {
        format!("postgres://postgres:s3cr3t@127.0.0.1:{}/postgres?{query}", fleet.postgres.port())
    };
    let ca = authority.path("ca", "crt");
    let right = url(&format!("sslmode=verify-full&sslrootcert={ca}"));
    let (code, _, stderr) = fleet.run(&["queue", "list", "--database", &right]);
    assert_eq!(code, Some(1), "the server has no TLS yet");
    assert!(rig::is_one_error_line(&stderr) && stderr.contains("TLS"), "{stderr}");
    certify(&fleet, &authority, "server");
    crate::fleet::eventually("the server accepts TLS", || {
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
        assert!(rig::is_one_error_line(&stderr), "{stderr}");
        assert!(stderr.contains(expect) && !stderr.contains("s3cr3t"), "{query}: {stderr}");
    } // As docs/OPERATIONS.md says to make one, and as `openssl req -x509` makes one by itself.
    for (name, is_authority) in [("leaf_own", "FALSE"), ("ca_own", "TRUE")] {
        let constraints = format!("basicConstraints=critical,CA:{is_authority}");
        let names = "subjectAltName=IP:127.0.0.1";
        let words = ["-x509", "-days", "9", "-subj", "/CN=own", "-addext", names, "-addext"];
        authority.make(name, &[&words, &[constraints.as_str()]]);
        certify(&fleet, &authority, name);
        let own = url(&format!("sslmode=verify-full&sslrootcert={}", authority.path(name, "crt")));
        crate::fleet::eventually("the server has this certificate", || {
            let (code, _, stderr) = fleet.run(&["queue", "list", "--database", &own]);
            match is_authority {
                "FALSE" => code == Some(0),
                _ => code == Some(1) && stderr.contains("basicConstraints=critical,CA:FALSE"),
            }
        });
    }
}
