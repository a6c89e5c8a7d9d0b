//! Mails about batches and budgets, at a server of the test.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::{TcpListener, TcpStream},
    sync::{Arc, Mutex},
};

use serde_json::json;

use crate::{batches::lines, fleet::eventually, rig::Admin, standalone::alone};

/// A mail server that takes every mail, but none for `unknown`, and not the first one.
struct MailServer {
    port: u16,
    mails: Arc<Mutex<Vec<String>>>,
    connections: Arc<Mutex<usize>>,
}

impl MailServer {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (mails, connections) = <(Arc<Mutex<Vec<String>>>, Arc<Mutex<usize>>)>::default();
        let (taken, counted) = (Arc::clone(&mails), Arc::clone(&connections));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut number = counted.lock().unwrap();
                *number += 1;
                let (is_first, taken) = (*number == 1, Arc::clone(&taken));
                std::thread::spawn(move || serve(stream.unwrap(), is_first, &taken));
            }
        });
        Self { port, mails, connections }
    }

    /// The mails so far: recipient, and content.
    fn mails(&self) -> Vec<String> {
        self.mails.lock().unwrap().clone()
    }
}

/// Talks with a client until it leaves. The first one is told to come again later.
fn serve(stream: TcpStream, is_first: bool, mails: &Mutex<Vec<String>>) {
    let mut out = stream.try_clone().unwrap();
    let mut say = move |line: &str| write!(out, "{line}\r\n").unwrap();
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    say("220 test ready");
    let mut to = String::new();
    while let Some(line) = lines.next() {
        let word = line.split([' ', ':']).next().unwrap_or_default().to_uppercase();
        match word.as_str() {
            "EHLO" => say("250 test"),
            "MAIL" if is_first => say("451 come again later"),
            "MAIL" => say("250 ok"),
            "RCPT" if line.contains("unknown@") => say("550 unknown"),
            "RCPT" => {
                to = line;
                say("250 ok");
            }
            "DATA" => {
                say("354 go on");
                let mail: Vec<String> = lines.by_ref().take_while(|line| line != ".").collect();
                mails.lock().unwrap().push(format!("{to}\n{}", mail.join("\n")));
                say("250 ok");
            }
            "QUIT" => return say("221 bye"),
            _ => say("502 unknown"),
        }
    }
}

#[test]
fn mails_tell_of_batches_and_budgets_though_the_first_attempt_fails() {
    let server = MailServer::start();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tritmill.toml");
    let settings = format!(
        "[standalone]\nmail-host = '127.0.0.1'\nmail-port = {}\nmail-tls = 'off'\n\
         mail-from = 'Tritmill <tritmill@a.example>'\n\
         mail-to = ['ops@a.example', 'default=me@b.example', 'default=unknown@b.example']\n\
         price = ['*,*,EUR,1000,1000']\n",
        server.port
    );
    fs::write(&file, settings).unwrap();
    let words = ["standalone", "--json", "--threads", "1", "--api", "127.0.0.1:0"];
    let mut command = alone(folder.path(), &words);
    let service = Admin::run({
        command.env("TRITMILL_CONFIG", &file);
        command
    });
    let caller = service.first();
    let budget =
        json!({ "tenant": "default", "period": "month", "currency": "EUR", "soft": "0.000000001" });
    assert_eq!(caller.post("/admin/v1/budgets", &budget).status, 200);
    let id = caller.batch(lines(2).as_bytes(), "1h");
    caller.finished(&id);
    eventually("the end of the batch is told", || {
        server.mails().iter().any(|mail| mail.contains(&format!("Subject: Batch {id} completed")))
    });
    eventually("the budget is told", || {
        server.mails().iter().any(|mail| mail.contains("budget of tenant default is nearly spent"))
    });
    let mails = server.mails();
    assert_eq!(mails.len(), 2, "{mails:?}");
    let batch = mails.iter().find(|mail| mail.contains(&id)).unwrap();
    for part in
        ["RCPT TO:<me@b.example>", "From: Tritmill <tritmill@a.example>", "Answered: 2", "Cost: "]
    {
        assert!(batch.contains(part), "{part}: {batch}");
    }
    assert!(*server.connections.lock().unwrap() >= 3, "the first attempt failed");
    let of = |receiver: &str| -> Vec<(String, String)> {
        let notices = caller.get("/v1/notices").json();
        let all = notices["data"].as_array().unwrap().iter();
        let all = all.filter(|notice| notice["receiver"] == receiver);
        let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
        all.map(|notice| (text(&notice["status"]), text(&notice["error"]))).collect()
    };
    let delivered = ("delivered".to_owned(), String::new());
    eventually("both are delivered", || of("me@b.example") == vec![delivered.clone(); 2]);
    eventually("the other address is refused", || {
        let other = of("unknown@b.example");
        other.iter().all(|(status, error)| status == "failed" && error.contains("unknown"))
    });
    assert!(of("ops@a.example").is_empty(), "the tenant has a list of its own");
}

#[test]
fn bad_settings_of_mails_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let fault = |words: &[&str]| {
        let ended = alone(folder.path(), &[&["standalone"][..], words].concat()).output().unwrap();
        assert!(!ended.status.success(), "{words:?}");
        String::from_utf8(ended.stderr).unwrap()
    };
    let good =
        ["--mail-host", "127.0.0.1", "--mail-from", "me@a.example", "--mail-to", "you@a.example"];
    let with = |words: &[&str]| fault(&[&good[..], words].concat());
    assert!(fault(&good[..2]).contains("mail-from is missing"));
    assert!(fault(&good[..4]).contains("mail-to is missing"));
    assert!(fault(&good[2..]).contains("mail-host is missing"));
    let from = [&good[..2], &["--mail-from", "me"], &good[4..]].concat();
    assert!(fault(&from).contains("mail-from 'me'"));
    assert!(with(&["--mail-to", "you"]).contains("mail-to 'you'"));
    assert!(with(&["--mail-tls", "ssl"]).contains("'ssl'"));
    assert!(with(&["--mail-port", "0"]).contains("--mail-port"));
    assert!(with(&["--mail-user", "me"]).contains("mail-user needs mail-password-file"));
    let missing = with(&["--mail-user", "me", "--mail-password-file", "/none/pw"]);
    assert!(missing.contains("mail-password-file /none/pw"), "{missing}");
    let file = folder.path().join("pw");
    fs::write(&file, "hunter2\n").unwrap();
    let file = file.to_str().unwrap();
    assert!(with(&["--mail-password-file", file]).contains("mail-user is missing"));
    let clear = with(&["--mail-user", "me", "--mail-password-file", file, "--mail-tls", "off"]);
    assert!(clear.contains("mail-tls is off") && !clear.contains("hunter2"), "{clear}");
}
