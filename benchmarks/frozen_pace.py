"""What is left of the errors of frozen runs once each is predicted with the pace that its own server had.

    python benchmarks/frozen_pace.py GROUP...        # groups of benchmarks/frozen.py, of one GPU and without prefixes

In-sample by construction, and no prediction: the pace is read from the run itself, as benchmarks/frozen/steps.txt has
it. It tells how much of an error is the host's CPU, which is known to nobody before the run. Launches of a load take
their built-in times, times the mean of its eager launches over the predicted mean; the front end of a burst takes what
a row took there. All else is the built-in profile.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import frozen
import msgspec

from servers.calibrate import runs
from servers.simulator.build import Profile, profiles

STEPS = frozen.HERE / "frozen" / "steps.txt"
LAUNCHES = ("launch_us", "launch_row_us", "launch_layer_us", "launch_eager_layer_us", "launch_experts_us")


def paces() -> tuple[dict[str, float], dict[str, float]]:
    """By load: its launches over the predicted ones; and of bursts the microseconds of a row."""
    launches: dict[str, float] = {}
    rows_us: dict[str, float] = {}
    for line in STEPS.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        match cells:
            case [_, load, _, _, _, measured, predicted, *others] if others and measured.count(",") == 2 and predicted:
                launches[load] = float(measured.split(",")[1]) / float(predicted)
            case [_, load, _, steps, row_us] if steps.count(",") == 2:
                rows_us[load] = float(row_us)
    return launches, rows_us


def paced(profile: Profile, launches: float | None, row_us: float | None) -> Profile:
    replace = msgspec.structs.replace
    if row_us is not None:
        return replace(profile, front=replace(profile.front, token_us=row_us - profile.front.output_us))
    own = profile.overheads
    if launches is None:
        return profile
    return replace(profile, overheads=replace(own, **{name: launches * getattr(own, name) for name in LAUNCHES}))


def observed(load: str, group: frozen.Group, model: Path) -> runs.Observed:
    words = dict(zip(group.options.split()[::2], group.options.split()[1::2], strict=True))
    facts = msgspec.convert(
        {
            "model": str(model),
            "gpu": group.gpu,
            "tp": group.tp,
            "quantization": words.get("--quantization"),
            "kv_cache_dtype": words.get("--kv-cache-dtype"),
        },
        runs.RunFacts,
    )
    return runs.read(frozen.HERE / "frozen" / "measured" / load, facts)


def main() -> None:
    profile = profiles()["vllm@v1"]
    launches, rows_us = paces()
    print("| load | its pace | makespan off %, built in and with it | ttft | tpot | e2el |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for group in map(frozen.GROUPS.__getitem__, sys.argv[1:]):
            model = frozen.model_in(Path(scratch), group.model)
            for load in group.loads:
                run = observed(load, group, model)
                factor, row_us = launches.get(load), rows_us.get(load)
                errors = [run.predict(each).error(run) for each in (profile, paced(profile, factor, row_us))]
                makespans = " and ".join(f"{100 * each.makespan:+.1f}" for each in errors)
                others = [
                    " and ".join(f"{100 * getattr(each, name):.1f}" for each in errors)
                    for name in ("ttft_w1", "tpot_w1", "e2el_w1")
                ]
                pace = f"{row_us:.0f} us a row" if row_us else f"launches x {factor:.2f}" if factor else "not seen"
                print(f"| {load} | {pace} | " + " | ".join((makespans, *others)) + " |", flush=True)


if __name__ == "__main__":
    main()
