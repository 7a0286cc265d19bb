"""ImageNet's 1000 classes: their wnids, indices and short names, as package data.

`imagenet.txt` has one class per line, wnid and WordNet's first lemma, in order of wnid: the line's number is the index
(the two cranes and the second maillot are disambiguated by hand).
"""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import MappingProxyType


@cache
def imagenet_classes() -> tuple[str, ...]:
    """The 1000 short names in the order of ImageNet-1k's logits."""
    return tuple(name for _, name in _lines())


@cache
def imagenet_indices() -> MappingProxyType[str, int]:
    """The class index of each of the 1000 wnids ("n01440764" is 0)."""
    return MappingProxyType({wnid: index for index, (wnid, _) in enumerate(_lines())})


def are_imagenet(names: Iterable[str]) -> bool:
    """Whether these folder names are all wnids of ImageNet-1k (and there is at least one)."""
    names = list(names)
    return bool(names) and all(name in imagenet_indices() for name in names)


@cache
def _lines() -> tuple[tuple[str, str], ...]:
    text = Path(__file__).with_name("imagenet.txt").read_text(encoding="utf-8")
    pairs = (line.split(" ", 1) for line in text.splitlines())
    return tuple((wnid, name) for wnid, name in pairs)
