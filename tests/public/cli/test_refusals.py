"""Wrong lines end with one line on stderr and exit code 2 before any work.

Options that many commands have, and what a family of models lacks:
tests/contracts/test_messages.py, test_support.py.
"""

import dataclasses
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.commands import refusal
from vitlens.commands.registry import COMMANDS

# By subject: a line as it is typed after "$ vitlens", then a part of the message, which names the
# option or the value at fault (no line below it: any message).
WRONG = {
    "commands and options": """
$ rolout vit-digits
no command 'rolout'; did you mean 'rollout'? see vitlens --help
$ --nonsense
--nonsense
$ rollout vit-digits --fusion sum
no --fusion value 'sum'
$ rollout vit-digits --fusion ,
expected --fusion with at least one of mean, max, min
$ rollout vit-digits --alpha 2
--alpha
$ rollout vit-digits --readout moon
--readout
$ rollout vit-digits --std 300
expected --std R,G,B
$ rollout vit-digits --image-size 4097
at most 4096 px a side, found 4097
$ predict torchvision:resnet18 --random-weights --image-size 4097x32
found 4097x32
$ train vit-micro --image-size 100000
found 100000
$ predict {vit} --images {pictures} --html
expected --out with --html
$ ablate vit-digits --images {pictures}
--predicted
$ attack vit-digits --images {pictures}
add --predicted
$ study vit-digits --images {pictures}
--predicted
$ study --images {pictures}
$ study --kind pooling --predicted --images {pictures}
$ study vit-micro --predicted --images {pictures}
$ study vit-digits --predicted --images {pictures} --data digits
""",
    "names": """
$ predict deit_tny --random-weights
'timm:deit_tiny_patch16_224'
$ predict timm:deit_tny --random-weights
'deit_tiny_patch16_224'
$ predict timm:dinov2 --random-weights
'vit_small_patch14_dinov2'
$ predict timm:DEIT_TINY --random-weights
'deit_tiny_patch16_224'
$ predict torchvision:resnt18 --random-weights
'resnet18'
$ rollout vit-digits --data ''
empty
$ rollout vit-digits --data ./nothing
found nothing at './nothing'
$ rollout nothing.pth --data ./nowhere
found nothing at './nowhere'
$ explain vit-digits cnn-digits --data dgits
digits
$ study nothing.pth --data ./nowhere
found nothing at './nowhere'
$ rollout vit-digits --data a/b
found nothing at 'a/b'
$ rollout vit-digits --data nothing.npz
found nothing at 'nothing.npz'
$ rollout vit-digits --data {pictures}/0.png
try --images
$ rollout vit-digits --data=
empty
$ rollout vit-digits --images a.png ''
empty
$ rollout vit-digits --out ''
empty
$ rollout ''
empty
$ evaluate vit-digits ' '
empty
$ report ''
empty
$ predict vit-digits --weights ''
empty
""",
    "aliases and long names": """
$ evaluate vit-digits a/b=cnn-digits
letters, digits
$ compare vit-digits ä=cnn-digits
letters, digits
$ attack vit-digits -- -a=cnn-digits
letters, digits
$ study vit-digits =cnn-digits
letters, digits
$ evaluate vit-digits {long}=cnn-digits
letters, digits
$ rollout vit-digits --images {long}.jpg
$ rollout vit-digits --data {long}
$ rollout vit-digits --data {long}.npz
$ predict {long}
$ predict {long}.pth --arch vit-mini
$ predict vit-digits --classes {long}
$ predict runs/{long}=x
$ report {long}
$ train --resume {long}
$ rollout vit-digits --out {long}
""",
    "attention": """
$ attention {vit} --images {pictures} --layer 2
--layer with a layer from 0 to 1, found 2
$ attention {vit} --images {pictures} --query 4,0
0,0 to 3,3), found 4,0
$ attention {vit} --images {pictures} --key 0,9
0,0 to 3,3), found 0,9
$ attention {cnn} --images {pictures}
softmax attention
$ rollout {vit} --images {pictures} --target 10
from 0 to 9, found 10
$ rollout {vit} --images {pictures} --target cat
no class 'cat'
$ rollout {vit} --images {pictures} --target true
labelled images
$ rollout {vit} --images {pictures} --discard 1
discard
$ rollout {vit} --images {pictures} --start-layer 2
layer
$ rollout {vit} --images {pictures} --method attention --layer 2
layer
$ rollout {vit} --images {pictures} --data digits
--images or --data
$ rollout swin-micro --random-weights --data digits --limit 2 --method flow
windows
$ rollout vit-micro --random-weights --image-size 64 --data digits --limit 2 --method flow
found 257
$ stats {cnn} --data digits
softmax attention
$ stats {vit} --over-training
--keep-every N
$ attention {vit} --data digits --over-training
--keep-every N
$ stats vit-digits --over-training
found none kept in vit-digits
$ walkthrough {vit} --layer 2
expected a layer from 0 to 1
$ walkthrough {vit} --layer -1
expected --layer
$ walkthrough {vit} --layer 0 --head 2
expected a head from 0 to 1 in layer 0
$ walkthrough {vit} --images x.png --data digits
expected --images or --data
$ reversal --heads 3
expected a number of heads that divides 64, found 3
$ reversal --length 1
expected --length
$ reversal --task revers
expected --task
$ reversal --positions learnt
expected --positions
$ walkthrough {cnn}
expected softmax attention
""",
    "ablate": """
$ ablate {cnn} --data digits
tiny-cnn
$ ablate {vit} --data digits --limit 5 --replace mean,zero
--replace resample
$ ablate {vit} --data digits --limit 12 --clean a.png
--clean and --corrupted together
$ ablate {vit} --data digits --limit 12 --save there
--save with --prune
""",
    "profile": """
$ profile vit-tiny --weights model.safetensors --patch-size 4
--patch-size without --weights
$ profile resnet20 --patch-size 8
with --patch-size, found resnet20
$ profile vit-mini --patch-size 5
divisible by the patch's
$ profile vit-mini --limit 3
expected no --limit
$ profile torchvision:squeezenet1_1 --image-size 32 --sizes 16
to run at 16x16 px
""",
    "compare": """
$ compare {vit}
vitlens compare vit-digits cnn-digits
$ compare a={vit} b={vit}
found the same weights as a and b
$ compare {vit} {cnn} --panels 9 --maps 8
expected --maps of at least --panels (9), found 8
$ compare {vit} {cnn} --method relevence
did you mean 'relevance'
$ compare {vit} {cnn} --method ,
expected --method with at least one of
$ compare {vit} {cnn} --method rollout
found 'rollout'; it has
$ compare {vit} {cnn} --method gradcam,layercam,saliency
found 3 methods
$ compare {vit} {cnn} --target 10
--target from 0 to 9, found 10
$ compare {vit} {cnn} --data {pictures}
labelled images
$ compare {vit} {cnn} --cue-conflict digits
named shapeN-textureM
$ compare {vit} {learned}
expected images for learned
""",
    "explain": """
$ explain {vit} --images {pictures} --target 10
found 10
$ explain {vit} --images {pictures} --target cat
'cat'
$ explain {vit} --images {pictures} --target true
labelled images
$ explain {vit} --method gradcm
did you mean 'gradcam'
$ explain {vit} --method lrp
known: ablationcam, all, attention
$ explain {vit} --method ,
expected --method with at least one of
$ explain {vit} --method relevance --auto
at least 2 candidates
$ explain {vit} --method relevance --engine grad-cam
--engine
$ explain {vit} --method gradcam:eigencam
did you mean 'grad-cam'
$ explain {vit} --method grad-cam:eigncam
'grad-cam:eigencam'
$ explain {vit} --method captum:lrp
found LayerNorm in tiny-vit
$ compare {vit} {cnn} --method grad-cam:all
no method 'grad-cam:all'
$ explain {vit} {cnn} --method relevance --verify
tiny-cnn
$ explain {vit} --method saliency --refine affinity
found saliency, a map of pixels
$ explain {vit} --method gradcam --refine affinity --times saliency
found saliency, a map of pixels
$ explain {vit} --method gradcam --times best --refine affinity
found best, refined already
$ explain {vit} --method gradcam --times gradcam
found the same
$ explain {vit} --method gradcam --times gradcm
'gradcam'
$ explain {vit} --refine affinity --refine-layers 2
layers from 0 to 1
$ explain {vit} --refine affinity --refine-steps 3
even number
$ explain {vit} --views 0
--views
$ explain {vit} --views 9
found 9
$ explain {vit} --refine smooth
smooth
$ explain {vit} --upsample edges
edges
$ explain {cnn} --method rollout
found 'rollout'; it has gradcam
$ explain {cnn} --method relevance
expected a method
$ explain {cnn} --refine affinity
use --views
$ explain {cnn} --method gradcam --times rollout
found 'rollout'
""",
    "features": """
$ features {vit} --data digits --limit 24 --bank 40 --k 1,41
--k of at most the 40 training images, found 41
$ features {vit} --data digits --limit 24 --k 0
whole numbers from 1
$ features {vit} --data digits --limit 24 --k 1 --tsne --perplexity 30
perplexity
$ features {vit} --objective mae
expected --objective ALIAS=OBJECTIVE, found 'mae'
$ features {vit} --objective tiny-vt=supervised
no model of --objective 'tiny-vt'
$ features {vit} --objective tiny-vit=selfsupervised
no objective 'selfsupervised'
$ features {vit} --data digits --limit 24 --bank 1 --k 1
--bank
$ features {vit} --data digits --prompt dog
open-clip:
$ features {vit} --pool max
cls
$ features {cnn} --data digits --limit 24 --pool cls
CLS token
$ features {vit} --data digits --limit 24 --k 1 --no-tsne --show {pictures}/0.png --thumbnails
found both
$ features {vit} --data digits --limit 24 --k 1 --no-tsne --show seven
leave out --show
""",
    "attack": """
$ attack {vit} --baseline x
model for --baseline
$ attack {vit} --attack patch --patch-side 33
a patch of 1 to 32 px, found 33
$ attack {vit} --attack patch --patch-side 0
expected --patch-side of at least 1, found 0
$ attack {vit} --patch-side 8
with --attack patch, found them without
$ attack {vit} --single-epsilon 8
expected --single-epsilon NAME=NUMBER
$ attack {vit} --single-epsilon pgd=x
expected --single-epsilon with numbers
$ attack {vit} --single-epsilon pgd=256
expected --single-epsilon from 0 to 255
$ attack {vit} --single-epsilon pgd=0
expected --single-epsilon above 0
$ attack {vit} --single-epsilon cw=1
found cw=1; try fgsm, pgd
$ attack {vit} --attack pdg
no --attack value 'pdg'; did you mean 'pgd'
$ attack {vit} --attack ,
expected --attack with at least one of
$ attack {vit} --epsilon 1,x
expected --epsilon with numbers
$ attack {vit} --epsilon -1
--epsilon from 0 to 255, in 1/255, found -1
$ attack {vit} --epsilon nan
expected --epsilon
$ attack {vit} --epsilon 256
found 256
$ attack {vit} --epsilon-l2 inf
expected --epsilon-l2
$ attack {vit} --epsilon-l2 -0.5
--epsilon-l2 of at least 0
$ attack {vit} --attack pgd --epsilon 0
a number above 0 for pgd
$ attack {vit} --steps 0
expected --steps of at least 1, found 0
$ attack {vit} --steps pgd=0
expected --steps of at least 1, found 0
$ attack {vit} --steps pgd=x
expected --steps N or NAME=N
$ attack {vit} --steps apgd-ce=9
found apgd-ce; try fgsm, pgd, cw
$ attack {vit} --restarts 0
expected --restarts of at least 1
$ attack {vit} --attack cw,patch --downwards
several epsilons, found cw, patch; leave it out
$ attack {vit} --attack pgd --epsilon 0,4 --downwards
several epsilons, found pgd
""",
    "audit and requirements": """
$ audit vit-digits --junit missing/file.xml
expected an existing folder for --junit
$ audit vit-digits --junit .
expected a file for --junit
$ audit vit-digits --budget 0
expected --budget in minutes, above 0
$ audit vit-digits --budget nan
expected --budget in minutes, above 0
$ audit {vit} --data <b>|*x*
<b>
$ audit no-such-model --at-least entrpy=1
entropy
$ audit no-such-model --at-least robust_accuracy=1
robust_accuracy/ATTACK/EPSILON
$ audit no-such-model --at-least robust_accuracy/fgsm/1=0.1
robust_accuracy/fgsm-linf/1?
$ audit no-such-model --at-least robust_accuracy/no-attack/1=0.1
robust_accuracy/strongest/1?
$ audit no-such-model --at-least corruption_accuracy/fog/1=0.1
contrast
$ audit no-such-model --at-least accuracy=90
found 90
$ audit no-such-model --at-most calibration_error=1.5
found 1.5
$ audit no-such-model --at-least accuracy/my=-0.1
found -0.1
$ audit no-such-model --at-most robust_accuracy/strongest/1=50
found 50
$ audit no-such-model --at-most accuracy_difference/x=1
which compares two
$ evaluate no-such-model --data digits --at-most accuracy_difference/x=1
which compares two
$ evaluate no-such-model another --data digits --at-most accuracy_difference/x=1
no-such-model
$ audit no-such-model --at-least best_accuracy=0.9
top5_accuracy
$ audit no-such-model --at-least accuracy_lost_to_corruptions=90
no-such-model
$ stats no-such-model --at-least entrpy=1
entropy
$ study no-such-model --at-least entrpy=1
entropy
""",
    "study": """
$ study {cnn}
softmax attention
$ study vit-digits --seeds 2
--kind with --seeds 2
$ study vit-digits --data digts
no data 'digts'; did you mean 'digits' or 'digits-clear' or 'digits-shortcut'?
$ study --kind poolin
did you mean 'pooling'?
$ study --kind xyz
patch-size, pooling, positions, pretraining, recipe, registers, size, swin, transfer, whole, window
$ study --kind size --seeds 0
--seeds
$ study --kind size --epochs none
--epochs
$ study --kind pooling --epochs 0
--epochs
$ study --kind pooling --data digts
did you mean 'digits'
$ study --kind pooling --weights w.pth
no --weights with --kind pooling
$ study --kind patch-size --image-size 36
found 36 and 8 px
$ study --kind data --limit 20
an image of each of 10 classes in 5%
$ study --kind pretraining --limit 32 --batch-size 1
batches of at least 2 images
$ study --kind pretraining --limit 8
at least 2 training images of every class to probe, found 1
$ study --kind pretraining --data digits --limit 30 --weights w.pth
no --weights with --kind pretraining
$ study vit-tiny --kind pretraining
no MODEL with --kind pretraining
$ study vit-tiny --kind pooling
no MODEL with --kind pooling
$ study a b --kind transfer --data digits
one MODEL with --kind transfer, found a, b
$ study {vit} --kind transfer
--data FOLDER or NAME with --kind transfer
$ study vit-mini --kind transfer --data digits
expected a trained model, found the preset
$ study vit-mini --kind transfer --data digits --random-weights
a trained model with --kind
$ study {cnn} --kind transfer --data digits
tiny-cnn
$ study {vit} --kind transfer --images a.png
expected --data with --kind transfer
""",
    "train": """
$ train vit-mico
did you mean 'vit-micro'
$ train vit-micro --heads 3
dim divisible by heads
$ train vit-micro --epochs 0
--epochs at least 1
$ train vit-micro --keep-every 0
--keep-every
$ train resnet20 --dropout 0.1
--dropout for resnet20
$ train swin-micro --pooling cls
--pooling
$ train vit-micro --pooling max
--pooling
$ train vit-micro --dropout nan
dropout
$ train swin-micro --dropout -0.1
-0.1
$ train vit-digits --dropout 0.1
vit-digits, found --dropout; leave it out
$ train {learned} --train-last 3
--train-last from 0 to 2, the blocks of learned, found 3
$ train {learned} --dim 8
found --dim; leave it out
$ train {learned} --freeze-backbone --set flip=True --set crop_padding=2
crop_padding, flip; add --cached-views 4
$ train {learned} --freeze-backbone --set mixup=0.8 --cached-views 4
--set mixup=0
$ train {learned} --freeze-backbone --set cutmix=1.0 --cached-views 4
--set cutmix=0
$ train {learned} --freeze-backbone --set views=3 --cached-views 4
--set views=1
$ train vit-digits@random --freeze-backbone
timm:NAME
$ train vit-digits@random --train-last 1
timm:NAME
$ train vit-mini --freeze-backbone
'vit-mini': its weights are random
$ train vit-tiny --train-last 1
--train-last, found the preset 'vit-tiny'
$ train {learned} --train-last 0
--train-last at least 1, found 0
$ train {learned} --freeze-backbone --cached-views 0
--cached-views at least 1
$ train {learned} --cached-views 2
expected --cached-views with --freeze-backbone
$ train {learned} --freeze-backbone --train-last 2
--freeze-backbone or --train-last
$ train {learned} --freeze-backbone --distill-from cnn-digits
--freeze-backbone without --distill-from
$ train {learned} --freeze-backbone --keep-every 3
--freeze-backbone without --keep-every
$ train {learned} --freeze-backbone --recompute
--freeze-backbone without --recompute
$ train {learned} --freeze-backbone --compile on
--freeze-backbone without --compile on
$ train vit-micro --distill-from m --temperature 2
--temperature with --distill soft
$ train vit-mini --limit 20 --distill-from cnn-digits --distill softt
soft
$ train vit-mini --limit 20 --distill-from cnn-digits --distill-weight 0
--distill-weight above 0
$ train vit-mini --limit 20 --distill-from cnn-digits --distill-weight 1.5
--distill-weight above 0 and at most 1
$ train vit-mini --limit 20 --distill-from cnn-digits --distill soft --temperature 0
--temperature
$ train vit-mini --limit 20 --distill-from cnn-digits --distill soft --temperature inf
--temperature
$ train vit-mini --limit 20 --distill-from cnn-digits --distill-token --pooling mean
--no-distill-token
$ train vit-micro --distill soft
--distill-from MODEL with --distill
$ train vit-micro --distill-weight 0.3
--distill-from MODEL with --distill-weight
$ train vit-micro --distill-token
--distill-from MODEL with --distill-token
$ train vit-micro --no-distill-token
--distill-from MODEL with --no-distill-token
$ train vit-micro --beside cnn-digits
--distill-from MODEL with --beside
$ train vit-mini --distill-from {learned}
only in the model
$ train resnet20 --distill-from vit-digits --distill-token
add --no-distill-token
$ train vit-micro --check --resume runs/a
--check without --resume
$ train vit-micro --check --distill-from cnn-digits
--check without --distill-from
$ train vit-micro --check --compile on
--check without --compile on
$ train vit-micro --check --keep-every 1
--check without --keep-every
$ train vit-micro --check --recompute
--check without --recompute
$ train vit-micro --check --track tensorboard
--check without --track
$ train --resume {pictures}
expected the folder of a run
$ train vit-micro --track tensorbord
did you mean 'tensorboard'
""",
}


def wrong_lines() -> Iterator[Any]:
    """Yield each line with the part of its message."""
    for subject, transcript in WRONG.items():
        for case in transcript.split("$ ")[1:]:
            line, _, message = case.strip().partition("\n")
            yield pytest.param(line, message, id=f"{subject}: {line}")


@pytest.mark.parametrize(("line", "message"), list(wrong_lines()))
def test_a_wrong_call_is_one_line_before_anything_is_written(
    line, message, tiny_vit, tiny_cnn, learned, pictures, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    typed = line.format(
        vit=tiny_vit, cnn=tiny_cnn, learned=learned, pictures=pictures, long=300 * "a"
    )
    word, *words = typed.split()
    options = []
    if word in COMMANDS and COMMANDS[word].reports:
        options = ["--quiet", "--device", "cpu"]
        if not {"--check", "--resume", "--html"} & {*words}:
            options += ["--out", "out"]
    assert message in refusal(capsys, " ".join([word, *options, *words]))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "word", [word for word, command in COMMANDS.items() if command.reports and not command.serves]
)
def test_a_requirement_of_no_metric_is_refused_before_anything_is_loaded(word, capsys):
    example = COMMANDS[word].example.partition(" ")[2]
    message = refusal(capsys, f"{example} --at-least nonsense=1")
    assert "found 'nonsense'" in message
    assert "{" not in message


def takes_images(word: str) -> bool:
    names = [field.name for field in dataclasses.fields(COMMANDS[word].options)]
    return "images" in names and not COMMANDS[word].serves


@pytest.mark.parametrize("word", [word for word in COMMANDS if takes_images(word)])
def test_an_image_that_is_not_there_is_refused_before_the_model(word, capsys):
    if word == "look":
        line = "look gone.png --model no-such-model"
    else:
        example = COMMANDS[word].example.partition(" ")[2]
        words = example.replace("vit-digits", "no-such-model").split()
        if "no-such-model" not in words:
            words.append("no-such-model")
        line = shlex.join([word for word in words if word != "cnn-digits"]) + " --images gone.png"
    assert refusal(capsys, line).count("gone.png") == 1


METRICS = {
    "stats": ["entropy", "normalised_entropy/vit-digits", "distance/L0.H1"],
    "study": ["accuracy", "entropy", "rank_correlation/patch"],
    "audit": ["accuracy/vit-digits", "calibration_error", "entropy"],
    "ablate": ["rank_correlation/first-order"],
}


@pytest.mark.parametrize("word", METRICS)
def test_a_requirement_of_a_metric_is_taken(word, capsys):
    """The next thing is then the model, which there is none of."""
    requirements = " ".join(f"--at-least {metric}=1" for metric in METRICS[word])
    assert "no-such-model" in refusal(capsys, f"{word} no-such-model {requirements}")


def test_a_folder_that_is_there_is_not_touched(golden, capsys):
    folder: Path = golden("predict").folder
    before = (folder / "results.json").read_bytes()
    assert "--overwrite" in refusal(capsys, f"predict vit-digits --limit 1 --quiet --out {folder}")
    assert (folder / "results.json").read_bytes() == before
