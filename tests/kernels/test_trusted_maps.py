"""Which map of each model can be trusted, in words."""

from tests.kit.map_rows import STAYING, checks
from vitlens.commands.shared.maps.report import trust_words


def test_only_a_model_without_a_map_that_passes_is_said_to_have_none():
    rows = [*checks("a", "relevance"), *checks("a", "rollout", score=0.2)]
    rows += checks("b", "saliency", cascade=STAYING)
    text = trust_words(rows)
    before, after = text.split("**relevance** for **a**")
    assert "**a**" not in before + after
    assert text.count("**b**") == 2  # it has no such map, and this is its closest
