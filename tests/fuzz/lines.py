"""Command lines drawn from the options of the commands, most of them with mistakes."""

import random
from collections.abc import Sequence
from typing import Any

import typer

from tests.fuzz.box import Box
from tests.kit.nasty import NASTY as NAMES
from tests.kit.select import select

NASTY = (
    "",
    " ",
    "-",
    "--",
    "---",
    "1",
    "2",
    "3",
    "1e308",
    "inf",
    "-inf",
    "1e-400",
    "9" * 20,
    "0x10",
    "1_000",
    "½",
    "∞",
    "١",
    "a,b",
    ",",
    ",,",
    "=",
    "a=",
    "=a",
    "a=b=c",
    "a@b",
    "@",
    "timm:",
    "hf:x",
    ":",
    "/",
    "..",
    "../..",
    "~",
    "$HOME",
    "{}",
    "\n",
    "\t",
    "x" * 300,
    "x" * 70000,
    "1,2",
    "1,2,3",
    "1.5",
    "0.5",
    "1,nan",
    "3x3",
    "0x0",
    "32x32",
    "9x-9",
    "100000",
    "../../etc/passwd",
    "/dev/null",
    "/dev/zero",
    "/proc/self/mem",
    "vit-tiny",
    *NAMES[::4],
)
MODELS = (
    "vit-digits",
    "cnn-digits",
    "timm:vit_tiny_patch16_224",
    "vit-micro",
    "torchvision:resnet18",
    "open-clip:x/y",
)
WORDS = {
    option: words.split()
    for option, words in {
        "--attack": "fgsm pgd cw noise auto pgd,fgsm square",
        "--method": "rollout gradcam all relevance,attention",
        "--kind": "architecture pooling whole",
        "--epsilon": "0,1,2 8 1,1 2,1 300 -1",
        "--format": "png svg,pdf bmp",
        "--precision": "fp32 bf16 auto fp16",
        "--device": "cpu cuda:9 mps auto",
        "--k": "1,5 0 1000",
        "--replace": "mean,zero resample",
        "--units": "head mlp block head,mlp",
        "--fusion": "mean max,min sum",
        "--image-size": "32 16x48 7 100000 0",
        "--head": "0 9 -1",
        "--query": "0,0 99,99",
        "--key": "3,3 99,99",
        "--set": "epochs=1 epochs=x nothing=1 epochs",
        "--arch": "vit-mini resnet20 timm:vit_tiny_patch16_224 none",
        "--recipe": "short course deit",
        "--substrate": "blur mean absent",
        "--batch-sizes": "1,2 0",
        "--sizes": "32,64 0",
        "--patch-size": "4 5 0",
    }.items()
}
# What makes any accepted line of a command a short one; `study` is held to calls that are refused.
SHORT = {
    "train": "--epochs 1 --limit 8",
    "features": "--limit 8 --no-tsne",
    "ablate": "--limit 8 --no-curves",
    "attack": "--limit 2 --no-corruptions --no-inside --steps 2",
    "compare": "--limit 4 --panels 1 --no-harder",
    "explain": "--limit 2 --no-verify",
    "profile": "--batch-sizes 1",
    "audit": "--limit 2 --budget 0.001",
}
PATHS = (
    "photos photos/0.png photos/3.jpg classed parts masked boxed data.npz empty text.txt none "
    "vit classes.txt vit.pth"
)


class Lines:
    """Draws command lines for a box with inputs (see inputs.py)."""

    def __init__(self, box: Box) -> None:
        from vitlens.cli.main import application

        self._commands = dict(typer.main.get_command(application()).commands)  # type: ignore[attr-defined]
        self._tiny = [str(box.inputs / name) for name in ("vit", "cnn")]
        self._models = [
            *MODELS,
            *self._tiny,
            *(str(box.inputs / name) for name in ("vit.pth", "text.txt", "none")),
        ]
        self._paths = [str(box.inputs / name) for name in PATHS.split()]
        self._count = 0

    def draw(self, seed: int) -> list[str]:
        """Draw one command line by the seed; only the number of its --out folder varies."""
        draw = random.Random(seed)
        if draw.random() < 0.03:
            choices = [*NASTY, "evalute", "--help", "--version", "--debug"]
            return [draw.choice(choices) for _ in range(draw.randint(0, 3))]
        name = draw.choice(sorted(self._commands))
        words = [name, *self._arguments(name, draw)]
        options = select(self._commands[name].params, param_type_name="option")
        flags = {opt for option in options for opt in option.opts}
        words += SHORT.get(name, "--limit 2" if "--limit" in flags else "").split()
        for option in draw.sample(options, min(len(options), draw.choice((0, 1, 1, 2, 2, 3, 5)))):
            words += self._option(option, draw)
        if name == "study":
            words += ["--data", draw.choice([*self._paths[8:10], "nothing", ""])]
        if "--out" in flags and "--out" not in words:
            self._count += 1
            words += ["--out", f"out/{self._count}"]
        return words if draw.random() < 0.9 else self._spoilt(words, draw)

    def _arguments(self, name: str, draw: random.Random) -> list[str]:
        if name == "report":
            return [draw.choice(["out/rolled", *self._paths, *NASTY])]
        if name in ("models", "data"):
            return (
                [draw.choice(["digits", "deit3", "cifar10", *self._paths, *NASTY])]
                if draw.random() < 0.8
                else []
            )
        count = (2 if name in ("compare", "study") else 1) + draw.choice((-1, 0, 0, 0, 0, 1))
        words = [self._model(draw) for _ in range(count)]
        if name not in ("train", "profile", "study") and draw.random() < 0.5:
            words += [
                draw.choice(("--data", "--images" if name != "evaluate" else "--data")),
                draw.choice(self._paths),
            ]
        return words

    def _model(self, draw: random.Random) -> str:
        if draw.random() < 0.5:
            return draw.choice((*MODELS[:2], *self._tiny))
        return draw.choice(
            (draw.choice(self._models), draw.choice(NASTY), f"a={draw.choice(self._models)}")
        )

    def _option(self, option: Any, draw: random.Random) -> list[str]:
        opt = draw.choice([*option.opts, *option.secondary_opts])
        metavar = option.metavar or ""
        lot = draw.random()
        if option.is_flag:
            return [opt] if lot < 0.9 else [opt, draw.choice(NASTY)]
        if opt == "--out":  # below out/, so that what is accepted is written where it may be
            below = [f"out/{word}" for word in NASTY if "/" not in word and ".." not in word]
            return [opt, draw.choice(("out/x", "out/deep/er", "out/rolled", *below))]
        if opt in ("--data-dir", "--save"):
            return [opt, "out/other"]
        if lot < 0.05:
            return [opt]
        if opt in WORDS and lot < 0.7:
            return [opt, draw.choice(WORDS[opt])]
        if metavar in ("PATH...", "FILE", "FOLDER", "DIR", "PATH", "DATA") and lot < 0.8:
            return [opt, draw.choice(self._paths)]
        if metavar in ("N", "K", "X", "PX") and lot < 0.6:
            return [opt, draw.choice(("1", "2", "3", "0", "-1", "0.5", "1e9", "nan"))]
        return [opt, draw.choice(NASTY)]

    def _spoilt(self, words: Sequence[str], draw: random.Random) -> list[str]:
        """Remove, double, move or replace a word; --out stays at the end."""
        head = list(words[:-2])
        tail = list(words[-2:])
        if head:
            at = draw.randrange(len(head))
            match draw.randrange(4):
                case 0 if at > 0:
                    del head[at]
                case 1:
                    head.insert(at, head[at])
                case 2:
                    draw.shuffle(head)
                case _:
                    head[at] = draw.choice(NASTY)
        return [*head, *tail]
