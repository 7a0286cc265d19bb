"""The methods of a run: those that each model has, with their refinement, as functions of images
and targets.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from vitlens.analysis.attention.affinity import require_affinity
from vitlens.attribution.choice import candidates_for
from vitlens.attribution.explain import explain, methods_for, require_method
from vitlens.attribution.refinement import Refinement, applies, require_refinement
from vitlens.attribution.registry import ATTRIBUTIONS, default_methods
from vitlens.commands.explain.options import ALL, NONE, ExplainOptions, RefineOptions
from vitlens.errors import UnknownNameError
from vitlens.lens.quick_passes import quick_passes
from vitlens.models.model import Model
from vitlens.names import Engine
from vitlens.shapes import Images, Labels, Maps

MethodFunction = Callable[[Model, Images, Labels | None], Maps]


def methods_of(options: ExplainOptions, models: Sequence[Model]) -> list[tuple[str, ...]]:
    """Return the methods of each model; with --auto, the candidates.

    Raises as `chosen_methods`, and InputError for fewer than two candidates.
    """
    engine = options.engine
    refinement = refinement_of(options.refine)
    if not options.auto:
        names = options.method
        # next to maps of others, the default methods are enough
        if options.verify and not names and not options.maps:
            names = (ALL,)
        return chosen_methods(models, names, engine=engine, refinement=refinement)
    requested: list[tuple[str, ...]] | list[None] = [None] * len(models)
    if options.method:
        requested = chosen_methods(models, options.method, engine=engine, refinement=refinement)
    candidates = []
    for model, methods in zip(models, requested):
        candidates.append(candidates_for(model, methods, refinement=refinement, engine=engine))
    return candidates


def refinement_of(options: RefineOptions) -> Refinement:
    """Return the refinement of every map."""
    times = None
    if options.times != NONE:
        times = options.times
    return Refinement(
        refine=options.refine,
        layers=options.layers,
        steps=options.steps,
        times=times,
        views=options.views,
        upsample=options.upsample,
    )


def chosen_methods(
    models: Sequence[Model], names: Sequence[str], *, engine: Engine, refinement: Refinement
) -> list[tuple[str, ...]]:
    """Return the methods of each model, in the order of names.

    The default methods if there are no names. A method that is not named is left out if the
    refinement does not apply to its maps. Raises UnknownNameError for an unknown name. Raises
    UnsupportedError for a method that no model has, a model that has none of the methods, or a
    refinement that does not apply.
    """
    if refinement.refine == "affinity":
        for model in models:
            require_affinity(model, refinement.layers)
    defined = []
    for model in models:
        methods = _defined_methods(model, names, engine, refinement)
        _require_refinements(model, methods, names, engine, refinement)
        defined.append(methods)
    if ALL in names:
        return defined
    requested = tuple(dict.fromkeys(names or default_methods()))
    for name in requested:
        if name not in ATTRIBUTIONS:
            raise UnknownNameError("method", name, (*ATTRIBUTIONS, ALL))
        if names and not any(name in methods for methods in defined):
            require_method(models[0], name, engine=engine)
    chosen = []
    for model, methods in zip(models, defined):
        chosen.append(tuple(name for name in requested if name in methods))
        if not chosen[-1]:
            require_method(model, requested[0], engine=engine)
    return chosen


def _defined_methods(
    model: Model, names: Sequence[str], engine: Engine, refinement: Refinement
) -> tuple[str, ...]:
    """Return the methods that a model has: the named ones, and those to which the refinement
    applies.
    """
    methods = []
    for name in methods_for(model, engine=engine):
        if name in names or applies(model, name, refinement):
            methods.append(name)
    return tuple(methods)


def _require_refinements(
    model: Model,
    methods: Sequence[str],
    names: Sequence[str],
    engine: Engine,
    refinement: Refinement,
) -> None:
    """Raise UnsupportedError if the refinement does not apply to a named method of a model."""
    if ALL not in names:
        for name in methods:
            if name in names:
                require_refinement(model, name, refinement)
    if refinement.times is not None:
        require_method(model, refinement.times, engine=engine)


def as_function(name: str, options: ExplainOptions, *, batch_size: int | None) -> MethodFunction:
    """Return a method as a function of a model, images and targets, refined as the options say."""
    refinement = refinement_of(options.refine)

    def maps(model: Model, images: Images, targets: Labels | None) -> Maps:
        with _passes(model, name, options.engine):
            return explain(
                model,
                images,
                targets=targets,
                method=name,
                refinement=refinement,
                engine=options.engine,
                batch_size=batch_size,
                seed=options.run.seed,
            )

    return maps


def _passes(model: Model, method: str, engine: Engine) -> AbstractContextManager[object]:
    """Return a context in which passes are quick ones, if the method does not observe attention."""
    # the package copies the model, and would call the quick layers of the original
    if engine != "vitlens":
        return nullcontext()
    if ATTRIBUTIONS[method].needs not in (None, "cam"):
        return nullcontext()
    return quick_passes(model)
