"""The hubs: the small ViT that is downloaded, from a local server that answers as Hugging Face's, by its own client;
which weights in the caches are taken for timm's ViTs."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import pytest
from huggingface_hub import constants

from vitlens.errors import ModelError
from vitlens.models.sources import hub
from vitlens.models.sources.hub import vits_on_disk

PATH = f"/timm/{hub.SMALL_VIT}/resolve/main/model.safetensors"
COMMIT = "ab" * 20


@dataclass
class Hub:
    """A hub with one file. content: of it; broken: bytes after which a connection ends; asked: method and path."""

    address: str = ""
    content: bytes = b"weights" * 1000
    broken: int | None = None
    status: int = 200
    asked: list[tuple[str, str]] = field(default_factory=list)


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Empty caches of Hugging Face's hub and of torch.hub."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub", tmp_path / "torch" / "hub" / "checkpoints"


@pytest.fixture
def server(caches: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A running hub, and empty caches."""
    known = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            known.asked.append((self.command, self.path))
            status = known.status if self.path == PATH else 404
            self.send_response(status)
            if status == 200:
                self.send_header("ETag", f'"{sha256(known.content).hexdigest()}"')
                self.send_header("X-Repo-Commit", COMMIT)
            content = known.content if status == 200 else b""
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content[: known.broken])
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            """Nothing on stderr."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        known.address = f"http://127.0.0.1:{running.server_address[1]}"
        monkeypatch.setenv("HF_ENDPOINT", known.address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield known
        running.shutdown()


def download() -> list[str]:
    """Download it; what was said before."""
    said: list[str] = []
    name = hub.download_small_vit(begins=said.append, progress=lambda _: nullcontext(lambda _: None))
    assert name.name == f"timm:{hub.SMALL_VIT}"
    return said


def test_it_is_downloaded_once_as_safetensors_and_found_afterwards(server, tmp_path):
    said: list[str] = []

    def begins(address: str) -> None:
        assert not any(path == PATH for _, path in server.asked)  # said before the first byte
        said.append(address)

    server.content = bytes(3_400_000)
    steps: list[int] = []
    name = hub.download_small_vit(begins=begins, progress=lambda _: nullcontext(steps.append))
    assert sum(steps) == 3  # whole MB
    assert len(steps) > 1
    assert said == [server.address]
    assert Path(name.weights or "").read_bytes() == server.content
    assert tmp_path / "hub" in Path(name.weights or "").parents
    assert {path for method, path in server.asked if method == "GET"} == {PATH}  # no pickle, no other file
    (found,) = vits_on_disk()
    assert (found.name, found.alias, Path(found.weights or "")) == (name.name, name.alias, Path(name.weights or ""))


def test_offline_nothing_is_asked_for(server):
    with hub.offline(), pytest.raises(ModelError, match="nothing is downloaded offline"):
        download()
    assert not server.asked
    assert not constants.HF_HUB_OFFLINE
    with hub.offline(False):
        assert download() == [server.address]


def test_a_hub_that_is_not_there_or_refuses_is_one_line(server, monkeypatch):
    for server.status in (404, 403):
        with pytest.raises(ModelError, match=r"^the download from http:") as caught:
            download()
        assert "\n" not in str(caught.value)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=r"^http://127\.0\.0\.1:9 does not answer$"):
        download()
    assert vits_on_disk() == ()


def test_a_download_that_ends_early_leaves_no_weights(server, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)  # between the client's attempts
    server.broken = 100
    with pytest.raises(ModelError, match="failed"):
        download()
    assert vits_on_disk() == ()
    server.broken = None
    assert download() == [server.address]
    assert len(vits_on_disk()) == 1


def test_a_named_model_asks_nobody_offline(server):
    fault = "found neither, offline; give --weights FILE"
    with (
        hub.offline(),
        pytest.raises(ModelError, match=fault),
        hub.pretrained_download("timm:x", f"{server.address}/timm/x"),
    ):
        raise OSError("not in the cache")
    assert not server.asked


def cached(folder: Path, name: str, file: str = "model.safetensors", snapshot: str = "0a") -> Path:
    place = folder / f"models--timm--{name}" / "snapshots" / snapshot / file
    place.parent.mkdir(parents=True)
    place.write_bytes(b"weights")
    return place


def test_vits_of_imagenet_are_found_by_name_and_others_are_not(caches):
    downloads, checkpoints = caches
    assert vits_on_disk() == ()
    assert not downloads.exists()
    base = cached(downloads, "vit_base_patch16_224.augreg2_in21k_ft_in1k")
    for name in (
        "vit_small_patch14_dinov2.lvd142m", "vit_base_patch16_clip_224.openai", "vit_base_patch16_224.augreg_in21k",
        "resnet50.a1_in1k", "swin_tiny_patch4_window7_224.ms_in1k", "vit_base_patch16_224.no_such_tag", "nonsense",
    ):  # fmt: skip
        cached(downloads, name)
    cached(downloads, "deit3_small_patch16_224.fb_in1k", file="config.json")  # without weights
    checkpoints.mkdir(parents=True)
    tiny = checkpoints / "deit_tiny_patch16_224-a1311bcf.pth"
    for file in (tiny, checkpoints / "resnet18-5c106cde.pth", checkpoints / "dino_deitsmall16_pretrain.pth"):
        file.write_bytes(b"weights")
    found = vits_on_disk()
    assert [(model.name, model.weights) for model in found] == [
        ("timm:deit_tiny_patch16_224", str(tiny)),
        ("timm:vit_base_patch16_224.augreg2_in21k_ft_in1k", str(base)),
    ]
    assert [model.alias for model in found] == ["deit_tiny_patch16_224", "vit_base_patch16_224.augreg2_in21k_ft_in1k"]


def test_a_link_whose_file_is_gone_is_no_weights(caches):
    gone = cached(caches[0], "deit_tiny_patch16_224.fb_in1k")
    gone.unlink()
    gone.symlink_to(gone.with_name("blob"))
    assert vits_on_disk() == ()
