//! Chat templates render as with transformers' `apply_chat_template`, and always terminate.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::path::Path;

use serde::Deserialize;
use serde_json::json;
use support::{Folder, messages};
use tritmill_engine::{
    chat::{ChatTemplate, Message, SpecialTokens, TemplateError},
    files::Model,
    tokenizer::TokenizerConfig,
};

fn special() -> SpecialTokens {
    [("bos_token".to_owned(), "<s>".to_owned())].into()
}

fn render(template: &str, content: &str) -> Result<String, TemplateError> {
    ChatTemplate::new(template.to_owned(), special()).render(&messages(content), true)
}

fn check(template: &str, content: &str, expected: &str) {
    assert_eq!(render(template, content).unwrap(), expected, "{template}");
}

/// Snippets and templates with what transformers renders; see `data/make_chat_snippets.py`.
#[derive(Deserialize)]
struct Snippets {
    variables: serde_json::Map<String, serde_json::Value>,
    messages: Vec<Message>,
    cases: Vec<Snippet>,
}

#[derive(Deserialize)]
struct Snippet {
    template: String,
    /// Absent if transformers refuses the template.
    expected: Option<String>,
}

#[test]
fn snippets_render_as_with_transformers() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/chat_snippets.json");
    let snippets: Snippets = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let text = |(name, value): (&String, &serde_json::Value)| {
        Some((name.clone(), value.as_str()?.to_owned()))
    };
    let special: SpecialTokens = snippets.variables.iter().filter_map(text).collect();
    let mut wrong = Vec::new();
    for Snippet { template, expected } in &snippets.cases {
        let rendered =
            ChatTemplate::new(template.clone(), special.clone()).render(&snippets.messages, true);
        if rendered.as_ref().ok() != expected.as_ref() {
            wrong.push(format!("{template:?}\n  expected {expected:?}\n  rendered {rendered:?}"));
        }
    }
    assert!(snippets.cases.len() > 1500, "the table is whole");
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn name_and_call_of_a_message_reach_the_template() {
    let template =
        "{% for m in messages %}{{ m.role }}({{ m.name }},{{ m.tool_call_id }}){{ m }}{% endfor %}";
    let mut message = Message::new("tool", "4");
    message.name = Some("add".to_owned());
    message.tool_call_id = Some("c1".to_owned());
    let rendered = ChatTemplate::new(template.to_owned(), special()).render(&[message], true);
    let expected =
        "tool(add,c1){'role': 'tool', 'content': '4', 'name': 'add', 'tool_call_id': 'c1'}";
    assert_eq!(rendered.unwrap(), expected);
}

#[test]
fn strftime_now_is_undefined() {
    let template = "{% if strftime_now is defined %}now{% else %}26 Jul 2024{% endif %}";
    check(template, "", "26 Jul 2024");
    assert!(render("{{ strftime_now('%Y') }}", "").is_err());
}

#[test]
fn exception_of_a_template_is_in_the_error_message() {
    let error = render("{{ raise_exception('roles must alternate') }}", "").unwrap_err();
    assert!(matches!(error, TemplateError::Render(_)));
    assert!(error.to_string().contains("roles must alternate"), "{error}");
}

#[test]
fn errors_name_the_line_of_the_template() {
    let error = render("a\n{{ messages\n| length }}\n{{ messages + 1 }}", "").unwrap_err();
    assert!(error.to_string().contains("chat_template:4"), "{error}");
    let error = render("a\r\n\r\n{% if %}", "").unwrap_err();
    assert!(error.to_string().contains("line 3"), "{error}");
}

#[test]
fn endless_template_is_stopped() {
    let nested = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}";
    let recursive = "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}";
    let growing = "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x * 9 %}{% endfor %}";
    let deep = format!("{{{{ {}1{} }}}}", "(".repeat(5000), ")".repeat(5000));
    let lists = "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x * 9 %}{% endfor %}";
    let grows = |by: &str| {
        let begin = "{% set ns = namespace(x='ab', l=[1]) %}{% for i in range(64) %}";
        format!("{begin}{{% set ns.x = {by} %}}{{% endfor %}}{{{{ ns.x | length }}}}")
    };
    let grown = [
        "ns.x ~ ns.x",
        "ns.x + ns.x",
        "ns.x.replace('a', ns.x)",
        "ns.x | replace('a', ns.x)",
        "ns.x.join('abcdefgh')",
        "[ns.x, ns.x] | join(ns.x)",
        "'%s%s' % (ns.x, ns.x)",
        "'{0}{0}'.format(ns.x)",
        "('a\\n' + ns.x) | indent(ns.x)",
        "ns.x.translate({97: ns.x})",
    ];
    let grown = grown.map(grows);
    let written = "{% for i in range(99999) %}{{ 'abc' * 999 }}{% endfor %}";
    let others = [nested, recursive, growing, &deep, lists, written];
    for template in grown.iter().map(String::as_str).chain(others) {
        assert!(render(template, "").is_err(), "{template}");
    }
}

#[test]
fn template_that_does_not_parse_refuses_conversations_alone() {
    let folder = Folder::copy("bitnet-tiny");
    folder.edit_json("tokenizer_config.json", |json| json["chat_template"] = json!("{% for %}"));
    let model = Model::open(folder.path()).unwrap();
    assert!(!model.tokenizer().encode("a", true).unwrap().is_empty());
    let template = model.chat_template().unwrap();
    assert!(matches!(template.check(), Err(TemplateError::Syntax(_))));
    assert_eq!(template.render(&messages("hi"), true), Err(template.check().unwrap_err()));
}

#[test]
fn default_of_several_templates_is_used() {
    let json = json!({
        "bos_token": { "content": "<s>", "lstrip": false },
        "chat_template": [{ "name": "tool_use", "template": "a" }, { "name": "default", "template": "b" }],
    });
    let named = TokenizerConfig::parse(Some(json.to_string().as_bytes()), None).unwrap();
    assert_eq!(named.special_tokens, special());
    assert_eq!(named.chat_template.as_deref(), Some("b"));
}

#[test]
fn template_file_overrides_the_configuration() {
    let folder = Folder::copy("bitnet-tiny");
    std::fs::write(folder.path().join("chat_template.jinja"), "from the file").unwrap();
    let model = Model::open(folder.path()).unwrap();
    assert_eq!(
        model.chat_template().unwrap().render(&messages("x"), true).unwrap(),
        "from the file"
    );
}
