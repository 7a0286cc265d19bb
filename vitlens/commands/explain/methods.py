"""The methods of a run: those that each model has, with their refinement, as functions of images
and targets.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from vitlens.analysis.attention.affinity import require_affinity
from vitlens.attribution.adapters.registry import is_of_library, library_names
from vitlens.attribution.choice import candidates_for
from vitlens.attribution.explain import explain, methods_for, require_method
from vitlens.attribution.refinement import Refinement, applies, require_refinement
from vitlens.attribution.registry import ATTRIBUTIONS, attribution, default_methods
from vitlens.commands.explain.options import ALL, NONE, ExplainOptions, RefineOptions
from vitlens.errors import UnknownNameError
from vitlens.lens.quick_passes import quick_passes
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Maps

MethodFunction = Callable[[Model, Images, Labels | None], Maps]


def methods_of(options: ExplainOptions, models: Sequence[Model]) -> list[tuple[str, ...]]:
    """Return the methods of each model; with --auto, the candidates.

    Raises as `chosen_methods`, and InputError for fewer than two candidates.
    """
    refinement = refinement_of(options.refine)
    names = _without_all_of_libraries(models, options.method)
    if not options.auto:
        # next to maps of others, the default methods are enough
        checks_all = options.verify and not options.maps
        if checks_all and not names:
            names = (ALL,)
        return chosen_methods(models, names, refinement=refinement)
    requested: list[tuple[str, ...]] | list[None] = [None] * len(models)
    if names:
        requested = chosen_methods(models, names, refinement=refinement)
    candidates = []
    for model, methods in zip(models, requested):
        candidates.append(candidates_for(model, methods, refinement=refinement))
    return candidates


def _without_all_of_libraries(models: Sequence[Model], names: Sequence[str]) -> tuple[str, ...]:
    """Return the names with LIBRARY:all replaced by the methods of the library.

    These are the methods that any of the models supports. If there are none, it is the first method
    of the library: its refusal says why.
    """
    single_methods: list[str] = []
    for name in names:
        _library, _colon, method_of_library = name.partition(":")
        if method_of_library != ALL:
            single_methods.append(name)
            continue
        of_library = library_names(name)
        supported = set[str]()
        for model in models:
            supported.update(methods_for(model, of_library))
        supported_in_order = [method for method in of_library if method in supported]
        single_methods += supported_in_order or of_library[:1]
    return tuple(dict.fromkeys(single_methods))  # without repetitions, in order


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
    models: Sequence[Model], names: Sequence[str], *, refinement: Refinement
) -> list[tuple[str, ...]]:
    """Return the methods of each model.

    names: of methods, in their order: each for the models that have it. It is an error if no model
        has it, or if the refinement does not apply to it. With "all" among them, all methods that a
        model has and to which the refinement applies. Without names, the same among the default
        methods.

    Raises UnknownNameError for an unknown name. Raises UnsupportedError for a model that has none
    of the methods, and for the errors above.
    """
    if refinement.refine == "affinity":
        for model in models:
            require_affinity(model, refinement.layers)
    defined = []
    for model in models:
        methods = _defined_methods(model, names, refinement)
        _require_refinements(model, methods, names, refinement)
        defined.append(methods)
    if ALL in names:
        return defined
    requested = tuple(dict.fromkeys(names or default_methods()))
    for name in requested:
        if not is_of_library(name) and name not in ATTRIBUTIONS:
            raise UnknownNameError("method", name, (*ATTRIBUTIONS, ALL))
        if names and not any(name in methods for methods in defined):
            require_method(models[0], name)  # raises the error that says why
    chosen = []
    for model, methods in zip(models, defined):
        chosen_for_model = tuple(name for name in requested if name in methods)
        if not chosen_for_model:
            require_method(model, requested[0])
        chosen.append(chosen_for_model)
    return chosen


def _defined_methods(model: Model, names: Sequence[str], refinement: Refinement) -> tuple[str, ...]:
    """Return the methods that a model has: the named ones, and those to which the refinement
    applies.
    """
    methods = []
    library_methods = filter(is_of_library, names)
    for name in methods_for(model, (*ATTRIBUTIONS, *library_methods)):
        if name in names or applies(model, name, refinement):
            methods.append(name)
    return tuple(methods)


def _require_refinements(
    model: Model,
    methods: Sequence[str],
    names: Sequence[str],
    refinement: Refinement,
) -> None:
    """Raise UnsupportedError if the refinement does not apply to a named method of a model."""
    if ALL not in names:
        for name in methods:
            if name in names:
                require_refinement(model, name, refinement)
    if refinement.times is not None:
        require_method(model, refinement.times)


def as_function(name: str, options: ExplainOptions, *, batch_size: int | None) -> MethodFunction:
    """Return a method as a function of a model, images and targets, refined as the options say."""
    refinement = refinement_of(options.refine)

    def maps(model: Model, images: Images, targets: Labels | None) -> Maps:
        with _passes(model, name):
            return explain(
                model,
                images,
                targets=targets,
                method=name,
                refinement=refinement,
                batch_size=batch_size,
                seed=options.run.seed,
            )

    return maps


def _passes(model: Model, method: str) -> AbstractContextManager[object]:
    """Return a context in which passes are quick ones, if the method does not observe attention."""
    # a library gets a copy of the model, which would call the quick layers of the original
    if is_of_library(method):
        return nullcontext()
    observes_attention = attribution(method).needs not in (None, "cam")
    if observes_attention:
        return nullcontext()
    return quick_passes(model)
