#!/usr/bin/env python3
"""Makes chat_snippets.json: Jinja snippets, and the text that transformers renders.

Needs transformers 5.24.0 and jinja2 3.1.6:

    python3 engine/tests/data/make_chat_snippets.py > engine/tests/data/chat_snippets.json

A snippet that transformers refuses has the value null. Left out are texts with the address of an object, and what
Tritmill refuses or writes in another way: characters by name, half surrogate pairs, methods as values, `self`, texts
of namespaces and of slices of ranges, JSON of generators, and most methods of strings that are safe as HTML.
"""

import json
import re
import sys

import jinja2
import transformers
from transformers.utils.chat_template_utils import render_jinja_template

VARIABLES = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "add_generation_prompt": True,
}

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  Hello, World \n"},
    {"role": "assistant", "content": "Hi. <think>x</think> Yes"},
    {"role": "user", "content": "List a, b, c", "name": "Ada"},
]

# A line is a template, in which \\ stands for a backslash, and \n and \r for a line's end.
LINE_ENDS = {"\\": "\\", "n": "\n", "r": "\r"}
SNIPPETS = r"""
{{ messages[0] }}
{{ messages }}
{{ messages | length }} {{ messages | count }}
{{ messages[-1]['role'] }} {{ messages[9] }}{{ messages[9] is defined }}
{{ messages[1:] | map(attribute='role') | list }}
{{ messages[::-1] | map(attribute='role') | join(',') }}
{{ messages[:1] + messages[2:] }}
{{ messages[0].role.upper() }}{{ messages[0]['content'][0] }}{{ messages[0].content[-1] }}
{{ messages[0].nothing }}|{{ messages[0].nothing is defined }}
{{ messages[0].nothing.more }}
{{ nothing.more }}
{{ nothing }}|{{ nothing is none }}|{{ nothing | default('d') }}
{{ nothing + 1 }}
{{ 'a' ~ nothing ~ 'b' }}
{{ nothing == nothing2 }} {{ nothing == none }} {{ not nothing }}
{{ nothing | length }}
{{ nothing | upper }}|{{ nothing | trim }}|{{ nothing | list }}|{{ nothing | join(',') }}
{% for x in nothing %}{{ x }}{% else %}none{% endfor %}
{{ nothing() }}
{{ none.x }}
{{ 'x' in nothing }}
{{ none }} {{ true }} {{ false }} {{ None }} {{ True }} {{ False }}
{{ 1 }} {{ -1 }} {{ 1.0 }} {{ 1.5 }} {{ 1e3 }} {{ 1e16 }} {{ 1e15 }} {{ 1.5e-7 }} {{ 0.0001 }} {{ 0.00001 }} {{ 123456789.123 }}
{{ 1_000 }} {{ 0x1f }} {{ 0b101 }} {{ 0o17 }} {{ 1_0.5 }} {{ 1E5 }} {{ 2e-3 }}
{{ 0.1 + 0.2 }} {{ 1 / 3 }} {{ 4 / 2 }} {{ 7 // 2 }} {{ -7 // 2 }} {{ 7 % 3 }} {{ -7 % 3 }} {{ 7.5 // 2 }} {{ -7.5 % 2 }}
{{ 1 / 0 }}
{{ 1 // 0 }}
{{ 1 % 0 }}
{{ 2 ** 3 }} {{ 2 ** -1 }} {{ 2 ** 3 ** 2 }} {{ -2 ** 2 }} {{ 2.0 ** 0.5 }} {{ 0 ** 0 }}
{{ 1 + true }} {{ true + true }} {{ 1 == true }} {{ 1.0 == 1 }} {{ 'a' == 1 }} {{ [1] == [1.0] }} {{ (1,) == [1] }}
{{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ 'a' < 'b' }} {{ [1, 2] < [1, 3] }} {{ 2 > 1 >= 1 }} {{ 1 != 2 }}
{{ 'a' < 1 }}
{{ none < 1 }}
{{ [1] + 'a' }}
{{ 'a' + 1 }}
{{ 'a' + 'b' }} {{ 'a' * 3 }} {{ 3 * 'ab' }} {{ [1] * 2 }} {{ [1] + [2] }} {{ (1, 2) + (3,) }} {{ 'a' * -1 }}|
{{ 'a' ~ 1 ~ 1.0 ~ none ~ true ~ [1, 'x'] ~ {'a': 1} }}
{{ 1e20 ~ '' }} {{ [1e20, 1e-7] ~ '' }}
{{ 1 ~ 2 + 3 }}
{{ 1 + 2 ~ 3 }}
{{ not true }} {{ not '' }} {{ not 'a' }} {{ not [] }} {{ not 0 }} {{ true and 'x' }} {{ '' or 'y' }} {{ none and 1 }} {{ 0 or none }}
{{ 1 if true }} {{ 1 if false }}| {{ 1 if false else 2 }} {{ (1 if false) is undefined }}
{{ 'a' in 'abc' }} {{ 'x' not in 'abc' }} {{ 1 in [1, 2] }} {{ 'role' in messages[0] }} {{ 3 not in (1, 2) }} {{ '' in 'a' }}
{{ 1 in 'abc' }}
{{ 1 in 5 }}
{{ not 'a' in 'b' }}
{{ [1, 'a', none, true, 1.0, {'k': 'v'}, (1, 2), (1,), ()] }}
{{ {} }} {{ [] }} {{ () }} {{ {'a': [1, {'b': none}]} }} {{ {1: 2, none: 4} }}
{{ ['it\\'s', 'q"', 'both\\'"', 'new\\nline', 'tab\\t', 'back\\\\slash', '\\r', 'é', '\\x00', '\\x7f', '\\u200b', '😀'] }}
{{ 'a\\nb\\tc\\\\d\\'e"f' }} {{ "x'y" }} {{ 'é😀' }} {{ '\\u00e9' }} {{ '\\x41' }}
{{ 'a' 'b' }}
{{ 'abc'[0] }}{{ 'abc'[-1] }}{{ 'abc'[1:] }}{{ 'abc'[:-1] }}{{ 'abc'[::-1] }}{{ 'abc'[::2] }}{{ 'abcdef'[1:5:2] }}{{ 'abcdef'[4:1:-1] }}{{ 'abc'[5:] }}|{{ 'abc'[-9:2] }}
{{ [1, 2, 3, 4][1:3] }} {{ [1, 2, 3, 4][::-1] }} {{ [1, 2, 3][-2:] }} {{ (1, 2, 3)[1:] }} {{ [1, 2, 3][5:] }} {{ [1, 2, 3, 4, 5][4:0:-2] }} {{ [1,2,3][-1:-9:-1] }} {{ [1,2,3][:0:-1] }}
{{ 'abc'[5] }}|{{ [1][5] }}|{{ {'a': 1}['b'] }}|{{ {'a': 1}.b }}
{{ nothing[0] }}
{{ nothing[1:] }}
{{ 'ab'.upper() }} {{ 'AB'.lower() }} {{ 'hello wORLD'.title() }} {{ 'hello wORLD'.capitalize() }} {{ 'aB'.swapcase() }} {{ 'ẞß'.casefold() }} {{ 'ß'.upper() }} {{ "they're bill's".title() }} {{ 'ǆ'.title() }} {{ 'ΑΣ'.lower() }} {{ 'ŉx'.capitalize() }}
{{ '  a '.strip() }}|{{ '  a '.lstrip() }}|{{ '  a '.rstrip() }}|{{ 'xxaxx'.strip('x') }}|{{ 'xyaxy'.lstrip('yx') }}|{{ 'xyaxy'.rstrip('yx') }}|{{ ' a '.strip(none) }}|{{ 'aba'.strip('') }}
{{ '\\x1ca\\x1f\\x85\\xa0\\u3000'.strip() }}|{{ '\\x1ca\\x1d' | trim }}|{{ '\\u200ba'.strip() | length }}|{{ 'xax' | trim('x') }}
{{ 'a b  c'.split() }} {{ 'a,b,,c'.split(',') }} {{ 'a,b,c'.split(',', 1) }} {{ 'a b c'.split(none, 1) }} {{ ' a b '.split(maxsplit=1) }} {{ 'a,b'.split(sep=',') }} {{ ''.split() }} {{ ''.split(',') }} {{ 'abc'.split('b', -1) }}
{{ 'a'.split('') }}
{{ 'a b  c'.rsplit() }} {{ 'a,b,c'.rsplit(',', 1) }} {{ 'a b c'.rsplit(none, 1) }} {{ ' a b c '.rsplit(maxsplit=1) }} {{ 'a,b'.rsplit(',') }}
{{ 'a\\x1cb\\u2028c\\x0bd'.splitlines() }} {{ 'a\\r\\nb\\n\\nc\\n'.splitlines() }} {{ 'a\\r\\nb\\n'.splitlines(true) }} {{ ''.splitlines() }} {{ 'a\\n'.splitlines(keepends=true) }}
{{ 'a=b=c'.partition('=') }} {{ 'abc'.partition('=') }} {{ 'a=b=c'.rpartition('=') }} {{ 'abc'.rpartition('=') }}
{{ 'a'.partition('') }}
{{ 'unhappy'.removeprefix('un') }} {{ 'unhappy'.removeprefix('x') }} {{ 'a.txt'.removesuffix('.txt') }} {{ 'a.txt'.removesuffix('') }}
{{ 'banana'.index('n') }} {{ 'banana'.rindex('n') }} {{ 'banana'.find('x') }} {{ 'banana'.rfind('n') }} {{ 'banana'.find('a', 2) }} {{ 'banana'.find('a', 2, 3) }} {{ 'banana'.count('an') }} {{ 'banana'.count('a', 2) }} {{ 'banana'.count('') }} {{ 'éa'.find('a') }} {{ 'banana'.rfind('a', 0, -1) }} {{ 'banana'.find('') }} {{ 'ab'.find('', 3) }} {{ 'ab'.rfind('') }} {{ 'banana'.index('a', -2) }}
{{ 'banana'.index('x') }}
{{ 'banana'.rindex('x') }}
{{ 'ab'.zfill(5) }} {{ '-5'.zfill(4) }} {{ '+5'.zfill(4) }} {{ 'ab'.ljust(4) }}| {{ 'ab'.rjust(4) }} {{ 'ab'.center(5, '*') }} {{ 'abc'.center(6) }}| {{ 'ab'.ljust(5, '.') }} {{ 'ab'.rjust(5, '.') }} {{ 'ab'.center(7, '-') }} {{ 'a'.zfill(0) }}
{{ 'a'.ljust(3, 'xy') }}
{{ 'a\\tb\\n\\tc'.expandtabs() }}|{{ 'a\\tb'.expandtabs(4) }}|{{ '\\t'.expandtabs(0) }}|{{ 'ab\\tc'.expandtabs(tabsize=2) }}
{{ 'abc'.startswith('ab') }} {{ 'abc'.startswith(('x', 'a')) }} {{ 'abc'.startswith('b', 1) }} {{ 'abc'.startswith('b', 1, 2) }} {{ 'abc'.endswith(('x', 'c')) }} {{ 'abc'.endswith('b', 0, 2) }} {{ 'abc'.endswith('') }} {{ 'abc'.startswith(()) }} {{ 'abc'.startswith('', 4) }} {{ 'abc'.endswith('b', 0, -1) }}
{{ 'abc'.startswith(['a']) }}
{{ 'abc'.startswith(1) }}
{{ 'abc'.isalpha() }} {{ '12'.isdigit() }} {{ '²'.isdigit() }} {{ '²'.isdecimal() }} {{ '½'.isnumeric() }} {{ '½'.isdigit() }} {{ '一'.isnumeric() }} {{ 'a1'.isalnum() }} {{ ' '.isspace() }} {{ '\\x1c'.isspace() }} {{ ''.isspace() }} {{ 'AB'.isupper() }} {{ 'A1'.isupper() }} {{ '1'.isupper() }} {{ 'ab'.islower() }} {{ 'Ab Cd'.istitle() }} {{ 'AB'.istitle() }} {{ 'a_1'.isidentifier() }} {{ '1a'.isidentifier() }} {{ 'a b'.isprintable() }} {{ 'a\\n'.isprintable() }} {{ ''.isprintable() }} {{ 'é'.isascii() }} {{ ''.isascii() }} {{ ''.isalpha() }} {{ '٣'.isdecimal() }} {{ 'ªº'.islower() }}
{{ 'aXbX'.replace('X', '-') }} {{ 'aXbX'.replace('X', '-', 1) }} {{ 'ab'.replace('', '.') }} {{ 'aaa'.replace('a', 'b', 0) }} {{ 'aaa'.replace('aa', 'b') }} {{ 'ab'.replace('', '.', 2) }} {{ 'aXb'.replace('X', '-', -1) }}
{{ ', '.join(['a', 'b']) }} {{ ''.join([]) }}| {{ '-'.join('abc') }} {{ ','.join({'x': 1, 'y': 2}) }}
{{ ','.join([1]) }}
{{ 'abc'.translate({97: 'x', 98: none}) }} {{ 'a'.encode() }} {{ 'é'.encode('utf-8') }}
{{ 'abc'.nomethod() }}
{{ 'a'.upper(1) }}
{{ ''.maketrans('ab', 'xy') }}
{{ '%s' % 'a' }} {{ '%s %s' % ('a', 1) }} {{ '%d' % 3 }} {{ '%d' % 3.9 }} {{ '%5d|%-5d|%05d|%+d|% d' % (1, 2, 3, 4, 5) }} {{ '%x %X %o %#x' % (255, 255, 8, 255) }} {{ '%e %E %g %G' % (12345.678, 0.00012, 0.0001, 1e20) }} {{ '%.2f %8.3f %-8.1f|' % (1.005, 2.5, 3.14159) }} {{ '%%' % () }} {{ '%c%c' % ('a', 98) }} {{ '%r %s' % ('a', none) }} {{ '%(a)s %(b)05.1f' % {'a': 'x', 'b': 2.25} }} {{ '%*d' % (5, 3) }} {{ '%.3s|' % 'abcdef' }} {{ '%s' % [1, 2] }} {{ '%s' % {'a': 1} }} {{ '%i' % true }} {{ '%5s|%-5s|' % ('a', 'b') }}
{{ '%s %s' % ('a',) }}
{{ '%s' % ('a', 'b') }}
{{ '%d' % 'a' }}
{{ '%q' % 1 }}
{{ 'no' % 1 }}
{{ 'ok' % {} }}
{{ 'a%sb' % 1 ~ 'c' }} {{ 2 * '%s' % 3 }} {{ '%s' % 7 % 4 }}
{{ 10 % 4 * 2 }} {{ 2 * 7 % 4 }} {{ 7 % 4 + 1 }} {{ -7 % 4 }} {{ 7 % -4 }} {{ 2 ** 3 % 5 }} {{ 7 % 2 ** 2 }} {{ (7 % 4) % 2 }} {{ 7 % 4 is even }} {{ loop_ % 2 if loop_ is defined else 'x' }} {{ [7 % 4, 9 % 4] }} {{ {'a': 7 % 4} }} {{ 'x' if 7 % 2 == 1 else 'y' }}
{% for i in range(4) %}{{ loop.index0 % 2 }}{% if loop.index % 2 == 0 %}e{% endif %}{% if (loop.index0 % 2 == 0) != false %}o{% endif %}{% endfor %}
{% if (messages[0].role == 'user') != (0 % 2 == 0) %}a{% else %}b{% endif %}
{{ '%05d' | format(42) }} {{ '%s-%s' | format('a', 'b') }} {{ '%(x)s' | format(x=1) }} {{ '%s' | format([1]) }}
{{ '{} and {name!s:>5}'.format('a', name='b') }} {{ '{0} {1} {0}'.format('a', 'b') }} {{ '{:>5}|{:<5}|{:^5}|{:*^7}'.format('a', 'b', 'c', 'd') }} {{ '{:05d} {:+d} {:,} {:x} {:#b}'.format(42, 7, 1234567, 255, 5) }} {{ '{:.2f} {:8.3f} {:e} {:g} {:%}'.format(3.14159, 2.5, 12345.678, 0.0001, 0.25) }} {{ '{{}} {}'.format(1) }} {{ '{a[x]} {a[0]}'.format(a={'x': 1, 0: 2}) }} {{ '{!r}'.format('x') }} {{ '{:{w}}|'.format('a', w=4) }} {{ '{:{}}|'.format('a', 4) }} {{ '{}'.format(none) }} {{ '{}'.format([1, 'a']) }} {{ '{:s}'.format('x') }} {{ '{}'.format(1.0) }} {{ '{:d}'.format(true) }} {{ '{}'.format(true) }} {{ '{:.1}'.format('xyz') }} {{ '{:c}'.format(65) }} {{ '{:_}'.format(1234567) }} {{ '{:n}'.format(5) }} {{ '{!a}'.format('é') }}
{{ '{}'.format() }}
{{ '{a}'.format(b=1) }}
{{ '{:d}'.format('x') }}
{{ '{'.format() }}
{{ '{0.role}'.format(messages[0]) }}
{{ '{0[role]}'.format(messages[0]) }}
{{ '{a} {b}'.format_map({'a': 1, 'b': 2}) }}
{{ '{:>{}}'.format('x', 3) ~ '|' }} {{ '{:<3}|'.format(7) }} {{ '{:^3}|'.format(7) }} {{ '{:=+5d}'.format(7) }} {{ '{:>05}'.format('a') }} {{ '{:10.3}|'.format(3.14159) }} {{ '{:.0f}'.format(2.5) }} {{ '{:g}'.format(1000000.0) }} {{ '{:,.2f}'.format(1234.5) }} {{ '{:05}'.format(-3) }} {{ '{:08.2f}'.format(-3.14159) }}
{{ (5).bit_length() }} {{ (5).bit_count() }} {{ (5).numerator }} {{ (5).denominator }} {{ (5).real }} {{ (5).imag }} {{ (5).conjugate() }} {{ (2.5).is_integer() }} {{ (2.0).is_integer() }} {{ (2.5).as_integer_ratio() }} {{ (2.5).real }} {{ (2.5).hex() }} {{ true.real }} {{ (0.0).imag }} {{ (5).as_integer_ratio() }} {{ (-8).bit_length() }}
{{ (5).is_integer() }}
{{ (5).nomethod() }}
{{ (5).to_bytes(2, 'big') }}
{{ [3, 1].index(1) }} {{ [3, 1, 3].count(3) }} {{ (3, 1).index(1) }} {{ [1, 2].copy() }} {{ (1, 1).count(1) }}
{{ [3, 1].index(9) }}
{% set l = [1] %}{% set _ = l.append(2) %}{{ l }}
{% set l = [1] %}{% do l.append(2) %}{{ l }}
{% set l = [1, 2] %}{{ l.pop() }}
{% set l = [1, 2] %}{{ l.extend([3]) }}
{% set l = [1, 2] %}{{ l.reverse() }}
{% set l = [1, 2] %}{{ l.sort() }}
{% set l = [1, 2] %}{{ l.insert(0, 3) }}
{% set l = [1, 2] %}{{ l.remove(1) }}
{% set l = [1, 2] %}{{ l.clear() }}
{% set d = {} %}{{ d.update({'a': 1}) }}
{% set d = {} %}{{ d.setdefault('a', 1) }}
{% set d = {'a': 1} %}{{ d.pop('a') }}
{% set d = {'a': 1} %}{{ d.popitem() }}
{% set d = {'a': 1} %}{{ d.clear() }}
{% set d = {'a': 1} %}{{ d.append is defined }} {{ [].append is defined }}
{% for k, v in {'b': 1, 'a': 2}.items() %}{{ k }}={{ v }} {% endfor %}{{ {'a': 1}.get('b', 'none') }} {{ {'a': 1}.get('a') }} {{ {'a': 1}.get('x') }} {{ {'a': 1, 'b': 2}.keys() | list }} {{ {'a': 1}.values() | list }} {{ {'a': 1}.copy() }} {{ {'a': 1}.items() | list }}
{{ {'a': 1}.keys() }} {{ {'a': 1}.values() }} {{ {'a': 1}.items() }}
{{ 'a' in {'a': 1}.keys() }} {{ {'a': 1}.items() | length }} {{ {'b': 1, 'a': 2} | list }} {{ {'items': 5}['items'] }}
{{ {'a': 1}.fromkeys(['x', 'y'], 0) }} {{ dict(a=1, b=2) }} {{ dict([('x', 1)]) }} {{ dict({'a': 1}, b=2) }} {{ dict.fromkeys(['a'], 1) }}
{% for a, b in [(1, 2), [3, 4]] %}{{ a }}{{ b }} {% endfor %}{% for (a, b), c in [((1, 2), 3)] %}{{ a }}{{ b }}{{ c }}{% endfor %}
{% for x in [1, 2, 3] %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.depth }}{{ loop.depth0 }} {% endfor %}
{% for x in [1, 2, 2, 3] %}{{ loop.changed(x) }}{{ loop.cycle('a', 'b') }} {% endfor %}
{% for x in [1, 2, 3] if x != 2 %}{{ x }}{{ loop.index }}{{ loop.length }}{% endfor %}
{% for x in [] %}x{% else %}empty{% endfor %}{% for x in 'abc' %}{{ x }}.{% endfor %}{% for k in {'a': 1} %}{{ k }}{% endfor %}
{% for x in [1, [2, [3]]] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{% endif %}{% endfor %}
{% for x in [1, 2, 3] %}{% if loop.previtem is defined %}{{ loop.previtem }}<{% endif %}{{ x }}{% if loop.nextitem is defined %}>{{ loop.nextitem }}{% endif %} {% endfor %}
{% for x in range(9) %}{% if x == 2 %}{% continue %}{% endif %}{% if x == 5 %}{% break %}{% endif %}{{ x }}{% endfor %}
{% set x = 1 %}{% for i in [1] %}{% set x = 2 %}{{ x }}{% endfor %}{{ x }}
{% set x = 1 %}{% if true %}{% set x = 2 %}{% endif %}{{ x }}
{% set ns = namespace(x=1) %}{% for i in [1, 2] %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}
{% set ns = namespace({'a': 1}, b=2) %}{{ ns.a }}{{ ns.b }}{{ ns.c }}|{{ ns['a'] }}
{% set ns = namespace() %}{% set ns._x = 1 %}{{ ns._x }}
{% set a, b = 1, 2 %}{{ a }}{{ b }} {% set t = 1, 2 %}{{ t }} {% set a, b = [3, 4] %}{{ a }}{{ b }}
{% set a, b = [1, 2, 3] %}
{% set x %}a{{ 1 }}{% endset %}{{ x }} {% set y | upper %}abc{% endset %}{{ y }} {% set z | replace('a', 'b') | upper %}aa{% endset %}{{ z }}
{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{{ a is defined }} {% with %}{% set q = 1 %}{{ q }}{% endwith %}{{ q is defined }}
{% filter upper %}abc {{ 'd' }}{% endfilter %} {% filter replace('a', 'b') | upper %}aa{% endfilter %}
{% macro f(a, b='x') %}{{ a }}{{ b }}{% endmacro %}{{ f(1) }} {{ f(1, 2) }} {{ f(b=3, a=4) }} {{ f() }}
{% macro f(a, b='x') %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{{ caller is defined }}{% endmacro %}{{ f(1) }}|{{ f(1, 2, 3, k=4) }}|{{ f(b=2) }}|{{ f(1, 2, 3, 4) }}
{% macro f() %}{% for v in varargs %}{{ v }};{% endfor %}{% for k, v in kwargs.items() %}{{ k }}={{ v }};{% endfor %}{% endmacro %}{{ f(1, 2, a=3) }}{{ f() }}
{% macro f(a) %}{{ a }}{% if varargs %}+{{ f(*varargs) }}{% endif %}{% endmacro %}{{ f(1, 2, 3) }}
{% macro f(a) %}{{ a }}{% endmacro %}{{ f(1, 2) }}
{% macro f(a) %}{{ a }}{% endmacro %}{{ f(b=2) }}
{% macro f(a) %}[{{ caller(a) }}]{% endmacro %}{% call(x) f(1) %}<{{ x }}>{% endcall %} {% macro g() %}{{ caller() }}{{ caller() }}{% endmacro %}{% call g() %}y{% endcall %}
{% macro f(a, b=a) %}{{ b }}{% endmacro %}{{ f(1) }} {% macro g(x) %}{{ x }}{{ messages | length }}{% endmacro %}{{ g(2) }} {{ g.name }} 
{% macro f(n) %}{{ n }}{% if n > 0 %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}
{% set x = 5 %}{% macro f() %}{{ x }}{% endmacro %}{% set x = 6 %}{{ f() }}
{% macro f() %}a{% endmacro %}{{ f() | upper }}{{ f() ~ 'b' }}{{ f() + 'c' }}{{ f() is string }}{{ f() == 'a' }}
{% macro f(a, b) %}{{ a }}{{ b }}{% endmacro %}{{ f(*[1, 2]) }} {{ f(**{'a': 3, 'b': 4}) }} {{ f(*(5,), b=6) }}
{% generation %}a{{ 1 }}{% endgeneration %} {%- generation -%} b {%- endgeneration -%} c
{% for m in messages %}{% generation %}{{ m.role }}{{ loop.index }}{% set q = 1 %}{% endgeneration %}{{ q is defined }}{% endfor %}
{% raw %}{{ x }}{% y %}{% endraw %} {%- raw -%} {{ z }} {%- endraw %}
{# note #}a{#- note -#} b {# {{ x }} #}c
{{ '{{' }} {{ '}}' }} {{ '%}' }} {{ "{# x #}" }}
{% if false %}a{% elif 1 %}b{% else %}c{% endif %}{% if not messages %}x{% endif %}
{% autoescape true %}{{ '<a>' }}{% endautoescape %}{{ '<a>' }}
{% include 'x' %}
{% extends 'x' %}
{% import 'x' as y %}
{% block a %}x{{ 1 }}{% endblock %}{{ self.a() }}
{{ '<a href="x">&\\'' | e }} {{ '<b>' | escape }} {{ '<b>' | safe }} {{ '<b>' | forceescape }} {{ ('<b>' | e) ~ '<i>' }} {{ '&lt;b>' | striptags }} {{ '<p>a  <b>b</b></p>' | striptags }} {{ ('<b>' | e) | e }} {{ '<a>' | e is escaped }} {{ '<a>' is escaped }}
{{ ('<b>' | e) + '<i>' }} {{ '<i>' + ('<b>' | e) }} {{ ('<b>' | safe) + '<i>' }} {{ ('<b>' | safe) ~ '<i>' }} {{ ['<b>' | e, '<i>'] | join }} {{ ('a' | safe).upper() }} {{ ('%s' | safe) % '<' }} {{ ('<' | e) * 2 }}
{{ -5 | abs }} {{ (-5) | abs }} {{ -5.5 | abs }} {{ 3 | abs }}
{{ messages[0] | attr('role') }}
{{ [1, 2, 3] | batch(2) | list }} {{ [1, 2, 3] | batch(2, 'x') | list }} {{ [1, 2, 3, 4, 5] | slice(2) | list }} {{ [1, 2, 3, 4, 5] | slice(3, 'x') | list }}
{{ 'ab' | center(6) }}| {{ 'hello world' | capitalize }} {{ 'hello-world foo_bar (x)' | title }} {{ "they're" | title }} {{ 1 | upper }} {{ none | upper }} {{ 'ABC' | lower }}
{{ 'x' | default('y') }} {{ '' | default('y') }} {{ '' | default('y', true) }} {{ none | default('z') }} {{ none | default('z', true) }} {{ nope | d('q') }} {{ nope.x | default('r') }} {{ none | default(default_value='z', boolean=true) }} {{ nope | default }}|
{{ {'b': 1, 'A': 2, 'a': 3} | dictsort }} {{ {'b': 1, 'A': 2} | dictsort(true) }} {{ {'b': 1, 'a': 2} | dictsort(by='value') }} {{ {'b': 1, 'a': 2} | dictsort(reverse=true) }} {{ {'b': 1, 'a': 2} | dictsort(false, 'value', true) }}
{{ 1000 | filesizeformat }} {{ 1 | filesizeformat }} {{ 999 | filesizeformat }} {{ 1234567 | filesizeformat }} {{ 1234567 | filesizeformat(true) }} {{ 0 | filesizeformat }} {{ 1e12 | filesizeformat }} {{ '2000' | filesizeformat }}
{{ [1, 2] | first }} {{ [1, 2] | last }} {{ 'abc' | first }} {{ 'abc' | last }} {{ [] | first }}| {{ [] | last }}| {{ {'a': 1} | first }}
{{ '3' | int }} {{ '3.7' | int }} {{ 'x' | int }} {{ 'x' | int(5) }} {{ 3.9 | int }} {{ -3.9 | int }} {{ '0x1f' | int(0, 16) }} {{ '1f' | int(base=16) }} {{ '101' | int(base=2) }} {{ ' 42 ' | int }} {{ none | int }} {{ true | int }} {{ '1e3' | int }} {{ '1_000' | int }} {{ [] | int(7) }}
{{ '3.5' | float }} {{ 'x' | float }} {{ 'x' | float(1.5) }} {{ 3 | float }} {{ '1e3' | float }} {{ 'inf' | float }} {{ 'nan' | float }} {{ none | float(2.0) }} {{ '-inf' | float }} {{ ' 1.5 ' | float }}
{{ messages | groupby('role') | map('first') | list }} {% for g in messages | groupby('role') %}{{ g.grouper }}:{{ g.list | length }} {% endfor %}{% for k, v in [{'a': 2}, {'a': 1}, {}] | groupby('a', default=0) %}{{ k }}{{ v }}{% endfor %} {{ [{'a': 'B'}, {'a': 'b'}] | groupby('a') }} {{ [{'a': 'B'}, {'a': 'b'}] | groupby('a', case_sensitive=true) }}
{{ messages | groupby('role') }}
{{ 'a\\nb\\n\\nc' | indent }}| {{ 'a\\nb' | indent(2) }} {{ 'a\\nb' | indent(2, true) }} {{ 'a\\n\\nb' | indent(2, false, true) }} {{ 'a\\nb' | indent('> ') }} {{ 'a\\nb' | indent(width=1, first=true, blank=true) }} {{ 'a\\nb\\n' | indent(2) }}|
{{ {'a': 1} | items | list }} {{ nope | items | list }}
{{ [1, 2] | join(',') }} {{ ['a', 'b'] | join }} {{ messages | join(',', attribute='role') }} {{ 'abc' | join('-') }} {{ [1, none, 'a', 1.0] | join('|') }} {{ [[1], 'x'] | join(' ') }} {{ {'a': 1} | join }} {{ messages | join(d='/', attribute='role') }}
{{ [3, 1, 2] | max }} {{ [3, 1, 2] | min }} {{ ['b', 'A'] | min }} {{ ['b', 'A'] | max(true) }} {{ [{'a': 1}, {'a': 3}] | max(attribute='a') }} {{ [] | max }}| {{ 'hello' | max }}
{{ messages | map(attribute='content') | map('trim') | list }} {{ ['a', 'b'] | map('upper') | join }} {{ messages | map(attribute='name', default='-') | list }} {{ [[1, 2], [3]] | map('first') | list }} {{ ['a-b'] | map('replace', '-', '+') | list }} {{ [{'a': {'b': 1}}] | map(attribute='a.b') | list }} {{ [[1, 2]] | map(attribute=1) | list }} {{ ['1', '2'] | map('int') | sum }}
{{ [1] | map('nofilter') | list }}
{{ [1, 2, 3] | pprint }} {{ {'b': 1, 'a': 'x'} | pprint }} {{ 'x' | pprint }}
{{ [5] | random }} {{ [1, 2, 3] | reverse | list }} {{ 'abc' | reverse }} {{ (1, 2) | reverse | list }}
{{ [0, 1, '', 'a', none] | select | list }} {{ [0, 1, '', 'a', none] | reject | list }} {{ [1, 2, 3] | select('odd') | list }} {{ [1, 2, 3, 4] | select('divisibleby', 2) | list }} {{ [1, 2, 3] | reject('greaterthan', 1) | list }} {{ [1, 'a', none] | select('string') | list }} {{ [1, 2, 3] | select('in', [1, 3]) | list }} {{ ['ab', 'c'] | select('eq', 'c') | list }}
{{ messages | selectattr('name') | list | length }} {{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }} {{ messages | rejectattr('role', 'in', ['user', 'system']) | list | length }} {{ messages | selectattr('name', 'defined') | map(attribute='role') | list }} {{ messages | rejectattr('name') | list | length }} {{ messages | selectattr('role', '==', 'user') | first }}
{{ [1, 2] | select('notest') | list }}
{{ messages | selectattr('role') | list }}
{{ [3, 1, 2] | sort }} {{ [3, 1, 2] | sort(reverse=true) }} {{ ['b', 'A', 'c'] | sort }} {{ ['b', 'A', 'c'] | sort(case_sensitive=true) }} {{ messages | sort(attribute='role') | map(attribute='role') | list }} {{ 'bca' | sort }} {{ [{'a': 2, 'b': 1}, {'a': 1, 'b': 2}] | sort(attribute='a,b') }} {{ {'b': 1, 'a': 2} | sort }} {{ [(1, 'b'), (1, 'a')] | sort }}
{{ [1, 'a'] | sort }}
{{ 5 | string }}{{ none | string }}{{ [1, 'a'] | string }}{{ 1.0 | string }}{{ 1e20 | string }}{{ true | string }}
{{ [1, 2, 3] | sum }} {{ [1, 2.5] | sum }} {{ [{'a': 1}, {'a': 2}] | sum(attribute='a') }} {{ [1, 2] | sum(start=10) }} {{ [] | sum }} {{ [[1], [2]] | sum(start=[]) }} {{ messages | sum(attribute='nope', start=0) }}
{{ 2.567 | round(1) }} {{ 2.5 | round }} {{ 3.5 | round }} {{ 2.567 | round(2, 'floor') }} {{ 2.561 | round(1, 'ceil') }} {{ 42 | round }} {{ 1234 | round(-2) }} {{ -2.5 | round }} {{ 2.675 | round(2) }} {{ 0.5 | round | int }}
{{ 'long text here' | truncate(8, true, '..') }} {{ 'long text here' | truncate(8) }} {{ 'short' | truncate(8) }} {{ 'long text here and more' | truncate(10, leeway=0) }} {{ 'abcdefghijk' | truncate(5, true, '') }} {{ 'foo bar baz qux' | truncate(9, end='>', leeway=0) }} {{ 'foo bar baz qux' | truncate(11, false, '...', 5) }}
{{ ['b', 'a', 'B'] | unique | list }} {{ ['b', 'a', 'B'] | unique(true) | list }} {{ messages | unique(attribute='role') | map(attribute='role') | list }} {{ [1, 1.0, true, 2] | unique | list }}
{{ 'a b&c/d?é' | urlencode }} {{ {'a': 1, 'b c': 'x&y'} | urlencode }} {{ [('a', 1), ('b', 2)] | urlencode }} {{ 1 | urlencode }}
{{ 'see http://example.com/x now' | urlize }} {{ 'www.example.com' | urlize(nofollow=true) }} {{ 'me@example.com' | urlize }} {{ 'http://a.example/long/path' | urlize(10) }} {{ 'x http://a.example' | urlize(target='_blank') }} {{ '(http://a.example).' | urlize }}
{{ 'a b c' | wordcount }} {{ '' | wordcount }} {{ "it's a-b x_y" | wordcount }}
{{ 'the quick brown fox jumps' | wordwrap(10) }} {{ 'abcdefghijkl' | wordwrap(5) }} {{ 'abcdefghijkl' | wordwrap(5, false) }} {{ 'aa bb cc' | wordwrap(4, wrapstring='|') }} {{ 'a\\nbb cc' | wordwrap(4) }} {{ 'well-known fact' | wordwrap(6) }} {{ 'well-known fact' | wordwrap(6, break_on_hyphens=false) }}
{{ {'class': 'a b', 'id': none, 'x': '<'} | xmlattr }} {{ {'a': 1} | xmlattr(false) }} {{ {} | xmlattr }}|
{{ {'a b': 1} | xmlattr }}
{{ 'abcabc' | replace('a', 'x') }} {{ 'aaa' | replace('a', 'b', 2) }} {{ 1 | replace(1, 2) }} {{ 'ab' | replace('', '-') }}
{{ 'x' | nofilter }}
{{ x is notest }}
{{ {'k': 'é ü', 'n': [1, 2.5, none, true]} | tojson }} {{ {'k': 'é'} | tojson(ensure_ascii=true) }} {{ {'b': 1, 'a': [1, 2]} | tojson(separators=(',', ':')) }} {{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }} {{ '😀' | tojson(ensure_ascii=true) }} {{ [] | tojson }} {{ {} | tojson }} {{ [] | tojson(indent=2) }} {{ {} | tojson(indent=2) }} {{ '"\\\\\\n\\t\\x08\\x0c\\r\\x01\\x7f/<>&' | tojson }} {{ 1e20 | tojson }} {{ 1.0 | tojson }} {{ (1, 2) | tojson }} {{ {1: 2, none: 3, false: 4, 1.5: 5} | tojson }} {{ 'nan' | float | tojson }} {{ 'inf' | float | tojson }} {{ 1e-7 | tojson }}
{{ {'b': 1, 'a': [1, 2, {'c': []}]} | tojson(indent=4) }} {{ {'b': 1, 'a': [1, 2]} | tojson(indent=2, separators=(', ', ' = ')) }} {{ [1, [2]] | tojson(indent='--') }} {{ [1] | tojson(indent=0) }} {{ {'b': {'z': 1, 'y': 2}, 'a': 1} | tojson(indent=1, sort_keys=true) }} {{ [1, 2] | tojson(separators=('', '')) }} {{ {'a': 1} | tojson(false, 2) }} {{ {'a': 1} | tojson(indent=none) }}
{{ nope | tojson }}
{{ {(1, 2): 3} | tojson }}
{{ {'b': 1, 2: 3} | tojson(sort_keys=true) }}
{{ {'a': 1} | tojson(foo=1) }}
{{ 'a\\u2028b' | tojson }} {{ "é" | tojson(ensure_ascii=True) }} {{ '\\x1c' | tojson }}
{{ true is boolean }} {{ 1 is boolean }} {{ 1 is integer }} {{ true is integer }} {{ 1.0 is float }} {{ 1 is number }} {{ true is number }} {{ 'a' is number }} {{ 'x' is string }} {{ none is none }} {{ [] is sequence }} {{ 'a' is sequence }} {{ {} is sequence }} {{ 1 is sequence }} {{ {} is mapping }} {{ [] is mapping }} {{ 'a' is iterable }} {{ 1 is iterable }} {{ range(3) is iterable }} {{ range(3) is sequence }} {{ (1,) is sequence }} {{ nope is iterable }} {{ nope is sequence }} {{ nope is string }}
{{ 3 is odd }} {{ 3 is even }} {{ 9 is divisibleby 3 }} {{ 9 is divisibleby(2) }} {{ 'a' is lower }} {{ 'A' is upper }} {{ x is defined }} {{ x is undefined }} {{ true is true }} {{ 1 is true }} {{ false is false }} {{ 0 is false }} {{ 1 is sameas 1 }} {{ none is sameas none }} {{ 1 is eq 1 }} {{ 1 is equalto 2 }} {{ 1 is ne 2 }} {{ 1 is lt 2 }} {{ 1 is lessthan 0 }} {{ 1 is le 1 }} {{ 2 is gt 1 }} {{ 2 is greaterthan 3 }} {{ 2 is ge 2 }} {{ 1 is in [1] }} {{ 1 is not in [1] }} {{ range is callable }} {{ 1 is callable }} {{ 'upper' is filter }} {{ 'nope' is filter }} {{ 'odd' is test }} {{ 'nope' is test }} {{ 1 is not none }} {{ not 1 is none }} {{ 1 is == 1 }}
{{ 'wordcount' is filter }} {{ 'tojson' is filter }} {{ 'split' is filter }} {{ 'lines' is filter }} {{ 'bool' is filter }} {{ 'zip' is filter }} {{ 'chain' is filter }} {{ 'startingwith' is test }} {{ 'safe' is test }} {{ 'int' is test }} {{ debug is defined }}
{{ 'a,b' | split(',') }}
{{ 1 is startingwith 'a' }}
{{ debug() }}
{{ range(3) | list }} {{ range(1, 4) | list }} {{ range(5, 0, -2) | list }} {{ range(0) | list }} {{ range(3) }} {{ range(0, 10, 3)[1] }} {{ range(3) | length }} {{ 2 in range(3) }} {{ range(3)[-1] }} {{ range(5)[1:3] | list }}
{{ range(1, 2, 0) }}
{{ range(100001) | length }}
{{ range(99999) | length }}
{% set j = joiner(', ') %}{% for m in messages %}{{ j() }}{{ m.role }}{% endfor %} {% set k = joiner() %}{{ k() }}a{{ k() }}b
{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }} {{ c.current }} {% set _ = c.reset() %}{{ c.next() }}
{{ cycler() }}
{{ lipsum is defined }} {{ (lipsum(1, false, 3, 5) | wordcount) >= 3 }}
{{ namespace is defined }} {{ dict is defined }} {{ raise_exception is defined }} {{ tools is none }} {{ documents is none }} {{ tools is defined }} {{ custom is defined }} {{ range is defined }}
{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token }}{{ sep_token }}{{ additional_special_tokens }}{{ additional_special_tokens[1] }}
{{ raise_exception('no') }}
{{ raise_exception('no') if false else 'yes' }}
{{ ''.__class__ }}|{{ ''.__class__ is defined }}
{{ ''.__class__.__mro__ }}
{{ [].__len__() }}
{{ messages.__class__ }}|
{{ (1).__class__ }}|{{ messages[0]['__class__'] }}|
{{ f.__globals__ }}
{{ messages[0].items() | list }} {{ messages[0].keys() | list | sort }} {{ messages[0].get('role') }} {{ messages[3].name }} {{ messages[2].name }}|
{{ messages[0].update({'a': 1}) }}
{{ messages.append(1) }}
{{ loop is defined }} {{ caller is defined }} {{ varargs is defined }}
{{ [x for x in [1]] }}
{{ lambda: 1 }}
{% set x = 1 if true else 2 %}{{ x }} {% set y = [1, 2,] %}{{ y }} {% set z = {'a': 1,} %}{{ z }} {{ (1, 2,) }} {{ (1) }} {{ ((1,),) }}
{{ 1,2 }} {{ 'a', }}
{% for x in 1, 2 %}{{ x }}{% endfor %}
{{ {'a': 1}['a'] }} {{ {'a': {'b': [1, 2]}}.a.b[1] }} {{ {'a b': 1}['a b'] }} {{ {1: 'x'}[1] }} {{ {1: 'x'}[1.0] }} {{ [10, 20].1 }} {{ {'0': 'a'}['0'] }}
{{ messages | map(attribute='role') | unique | sort | list | tojson }}
{%- set first = messages[0] -%}{%- if first.role == 'system' -%}S:{{- first.content -}}{%- endif -%}
  {%- if true %}\n  a\n  {%- endif %}\n  {% if true %}\n  b\n  {%+ endif %}\n  c {#- note -#} d
a\n{% if true %}\nb\n{% endif %}\nc\n
{% if true -%}\n  x\n{%- endif %}\n\n
  {% set x = 1 %}  \n{{ x }}\n\n
line1\r\nline2\r{{ 'x' }}\r\n
{{ 'a\r\nb' | length }}{{ 'a\rb' }}
\n\na\n\n
{{ messages[0].content\n  | upper\n}}
{%- for message in messages %}\n{{- '<|' + message['role'] + '|>\\n' + message['content'] | trim + '<|end|>\\n' }}\n{%- endfor %}\n{%- if add_generation_prompt %}\n{{- '<|assistant|>\\n' }}\n{%- endif %}
{{ messages[-1].content.split(',')[-1].strip() }} {{ messages[2].content.split('</think>')[-1].lstrip() }} {{ (messages | last).role }} {{ messages[2]['content'].split('<think>') | first }}
{{ 'a' if messages[0]['role'] == 'system' else 'b' }}{{ messages[0]['role'] == 'system' and 'yes' or 'no' }}
{% set system_message = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}{% set loop_messages = messages[1:] %}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if loop.index0 == 0 %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}
{% set ns = namespace(found=false) %}{% for m in messages | reverse %}{% if not ns.found and m.role == 'user' %}{% set ns.found = true %}{{ m.content }}{% endif %}{% endfor %}
{{ 'abc' | list }} {{ {'a': 1, 'b': 2} | list }} {{ (1, 2) | list }} {{ range(2) | list }} {{ 'é' | length }} {{ {'a': 1} | length }} {{ (1, 2) | length }}
{{ 5 | length }}
{{ [1, 2, 3] | select('>', 1) | list }} {{ [1, 2, 3] | reject('==', 2) | list }} {{ [1, 2] | map('string') | list }} {{ [1.5, 2] | map('int') | list }}
{{ 9999999999999999999999 }} {{ 9223372036854775807 + 1 }} {{ 2 ** 100 }} {{ 10 ** 20 }}
{{ -0.0 }} {{ 0.0 == -0.0 }} {{ 1e308 * 10 }} {{ -1e308 * 10 }} {{ 100000000000000000000.0 }} {{ 1e22 }} {{ 5e-324 }} {{ 1.7976931348623157e308 }} {{ 3.0e10 }} {{ 12345678901234567.0 }}
{{ [true, false] | map('int') | list }} {{ true | string }} {{ true | lower }} {{ none | string | length }} {{ true ~ '' }}
{{ 'a' is in 'abc' }} {{ 'a' is not in ['a'] }} {{ 3 is in(range(5)) }} {{ messages is defined and messages is not none }}
{{ ('a', 'b') | join }} {{ ('a',)[0] }} {{ ('a', 'b')[-1] }} {{ (1, 2) is sequence }} {{ (1, 2)[5] }}|
{{ 'Hello' | map('upper') | join }} {{ 'abc' | select('in', 'ab') | list }} {{ 'a b' | title | replace(' ', '') }}
{% for role, group in messages | groupby('role') %}{{ role }}{{ group | map(attribute='content') | list | length }};{% endfor %}
{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }} {{ loop.last }} {% else %}none{% endfor %}
{% macro item(x, sep=', ') -%}\n  {{ x }}{{ sep }}\n{%- endmacro %}{{ item(1) }}{{ item(2, sep='') }}
{% set x = {'a': 1} %}{% set x = dict(x, b=2) %}{{ x }} {{ dict(x.items() | list + [('c', 3)]) }} {{ dict(**x) }}
{% set l = [] %}{% for m in messages %}{% set l = l + [m.role] %}{% endfor %}{{ l }} {% set ns = namespace(l=[]) %}{% for m in messages %}{% set ns.l = ns.l + [m.role] %}{% endfor %}{{ ns.l }} {{ ns.l | length }} {{ ns.l[1] }} {{ ns.l[-2:] }}
{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }} {{ messages | map(attribute='role') | list | tojson }}
{{ (messages | map(attribute='role') | list)[0] }} {{ (messages | selectattr('role', 'equalto', 'user') | list)[-1].content }} {{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list | last }}
{{ 'x'.join(messages | map(attribute='role')) }} {{ messages | map(attribute='content') | map('length') | sum }} {{ messages | map(attribute='content') | map('length') | list }}
{{ 'tool' if messages | selectattr('role', 'equalto', 'tool') | list else 'no tool' }} {{ 'x' if messages | map(attribute='name') | select('defined') | list }}
{{ 'a-b_c d'.split('-', maxsplit=1)[1].split('_') }} {{ 'k: v'.split(': ', 1) | last }} {{ 'a\\nb'.split('\\n') | map('trim') | join(';') }} {{ 'A'.lower() in ['a'] }} {{ 'abc'.find('c') > 1 }} {{ 'x' * 3 + 'y' }}
{% if messages[0]['content'] is string %}s{% else %}{% for p in messages[0]['content'] %}{{ p }}{% endfor %}{% endif %}{% if messages[0]['content'] is not string %}n{% endif %}{% if 'content' in messages[0] and messages[0].content is defined %}c{% endif %}
{{ messages[0].content | string | trim | length }}{{ messages[0]['tool_calls'] | length if messages[0]['tool_calls'] is defined else 0 }}{% if messages[0].tool_calls %}t{% endif %}{{ messages[0].get('tool_calls', []) | length }}
{%- macro render_extra_keys(d, handled) -%}{%- for k in d -%}{%- if k not in handled -%}<{{ k }}>{{ d[k] | string }}</{{ k }}>{%- endif -%}{%- endfor -%}{%- endmacro -%}{{ render_extra_keys({'a': 1, 'b': [1]}, ['a']) }}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}{%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}{%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}{%- endif %}{%- endfor %}{{ ns.last_query_index }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- if enable_thinking is not defined or enable_thinking %}T{%- endif %}{{ enable_thinking | default(true) }}
{% if strftime is defined %}x{% else %}no{% endif %}{{ {'a': none}.a is none }}{{ {'a': none}.a }}{% if {'a': none}.a %}x{% endif %}
{{ 'abc' | replace('b', 'x') | upper | reverse | list | join('.') | e }}{{ [3, 1, 2] | sort | first + 10 }}{{ (5 | string) ~ '5' | int + 1 }}
{{- 'Cutting Knowledge Date: ' ~ 'December' ~ ' ' ~ 2023 }}{{ "\\n" }}{{ 'x' ~ "\\n\\n" ~ 'y' }}
{{ '\\101' }} {{ '\\q' }} {{ '\\a\\b\\f\\v' | length }} {{ '\\U0001F600' }} {{ 'a\\\nb' }}
{{ '\\u12' }}
{{ "a" "b" 'c' }}
{{ 'a'.b }}|{{ 'a'['b'] }}|{{ 'abc'.0 }}|{{ [1,2]['0'] }}|{{ none['a'] is undefined }}
{{ true.x }}|{{ (1).x }}|{{ [].x }}|{{ {}.x }}|{{ 'a'.x is defined }}
{{ {'a': 1, 'a': 2} }} {{ {'keys': 1}.keys() | list }} {{ {'x': {'items': [1]}}.x['items'] }}
{{ messages[1:3][0].role }}{{ messages[-3:-1] | length }}{{ (messages + [{'role': 'x'}])[-1].role }}{{ messages[messages | length - 1].role }}
{%- for tool in tools %}{{ tool }}{%- endfor %}
{{ tools | length }}
{{ [1, 2] is iterable and [1, 2] is not string and [1, 2] is not mapping }}{{ messages[0] is mapping }}{{ messages is sequence }}
{{ loop.index }}
{% endfor %}
{% for x in [1] %}
{{ 1 + }}
{{ 'unclosed }}
{{ foo
{% if %}{% endif %}
{% unknown %}
{{ a b }}
{{ 1 | }}
{% set 1 = 2 %}
{% break %}
{% macro f(a=1, b) %}{% endmacro %}
{{ range(3) | map('odd') | list }}
{{ cycler(1, 2).next() }}{{ joiner('x')() }}{{ namespace(a=1).a }}
{{ '%s' % nope }}|{{ '{}'.format(nope) }}|{{ [nope] }}|{{ {'a': nope} }}
{{ nope | int }}{{ nope | float }}{{ nope | string | length }}{{ nope | first }}
{{ nope | sort }}{{ nope | reverse | list }}{{ nope | unique | list }}{{ nope | map('upper') | list }}{{ nope | sum }}
{{ nope == '' }}{{ nope != 'a' }}{{ nope in [1] }}{{ nope or 'x' }}{{ nope and 'x' }}
{{ nope < 1 }}
{{ nope | round }}
{{ -nope }}
{{ nope * 2 }}
{{ nope ~ 1 }}{{ [nope, 1] | join(',') }}
{{ none | length }}
{{ none | trim }}{{ none | list }}
{{ none + 1 }}
{{ none ~ 'a' }}{{ none | join }}
{% for x in none %}{% endfor %}
{% for x in 5 %}{% endfor %}
{{ 5() }}
{{ 'a'() }}
{{ messages[0].role() }}
{{ [1, 2] | first | string + 'a' }} {{ ['a'] | first ~ 'b' }} {{ [1] | first + 1 }}
{{ +5 }} {{ + 5 + 1 }} {{ - 5 }} {{ --5 }} {{ -(-5) }} {{ -true }}
{{ 1 if 1 else 2 if 0 else 3 }} {{ (1 if 0 else 2) + 1 }} {{ 'a' if none else 'b' ~ 'c' }}
{{ true and not false or false }} {{ 1 and 2 }} {{ 0 and 2 }} {{ '' or [] or 'z' }} {{ not not 1 }}
{{ 1 == 1.0 }} {{ 'a' == 'a' }} {{ [1, [2]] == [1, [2]] }} {{ {'a': 1} == {'a': 1.0} }} {{ none == none }} {{ none == false }} {{ '' == false }} {{ 0 == false }} {{ (1, 2) == (1, 2) }} {{ {'a': 1, 'b': 2} == {'b': 2, 'a': 1} }}
{{ messages | map(attribute='content') | map('truncate', 5, true, '') | list }}
{{ messages | map('tojson') | join('\\n') }}
{{ messages | selectattr('content', 'in', ['Be brief.']) | list }}
{{ messages | map(attribute='content') | map('upper') | first }}
{{ messages | map(attribute='content') | map('replace', 'a', 'b', 1) | list }}
{{ messages | sort(attribute='content', reverse=true) | map(attribute='content') | list }}
{{ messages | sort(attribute='role,content') | map(attribute='content') | list }}
{{ messages | groupby('role') | list | length }}
{{ messages | groupby(attribute='role') | map(attribute='grouper') | list }}
{{ messages | max(attribute='content') }}
{{ messages | min(attribute='role') }}
{{ messages | unique(attribute='role') | list | length }}
{{ messages | join(', ', attribute='role') }}
{{ messages | batch(3, 'x') | map('length') | list }}
{{ messages | slice(3) | map('length') | list }}
{{ messages | slice(3, 'f') | list | length }}
{{ messages | last | attr('x') is defined }}
{{ messages | random is mapping }}
{{ messages | tojson(indent=2) | indent(4) }}
{{ messages | string | length }}
{{ 'a' | default('b', boolean=True) | upper }}
{{ undefinedvar | default({'a': 1}) }}
{{ undefinedvar | default([]) | length }}
{{ undefinedvar.foo | default('x') }}
{{ undefinedvar.foo.bar | default('x') }}
{{ (undefinedvar | default({})).foo | default('y') }}
{{ [1,2,3][1:][0] }} {{ (1,2,3)[::-1] }} {{ 'hello'[1:3] | upper }}
{{ {'a':[1,2,{'b':'c'}]}['a'][2]['b'] }}
{{ {'a': 1}.items() | map('first') | list }} {{ {'a': 1}.items() | sort }} {{ {'b': 1, 'a': 2}.items() | sort | list }}
{{ {'b': 1, 'a': 2}.items() | sort(attribute=1) | list }} {{ {'b': 1, 'a': 2}.items() | sort(attribute='0') | list }}
{{ {'b': 1}.items() | list | first }} {{ ({'b': 1}.items() | list)[0][0] }}
{{ {'b': 2, 'a': 1} | dictsort | map('last') | list }} {{ {'b': 2, 'a': 1} | dictsort(by='value') | first }}
{% for k, v in {'b': 2, 'a': 1} | dictsort %}{{ loop.index }}{{ k }}{{ v }}{% endfor %}
{% for k, v in {'b': 2, 'a': 1} | items %}{{ k }}{{ v }}{% endfor %}
{% for key in {'b': 2, 'a': 1} | sort %}{{ key }}{% endfor %}
{% for a in [1,2,3] | reverse %}{{ a }}{% endfor %}
{% for a in 'ab' | list %}{{ a }}-{% endfor %}
{% for i in range(3) %}{% for j in range(i) %}{{ loop.index }}{{ loop.depth }}{% endfor %};{% endfor %}
{% for i in range(3) %}{% set outer = loop %}{% for j in range(2) %}{{ outer.index }}{{ loop.index }} {% endfor %}{% endfor %}
{% for m in messages %}{{ loop.cycle('odd', 'even') }}{{ loop.changed(m.role) }}{% endfor %}
{% for m in messages recursive %}{{ m.role }}{% endfor %}
{% for x in [[1,[2]],[3]] recursive %}{{ loop.depth }}{% for y in x %}{{ y }}{% endfor %}{% endfor %}
{% for x in [] %}{% else %}{{ 'empty' }}{% endfor %}
{% for x in [1,2,3,4] if x is even %}{{ x }}{% else %}none{% endfor %}
{% for x in [1,3] if x is even %}{{ x }}{% else %}none{% endfor %}
{% for x in (1, 2) + (3,) %}{{ x }}{% endfor %}
{% for x, y in [(1,2)] %}{{ x + y }}{% endfor %}{% for x, (y, z) in [(1,(2,3))] %}{{ x }}{{ y }}{{ z }}{% endfor %}
{% set x = 'a' %}{% for i in range(2) %}{{ x }}{% set x = x ~ i %}{% endfor %}{{ x }}
{% set ns = namespace(a='') %}{% for i in range(3) %}{% set ns.a = ns.a ~ i %}{% endfor %}{{ ns.a }}
{% set ns = namespace(d={}) %}{% for i in range(2) %}{% set ns.d = dict(ns.d, **{'k' ~ i: i}) %}{% endfor %}{{ ns.d }}
{% set ns = namespace(count=0) %}{% macro inc() %}{% set ns.count = ns.count + 1 %}{% endmacro %}{{ inc() }}{{ inc() }}{{ ns.count }}
{% macro outer() %}{% macro inner(x) %}<{{ x }}>{% endmacro %}{{ inner(1) }}{% endmacro %}{{ outer() }}
{% macro f(x) %}{{ x }}{% endmacro %}{{ [1,2] | map('string') | map('upper') | join }}{{ f('a') | upper }}
{% macro f(x, y=[]) %}{{ y + [x] }}{% endmacro %}{{ f(1) }}{{ f(2) }}
{% macro f(x) -%}  {{ x }}  {%- endmacro %}[{{ f(1) }}]
{% macro f(x) %}{% if x %}{{ x }}{{ f(x[1:]) }}{% endif %}{% endmacro %}{{ f('abc') }}
{% macro f() %}{{ caller('a', b='c') }}{% endmacro %}{% call(x, b='d') f() %}{{ x }}{{ b }}{% endcall %}
{% macro f(*a) %}{% endmacro %}
{% macro f(a, **k) %}{% endmacro %}
{% call f() %}{% endcall %}
{% macro f(a) %}{{ a is defined }}{{ a is none }}{% endmacro %}{{ f() }}{{ f(none) }}
{% macro f(loop_index) %}{{ loop_index }}{% endmacro %}{% for i in [1] %}{{ f(loop.index) }}{% endfor %}
{% macro f() %}{{ loop is defined }}{% endmacro %}{% for i in [1] %}{{ f() }}{% endfor %}
{% set f = 5 %}{% macro f() %}m{% endmacro %}{{ f() }}
{% if messages and messages[0] and messages[0].role in ['system', 'developer'] %}s{% endif %}
{% if messages[0].role not in ('user', 'assistant') %}n{% endif %}
{% if messages | length > 2 and not (messages | length < 1) %}l{% endif %}
{% if messages[0]['content'] is defined and messages[0]['content'] | length %}c{% endif %}
{% if 'tool' in messages | map(attribute='role') %}t{% else %}no{% endif %}
{% if 'user' in messages | map(attribute='role') | list %}u{% endif %}
{% if messages is not none and messages is iterable and messages is not string %}i{% endif %}
{% if (messages[0].content | trim | length) == 9 %}nine{% endif %}
{% if not loop %}x{% endif %}{% if none == undefinedthing %}y{% else %}z{% endif %}
{{ 'yes' if 'b' in 'abc' and 'z' not in 'abc' else 'no' }} {{ ('a' in 'abc') | string }} {{ not 'a' in 'b' }}
{{ 1 if undefinedthing else 2 }} {{ (undefinedthing or 'x') | upper }} {{ undefinedthing is not defined and true }}
{{ 5 // 2 * 2 + 5 % 2 }} {{ 2 + 3 * 4 ** 2 / 8 }} {{ (2 + 3) * 4 }} {{ -3 ** 2 }} {{ 10 - 5 - 2 }} {{ 100 / 10 / 2 }} {{ 7 // -2 }} {{ -7 // -2 }} {{ 7.0 // 2 }} {{ 1e300 * 1e10 }} {{ 0.1 * 3 }} {{ 1 - 0.9 }} {{ 3.0 * 2 }} {{ 3 * 1.5 }} {{ 2 ** 0.5 }} {{ 8 ** (1 / 3) }} {{ 1.1 + 2.2 }} {{ 5 / 2.5 }} {{ 1 / 3 * 3 }}
{{ 3 | float }} {{ 3.7 | int }} {{ '3' ~ 4 }} {{ 3 ~ '4' }} {{ 3.0 ~ '' }} {{ '1' * 3 }} {{ '12' | int + 1 }} {{ ('1' ~ '2') | int }} {{ '1.5' | float + 1 }} {{ '7' | int(default=3) }} {{ 'z' | int(default=3) }} {{ '  7' | int }} {{ '-7' | int }} {{ '+7' | int }} {{ '0b11' | int(0, 2) }} {{ 'ff' | int(0, 16) }} {{ '08' | int }} {{ 1e5 | int }} {{ 1e400 | string }}
{{ 1234567.891 | round(2) }} {{ 1234567.891 | round(-3) }} {{ 0.5 | round }} {{ 1.5 | round }} {{ 2.5 | round(0, 'ceil') }} {{ 2.5 | round(0, 'floor') }} {{ 10 | round(2) }} {{ 15 | round(-1) }} {{ 25 | round(-1) }} {{ 2.345 | round(2) }} {{ -1.5 | round }} {{ 1e-10 | round(5) }}
{{ '%.1f' | format(2.25) }} {{ '%.1f' % 0.35 }} {{ '%3d|%-3d|%03d' % (5, 5, 5) }} {{ '%s' % (1,) }} {{ '%s' % none }} {{ '%s %s' % ('a', [1]) }} {{ '%r' % 'a' }} {{ '%d%%' % 50 }} {{ '%5.1f|' % 3.14159 }} {{ '%-10s|' % 'ab' }} {{ '%10s|' % 'ab' }} {{ '%+.2e' % 12345.678 }} {{ '%x' % 255 }} {{ '%o' % 8 }} {{ '%c' % 'a' }} {{ '%s' % true }} {{ '%d' % true }} {{ '%g' % 1e-5 }} {{ '%g' % 123456789 }} {{ '%.3g' % 3.14159 }} {{ '%a' % 'é' }} {{ '%#o' % 8 }} {{ '%#X' % 255 }} {{ '% 5d' % 3 }} {{ '%(k)s' % {'k': [1]} }} {{ '%(a)d-%(b)s' % dict(a=1, b='x') }} {{ '%.0f' % 0.5 }} {{ '%.0f' % 1.5 }} {{ '%5s' % 'é' }} {{ '%05.1f' % -2.5 }} {{ '%+d' % -3 }} {{ '%.5d' % 42 }} {{ '%05s' % 'a' }} {{ '%-05d|' % 3 }}
{{ '%s' % () }}
{{ '%d' % none }}
{{ '%(a)s' % {} }}
{{ '%(a)s' % 'x' }}
{{ '%' % () }}
{{ '{:>10}|{:<10}|{:^10}|'.format('a', 'b', 'c') }} {{ '{:*>5}'.format(3) }} {{ '{:.3f}'.format(2) }} {{ '{:5d}|'.format(42) }} {{ '{:<5d}|'.format(42) }} {{ '{:x}'.format(255) }} {{ '{:#x}'.format(255) }} {{ '{:08b}'.format(5) }} {{ '{:,}'.format(1234567.89) }} {{ '{:.2%}'.format(0.1234) }} {{ '{:e}'.format(0) }} {{ '{:g}'.format(0.00001) }} {{ '{:+}'.format(3) }} {{ '{: }'.format(3) }} {{ '{:10}|'.format('a') }} {{ '{:10}|'.format(1) }} {{ '{0!r} {0!s}'.format('q') }} {{ '{a}{b}'.format(a=1, b=2) }} {{ '{}{}'.format(*['x', 'y']) }} {{ '{k}'.format(**{'k': 'v'}) }} {{ '{0[0]}'.format([7]) }} {{ '{0[a]}'.format({'a': 7}) }} {{ '{m.role}'.format(m=messages[0]) }} {{ '{:}'.format('x') }} {{ '{!s:>4}'.format(1) }} {{ '{:_>6}'.format('ab') }} {{ '{:06.2f}'.format(3.14159) }} {{ '{:+08.1f}'.format(-2.5) }} {{ '{:1}'.format(true) }} {{ '{:>6}'.format(true) }} {{ '{:,d}'.format(-1234) }} {{ '{:_x}'.format(123456789) }} {{ '{:X}'.format(255) }} {{ '{:o}'.format(8) }} {{ '{:E}'.format(1.5) }} {{ '{:G}'.format(1e-10) }} {{ '{:.0e}'.format(15) }} {{ '{:.10g}'.format(0.1) }} {{ '{:f}'.format(1e10) }} {{ '{:n}'.format(1.5) }} {{ '{:.3}'.format('abcdef') }} {{ '{:5.1}|'.format('abc') }} {{ '{:%}'.format(1) }} {{ '{:s}'.format('') }} {{ '{:}'.format([1]) }} {{ '{:5}'.format(none) }}
{{ '{0} {}'.format(1, 2) }}
{{ '{:5}'.format([1]) }}
{{ '{:z}'.format(1) }}
{{ '{a.b}'.format(a={'b': 1}) }}
{{ '{}}'.format(1) }}
{{ '{!x}'.format(1) }}
{{ 'Hello World'.swapcase() }} {{ 'hello world foo'.title() }} {{ 'ABC'.casefold() }} {{ 'straße'.upper() }} {{ 'ÀÉ'.lower() }} {{ 'i̇'.upper() }} {{ 'x1y2'.title() }} {{ "a'b".title() }} {{ 'ǅ'.swapcase() }} {{ 'hELLO'.capitalize() }} {{ ''.capitalize() }} {{ 'éa'.capitalize() }} {{ 'Σ'.lower() }} {{ 'ΟΔΟΣ'.lower() }}
{{ 'a,b;c'.replace(',', ';').split(';') }} {{ 'aXbXc'.split('X') }} {{ ' a  b '.split(' ') }} {{ 'a\\tb\\nc'.split() }} {{ 'abc'.split('abc') }} {{ 'a--b--c'.split('--', 1) }} {{ 'a b c d'.split(' ', 2) }} {{ 'a b c d'.split(none, 0) }} {{ '  a b'.split(none, 1) }} {{ 'a,b,c'.rsplit(',', 0) }} {{ 'abc'.rsplit('x') }} {{ ' a b '.rsplit(none, 5) }} {{ 'a  b  c'.rsplit(' ', 1) }} {{ '\\u00a0a\\u2003b'.split() }} {{ 'a\\x1cb'.split() }}
{{ 'line1\\nline2\\rline3\\r\\nline4'.splitlines() }} {{ 'a\\n\\nb'.splitlines(true) }} {{ '\\n'.splitlines() }} {{ 'a\\x85b\\x1db'.splitlines() }}
{{ 'abcabc'.find('c', 3) }} {{ 'abcabc'.find('c', -2) }} {{ 'abcabc'.rfind('a') }} {{ 'abcabc'.rfind('c', 0, 3) }} {{ 'abc'.find('') }} {{ 'abc'.find('', 10) }} {{ 'aaa'.count('aa') }} {{ 'abc'.count('') }} {{ 'äöü'.find('ü') }} {{ 'abcabc'.index('b', 2) }} {{ 'abc'.find('c', 0, -1) }} {{ 'abc'.find('bc', none, none) }} {{ 'abc'.rindex('') }}
{{ 'abc'.startswith('abcd') }} {{ 'abc'.endswith(('b', 'c')) }} {{ 'abc'.startswith(('x',)) }} {{ 'abc'.startswith('c', -1) }} {{ 'abc'.endswith('ab', 0, 2) }} {{ 'abc'.endswith('', 5) }} {{ ''.startswith('') }}
{{ 'x'.center(4) }}| {{ 'x'.center(5, '-') }} {{ 'xy'.center(5, '-') }} {{ 'xy'.center(1) }} {{ '42'.zfill(5) }} {{ '-42'.zfill(5) }} {{ '--1'.zfill(5) }} {{ ''.zfill(3) }} {{ 'a'.rjust(3, '0') }} {{ 'é'.ljust(3, '.') }} {{ 'a\\tb'.expandtabs(3) }} {{ 'abc\\tb'.expandtabs() }} {{ '\\ta'.expandtabs(4) }}
{{ 'abcabc'.removeprefix('abc') }} {{ 'abcabc'.removesuffix('abc') }} {{ 'a'.removeprefix('') }} {{ 'k=v=w'.partition('=')[2] }} {{ 'k=v=w'.rpartition('=') | first }} {{ 'abc'.partition('b') | join('|') }} {{ 'k'.partition('=') }}
{{ 'abc'.isidentifier() }} {{ 'Abc'.istitle() }} {{ 'A B'.istitle() }} {{ 'ab1'.isalnum() }} {{ 'ab 1'.isalnum() }} {{ 'é'.isalpha() }} {{ '你好'.isalpha() }} {{ '१२'.isdigit() }} {{ '१२'.isnumeric() }} {{ '½'.isdecimal() }} {{ 'Ⅷ'.isnumeric() }} {{ 'Ⅷ'.isalpha() }} {{ 'a\\u0301'.isalpha() }} {{ '\\u3000'.isspace() }} {{ '\\u200b'.isspace() }} {{ 'ab'.isprintable() }} {{ '\\u00ad'.isprintable() }} {{ 'A'.islower() }} {{ 'a1'.islower() }} {{ ''.islower() }} {{ 'ß'.isupper() }} {{ 'ABC1'.isupper() }} {{ 'ǅ'.istitle() }} {{ 'ª'.isalpha() }} {{ '_'.isalnum() }}
{{ 'hello'.translate('hello'.maketrans('l', 'L')) }} {{ 'a-b'.translate({45: ' '}) }} {{ 'abc'.translate({97: none, 98: 'BB', 99: 67}) }} {{ ''.maketrans({'a': 'b'}) }} {{ ''.maketrans('a', 'b', 'c') }}
{{ ['a', 'b'].index('b') }} {{ [1, 2, 1].count(1) }} {{ (1, 2, 1).count(1) }} {{ [[1], [2]].index([2]) }} {{ [1, 2, 3].index(3, 1) }} {{ ['a'].copy() == ['a'] }}
{{ {'a': 1}.get('a', 5) }} {{ {'a': none}.get('a', 5) }} {{ {'a': 1}.get('b') is none }} {{ {'a': 1}.keys() | first }} {{ {1: 'x'}.get(1) }} {{ {'a': 1}.values() | sum }} {{ {'a': 1} | length }} {{ 'a' in {'a': 1} }} {{ {'a': 1}.copy() }} {{ {'a': {'b': 1}}.get('a', {}).get('b') }} {{ {'a': 1} == {'a': 1} }} {{ {} or 'empty' }} {{ {'a': 1}.items() | list | length }}
{{ {'a': 1}.get() }}
{{ {'a': 1}.nosuch() }}
{{ [1].nosuch() }}
{{ (1.5).is_integer() }} {{ (3.0).is_integer() }} {{ (0.5).as_integer_ratio() }} {{ (10).bit_length() }} {{ (0).bit_length() }} {{ (255).to_bytes(1, 'little') }} {{ (1.0).hex() }} {{ (-0.1).hex() }} {{ (3).real }} {{ (3).imag }}
{{ true.bit_length() }} {{ true.numerator }} {{ true.conjugate() }} {{ false + 1 }} {{ true * 3 }} {{ -true }} {{ true / 2 }} {{ [true, 1] | unique | list }} {{ true == 1.0 }} {{ {true: 'a'}[1] }} {{ [1, 2][true] }} {{ 'ab'[true] }} {{ true | int }} {{ true | float }} {{ true is integer }} {{ true | abs }} {{ [true, false] | sum }} {{ [3, true] | min }} {{ true < 2 }}
{{ [1.0, 2.50, 1e100, 1e-100, 123456789012345678, 0.1, 1/3] }} {{ 1e15 }} {{ 123456789012345680.0 }} {{ 1e16 }} {{ 0.001 }} {{ 0.0001 }} {{ 0.00001 }} {{ 1.0e5 }} {{ 1e-5 }} {{ 100.0 }} {{ 1e2 }} {{ 3.14e-10 }} {{ -1e-7 }} {{ 1e21 }} {{ 2.5e20 ~ '!' }} {{ [2.5e20] | join }} {{ 2.5e20 | string }} {{ {'x': 1e-9} }}
{{ 'a"b' | tojson }} {{ "a'b" | tojson }} {{ 'a/b' | tojson }} {{ 'é' | tojson }} {{ '\\u2028' | tojson(ensure_ascii=true) }} {{ '\\x7f' | tojson(ensure_ascii=true) }} {{ [1, [2, [3]]] | tojson(indent=1) }} {{ {'a': [], 'b': {}} | tojson(indent=2) }} {{ {'z': 1, 'a': {'y': 1, 'b': 2}} | tojson(sort_keys=true) }} {{ [none, true, 1.5, 'x'] | tojson }} {{ (1, (2, 3)) | tojson }} {{ {'a': 1} | tojson(indent=4, separators=(',', ': ')) }} {{ {1: 'a'} | tojson }} {{ {none: 1} | tojson }} {{ {1.5: 1} | tojson }} {{ -0.0 | tojson }} {{ 1e100 | tojson }} {{ 123456789012345678901234567890 | tojson }} {{ messages[0] | tojson(sort_keys=true, separators=(',', ':')) }} {{ range(3) | list | tojson }} {{ ('a' | e) | tojson }}
{{ range(3) | tojson }}
{{ {'a': 1}.items() | tojson }}
{{ {'a': undefinedthing} | tojson }}
{{ 'a b' | urlencode }} {{ 'a/b?c=d&e' | urlencode }} {{ {'q': 'ü x'} | urlencode }} {{ '' | urlencode }} {{ 'ü' | urlencode }} {{ '~-._' | urlencode }}
{{ 'The quick brown fox' | wordwrap(9) }} {{ 'a b c d e f' | wordwrap(3) }} {{ 'aaaa bbbb' | wordwrap(4) }} {{ '' | wordwrap(5) }} {{ 'a\\n\\nb' | wordwrap(5) }} {{ 'supercalifragilistic word' | wordwrap(10) }} {{ '  lead' | wordwrap(4) }} {{ 'one-two-three-four' | wordwrap(8) }}
{{ 'foo bar baz' | truncate(7) }} {{ 'foo bar baz' | truncate(7, true) }} {{ 'foo bar baz qux quux' | truncate(10) }} {{ 'foo' | truncate(3) }} {{ 'foobarbaz' | truncate(4, false, '', 0) }} {{ 'foo bar' | truncate(length=5, leeway=0, killwords=true, end='…') }} {{ 'a' * 300 | length }} {{ ('a' * 300) | truncate | length }}
{{ 'foobarbaz' | truncate(2) }}
{{ 'a\\nb' | indent(4) }} {{ '\\na' | indent(2) }} {{ 'a\\n  b\\n' | indent(2, true) }} {{ 'a\\n\\n\\nb' | indent(2, blank=true) }} {{ 'a' | indent(2, true) }} {{ '' | indent(2, true) }} {{ 'a\\r\\nb' | indent(2) }} {{ 'a\\nb' | indent(first=true) }} {{ 'a\\nb' | indent('\\t', true) }}
{{ 'a b c' | title }} {{ 'foo_bar' | title }} {{ 'foo-bar (baz) [x] {y} <z>' | title }} {{ 'ABC DEF' | title }} {{ 'x' | upper | lower }} {{ 'ünder' | capitalize }} {{ 12 | upper }} {{ none | lower }} {{ [1, 'A'] | lower }} {{ true | upper }} {{ 1.5 | capitalize }}
{{ ' x ' | trim }} {{ 'xxhixx' | trim('x') }} {{ 'abcba' | trim('ab') }} {{ 12 | trim }} {{ '\\n\\t x \\r\\n' | trim }} {{ '\\u3000x' | trim }} {{ ' x ' | trim(none) }} {{ '  ' | trim | length }} {{ ' x ' | trim(' ') }}
{{ 'abc' | center(9) }}| {{ 'abc' | center }}| {{ 'abc' | center(width=4) }}|
{{ 'a<b>c</b>' | striptags }} {{ '<!-- x -->y' | striptags }} {{ 'a &amp; b' | striptags }} {{ '<p>a\\n b</p>' | striptags }} {{ 'no tags' | striptags }} {{ '1 < 2' | striptags }}
{{ '<' | e }} {{ '<' | e | e }} {{ '&amp;' | e }} {{ ['<'] | e }} {{ none | e }} {{ 1 | e }} {{ '<' | forceescape | e }} {{ ('<' | safe) | e }} {{ ('<' | safe) | forceescape }} {{ '"' | e }} {{ ("a'b" | e) | length }} {{ ('<' | e) is string }} {{ ('<' | e) == '&lt;' }} {{ ('<' | e) | upper }} {{ ('a' | e) ~ 'b' }} {{ ('a' | e) + 'b' }} {{ ('x' | e) in 'xyz' }} {{ [('x' | e)] }}
{{ [3, 1, 2] | sort | join }} {{ ['B', 'a', 'C'] | sort | join }} {{ ['B', 'a', 'C'] | sort(false, true) | join }} {{ [1.5, 1, 2] | sort }} {{ [[2, 1], [1, 2]] | sort }} {{ [true, false] | sort }} {{ 'hello' | sort | join }} {{ {'b': 1, 'a': 0} | sort | join }} {{ [] | sort }} {{ ['b', 'a'] | sort(reverse=True) | first }} {{ [{'a': 'x'}, {'a': 'X'}] | sort(attribute='a', case_sensitive=true) }} {{ ['10', '9'] | sort }}
{{ [none, 1] | sort }}
{{ [1, 2, 3] | sum }} {{ [0.1, 0.2] | sum }} {{ [[1], [2]] | sum(start=[]) }} {{ ['a'] | map('length') | sum }} {{ [{'a': {'b': 2}}] | sum('a.b') }} {{ (1, 2) | sum }} {{ [] | sum(start=5) }} {{ {1: 'a', 2: 'b'} | sum }}
{{ ['a'] | sum }}
{{ [1, 2, 3, 4, 5] | batch(2) | list }} {{ [1, 2, 3] | batch(5, 0) | list }} {{ 'abcde' | batch(2) | map('join') | list }} {{ range(7) | slice(3) | list }} {{ range(5) | slice(2, 'x') | list }} {{ [] | batch(2) | list }} {{ [] | slice(2) | list }}
{{ [1, 2] | first }} {{ [] | first is undefined }} {{ 'abc' | last }} {{ (1, 2) | last }} {{ {'a': 1, 'b': 2} | last }} {{ range(3) | last }} {{ [1] | random }}
{{ [1, 2, 3] | max }} {{ 'abc' | max }} {{ [1, 2.5] | max }} {{ ['a', 'B'] | max }} {{ ['a', 'B'] | max(case_sensitive=true) }} {{ [] | min is defined }} {{ [{'x': 2}, {'x': 1}] | min(attribute='x') }} {{ [[1, 2], [1, 3]] | max }}
{{ [1, 'a'] | max }}
{{ ['a', 'A', 'b'] | unique | join }} {{ [1, 2, 1] | unique | list }} {{ 'abca' | unique | join }} {{ [[1], [1]] | length }} {{ ['a', 'A'] | unique(case_sensitive=true) | list }}
{{ 'abc' | reverse }} {{ [1, 2] | reverse | first }} {{ (1, 2) | reverse | list }} {{ '' | reverse }}
{{ 5 | reverse }}
{{ 'abc' | replace('b', '') }} {{ 'aaa' | replace('a', 'bb') }} {{ 'aaa' | replace('a', 'b', count=1) }} {{ 123 | replace(2, 'x') }} {{ 'a.b' | replace('.', '-') }}
{{ 1 | default(2) }} {{ 0 | default(2) }} {{ 0 | default(2, true) }} {{ false | default('x') }} {{ [] | default('x', true) }} {{ none | default }}|
{{ 1 is odd }} {{ 0 is even }} {{ -1 is odd }} {{ 4 is divisibleby 2 }} {{ 4 is divisibleby(num=3) }} {{ 'abc' is lower }} {{ 'ABC1' is upper }} {{ '1' is lower }} {{ 1 is sameas true }} {{ [] is sameas [] }} {{ 'a' is eq 'a' }} {{ 1 is lt 2 and 2 is gt 1 }} {{ 3 is in [1, 2, 3] }} {{ 'b' is in 'abc' }} {{ none is not none }} {{ 1.0 is integer }} {{ 1.0 is number }} {{ 'x' is not number }} {{ [] is iterable }} {{ none is iterable }} {{ {} is iterable }} {{ {}.items() is iterable }} {{ (1 | string) is string }} {{ messages is mapping }} {{ true is boolean }} {{ none is boolean }} {{ '' is true }} {{ 1 is false }} {{ raise_exception is callable }} {{ 'upper' is filter }} {{ 'defined' is test }} {{ 'even' is test }} {{ 'tojson' is filter }} {{ 'nosuch' is filter }} {{ 1 is ge 1 }} {{ 'a' is string and 'a' is not mapping }} {{ dict is callable }} {{ namespace is callable }}
{{ 'a' is odd }}
{{ 1.5 is odd }} {{ 3.0 is odd }}
{{ none is divisibleby 2 }}
{{ lipsum(n=1) | length > 10 }} {{ joiner('|')() == '' }} {% set j = joiner('|') %}{{ j() }}a{{ j() }}b{{ j() }}c {% set c = cycler(1, 2, 3) %}{{ c.next() }}{{ c.current }}{{ c.next() }}{{ c.reset() }}{{ c.next() }}
{{ dict(a=1).items() | list }} {{ dict() }} {{ dict([['a', 1], ('b', 2)]) }} {{ dict(zip=1) }} {{ range(2, 8, 3) | list }} {{ range(-3) | list }} {{ range(3, 0, -1) | list }} {{ range(10)[2:5] | list }} {{ range(3) == [0, 1, 2] }} {{ range(3)[1] }} {{ 5 in range(10) }} {{ range(3) | sum }} {{ range(3) | map('string') | join }}
{{ range() }}
{{ range('a') }}
{{ range(1.5) }}
{{ zip([1], [2]) }}
{{ len([1]) }}
{{ str(1) }}
{{ messages.__len__() }}
{{ messages[0].__class__.__name__ }}
{{ ''['__class__'] }}|
{{ ().__class__.__bases__ }}
{{ '{0.__class__}'.format('a') }}|
{{ '{0.__class__.__mro__}'.format('a') }}
{{ ('a' | attr('__class__')) is defined }}
{{ messages | map(attribute='__class__') | list }}
{{ cycler.__init__ }}|
{{ namespace(a=1, _b=2) }}
{% set ns = namespace() %}{% set ns.x = 1 %}{{ ns.x }}{{ ns.y is defined }}{{ ns.x.y is defined }}
{% set ns = namespace(x=[1]) %}{{ ns.x.append(2) }}
{% set a = b = 1 %}
{% set a.b = 1 %}
{% set messages[0] = 1 %}
{% set x = [] %}{% set x.y = 1 %}
{{ "a\\tb" }}{{ 'a\\'b' }}{{ "a\\"b" }}{{ 'a\\\\nb' }}{{ '\\x41\\u0042\\103' }}{{ '\\0' | length }}{{ 'a\\\nb' }}
{{ 'multi\nline' }}
{{ 'é' }}{{ "日本" }}{{ '🎉'[0] }}{{ '🎉' | length }}{{ 'a🎉b'[1:] }}{{ '🎉' | upper }}
{{ 1 }}{{- 2 -}}{{ 3 }} {{- 4 }} {{ 5 -}} 6
a {%- if true -%} b {%- endif -%} c
a {%+ if true +%} b {%+ endif +%} c
  {%- if true %}  x  {% endif -%}  y
{% if true %}\n  x\n{% endif %}\ny
  {% if true %}\n  x\n  {% endif %}\ny
{%- if true %}\n  x\n{%- endif %}\ny
{% for i in [1, 2] %}\n  {{ i }}\n{% endfor %}\n
{% for i in [1, 2] -%}\n  {{ i }}\n{%- endfor %}\n
{# comment #}\nx
  {# comment #}\nx
x {# a #} y {#- b -#} z
{% raw %}{% if %}{{ x }}{# y #}{% endraw %}
{%- raw %}  a  {% endraw -%}  b
{% raw -%}  a  {%- endraw %}  b
{% raw %}\na\n{% endraw %}\nb
\n\nx\n\n
x\n
x\n\n
\t{% set x = 1 %}\t\n\ty
{{ x\n}}{{\n1\n}}
{%\nif true\n%}a{%\nendif\n%}
{% if true %}{% else %}{% endif %}{% if false %}{% elif true %}e{% endif %}
{% with x=1 %}{% with y=x %}{{ x }}{{ y }}{% endwith %}{% endwith %}{{ x is defined }}
{% with x=1, y=x %}{{ y is defined }}{% endwith %}
{% set x = 1 %}{% with x=2 %}{{ x }}{% endwith %}{{ x }}
{% filter upper | replace('A', 'b') %}aa{% endfilter %}
{% filter indent(2, true) %}a\nb{% endfilter %}
{% set x | trim %}  a  {% endset %}[{{ x }}]
{% set x %}{{ 1 }}{% endset %}{{ x + '1' }}{{ x is string }}
{% set x, y = 'ab' %}{{ y }}{{ x }}
{% set (x, y) = (1, 2) %}{{ x }}{{ y }}
{% set _ = messages | list %}{{ _ | length }}
{% set content = messages[0].content %}{% if content is string %}{% set content = [{'type': 'text', 'text': content}] %}{% endif %}{% for part in content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}
{% block x %}a{% endblock %}{% block y scoped %}b{% endblock y %}
{% autoescape false %}{{ '<' }}{% endautoescape %}{% autoescape true %}{{ '<' }}{{ '<' | safe }}{{ 1 }}{{ '<' ~ '>' }}{% endautoescape %}
{% print 1 %}
{% do x %}
{% trans %}a{% endtrans %}
{% else %}
{% elif x %}
{% endif %}
{% if true %}{% endfor %}
{% for x in %}{% endfor %}
{% for in x %}{% endfor %}
{% macro %}{% endmacro %}
{{ }}
{{ 1 2 }}
{{ (1 }}
{{ [1, }}
{{ {'a' 1} }}
{{ {'a': } }}
{{ 'a' | }}
{{ a. }}
{{ a[ }}
{{ a[] }}
{{ 1 is }}
{{ x if }}
{{ not }}
{{ 1 + * 2 }}
{{ @ }}
{{ a ? b }}
{{ a := 1 }}
{{ `a` }}
{{ a && b }}
{{ !a }}
{{ "a }}
{# unclosed
{{ messages[0:1:0] }}
{{ messages['a'] }}|{{ messages[1.0] is defined }}|{{ messages[none] is defined }}
{{ 'abc'['a'] }}|{{ 'abc'[1.5] is defined }}|{{ {'a': 1}[0] is defined }}
{{ (messages | first).content.split() | length }} {{ messages[0].content | wordcount }} {{ messages[0]['content'].count('e') }}
{{ messages[-1].get('name', 'nobody') }} {{ messages[0].get('name', 'nobody') }} {{ messages[0].get('name') }} {{ messages[3]['name'] | upper }}
{{ messages | map('attr', 'role') | list | length }} {{ messages | map(attribute='role') | map('length') | max }}
{{ messages | selectattr('role', 'ne', 'user') | map(attribute='role') | list }} {{ messages | rejectattr('role', 'eq', 'user') | map(attribute='role') | join }} {{ messages | selectattr('name', 'undefined') | list | length }}
{{ messages | select('mapping') | list | length }} {{ [1, '', none, 'a'] | select | list }} {{ ['a', 1] | select('string') | list }} {{ [1, 5, 10] | select('ge', 5) | list }} {{ [[], [1]] | select | list }}
{{ messages[0].role ~ ': ' ~ messages[0].content | upper }} {{ (messages[0].role ~ ': ') | upper }} {{ 'a' ~ 'b' | upper }} {{ 'a' + 'b' | upper }}
{{ ['a', 'b'] | join(', ') ~ '.' }} {{ 'x' in ['a'] or 'y' }} {{ 1 < 2 and 'yes' or 'no' }} {{ (1 < 2) | string }} {{ 1 < 2 == true }} {{ 1 == 1 == 1 }} {{ 3 > 2 > 1 }} {{ 1 < 3 > 2 }} {{ 'a' < 'b' < 'c' }} {{ 1 in [1] == true }}
"""


# Templates with the constructs of those that ternary models ship.
TEMPLATES = [
    # BitNet b1.58: the role is a word of the text.
    """{% set turns = messages %}{% for turn in turns %}{% set text = turn['role'] | capitalize + ': ' + turn['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set text = bos_token + text %}{% endif %}{{ text }}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}""",
    # Qwen 3 and Bonsai: macros of tools, the last question found from the end, thoughts left out.
    """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(is_tool=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.is_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.is_tool = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
""",
    # Llama 3 and TriLM: a date, and the system message taken out first.
    """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("One call at once!") }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    # Falcon 3 and Falcon-E.
    """{%- if tools %}T{%- else %}{%- for message in messages %}
{%- if message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] }}
{%- elif message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + '\\n' }}
{%- elif message['role'] == 'assistant' %}
{%- if not loop.last %}
{{ '<|assistant|>\\n' + message['content'] + eos_token + '\\n' }}
{%- else %}
{{ '<|assistant|>\\n' + message['content'] + eos_token }}
{%- endif %}
{%- endif %}
{%- if loop.last and add_generation_prompt %}
{{ '<|assistant|>\\n' }}
{%- endif %}
{%- endfor %}
{%- endif %}""",
    # MiniCPM and BitCPM.
    """{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    # A template that trains, and one with macros.
    """{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}{% else %}<{{ message.role }}>{{ message.content }}</{{ message.role }}>
{% endif %}{% endfor %}""",
    """{%- macro turn(role, text='') -%}
<{{ role }}{% for key, value in kwargs.items() %} {{ key }}={{ value }}{% endfor %}>{{ text | trim }}</{{ role }}>
{% endmacro -%}
{%- for m in messages -%}
{{ turn(m.role, m.content, index=loop.index) if m.name is not defined else turn(m.role, m.content, name=m.name) }}
{%- endfor -%}
{{ turn('assistant') if add_generation_prompt }}""",
]


def render(template):
    try:
        rendered, _ = render_jinja_template(
            [MESSAGES], chat_template=template, **VARIABLES
        )
        return rendered[0]
    except Exception as error:  # Python's and Jinja's errors: refused
        print(f"{template!r}: {type(error).__name__}: {error}", file=sys.stderr)
        return None


def split(line):
    """Returns the expressions of a line that has nothing else, or the line."""
    parts = re.split(r"(?<=\}\}) (?=\{\{)", line)
    if all(re.fullmatch(r"\{\{[^{}]*(\{[^{}]*\}[^{}]*)*\}\}", part) for part in parts):
        return parts
    return [line] if line else []


def main():
    cases = []
    for line in dict.fromkeys(snippet for line in SNIPPETS.split("\n") for snippet in split(line)):
        template = re.sub(r"\\([\\nr])", lambda escape: LINE_ENDS[escape[1]], line)
        cases.append({"template": template, "expected": render(template)})
    # The same with line ends of another system: Jinja makes them one.
    for template in TEMPLATES + [template.replace("\n", "\r\n") for template in TEMPLATES]:
        cases.append({"template": template, "expected": render(template)})
    json.dump(
        {
            "witness": f"transformers {transformers.__version__}, jinja2 {jinja2.__version__}",
            "variables": VARIABLES,
            "messages": MESSAGES,
            "cases": cases,
        },
        sys.stdout,
        ensure_ascii=True,
        indent=1,
    )
    print()


main()
