"""`loadgen calibrate`: from real runs to a hardware profile, by fitting only what those runs can tell.

Operators are pinned: they were measured alone. At TP 1 the software's own times are fitted: the pace of the host's
CPU, which launches steps and hands tokens out; taking a request and its prompt in; the way between processes. Of a
server whose launches are not modelled it is each step, each row and each token handed out instead of that pace. At TP
> 1 reductions are fitted, on top of a profile whose software times are known. The search begins at the profile that
ships for the server, or at --base. A parameter whose 95 % interval spans more than a factor of `SPAN_MAX` is not
identified: it keeps the value of that profile, and the command prints so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from cyclopts import Group, Parameter

from backends import exit_codes
from backends.exit_codes import UserError, check_least, lacking
from loadgen import terminal
from loadgen.config import ConfigError, DtypeOption, KvCacheDtype, LaunchOptions, QuantizationName
from loadgen.document.content import Table
from loadgen.document.terminal import rows
from loadgen.option_types import Whole, names, option
from loadgen.rundir.emulation import HeldOut
from servers.calibrate.live import before_and_after, series
from servers.calibrate.runs import NotARunError, Observed, RunFacts, read
from servers.simulator.build import Interval, ServerProfile, profiles, read_profile
from servers.simulator.engine import FrontEnd

Floats = npt.NDArray[np.float64]
QUANTILES = np.linspace(0.02, 0.98, 25)
STEP = 0.1  # of a logarithm, to each side, for derivatives
TOLERANCE = 1e-4  # of the cost and of the values: the search ends where a step changes less
SCALE = 0.02  # residuals are shares of a run's mean; beyond two percent a run counts linearly
DRAWS = 200
SPAN_MAX = 30.0
LEAST_INFLUENCE = 1e-3  # of the first parameter's: what moves less, beside those that move more, cannot be told apart
# What is fitted at TP 1, and about how long each takes: no search begins at less than a hundredth of that
TIMES = {
    "step_us": 200.0, "row_us": 2.0, "prefill_token_us": 0.3, "request_us": 450.0, "token_us": 20.0,
    "latency_us": 1500.0, "launch_eager_layer_us": 500.0,
}  # fmt: skip
REACH = 3.0  # as a factor from where it begins: what else a run holds must not be explained by absurd times
# What a server does beside its GPU's operators differs more from server to server and host to host.
FAR = {"request_us": 10.0, "prefill_token_us": 10.0, "step_us": 10.0, "token_us": 6.0}
# Of one request at rest, which runs under load tell too little of: as in the profile that ships for that server
AT_REST = (
    "launch_us", "launch_row_us", "launch_layer_us", "launch_spread", "graph_tokens",
    "prompt_token_us", "first_token_us", "handover_us", "output_us", "behind_us",
)  # fmt: skip
OTHER_ATTENTION = 1.5  # where the search for the time of kernels other than FlashAttention 3 begins
DEFAULT = "vllm@v1"
EAGER = "launch_eager_layer_us"
# What the host's CPU does as much faster or slower as that, where launches are a part of the model; and what is then
# held at what was measured: both are hard to tell from its pace, and explain one load at the cost of the next
PACED = ("launch_us", "launch_row_us", "launch_layer_us", "token_us", "output_us")
HELD = ("step_us", "row_us", "token_us")
FRONT = frozenset(FrontEnd.__struct_fields__)
FIT = Group("The fit", sort_key=1)
FACTS = Group("The server, where the runs do not tell", sort_key=2)
LINK = {"reduce_ratio": 1.0, "reduce_us": 5.0}


class CalibrationError(UserError):
    """Runs that do not suffice for a fit. One sentence."""


def calibrate(observed: Sequence[Observed], base: ServerProfile | None, log: Callable[[str], None]) -> ServerProfile:
    """The profile of one server's software on one kind of GPU. Raises CalibrationError."""
    if (why := lacking("scipy")) is not None:
        raise CalibrationError(f"{why}.")
    schedulers = {run.setup.scheduler for run in observed}
    cards = {run.setup.gpu for run in observed}
    if len(schedulers) > 1:
        raise CalibrationError(
            f"these runs are of several servers ({', '.join(sorted(schedulers))}); fit one at a time."
        )
    if len(cards) > 1:
        raise CalibrationError(f"these runs are on several GPUs ({', '.join(sorted(cards))}); fit one at a time.")
    single = [run for run in observed if run.setup.tp == 1]
    joined = [run for run in observed if run.setup.tp != 1]
    scheduler = schedulers.pop()
    if base is None and not single:  # a reduction cannot be told from the software's own times
        base = profiles()[scheduler]
        log(
            "all runs have several GPUs: times that they cannot tell are those of the built-in profile; to fit those "
            "times, add a run at TP 1, or name the profile of such a run with --base."
        )
    profile = msgspec.structs.replace(
        base or _beginning(scheduler),
        gpu=cards.pop(),
        fitted_on=tuple(run.name for run in observed),
        held_out=(),
    )
    if single:
        names = _identifiable(single, _values(profile)[EAGER] > 0, log)
        if not profile.scheduler.startswith("vllm"):  # whose attention is that of the operators' tables
            names.append("attention_ratio")
        start = _values(profile)
        if start["attention_ratio"] == 1.0:  # nothing is known
            start["attention_ratio"] = OTHER_ATTENTION
        profile = _fit(single, profile, {name: max(start[name], TIMES.get(name, 1.0) / 100) for name in names}, log)
    if joined:
        ways = {run.emulated.facts.topology for run in joined}
        if len(ways) > 1:
            raise CalibrationError(f"the GPUs are joined by {' and '.join(sorted(ways))}; fit one at a time.")
        start = LINK
        if not single and (launch_us := _values(profile)[EAGER]):  # runs at TP 1 would have fitted launches already
            start = LINK | {EAGER: launch_us}
        profile = _fit(joined, msgspec.structs.replace(profile, reductions=ways.pop()), start, log)
    return profile


def _beginning(scheduler: str) -> ServerProfile:
    """The times of the server's own profile that ships, without those of reductions."""
    shipped = _values(profiles()[scheduler])
    return with_values(ServerProfile(scheduler=scheduler), {name: shipped[name] for name in (*AT_REST, *TIMES)})


def _identifiable(single: Sequence[Observed], launched: bool, log: Callable[[str], None]) -> list[str]:
    """What runs at TP 1 can tell apart. launched: the time to launch a step is a part of the model."""
    names = [name for name in TIMES if name not in (HELD if launched else (EAGER,))]
    crowded = any(_in_flight(run) > 100 for run in single)
    sparse = any(_in_flight(run) < 40 for run in single)
    for shown, hidden, why in (
        (crowded, ("row_us", "request_us", "prefill_token_us"), "no run has 100 requests at once; add a burst"),
        (sparse, ("step_us", "latency_us", EAGER), "all runs are crowded; add one with few requests at once"),
    ):
        if not shown:
            log(f"not identified: {', '.join(name for name in hidden if name in names)} ({why}).")
            names = [name for name in names if name not in hidden]
    return names


def _in_flight(run: Observed) -> float:
    """Requests under way on average (Little's law)."""
    return float(run.e2el_s.sum() / (run.end_s.max() - run.send_s.min()))


def _values(profile: ServerProfile) -> dict[str, float]:
    return {**msgspec.to_builtins(profile.overheads), **msgspec.to_builtins(profile.front)}


def with_values(profile: ServerProfile, values: dict[str, float]) -> ServerProfile:
    """The pace of a host's CPU is one: what it launches and hands out is as much faster or slower as launches kernel by
    kernel."""
    before = _values(profile)
    if EAGER in values and before[EAGER]:
        values = {name: values[EAGER] / before[EAGER] * before[name] for name in PACED} | values
    front = {name: value for name, value in values.items() if name in FRONT}
    own = {name: value for name, value in values.items() if name not in FRONT}
    return msgspec.structs.replace(
        profile,
        front=msgspec.structs.replace(profile.front, **front),
        overheads=msgspec.structs.replace(profile.overheads, **own),
    )


def _fit(
    observed: Sequence[Observed], profile: ServerProfile, start: dict[str, float], log: Callable[[str], None]
) -> ServerProfile:
    names = list(start)
    real = [(run, np.quantile(run.ttft_s, QUANTILES), np.quantile(run.e2el_s, QUANTILES)) for run in observed]

    def residuals(values: Floats) -> Floats:
        tried = with_values(profile, dict(zip(names, values.tolist(), strict=True)))
        parts = []
        for run, ttft, e2el in real:
            predicted = run.predict(tried)
            parts.append((np.quantile(predicted.ttft_s, QUANTILES) - ttft) / run.ttft_s.mean())
            parts.append((np.quantile(predicted.e2el_s, QUANTILES) - e2el) / run.e2el_s.mean())
        return np.concatenate(parts)

    reach = np.array([FAR.get(name, REACH) for name in names])
    values = _least_squares(residuals, np.array(list(start.values())), reach)
    intervals, vague = _identified(names, values, _jacobian(residuals, values), _moves(real))
    for name, why in vague.items():
        log(f"not identified: {name} stays {_values(profile)[name]:.3g} ({why}).")
    if not intervals:
        raise CalibrationError(f"these runs do not tell {', '.join(names)}; add runs of another kind of load.")
    if vague:
        return _fit(observed, profile, {name: start[name] for name in names if name in intervals}, log)
    for name, value, most in zip(names, values.tolist(), reach, strict=True):
        edge = max(value / start[name], start[name] / value) > 0.99 * most
        log(
            f"{name} = {value:.3g}, 95 % interval {intervals[name].low:.3g} to {intervals[name].high:.3g}"
            + (f", at the limit of the search ({most:g} times from {start[name]:.3g})" if edge else "")
        )
    fitted = with_values(profile, dict(zip(names, values.tolist(), strict=True)))
    return msgspec.structs.replace(fitted, intervals={**profile.intervals, **intervals})


def _least_squares(residuals: Callable[[Floats], Floats], start: Floats, reach: Floats) -> Floats:
    """The values that make `residuals` small, none farther from its start than by its factor of `reach`.

    What is fitted is positive and spans orders of magnitude: the search is in logarithms."""
    from scipy.optimize import least_squares  # takes longer to load than most commands to run

    logs = np.log(start)
    fitted = least_squares(
        lambda at: residuals(np.exp(at)), logs, lambda at: _jacobian(residuals, np.exp(at)),
        bounds=(logs - np.log(reach), logs + np.log(reach)), x_scale="jac", loss="soft_l1", f_scale=SCALE,
        ftol=TOLERANCE, xtol=TOLERANCE,
    )  # fmt: skip
    values: Floats = np.exp(fitted.x)
    return values


def _jacobian(residuals: Callable[[Floats], Floats], values: Floats) -> Floats:
    """(residuals, values): what each of them moves by the logarithm of each value. Residuals come from simulations and
    jump a little: the difference is taken over a wide step, to both sides."""
    factors = np.exp(STEP * np.eye(len(values)))
    moved = [residuals(values * factor) - residuals(values / factor) for factor in factors]
    return np.stack(moved, axis=1) / (2 * STEP)


def _identified(
    names: Sequence[str], values: Floats, jacobian: Floats, moves: Floats
) -> tuple[dict[str, Interval], dict[str, str]]:
    """The intervals of the values that the runs identify, and why the others are vague: the value that moves most is
    kept, and then those that are still identified beside it."""
    kept: list[int] = []
    intervals: dict[str, Interval] = {}
    vague: dict[str, str] = {}
    for at, influence in by_influence(jacobian):
        if influence < LEAST_INFLUENCE:
            vague[names[at]] = "it moves nothing that others do not"
            continue
        with_it = [*kept, at]
        spans = _intervals(jacobian[:, with_it], moves, values[with_it])
        tried = {names[one]: interval for one, interval in zip(with_it, spans, strict=True)}
        vaguest, span = max(tried.items(), key=lambda item: item[1].high / item[1].low)
        if span.high <= SPAN_MAX * span.low:
            kept, intervals = with_it, tried
        else:
            whose = "" if vaguest == names[at] else f" of {vaguest}, beside it"
            vague[names[at]] = f"95 % of draws{whose}: {span.low:.3g} to {span.high:.3g}"
    return intervals, vague


def by_influence(jacobian: Floats) -> list[tuple[int, float]]:
    """The values by what each moves beyond what those before it can (as QR with pivots takes columns), and how much
    that is as a share of what the first moves."""
    rest, left = jacobian.copy(), list(range(jacobian.shape[1]))
    most = max(1e-12, float(np.linalg.norm(rest, axis=0).max()))
    order = []
    while left:
        at = max(left, key=lambda column: float(np.linalg.norm(rest[:, column])))
        left.remove(at)
        length = float(np.linalg.norm(rest[:, at]))
        order.append((at, length / most))
        along = rest[:, at] / max(length, 1e-12)
        rest -= np.outer(along, along @ rest)
    return order


def _moves(real: Sequence[tuple[Observed, Floats, Floats]]) -> Floats:
    """(draws, residuals): how far the real quantiles, of ttft and e2el, move where requests are drawn again
    (bootstrap)."""
    rng = np.random.default_rng(0)
    moves = []
    for _ in range(DRAWS):
        parts = []
        for run, ttft, e2el in real:
            rows = rng.integers(0, len(run.send_s), len(run.send_s))
            parts += [
                (np.quantile(sample[rows], QUANTILES) - quantiles) / sample.mean()
                for sample, quantiles in ((run.ttft_s, ttft), (run.e2el_s, e2el))
            ]
        moves.append(np.concatenate(parts))
    return np.array(moves)


def _intervals(jacobian: Floats, moves: Floats, values: Floats) -> list[Interval]:
    """95 % of where the values go when one Gauss-Newton step from the fit, linear in their logarithms, follows each of
    the moves."""
    logs = np.log(values) + moves @ np.linalg.pinv(jacobian, rcond=1e-6).T
    low, high = np.quantile(logs, (0.025, 0.975), axis=0)
    pairs = zip(np.exp(np.clip(low, -30, 30)), np.exp(np.clip(high, -30, 30)), strict=True)
    return [Interval(low=float(a), high=float(b)) for a, b in pairs]


def _check(runs: Sequence[Observed], aside: Sequence[Observed]) -> None:
    """A run may be fitted to once, and not judge the fit to itself. Raises CalibrationError."""
    seen: list[Observed] = []
    for run in (*runs, *aside):
        for other in seen:
            if np.array_equal(run.end_s, other.end_s):
                raise CalibrationError(f"{run.name} and {other.name} are the same records; give each once.")
        seen.append(run)
    strangers = [run for run in aside if run.setup.scheduler != runs[0].setup.scheduler]
    if strangers:
        raise CalibrationError(
            f"{strangers[0].name} is of {strangers[0].setup.scheduler} and cannot judge a fit of "
            f"{runs[0].setup.scheduler}."
        )


def judged(profile: ServerProfile, observed: Sequence[Observed]) -> ServerProfile:
    """The profile with its errors on runs that it was not fitted to."""
    return msgspec.structs.replace(profile, held_out=tuple(run.predict(profile).error(run) for run in observed))


def better(before: ServerProfile, fitted: ServerProfile) -> ServerProfile:
    """Whichever predicts runs better that it was not fitted to, both judged: a host that is like the one of the
    profile before leaves nothing to fit but noise, which the next load would pay for."""
    errors = {one.run: one.e2el_w1 for one in fitted.held_out}
    same = {one.run: one.e2el_w1 for one in before.held_out if one.run in errors}
    if errors and sum(errors.values()) < sum(same.values()):
        return fitted
    return msgspec.structs.replace(before, gpu=fitted.gpu, fitted_on=(), intervals={})


def leave_one_out(observed: Sequence[Observed], base: ServerProfile | None) -> tuple[HeldOut, ...]:
    """Each run predicted by a fit to the others, where those can be fitted."""
    errors = []
    for left_out in observed:
        others = [run for run in observed if run is not left_out]
        try:
            profile = calibrate(others, base, lambda _: None)
        except CalibrationError:
            continue
        errors.append(left_out.predict(profile).error(left_out))
    return tuple(errors)


def table(errors: Sequence[HeldOut]) -> str:
    """For people."""
    heads = ["run not fitted to", "makespan", "e2el MAPE", "e2el W1", "ttft W1", "tpot W1"]
    errors_of = ((one, (one.e2el_mape, one.e2el_w1, one.ttft_w1, one.tpot_w1)) for one in errors)
    cells = [[one.run, f"{one.makespan:+.1%}", *(f"{off:.1%}" for off in offs)] for one, offs in errors_of]
    return "\n".join(rows(Table(heads, cells)))


def write(profile: ServerProfile, out: Path) -> None:
    """Raises CalibrationError."""
    try:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
    except OSError as error:
        raise CalibrationError(f"cannot write {out}: {error.strerror or error}.") from None


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """What is known of the server where the runs do not tell."""

    gpu: Annotated[str | None, option(FACTS, "On which GPU.")] = None
    model: Annotated[str | None, option(FACTS, "Of which model: name, id, or directory.")] = None
    tp: Annotated[Whole | None, option(FACTS, "Tensor parallel size.")] = None
    quantization: Annotated[QuantizationName | None, option(FACTS, "Quantized weights.")] = None
    kv_cache_dtype: Annotated[KvCacheDtype | None, option(FACTS, "Number format of the KV cache.")] = None
    kv_tokens: Annotated[Whole | None, option(FACTS, "Tokens that the KV cache held.")] = None
    scheduler: Annotated[str | None, option(FACTS, "Server and version, such as vllm@v1.")] = None

    def as_flags(self) -> RunFacts:
        """Raises ConfigError."""
        check_least(ConfigError, 1, tp=self.tp, kv_tokens=self.kv_tokens)
        return RunFacts(**asdict(self))


@dataclass(frozen=True, kw_only=True)
class Started(LaunchOptions):
    """A server that is started for the series, of --model, on GPUs of this host."""

    launch: Annotated[
        Literal["process", "docker"] | None,
        option(FIT, "Start the server for the series of --live, as `run` does, in place of its URL."),
    ] = None

    gpus: Annotated[str | None, option(FIT, "GPUs that it may use, as 0,1 (default: all).")] = None
    dtype: DtypeOption = "float16"

    def options(self, facts: RunFacts) -> dict[str, Any]:
        """What a run is told of it."""
        also = {"model": facts.model, "tp": facts.tp and str(facts.tp), "quantization": facts.quantization}
        also["kv_cache_dtype"] = facts.kv_cache_dtype or "auto"
        return {name: getattr(self, name) for name in names(Started)} | also


def command(
    *observed: Annotated[Path, Parameter(name="run", help="Run directories, or files of records (.jsonl, .jsonl.gz).")],
    out: Annotated[Path, option(FIT, "The profile to write.")],
    live: Annotated[
        str | None,
        option(
            FIT,
            "URL of a server of your own: a fixed series of two minutes is sent to it (one request at rest at three "
            "lengths, a burst, a closed loop) and fitted to; its runs are kept beside --out.",
        ),
    ] = None,
    held_out: Annotated[
        tuple[Path, ...],
        option(FIT, "Runs to judge the fit by (default: each is left out once).", consume_multiple=1, negative=None),
    ] = (),
    base: Annotated[
        Path | None, option(FIT, "Profile of the same server, for the times that these runs cannot tell.")
    ] = None,
    facts: Annotated[ServerFacts | None, Parameter(name="*")] = None,
    started: Annotated[Started | None, Parameter(name="*")] = None,
) -> int:
    """Fit a hardware profile to real runs, for `predict --profile` and `run --gpu --profile`.

    Fits what the runs can tell and says what they cannot. The errors it prints are of runs that were not fitted to.
    """
    flags = (facts or ServerFacts()).as_flags()
    if out.exists():
        raise CalibrationError(f"{out} exists; name another --out, nothing was overwritten.")
    launched = started if started is not None and started.launch is not None else None
    if sum(map(bool, (observed, live, launched))) != 1:
        raise CalibrationError(
            "name one of these: runs to fit to, a server with --live URL, or one to start with --launch."
        )
    if not observed:
        server = {"url": live} if launched is None else launched.options(flags)
        runs, base_profile = _measured(server, out, flags), profiles()[flags.scheduler or DEFAULT]
        if base is not None:
            base_profile = read_profile(base, runs[0].setup.scheduler)
    else:
        runs = runs_among(observed, flags)
    aside = runs_among(held_out, flags)
    _check(runs, aside)
    profile = _fitted_and_judged(runs, aside, base)
    if not observed:
        before = judged(base_profile, runs)
        print(before_and_after(*({one.run: one.e2el_w1 for one in each.held_out} for each in (before, profile))))
        profile = better(before, profile)
        if not profile.fitted_on:
            print("the fit is no better than the profile it began from, which is kept, with its errors here.")
        how = "calibrated" if profile.fitted_on else "not fitted, but checked"
        where = f"live at {live}" if live else f"live, on a server of {launched.launch}" if launched else ""
        profile = msgspec.structs.replace(profile, source=f"{how} {where}, {datetime.now():%Y-%m-%d}")
    write(profile, out)
    print(table(profile.held_out) if profile.held_out else "", f"wrote {out}", sep="\n")
    return exit_codes.OK


def _measured(server: dict[str, Any], out: Path, flags: RunFacts) -> list[Observed]:
    """The runs of the fixed series, kept beside the profile."""
    if flags.gpu is None or flags.model is None:
        raise CalibrationError("a server does not tell which GPU and model a profile is for; name --gpu and --model.")
    server |= {"backend": (flags.scheduler or DEFAULT).partition("@")[0]}
    return [read(run, flags) for run in series(server, out.with_suffix(".runs"), terminal.note)]


def runs_among(paths: Sequence[Path], flags: RunFacts) -> list[Observed]:
    """Reads those of the paths that are runs; says which are not. Raises ObservationError where none is."""
    runs: list[Observed] = []
    others: list[NotARunError] = []
    for path in paths:
        try:
            runs.append(read(path, flags))
        except NotARunError as error:
            others.append(error)
    if others and not runs:
        raise others[0]
    for other in others:
        terminal.say(f"left out: {other}")
    return runs


def _fitted_and_judged(runs: Sequence[Observed], aside: Sequence[Observed], base_file: Path | None) -> ServerProfile:
    """With its errors on runs set aside, or else on each run by a fit to the others."""
    for run in (*runs, *aside):
        if not run.tp_known:
            print(f"{run.name} does not tell its tensor parallel size: 1 is taken; name it with --tp.")
        if run.setup.kv_tokens is None:
            tokens = run.emulated.kv_tokens
            print(f"{run.name} does not tell its KV cache: {tokens:,} tokens computed; name it with --kv-tokens.")
    base = None if base_file is None else read_profile(base_file, runs[0].setup.scheduler)
    profile = calibrate(runs, base, print)
    if aside:
        return judged(profile, aside)
    if len(runs) > 1:
        print("judging the fit: each run is predicted from the others")
        return msgspec.structs.replace(profile, held_out=leave_one_out(runs, base))
    print("one run and none to judge by: how far off this profile is, nobody knows; name others: --held-out.")
    return profile
