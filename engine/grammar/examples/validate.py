"""Judges the instances that `walks` writes, by the package jsonschema: prints how many schemas are supported, and instances that
a schema does not accept. Exit status 1 if there is one.

    … | python3 engine/grammar/examples/validate.py        (pip install jsonschema)
"""

import collections
import decimal
import json
import sys

import jsonschema


# What the classes of ECMA 262, which JSON Schema has, are in Python. White space is Unicode's, which has U+0085, too.
CLASSES = {
    "w": "a-zA-Z0-9_",
    "d": "0-9",
    "s": " \\t-\\r\\u0085\\u00a0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000\\ufeff",
}


def pattern_of(text):
    """Translates the classes of a regular expression of ECMA 262 to Python's."""
    out, in_class, at = [], False, 0
    while at < len(text):
        char = text[at]
        if char == "\\" and at + 1 < len(text):
            name = text[at + 1]
            found = CLASSES.get(name.lower())
            if found and in_class:
                out.append(found if name.islower() else text[at : at + 2])
            elif found:
                out.append(f"[{'' if name.islower() else '^'}{found}]")
            else:
                out.append(text[at : at + 2])
            at += 2
            continue
        in_class = char == "[" or in_class and char != "]"
        out.append(char)
        at += 1
    return "".join(out)


def ecma(schema):
    """Translates all regular expressions of a schema."""
    if isinstance(schema, list):
        return [ecma(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {name: ecma(value) for name, value in schema.items()}
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = pattern_of(schema["pattern"])
    if isinstance(schema.get("patternProperties"), dict):
        schema["patternProperties"] = {pattern_of(name): value for name, value in schema["patternProperties"].items()}
    return schema


supported = refused = instances = wrong = long = unjudged = 0
reasons, errors = collections.Counter(), collections.Counter()
for line in sys.stdin:
    case = json.loads(line)
    if "refused" in case:
        refused += 1
        reasons[case["refused"][:70]] += 1
        continue
    supported += 1
    # Binary floating point says that 8.7 is not a multiple of 0.01.
    schema = ecma(json.loads(json.dumps(case["schema"]), parse_float=decimal.Decimal))
    try:
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        kind.check_schema(schema)
        validator = kind(schema, format_checker=None)
    except Exception:
        unjudged += 1
        continue
    for walk in case["instances"]:
        if "text" not in walk:
            long += "long" in walk
            errors[walk.get("error", "long")[:70]] += 1
            continue
        instances += 1
        try:
            validator.validate(json.loads(walk["text"], parse_float=decimal.Decimal))
        except (jsonschema.ValidationError, json.JSONDecodeError) as error:
            wrong += 1
            print(f"{case['file']}: {str(error).splitlines()[0][:150]}: {walk['text'][:200]!r}: {json.dumps(case['schema'])[:300]}")
        except Exception as error:
            unjudged += 1
print(f"{supported} of {supported + refused} schemas are supported ({100 * supported / max(1, supported + refused):.1f} %)")
print(f"{instances} instances, {wrong} wrong; {long} too long, {unjudged} not judged, errors: {dict(errors.most_common(4))}")
print("refused most:", *(f"\n  {count} {reason}" for reason, count in reasons.most_common(8)))
sys.exit(wrong > 0)
