"""How launches are timed, on a GPU that exists only here: what it takes for each launch is known, and so is what the
host takes to enqueue one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.training_probe.engines import tiny

pytestmark = tiny.needs_engines

QUEUE = 1024
SLOW_HZ, FAST_HZ = 0.345e9, 1.98e9  # of an H200: idle, at work


class World:
    """A host and a GPU with one stream. The GPU's clock is slow until it has worked for 20 ms. first_s: what the host
    takes more for the first launch after it waited for the GPU. slowed_ratio: how much longer launches take from the
    time on that the GPU has worked on launches alone for 0.3 s."""

    def __init__(self, enqueue_s: float, launch_s: float, first_s: float = 0.0, slowed_ratio: float = 1.0) -> None:
        self.host_s = self.gpu_s = self.worked_s = self.rested_s = 0.0
        self.enqueue_s, self.launch_s = enqueue_s, launch_s
        self.first_s, self.slowed_ratio = first_s, slowed_ratio
        self.waited, self.unpaused_s, self.slowed = False, 0.0, False
        self.ends: list[float] = []
        self.idle_s, self.order = 0.0, ""

    def put(self, seconds: float) -> None:
        if len(self.ends) >= QUEUE:  # a full queue holds the host
            self.host_s = max(self.host_s, self.ends[-QUEUE])
        self.idle_s += max(0.0, self.host_s - self.gpu_s)
        self.gpu_s = max(self.gpu_s, self.host_s) + seconds
        self.worked_s += seconds
        self.ends.append(self.gpu_s)

    def launch(self) -> None:
        self.host_s += self.enqueue_s + (self.first_s if self.waited else 0.0)
        self.waited = False
        self.order += "x"
        self.unpaused_s = self.unpaused_s + self.launch_s if self.host_s <= self.gpu_s else 0.0
        self.slowed |= self.unpaused_s > 0.3
        self.put(self.launch_s * (self.slowed_ratio if self.slowed else 1.0))

    def clear(self) -> None:
        self.host_s += 6e-6
        self.order += "_"
        self.unpaused_s = 0.0
        self.put(60e-6)

    def sleep(self, cycles: int) -> None:
        self.host_s += 2e-6
        seconds = cycles / (FAST_HZ if self.worked_s > 0.02 else SLOW_HZ)
        self.rested_s += seconds
        self.put(seconds)

    def synchronize(self) -> None:
        self.host_s = max(self.host_s, self.gpu_s)
        self.waited = True

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """For the host and the GPU that the module under test sees."""
        from training_probe.worker.micro import timing

        monkeypatch.setattr(timing.torch, "cuda", self.cuda())
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.host_s))

    def cuda(self) -> Any:
        world = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at_s = 0.0

            def record(self) -> None:
                world.host_s += 1e-6
                self.at_s = max(world.gpu_s, world.host_s)

            def elapsed_time(self, other: Event) -> float:
                return 1000 * (other.at_s - self.at_s)

            def synchronize(self) -> None:
                world.host_s = max(world.host_s, self.at_s)
                world.waited = True

        return SimpleNamespace(Event=Event, _sleep=self.sleep, synchronize=self.synchronize)


@pytest.mark.parametrize("launch_us", [3, 20, 180, 1400])
@pytest.mark.parametrize("enqueue_us", [4, 10, 40])
@pytest.mark.parametrize("together", [False, True])
def test_a_launch_takes_what_the_gpu_takes(
    enqueue_us: int, launch_us: int, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from training_probe.points import Collective, Task
    from training_probe.worker.micro import timing

    world = World(enqueue_us / 1e6, launch_us / 1e6)
    world.stand_in(monkeypatch)
    point = Collective(name="allreduce", size_bytes=1024, ranks=2)
    task = Task(device="cuda", points=[point], samples=50, budget_s=0.5)
    found = timing.timed(point, world.launch, task, in_stream=True, ranks=timing.Alone() if together else None)
    assert found.median_s == pytest.approx(launch_us / 1e6, rel=0.01)
    assert found.p90_s == pytest.approx(launch_us / 1e6, rel=0.02)


def test_a_gpu_that_is_slower_than_the_host_does_not_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    from training_probe.points import Gemm, Task
    from training_probe.worker.micro import timing

    world = World(enqueue_s=8e-6, launch_s=470e-6)
    world.stand_in(monkeypatch)
    point = Gemm(m=4109, n=11008, k=4096, dtype="bf16")
    timing.timed(point, world.launch, Task(device="cuda", points=[point], samples=50), in_stream=True)
    assert world.rested_s < 0.05 * world.worked_s
    assert world.worked_s > timing.SETTLING_S


@pytest.mark.parametrize("launch_us", [3, 20, 83, 190, 1400])
@pytest.mark.parametrize("enqueue_us", [4, 10, 40])
def test_products_are_kept_apart(enqueue_us: int, launch_us: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from training_probe.points import Gemm, Task
    from training_probe.worker.micro import timing

    world = World(enqueue_us / 1e6, launch_us / 1e6)
    world.stand_in(monkeypatch)
    point = Gemm(m=666, n=11008, k=4096, dtype="bf16")
    task = Task(device="cuda", points=[point], samples=50, budget_s=0.5)
    found = timing.timed(point, world.launch, task, in_stream=True, clear=world.clear)
    assert found.median_s == pytest.approx(launch_us / 1e6, rel=0.01) and not found.reason
    assert found.p90_s == pytest.approx(launch_us / 1e6, rel=0.02)
    assert 5 <= found.samples <= 50
    if launch_us > 80 and enqueue_us < launch_us / 4:  # as do_bench: one launch, one write, and no rest
        assert world.order.endswith("_x" * 300)
        assert world.idle_s < 0.02 * world.gpu_s


@pytest.mark.parametrize("launch_us", [83, 190])
def test_one_slow_launch_of_the_host_makes_no_pauses(launch_us: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 in a virtual machine: it then rested between products, which ran 6 % faster than do_bench's."""
    from training_probe.points import Gemm, Task
    from training_probe.worker.micro import timing

    world = World(enqueue_s=8e-6, launch_s=launch_us / 1e6, first_s=200e-6)
    world.stand_in(monkeypatch)
    point = Gemm(m=666, n=11008, k=4096, dtype="bf16")
    task = Task(device="cuda", points=[point], samples=50, budget_s=0.5)
    found = timing.timed(point, world.launch, task, in_stream=True, clear=world.clear)
    assert found.median_s == pytest.approx(launch_us / 1e6, rel=0.01) and not found.reason
    assert world.order.endswith("_x" * 300)


def test_products_are_those_of_a_gpu_that_has_worked_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """As do_bench warms up: launches kept apart from the first on would never meet the power limit."""
    from training_probe.points import Gemm, Task
    from training_probe.worker.micro import timing

    world = World(enqueue_s=8e-6, launch_s=180e-6, slowed_ratio=1.07)
    world.stand_in(monkeypatch)
    point = Gemm(m=4096, n=4096, k=4096, dtype="bf16")
    task = Task(device="cuda", points=[point], samples=50, budget_s=0.5)
    found = timing.timed(point, world.launch, task, in_stream=True, clear=world.clear)
    assert found.median_s == pytest.approx(1.07 * 180e-6, rel=0.001)


def test_a_launch_of_a_fifth_of_a_second_is_not_repeated_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    from training_probe.points import Gemm, Task
    from training_probe.worker.micro import timing

    world = World(enqueue_s=8e-6, launch_s=0.2)
    world.stand_in(monkeypatch)
    task = Task(device="cuda", points=[Gemm(m=1 << 16, n=1 << 16, k=1 << 14, dtype="fp32")], samples=50, budget_s=0.5)
    found = timing.timed(task.points[0], world.launch, task, in_stream=True, clear=world.clear)
    assert found.median_s == pytest.approx(0.2, rel=0.01) and found.samples == 5
    assert world.gpu_s < 4


class Varying:
    """A launch on the host's clock: samples of one launch each, `spread` above and below 1 ms in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, spread: float, launch_s: float = 1e-3) -> None:
        from training_probe.worker.micro import timing

        self.now_s, self.launches, self.spread, self.launch_s = 0.0, 0, spread, launch_s
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.now_s))

    def __call__(self) -> None:
        self.launches += 1
        self.now_s += self.launch_s * (1 + self.spread * (-1) ** self.launches)

    def timed(self, samples: int = 50, budget_s: float | None = 0.1, ranks: Any = None) -> Any:
        from training_probe.points import Copy, Task
        from training_probe.worker.micro import timing

        point = Copy(route="h2h", size_bytes=1024)
        task = Task(device="cpu", points=[point], samples=samples, budget_s=budget_s)
        return timing.timed(point, self, task, in_stream=False, ranks=ranks)


@pytest.mark.parametrize(
    ("spread", "launch_s", "samples"),
    [
        (0.01, 1e-3, (50, 50)),  # settled at once
        (0.05, 1e-3, (50, 50)),  # 1.2533 x 2 x 0.05 / 2.563 / sqrt(50) is 0.7 %
        (0.2, 1e-3, (245, 400)),  # 1.25 % at 245
        (0.9, 1e-3, (950, 1000)),  # never settled: a second
        (0.01, 2e-2, (11, 16)),  # 5 in the tenth of a second that it has, whose percentiles say little
        (0.2, 2e-2, (45, 50)),
        (0.2, 0.3, (5, 5)),  # they took more than a second
    ],
)
def test_a_point_that_varies_is_sampled_until_its_median_is_settled(
    spread: float, launch_s: float, samples: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    varying = Varying(monkeypatch, spread, launch_s)
    found = varying.timed()
    assert samples[0] <= found.samples <= samples[1]
    assert varying.now_s < max(1.1, 9 * launch_s)  # three warm it up


@pytest.mark.parametrize("samples", [2, 5, 320])
def test_a_number_of_samples_that_is_named_is_that_many(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Varying(monkeypatch, 0.9).timed(samples, budget_s=None).samples == samples


def test_ranks_go_on_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """This one's samples never vary and another's do; and another one's clock says that the second is over."""
    from training_probe.worker.micro import timing

    class Others(timing.Alone):
        spent_s = 0.0

        def slowest(self, seconds: Any) -> list[float]:
            if len(seconds) == 1:
                return [max(seconds[0], self.spent_s)]
            return [max(own, 1e-3 * (1 + at % 2)) for at, own in enumerate(seconds)]

    steady = Varying(monkeypatch, 0.0)
    assert steady.timed(ranks=Others()).samples > 300 and steady.timed().samples == 50
    over = Others()
    over.spent_s = 2.0
    assert steady.timed(budget_s=100.0, ranks=over).samples == 50


def test_a_gpus_samples_go_on_as_they_began(monkeypatch: pytest.MonkeyPatch) -> None:
    from training_probe.points import Collective, Task
    from training_probe.worker.micro import timing

    world = World(enqueue_s=10e-6, launch_s=30e-6)
    world.stand_in(monkeypatch)

    class Varies(timing.Alone):
        met = 0

        def meet(self) -> None:
            self.met += 1
            world.launch_s = 30e-6 * (1 + 0.2 * (-1) ** self.met)

    point = Collective(name="allreduce", size_bytes=1024, ranks=2)
    task = Task(device="cuda", points=[point], samples=50, budget_s=0.5)
    found = timing.timed(point, world.launch, task, in_stream=True, ranks=Varies())
    assert found.samples > 200 and not found.reason and found.error_ratio <= timing.SETTLED_ERROR_RATIO
    assert found.p10_s == pytest.approx(24e-6, rel=0.02) and found.p90_s == pytest.approx(36e-6, rel=0.02)


def test_a_sample_that_any_rank_was_late_for_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    from training_probe.points import Collective, Task
    from training_probe.worker.micro import timing

    world = World(enqueue_s=10e-6, launch_s=3e-6)
    world.stand_in(monkeypatch)

    class Others(timing.Alone):
        """Each eighth sample another rank is late for, and this one's collective waits for it."""

        def __init__(self) -> None:
            self.met = 0

        def late(self, sample: int) -> bool:
            return sample % 8 == 3

        def slowest(self, seconds: Any) -> list[float]:
            if len(seconds) == 1:
                return list(seconds)
            if set(seconds) <= {0.0, 1.0}:
                self.met = 0
                return [max(own, float(self.late(at))) for at, own in enumerate(seconds)]
            return list(seconds)

        def meet(self) -> None:
            world.launch_s = 90e-6 if self.late(self.met) else 3e-6
            self.met += 1

    others = Others()
    point = Collective(name="allreduce", size_bytes=1024, ranks=2)
    task = Task(device="cuda", points=[point], samples=50, budget_s=0.5)
    found = timing.timed(point, world.launch, task, in_stream=True, ranks=others)
    assert not found.reason and 40 <= found.samples < 50
    assert found.p90_s == pytest.approx(3e-6, rel=0.02)


def test_what_is_in_time() -> None:
    from training_probe.worker.micro.timing import in_time

    assert in_time([1.0, 2.0, 9.0], [False, False, True]) == ([1.0, 2.0], False)
    assert in_time([1.0, 9.0, 9.0], [False, True, True]) == ([1.0, 9.0, 9.0], True)
    assert in_time([1.0, 9.0], [False, True]) == ([1.0, 9.0], True)  # one sample has no spread
    assert in_time([1.0, 9.0, 3.0, 5.0], [False, True, False, False], trains=2) == ([1.0, 4.0], False)
    assert in_time([1.0, 1.0, 8.0, 8.0], [False, False, True, True], trains=2) == ([1.0, 8.0], True)


def test_the_host_is_asked_before_it_is_filled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch

    from training_probe.points import Copy, Gemm
    from training_probe.worker.micro import gemm, memcpy, timing

    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr(timing, "MEMORY", meminfo)
    assert timing.lacking(1 << 60) == ""  # nobody knows
    meminfo.write_text("MemTotal:  9999999 kB\nMemAvailable:  1024 kB\nBuffers:  7 kB\n")
    assert timing.lacking(1 << 20) == ""
    assert "2 MiB are needed and the host has 1 MiB" in timing.lacking(2 << 20)
    cpu = torch.device("cpu")
    for point, launch_of in (
        (Copy(route="h2h", size_bytes=1 << 20), memcpy.launch_of),
        (Gemm(m=1024, n=1024, k=1024, dtype="fp32"), gemm.launch_of),
    ):
        ended = timing.attempted(point, lambda launch_of=launch_of, point=point: launch_of(point, cpu))  # type: ignore[misc, operator]
        assert ended.outcome == "oom" and "are needed" in ended.reason


def test_what_the_allocator_refuses_is_out_of_memory() -> None:
    from training_probe.points import Copy
    from training_probe.worker.micro import timing

    def refused() -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

    assert timing.attempted(Copy(route="h2h", size_bytes=1), refused).outcome == "oom"


def test_a_host_that_is_too_slow_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from training_probe.points import Copy, Task
    from training_probe.worker.micro import timing

    world = World(enqueue_s=2e-3, launch_s=3e-6)  # 256 launches are enqueued for longer than the GPU is ever kept busy
    world.stand_in(monkeypatch)
    monkeypatch.setattr(timing, "SETTLED_SAMPLE_S", 1.0)
    point = Copy(route="d2d", size_bytes=1024)
    found = timing.timed(point, world.launch, Task(device="cuda", points=[point], samples=5), in_stream=True)
    assert found.outcome == "ok" and found.reason == timing.HOST_BOUND
