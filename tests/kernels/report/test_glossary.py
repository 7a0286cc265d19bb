"""The glossary: terms of one sentence each, found in texts."""

from collections import Counter

import pytest

from vitlens.report.glossary import GLOSSARY, SPELLINGS, found


def test_each_term_is_one_sentence():
    for term in GLOSSARY.values():
        assert term.sentence
        assert not term.sentence.endswith("."), term.name
        assert len(term.sentence) < 160, term.name


def test_no_spelling_is_of_two_terms():
    times = Counter(spelling.lower() for term in GLOSSARY.values() for spelling in term.spellings)
    assert {spelling for spelling, count in times.items() if count > 1} == set()
    assert set(times) == set(SPELLINGS)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("The ECE falls.", ["calibration error (ECE)"]),
        ("expected calibration error", ["calibration error (ECE)"]),
        ("insertion − deletion", ["insertion", "deletion"]),
        ("Attention weights of CLS", ["attention weights", "CLS token"]),
        ("the CLS token", ["CLS token"]),
        ("McNemar's test, Holm's method", ["McNemar", "Holm"]),
        ("runs/rollout and rollout.py, my-rollout, ablationist, sinking", []),
    ],
)
def test_terms_are_found_as_whole_words(text, names):
    assert [term.name for _, _, term in found(text)] == names
