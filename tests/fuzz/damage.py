"""Ways to damage a file: bytes, values of JSON, arrays of an .npz, headers of safetensors."""

import io
import json
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.kit.damage import VALUES, damage_bytes, places

Damage = Callable[[Path, random.Random], None]
_VALUES: tuple[Any, ...] = (
    *(value for value in VALUES if value not in ("MISSING!", "NaN!")),
    False,
    1,
    2,
    -(10**30),
    0.5,
    -0.0,
    float("nan"),
    float("inf"),
    " ",
    "3",
    "nan",
    "/tmp/pwned",
    "<script>",
    "[x](javascript:1)",
    "a\nb",
    "\x1b[31m",
    "\ud800",
    [[]],
    [None],
    ["x"],
    [1, 2, 3],
    list(range(2_000)),
    {"": None},
)
_TEXTS = (
    "x",
    "[" * 100_000,
    '{"a":' * 100_000,
    "\0" * 100_000,
    "null",
    "[]",
    "1e999",
    "NaN",
    '{"a": 1, "a": 2}',
)


def flip_head(path: Path, draw: random.Random) -> None:
    """Change some of the first bytes, which hold the headers."""
    content = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 2, 4))):
        content[draw.randrange(min(96, len(content)))] = draw.choice(
            (0, 1, 127, 128, 255, draw.randrange(256))
        )
    path.write_bytes(content)


def cut(path: Path, draw: random.Random) -> None:
    """Cut off the end, up to the entire file."""
    content = path.read_bytes()
    path.write_bytes(
        content[: draw.choice((0, 1, 7, 8, 9, draw.randrange(len(content)), len(content) - 1))]
    )


def replace(path: Path, draw: random.Random) -> None:
    """Replace it by text, deep JSON, zeros, a folder, or a link (to itself, nothing, a device)."""
    path.unlink()
    target = draw.choice((path.name, "/nowhere/at/all", "/dev/zero", None, *[""] * 4))
    if target is None:
        path.mkdir()
    elif target:
        path.symlink_to(target)
    else:
        path.write_text(draw.choice((*_TEXTS, "\ufeff{}")))


BYTES: tuple[Damage, ...] = (damage_bytes, damage_bytes, flip_head, flip_head, cut, cut, replace)


def change_json(value: Any, draw: random.Random) -> Any:
    """Damage one place of the value: replace, remove, double or rename it."""
    if not (all_places := list(places(value))):
        return draw.choice(_VALUES)
    holder, (*way, key) = value, draw.choice(all_places)
    for step in way:
        holder = holder[step]
    match draw.randrange(8):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[draw.choice(("", "x", "../x", "x" * 1000, "\n"))] = holder.pop(key)
        case 2 if isinstance(holder, list):
            holder.extend([holder[key]] * draw.choice((1, 3_000)))
        case _:
            holder[key] = draw.choice(_VALUES)
    return value


def json_file(path: Path, draw: random.Random) -> None:
    """Damage one to three places of a JSON file."""
    value = json.loads(path.read_text())
    for _ in range(draw.choice((1, 1, 2, 3))):
        value = change_json(value, draw)
    path.write_text(json.dumps(value), encoding="utf-8", errors="surrogatepass")


def safetensors_header(path: Path, draw: random.Random) -> None:
    """Damage the header of a safetensors file: its tensors or its metadata."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    metadata = header.get("__metadata__", {})
    if "vitlens" in metadata and draw.random() < 0.75:
        about = change_json(json.loads(metadata["vitlens"]), draw)
        metadata["vitlens"] = draw.choice((json.dumps(about),) * 9 + ("[" * 100_000,))
    else:
        header = change_json(header, draw)
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    size = draw.choice((len(text),) * 8 + (0, 2**40, 2**63))
    path.write_bytes(struct.pack("<Q", size) + text + content[8 + length :])


def state_dict(path: Path, draw: random.Random) -> None:
    """Write a .pth whose tensors, names or wrappers are not those of a state dict."""
    checkpoint = torch.load(path, weights_only=True)
    state: dict[Any, Any] = dict(checkpoint["state_dict"])
    key = draw.choice(sorted(state))
    odd: tuple[Any, ...] = (
        torch.tensor(1.0),
        torch.empty(0),
        torch.full_like(state[key], torch.nan, dtype=torch.float32),
        torch.ones(state[key].shape, dtype=torch.complex64),
        state[key].bool(),
        state[key].int(),
        state[key][None],
        None,
        1,
        "x",
        [],
        torch.empty(2**40, device="meta"),
        state[key].flatten()[::2].expand(1, -1),
    )
    match draw.randrange(7):
        case 0:
            del state[key]
        case 1:
            state[draw.choice((1, None, "", "x" * 1_000, "\n", ("a", "b")))] = state.pop(key)
        case 2:
            checkpoint["model"] = checkpoint
        case 3:
            checkpoint["state_dict"] = draw.choice((None, 1, [], {}, {"model": {}}, [state]))
        case _:
            state[key] = draw.choice(odd)
    if isinstance(checkpoint.get("state_dict"), dict) and checkpoint["state_dict"]:
        checkpoint["state_dict"] = state
    try:
        torch.save(checkpoint, path)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        path.write_bytes(b"PK\x03\x04")


def arrays(path: Path, draw: random.Random) -> None:
    """Write an .npz with other shapes, types or names, or headers of missing arrays."""
    with np.load(path, allow_pickle=False) as archive:
        held: dict[str, Any] = {name: archive[name] for name in archive.files}
    name = draw.choice(sorted(held))
    now = held.pop(name)
    types = ("float64", "int8", "complex64", "U3", "bool", "uint64", "S1", "float16")
    changes: tuple[Callable[[], Any], ...] = (
        lambda: draw.choice(
            (now[:0], now[:1], now[None], now.reshape(-1), np.array(1), np.zeros((0, 0)))
        ),
        lambda: now.astype(draw.choice(types)),
        lambda: np.full(now.shape, draw.choice((np.nan, np.inf, -1, 2**33, 2**62, 1e300))),
        lambda: np.full(now.shape, draw.choice((-1, 2**33, 2**62, 10**9)), dtype=np.int64),
        lambda: np.zeros(3, dtype=[("a", "i4"), ("b", "f8")]),
        lambda: np.array([None, {}], dtype=object),
        lambda: None,
    )
    lot = draw.randrange(9)
    if lot == 0:
        held[draw.choice(("x", "../../pwned", "", "a" * 300))] = now
    elif lot > 1:  # else it is missing
        held[name] = changes[lot - 2]()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for key, value in held.items():
            buffer = io.BytesIO()
            if value is None:  # 272 TiB
                header = {"descr": "|u1", "fortran_order": False, "shape": (2**48, 17)}
                np.lib.format.write_array_header_1_0(buffer, header)
                buffer.write(bytes(1000))
            else:
                np.save(buffer, value, allow_pickle=True)
            archive.writestr(f"{key}.npy", buffer.getvalue())
