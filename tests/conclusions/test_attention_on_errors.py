"""What is said of attention on errors follows the corrected test, and every status has a reason."""

from dataclasses import replace

import numpy as np
import pytest

from tests.kit.planted_answers import answers, compare_record
from tests.kit.planted_attention import Planted
from vitlens.commands.compare.record import CompareRecord
from vitlens.commands.compare.report import REPORT
from vitlens.report.claims import Claim

UNTESTED = CompareRecord.contents().tables["attention_untested"]
RIGHT = answers(np.arange(400) % 10 > 0)
BOTH = compare_record({"vit": RIGHT, "cnn": RIGHT})


QUESTION = "attention on errors"


def claim_of(record: CompareRecord) -> Claim:
    """Return the only claim on the question."""
    (claim,) = [claim for claim in REPORT(record).claims if claim.question == QUESTION]
    return claim


@pytest.mark.parametrize(("shift", "word"), [(0.1, "more on the object"), (-0.1, "less on")])
def test_a_difference_is_a_warning_with_its_direction_and_never_a_cause(shift, word):
    claim = claim_of(replace(BOTH, attention_on_errors=Planted(shift).rows(0)))
    assert (claim.state, claim.evidence) == ("warn", "observed")
    assert word in claim.says
    assert claim.effect.value == pytest.approx(100 * shift, abs=3)
    assert "because" not in claim.says
    assert "vitlens ablate" in claim.next_step


def test_no_difference_is_inconclusive_and_says_how_large_the_clearest_is():
    record = replace(BOTH, attention_on_errors=Planted().rows(0))
    claim = claim_of(record)
    assert (claim.state, claim.says) == ("inconclusive", "")
    assert "none of 1 comparisons" in claim.because
    figures = []
    for section in REPORT(record).sections:
        if section.status and "1 comparisons" in section.status.words:
            figures += [figure.name for figure in section.figures]
    assert figures == ["attention_on_errors"]


def test_too_few_errors_are_not_tested_with_the_count():
    row = UNTESTED("vit", "it has 3 errors")
    claim = claim_of(replace(BOTH, attention_untested=(row,)))
    assert (claim.state, claim.because) == ("not tested", "it has 3 errors")
