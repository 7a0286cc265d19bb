"""How much each command will ask of a model: images passed through it, counted from what was asked for.

Attacks stop early on images that break, and a resumed run has done a part already: these counts are upper limits.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from vitlens.analysis.failures.common_corruptions import CORRUPTIONS, SEVERITIES
from vitlens.analysis.faithfulness.deletion import STEPS as REMOVALS
from vitlens.analysis.faithfulness.league import BASELINES, RANDOMISED
from vitlens.analysis.faithfulness.randomisation import PARTS
from vitlens.attacks.carlini_wagner import SEARCHES
from vitlens.attacks.clean import RIVALS
from vitlens.attacks.registry import ATTACKS, Attack, members_of
from vitlens.attacks.scores import QUERIES
from vitlens.attribution.gradients import SAMPLES, STEPS
from vitlens.attribution.rise import MASKS
from vitlens.attribution.shap import COALITIONS
from vitlens.commands.scaffold.expected import Part
from vitlens.runs.attack_choices import AttackChoices
from vitlens.runs.stats_learning import IMAGES, MOMENTS

WATCHED: Final = 2.0  # forward passes that a pass is worth whose attention weights are all computed
CELLS: Final = 196  # that a method covers one by one, about: a ViT's 14 x 14 patches
CHANNELS: Final = 192  # of the layer that ScoreCAM and AblationCAM go through, at least
_SEARCHED: Final = 16  # passes an image of the search for what turns a prediction, about

# forward passes an image, and passes forward and back
METHOD_COSTS: Final[Mapping[str, tuple[float, float]]] = {
    "relevance": (0, 1.5),
    "rollout": (WATCHED, 0),
    "gradient-rollout": (0, 1.5),
    "attention": (WATCHED, 0),
    "gradcam": (0, 1),
    "gradcam++": (0, 1),
    "layercam": (0, 1),
    "hirescam": (0, 1),
    "xgradcam": (0, 1),
    "eigencam": (1, 0),
    "scorecam": (CHANNELS, 0),
    "ablationcam": (CHANNELS, 0),
    "saliency": (0, 1),
    "input-x-gradient": (0, 1),
    "smoothgrad": (0, SAMPLES),
    "integrated-gradients": (0, STEPS),
    "occlusion": (CELLS, 0),
    "rise": (MASKS, 0),
    "kernel-shap": (COALITIONS, 0),
}


def stats_parts(images: int, *, moments: int) -> tuple[Part, ...]:
    """All attention weights of all images; and, for so many sets of weights kept over training, of some images."""
    over = WATCHED * min(moments, MOMENTS) * min(images, IMAGES)
    return (
        Part("watching heads", WATCHED * images),
        *([Part("over training", over, shorter="leave out --over-training")] if moments else []),
    )


def features_parts(images: int, bank: int) -> tuple[Part, ...]:
    """The features of the test images, and of the training images that answer for them."""
    answering = [Part("features of the bank", bank, shorter="a smaller --bank")] if bank else []
    return (Part("features", images), *answering)


def train_parts(images: int, tested: int, *, epochs: int, looks: int, frozen: bool) -> tuple[Part, ...]:
    """Passes over the training images, and looks at the test images; frozen: each image is passed through once."""
    if frozen:
        return (Part("features, once", images + tested),)
    return (Part("training", tested * looks, images * epochs, "a smaller --epochs"),)


def explain_parts(methods: Sequence[str], images: int, *, verify: bool, counterfactuals: bool) -> Iterator[Part]:
    """Maps by each method, and the checks of each."""
    forwards = sum(METHOD_COSTS[name][0] for name in methods)
    backwards = sum(METHOD_COSTS[name][1] for name in methods)
    slow = [name for name in methods if sum(METHOD_COSTS[name]) > CELLS / 2]
    shorter = f"--method without {', '.join(slow)}" if slow else ""
    yield Part("maps", forwards * images, backwards * images, shorter)
    if verify:
        # deletion and insertion, and ROAD's two orders, of each method and baseline; maps anew at each stage
        curves = 4 * REMOVALS * (len(methods) + len(BASELINES)) * images
        again = PARTS * min(images, RANDOMISED)
        yield Part("checks", curves + forwards * again, backwards * again)
        if counterfactuals:
            searched = _SEARCHED * len(methods) * images
            yield Part("counterfactuals", searched, shorter="--no-counterfactuals")


def attack_parts(choices: AttackChoices, images: int) -> Iterator[Part]:
    """Each attack at each epsilon, on images of which none breaks early; and common corruptions."""
    for name in choices.attacks:
        forwards = backwards = 0.0
        for member in members_of(name):
            spent = _attack_passes(member, choices, name)
            if member.gradients:
                backwards += spent
            else:
                forwards += spent
        yield Part(f"{name} (at most)", forwards * images, backwards * images, f"--attack without {name}, or --steps")
    if choices.corruptions and not choices.predicted:
        kinds = len(CORRUPTIONS) * len(SEVERITIES)
        yield Part("common corruptions", kinds * images, 0.0, "--no-corruptions")


def _attack_passes(attack: Attack, choices: AttackChoices, asked: str) -> int:
    """Passes an image: steps, restarts and epsilons, or the searches for the smallest perturbation."""
    steps = (choices.steps_for(asked) or attack.steps or 1) if attack.steps else 1
    if attack.kind == "minimum":
        return steps * (SEARCHES if attack.name == "cw" else RIVALS)
    epsilons = {"linf": len(choices.linf), "l2": len(choices.l2)}.get(ATTACKS[attack.name].norm, 1)
    times = (choices.restarts if attack.random else 1) * (RIVALS if attack.targeted else 1)
    return steps * epsilons * times * (QUERIES if attack.name == "square" else 1)


def compare_parts(
    method: str, images: int, *, mapped: int, watched: int, hardened: int, attentive: bool
) -> Iterator[Part]:
    """One model's share of a comparison. hardened: images shown on all levels of all disturbances."""
    forwards, backwards = METHOD_COSTS[method]
    yield Part("answers", images)
    yield Part("maps", forwards * mapped, backwards * mapped, "a smaller --maps")
    if attentive:
        yield Part("attention", WATCHED * watched)
    if hardened:
        yield Part("harder images", hardened, 0.0, "--no-harder")
