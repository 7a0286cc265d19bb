"""ImageNet's 1000 classes: their wnids, indices and short names, as package data.

`imagenet.txt` has one class per line, wnid and WordNet's first lemma, in order of wnid: the line's number is the index
(the two cranes and the second maillot are disambiguated by hand).
"""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path


@cache
def _names() -> Mapping[str, str]:
    """The short names by wnid."""
    text = Path(__file__).with_name("imagenet.txt").read_text(encoding="utf-8")
    return dict(line.split(" ", 1) for line in text.splitlines())


def imagenet_classes() -> tuple[str, ...]:
    """The 1000 short names in the order of ImageNet-1k's logits."""
    return tuple(_names().values())


def imagenet_indices() -> Mapping[str, int]:
    """The class index of each of the 1000 wnids ("n01440764" is 0)."""
    return {wnid: index for index, wnid in enumerate(_names())}


def are_imagenet(names: Iterable[str]) -> bool:
    """Whether these folder names are all wnids of ImageNet-1k (and there is at least one)."""
    return set() < set(names) <= _names().keys()
