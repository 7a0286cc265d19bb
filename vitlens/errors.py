"""Everything that vitlens raises on purpose.

VitlensError                one line: what was expected, what was found, what to type next
├── InputError              a wrong call or input                          exit code 2
│   ├── UnknownNameError    a name that is in no list; says the nearest
│   ├── ModelError          a model or weights that cannot be loaded
│   ├── DataError           images or labels that cannot be used
│   ├── OutputError         a report folder that cannot be written
│   └── UnsupportedError    this model cannot do what was asked
├── RunError                it began and failed                            exit code 1
│   ├── NonFiniteError      a loss, logit or weight became NaN or infinite
│   ├── LensError           the lens saw something else than it should
│   └── StorageError        the disk is full or went away while writing
└── Interrupted             Ctrl-C                                         exit code 130
"""

import re
from collections.abc import Iterable
from difflib import SequenceMatcher

_NEAR = 0.6  # share of two words that has to be alike for one to be meant by the other
_BEHIND = 0.1  # of the first, for another to be named beside it
_SUGGESTED = 3
_CONTAINED = 0.85  # how alike a name is to one that holds it


class VitlensError(Exception):
    """The root: the command line prints its message as one line and leaves with its exit code."""

    exit_code = 1


class InputError(VitlensError):
    """A wrong call or input."""

    exit_code = 2


class UnknownNameError(InputError):
    """A name that is in no list; the message gives the nearest known ones and what to type.

    kind: what was looked for ("model"); known: every name there is; hint: where the list is printed.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], *, hint: str = "") -> None:
        known = sorted(known)
        near = nearest(name, known)
        message = f"no {kind} {name!r}"
        if near:
            message += "; did you mean " + " or ".join(repr(word) for word in near) + "?"
        elif len(known) <= 12:
            message += f"; known: {', '.join(known)}"
        if hint:
            message += f"{'' if message.endswith('?') else ';'} see {hint}"
        super().__init__(message)


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """The names most alike to one that is in no list, best first, at most three.

    A name is compared with the whole of each and, as long names of models are seldom typed to their end
    ("deit_tny" for "deit_tiny_patch16_224"), with its first parts; "timm:" and the like need not be typed. One that
    is much less alike than the first is not named.
    """
    typed = name.lower()
    matcher = SequenceMatcher(b=typed)
    parts = len(re.findall(r"[_.\-]", name.rpartition(":")[2])) + 1
    scored = [(_alike(typed, matcher, one, parts), -len(one), one) for one in known]
    close = sorted((score for score in scored if score[0] >= _NEAR), reverse=True)
    return [one for score, _, one in close[:_SUGGESTED] if score >= close[0][0] - _BEHIND]


def _alike(typed: str, matcher: SequenceMatcher[str], known: str, parts: int) -> float:
    """How alike, from 0 to 1, what was typed, which the matcher holds, is to a known one or to its first parts."""
    own = known if ":" in typed else known.rpartition(":")[2]
    start = re.match(rf"(?:[^_.\-]*[_.\-]){{{parts - 1}}}[^_.\-]*", own[own.find(":") + 1 :])
    candidates = {known, own, *([own[: own.find(":") + 1] + start[0]] if start else [])}
    best = _CONTAINED if len(typed) > 3 and typed in known.lower() else 0.0
    for candidate in candidates:
        matcher.set_seq1(candidate.lower())
        if matcher.real_quick_ratio() >= _NEAR and matcher.quick_ratio() >= _NEAR:
            best = max(best, matcher.ratio())
    return best


def lacks_memory(error: BaseException) -> bool:
    """Whether memory ran out: of Python, of numpy, or of torch on the CPU, which has no type for it."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))


class ModelError(InputError):
    """A model or weights that cannot be loaded."""


class DataError(InputError):
    """Images or labels that cannot be used."""


class OutputError(InputError):
    """A report folder that cannot be written."""


class UnsupportedError(InputError):
    """This model cannot do what was asked of it."""


class RunError(VitlensError):
    """It began and failed."""


class NonFiniteError(RunError):
    """A loss, a logit or a weight became NaN or infinite."""


class LensError(RunError):
    """The lens saw something else than it should have."""


class StorageError(RunError):
    """The disk is full or went away while writing."""


class Interrupted(VitlensError):  # noqa: N818  it is no error of anybody's
    """The user pressed Ctrl-C."""

    exit_code = 130
