"""What all tests share: programs start as a terminal starts them, also where the tests run under nohup or in the
background of a shell; a property may take as long as the machine does; slow stages use all cores and can be sampled."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from backends import untrusted

pytest_plugins = ["tests.sampling"]
WHOLE = {
    "tests/faults/test_faults.py",
    "tests/test_distribution.py",
    "tests/training_probe/engines/test_breakdowns.py",
    "tests/training_probe/engines/test_sharding.py",
    "tests/training_probe/engines/test_training.py",
}  # their tests ask one fixture that takes a minute or more

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

# A signal that is ignored stays so in every program that is started; one with a handler has its default there.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the tests keep is not their user's; what pip and vLLM keep, they use."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kept = {"PIP_CACHE_DIR": usual / "pip", "VLLM_CACHE_ROOT": usual / "vllm"}
    kept["XDG_CACHE_HOME"] = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        for name, place in kept.items():
            patch.setenv(name, str(place))
        yield


@pytest.fixture(autouse=True)
def no_secrets_of_other_tests() -> Iterator[None]:
    """What one test hides is not masked in the next one."""
    yield
    untrusted.hidden.clear()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadgroup a core takes test after test, but a file of WHOLE at once. (The marks of pytest-xdist 3.8
    that should say so do nothing with pytest 9.2.)"""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file in WHOLE else nodeid

    return Scheduler(config, log)
