"""JSON as people write it."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_zero.config.load import parse_json, read_json
from tiered_zero.errors import ConfigError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab"\\,/#*}] \n'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a"/#,\\'), inner, max_size=3),
)


def test_comments_and_trailing_commas() -> None:
    text = """
    { // one
      "a": 1, # two
      /* three, } */
      "b": [1, 2, /* four */ ], // five
    }"""
    assert parse_json(text, "x") == {"a": 1, "b": [1, 2]}


def test_strings_are_left_alone() -> None:
    text = r'{"http://x#y": "/* no */ \" // , ] ,}", "c": "\\"} // "end"'
    assert parse_json(text, "x") == {"http://x#y": '/* no */ " // , ] ,}', "c": "\\"}


@given(st.dictionaries(st.text('a"/#,\\'), VALUES, max_size=3), st.sampled_from([None, 2]))
def test_plain_json_is_read_as_it_is(tree: dict[str, object], indent: int | None) -> None:
    assert parse_json(json.dumps(tree, indent=indent), "x") == tree


def test_errors_name_the_line() -> None:
    with pytest.raises(ConfigError, match=r"expected JSON in c\.json; .*line 4"):
        parse_json('{\n/* two\nlines */\n"a" 1}', "c.json")


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('{"a": 1, "a": 1}', "a"),
        ('{"a": {"b": {"c": 1, "d": 2, "c": 3}}}', "a.b.c"),
        ('{"a": [0, {"b": 1, "b": 2}]}', "a.1.b"),
        ('{"a": {"b": 1, "b": 2}, "a": 1}', "a"),
    ],
)
def test_a_key_given_twice(text: str, path: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{path}: expected once, found twice in c\.json"):
        parse_json(text, "c.json")


@pytest.mark.parametrize("text", ["[]", "3", '"a"', "null"])
def test_no_object(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a JSON object"):
        parse_json(text, "x")


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": "\xc3\xa9"}')
    assert read_json(path) == {"a": "é"}
    path.write_bytes(b"\xff\xfe{")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_json(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_json(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_json(tmp_path)
