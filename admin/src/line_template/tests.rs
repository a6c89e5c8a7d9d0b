//! Lines that templates make, and templates that are refused.

use super::*;

const CHAT: &str = "/v1/chat/completions";

fn template(body: Value) -> Value {
    json!({ "url": CHAT, "body": body })
}

fn maker(template: Value) -> LineMaker {
    let parsed = LineTemplate::parse(template, CHAT, "lines.").expect("a template");
    let text = serde_json::to_string(&parsed).expect("plain data");
    let read: LineTemplate = serde_json::from_str(&text).expect("the same");
    assert_eq!(read, parsed);
    read.compile("").expect("it was compiled before")
}

fn made(template: Value, content: Option<&str>, body: &Value) -> Value {
    let line = maker(template).line(&Previous { custom_id: "q1", content, body });
    serde_json::from_str(&line).expect("JSON")
}

#[test]
fn line_has_the_fields_of_the_earlier_one_with_their_types() {
    let earlier = json!({
        "model": "m", "temperature": 0.5, "n": 2, "none": null,
        "messages": [{ "role": "user", "content": "Tell \"it\"\n" }],
    });
    let given = json!({
        "custom_id": "{{ previous.custom_id }}-2",
        "method": "POST",
        "url": CHAT,
        "body": {
            "model": "{{ previous.body.model }}",
            "temperature": "{{ previous.body.temperature }}",
            "stop": "{{ '{{' }}",
            "messages": [
                "{{ previous.body.messages.0 }}",
                { "role": "assistant", "content": "{{ previous.content }}" },
                { "role": "user", "content": "Shorter ({{previous.body.n}} of {{previous.body.messages}})." },
            ],
        },
    });
    let expected = json!({
        "custom_id": "q1-2",
        "method": "POST",
        "url": CHAT,
        "body": {
            "model": "m",
            "temperature": 0.5,
            "stop": "{{",
            "messages": [
                { "role": "user", "content": "Tell \"it\"\n" },
                { "role": "assistant", "content": "{{ previous.custom_id }}" },
                { "role": "user",
                  "content": "Shorter (2 of [{\"role\":\"user\",\"content\":\"Tell \\\"it\\\"\\n\"}])." },
            ],
        },
    });
    // What an answer says is not read as a template.
    let line = made(given, Some("{{ previous.custom_id }}"), &earlier);
    assert_eq!(line, expected);
}

#[test]
fn fields_keep_their_order() {
    let schema = json!({ "zeta": 1, "a": 2, "mmm": 3 });
    let body = json!({ "prompt": "{{ previous.content }}", "x": schema, "model": "m" });
    let line = maker_of_any(body).line(&Previous {
        custom_id: "q",
        content: Some("a"),
        body: &Value::Null,
    });
    let at = |word: &str| line.find(word).expect(word);
    assert!(
        at("prompt") < at("zeta") && at("zeta") < at("\"a\":2") && at("mmm") < at("model"),
        "{line}"
    );
}

/// A maker of lines with any body.
fn maker_of_any(body: Value) -> LineMaker {
    let Value::Object(body) = body else { panic!("an object") };
    let stored = Stored { custom_id: None, url: CHAT.to_owned(), body };
    let text = String::from(LineTemplate(stored));
    LineTemplate::try_from(text).expect("its own text").compile("").expect("no wrong field")
}

#[test]
fn missing_fields_are_errors_of_their_lines() {
    let ask = |text: &str| {
        template(json!({ "model": "m", "messages": [{ "role": "user", "content": text }] }))
    };
    let earlier = json!({ "model": "m", "none": null, "list": ["a"] });
    let error = |text: &str, content: Option<&str>| {
        let line = made(ask(text), content, &earlier);
        assert_eq!((&line["custom_id"], &line["url"]), (&json!("q1"), &json!(CHAT)));
        line["row_error"].clone()
    };
    for (text, param) in [
        ("{{ previous.content }}", "previous.content"),
        ("a {{ previous.body.topic }}", "previous.body.topic"),
        ("{{ previous.body.topic }}", "previous.body.topic"),
        ("a {{ previous.body.none }}", "previous.body.none"),
        ("{{ previous.body.list.1 }}", "previous.body.list.1"),
        ("{{ previous.body.list.x }}", "previous.body.list.x"),
        ("{{ previous.body.model.x }}", "previous.body.model.x"),
    ] {
        let error = error(text, None);
        assert_eq!(error["code"], "template_missing_field", "{text}");
        assert_eq!((&error["param"], &error["status"]), (&json!(param), &json!(400)), "{text}");
        assert!(error["message"].as_str().expect("a text").contains(param), "{error}");
    }
    // A line cannot grow without an end.
    let long = "x".repeat(LINE_BYTES_MAX / 2);
    let many = "{{ previous.content }}".repeat(2000);
    assert_eq!(error(&many, Some(&long))["code"], "line_too_long");
    let escaped = "\u{1}".repeat(LINE_BYTES_MAX / 2);
    assert_eq!(error("{{ previous.content }}", Some(&escaped))["code"], "line_too_long");
}

#[test]
fn what_can_never_make_a_line_is_refused_at_once() {
    let refused = |template: Value| {
        let error = LineTemplate::parse(template, CHAT, "after.lines.").expect_err("refused");
        assert!(error.message.starts_with("after.lines"), "{error}");
        (error.code, error.param)
    };
    let check = |template: Value, code: &str, param: &str| {
        let shown = template.to_string();
        assert_eq!(refused(template), (code.to_owned(), param.to_owned()), "{shown}");
    };
    let user = |text: &str| json!([{ "role": "user", "content": text }]);
    let ask = |text: &str| json!({ "model": "m", "messages": user(text) });
    let fine = || ask("{{ previous.content }}");
    let with = |name: &str, value: Value| {
        let mut body = fine();
        body[name] = value;
        template(body)
    };
    assert!(LineTemplate::parse(template(fine()), CHAT, "").is_ok());
    assert!(LineTemplate::parse(template(fine()), MIXED, "").is_ok());
    check(json!("x"), "invalid_type", "after.lines");
    check(json!({ "body": fine() }), "missing_field", "after.lines.url");
    check(json!({ "url": CHAT }), "missing_field", "after.lines.body");
    check(json!({ "url": CHAT, "body": "x" }), "invalid_type", "after.lines.body");
    check(json!({ "url": "/v1/messages", "body": fine() }), "invalid_url", "after.lines.url");
    check(template(json!({ "messages": user("a") })), "missing_field", "after.lines.body.model");
    check(template(json!({ "model": "m" })), "missing_field", "after.lines.body.messages");
    check(with("temperature", json!(9)), "invalid_value", "after.lines.body.temperature");
    check(with("no_such", json!(9)), "unknown_parameter", "after.lines.body.no_such");
    let content = "after.lines.body.messages[0].content";
    check(template(ask("{{ previous.contnet }}")), "invalid_template", content);
    check(template(ask("{{ previous.content")), "invalid_template", content);
    let name = |name: &str| json!({ "custom_id": name, "url": CHAT, "body": fine() });
    check(name("always the same"), "invalid_template", "after.lines.custom_id");
    check(name("{{ custom_id }}"), "invalid_template", "after.lines.custom_id");
    let long = "x".repeat(TEMPLATE_BYTES_MAX);
    check(template(ask(&long)), "template_too_long", "after.lines");
    let extra = json!({ "url": CHAT, "body": fine(), "extra": 1 });
    assert_eq!(refused(extra).1, "after.lines.extra");
    // What a line decides is not refused before it.
    for body in [
        with("temperature", json!("{{ previous.body.temperature }}")),
        template(
            json!({ "model": "{{ previous.body.model }}", "messages": "{{ previous.body.messages }}" }),
        ),
    ] {
        assert!(LineTemplate::parse(body, CHAT, "").is_ok());
    }
    let model_of_line = |temperature: i32| {
        let mut body = fine();
        body["model"] = json!("{{ previous.body.model }}");
        body["temperature"] = json!(temperature);
        LineTemplate::parse(template(body), CHAT, "").is_ok()
    };
    assert!(model_of_line(1) && !model_of_line(9), "a model is a text");
}
