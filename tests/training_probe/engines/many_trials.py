"""Many trials under one torchrun: `many_trials.py DIR` runs DIR/0, DIR/1, ... as training_probe.worker would. The file
`port` of each says where its ranks meet: a rank that is early must not meet the trial before.

Most of a small trial's time goes into imports. They are paid once here: every trial is a fork of a process that has
imported all engines and done nothing else, so none sees what another did to torch. What a trial writes is the same.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import bitsandbytes  # noqa: F401
import deepspeed  # noqa: F401
import peft  # noqa: F401
import torch.distributed.fsdp  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401

from training_probe.worker.__main__ import main

LIMIT_S = 300  # of one trial: a hang ends with SIGALRM


def forked(directory: Path) -> int:
    """Runs one trial in a process of its own; its exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT_S)
        os.environ["MASTER_PORT"] = (directory / "port").read_text()
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # rank 0 keeps the store
        log = os.open(directory / f"log{os.environ['RANK']}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os._exit(main(directory))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    for directory in sorted(Path(sys.argv[1]).iterdir(), key=lambda path: int(path.name)):
        code = forked(directory)
        (directory / f"exit{os.environ['RANK']}").write_text(str(code))
