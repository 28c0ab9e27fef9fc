"""Which model is meant, and where it lies: the catalog's names, Hugging Face ids, directories, the hub's local cache.

Only looks at files; nothing is downloaded. The server downloads what it needs, or refuses.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from backends import catalog
from backends.architectures.fields import MalformedConfig, UnknownModel
from backends.decoder import ModelSpec
from backends.foreign_files import read_named
from backends.untrusted import UNDECODABLE, nearest, reason
from loadgen.config import ConfigError

_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
GGUF = ".gguf"  # of a file that is a whole model, as llama.cpp serves it
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


@dataclass(frozen=True)
class ServedModel:
    """`name` is what requests call it. `hf_id`: None for a directory. `directory`: where it lies on this host, if it
    does (weights included unless `has_weights` is false); a GGUF file is that itself. `spec`: None where it is not
    known how large it is, and `unknown` says why, in a clause. `max_position`: tokens of the longest sequence that it
    was made for, where that is known. `config`: its config.json, where that was read. `flaw`: why that describes no
    model at all, a clause; empty where it does."""

    name: str
    hf_id: str | None
    directory: Path | None
    spec: ModelSpec | None
    has_weights: bool = False
    max_position: int | None = None
    unknown: str = ""
    config: Mapping[str, object] = dataclasses.field(default_factory=dict)
    flaw: str = ""

    def described(self) -> ModelSpec:
        """Raises ConfigError where it is not known how large it is."""
        if self.spec is None:
            raise ConfigError(f"the size of '{self.name}' is not known here: {self.unknown}.")
        return self.spec

    def local(self, *, dummy_weights: bool) -> Path | None:
        """The directory to serve it from; None: it has to come from the hub, since what is here lacks the weights."""
        return self.directory if self.has_weights or dummy_weights or self.hf_id is None else None


def user_cache() -> Path:
    """Where programs keep what they can make again."""
    return _place("~/.cache", "XDG_CACHE_HOME")


def hf_home() -> Path:
    """Where the Hugging Face libraries keep their files on this host."""
    return _place(user_cache() / "huggingface", "HF_HOME")


def hub_cache() -> Path:
    """Where they keep models."""
    return _place(hf_home() / "hub", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")


def _place(usual: Path | str, *variables: str) -> Path:
    """What the first of the variables that is set says, with ~ and variables in it, as those libraries take it."""
    named = next((value for name in variables if (value := os.environ.get(name))), str(usual))
    return Path(os.path.expandvars(os.path.expanduser(named))).absolute()  # noqa: PTH111  Path's own may raise


def hf_token() -> str | None:
    """The hub's token, from the environment or a login. Never to be written or logged."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if token := os.environ.get(name, "").strip():
            return token
    try:
        return _place(hf_home() / "token", "HF_TOKEN_PATH").read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def lend_token() -> None:
    """Puts that token where a launcher finds it: into our environment, unless HF_TOKEN is there."""
    if not os.environ.get("HF_TOKEN") and (token := hf_token()):
        os.environ["HF_TOKEN"] = token


def find(name: str) -> ServedModel:
    """The model of that name, id or path; a server may have sent it. Raises ConfigError for what is none of them."""
    path = os.path.expanduser(name)  # noqa: PTH111  Path's own may raise
    if os.path.isdir(path):  # noqa: PTH112  Path's own raises for a name that no file can have
        return _directory(Path(path))
    if os.path.isfile(path) and path.endswith(GGUF):  # noqa: PTH113  as above
        unknown = "it is a GGUF file, of which nothing is read here"
        return ServedModel(Path(path).stem, None, Path(path).resolve(), None, has_weights=True, unknown=unknown)
    if path.endswith(GGUF):
        raise ConfigError(f"there is no file '{name}'; give the path of a GGUF file that is there.")
    spec = catalog.find(name)
    if spec is not None:
        return _from_hub(spec.name, spec.hf_id, spec)
    if name.startswith(("/", "./", "../", "~")):
        raise ConfigError(f"there is no directory '{name}'; give a model's directory, its Hugging Face id, or a name.")
    if name.count("/") == 1:
        return _from_hub(name, name, None)
    known = catalog.names()
    near = nearest(name, known)
    others = f"known are {', '.join(known)}, any Hugging Face id (org/name), or a directory."
    raise ConfigError(f"unknown model '{name}'; " + (f"did you mean '{near}'?" if near else others))


def spec(name: str) -> ModelSpec | None:
    """The model of that name, id or path where it is known how large it is; servers may call theirs anything."""
    try:
        return find(name).spec
    except ConfigError:
        return None


def names(name: str) -> set[str]:
    """What a server may call the model that a user calls so."""
    try:
        model = find(name)
    except ConfigError:
        return set()
    return {called for called in (model.name, model.hf_id) if called is not None}


def _directory(path: Path) -> ServedModel:
    """It is called as the user calls it; where it lies is where links lead to."""
    name, path = Path(os.path.abspath(path)).name, path.resolve()  # noqa: PTH100  ".." has a name, links keep theirs
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} holds no config.json; name the directory of a model.")
    config, flaw = _read_config(path)
    spec, unknown, flaw = _spec(name, config, flaw)
    spec = None if spec is None else dataclasses.replace(spec, hf_id=str(path))
    return ServedModel(name, None, path, spec, _has_weights(path), _max_position(config), unknown, config, flaw)


def _from_hub(name: str, hf_id: str, spec: ModelSpec | None) -> ServedModel:
    directory = _snapshot(hf_id)
    limit = spec.max_position if spec is not None else None
    if directory is None:
        advice = f"its config.json is not on this machine; `hf download {hf_id} config.json`, or name a directory"
        return ServedModel(name, hf_id, None, spec, max_position=limit, unknown="" if spec else advice)
    config, flaw = _read_config(directory)
    unknown = ""
    if spec is None:
        spec, unknown, flaw = _spec(hf_id, config, flaw)
    weights, limit = _has_weights(directory), limit or _max_position(config)
    return ServedModel(name, hf_id, directory, spec, weights, limit, unknown, config, flaw)


def _spec(name: str, config: Mapping[str, object], flaw: str) -> tuple[ModelSpec | None, str, str]:
    """The model that a config.json describes; why there is none; what is wrong with it, if anything is."""
    if not flaw and _type(config) is None:
        flaw = "model_type is missing"  # here it then is a Llama, to those who load it nothing
    try:
        return catalog.from_config(name, config), "", flaw
    except MalformedConfig as malformed:
        return None, f"in its config.json {malformed}", flaw or str(malformed)
    except UnknownModel as unknown:
        return None, f"in its config.json {unknown}", flaw


def _snapshot(hf_id: str) -> Path | None:
    """The directory of the cached main revision, if any; where no revision is called main, of the only one."""
    repository = hub_cache() / f"models--{hf_id.replace('/', '--')}"
    if not os.path.isdir(repository):  # noqa: PTH112  as above
        return None
    try:
        revision = (repository / "refs/main").read_text().strip()
    except (OSError, UnicodeDecodeError):
        snapshots = [path.name for path in repository.glob("snapshots/*")]
        revision = snapshots[0] if len(snapshots) == 1 else ""
    directory = repository / "snapshots" / revision
    return directory if revision and (directory / "config.json").is_file() else None


def _has_weights(directory: Path) -> bool:
    """Whether all files of the weights are there, as far as an index tells."""
    indices = list(directory.glob("*.index.json"))
    if not indices:
        return any(next(directory.glob(pattern), None) is not None for pattern in _WEIGHTS)
    return any(map(_is_complete, indices))  # the same weights may be there in another format, in part


class _Index(msgspec.Struct):
    """What a *.index.json of the weights has for us: which file holds a parameter."""

    weight_map: dict[str, str]


def _is_complete(index: Path) -> bool:
    try:
        names = set(msgspec.json.decode(read_named(index), type=_Index).weight_map.values())
        return all((index.parent / name).is_file() for name in names)
    except (OSError, *UNDECODABLE):
        return False


def _read_config(directory: Path) -> tuple[dict[str, object], str]:
    """Its config.json; empty for one that cannot be read, with the reason."""
    try:
        return msgspec.json.decode(read_named(directory / "config.json"), type=dict[str, object]), ""
    except OSError as error:
        return {}, f"it cannot be read ({error.strerror or error})"
    except UNDECODABLE as error:
        return {}, f"it is no JSON object ({reason(error)})"


def _type(config: Mapping[str, object]) -> str | None:
    name = config.get("model_type")
    return name if isinstance(name, str) else None


def _max_position(config: Mapping[str, object]) -> int | None:
    """The longest sequence that a config.json names, whatever the architecture calls it."""
    text = config.get("text_config")  # of a model that takes more than text
    places = (config, text) if isinstance(text, dict) else (config,)
    limits = [limit for place in places for name in _LENGTHS if isinstance(limit := place.get(name), int)]
    return min((limit for limit in limits if limit > 0), default=None)
