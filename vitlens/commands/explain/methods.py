"""Which methods `vitlens explain` runs on each model, and the methods as functions."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from vitlens.analysis.attention.affinity import require_affinity
from vitlens.analysis.faithfulness.randomisation import Explain
from vitlens.attribution.choice import candidates_for
from vitlens.attribution.explain import explain, methods_for, require_method
from vitlens.attribution.refinement import Refinement, require_refinement
from vitlens.attribution.registry import ATTRIBUTIONS, default_methods
from vitlens.commands.explain.options import ALL, NONE, ExplainOptions, RefineOptions
from vitlens.errors import InputError, UnknownNameError
from vitlens.lens.quick_passes import quick_passes
from vitlens.models.model import Model
from vitlens.names import Engine
from vitlens.shapes import Images, Labels, Maps


def methods_of(options: ExplainOptions, models: Sequence[Model]) -> list[tuple[str, ...]]:
    """The methods of each model, with --auto the candidates. Raises as `chosen_methods`, and InputError for fewer than
    two candidates."""
    refinement, engine = refinement_of(options.refine), options.engine
    named: Sequence[tuple[str, ...] | None] = [None] * len(models)
    if options.method or not options.auto:
        given = (ALL,) if options.verify and not options.method else options.method
        named = methods = chosen_methods(models, given, engine=engine, refinement=refinement)
        if not options.auto:
            return methods
    return [candidates_for(model, own, engine=engine, refinement=refinement) for model, own in zip(models, named)]


def refinement_of(options: RefineOptions) -> Refinement:
    """What is done with every map."""
    times = None if options.times == NONE else options.times
    return Refinement(options.refine, options.layers, options.steps, times, options.views, options.upsample)


def chosen_methods(
    models: Sequence[Model],
    method: Sequence[str],
    *,
    engine: Engine = "vitlens",
    refinement: Refinement | None = None,
) -> list[tuple[str, ...]]:
    """The methods of each model, in the order of `method`; without any, the default ones.

    refinement: what is done with the maps; of methods that are not named, those whose maps it does not apply to are
    left out. Raises UnknownNameError for a name that is no method, UnsupportedError for one that no model has, for a
    model that has none of them, and for a refinement that does not apply.
    """
    refinement = refinement or Refinement()
    defined = [
        tuple(name for name in methods_for(model, engine=engine) if name in method or _applies(model, name, refinement))
        for model in models
    ]
    for model in models:
        for name in methods_for(model, engine=engine) if method and ALL not in method else ():
            if name in method:
                require_refinement(model, name, refinement)
        if refinement.times is not None:
            require_method(model, refinement.times, engine=engine)
    if ALL in method:
        return defined
    names = tuple(dict.fromkeys(method or default_methods()))
    for name in names:
        if name not in ATTRIBUTIONS:
            raise UnknownNameError("method", name, (*ATTRIBUTIONS, ALL))
        if method and not any(name in own for own in defined):
            require_method(models[0], name, engine=engine)
    chosen = [tuple(name for name in names if name in own) for own in defined]
    for model, own in zip(models, chosen):
        if not own:
            require_method(model, names[0], engine=engine)
    return chosen


def _applies(model: Model, method: str, refinement: Refinement) -> bool:
    """Whether the refinement applies to the method's maps. Raises UnsupportedError where it applies to no method, and
    InputError for a layer that the model does not have."""
    if refinement.refine == "affinity":
        require_affinity(model, refinement.layers)
    try:
        require_refinement(model, method, refinement)
    except InputError:
        return False
    return True


def as_function(name: str, options: ExplainOptions) -> Explain:
    """A method as a function of (model, images, targets), refined as the options say."""
    refinement, engine, run = refinement_of(options.refine), options.engine, options.run

    def maps(model: Model, images: Images, targets: Labels) -> Maps:
        with quickly(model, name):
            return explain(
                model, images, targets=targets, method=name, refinement=refinement, engine=engine,
                batch_size=run.batch_size, seed=run.seed,
            )  # fmt: skip

    return maps


@contextmanager
def quickly(model: Model, method: str) -> Iterator[None]:
    """Inside, the passes of a method that does not observe attention are quick ones."""
    if ATTRIBUTIONS[method].needs not in (None, "cam"):
        yield
        return
    with quick_passes(model):
        yield
