"""The hubs: downloads from a local server, weights in the caches, and messages offline."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torchvision
from huggingface_hub import constants

import vitlens
from tests.kit.models.files import Malicious, one_line
from vitlens.errors import ModelError
from vitlens.models.sources import hub

PATH = f"/timm/{hub.SMALL_VIT}/resolve/main/model.safetensors"


@pytest.fixture
def caches(tmp_path: Path, monkeypatch) -> tuple[Path, Path]:
    """Return empty caches of Hugging Face's hub and of torch.hub."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub", tmp_path / "torch" / "hub" / "checkpoints"


@pytest.fixture
def server(caches: tuple[Path, Path], monkeypatch) -> Iterator[SimpleNamespace]:
    """Run a hub with one file and empty caches.

    broken: bytes after which a connection ends.
    """
    state = SimpleNamespace(content=b"weights" * 1000, broken=None, status=200, asked=[])

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked.append((self.command, self.path))
            status = state.status if self.path == PATH else 404
            content = state.content if status == 200 else b""
            self.send_response(status)
            self.send_header("ETag", f'"{sha256(state.content).hexdigest()}"')
            self.send_header("X-Repo-Commit", "ab" * 20)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content[: state.broken])
                self.close_connection = True

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Print nothing on stderr."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        state.address = f"http://127.0.0.1:{running.server_address[1]}"
        monkeypatch.setenv("HF_ENDPOINT", state.address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr("time.sleep", lambda _: None)  # between the client's attempts
        yield state
        running.shutdown()


def download() -> tuple[list[str], list[int]]:
    """Download the model; return the addresses that it announces and the steps of the bar."""
    said = []
    steps = []
    name = hub.download_small_vit(begins=said.append, progress=lambda _: nullcontext(steps.append))
    assert name.name == f"timm:{hub.SMALL_VIT}"
    return said, steps


def test_it_is_downloaded_once_as_safetensors_and_found_afterwards(server):
    server.content = bytes(3_400_000)
    part = constants.DOWNLOAD_CHUNK_SIZE
    said, steps = download()
    assert (said, sum(steps), len(steps) > 1) == ([server.address], 3, True)  # whole MB
    # no pickle, no other file
    assert {path for method, path in server.asked if method == "GET"} == {PATH}
    (vit,) = hub.vits_on_disk()
    assert Path(vit.weights).read_bytes() == server.content
    assert (vit.name, vit.alias) == (f"timm:{hub.SMALL_VIT}", hub.SMALL_VIT)
    assert part == constants.DOWNLOAD_CHUNK_SIZE


def test_offline_nothing_is_asked_for(server):
    with hub.offline():
        with pytest.raises(ModelError, match="offline"):
            download()
        with pytest.raises(ModelError, match="offline; give weights='FILE'"):
            vitlens.load("timm:vit_tiny_patch16_224")
    assert not server.asked
    assert not constants.HF_HUB_OFFLINE
    with hub.offline(False):
        assert download()[0] == [server.address]


def test_a_hub_that_is_not_there_refuses_or_ends_early_is_one_line_and_leaves_no_weights(
    server, monkeypatch
):
    for server.status, server.broken in ((404, None), (403, None), (200, 100)):
        with one_line(ModelError, r"^the download from http:"):
            download()
        assert hub.vits_on_disk() == ()
    server.broken = None
    download()
    assert len(hub.vits_on_disk()) == 1
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=r"^http://127\.0\.0\.1:9 does not answer$"):
        download()


def cached(folder: Path, name: str, file: str = "model.safetensors") -> Path:
    place = folder / f"models--timm--{name}" / "snapshots" / "0a" / file
    place.parent.mkdir(parents=True)
    place.write_bytes(b"weights")
    return place


def test_vits_of_imagenet_are_found_by_name_and_others_are_not(caches):
    downloads, checkpoints = caches
    assert hub.vits_on_disk() == ()
    base = "vit_base_patch16_224.augreg2_in21k_ft_in1k"
    deit = "deit_tiny_patch16_224"
    for name in (
        base,
        "vit_small_patch14_dinov2.lvd142m",
        "vit_base_patch16_clip_224.openai",
        "resnet50.a1_in1k",
        "vit_base_patch16_224.augreg_in21k",
        "swin_tiny_patch4_window7_224.ms_in1k",
        "vit_base_patch16_224.no_such_tag",
    ):
        cached(downloads, name)
    cached(downloads, "deit3_small_patch16_224.fb_in1k", file="config.json")  # without weights
    gone = cached(downloads, f"{deit}.fb_in1k")
    gone.unlink()
    gone.symlink_to(gone.with_name("blob"))  # a link whose file is gone
    checkpoints.mkdir(parents=True)
    for name in (f"{deit}-a1311bcf.pth", "resnet18-5c106cde.pth", "dino_deitsmall16_pretrain.pth"):
        (checkpoints / name).write_bytes(b"weights")
    vits = [(model.name, model.alias, Path(model.weights).name) for model in hub.vits_on_disk()]
    assert vits == [
        (f"timm:{deit}", deit, f"{deit}-a1311bcf.pth"),
        (f"timm:{base}", base, "model.safetensors"),
    ]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("timm:vit_tiny_patch16_224", "weights=.FILE.*, or random_weights=True"),
        ("torchvision:resnet18", "weights=.FILE.*, or random_weights=True"),
        ("hf:google/vit-base-patch16-224", "hf:FOLDER"),
    ],
)
def test_without_a_network_a_pretrained_name_is_one_line(monkeypatch, caches, name, advice):
    def fails(*_args: object, **_options: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(hub, "_answers", lambda _address: False)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fails)
    monkeypatch.setattr(
        "time.sleep", lambda _: pytest.fail("slept for a network that is not there")
    )
    with one_line(ModelError, f"{name} from https://.*found no network.*{advice}"):
        vitlens.load(name)


def test_a_pickle_in_torch_hubs_cache_is_refused_and_plain_weights_are_read(caches, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    _, checkpoints = caches
    checkpoints.mkdir(parents=True)
    plain = torchvision.models.resnet18(weights=None).state_dict()
    weights = torchvision.models.ResNet18_Weights.DEFAULT
    ran = checkpoints / "it-ran"
    torch.save({**plain, "more": Malicious(ran)}, checkpoints / Path(weights.url).name)
    with one_line(ModelError, "found a pickle that would run code: refused; remove the file"):
        vitlens.load("torchvision:resnet18")
    assert not ran.exists()
    torch.save(plain, checkpoints / Path(weights.url).name)
    model = vitlens.load("torchvision:resnet18")
    assert torch.equal(model.module.fc.weight, plain["fc.weight"])


def test_the_hubs_own_switch_comes_back_and_a_broken_download_says_why(monkeypatch):
    before = constants.HF_HUB_OFFLINE
    seen = []
    for answers in (False, True):
        monkeypatch.setattr(hub, "_answers", lambda _address, answers=answers: answers)
        with suppress(KeyError), hub.pretrained_download("timm:x", "https://example.org"):
            seen.append(constants.HF_HUB_OFFLINE)
            raise KeyError
    assert (constants.HF_HUB_OFFLINE, seen) == (before, [True, before])
    with (
        pytest.raises(ModelError, match=r"\(connection reset\); give weights='FILE'"),
        hub.pretrained_download("timm:x", "https://example.org"),
    ):
        raise OSError("connection reset\nmore")


@pytest.mark.parametrize("name", ["hf:someone/model", "open-clip:ViT-B-32/openai"])
def test_the_address_that_must_answer_is_that_of_the_mirror(name, monkeypatch):
    if name.startswith("open-clip:"):
        pytest.importorskip("open_clip")
    asked = []

    def answers(address):
        asked.append(address)
        return False

    monkeypatch.setattr(hub, "_answers", answers)
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example.org/")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ModelError, match=r"mirror\.example\.org"):
        vitlens.load(name)
    assert [address.startswith("https://mirror.example.org") for address in asked] == [True]
