"""What `loadgen search` does, from its options to its last line."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec

from backends import exit_codes
from backends.untrusted import without_secrets
from loadgen import rundir, summary, terminal
from loadgen.config import Config, ConfigError
from loadgen.event_loop import Stop
from loadgen.run import Run, run_to_end
from loadgen.search import live, objective, page, results
from loadgen.search.results import AxisName, SearchResult

ATTAIN, BUDGET_MINUTES = 0.99, 20.0  # where none is given


def search(
    config: Config,
    slo: str | None,
    attain: float | None,
    budget_minutes: float | None,
    axis: AxisName | None,
    resume: Path | None,
) -> int:
    """Gives the exit code. None: not given. Raises ConfigError, RunError and what a run raises before it begins."""
    config = live.plain_config(config)
    limits_ms = None if slo is None else objective.parse(slo)
    attain = attain if slo is None else objective.share(slo, "--attain", attain)
    if resume is not None:
        with rundir.measuring(resume, resumed=True):
            result, config = live.resumed(resume, config, {"slo": limits_ms, "attain": attain, "axis": axis})
            if budget_minutes is not None:
                options = msgspec.structs.replace(result.options, budget_s=live.budget_s(budget_minutes))
                result = msgspec.structs.replace(result, options=options)
            return _measured(live.Search(_checked(config, resume), result), resumed=True)
    if limits_ms is None:
        raise ConfigError("--slo is missing; say what the server is to keep, such as --slo ttft_ms=500,tpot_ms=50.")
    options = live.search_options(
        config, limits_ms, ATTAIN if attain is None else attain,
        BUDGET_MINUTES if budget_minutes is None else budget_minutes, axis or "rate",
    )  # fmt: skip
    result = SearchResult(version=rundir.package_version(), options=options)
    whole = _checked(config, config.out or Path("runs") / rundir.new_run_id())
    with rundir.measuring(whole.directory, private=config.dataset is not None, plan=results.FILE):
        return _measured(live.Search(whole, result), resumed=False)


def _checked(config: Config, directory: Path) -> Run:
    whole = Run(config, directory, rundir.new_run_id(), terminal.note)
    whole.check()
    return whole


def _measured(one: live.Search, *, resumed: bool) -> int:
    with Stop() as stop:
        one.whole.stop = stop
        try:
            code = run_to_end(one.measure(), began=lambda: True)
        finally:
            one.stopped()
        if one.result.probes or resumed:
            show(one.whole.directory, one.result)
    return stop.exit_code or code or exit_codes.OK


def show(directory: Path, result: SearchResult) -> None:
    """Prints the answer and writes its text, figure and page, without secrets."""
    result = without_secrets(result)
    screen = partial(page.screen, result) if terminal.is_watched() else None
    document = page.of(directory, result)
    summary.publish(document, directory / page.FILE, "search.md", lambda: None, results.to_json(result), screen)
