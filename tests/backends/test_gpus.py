"""GPUs as NVML tells of them, the choice among them, and the P2P decision, on machines that a fake NVML plays.

The fake keeps pynvml's habits: handles are opaque, errors are NVMLError with a `value`, nothing works before nvmlInit,
NVML_P2P_CAPS_INDEX_READ is a tuple, which the P2P query refuses.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pynvml
import pytest

from backends import gpus
from backends.exit_codes import install_command
from backends.gpus import GpuError, GpuProbe, Inventory, P2pDecision, choose, decide_p2p

OK, CHIPSET, GPU_LOST, NOT_SUPPORTED = 0, 1, 15, 5
GIB = 2**30
READ, WRITE, NVLINK = 0, 1, 2

P2pStatus = Callable[[int, int, int], int]


class FakeError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__({3: "Not Supported", 15: "GPU is lost"}.get(value, f"error {value}"))
        self.value = value


class FakeNvml(ModuleType):
    """A machine with `count` cards of one name. `broken`: (function, index or None) -> NVML error code."""

    NVMLError = FakeError
    NVML_P2P_CAPS_INDEX_READ = (0,)

    def __init__(
        self, name: str | bytes, count: int, driver: str | bytes, p2p: P2pStatus, memory_bytes: int = 24 * GIB
    ) -> None:
        super().__init__("pynvml")
        self.card, self.count, self.driver, self.p2p, self.memory_bytes = name, count, driver, p2p, memory_bytes
        self.opened = 0
        self.broken: dict[tuple[str, int | None], int] = {}
        self.energy_mj = 1_000_000

    def _check(self, function: str, handle: Any = None) -> int:
        index = getattr(handle, "index", handle)
        if self.opened <= 0:
            raise FakeError(1)
        for who in (index, None):
            if (function, who) in self.broken:
                raise FakeError(self.broken[function, who])
        return index or 0

    def nvmlInit(self) -> None:
        if ("nvmlInit", None) in self.broken:
            raise FakeError(self.broken["nvmlInit", None])
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self._check("nvmlShutdown")
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> str | bytes:
        self._check("nvmlSystemGetDriverVersion")
        return self.driver

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        self._check("nvmlSystemGetCudaDriverVersion")
        return 12040

    def nvmlDeviceGetCount(self) -> int:
        self._check("nvmlDeviceGetCount")
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        self._check("nvmlDeviceGetHandleByIndex", index)
        if not 0 <= index < self.count:
            raise FakeError(2)
        return SimpleNamespace(index=index)

    def nvmlDeviceGetName(self, handle: Any) -> str | bytes:
        self._check("nvmlDeviceGetName", handle)
        return self.card

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return f"GPU-{self._check('nvmlDeviceGetUUID', handle)}a5e0000-0000-4000-8000-00000000000f"

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        index = self._check("nvmlDeviceGetMemoryInfo", handle)
        used = (index + 1) * GIB
        return SimpleNamespace(total=self.memory_bytes, used=used, free=self.memory_bytes - used)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any) -> int:
        self._check("nvmlDeviceGetEnforcedPowerLimit", handle)
        return 650_500

    def nvmlDeviceGetP2PStatus(self, a: Any, b: Any, capability: int) -> int:
        if not isinstance(capability, int):
            raise ctypes.ArgumentError("argument 3: TypeError")
        self._check("nvmlDeviceGetP2PStatus", a)
        return self.p2p(a.index, b.index, capability)

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        return 250_500 + self._check("nvmlDeviceGetPowerUsage", handle)

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        self._check("nvmlDeviceGetUtilizationRates", handle)
        return SimpleNamespace(gpu=87, memory=40)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> int:
        self._check("nvmlDeviceGetTotalEnergyConsumption", handle)
        self.energy_mj += 500
        return self.energy_mj

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any) -> int:
        self._check("nvmlDeviceGetCurrentClocksEventReasons", handle)
        return 0x4 | 0x40

    def nvmlDeviceGetViolationStatus(self, handle: Any, policy: int) -> Any:
        self._check("nvmlDeviceGetViolationStatus", handle)
        return SimpleNamespace(referenceTime=0, violationTime={0: 7_000, 1: 5_000}[policy])

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int) -> int:
        self._check("nvmlDeviceGetClockInfo", handle)
        return {1: 990}[kind]

    def nvmlDeviceGetMaxClockInfo(self, handle: Any, kind: int) -> int:
        return {1: 1980}[kind]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        self._check("nvmlDeviceGetComputeRunningProcesses", handle)
        return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in (812, 77)]


def always(status: int) -> P2pStatus:
    return lambda a, b, capability: status


def over_pcie(a: int, b: int, capability: int) -> int:
    """Reads and writes are claimed; there is no NVLink."""
    return NOT_SUPPORTED if capability == NVLINK else OK


def bridged_in_pairs(a: int, b: int, capability: int) -> int:
    """An NVLink bridge joins 0 with 1 and 2 with 3."""
    return OK if a // 2 == b // 2 else CHIPSET


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeNvml]:
    def make(*args: Any, **kwargs: Any) -> FakeNvml:
        fake = FakeNvml(*args, **kwargs)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return make


Machine = Callable[..., FakeNvml]


def test_the_fake_has_nothing_that_pynvml_lacks() -> None:
    functions = [name for name in vars(FakeNvml) if name.startswith("nvml")]
    assert len(functions) == 19
    assert [name for name in functions if not callable(getattr(pynvml, name, None))] == []
    assert pynvml.NVML_P2P_CAPS_INDEX_WRITE == WRITE and pynvml.NVML_P2P_CAPS_INDEX_NVLINK == NVLINK
    assert pynvml.NVML_P2P_STATUS_NOT_SUPPORTED == NOT_SUPPORTED and pynvml.NVML_P2P_STATUS_OK == OK
    assert pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED == CHIPSET
    assert pynvml.NVML_ERROR_GPU_IS_LOST == GPU_LOST
    assert (pynvml.NVML_PERF_POLICY_POWER, pynvml.NVML_PERF_POLICY_THERMAL, pynvml.NVML_CLOCK_SM) == (0, 1, 1)


# --- what there is ---


def test_an_inventory_says_what_nvml_says(machine: Machine) -> None:
    fake = machine("NVIDIA A800-SXM4-80GB", 8, "535.161.08", always(OK), memory_bytes=80 * GIB)
    inventory = gpus.read()
    assert (inventory.driver, inventory.cuda, inventory.problem) == ("535.161.08", "12.4", None)
    assert [gpu.index for gpu in inventory.gpus] == list(range(8))
    third = inventory.gpus[2]
    assert (third.name, third.memory_bytes, third.used_bytes) == ("NVIDIA A800-SXM4-80GB", 80 * GIB, 3 * GIB)
    assert third.power_limit_w == 650.5
    assert third.uuid == "GPU-2a5e0000-0000-4000-8000-00000000000f"
    for a in range(8):
        assert inventory.p2p[a] == ("ok",) * a + ("self",) + ("ok",) * (7 - a)
        assert inventory.nvlink[a] == (True,) * a + (False,) + (True,) * (7 - a)
    assert fake.opened == 0  # closed as often as opened


def test_an_inventory_survives_json(machine: Machine) -> None:
    machine("NVIDIA GeForce RTX 3090", 4, "550.54.14", bridged_in_pairs)
    inventory = gpus.read()
    assert msgspec.json.decode(msgspec.json.encode(inventory), type=Inventory) == inventory


def test_bytes_of_an_old_pynvml_are_text(machine: Machine) -> None:
    machine(b"NVIDIA GeForce RTX 4090", 2, b"545.23.08", always(OK))
    inventory = gpus.read()
    assert (inventory.gpus[0].name, inventory.driver) == ("NVIDIA GeForce RTX 4090", "545.23.08")
    assert not decide_p2p("auto", inventory, (0, 1)).enabled


@pytest.mark.parametrize(
    "code, problem",
    [
        (9, "the NVIDIA driver is not loaded"),
        (12, "no NVIDIA driver"),
        (18, "the NVIDIA driver was updated since it was loaded, which takes a reboot"),
        (999, "NVML did not start: error 999"),
    ],
)
def test_no_driver(machine: Machine, code: int, problem: str) -> None:
    machine("", 0, "", always(OK)).broken["nvmlInit", None] = code
    assert gpus.read() == Inventory(problem=problem)


def test_no_driver_as_the_real_pynvml_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", not_found)
    assert gpus.read() == Inventory(problem="no NVIDIA driver")


def test_no_pynvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(gpus, "has_driver", lambda: False)  # then there is nothing that a package would show
    assert gpus.read() == Inventory(problem="no NVIDIA driver")
    monkeypatch.setattr(gpus, "has_driver", lambda: True)
    assert gpus.read() == Inventory(
        problem=f"the Python package nvidia-ml-py is not installed; {install_command('gpu')}"
    )


def test_a_driver_without_gpus(machine: Machine) -> None:
    fake = machine("", 0, "560.35.03", always(OK))
    inventory = gpus.read()
    assert (inventory.gpus, inventory.problem) == ((), "the NVIDIA driver finds no GPU")
    assert inventory.driver == "560.35.03"
    assert fake.opened == 0


@pytest.mark.parametrize(
    "function",
    [
        "nvmlSystemGetDriverVersion",
        "nvmlSystemGetCudaDriverVersion",
        "nvmlDeviceGetCount",
        "nvmlDeviceGetName",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetP2PStatus",
        "nvmlDeviceGetHandleByIndex",
    ],
)
def test_any_query_may_fail(machine: Machine, function: str) -> None:
    fake = machine("NVIDIA H200", 2, "570.86.10", always(OK))
    whole = gpus.read()
    fake.broken[function, None] = 999
    inventory = gpus.read()
    assert inventory != whole
    assert fake.opened == 0
    decide_p2p("auto", inventory, (0, 1))


def test_what_one_card_does_not_tell_is_unknown(machine: Machine) -> None:
    fake = machine("NVIDIA A800-SXM4-80GB", 3, "535.161.08", always(OK))
    for function in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetName", "nvmlDeviceGetP2PStatus"):
        fake.broken[function, 1] = 3
    inventory = gpus.read()
    second = inventory.gpus[1]
    assert (second.name, second.memory_bytes, second.used_bytes) == ("unknown", None, None)
    assert inventory.gpus[2].memory_bytes == 24 * GIB
    assert inventory.p2p == (("self", "ok", "ok"), ("unknown", "self", "unknown"), ("ok", "ok", "self"))
    assert decide_p2p("auto", inventory, (0, 2)).enabled
    assert decide_p2p("auto", inventory, (0, 1)) == P2pDecision(False, "NVML says of P2P from GPU 1 to GPU 0: unknown")


def test_a_lost_card_is_left_out_and_the_others_keep_their_indices(machine: Machine) -> None:
    machine("NVIDIA GeForce RTX 3090", 4, "550.54.14", bridged_in_pairs).broken["nvmlDeviceGetHandleByIndex", 1] = 15
    inventory = gpus.read()
    assert [gpu.index for gpu in inventory.gpus] == [0, 2, 3]
    assert inventory.problem == "GPU 1 cannot be used: GPU is lost"
    assert decide_p2p("auto", inventory, (2, 3)).enabled
    assert not decide_p2p("auto", inventory, (0, 2)).enabled
    with pytest.raises(GpuError) as refused:
        choose(inventory, ["1"])
    assert str(refused.value) == "there is no GPU 1 here; there are 0, 2 and 3 (GPU 1 cannot be used: GPU is lost)."


# --- the decision ---


@pytest.mark.parametrize(
    "name, count, driver, status, chosen, expected",
    [
        ("NVIDIA A800-SXM4-80GB", 8, "535.161.08", always(OK), range(8), (True, "every pair reports P2P over NVLink")),
        ("NVIDIA H200", 2, "570.86.10", always(OK), (0, 1), (True, "every pair reports P2P over NVLink")),
        ("NVIDIA L40S", 2, "550.54.14", over_pcie, (0, 1), (True, "every pair reports P2P")),
        ("NVIDIA GeForce RTX 4090", 8, "560.35.03", always(NOT_SUPPORTED), range(8), (False,
         "NVML says of P2P from GPU 0 to GPU 1: not supported")),
        ("NVIDIA GeForce RTX 5090", 2, "570.86.16", always(NOT_SUPPORTED), (0, 1), (False,
         "NVML says of P2P from GPU 0 to GPU 1: not supported")),
        ("NVIDIA GeForce RTX 3090", 4, "535.129.03", bridged_in_pairs, (0, 1), (True,
         "every pair reports P2P over NVLink")),
        ("NVIDIA GeForce RTX 3090", 4, "535.129.03", bridged_in_pairs, (3, 2), (True,
         "every pair reports P2P over NVLink")),
        ("NVIDIA GeForce RTX 3090", 4, "535.129.03", bridged_in_pairs, (0, 1, 2), (False,
         "NVML says of P2P from GPU 0 to GPU 2: chipset not supported")),
        ("NVIDIA GeForce RTX 3090", 4, "535.129.03", bridged_in_pairs, (2, 1), (False,
         "NVML says of P2P from GPU 2 to GPU 1: chipset not supported")),
        ("Quadro RTX 4000", 2, "535.54.03", always(OK), (0, 1), (True, "every pair reports P2P over NVLink")),
        ("NVIDIA RTX 4000 Ada Generation", 2, "535.54.03", over_pcie, (0, 1), (True, "every pair reports P2P")),
        ("NVIDIA GeForce RTX 4050 Laptop GPU", 2, "545.29.06", always(OK), (0, 1), (False,
         "drivers before 550.40.07 misreport P2P on RTX 40 cards; GPU 0 is an NVIDIA GeForce RTX 4050 Laptop GPU, "
         "the driver 545.29.06")),
        ("NVIDIA GeForce RTX 4090", 1, "535.54.03", always(OK), (0,), (True, "one GPU: nothing to decide")),
        ("NVIDIA GeForce RTX 4090", 8, "535.54.03", always(OK), (5,), (True, "one GPU: nothing to decide")),
    ],
)  # fmt: skip
def test_auto(
    machine: Machine,
    name: str,
    count: int,
    driver: str,
    status: P2pStatus,
    chosen: tuple[int, ...],
    expected: tuple[bool, str],
) -> None:
    machine(name, count, driver, status)
    assert decide_p2p("auto", gpus.read(), chosen) == P2pDecision(*expected)


@pytest.mark.parametrize(
    "driver, enabled",
    [
        ("525.60.13", False),
        ("535.54.03", False),
        ("545.23.08", False),
        ("550.9.99", False),  # a number, not a decimal fraction: 9 is before 40
        ("550.40", False),
        ("550.40.06", False),
        ("550.40.07", True),
        ("550.40.7", True),
        ("550.54.15-p2p", True),  # a patched driver that does give 4090s P2P
        ("1000.10", True),
        ("", False),
    ],
)
@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4070 Ti SUPER"])
def test_old_drivers_are_not_believed_about_rtx_40_cards(
    machine: Machine, name: str, driver: str, enabled: bool
) -> None:
    machine(name, 8, driver, over_pcie)
    decision = decide_p2p("auto", gpus.read(), range(8))
    assert decision.enabled == enabled
    if not enabled:
        assert decision.reason == (
            "drivers before 550.40.07 misreport P2P on RTX 40 cards; "
            f"GPU 0 is an {name}, the driver {driver or 'unknown'}"
        )


@pytest.mark.parametrize("name", ["NVIDIA RTX A4000", "NVIDIA GeForce RTX 3090", "NVIDIA A40", "NVIDIA L40"])
def test_old_drivers_are_believed_about_other_cards(machine: Machine, name: str) -> None:
    machine(name, 2, "535.54.03", over_pcie)
    assert decide_p2p("auto", gpus.read(), (0, 1)).enabled


def test_p2p_must_be_there_to_read_and_to_write_both_ways(machine: Machine) -> None:
    for missing in [(0, 1, READ), (0, 1, WRITE), (1, 0, READ), (1, 0, WRITE)]:
        machine("NVIDIA L40S", 2, "550.54.14", lambda *query, no=missing: CHIPSET if query == no else OK)
        first, second, _ = missing
        assert decide_p2p("auto", gpus.read(), (0, 1)) == P2pDecision(
            False, f"NVML says of P2P from GPU {first} to GPU {second}: chipset not supported"
        )


def test_asked_for_it_is_as_asked_and_the_reason_keeps_the_doubt(machine: Machine) -> None:
    machine("NVIDIA GeForce RTX 3090", 4, "535.129.03", bridged_in_pairs)
    inventory = gpus.read()
    assert decide_p2p("on", inventory, (0, 1)) == P2pDecision(True, "asked for with --p2p on")
    assert decide_p2p("on", inventory, (3,)) == P2pDecision(True, "asked for with --p2p on")
    assert decide_p2p("off", inventory, (0, 1)) == P2pDecision(False, "asked for with --p2p off")
    assert decide_p2p("on", inventory, (0, 3)) == P2pDecision(
        True,
        "asked for with --p2p on, although NVML says of P2P from GPU 0 to GPU 3: chipset not supported",
    )
    machine("NVIDIA GeForce RTX 4090", 2, "545.23.08", always(OK))
    decision = decide_p2p("on", gpus.read(), (0, 1))
    assert decision.enabled and "although drivers before 550.40.07 misreport P2P" in decision.reason


def test_what_nvml_does_not_know_is_off() -> None:
    none = Inventory(problem="no NVIDIA driver")
    assert decide_p2p("auto", none, (0, 1)) == P2pDecision(False, "NVML does not know GPU 0 (no NVIDIA driver)")
    assert decide_p2p("auto", none, ()) == P2pDecision(True, "no GPU here to ask")
    assert decide_p2p("on", none, (0, 1)).enabled


# --- the choice ---


@pytest.fixture
def four(machine: Machine) -> Inventory:
    machine("NVIDIA H200", 4, "570.86.10", always(OK))
    return gpus.read()


def test_choose_all_or_by_index_or_uuid(four: Inventory) -> None:
    assert choose(four, None, environ={}) == (0, 1, 2, 3)
    assert choose(four, ["2", " 0"], environ={}) == (2, 0)
    assert choose(four, [four.gpus[3].uuid, four.gpus[1].uuid.lower()], environ={}) == (3, 1)
    assert choose(four, ["GPU-2a5e"], environ={}) == (2,)
    assert choose(four, [], environ={}) == ()


@pytest.mark.parametrize(
    "ids, sentence",
    [
        (["9"], "there is no GPU 9 here; there are 0 to 3."),
        (["0", "4"], "there is no GPU 4 here; there are 0 to 3."),
        (["-1"], "there is no GPU -1 here; there are 0 to 3."),
        (["gpu0"], "there is no GPU gpu0 here; there are 0 to 3."),
        ([""], "there is no GPU '' here; there are 0 to 3."),
        (["MIG-3a5e"], "there is no GPU MIG-3a5e here; there are 0 to 3."),
        (["GPU-"], "GPU- is the beginning of several GPUs' UUIDs; give all of it."),
        (["1", "1"], "GPU 1 is named twice; name each GPU once."),
        (["1", "GPU-1a5e"], "GPU 1 is named twice; name each GPU once."),
    ],
)
def test_choose_refuses(four: Inventory, ids: list[str], sentence: str) -> None:
    with pytest.raises(GpuError) as refused:
        choose(four, ids, environ={})
    assert str(refused.value) == sentence


def test_choose_says_how_few_there_are(machine: Machine) -> None:
    machine("NVIDIA H200", 1, "570.86.10", always(OK))
    with pytest.raises(GpuError, match=r"^there is no GPU 1 here; there is only GPU 0\.$"):
        choose(gpus.read(), ["1"])
    machine("NVIDIA H200", 2, "570.86.10", always(OK))
    with pytest.raises(GpuError, match=r"^there is no GPU 2 here; there are 0 and 1\.$"):
        choose(gpus.read(), ["2"])
    with pytest.raises(GpuError, match=r"^there is no GPU 0 here; there is none at all \(no NVIDIA driver\)\.$"):
        choose(Inventory(problem="no NVIDIA driver"), ["0"])


@pytest.mark.parametrize(
    "visible, chosen",
    [
        ("2,3", (2, 3)),
        ("3, 1", (3, 1)),
        ("GPU-1a5e0000-0000-4000-8000-00000000000f", (1,)),
        ("GPU-1a5e,0", (1, 0)),
        ("", ()),
        ("-1", ()),
        ("0,1,-1,2", (0, 1)),
    ],
)
def test_all_means_those_that_cuda_may_see(four: Inventory, visible: str, chosen: tuple[int, ...]) -> None:
    assert choose(four, None, environ={"CUDA_VISIBLE_DEVICES": visible}) == chosen
    assert choose(four, ["0"], environ={"CUDA_VISIBLE_DEVICES": visible}) == (0,)


def test_choose_reads_the_environment_of_this_process(four: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert choose(four, None) == (1,)


def test_cuda_visible_devices_that_names_no_gpu_is_refused(four: Inventory) -> None:
    with pytest.raises(GpuError) as refused:
        choose(four, None, environ={"CUDA_VISIBLE_DEVICES": "0,7"})
    assert str(refused.value) == "CUDA_VISIBLE_DEVICES is '0,7', but there is no GPU 7 here; there are 0 to 3."
    assert choose(Inventory(problem="no NVIDIA driver"), None, environ={"CUDA_VISIBLE_DEVICES": "0"}) == ()


# --- sampling ---


def test_a_probe_samples_its_gpus_again_and_again(machine: Machine) -> None:
    fake = machine("NVIDIA H200", 4, "570.86.10", always(OK))
    probe = GpuProbe([2, 0])
    first, second = probe.sample(), probe.sample()
    assert [sample.index for sample in first] == [2, 0]
    assert first[0].memory_used_bytes == 3 * GIB
    assert first[0].power_w == pytest.approx(250.502)
    assert first[0].utilization_ratio == pytest.approx(0.87)
    assert first[0].energy_mj == 1_000_500 and second[0].energy_mj == 1_001_500
    assert fake.opened == 1
    gpus.read()  # opens and closes NVML beside it
    assert probe.sample()[1].memory_used_bytes == GIB
    probe.close()
    probe.close()
    assert fake.opened == 0
    assert probe.sample()[0].memory_used_bytes is None


def test_what_holds_clocks_back_and_who_computes(machine: Machine) -> None:
    fake = machine("NVIDIA H200", 1, "570.86.10", always(OK))
    (seen,) = GpuProbe([0]).sample()
    assert (seen.thermal_ns, seen.power_ns, seen.processes) == (5_000, 7_000, [77, 812])
    assert gpus.reason_names(seen.clock_reasons) == ("sw_power_cap", "hw_thermal_slowdown")
    for function in ("ViolationStatus", "CurrentClocksEventReasons", "ComputeRunningProcesses"):
        fake.broken[f"nvmlDeviceGet{function}", None] = NOT_SUPPORTED
    (seen,) = GpuProbe([0]).sample()
    assert (seen.thermal_ns, seen.power_ns, seen.clock_reasons, seen.processes) == (None, None, 0, None)


def test_what_a_card_cannot_measure_is_none(machine: Machine) -> None:
    fake = machine("NVIDIA GeForce GTX 1080", 2, "535.54.03", always(CHIPSET))
    fake.broken["nvmlDeviceGetTotalEnergyConsumption", None] = 3
    fake.broken["nvmlDeviceGetUtilizationRates", 1] = 3
    one, two = GpuProbe([0, 1]).sample()
    assert (one.energy_mj, two.energy_mj) == (None, None)
    assert (one.utilization_ratio, two.utilization_ratio) == (0.87, None)
    assert (one.power_w, two.memory_used_bytes) == (250.5, 2 * GIB)


def test_a_probe_never_raises(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = machine("NVIDIA H200", 2, "570.86.10", always(OK))
    nothing = [(9, None, None, None, None, None, None, 0, None)]
    assert [msgspec.structs.astuple(sample) for sample in GpuProbe([9]).sample()] == nothing
    probe = GpuProbe([0])
    for function in [name for name in vars(FakeNvml) if name.startswith("nvmlDevice")]:
        fake.broken[function, 0] = GPU_LOST  # while it is watched
    assert msgspec.structs.astuple(probe.sample()[0]) == (0, *nothing[0][1:])
    monkeypatch.setitem(sys.modules, "pynvml", None)
    absent = GpuProbe([9])
    assert [msgspec.structs.astuple(sample) for sample in absent.sample()] == nothing
    absent.close()
