"""Values of more than one word that cannot be read: lists, channels, sizes, places; others: test_options.py."""

import pytest

from vitlens.cli.main import run


@pytest.mark.parametrize(
    ("line", "texts"),
    [
        ("rollout m --fusion", ("", "mean,mex")),
        ("predict m --mean", ("", "a", "0.5,0.5", "0.5,0.5,1.5", "nan", "-0.1", "0,0,0,0")),
        ("profile m --sizes", ("", ",", "a", "3x4x5", "0")),
        ("profile m --batch-sizes", ("", "0", "1,,2", "-1", "1.5")),
        ("predict m --image-size", ("", "0", "1x2x3", "-4", "4.5", "x", "32x", "9" * 30, "9" * 5000)),
        ("attention m --query", ("", "3", "3,", "3,4,5", "-1,3", "3;4", "a,b", "1.5,2", "3x4")),
    ],
)
def test_what_cannot_be_read_is_refused_by_the_name_of_its_option(line, texts, stand_in, capsys):
    calls, option = stand_in(line.split()[0]), line.split()[-1]
    for text in texts:
        *words, name = line.split()
        assert run([*words, f"{name}={text}"]) == 2, text
        (told,) = capsys.readouterr().err.splitlines()
        assert option in told
    assert not calls
