"""What holds for all commands that measure: progress reaches its total, several processes find what one finds."""

import re
import shutil
from dataclasses import asdict

import numpy as np
import pytest

from tests.kit.commands import figures, impatient, quick_attacks, ran
from tests.kit.simulated_processes import run_in_processes
from tests.kit.training_runs import kept_run
from vitlens.cli.main import run
from vitlens.commands.run.publish import read_folder

LINES = {
    "predict": "predict {vit} --data digits --limit 6 --batch-size 4",
    "evaluate": "evaluate {vit} {cnn} --data digits --limit 6 --batch-size 4",
    "attention": "attention {vit} --data digits --limit 6",
    "rollout": "rollout {vit} --data digits --limit 6 --batch-size 4 --fusion mean",
    "stats": "stats {vit} --data digits --limit 6 --batch-size 4",
    "ablate": "ablate {vit} --data digits --limit 6 --batch-size 4 --units head --no-patch",
    "compare": "compare {vit} {cnn} --data digits --limit 4 --batch-size 3 --panels 1 --method saliency "
    "--disturbed 2 --checked 2",
    "explain": "explain {vit} --data digits --limit 3 --batch-size 2 --method attention,occlusion --verify "
    "--no-counterfactuals --no-stability --composites none --other-substrates mean,black",
    "attack": "attack {vit} --data digits --limit 4 --batch-size 2 --attack fgsm,pgd --steps 2 --epsilon 1,8 "
    "--predicted --self-checks few",
    "features": "features {vit} --data digits --limit 12 --batch-size 4 --bank 20 --k 1 --no-tsne --no-cache",
    "walkthrough": "walkthrough {vit} --images {pictures}/0.png --layer 1",
    "study": "study --kind pooling --seeds 1 --epochs 1 --limit 20 --batch-size 10",
}
BAR = re.compile(r"^(?P<what>[^:]+): (?P<done>[\d,]+) of (?P<total>[\d,]+) \w")


@pytest.mark.parametrize("name", LINES)
def test_every_bar_reaches_its_total(name, places, tmp_path, capsys):
    with impatient():
        assert run([*LINES[name].format(**places).split(), "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    found = [match for line in capsys.readouterr().err.splitlines() if (match := BAR.match(line))]
    shown: dict[str, list[tuple[int, int]]] = {}
    for each in found:
        pair = tuple(int(each[word].replace(",", "")) for word in ("done", "total"))
        shown.setdefault(each["what"], []).append(pair)
    for what, steps in shown.items():
        assert steps[-1][0] == steps[-1][1], (what, steps)
        assert all(done <= total for done, total in steps), (what, steps)
    if name == "explain":
        (own,) = [steps for what, steps in shown.items() if what.startswith("Explaining")]
        amounts = [after - before for (before, _), (after, _) in zip([(0, 0), *own], own)]
        assert max(amounts) > 10 * min(amounts)  # occlusion is slower, and says so


SHARED = {  # evaluate: test_evaluate.py; stats: test_stats.py
    "stats over a training": "stats {kept} --limit 7 --over-training",
    "rollout": "rollout {vit} --limit 12 --batch-size 5 --target true",
    "ablate": "ablate {vit} --limit 12 --batch-size 6 --pairs 2 --no-patch",
    "attack": "attack {vit} --limit 4 --batch-size 2 --predicted --steps 3 --no-corruptions --no-inside "
    "--attack fgsm,low-frequency --epsilon 0,4,32 --self-checks few --single-epsilon low-frequency=64",
}


@pytest.mark.parametrize("name", SHARED)
def test_two_processes_find_what_one_finds(name, places, tmp_path, monkeypatch):
    kept = kept_run(tmp_path / "taught", kept=(0, 2), epochs=3) if "training" in name else None
    line = f"{SHARED[name].format(**places, kept=kept)} --data digits"
    with quick_attacks():
        one, words = ran(tmp_path / "one", line), f"{line} --device cpu --quiet --out {tmp_path / 'two'}".split()
        assert run_in_processes(2, lambda _: run(words), monkeypatch) == [0, 0]
    two = read_folder(tmp_path / "two")
    assert two.metrics.keys() == one.metrics.keys()
    for metric, expected in one.metrics.items():
        if not metric.startswith("cost"):
            assert two.metrics[metric].value == pytest.approx(expected.value, rel=1e-4, abs=1e-6), metric
    if name == "rollout":
        assert (two.methods, two.shown) == (one.methods, one.shown)
        np.testing.assert_allclose(two.maps.maps, one.maps.maps, atol=1e-6)
    if name == "attack":
        first, second = (asdict(each.attacked["tiny-vit"]) for each in (one, two))
        np.testing.assert_equal(second, first)
        epsilons = {attack: [row.epsilon for row in one.curves if row.attack == attack] for attack in first["distance"]}
        assert epsilons == {"fgsm-linf": [0.0, 4.0, 32.0], "low-frequency-linf": [0.0, 64.0]}
    for row, other in zip(getattr(one, "learning_heads", ()), getattr(two, "learning_heads", ()), strict=True):
        assert other.statistics == pytest.approx(row.statistics, rel=1e-5)


@pytest.mark.parametrize(
    ("word", "more"),
    [("attention", ""), ("attention", "--limit 30"), ("rollout", "--method rollout"), ("explain", "--method rollout")],
)
def test_of_many_images_the_first_are_drawn_which_is_said(word, more, tiny_vit, pictures, tmp_path, capsys):
    """Six on a sheet. The maps of attention, which stores no others, are as many as are asked for."""
    (tmp_path / "many").mkdir()
    for number in range(30):
        shutil.copy(pictures / "0.png", tmp_path / "many" / f"{number:02}.png")
    line = f"{word} {tiny_vit} --images {tmp_path / 'many'} {more} --device cpu --out {tmp_path / 'out'}"
    assert run(line.split()) == 0
    said = [text for text in capsys.readouterr().err.splitlines() if "of the 30 images" in text]
    record, drawn = read_folder(tmp_path / "out"), 30 if "--limit" in more else 24
    assert ["24 of" in text for text in said] == [True] * (drawn < 30)
    maps = record.maps["tiny-vit"] if word == "explain" else record.maps
    assert len(maps.images) == drawn
    assert len([name for name in figures(record) if "_more" in name]) == 3
