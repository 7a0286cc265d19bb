"""Messages for wrong calls of every command and public function, one a line in messages.txt.

After a change of words: `pytest tests/contracts/test_messages.py --rewrite -n 0`, and read the
difference. What a caller may rely on, exit codes and types of errors, is asserted here; the file
only shows the words. A new command or function is covered by itself: its lines are written with
--rewrite.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import vitlens
from tests.contracts.entries import ENTRIES, batch_of, headless, shared
from tests.contracts.test_common import WRONG
from vitlens.cli.main import run
from vitlens.commands.registry import COMMANDS
from vitlens.errors import InputError

FILE = Path(__file__).with_name("messages.txt")
OPTIONS = {  # a wrong word for an option of several commands: its field, what is typed
    "no such option": ("", "--no-such"),
    "a misspelt option": ("limit", "--limt 4"),
    "no such device": ("device", "--device gpu"),
    "no such precision": ("precision", "--precision fp8"),
    "a negative limit": ("limit", "--limit -1"),
    "words as a seed": ("seed", "--seed some"),
    "no such format": ("formats", "--format bmp"),
    "no such data": ("data", "--data digts"),
    "no such picture": ("images", "--images no-such.png"),
    "no such method": ("methods", "--method relevence"),
    "no folder to resume": ("resume", "--resume no-such"),
    "no such metric": ("at_least", "--at-least accuracy"),
    "no such file of weights": ("weights", "--weights no-such.pth"),
    "a size of three": ("image_size", "--image-size 1x2x3"),
}
CALLS: dict[str, Callable[[Any, Any], object]] = {  # of the Python API
    "load, no such model": lambda *_: vitlens.load("vit-digts"),
    "load, a module": lambda *_: vitlens.load(nn.Linear(2, 2)),
    "load_data, no such data": lambda *_: vitlens.load_data("digts"),
    "read, no such folder": lambda *_: vitlens.read("no-such"),
    "explain, no such method": lambda model, batch: vitlens.explain(model, batch, method="gradcm"),
    "explain, an option of another method": lambda model, batch: vitlens.explain(
        model, batch, steps=3
    ),
    "explain, a class beyond the last": lambda model, batch: vitlens.explain(
        model, batch, targets=37
    ),
    "attack, no such method": lambda model, batch: vitlens.attack(
        model, batch, "predicted", method="pdg"
    ),
    "attack, an epsilon below 0": lambda model, batch: vitlens.attack(
        model, batch, "predicted", epsilon=-0.1
    ),
    "attack, no labels": vitlens.attack,
    "rollout, no such fusion": lambda model, batch: vitlens.rollout(model, batch, fusion="maxx"),
    "features, no such pooling": lambda model, batch: vitlens.features(model, batch, pool="clss"),
    "ablate, no such replacement": lambda model, batch: vitlens.ablate(
        model, batch, "predicted", replace="meen"
    ),
    "ablate, labels of other images": lambda model, batch: vitlens.ablate(model, batch, [0]),
    "capture, no such place": lambda model, batch: vitlens.capture(model, batch, "blocks.0.mpl"),
    "profile, no such precision": lambda model, _: vitlens.profile(model, precision="fp8"),
    "evaluate, no labels": vitlens.evaluate,
    "evaluate, without a classifier": lambda _, batch: vitlens.evaluate(headless(), batch),
    "verify, a name that is taken": lambda model, batch: vitlens.verify(
        model, batch, methods={"relevance": torch.rand(3, 8, 8)}
    ),
    "verify, maps of other images": lambda model, batch: vitlens.verify(
        model, batch, methods={"mine": torch.rand(2, 8, 8)}
    ),
    "verify, maps with channels": lambda model, batch: vitlens.verify(
        model, batch, methods={"mine": batch}
    ),
    "verify, maps that are not finite": lambda model, batch: vitlens.verify(
        model, batch, methods={"mine": torch.full((3, 8, 8), torch.nan)}
    ),
    "verify, a function that returns nothing": lambda model, batch: vitlens.verify(
        model, batch, methods={"mine": lambda *_: None}
    ),
    "verify, a function that changes the mode": lambda model, batch: vitlens.verify(
        model, batch, methods={"mine": lambda model, *_: model.train()}
    ),
    "supports, no such command": lambda model, _: model.supports("data"),
} | {
    f"features, {what}": lambda model, batch, wrong=wrong: vitlens.features(model, wrong(batch))
    for what, wrong in WRONG.items()
}


# whose misspelt options Python itself refuses, with a TypeError
PYTHONS = (
    "choose_method",
    "compare",
    "evaluate",
    "failures",
    "intervene",
    "places",
    "profile",
    "reliance",
    "verify",
)


def flags(options: type) -> set[str]:
    """Return the fields of a command's options, including those of its bundles."""
    names = {option.name for option in fields(options)}
    bundles = [
        option.default_factory for option in fields(options) if is_dataclass(option.default_factory)
    ]
    return names.union(*(flags(bundle) for bundle in bundles))


def lines() -> Iterator[tuple[str, list[str]]]:
    """Yield wrong lines of every command, each with its name: the command and the mistake."""
    for word, command in COMMANDS.items():
        first = command.example.partition("&&")[0].split(" --")[0].split()[1:]
        flags_of_command = flags(command.options)
        if command.serves:
            continue  # needs an extra first: tests/ui/demo
        for what, (name, typed) in OPTIONS.items():
            # its chapters say so, in its folder
            if (not name or name in flags_of_command) and (word, name) != (
                "study",
                "data",
            ):
                yield f"{word}, {what}", [*first, *typed.split()]
        if command.needs is not None and len(first) > 1:
            yield f"{word}, no such model", [*first[:-1], "vit-digts"]
            yield f"{word}, nothing named", [word]


def functions() -> Iterator[tuple[str, Callable[[Any, Any], object]]]:
    yield from ((f"vitlens.{name}", call) for name, call in CALLS.items())
    for name in dict.fromkeys(name.partition("/")[0] for name in ENTRIES):
        if name not in PYTHONS:
            yield f"vitlens.{name}, a misspelt option", partial(getattr(vitlens, name), batchsize=3)


LINES = dict(lines())
FUNCTIONS = dict(functions())


def refused_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    code = run(words)
    said = capsys.readouterr().err
    assert code == 2, said
    (error,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert not list(Path().iterdir()), "something was written"
    # as typer's version has it
    suggested = re.sub(r" \(Possible options: .*?\)", "", error.removeprefix("error: "))
    return suggested.replace(f"vitlens {words[0]} --help", "vitlens COMMAND --help")


def refused_call(call: Callable[[Any, Any], object]) -> str:
    with pytest.raises(InputError) as raised:
        call(shared("odd"), batch_of(shared("odd")))
    assert "\n" not in str(raised.value)
    return f"{type(raised.value).__name__}: {raised.value}"


def read() -> dict[str, str]:
    """Return the message of each call."""
    messages: dict[str, str] = {}
    message = ""
    for line in FILE.read_text().splitlines():
        what, _, subjects = line.strip().rpartition(": ")
        if line.startswith("    "):
            messages |= {f"{subject}, {what}": message for subject in subjects.split()}
        else:
            message = line
    return messages


def as_text(said: dict[str, str]) -> str:
    """Write each message once, followed by the wrong values and their commands and functions."""
    calls: dict[str, dict[str, str]] = {}
    for call, message in said.items():
        subject, _, what = call.partition(", ")
        subjects_by_call = calls.setdefault(message, {})
        subjects_by_call[what] = f"{subjects_by_call.get(what, f'    {what}:')} {subject}"
    return "".join(
        "\n".join([message, *lines_by_wrong.values()]) + "\n"
        for message, lines_by_wrong in calls.items()
    )


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    rewrite = request.config.getoption("--rewrite")
    stored: dict[str, str] = {} if rewrite else read()
    yield stored
    if rewrite:
        FILE.write_text(
            as_text({call: stored[call] for call in (*LINES, *FUNCTIONS) if call in stored})
        )


@pytest.mark.parametrize("name", [*LINES, *FUNCTIONS])
def test_a_wrong_call_is_one_line(name, expected, request, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = refused_line(LINES[name], capsys) if name in LINES else refused_call(FUNCTIONS[name])
    if request.config.getoption("--rewrite"):
        expected[name] = said
    assert said == expected.get(name), "new words? read them, and run pytest with --rewrite"


COMMAND = re.compile(r"vitlens( [\w:.-]+)* --[^;]+")  # a whole one to type in a terminal


def flags_in(message: str) -> list[str]:
    return re.findall(r"--[a-z][a-z-]+", COMMAND.sub("", message))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_python_is_told_of_arguments_and_not_of_flags(name):
    assert not flags_in(refused_call(FUNCTIONS[name]))


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda: vitlens.load("vit-digits", weights="w.pth"), ["weights="]),
        (lambda: vitlens.load("no.safetensors"), []),
        (
            lambda: vitlens.load("timm:vit_tiny_patch16_224", weights="no.safetensors"),
            ["weights='FILE'"],
        ),
        (lambda: vitlens.load("vit-digits", classes=("a",)), ["classes="]),
        (lambda: vitlens.load("my.py:build"), ["code_files=('my.py:build',)"]),
        (lambda: vitlens.load_data("digits", limit=0), ["limit="]),
        (lambda: vitlens.Refinement(layers=(0,)), ["refine='affinity'", "layers="]),
        (
            lambda: vitlens.rollout(shared("ours"), batch_of(shared("ours")), discard=2),
            ["discard="],
        ),
        (
            lambda: vitlens.rollout(shared("ours"), batch_of(shared("ours")), start_layer=99),
            ["start_layer="],
        ),
        (
            lambda: vitlens.ablate(
                shared("ours"), batch_of(shared("ours")), "predicted", replace="mean"
            ),
            ["replace='"],
        ),
    ],
)
def test_arguments_are_named_as_python_has_them(call, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as refused:
        call()
    assert not flags_in(str(refused.value))
    assert [name for name in names if name not in str(refused.value)] == []


def test_the_command_line_is_told_of_flags(capsys):
    assert run(["predict", "vit-micro@w.pth", "--random-weights", "--data", "digits"]) == 2
    assert "--random-weights" in capsys.readouterr().err
    with pytest.raises(InputError, match="random_weights=True"):  # in Python again
        vitlens.load("vit-micro@w.pth", random_weights=True)


def test_the_file_has_no_other_calls(request):
    assert request.config.getoption("--rewrite") or read().keys() == {*LINES, *FUNCTIONS}
