//! Sessions: login, logout, revoked keys, and forms from other origins.

use std::{io::Read as _, net::TcpStream, time::Duration};

use tritmill_servers::Signal;

use crate::{
    fleet::Fleet,
    rig::{Admin, OURS, key},
};

#[test]
fn session_survives_restarts_until_logout_or_revocation() {
    let fleet = Fleet::start();
    let admin = Admin::start(&fleet, &[]);
    let (secret, client) = (key(&fleet, "acme", "read"), admin.with(""));
    let form = format!("key={secret}&next=%2Fdashboard%2Fbatches");
    let answer = client.form("/dashboard/login", "", OURS, &form);
    assert_eq!(answer.status, 303);
    assert_eq!(answer.header("location"), Some("/dashboard/batches"));
    let sent = answer.header("set-cookie").unwrap();
    for said in ["httponly", "samesite=strict", "path=/dashboard", "max-age="] {
        assert!(sent.contains(said), "{sent}");
    }
    let session = answer.cookie();
    assert!(!session.contains(&secret) && !fleet.sql("SELECT * FROM sessions").contains(&session));
    assert_eq!(client.page("/dashboard/batches", &session).status, 200);
    assert_eq!(client.page("/dashboard/keys", &session).status, 403, "the key has the role read");
    assert_eq!(client.page("/v1/files", &session).status, 401, "the API takes no cookies");
    drop(admin);
    let (one, two) = (Admin::start(&fleet, &[]), Admin::start(&fleet, &[]));
    for admin in [&one, &two] {
        assert_eq!(admin.with("").page("/dashboard/batches", &session).status, 200);
    }
    let client = one.with("");
    let again = client.log_in(&secret);
    assert_eq!(client.form("/dashboard/logout", &again, OURS, "").status, 303);
    let out = two.with("").page("/dashboard/batches?after=x", &again);
    assert_eq!(out.status, 303);
    let login = "/dashboard/login?next=%2fdashboard%2fbatches%3fafter%3dx";
    assert_eq!(out.header("location"), Some(login));
    assert_eq!(
        client.page("/dashboard/batches", &session).status,
        200,
        "the other session continues"
    );
    let id = fleet.sql("SELECT id FROM api_keys WHERE tenant = 'acme'");
    assert_eq!(fleet.run(&["keys", "revoke", id.trim()]).0, Some(0));
    assert_eq!(client.page("/dashboard/batches", &session).status, 303);
}

#[test]
fn forms_of_other_origins_are_refused() {
    let fleet = Fleet::start();
    let admin = Admin::start(&fleet, &[]);
    let client = admin.with("");
    let form = format!("key={}", admin.first_key.as_deref().unwrap());
    let session = client.log_in(admin.first_key.as_deref().unwrap());
    let form_of_a_key = "tenant=acme&role=operate&name=mine";
    for theirs in ["", "Sec-Fetch-Site: cross-site\r\n", "Origin: http://evil.example\r\n"] {
        assert_eq!(client.form("/dashboard/login", "", theirs, &form).status, 403, "{theirs}");
        assert_eq!(client.form("/dashboard/keys", &session, theirs, form_of_a_key).status, 403);
    }
    assert_eq!(fleet.rows(&["api_keys"]), 1);
    let made = client.form("/dashboard/keys", &session, "Origin: http://a\r\n", form_of_a_key);
    assert_eq!(made.status, 201, "{}", made.text());
    assert_eq!(fleet.rows(&["api_keys"]), 2);
    let text = made.text();
    let secret = text.split("tm-").nth(1).unwrap().get(..64).unwrap();
    assert_eq!(admin.with(&format!("tm-{secret}")).get("/v1/files").status, 200);
    assert!(!client.page("/dashboard/keys", &session).text().contains(secret), "shown once");
    let policy = made.header("content-security-policy").unwrap();
    assert!(policy.contains("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
    let hostile = "tenant=%3Cscript%3Ealert(1)%3C%2Fscript%3E&role=read";
    let text = client.form("/dashboard/keys", &session, OURS, hostile).text();
    assert!(!text.contains("<script>alert") && text.contains("&#60;script&#62;"), "{text}");
}

#[test]
fn failed_logins_are_rate_limited() {
    let fleet = Fleet::start();
    let admin = Admin::start(&fleet, &[]);
    let client = admin.with("");
    let form = format!("key=tm-{}", "0".repeat(64));
    let attempt = || client.form("/dashboard/login", "", OURS, &form).status;
    let statuses: Vec<u16> = (0..40).map(|_| attempt()).collect();
    assert_eq!(statuses[0], 401);
    assert!(statuses.contains(&429), "{statuses:?}");
}

/// Reads a stream until it contains a text; false if it ends before.
fn contains(stream: &mut TcpStream, text: &str) -> bool {
    let (mut said, mut piece) = (String::new(), [0; 4096]);
    while !said.contains(text) {
        match stream.read(&mut piece).unwrap() {
            0 => return false,
            count => said.push_str(&String::from_utf8_lossy(&piece[..count])),
        }
    }
    true
}

#[test]
fn live_page_ends_when_its_key_is_revoked_or_the_service_stops() {
    let fleet = Fleet::start();
    let mut admin = Admin::start(&fleet, &[]);
    let client = admin.with("");
    let watch = |session: &str| {
        let headers = format!("Cookie: {session}\r\nAccept: text/event-stream\r\n");
        client.open(client.head("GET", "/dashboard/keys", &headers).as_bytes())
    };
    let lasting = client.log_in(admin.first_key.as_deref().unwrap());
    let revoked = client.log_in(&key(&fleet, "acme", "operate"));
    let (mut live, mut shut_out) = (watch(&lasting), watch(&revoked));
    assert!(contains(&mut live, "acme") && contains(&mut shut_out, "acme"));
    key(&fleet, "newcomer", "read");
    assert!(contains(&mut live, "newcomer") && contains(&mut shut_out, "newcomer"));
    let id = fleet.sql("SELECT id FROM api_keys WHERE tenant = 'acme'");
    assert_eq!(fleet.run(&["keys", "revoke", id.trim()]).0, Some(0));
    assert!(!contains(&mut shut_out, "no such text"), "the stream ends");
    assert!(contains(&mut live, "revoked"), "the other stream continues");
    let again = format!("Cookie: {revoked}\r\nAccept: text/event-stream\r\n");
    assert_eq!(client.send(client.head("GET", "/dashboard/keys", &again).as_bytes()).status, 401);
    admin.signal(Signal::Terminate);
    assert!(!contains(&mut live, "no such text"), "the stream ends");
    assert_eq!(admin.wait(Duration::from_secs(60)), Some(0));
}
