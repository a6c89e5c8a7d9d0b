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

/// Checks that a template is refused for a reason.
fn check_refused(template: &str, reason: &str) {
    let begin: String = template.chars().take(200).collect();
    let error = render(template, "").expect_err(&begin).to_string();
    assert!(error.contains(reason), "{begin}: {error}");
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
fn namespace_cannot_hold_itself() {
    let begins = "{% set a = namespace() %}{% set b = namespace() %}";
    let holds = [
        "{% set a.b = [a] %}{{ a == a }}",
        "{% set a.b = [a] %}{{ a in [a] }}{{ a != a }}{{ [a, a] | unique | list }}{{ a }}",
        "{% set a.b = b %}{% set b.a = a %}{{ a == b }}",
        "{% set a.b = {'c': (1, [a])} %}{{ a | tojson }}",
        "{% set a.b = {'c': a}.values() %}",
        "{% set a.b = cycler(1, a) %}",
        "{% set a.b = joiner(a) %}",
        "{% set a.b | default(a, true) %}{% endset %}",
        "{% set x, a.b = 1, [a] %}",
        "{% for x in [a] %}{% set a.b = loop %}{% endfor %}",
    ];
    for template in holds {
        check_refused(&format!("{begins}{template}"), "a namespace keeps no namespaces");
    }
    let kept =
        "{% set a.b = [1, {'c': messages}] %}{% set b = [a, b] %}{{ b[0].b[1].c == messages }}";
    check(&format!("{begins}{kept}"), "", "True");
    check(
        "{% for i in 'ab' %}{{ loop.changed(loop) }}{{ loop.changed(1) }}{% endfor %}",
        "",
        "TrueTrueTrueTrue",
    );
}

#[test]
fn deep_values_are_refused() {
    let deepens =
        "{% set n = namespace(a=1) %}{% for i in range(30000) %}{% set n.a = [n.a] %}{% endfor %}";
    let uses =
        ["n.a == [n.a]", "n.a in [n.a]", "[n.a] | sort", "n.a < [n.a]", "[n.a] | unique", "n.a"];
    for expression in uses {
        check_refused(&format!("{deepens}{{{{ {expression} }}}}"), "nested too deeply");
    }
    for step in
        ["[x]", "{'x': x}", "(x,)", "cycler(x)", "joiner(x)", "namespace(x=x)", "[x] | batch(1)"]
    {
        let template = format!("{{% set x = {step} %}}").repeat(100);
        check_refused(&format!("{{% set x = [] %}}{template}"), "nested too deeply");
    }
    // Arguments of a macro are kept by no name; what looks at them is bounded.
    let deep = |expression: &str| {
        let nested = format!("{}x{}", "[".repeat(15), "]".repeat(15));
        format!(
            "{{% macro f(x, n) %}}{{% if n %}}{{{{ f({nested}, n - 1) }}}}{{% else %}}\
             {{{{ {expression} }}}}{{% endif %}}{{% endmacro %}}{{{{ f(1, 6) }}}}"
        )
    };
    for expression in [
        "x == [x]",
        "x != [x]",
        "x < [x]",
        "x in [[x]]",
        "[x, [x]] | unique",
        "[x, [x]] | sort",
        "[x].index([x])",
        "x | string | length",
        "x ~ ''",
        "x | safe",
        "x | tojson",
        "'%s' % (x,)",
    ] {
        check_refused(&deep(expression), "nested too deeply");
    }
    check(&deep("x is iterable"), "", "True");
}

#[test]
fn values_that_hold_a_list_many_times_are_refused() {
    let doubles = "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}";
    check_refused(doubles, "more work than a template may ask for");
    let large = "[[[1] * 1000] * 1000] * 1000";
    for expression in [
        format!("{large} == {large}"),
        format!("{large} in [{large}]"),
        format!("({large}) | string | length"),
        format!("({large}) | tojson | length"),
        "range(99999) | unique | length".to_owned(),
    ] {
        check_refused(&format!("{{{{ {expression} }}}}"), "more work than a template may ask for");
    }
}

#[test]
fn mapping_has_no_lists_for_keys() {
    let lists = [
        "{[1]: 2}",
        "{(1, [2]): 3}",
        "dict([[[1], 2]])",
        "dict.fromkeys([[1]])",
        "{}.fromkeys([[1]])",
    ];
    for expression in lists {
        check_refused(&format!("{{{{ {expression} }}}}"), "unhashable type");
    }
    check("{{ {(1, 'a'): 2, none: 3}[(1, 'a')] }}{{ {'a': 1}[['a']] is undefined }}", "", "2True");
}

#[test]
fn long_chains_and_many_branches_do_not_parse() {
    let repeated =
        |begin: &str, part: &str, count, end: &str| format!("{begin}{}{end}", part.repeat(count));
    let chains = [
        ("{{ a", ".b", 100_000, " }}"),
        ("{{ a", "[0]", 50_000, " }}"),
        ("{{ a", "()", 100_000, " }}"),
        ("{{ 1", "|string", 30_000, " }}"),
        ("{{ 1", " is defined", 20_000, " }}"),
        ("{{ 1", " or 1", 40_000, " }}"),
        ("{{ 1", " and 1", 40_000, " }}"),
        ("{{ 1", " if 1", 40_000, " }}"),
        ("{% filter upper", "|upper", 30_000, " %}{% endfilter %}"),
    ];
    for (begin, part, count, end) in chains {
        check_refused(&repeated(begin, part, count, end), "links in the chains of a tag");
    }
    let parentheses = |begin: &str, end: &str| {
        format!("{begin}{}a{}{end}", "(".repeat(30_000), ")".repeat(30_000))
    };
    let nested = [
        parentheses("{% set ", "=1 %}"),
        parentheses("{% for ", " in [1] %}{% endfor %}"),
        parentheses("{% with ", "=1 %}{% endwith %}"),
        parentheses("{{ ", " }}"),
        "{% if 1 %}".repeat(20_000),
    ];
    for template in nested {
        check_refused(&template, "nested too deeply");
    }
    let branches = repeated("{% if 0 %}", "{% elif 0 %}", 20_000, "{% endif %}");
    check_refused(&branches, "times 'elif'");
    check_refused(&repeated("{% macro f(", "a,", 1_000, ") %}{% endmacro %}"), "parameters");
    check_refused(&"a".repeat(300_000), "longer than");
    let error = render(&branches, "").unwrap_err();
    assert!(matches!(error, TemplateError::Syntax(_)), "{error}");
}

#[test]
fn chains_and_branches_of_real_templates_render() {
    let branches: String = (1..100).map(|i| format!("{{% elif x == {i} %}}{i}")).collect();
    check(&format!("{{% set x = 77 %}}{{% if x == 0 %}}0{branches}{{% endif %}}"), "", "77");
    let nested = format!("{}1{}", "{'a': ".repeat(20), "}".repeat(20));
    check(&format!("{{% set x = {nested} %}}{{{{ x{} }}}}", ".a".repeat(20)), "", "1");
    check(&format!("{{{{ 'a'{} }}}}", " | upper | lower".repeat(20)), "", "a");
    let blocks = format!("{}x{}", "{% if true %}".repeat(40), "{% endif %}".repeat(40));
    check(&blocks, "", "x");
}

#[test]
fn lists_and_texts_that_would_be_too_long_are_not_made() {
    let doubles = "{% set n = namespace(s=['x']) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}";
    check_refused(doubles, "a value that is too long");
    for expression in [
        "[1] | batch(10 ** 10, 1) | list",
        "[1] | batch(10 ** 8, 1) | list | length",
        "[1] | slice(10 ** 10) | list",
        "[1] | slice(10 ** 30, 1) | length",
        "[1] * 10 ** 10",
        "'x' * 10 ** 10",
        "'x' | center(10 ** 10)",
        "'x' | indent(10 ** 10)",
        "'x' | indent(10 ** 30, true)",
        "'x'.center(10 ** 10)",
        "'x'.ljust(10 ** 10)",
        "'x\\ty'.expandtabs(10 ** 10)",
        "('a' * 10 ** 7) | list",
        "('a ' * 10 ** 7).split() | length",
        "('\\n' * 10 ** 7).splitlines() | length",
        "('\\x0b' * 10 ** 6) | indent('y' * 1000)",
        "range(10) | join('x' * 10 ** 7)",
    ] {
        check_refused(&format!("{{{{ {expression} }}}}"), "a value that is too long");
    }
    check_refused("{{ range(10 ** 12) | list }}", "range too big");
    check_refused("{{ 10 ** 10 ** 10 }}", "too large");
    check_refused("{{ [1] | tojson(indent=10 ** 10) }}", "indent");
    check_refused("{{ [1] | batch(0) }}", "at least 1");
    check(
        "{{ [1, 2, 3] | batch(linecount=2, fill_with=0) }}{{ [1, 2, 3] | slice(slices=2) }}",
        "",
        "[[1, 2], [3, 0]][[1, 2], [3]]",
    );
    check("{{ ('x' | center(100000)) | length }}{{ 'a' | truncate(2 ** 64 - 1) }}", "", "100000a");
}

#[test]
fn work_of_a_rendering_is_bounded() {
    let keeps = "{% set n = namespace(l=[]) %}{% for i in range(9999) %}{% set n.l = n.l + ['x' * 1000000 ~ i] %}{% endfor %}";
    let spreads = "{% macro f() %}{{ varargs | length }}{% endmacro %}{% set l = [1] * 1000000 %}{% for i in range(9999) %}{{ f(*l) }}{% endfor %}";
    let searches =
        "{% set x = 'a' * 1000000 %}{% for i in range(99999) %}{{ 'b' in x }}{% endfor %}";
    let copies = "{% set b = 'x' * 60000000 %}{% for i in range(1000) %}{% for j in range(1000) %}{% set y = 'a'.find(b) %}{% endfor %}{% endfor %}";
    let joins = "{% set l = [''] * 1000000 %}{% for i in range(9999) %}{% set y = ''.join(l) %}{% endfor %}";
    for template in [keeps, spreads, searches, copies, joins] {
        check_refused(template, "more work than a template may ask for");
    }
    for strip in ["trim('a' * 40000000 ~ 'b')", "string).strip('a' * 40000000 ~ 'b'"] {
        let template = format!("{{{{ (('b' * 40000000) | {strip}) | length }}}}");
        check_refused(&template, "a value that is too long");
    }
    for looks_up in [
        "([{'a': 1, 'b': 2}] * 500000) | selectattr('x' * 40000000)",
        "([{'a': 1, 'b': 2}] * 500000) | map(attribute='x' * 40000000)",
        "([{'a': 1, 'b': 2}] * 500000) | sum('x' * 40000000)",
        "[1] | attr('x' * 40000000)",
    ] {
        check_refused(&format!("{{{{ {looks_up} }}}}"), "a name that is too long");
    }
    let text = "x".repeat(100_000);
    let writes = [
        format!("{{% for i in range(99999) %}}{text}{{% endfor %}}"),
        format!("{{% for i in range(99999) -%}} {{% if i %}}{text}{{% endif %}}{{% endfor %}}"),
        format!(
            "{{% macro f(a=1) %}}{text}{{% endmacro %}}{{% for i in range(99999) %}}{{% set x = f() %}}{{% endfor %}}"
        ),
        format!(
            "{{% set x %}}{{% for i in range(99999) recursive %}}{text}{{% endfor %}}{{% endset %}}"
        ),
    ];
    for template in writes {
        check_refused(&template, "a value that is too long");
    }
    let line = "y".repeat(100);
    let counted = format!(
        "{{% for i in 'ab' %}}\n  {{% if i == 'a' %}}\n  {line}\n  {{%- endif -%}} \n{{% endfor %}}|\
         {{% macro f(a, b=a) -%}} {line}{{{{ a }}}}{{{{ b }}}}{{% endmacro %}}{{{{ f(1) }}}}"
    );
    check(&counted, "", &format!("  {line}|{line}11"));
    // The bound is one rendering's.
    let template = ChatTemplate::new("{{ 'x' * 50000000 }}".to_owned(), special());
    for _ in 0..3 {
        assert_eq!(template.render(&messages(""), true).unwrap().len(), 50_000_000);
    }
}

#[test]
fn functions_of_translations_cannot_be_replaced() {
    for template in [
        "{% set __iterate = range %}",
        "{% set a, __texts = 1, dict %}",
        "{% set __texts %}{% endset %}",
        "{% for __texts in [dict] %}{% endfor %}",
        "{% with __texts = dict %}{% endwith %}",
        "{% macro __texts(n) %}{% endmacro %}",
        "{% macro f(__texts) %}{% endmacro %}",
        "{% macro f() %}{% endmacro %}{% call(__texts) f() %}{% endcall %}",
    ] {
        check_refused(template, "can't assign to '__");
    }
}

#[test]
fn no_template_makes_minijinja_panic() {
    check("{{ (['nan', '2', '1'] * 50) | map('float') | sort | length }}", "", "150");
    check_refused("{% for i in [1] %}{{ loop.cycle() }}{% endfor %}", "no items for cycling");
    let by_another_name = "{% for i in [1] %}{% set l = loop %}{{ l.cycle(*[]) }}{% endfor %}";
    check_refused(by_another_name, "no items for cycling");
    let lowest = "{{ '--170141183460469231731687303715884105728' | int(5) }}";
    check(lowest, "", "5");
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
