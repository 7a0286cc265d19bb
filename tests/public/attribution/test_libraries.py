"""Methods of other libraries, LIBRARY:NAME: each on a ViT and a CNN, and against a call by hand."""

import copy
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet

import vitlens
from tests.kit.explainable import MODELS
from tests.kit.tiny import images, model_of, ours, shaken, small_cnn
from vitlens import Model
from vitlens.attribution.adapters.registry import LIBRARIES
from vitlens.attribution.registry import attribution
from vitlens.cli.main import run
from vitlens.errors import InputError, UnknownNameError, UnsupportedError

MODULES = {name: library.module for name, library in LIBRARIES.items()}
TARGETS = torch.tensor([1, 4])
# on a ViT without ReLUs
WITHOUT_RULES = (
    "captum:deep-lift",
    "captum:deep-lift-shap",
    "captum:lrp",
    "captum:guided-backprop",
    "captum:deconvolution",
    "captum:guided-grad-cam",
)
pytestmark = pytest.mark.filterwarnings("ignore:.*relevance propagation is patented")


def names_of(library: str) -> tuple[str, ...]:
    pytest.importorskip(MODULES[library])
    return vitlens.list_methods(f"{library}:*").names


def explained(model: Model, batch: Tensor, method: str, **options: object) -> Tensor:
    return vitlens.explain(model, batch, targets=TARGETS, method=method, **options)


def state_of(model: Model) -> dict[str, object]:
    """Return what a library may change in a model, by its name."""
    state: dict[str, object] = {}
    for name, module in model.named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        state[name] = (module.training, type(module), *(len(kind) for kind in hooks))
    for name, value in model.state_dict().items():
        state[f"{name}:"] = value.clone()
    for name, parameter in model.named_parameters():
        state[f"{name}:gradient"] = (parameter.requires_grad, parameter.grad is None)
    return state


def assert_unchanged(model: Model, before: dict[str, object]) -> None:
    after = state_of(model)
    assert after.keys() == before.keys()
    for name, value in before.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, after[name]), name
        else:
            assert value == after[name], name


def try_all(library: str, kind: str, *, slow: bool) -> None:
    """Explain two images by every method of a library, and check maps and model."""
    model = MODELS[kind]()
    batch = images(model.input_size)
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 2 == 0)
    before = state_of(model)
    refused = []
    for name in names_of(library):
        method = attribution(name)
        if method.slow != slow:
            continue
        try:
            maps = explained(model, batch, name)
        except UnsupportedError:
            refused.append(name)
            continue
        size = model.input_size
        if method.resolution == "patch":
            size = explained(model, batch, "occlusion").shape[1:]
        assert maps.shape == (2, *size), name
        assert maps.isfinite().all(), name
        if name != "grad-cam:randomcam":  # whose random sum of channels may be negative everywhere
            assert maps.flatten(1).std(1).min() > 0, name
        assert method.signed or maps.min() >= 0, name
        alone = vitlens.explain(model, batch[1:], targets=TARGETS[1:], method=name)
        scale = float(maps.abs().max())
        torch.testing.assert_close(alone, maps[1:], atol=1e-4 * scale, rtol=1e-3, msg=name)
    expected: tuple[str, ...] = ()
    if kind == "vit":
        expected = names_of("zennit") if library == "zennit" else WITHOUT_RULES
    assert refused == [
        name for name in names_of(library) if name in expected and attribution(name).slow == slow
    ]
    assert_unchanged(model, before)


@pytest.mark.parametrize("kind", ["vit", "cnn"])
@pytest.mark.parametrize("library", MODULES)
def test_every_method_runs_on_a_vit_and_a_cnn_and_leaves_them_as_they_were(library, kind):
    try_all(library, kind, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vit", "cnn"])
@pytest.mark.parametrize("library", ["grad-cam", "captum"])
def test_every_slow_method_runs_on_a_vit_and_a_cnn(library, kind):
    try_all(library, kind, slow=True)


# target layer and reshape by hand, as the library's examples write them
LAYERS: dict[str, tuple[Callable[[nn.Module], nn.Module], bool]] = {
    "vit": (lambda module: module.blocks[-1].norm1, True),
    "cnn": (lambda module: module.layer3[-1], False),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("class_name", ["EigenGradCAM", "KPCA_CAM", "FEM", "SegEigenCAM"])
def test_a_class_activation_map_equals_the_librarys(class_name, kind):
    library = pytest.importorskip("pytorch_grad_cam")
    model = MODELS[kind]()
    batch = images(model.input_size)
    module = copy.deepcopy(model.module).requires_grad_(True)
    layer, is_of_tokens = LAYERS[kind]

    def reshape(output: Tensor) -> Tensor:
        return output[:, 1:].reshape(len(output), 4, 3, -1).permute(0, 3, 1, 2)

    cam = getattr(library, class_name)(module, [layer(module)], reshape if is_of_tokens else None)
    outputs = [
        library.utils.model_targets.ClassifierOutputTarget(int(target)) for target in TARGETS
    ]
    name = f"grad-cam:{class_name.lower().replace('_', '-')}"
    maps = explained(model, batch, name).numpy()
    np.testing.assert_allclose(maps, cam(model.prepare(batch), outputs), atol=1e-5)


@pytest.mark.parametrize("kind", LAYERS)
def test_full_gradients_equal_the_librarys_sum_over_all_layers(kind):
    library = pytest.importorskip("pytorch_grad_cam")
    model = MODELS[kind]()
    batch = images(model.input_size)
    module = copy.deepcopy(model.module).requires_grad_(True)
    outputs = [
        library.utils.model_targets.ClassifierOutputTarget(int(target)) for target in TARGETS
    ]
    expected = library.FullGrad(module, [])(model.prepare(batch), outputs)
    maps = explained(model, batch, "grad-cam:full-grad").numpy()
    np.testing.assert_allclose(maps, expected, atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_captums_maps_equal_a_call_by_hand_and_our_own(kind):
    attr = pytest.importorskip("captum.attr")
    model = MODELS[kind]()
    batch = images(model.input_size)
    inputs = model.prepare(batch).detach().requires_grad_()
    black = model.prepare(torch.zeros_like(batch[:1]))
    same = {"atol": 1e-4, "rtol": 1e-3}
    expected = attr.IntegratedGradients(model.module).attribute(inputs, black, target=TARGETS)
    maps = explained(model, batch, "captum:integrated-gradients")
    torch.testing.assert_close(maps, expected.sum(1).float(), **same)
    torch.testing.assert_close(maps, explained(model, batch, "integrated-gradients"), **same)
    expected = attr.Saliency(model.module).attribute(inputs, target=TARGETS).sum(1)
    torch.testing.assert_close(explained(model, batch, "captum:saliency"), expected, **same)


def small_resnet() -> nn.Module:
    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=5)


@pytest.mark.parametrize("composite", ["epsilon_gamma_box", "guided_backprop"])
def test_zennits_relevance_of_a_resnet_equals_that_with_its_own_canonizer(composite):
    pytest.importorskip("zennit")
    from zennit.attribution import Gradient
    from zennit.composites import COMPOSITES
    from zennit.torchvision import ResNetCanonizer

    model = model_of(shaken(small_resnet), size=(32, 32))
    batch = images((32, 32))
    settings: dict[str, object] = {"canonizers": [ResNetCanonizer()]}
    if composite == "epsilon_gamma_box":
        zeros = torch.zeros(1, 3, 32, 32)
        settings |= {"low": model.prepare(zeros), "high": model.prepare(zeros + 1)}
    module = copy.deepcopy(model.module)
    with Gradient(module, COMPOSITES[composite](**settings)) as attributor:
        _, relevance = attributor(model.prepare(batch), torch.eye(5)[TARGETS])
    maps = explained(model, batch, f"zennit:{composite.replace('_', '-')}")
    expected = relevance.sum(1).detach()
    torch.testing.assert_close(maps, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-3)


@pytest.mark.parametrize("method", ["captum:lrp", "autolrp:cplrp"])
def test_relevance_that_sums_near_zero_have_blown_up_is_refused(method):
    pytest.importorskip(method.partition(":")[0])
    model = vitlens.load("cnn-digits")
    with pytest.raises(UnsupportedError, match="sums near zero"):
        vitlens.explain(model, images(model.input_size), method=method)


def test_relevance_that_is_no_number_is_refused():
    """Of grey images, the first channel has infinite relevance, and the next minus that."""
    pytest.importorskip("captum")
    module = nn.Sequential(
        nn.Conv2d(3, 1, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 5)
    )
    with torch.no_grad():
        module[0].weight.copy_(torch.tensor([1e38, -1e38, 0.0]).view(1, 3, 1, 1))
        module[0].bias.fill_(1e-3)
        module[4].weight.fill_(1e4)
    model = vitlens.wrap(module, image_size=8, mean=(0.0,) * 3, std=(1.0,) * 3)
    with pytest.raises(UnsupportedError, match="sums near zero"):
        explained(model, torch.full((2, 3, 8, 8), 0.5), "captum:lrp")


def test_a_library_writes_no_progress_bars(capsys):
    tqdm = pytest.importorskip("pytorch_grad_cam").score_cam.tqdm
    progress_bar = tqdm.tqdm
    explained(small_cnn(), images(), "grad-cam:scorecam")
    assert not capsys.readouterr().err
    assert tqdm.tqdm is progress_bar


@pytest.mark.filterwarnings("ignore:.* for LRP")
@pytest.mark.parametrize("kind", ["vit", "cnn"])
def test_autolrps_relevance_equals_a_call_by_hand(kind):
    autolrp = pytest.importorskip("autolrp")
    model = MODELS[kind]()
    batch = images(model.input_size)
    inputs = autolrp.tensor(model.prepare(batch[1:]).detach())
    model.module(inputs)[0, 4].lrp(config=autolrp.LRPConfig.attnlrp())
    expected = inputs.relevance.as_subclass(Tensor).sum(1)
    maps = explained(model, batch, "autolrp:attnlrp")[1:]
    torch.testing.assert_close(maps, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-3)


def test_draws_are_those_of_the_seed_and_leave_the_global_ones_alone():
    pytest.importorskip("captum")
    batch = images((32, 48))
    torch.manual_seed(3)
    np.random.seed(3)
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    method = partial(explained, ours(), batch, "captum:gradient-shap")
    assert torch.equal(method(seed=1), method(seed=1))
    assert not torch.equal(method(seed=1), method(seed=2))
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()


def test_a_library_that_is_missing_is_one_line_with_what_to_install(monkeypatch, capsys):
    for module in MODULES.values():
        monkeypatch.setitem(sys.modules, module, None)
    assert run(["explain", "vit-digits", "--method", "grad-cam:eigencam"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'vitlens[grad-cam]'" in line
    with pytest.raises(InputError, match=r"vitlens\[lrp\]"):
        vitlens.explain(small_cnn(), images(), method="zennit:epsilon-plus")
    libraries = {entry.name: entry.needs for entry in vitlens.list_methods()[-len(MODULES) :]}
    assert libraries["captum:NAME"] == "pip install 'vitlens[captum]'"
    assert [name.partition(":")[0] for name in libraries] == list(MODULES)


@pytest.mark.parametrize(
    ("method", "suggestion"),
    [
        ("grad-cam:eigncam", "grad-cam:eigencam"),
        ("captum:integrated", "captum:integrated-gradients"),
        ("gradcam:eigencam", "grad-cam"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(method, suggestion):
    pytest.importorskip("pytorch_grad_cam")
    pytest.importorskip("captum")
    with pytest.raises(UnknownNameError, match=f"did you mean '{suggestion}'"):
        vitlens.explain(ours(), images((32, 48)), method=method)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("captum:lrp", "found LayerNorm"),
        ("captum:guided-backprop", "plain gradient"),
        ("zennit:epsilon-plus", "no rule for attention"),
    ],
)
def test_a_method_that_a_vit_does_not_support_says_why(method, reason):
    pytest.importorskip(method.partition(":")[0])
    with pytest.raises(UnsupportedError, match=reason):
        vitlens.explain(ours(), images((32, 48)), method=method)


def test_a_library_is_refused_inside_a_context_and_after_an_error_the_model_is_as_before():
    pytest.importorskip("captum")
    model = ours()
    before = state_of(model)
    with (
        vitlens.intervene(model, {"blocks.0.mlp": torch.zeros_like}),
        pytest.raises(UnsupportedError, match="which copies it"),
    ):
        explained(model, images((32, 48)), "captum:saliency")
    with pytest.raises(UnsupportedError):
        explained(model, images((32, 48)), "captum:lrp")
    assert_unchanged(model, before)


def test_libraries_are_listed_with_their_versions():
    version = pytest.importorskip("importlib.metadata").version
    for library, package in (("grad-cam", "grad-cam"), ("captum", "captum")):
        names = names_of(library)
        for entry in vitlens.list_methods(f"{library}:*"):
            assert version(package) in entry.help
        assert len(names) == len(set(names)) >= 15
        (row,) = (each for each in vitlens.list_methods() if each.name == f"{library}:NAME")
        assert version(package) in row.help
    assert "grad-cam:eigencam" in vitlens.list_methods("*:eigen*").names


@pytest.mark.slow
def test_a_note_about_licences_is_printed_once_and_only_named_libraries_are_imported():
    pytest.importorskip("autolrp")
    program = """
import sys, torch, vitlens
vit = vitlens.load("vit-digits")
for _ in range(2):
    vitlens.explain(vit, torch.rand(1, 3, 32, 32), method="autolrp:cplrp")
print(*sorted({"pytorch_grad_cam", "captum", "zennit", "autolrp"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["autolrp"]
    assert done.stderr.count("patented") == 1
