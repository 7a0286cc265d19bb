import json

import pytest

from vitlens.errors import DataError, InputError
from vitlens.files import read_json
from vitlens.strict_json import DEPTH, Limit, parse_json


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        "[" * (DEPTH + 1) + "]" * (DEPTH + 1),
        '{"a": 1' + "0" * 30 + "}",
        '{"a": 1' + "0" * 5000 + "}",
        '{"a": NaN}',
        '{"a": -Infinity}',
        '{"a": 1e999}',
        '{"a": 1, "a": 2}',
        '{"a": "\\ud800"}',
        '{"a": 1',
        "",
        "\x00" * 10,
    ],
)
def test_what_is_no_json_within_bounds_is_one_line(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InputError, match=r"a\.json") as caught:
        read_json(tmp_path / "a.json")
    assert len(str(caught.value)) < 1000


def test_the_depth_that_is_allowed_is_read():
    assert json.dumps(parse_json("[" * DEPTH + "]" * DEPTH, source="x")) == "[" * DEPTH + "]" * DEPTH


def test_size_and_number_of_values_are_bounded():
    with pytest.raises(InputError, match="at most 10 bytes"):
        parse_json("[1, 2, 3, 4]", source="x", limit=Limit(size=10))
    with pytest.raises(DataError, match=r"at most 3 values.*; write less"):
        parse_json("[[], [], [], []]", source="x", limit=Limit(values=3), error=DataError, hint="write less")


def test_bytes_that_are_no_utf8(tmp_path):
    (tmp_path / "a.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(InputError, match="UTF-8"):
        read_json(tmp_path / "a.json")


def test_a_pipe_is_not_read(tmp_path):
    import os

    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(InputError, match="no plain file"):
        read_json(tmp_path / "a.json")
