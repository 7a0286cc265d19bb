from vitlens.runs import compare_words as words
from vitlens.uncertainty import Estimate

PAIR = ("vit", "cnn")


def around(value: float, half: float = 0.01, *, unit: str = "fraction") -> Estimate:
    return Estimate(value, value - half, value + half, 200, unit)


def looks(**changes: Estimate) -> dict[str, Estimate]:
    found = {}
    for alias in PAIR:
        found |= {f"look/half/{alias}": around(0.2), f"look/central/{alias}": around(0.4)}
        found |= {f"look/row/{alias}": around(0.5), f"look/column/{alias}": around(0.5)}
    found["half_difference/vit/cnn"] = around(0.0)
    found |= {"agreement/spearman/vit/cnn": around(0.3, unit=""), "agreement/top/vit/cnn": around(0.4)}
    found["agreement/shared/vit/cnn"] = around(0.5)
    return {**found, **changes}


def said(found: dict[str, Estimate]) -> str:
    return " ".join(words.looking(found, PAIR, ("relevance", "GradCAM")))


def test_who_is_better_follows_the_test():
    found = {f"accuracy/{alias}": around(0.9) for alias in PAIR}
    found |= {"accuracy_difference/vit/cnn": around(-2.0, unit="points"), "mcnemar_p/vit/cnn": Estimate(0.2, unit="")}
    assert "these images do not show which is better" in " ".join(words.verdict(found, PAIR))
    found["mcnemar_p/vit/cnn"] = Estimate(0.01, unit="")
    assert "cnn is better by more than chance explains" in " ".join(words.verdict(found, PAIR))


def test_errors_shared_and_alone():
    counts = {
        "both right": 90, "only first wrong": 4, "only second wrong": 2, "both wrong, alike": 3,
        "both wrong, differently": 1,
    }  # fmt: skip
    text = " ".join(words.cells(counts, {cell: cell for cell in counts}))
    assert "60 % of the images that some model gets wrong are wrong in one model alone (6 of 10)" in text
    assert "the same class on 3 of 4" in text
    assert len(list(words.cells({**dict.fromkeys(counts, 0), "both right": 5}, {cell: cell for cell in counts}))) == 1


def test_where_a_model_looks_follows_the_intervals():
    text = said(looks())
    assert text.count("not shown to be off the middle") == 2
    assert text.count("more than an even map's 25 %") == 2
    moved = said(looks(**{"look/row/vit": around(0.4), "look/central/cnn": around(0.255)}))
    assert "10.0 % of the side above the middle" in moved
    assert "not shown to differ from an even map's 25 %" in moved


def test_which_is_the_more_concentrated():
    assert "Which of the two is the more concentrated is not shown" in said(looks())
    assert "vit's maps are the more concentrated: half of cnn's needs 20.0 % (19.0 to 21.0" in said(
        looks(**{"half_difference/vit/cnn": around(-0.2)})
    )
    assert "cnn's maps are the more concentrated: half of vit's needs 20.0 %" in said(
        looks(**{"half_difference/vit/cnn": around(0.2)})
    )


def test_how_maps_agree():
    assert "the same places tend to be high in both" in said(looks())
    assert "no relation between them is shown" in said(looks(**{"agreement/spearman/vit/cnn": around(0.0, unit="")}))
    assert "tends to be low in the other" in said(looks(**{"agreement/spearman/vit/cnn": around(-0.3, unit="")}))
    assert "not shown to differ from what chance (10 %)" in said(looks(**{"agreement/top/vit/cnn": around(0.1)}))


def test_the_object_and_its_area():
    found = looks(**{"look/object-area": around(0.1)})
    for alias, inside in zip(PAIR, (0.5, 0.1)):
        found[f"look/inside/{alias}"], found[f"localisation/pointing/{alias}"] = around(inside), around(0.7)
    text = said(found)
    assert "Of vit's maps 50.0 % (49.0 to 51.0) lies on the object, more than the object's share" in text
    assert "not shown to be more or less than the object's share" in text


def test_failures():
    row = {"model": "vit", "kind": "image", "number": "blur", "area": 0.7, "low": 0.6, "high": 0.8, "failures": 20,
           "successes": 80, "median_failure": 0.4, "median_success": 0.3, "p": 0.001, "p_holm": 0.01}  # fmt: skip
    [text] = words.failures([row, {**row, "number": "contrast", "p_holm": 0.5}], "image")
    assert "blur greater (median 0.4 against 0.3; area 0.7, 0.6 to 0.8) (1 of 2 numbers)" in text
    [text] = words.failures([{**row, "p_holm": 0.5}], "image")
    assert text == "vit: none of 1 numbers is shown to differ between failures and successes."
    [text] = words.failures([{**row, "p": None, "p_holm": None}], "image")
    assert text == "vit: 20 failures and 80 successes are too few to test."
    assert not list(words.failures([row], "map"))
