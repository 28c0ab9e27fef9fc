"""Which model is meant, and where it lies: the catalog's names, Hugging Face ids, directories, the hub's local cache.

Only looks at files; nothing is downloaded. The server downloads what it needs, or refuses.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from backends import catalog
from backends.catalog import ModelSpec
from loadgen.config import ConfigError

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


@dataclass(frozen=True)
class Model:
    """`name` is what requests call it. `hf_id`: None for a directory. `directory`: where it lies on this host, if it
    does (weights included unless `has_weights` is false). `spec`: None for an architecture that is not known."""

    name: str
    hf_id: str | None
    directory: Path | None
    spec: ModelSpec | None
    has_weights: bool = False

    @property
    def max_position(self) -> int | None:
        return self.spec.max_position if self.spec is not None else None


def hf_home() -> Path:
    """Where the Hugging Face libraries keep their files on this host."""
    return Path(os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface").absolute()


def hf_token_known() -> bool:
    """Whether the hub would be asked with a token: from the environment or a login."""
    stored = os.environ.get("HF_TOKEN_PATH") or hf_home() / "token"
    return bool(os.environ.get("HF_TOKEN")) or Path(stored).is_file()


def find(name: str) -> Model:
    """The model of that name, id or path. Raises ConfigError for what is none of them."""
    path = Path(name).expanduser()
    if path.is_dir():
        return _directory(path.absolute())
    spec = catalog.find(name)
    if spec is not None:
        return _from_hub(spec.name, spec.hf_id, spec)
    if name.startswith(("/", "./", "../", "~")):
        raise ConfigError(f"there is no directory '{name}'; give a model's directory, its Hugging Face id, or a name.")
    if name.count("/") == 1:
        return _from_hub(name, name, None)
    known = [known for spec in catalog.MODELS for known in (*spec.aliases, spec.name)]
    near = difflib.get_close_matches(name, known, n=1)
    others = f"known are {', '.join(known)}, any Hugging Face id (org/name), or a directory."
    raise ConfigError(f"unknown model '{name}'; " + (f"did you mean '{near[0]}'?" if near else others))


def _directory(path: Path) -> Model:
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} holds no config.json; name the directory of a model.")
    return Model(path.name, None, path, _read_spec(path, path.name), _has_weights(path))


def _from_hub(name: str, hf_id: str, spec: ModelSpec | None) -> Model:
    directory = _snapshot(hf_id)
    if directory is None:
        return Model(name, hf_id, None, spec)
    return Model(name, hf_id, directory, spec or _read_spec(directory, hf_id), _has_weights(directory))


def _snapshot(hf_id: str) -> Path | None:
    """The directory of the cached main revision, if any."""
    hub = Path(os.environ.get("HF_HUB_CACHE") or hf_home() / "hub").absolute()
    repository = hub / f"models--{hf_id.replace('/', '--')}"
    try:
        revision = (repository / "refs/main").read_text().strip()
    except OSError:
        return None
    directory = repository / "snapshots" / revision
    return directory if revision and (directory / "config.json").is_file() else None


def _has_weights(directory: Path) -> bool:
    """Whether all files of the weights are there, as far as an index tells."""
    for index in directory.glob("*.index.json"):
        try:
            names = set(msgspec.json.decode(index.read_bytes())["weight_map"].values())
        except (OSError, msgspec.DecodeError, KeyError, TypeError, AttributeError):
            continue
        return all((directory / name).is_file() for name in names)
    return any(next(directory.glob(pattern), None) is not None for pattern in _WEIGHTS)


def _read_spec(directory: Path, name: str) -> ModelSpec | None:
    try:
        config = msgspec.json.decode((directory / "config.json").read_bytes(), type=dict)
    except (OSError, msgspec.DecodeError):
        return None
    return catalog.from_config(name, config)
