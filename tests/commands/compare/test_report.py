"""The sentences of a comparison follow the intervals that they report."""

from dataclasses import replace
from pathlib import Path

from vitlens.commands.compare.record import METHODS, RECORD, MapMethodRow, SeparationRow, SliceRow
from vitlens.commands.compare.report.errors import separation_words
from vitlens.commands.compare.report.summary import map_sentences, shared_errors, verdict
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.records import Record
from vitlens.uncertainty import Estimate

PAIR = ("vit", "cnn")
SEPARATION = SeparationRow("vit", "image", "blur", 0.7, 0.6, 0.8, 20, 80, 0.4, 0.3, 0.001, 0.01)


def around(value: float, half: float = 0.01, *, unit: str = "fraction") -> Estimate:
    return Estimate(value, value - half, value + half, 200, unit)


def maps(**changes: Estimate) -> dict[str, Estimate]:
    found = {}
    for alias in PAIR:
        found |= {f"maps/{alias}/half": around(0.2), f"maps/{alias}/central": around(0.4)}
        found |= {f"maps/{alias}/row": around(0.5), f"maps/{alias}/column": around(0.5)}
    found["half_difference/vit/cnn"] = around(0.0)
    found |= {"agreement/vit/cnn/spearman": around(0.3, unit=""), "agreement/vit/cnn/top": around(0.4)}
    found["agreement/vit/cnn/shared"] = around(0.5)
    return {**found, **changes}


def recorded(out: Path, metrics: dict[str, Estimate]) -> Record:
    config = {"models": [{"alias": alias} for alias in PAIR]}
    with RunFolder.create("compare", out=out, config=config) as folder:
        for name, estimate in metrics.items():
            folder.metric(name, estimate)
        folder.write(METHODS, [MapMethodRow("vit", "relevance"), MapMethodRow("cnn", "gradcam")])
        return Record(folder.record(), RECORD)


def said(out: Path, **changes: Estimate) -> str:
    return " ".join(sentence.text for sentence in map_sentences(recorded(out, maps(**changes))))


def test_which_is_better_follows_the_test(tmp_path):
    found = {f"accuracy/{alias}": around(0.9) for alias in PAIR}
    found |= {"accuracy_difference/vit/cnn": around(-2.0, unit="points"), "mcnemar_p/vit/cnn": Estimate(0.2, unit="")}
    words = [sentence.text for sentence in verdict(recorded(tmp_path / "a", found))]
    assert "these images do not show which is better" in words[-1]
    found["mcnemar_p/vit/cnn"] = Estimate(0.01, unit="")
    words = [sentence.text for sentence in verdict(recorded(tmp_path / "b", found))]
    assert "cnn is significantly better" in words[-1]


def counted(*counts: int) -> SliceRow:
    return SliceRow("0", sum(counts), *counts, 0.5, None, None, 0.5, None, None)


def test_errors_shared_and_alone():
    rows = [counted(50, 3, 2, 1, 0), counted(40, 1, 0, 2, 1)]
    text = " ".join(sentence.text for sentence in shared_errors(rows, tuple("abcde")))
    assert "a: 90; b: 4; c: 2; d: 3; e: 1." in text
    assert "60 % of the images that at least one model gets wrong are wrong in one model alone (6 of 10)" in text
    assert "the same class on 3 of 4" in text
    assert len(list(shared_errors([counted(5, 0, 0, 0, 0)], tuple("abcde")))) == 1


def test_the_position_of_maps_follows_the_intervals(tmp_path):
    text = said(tmp_path / "a")
    assert text.count("not shown to be off the middle") == 2
    assert text.count("more than an even map's 25 %") == 2
    moved = said(tmp_path / "b", **{"maps/vit/row": around(0.4), "maps/cnn/central": around(0.255)})
    assert "10.0 % of the side above the middle" in moved
    assert "not shown to differ from an even map's 25 %" in moved


def test_which_is_the_more_concentrated(tmp_path):
    assert "Which model's maps are the more concentrated is not shown" in said(tmp_path / "a")
    assert "vit's maps are the more concentrated: half of cnn's needs 20.0 % (19.0 to 21.0" in said(
        tmp_path / "b", **{"half_difference/vit/cnn": around(-0.2)}
    )
    assert "cnn's maps are the more concentrated: half of vit's needs 20.0 %" in said(
        tmp_path / "c", **{"half_difference/vit/cnn": around(0.2)}
    )


def test_how_maps_agree(tmp_path):
    assert "the same places tend to be high in both" in said(tmp_path / "a")
    unrelated = said(tmp_path / "b", **{"agreement/vit/cnn/spearman": around(0.0, unit="")})
    assert "no relation between them is shown" in unrelated
    opposite = said(tmp_path / "c", **{"agreement/vit/cnn/spearman": around(-0.3, unit="")})
    assert "tends to be low in the other" in opposite
    chance = said(tmp_path / "d", **{"agreement/vit/cnn/top": around(0.1)})
    assert "not shown to differ from what chance (10 %)" in chance


def test_the_object_and_its_area(tmp_path):
    found = {"object_area/vit/cnn": around(0.1)}
    for alias, inside in zip(PAIR, (0.5, 0.1)):
        found[f"maps/{alias}/inside"], found[f"localisation/{alias}/pointing"] = around(inside), around(0.7)
    text = said(tmp_path / "a", **found)
    assert "Of vit's maps 50.0 % (49.0 to 51.0) lies on the object, more than the object's share" in text
    assert "not shown to be more or less than the object's share" in text


def test_failures():
    row = SEPARATION
    [text] = separation_words([row, replace(row, number="contrast", p_holm=0.5)], "image")
    assert "blur greater (median 0.4 against 0.3; area 0.7, 0.6 to 0.8) (1 of 2 numbers)" in text
    [text] = separation_words([replace(row, p_holm=0.5)], "image")
    assert text == "vit: none of 1 numbers is shown to differ between failures and successes."
    [text] = separation_words([replace(row, p=None, p_holm=None)], "image")
    assert text == "vit: 20 failures and 80 successes are too few to test."
    assert not list(separation_words([row], "map"))
