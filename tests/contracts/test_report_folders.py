"""Every command on tiny models and a few images leaves a complete folder, and `report` makes the same one again."""

from contextlib import nullcontext

import pytest

from tests.kit.saving import saved_figures
from tests.kit.whole_folder import whole_folder
from vitlens.cli.main import run
from vitlens.commands.registry import COMMANDS

LINES = {
    "evaluate": "evaluate {vit} {cnn} --data digits --limit 20",
    "predict": "predict {vit} --images {pictures}",
    "look": "look {pictures} --model {vit}",
    "look with a CNN": "look {pictures} --model {cnn}",
    "attention": "attention {vit} --images {pictures}",
    "attention of a patch": "attention {vit} --images {pictures} --query 1,2 --key 0,3 --head 1,0 --layer 0",
    "rollout": "rollout {vit} --data digits --limit 8",
    "rollout of pictures": "rollout {vit} --images {pictures} --fusion mean --discard 0.5",
    "every method": "rollout {vit} --data digits --limit 5 --target true --alpha 0.4 --layer 0 "
    "--method rollout,relevance,gradient-rollout,attention,flow",
    "stats": "stats {vit} --data digits --limit 6",
    "stats of pictures": "stats {vit} --images {pictures} --no-renormalise",
    "stats of two": "stats {vit} {vit}@random --data digits --limit 6",
    "ablate": "ablate {vit} --data digits --limit 12 --replace mean,zero,resample --greedy --prune 0.25",
    "ablate of heads alone": "ablate {vit} --data digits --limit 6 --units head --no-curves --pairs 0 --no-patch",
    "compare": "compare {vit} {cnn} --data digits --limit 12 --panels 3",
    "compare of one family": "compare {vit} {vit}@random --data digits --limit 8 --panels 2 --no-harder "
    "--method attention,saliency --target true",
    "explain": "explain {vit} {cnn} --data digits --limit 4 --method relevance,gradcam,integrated-gradients,occlusion",
    "explain by every method": "explain {vit} --images {pictures} --method all --target 3",
    "explain by a chosen method": "explain {vit} {cnn} --data digits --limit 20 --auto --method gradcam,saliency",
    "explain verified": "explain {vit} --data digits --limit 4 --method relevance,saliency --verify",
    "attack": "attack {vit} {cnn} --data digits --limit 6 --steps 2 --attack fgsm,pgd,cw,patch "
    "--epsilon 0,8,64 --no-corruptions",
    "attack of predictions": "attack {vit} --images {pictures} --predicted --attack pgd-l2,noise --steps 2",
    "features": "features {vit} {cnn} --data digits --limit 20 --k 1,3 --no-cache --no-tsne",
    "features of pictures": "features {vit} --images {pictures} --thumbnails --no-cache",
    "profile": "profile {vit} {cnn} --batch-sizes 1,2 --sizes 16,32",
    "audit": "audit {vit} --data digits --limit 4 --budget 0.001",
    "profile by patch size": "profile vit-mini --patch-size 8,16 --batch-sizes 1",
    "train": "train vit-mini --data digits --epochs 1 --limit 20 --batch-size 10 --dim 16 --depth 1 --heads 2",
    "train a head alone": "train {vit} --data digits --epochs 1 --limit 20 --batch-size 10 --freeze-backbone",
    "train from a teacher": "train vit-mini --data digits --epochs 1 --limit 20 --batch-size 10 --dim 16 --depth 1 "
    "--heads 2 --distill-from {cnn} --beside {vit}",
    "train frozen and full": "train {vit} --data digits --epochs 1 --limit 20 --batch-size 10 --compare-frozen",
    "study of points": "study --kind pooling --seeds 2 --epochs 1 --limit 20 --batch-size 10",
    "study along an axis": "study --kind patch-size --seeds 1 --epochs 1 --limit 20 --batch-size 10",
}  # the study with all its chapters is tests/golden/study/test_whole.py's
MADE = {word for word, command in COMMANDS.items() if command.reports and not command.serves}  # others: tests/ui/demo
OTHERS = MADE - {line.split()[0] for line in LINES.values()}
LINES |= {word: f"{word} {{vit}} --data digits --limit 4" for word in OTHERS}  # a command that was added

# long ones whose parts tests/golden makes too, by hand
BY_HAND = (
    "stats of two",
    "compare",
    "compare of one family",
    "explain verified",
    "features",
    "profile by patch size",
    "walkthrough",
    "attention of a patch",
    "every method",
    "explain by every method",
    "stats of pictures",
    "train frozen and full",
    "audit",
    "attack of predictions",
    "explain by a chosen method",
    "train from a teacher",
    "train a head alone",
    "features of pictures",
    "study along an axis",
)


# whose figures are saved by the command and again by `report`, and are the same byte by byte; the others' once
SAVED_TWICE = ("look with a CNN", "attention", "rollout of pictures", "stats", "ablate of heads alone", "evaluate")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in BY_HAND else ()) for name in LINES]
)
def test_a_command_leaves_a_whole_folder_that_can_be_made_again(name, tiny_vit, tiny_cnn, pictures, tmp_path, capsys):
    out = tmp_path / "out"
    line = LINES[name].format(vit=tiny_vit, cnn=tiny_cnn, pictures=pictures)
    saved = name in SAVED_TWICE or name in BY_HAND
    with saved_figures() if saved else nullcontext():
        assert run([*line.split(), "--device", "cpu", "--quiet", "--out", str(out)]) == 0, capsys.readouterr().err
    whole_folder(out, line.split()[0], saved=saved)
