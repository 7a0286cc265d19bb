"""The grammar of a model's name, and that no two aliases of a command are the same."""

import pytest

from vitlens.errors import InputError
from vitlens.models.naming import ModelName, parse_model, parse_models

GRAMMAR = {
    "timm:vit_tiny_patch16_224.augreg_in21k": (
        "timm:vit_tiny_patch16_224.augreg_in21k",
        "vit_tiny_patch16_224.augreg_in21k",
        None,
    ),
    "runs/vit-a/": ("runs/vit-a/", "vit-a", None),
    "/data/w/model.safetensors": ("/data/w/model.safetensors", "model", None),
    "w/net.v2.pth": ("w/net.v2.pth", "net.v2", None),
    "timm:x@w.safetensors": ("timm:x", "x", "w.safetensors"),
    "small=runs/a": ("runs/a", "small", None),
    "a=timm:x@some/w.pth": ("timm:x", "a", "some/w.pth"),
    "a.b-c_1=x": ("x", "a.b-c_1", None),
    "runs/lr=0.1": ("runs/lr=0.1", "lr-0.1", None),  # a slash before '=': no alias; and in an alias no '='
    "runs/my <model>/": ("runs/my <model>/", "my-model", None),
    "w/_модель.pth": ("w/_модель.pth", "model", None),
    f"runs/{'long' * 60}": (f"runs/{'long' * 60}", "long" * 15, None),
}


@pytest.mark.parametrize("text", GRAMMAR)
def test_grammar(text):
    name, alias, weights = GRAMMAR[text]
    assert parse_model(text) == ModelName(name, alias, weights)


@pytest.mark.parametrize("text", ["", "@w.pth", "a=@w.pth"])
def test_no_name_is_refused(text):
    with pytest.raises(InputError, match=r"\[alias=\]NAME\[@weights\]"):
        parse_model(text)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (("runs/a/vit", "runs/b/vit", "vit"), ["vit", "vit-2", "vit-3"]),
        (("vit", "vit", "vit-2"), ["vit", "vit-2", "vit-2-2"]),
        (("runs/a", "a=runs/b"), ["a-2", "a"]),  # a typed alias is kept whatever stands before it
        (("a=runs/b", "runs/a"), ["a", "a-2"]),
    ],
)
def test_aliases_are_made_unique(texts, expected):
    parsed = parse_models(texts)
    assert [model.alias for model in parsed] == expected
    assert [model.name for model in parsed] == [text.partition("=")[2] or text for text in texts]


def test_an_alias_given_twice_is_refused():
    with pytest.raises(InputError, match="every alias once, found 'a' twice"):
        parse_models(["a=x", "b=y", "a=z"])
