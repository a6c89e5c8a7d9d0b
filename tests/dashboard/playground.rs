//! The playground: a prompt answered as a page, and as a stream.

use serde_json::Value;

use crate::{
    pages::Visitor,
    rig::{Admin, OURS, key},
};

const PROMPT: &str = "model=demo%40i2_s&prompt=Paid+on+the+3rd+of+March%2C+2024&temperature=0";

#[test]
fn prompt_is_answered_as_a_page_and_as_a_stream() {
    let (fleet, _worker, admin) = Admin::with_worker();
    let visitor = Visitor::new(&admin, &key(&fleet, "acme", "submit"));
    assert!(visitor.sees("/dashboard/playground").contains("<option>demo@i2_s</option>"));
    let ask = |headers: &str, form: &str| {
        visitor.client.form("/dashboard/playground", &visitor.session, headers, form)
    };
    let page = ask(OURS, PROMPT);
    assert_eq!(page.status, 200, "{}", page.text());
    assert!(page.text().contains("2024-03-03") && page.text().contains("generated"));
    let streamed = ask(&format!("{OURS}Accept: text/event-stream\r\n"), PROMPT);
    assert_eq!(streamed.header("content-type"), Some("text/event-stream"));
    let events = streamed.events();
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
    let chunks = events.iter().filter_map(|event| serde_json::from_str::<Value>(event).ok());
    let text: String = chunks
        .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
        .collect();
    assert_eq!(text, "2024-03-03");
    // The jobs are the tenant's.
    assert_eq!(fleet.sql("SELECT count(*) FROM jobs WHERE tenant = 'acme'").trim(), "2");
    let schema = "%7B%22enum%22%3A%5B%22yes%22%5D%7D";
    let answer = ask(OURS, &format!("{PROMPT}&schema={schema}"));
    assert!(answer.text().contains("&#34;yes&#34;"), "{}", answer.text());
}

#[test]
fn refused_prompts_name_the_field() {
    let (fleet, admin) = Admin::without_worker();
    let visitor = Visitor::new(&admin, &key(&fleet, "acme", "submit"));
    let ask = |headers: &str, form: &str| {
        visitor.client.form("/dashboard/playground", &visitor.session, headers, form)
    };
    for (change, said) in [
        ("&temperature=9", "temperature"),
        ("&max_tokens=many", "max_tokens is not JSON"),
        ("&schema=%7B", "schema is not JSON"),
        ("&model=none", "no such model"),
    ] {
        let form = PROMPT.replace("&temperature=0", "").replace("model=demo%40i2_s&", "");
        let form = match change.starts_with("&model") {
            true => form + change,
            false => form + change + "&model=demo",
        };
        let page = ask(OURS, &form);
        assert!(page.status >= 400 && page.text().contains(said), "{change}: {}", page.text());
        assert!(page.text().contains("Paid on the 3rd of March"), "the form keeps its text");
        let streamed = ask(&format!("{OURS}Accept: text/event-stream\r\n"), &form);
        assert_eq!(streamed.status, page.status);
        assert!(streamed.json()["error"]["message"].as_str().unwrap().contains(said));
    }
    assert_eq!(ask("Sec-Fetch-Site: cross-site\r\n", PROMPT).status, 403);
    let reader = Visitor::new(&admin, &key(&fleet, "acme", "read"));
    let refused = reader.client.form("/dashboard/playground", &reader.session, OURS, PROMPT);
    assert_eq!(refused.status, 403);
    assert_eq!(fleet.rows(&["jobs", "open_jobs"]), 0);
}
