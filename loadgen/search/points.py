"""The options of `loadgen sweep`, and its points: one option of the load takes one value after another.

Each run of a point is an ordinary run. Its directory is named after the value, and it has a seed of its own, so no two
send the same prompts. Nothing is started or written here. Annotations are evaluated, as in `config`.
"""

import dataclasses
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Self, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from cyclopts import Parameter

from backends.untrusted import without_secrets
from loadgen.config import (
    LOAD,
    MOST_REPEATS,
    OUTPUT,
    ClientOptions,
    Config,
    ConfigError,
    LaunchOptions,
    LoadOptions,
    ModelledOptions,
    OutputOptions,
    PlacementOptions,
    ServerOptions,
    flag,
)
from loadgen.option_types import Whole, names, option

Options = TypeVar("Options")

MOST_RUNS = 10_000
LISTED = (
    "workload", "requests", "duration", "input_tokens", "output_tokens", "arrival", "concurrency", "prefix", "sessions",
    "turns", "think_time", "first_tokens", "thinking_tokens", "subagents", "context_tokens", "trace", "trace_speed",
    "trace_limit", "trace_from", "warmup", "dataset", "batch_size",
)  # fmt: skip
NAMES = {"rates": "rate"}  # of an option in the names of directories, where it is another
UNITS = {
    "rate": "requests/s", "concurrency": "requests in flight", "duration": "s", "input-tokens": "tokens",
    "output-tokens": "tokens", "think-time": "s", "batch-size": "texts",
}  # fmt: skip
MOST_NAME = 80  # characters of a value in the name of a directory


def _shown(default: object, _: object) -> str:
    """In the help, in place of an empty list."""
    return str(default)


def _each(convert: Callable[[Any, Sequence[Any]], Any]) -> Callable[[Any, Sequence[Any]], tuple[Any, ...]]:
    """Converts a list as one value is converted, and says of a value what it would say of one."""
    return lambda kind, tokens: tuple(convert(kind, [token]) for token in tokens)


def _takes_lists(options: type[Options]) -> type[Options]:
    """Makes every option of LISTED one of several values; none is the option's own default. Applied before the class
    is made a dataclass."""
    types = get_type_hints(LoadOptions, include_extras=True)
    spelled = {"concurrency": ("--concurrency", "--concurrencies")}
    for name in LISTED:
        kind, *converters, described = get_args(types[name])
        if get_origin(kind) in (Union, UnionType):
            kind = Union[tuple(part for part in get_args(kind) if part is not NoneType)]  # noqa: UP007
        if get_origin(kind) is Annotated:
            kind, *converters = get_args(kind)
        default = getattr(LoadOptions, name)
        several = Parameter(
            consume_multiple=True,
            name=spelled.get(name),
            show_default=False if default is None else partial(_shown, default),
            converter=_each(converters[0].converter) if converters else None,
        )
        one: Any = kind
        options.__annotations__[name] = Annotated[tuple[one, ...], described, several]
        setattr(options, name, ())
    return options


@dataclass(frozen=True)
class Point:
    """One value of the option that varies. name: of its run's directory. load: the options of its run, but for seed and
    directory."""

    name: str
    value: str
    load: Config


@dataclass(frozen=True)
class PointRun:
    """One run of the sweep. name: of its directory, in the sweep's."""

    name: str
    point: Point
    seed: int

    def config(self, sweep: Path) -> Config:
        return dataclasses.replace(self.point.load, seed=self.seed, out=sweep / self.name)


@dataclass(frozen=True, kw_only=True)
@_takes_lists
class SweepOptions(
    ModelledOptions, LaunchOptions, PlacementOptions, OutputOptions, ClientOptions, LoadOptions, ServerOptions
):
    """All options of `loadgen sweep`: those of `run`, with lists in the load. They are checked as points are made."""

    rates: Annotated[
        tuple[float, ...],
        option(
            LOAD,
            "A point for each of these rates, in requests/s (of sessions: sessions/s). --arrival names the law alone: "
            "poisson (default), constant or gamma:CV.",
            consume_multiple=True,
            show_default=False,
        ),
    ] = ()
    repeat: Annotated[Whole, option(OUTPUT, "So many runs of each point, with seeds apart.")] = 1
    out: Annotated[Path | None, option(OUTPUT, "Directory to create for the sweep (default runs/ID).")] = None
    resume: Annotated[
        Path | None, option(OUTPUT, "Go on with the sweep in this directory; options are its own and may be left out.")
    ] = None
    dry_run: Annotated[bool, Parameter(show=False, negative=())] = False

    def __new__(cls, *_: object, **given: object) -> Self:
        """Keeps which options were given: at --resume also one that is typed as its default must agree."""
        options = object.__new__(cls)
        object.__setattr__(options, "typed", frozenset(given))
        return options

    typed = frozenset[str]()

    def points(self) -> list[Point]:
        """In the order of the list. Raises ConfigError before anything is started."""
        self._check()
        varied = self._varied()
        values = self._values(varied)
        name = NAMES.get(varied, varied.replace("_", "-"))
        points = [Point(f"{name}-{_file_name(text(each))}", text(each), self._at(varied, each)) for each in values]
        given: dict[str, Point] = {}
        for point in points:
            if point.name in given:
                raise ConfigError(f"{flag_of(varied)} has {point.value} twice; give each value once, or --repeat.")
            given[point.name] = point
        return points

    def runs(self) -> list[PointRun]:
        """Every run of every point, in the order of the list, with a seed each. Raises ConfigError."""
        points = self.points()
        if len(points) * self.repeat > MOST_RUNS:
            raise ConfigError(
                f"the sweep has {len(points) * self.repeat} runs; it may have {MOST_RUNS}, or be several."
            )
        made = [
            (f"{point.name}-run{number}" if self.repeat > 1 else point.name, point)
            for point in points
            for number in range(1, self.repeat + 1)
        ]
        return [PointRun(name, point, self.seed + place) for place, (name, point) in enumerate(made)]

    def order(self, runs: list[PointRun]) -> list[PointRun]:
        """The runs as they follow each other: every point once, shuffled by seed, then every point again. So a server
        that drifts, or a kill, meets no end of the list more than the other."""
        rng = random.Random(self.seed)
        rounds = [runs[start :: self.repeat] for start in range(self.repeat)]
        for each in rounds:
            rng.shuffle(each)
        return [run for each in rounds for run in each]

    @property
    def varies(self) -> str:
        """The option that varies, as directories are named after it."""
        varied = self._varied()
        return NAMES.get(varied, varied.replace("_", "-"))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for sweep.json; all but where the sweep lies."""
        plain = dataclasses.asdict(self)
        del plain["out"], plain["resume"], plain["dry_run"]
        return {name: _plain(value) for name, value in plain.items()}

    @classmethod
    def of_dict(cls, plain: Mapping[str, Any]) -> Self:
        """As `as_dict` gave it. Raises msgspec.ValidationError."""
        return msgspec.convert(plain, cls, dec_hook=lambda kind, value: kind(value))

    def differing(self, own: Self) -> list[str]:
        """The options that were typed and say otherwise than the sweep's own."""
        mine, theirs = without_secrets(self.as_dict()), own.as_dict()
        return [
            flag_of(name)
            for name in names(type(self))
            if name in self.typed & mine.keys() and mine[name] != theirs[name]
        ]

    def _check(self) -> None:
        for name in ("rates", *LISTED):
            if name in self.typed and getattr(self, name) == ():
                raise ConfigError(f"{flag_of(name)} is an empty list; give it at least one value.")
        if self.dry_run:
            raise ConfigError("--dry-run is of `loadgen run`, for one point; a sweep starts its server.")
        if not 1 <= self.repeat <= MOST_REPEATS:
            raise ConfigError(f"--repeat is {self.repeat}; it must be at least 1 and at most {MOST_REPEATS}.")
        for rate in self.rates:
            if not 0 < rate < math.inf:
                raise ConfigError(f"--rates has {rate:g}; a rate must be above zero, in requests per second.")
        if self.rates and self.concurrency:
            raise ConfigError("--rates is an open loop and --concurrencies a closed one; give one of them.")
        if self.rates and self.trace:
            raise ConfigError("--trace decides when requests are sent; leave --rates out, or vary --trace-speed 1 2 4.")
        again = self.repeat > 1 or len(self._values("dataset")) < 2
        if self.dataset and not self.repeat_dataset and again and len(self._values(self._varied())) * self.repeat > 1:
            raise ConfigError(
                "each run of the sweep sends the prompts of --dataset again, to a server that may have kept them; add "
                "--repeat-dataset if it is to."
            )

    def _values(self, name: str) -> tuple[Any, ...]:
        """The values of an option that may vary."""
        values: tuple[Any, ...] = getattr(self, name)
        return values

    def _varied(self) -> str:
        """The option with several values; of one point alone, the rate or the number in flight. Raises ConfigError."""
        several = [name for name in ("rates", *LISTED) if len(self._values(name)) > 1]
        if len(several) > 1:
            two = " and ".join(map(flag_of, several[:2]))
            raise ConfigError(f"{two} are both lists, and a sweep varies one option; give one of them one value.")
        chosen = several or [name for name in ("rates", "concurrency") if self._values(name)]
        if not chosen:
            raise ConfigError(
                "a sweep varies one option of the load; give --rates 2 4 8, --concurrencies 1 8 64, or another with "
                "several values."
            )
        return chosen[0]

    def _at(self, varied: str, value: Any) -> Config:
        """The options of a run at that value. Raises ConfigError."""
        given = {name: getattr(self, name) for name in names(Config) if name not in LISTED}
        for name in LISTED:
            values = self._values(name)
            if values:
                given[name] = value if name == varied else values[0]
        rate = value if varied == "rates" else self.rates[0] if self.rates else None
        if rate is not None:
            given["arrival"] = _arrival(given.get("arrival", "poisson"), rate)
        config = Config(**given | {"repeat": 1})
        if config.stop_when_overloaded is None and config.load.keeps_arriving:
            return dataclasses.replace(config, stop_when_overloaded=True)
        return config


def _arrival(law: str, rate: float) -> str:
    """The arrivals of that rate by a law that is named without one. Raises ConfigError."""
    kind, _, variation = law.partition(":")
    if law in ("poisson", "constant"):
        return f"{law}:{text(rate)}"
    if kind == "gamma" and variation and ":" not in variation:
        return f"gamma:{text(rate)}:{variation}"
    if kind in ("burst", "ramp", "steps"):
        raise ConfigError(f"--arrival {kind} has no one rate that --rates could give; leave one of them out.")
    raise ConfigError(
        f"--arrival is '{law}', and --rates gives the rates; name a law without one: poisson, constant or gamma:CV."
    )


def text(value: object) -> str:
    """As it would be typed: 5 of 5.0, and no exponent, which arrivals do not take."""
    if isinstance(value, float) and math.isfinite(value):
        plain = format(Decimal(repr(value)), "f")
        return plain.rstrip("0").rstrip(".") if "." in plain else plain
    return str(value)


def _file_name(value: str) -> str:
    """A value as part of the name of a directory: of a long one, as of a path, the end."""
    return re.sub(r"[^a-zA-Z0-9_.=+]+", "-", value)[-MOST_NAME:].lstrip("-")


def _plain(value: object) -> object:
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def flag_of(name: str) -> str:
    """As it is typed."""
    if name == "concurrency":
        return "--concurrencies"
    return flag(name) if hasattr(Config, name) else "--" + name.replace("_", "-")
