"""Fits the names of a state dict to a model, and loads it or explains why it does not fit.

`fit_names` renames the tensors of a file. `require_fitting` compares the result with the model, and
its error names the likely cause. `load_strictly` loads it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from vitlens.errors import ModelError, argument, by_caller
from vitlens.models.weights import list_names

_DOT = re.compile(r"\.")

# the preference among several networks in a file, by a word in their names; the lowest rank wins
_RANKS = {
    "ema": 0,
    "average": 0,
    "teacher": 1,
    "base_encoder": 2,
    "online": 2,
    "encoder_q": 2,
    "student": 4,
    "momentum": 5,
    "target": 5,
    "encoder_k": 5,
}
_NEUTRAL = 3  # the rank of a network without such a word
_CLASSIFIERS = (
    "classifier",
    "head",
    "fc",
    "linear",
    "cls_head",
    "classification_head",
    "linear_head",
)
# names of what only pretraining needs, among them the projection heads of MoCo and DINO
_TRAINING = re.compile(
    r"(decoder|mask_token|criterion|loss|n_averaged|projector|predictor|projection_head|queue|head\.(\d+|mlp|last_layer)\.)"
)
_CAUSES = (  # a pattern of names that a model does not have, and the likely cause
    (
        r"lora_|modules_to_save|base_layer\.",
        "these are adapters (LoRA): merge them first (merge_and_unload of peft)",
    ),
    (
        r"^fc_norm\.",
        "fc_norm is of a model that averages its patches: make it with "
        "timm.create_model(NAME, global_pool='avg') and {wrap}",
    ),
    (
        r"encoder\.layers?\.\d+\.attention\.(attention|self)\.",
        "the names are those of transformers: use hf:FOLDER",
    ),
    (r"encoder_layer_\d+\.", "the names are those of torchvision: use torchvision:NAME"),
    (r"transformer\.resblocks\.", "the names are those of CLIP: use open-clip:ARCH"),
    (
        r"layers\.\d+\.(ln1|ffn\.layers|attn\.attn)\b",
        "the names are those of MMPretrain: convert them to timm's, or build the model and {wrap}",
    ),
    (
        r"^decoder|mask_token",
        "decoder and mask_token are of pretraining (MAE): use only the encoder's weights",
    ),
)


def fit_names(
    state: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, heads: Sequence[str] = ()
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the state dict by the names of a model, and notes of changes.

    A prefix that most names share is removed. Names without that prefix do not belong to the model
    (a loss, a second network) and are left out. Tensors that only pretraining needs are left out if
    all other names fit. Raises ModelError for whole numbers in place of weights.

    state: the tensors of a file.
    expected: the state dict of the model.
    heads: the modules of the classifier, which may be missing or have another name in the file.
    """
    notes: list[str] = []
    prefix = _network_prefix(state, expected)
    fitted = {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }
    if prefix:
        notes.append(f"removed {prefix!r} from {len(fitted)} of {len(state)} names")
    renamed_head, note = _renamed_classifier(state, prefix, expected, heads)
    if renamed_head:
        notes.append(note)
        # the same tensors under the file's name of the classifier
        for name in list(fitted):
            if _is_one_of(fitted[name], renamed_head.values()):
                del fitted[name]
        fitted.update(renamed_head)
    left_out = []
    for name, value in state.items():
        if not name.startswith(prefix) and not _is_one_of(value, renamed_head.values()):
            left_out.append(name)
    if left_out:
        notes.append(f"left out {list_names(left_out)}, without that prefix")
    missing = [name for name in expected if name not in fitted]
    head_prefixes = tuple(f"{module}." for module in heads)
    lacks_only_head = all(name.startswith(head_prefixes) for name in missing)
    unused = [name for name in fitted if name not in expected and _TRAINING.match(name)]
    if unused and lacks_only_head:
        for name in unused:
            del fitted[name]
        notes.append(f"left out {list_names(unused)}, which only pretraining needs")
    _require_floats(fitted, expected)
    return fitted, tuple(notes)


def _network_prefix(names: Iterable[str], expected: Mapping[str, Tensor]) -> str:
    """Return the prefix after which most names are names of the model.

    Returns "" if that is less than half of the model.
    """
    counts: dict[str, int] = {}  # by prefix, how many names of the model follow it
    for name in names:
        starts = [0, *(match.end() for match in _DOT.finditer(name))]
        for start in starts:  # name[:start] is a candidate if the rest is a name of the model
            if name[start:] in expected:
                counts[name[:start]] = counts.get(name[:start], 0) + 1
    if not counts:
        return ""
    # the most names; of several such prefixes, the preferred network
    prefix = min(counts, key=lambda candidate: (-counts[candidate], _preference(candidate)))
    covers_half = 2 * counts[prefix] >= len(expected)
    if not prefix or not covers_half:
        return ""
    _require_one_network(prefix, counts)
    return prefix


def _require_one_network(prefix: str, counts: Mapping[str, int]) -> None:
    """Raise ModelError if nothing shows which of several networks is the model.

    Another prefix then has as many names and the same preference.
    """
    equals = []
    for other, count in counts.items():
        if count == counts[prefix] and _preference(other) == _preference(prefix):
            equals.append(other)
    if len(equals) > 1:
        raise ModelError(
            f"expected the weights of one model, found those of {len(equals)} under "
            f"{list_names(equals)}; save only one of them"
        )


def _is_one_of(value: Tensor, candidates: Iterable[Tensor]) -> bool:
    return any(value is other for other in candidates)


def _require_floats(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise ModelError for whole numbers in place of floating-point ones."""
    for name, value in state.items():
        parameter = expected.get(name)
        needs_floats = parameter is not None and parameter.is_floating_point()
        if needs_floats and not value.is_floating_point():
            raise ModelError(
                f"expected floating-point numbers in {name[:80]!r}, found {value.dtype}: "
                "quantised, without their scales; use the weights from before the "
                "quantisation"
            )


def _renamed_classifier(
    state: Mapping[str, Tensor], prefix: str, expected: Mapping[str, Tensor], heads: Sequence[str]
) -> tuple[dict[str, Tensor], str]:
    """Return the classifier that a file has under another name, and a note.

    The names of the tensors are those of the model. Both are empty if the file has the model's
    classifier, or not exactly one other classifier of the right width.

    prefix: the prefix of the model's other names in the file.
    """
    if len(heads) != 1:
        return {}, ""
    head = heads[0]
    head_weight = expected.get(f"{head}.weight")
    if head_weight is None or head_weight.ndim != 2 or f"{prefix}{head}.weight" in state:
        return {}, ""
    candidates = set()
    for name in state:
        module, _, parameter = name.rpartition(".")
        is_of_model = name.startswith(prefix) and name.removeprefix(prefix) in expected
        is_classifier = parameter == "weight" and module.rpartition(".")[2] in _CLASSIFIERS
        if is_classifier and not is_of_model:
            candidates.add(module)
    if len(candidates) != 1:
        return {}, ""
    module = candidates.pop()
    weight = state[f"{module}.weight"]
    bias = state.get(f"{module}.bias")
    if bias is None or weight.ndim != 2 or weight.shape[1] != head_weight.shape[1]:
        return {}, ""
    renamed = {f"{head}.weight": weight, f"{head}.bias": bias}
    return renamed, f"used {module!r} as the classifier {head!r}"


def _preference(prefix: str) -> int:
    """Return the rank of a network among several: an average of the weights first, as in timm."""
    ranks = [rank for word, rank in _RANKS.items() if word in prefix]
    return min(ranks, default=_NEUTRAL)


def require_fitting(model: nn.Module, state: Mapping[str, Tensor], *, where: str) -> None:
    """Raise ModelError unless the weights are the model's.

    The message has missing, unexpected and misshapen keys and their likely cause.
    """
    expected = model.state_dict()
    missing = [key for key in expected if key not in state]
    unexpected = [key for key in state if key not in expected]
    misshapen = [
        key for key in expected if key in state and expected[key].shape != state[key].shape
    ]
    faults = []
    if missing:
        faults.append(f"{len(missing)} missing ({list_names(missing)})")
    if unexpected:
        faults.append(f"{len(unexpected)} unexpected ({list_names(unexpected)})")
    if misshapen:
        key = misshapen[0]
        faults.append(
            f"{key!r} expected {tuple(expected[key].shape)}, found {tuple(state[key].shape)}"
        )
    if faults:
        cause = _cause(
            missing,
            unexpected,
            some_match=len(missing) < len(expected),
            has_misshapen=bool(misshapen),
        )
        raise ModelError(f"weights do not fit {where}: {'; '.join(faults)}; {cause}")


def _cause(
    missing: Sequence[str], unexpected: Sequence[str], *, some_match: bool, has_misshapen: bool
) -> str:
    """Return the likely reason why weights do not fit, and what to do.

    some_match: whether some of the names fit.
    has_misshapen: whether the shape of a tensor does not fit.
    """
    for pattern, cause in _CAUSES:
        if any(re.search(pattern, name) for name in unexpected):
            wrap = by_caller(
                python="wrap it with vitlens.wrap", command="load it with --model-file"
            )
            return cause.format(wrap=wrap)
    if not some_match and unexpected:
        arch = argument("arch")
        return (
            f"no name matches the architecture: check {arch} (vitlens models lists "
            "them), or rename the weights"
        )
    if unexpected and not missing and not has_misshapen:
        return (
            "the other names all fit: choose the architecture that also has these ("
            f"{argument('arch')}), or wrap it"
        )
    if missing and not unexpected and not has_misshapen:
        return (
            "the file lacks them: use the whole checkpoint, or choose an architecture "
            f"without them ({argument('arch')})"
        )
    return f"check {argument('arch')}, {argument('image_size')} and {argument('classes')}"


def load_strictly(model: nn.Module, state: Mapping[str, Tensor], *, where: str) -> None:
    """Load a state dict. Raises ModelError for one that does not fit."""
    require_fitting(model, state, where=where)
    model.load_state_dict(dict(state), strict=True)
