"""Plain values of YAML text: YAML 1.2 scalars, refusals, and the way back."""

import math
import re
from typing import Any

import pytest
import yaml

from fastrl.config.yaml_text import MOST_NODES, YamlError, dump_yaml, parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2e-5", 2e-5),
        ("1.0e5", 1.0e5),
        ("1E-5", 1e-5),
        (".5e-5", 0.5e-5),
        ("-3.", -3.0),
        ("+1e+3", 1000.0),
        ("1", 1),
        ("-0x1F", "-0x1F"),
        ("0x1F", 31),
        ("0o17", 15),
        ("010", 10),
        ("08", 8),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("yes", "yes"),
        ("on", "on"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("2026-01-01", "2026-01-01"),
        ("'2e-5'", "2e-5"),
        ("e5", "e5"),
        ("1e", "1e"),
        (".inf", math.inf),
        ("[1e3, {a: 2}]", [1000.0, {"a": 2}]),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    parsed = parse_yaml(text)
    assert (type(parsed), parsed) == (type(value), value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3, column 1: key `a` stands twice in one section"),
        ("x:\n  - {b: 1, b: 1}\n", "line 2, column 12: key `b` stands twice in one section"),
        ("1: a\n", "line 1, column 1: a key must be text; quote it"),
        ("a: [1\nb: 2\n", "line 2, column 2: "),
        ("a: b: c\n", "line 1, column 5: "),
        ("a: 1\n---\nb: 1\n", "line 2, column 1: "),
        ("a: \x01\n", "unacceptable character"),
        ("a: &x [*x]\n", "line 1, column 4: "),
        ("a: !!python/object/apply:os.getcwd []\n", "line 1, column 4: "),
    ],
)
def test_refusals_name_line_and_column(text: str, message: str) -> None:
    with pytest.raises(YamlError) as caught:
        parse_yaml(text)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_merge_keys_give_way_to_the_keys_of_the_section() -> None:
    parsed = parse_yaml("base: &b {x: 1, y: 2}\nuse:\n  <<: *b\n  y: 3\n")
    assert parsed["use"] == {"x": 1, "y": 3}


def _values() -> dict[str, Any]:
    return {
        "floats": [2e-5, 1e16, 1e-300, -0.0, 0.1 + 0.2, 1e22],
        "integers": [0, -7, 10**20],
        "texts": ["2e-5", "1", "yes", "null", "", "true", "a: b", "- x", "\u00e9\n", "010", "<<"],
        "others": [None, True, False, [], {}],
    }


def test_what_is_written_reads_back_with_the_same_types() -> None:
    values = _values()
    parsed = parse_yaml(dump_yaml(values))
    assert parsed == values
    for key in values:
        assert [type(item) for item in parsed[key]] == [type(item) for item in values[key]]


def test_other_readers_take_texts_for_texts_and_numbers_for_numbers() -> None:
    values = _values()
    assert yaml.safe_load(dump_yaml(values)) == values


def test_a_list_used_twice_is_written_twice() -> None:
    shared = [1, 2]
    assert "&" not in dump_yaml({"a": shared, "b": shared})


def test_rl20_a_bomb_of_aliases_is_refused_at_once() -> None:
    levels = "".join(
        f"{name}: &{name} [{', '.join([f'*{below}'] * 10) if below else 'x, ' * 10}]\n"
        for below, name in zip(["", *"abcdefg"], "abcdefgh", strict=True)
    )
    with pytest.raises(YamlError, match="must have at most 20,000 values and keys"):
        parse_yaml(levels)
    merges = "a: &a {k: 1}\n" + "".join(
        f"{name}: &{name} {{<<: [{', '.join([f'*{below}'] * 10)}]}}\n"
        for below, name in zip("abcdefg", "bcdefgh", strict=True)
    )
    with pytest.raises(YamlError, match="must have at most 20,000 values and keys"):
        parse_yaml(merges)


def test_rl20_aliases_are_values_like_others_up_to_the_bound() -> None:
    assert parse_yaml("a: &a [1, 2]\nb: {c: *a, <<: {d: *a}}") == {
        "a": [1, 2],
        "b": {"c": [1, 2], "d": [1, 2]},
    }
    assert len(parse_yaml("[" + "1, " * (MOST_NODES - 1) + "]")) == MOST_NODES - 1
    with pytest.raises(YamlError, match="must have at most 20,000"):
        parse_yaml("[" + "1, " * MOST_NODES + "]")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [*a]", "line 1, column 4: an alias must not stand inside of what it names"),
        ("a: &a {b: {<<: *a}}", "line 1, column 4: an alias must not stand inside of what"),
        ("[" * 5000, "must not be nested so deeply"),
        ("1" * 5000, "line 1, column 1: an integer of 5000 digits is too long"),
    ],
)
def test_what_has_no_end_is_refused(text: str, message: str) -> None:
    with pytest.raises(YamlError, match=re.escape(message)):
        parse_yaml(text)
