"""What the shell offers when Tab is pressed; free of torch, so that it answers at once."""

from pathlib import Path

from vitlens.names import BUNDLED, EMBEDDED_DATA, PRESETS, STUDY_KINDS, TORCHVISION_DATA


def complete_model(incomplete: str) -> list[str]:
    """Presets, bundled models, the prefixes of the hubs, and the run folders below runs/."""
    folders = [str(config.parent) for config in Path("runs").glob("*/model.safetensors")]
    known = (*BUNDLED, *PRESETS, "timm:", "torchvision:", "open-clip:", *sorted(folders))
    return [name for name in known if name.startswith(incomplete)]


def complete_kind(incomplete: str) -> list[str]:
    """The kinds of study."""
    return [name for name in STUDY_KINDS if name.startswith(incomplete)]


def complete_data(incomplete: str) -> list[str]:
    """The embedded data, torchvision's sets, and the folders and .npz files here."""
    here = sorted(str(path) for path in Path().glob(f"{incomplete}*") if path.is_dir() or path.suffix == ".npz")
    return [name for name in (*EMBEDDED_DATA, *TORCHVISION_DATA) if name.startswith(incomplete)] + here
