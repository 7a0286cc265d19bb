"""The wording of a comparison's sentences follows the intervals that they report."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from tests.commands.map_rows import map_check
from vitlens.commands.compare.options import CompareOptions
from vitlens.commands.compare.record import MAP_CHECKS, METHODS, RECORD, MapMethodRow, SeparationRow, SliceRow
from vitlens.commands.compare.report.errors import separation_words
from vitlens.commands.compare.report.summary import map_sentences, shared_errors, verdict
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.shared.maps.on_object import ON_OBJECT, OnObjectRow
from vitlens.commands.shared.maps.rows import MapCheck
from vitlens.records import Record
from vitlens.uncertainty import Estimate

PAIR = ("vit", "cnn")
VERIFIED = (map_check("vit", "relevance"), map_check("cnn", "gradcam"))
SEPARATION = SeparationRow("vit", "image", "blur", 0.7, 0.6, 0.8, 20, 80, 0.4, 0.3, 0.001, 0.01)


def around(value: float, half: float = 0.01, *, unit: str = "fraction") -> Estimate:
    return Estimate(value, value - half, value + half, 200, unit)


def maps(**changes: Estimate) -> dict[str, Estimate]:
    metrics = {}
    for alias in PAIR:
        metrics |= {f"maps/{alias}/half": around(0.2), f"maps/{alias}/central": around(0.4)}
        metrics |= {f"maps/{alias}/row": around(0.5), f"maps/{alias}/column": around(0.5)}
    metrics["half_difference/vit/cnn"] = around(0.0)
    metrics |= {"agreement/vit/cnn/spearman": around(0.3, unit=""), "agreement/vit/cnn/top": around(0.4)}
    metrics["agreement/vit/cnn/shared"] = around(0.5)
    return {**metrics, **changes}


def recorded(
    out: Path,
    metrics: dict[str, Estimate],
    *,
    methods: tuple[str, str] = ("relevance", "gradcam"),
    checks: tuple[MapCheck, ...] = VERIFIED,
    on_object: Sequence[OnObjectRow] = (),
) -> Record:
    """A run of two models whose maps were verified."""
    config = {"models": [{"alias": alias} for alias in PAIR], "options": asdict(CompareOptions(PAIR))}
    with RunFolder.create("compare", out=out, config=config) as folder:
        for name, estimate in metrics.items():
            folder.metric(name, estimate)
        folder.write(METHODS, [MapMethodRow(alias, method) for alias, method in zip(PAIR, methods)])
        folder.write(MAP_CHECKS, checks)
        folder.write(ON_OBJECT, on_object)
        return Record(folder.record(), RECORD)


def map_text(out: Path, *, on_object: Sequence[OnObjectRow] = (), **changes: Estimate) -> str:
    record = recorded(out, maps(**changes), on_object=on_object)
    return " ".join(sentence.text for sentence in map_sentences(record))


def test_which_is_better_follows_the_test(tmp_path):
    metrics = {f"accuracy/{alias}": around(0.9) for alias in PAIR}
    metrics |= {"accuracy_difference/vit/cnn": around(-2.0, unit="points"), "mcnemar_p/vit/cnn": Estimate(0.2, unit="")}
    words = [sentence.text for sentence in verdict(recorded(tmp_path / "a", metrics))]
    assert words[0].startswith("Neither model is shown to be better")
    metrics["mcnemar_p/vit/cnn"] = Estimate(0.01, unit="")
    words = [sentence.text for sentence in verdict(recorded(tmp_path / "b", metrics))]
    assert words[0].startswith("cnn is significantly better")


def counted(*counts: int) -> SliceRow:
    return SliceRow("0", sum(counts), *counts, 0.5, None, None, 0.5, None, None)


def test_errors_shared_and_alone():
    rows = [counted(50, 3, 2, 1, 0), counted(40, 1, 0, 2, 1)]
    text = " ".join(sentence.text for sentence in shared_errors(rows, tuple("abcde")))
    assert "a: 90; b: 4; c: 2; d: 3; e: 1." in text
    assert (
        "Of the 10 images that at least one model misclassifies, 6 (60 %) are misclassified by one model only" in text
    )
    assert "Of the 4 that both misclassify, 3 get the same prediction" in text
    assert len(list(shared_errors([counted(5, 0, 0, 0, 0)], tuple("abcde")))) == 1


def test_the_position_of_maps_follows_the_intervals(tmp_path):
    text = map_text(tmp_path / "a")
    assert text.count("not shown to differ from the centre of the image") == 2
    assert text.count("more than a uniform map;") == 2
    moved = map_text(tmp_path / "b", **{"maps/vit/row": around(0.4), "maps/cnn/central": around(0.255)})
    assert "10.0 % of the side above the centre of the image" in moved
    assert "not shown to differ from a uniform map;" in moved


def test_which_maps_are_more_concentrated(tmp_path):
    assert "are shown to be more concentrated: half of their mass" in map_text(tmp_path / "a")
    vit = map_text(tmp_path / "b", **{"half_difference/vit/cnn": around(-0.2)})
    assert "The maps of vit are more concentrated" in vit
    assert "larger by 20.0 % (19.0 to 21.0" in vit
    cnn = map_text(tmp_path / "c", **{"half_difference/vit/cnn": around(0.2)})
    assert "The maps of cnn are more concentrated" in cnn
    assert "larger by 20.0 % (19.0 to 21.0" in cnn


def test_how_maps_agree(tmp_path):
    assert "the same patches tend to have high values in both" in map_text(tmp_path / "a")
    unrelated = map_text(tmp_path / "b", **{"agreement/vit/cnn/spearman": around(0.0, unit="")})
    assert "no relation between them is shown" in unrelated
    opposite = map_text(tmp_path / "c", **{"agreement/vit/cnn/spearman": around(-0.3, unit="")})
    assert "high values in one tend to be low values in the other" in opposite
    chance = map_text(tmp_path / "d", **{"agreement/vit/cnn/top": around(0.1)})
    assert "not shown to differ from chance;" in chance


def test_maps_by_two_methods_are_compared_only_where_both_are_verified(tmp_path):
    def text(name: str, **how: object) -> str:
        return " ".join(each.text for each in map_sentences(recorded(tmp_path / name, maps(), **how)))

    assert "relevance for vit and GradCAM for cnn, each the verified best of its model" in text("verified")
    unverified = (VERIFIED[0], map_check("cnn", "gradcam", over_centre=0.0))
    for name, checks in (("not", unverified), ("none", ())):
        said = text(name, checks=checks)
        assert "are not compared in words: they are by two methods" in said
        assert "rank correlation" not in said
        assert said.count("half of a map's mass lies on") == 2
    assert "gradcam of cnn: warn" in text("why", checks=unverified)
    assert "by saliency for both models" in text("same", methods=("saliency", "saliency"), checks=())


def test_the_object_and_its_area(tmp_path):
    rows = [
        OnObjectRow(
            alias,
            alias,
            score,
            Estimate(inside, inside - 0.01, inside + 0.01, 50),
            "a map",
            Estimate(0.1),
            Estimate(*(100 * end for end in gain), 50, "points"),
        )
        for alias, inside, gain in zip(PAIR, (0.5, 0.1), ((0.4, 0.39, 0.41), (0.0, -0.01, 0.01)))
        for score in ("mass", "pointing")
    ]
    text = map_text(tmp_path / "a", on_object=rows)
    assert "50.0 % (49.0 to 51.0) of the mass of vit's maps lies on the object, more than that of a map" in text
    assert "not shown to be more or less than that of a map" in text


def test_failures():
    row = SEPARATION
    [text] = separation_words([row, replace(row, number="contrast", p_holm=0.5)], "image")
    assert "blur greater (median 0.4 and 0.3; area 0.7, 0.6 to 0.8) (1 of 2 quantities)" in text
    [text] = separation_words([replace(row, p_holm=0.5)], "image")
    assert text == "vit: no difference between failures and successes is shown (quantities tested: 1)."
    [text] = separation_words([replace(row, p=None, p_holm=None)], "image")
    assert text == "vit: too few images to test (failures: 20, successes: 80)."
    assert not list(separation_words([row], "map"))
