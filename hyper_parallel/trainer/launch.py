"""``python -m hyper_parallel.trainer.launch --config FILE [--section.key=value ...] [--nproc N]``: run one configuration.

Starts as many processes as ``train.accelerator`` multiplies to, one a device; under torchrun it joins those that torchrun
started (several nodes: torchrun's own flags). Logs of rank 0 go to the terminal, of every rank to ``<output_dir>/logs``.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import AcceleratorConfig, Config, micro_batches_per_step, resolve_topology
from ..config_loader import load_config
from .interruption import SIGNALS, Interruption, blocked, handed_on

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

VISIBLE_DEVICES = ("ASCEND_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
STOP_FILE = "stop"  # in the directory of the logs
STARTED_HERE = "HYPER_PARALLEL_STARTED"  # set for processes that this launcher started and reports for


def main(argv: Sequence[str] | None = None) -> int:
    """Run; a mistake in the input is one readable message and exit code 2, a failure of the run exit code 1."""
    try:
        arguments, nproc = _take_nproc(list(sys.argv[1:] if argv is None else argv))
        config = load_config(arguments)
        if "RANK" in os.environ:
            return _run_rank(config)
        processes = number_of_processes(config.train.accelerator, nproc)
        if processes > 1:
            # From before torch is loaded: it starts threads, and one that does not block a signal may be the one to get it.
            with blocked():
                _check(config, processes)
                return _start(config, arguments, processes)
        from .checkpoint import SaveError  # torch is loaded only once the configuration stands
        from .trainer import Trainer

        trainer = Trainer(config)
    except KeyboardInterrupt:
        return _interrupted()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        return _exit_code(trainer.train())
    except KeyboardInterrupt:
        return _interrupted()
    except (ValueError, FloatingPointError, SaveError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _exit_code(signal_number: int) -> int:
    """A run that a signal ended is not finished, and says so as shells do: a scheduler may start it again."""
    return 128 + signal_number if signal_number else 0


def _interrupted() -> int:
    print("interrupted", file=sys.stderr)
    return 130


def number_of_processes(accelerator: AcceleratorConfig, nproc: int | None) -> int:
    """What the accelerator section multiplies to; ``dp_shard: -1`` takes all visible devices, or else ``--nproc``."""
    others = accelerator.dp_replicate * accelerator.ep * accelerator.cp * accelerator.tp
    if accelerator.dp_shard != -1:
        processes = others * accelerator.dp_shard
        if nproc is not None and nproc != processes:
            resolve_topology(accelerator, nproc)  # raises, with the factors
        return processes
    for variable in VISIBLE_DEVICES:
        if os.environ.get(variable):
            devices = len([entry for entry in os.environ[variable].split(",") if entry.strip()])
            return resolve_topology(accelerator, devices).dp_shard * others
    if nproc is None:
        raise ValueError(
            "train.accelerator.dp_shard = -1 takes what is left of the devices, and none are named: set "
            f"{' or '.join(VISIBLE_DEVICES)}, or give --nproc N"
        )
    return resolve_topology(accelerator, nproc).dp_shard * others


def _take_nproc(arguments: list[str]) -> tuple[list[str], int | None]:
    rest, nproc = [], None
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name != "--nproc":
            rest.append(word)
            continue
        value = value if equals else next(words, "")
        if not value.isdigit() or int(value) < 1:
            raise ValueError(f"--nproc {value}: a number of processes, at least 1")
        nproc = int(value)
    return rest, nproc


def _check(config: Config, processes: int) -> None:
    """Refuse here, once, what every process would refuse."""
    from .. import models, platform

    platform.detect()
    topology = resolve_topology(config.train.accelerator, processes)
    micro_batches_per_step(config.train, topology.data_parallel_size)
    models.build(config).check_topology(topology)


def _start(config: Config, arguments: Sequence[str], processes: int) -> int:
    """Start the processes through torch's elastic launcher and report the first failure as one message."""
    import logging

    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from .checkpoint import make_output_dir

    for name in list(logging.root.manager.loggerDict):  # the message below says it once; some loggers set their own level
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    logs = make_output_dir(config.train.checkpoint) / "logs"
    logs.mkdir(exist_ok=True)
    os.environ[STARTED_HERE] = str(logs)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id="run",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=dict.fromkeys(range(1, processes), Std.ALL)),
    )
    stop_file = logs / STOP_FILE
    try:
        with handed_on(stop_file):
            elastic_launch(launch, sys.executable)("-m", "hyper_parallel.trainer.launch", *arguments)
    except ChildFailedError as error:
        rank, failure = min(error.failures.items(), key=lambda item: _order(item[1]))
        recorded = "time_ns" in failure.error_file_data
        text = failure.error_file_data["message"]["message"] if recorded else failure.message
        print(f"error: rank {rank}: {text} (logs of all ranks: {logs})", file=sys.stderr)
        return 2 if failure.exitcode == 2 else 1
    return _exit_code(int(stop_file.read_text())) if stop_file.exists() else 0


def _order(failure: ProcessFailure) -> tuple[bool, int]:
    """Sorts the cause first. Torch's own order is by whole seconds, in which the other ranks' lost connections follow.

    A rank without a record was killed, before what that did to the others; by SIGTERM, it was the launcher cleaning up.
    """
    return failure.exitcode in (-signal.SIGTERM, 128 + signal.SIGTERM), failure.error_file_data.get("time_ns", 0)


def _run_rank(config: Config) -> int:
    """One of several processes. A failure is recorded for the launcher and ends this process at once, so that no other
    waits for it in a collective."""
    rank, started_here = os.environ["RANK"], os.environ.get(STARTED_HERE)
    stop_file = Path(started_here) / STOP_FILE if started_here else None
    if stop_file is not None:
        _watch_launcher(stop_file)
        if rank == "0":
            sys.stdout = _Tee(stop_file.with_name("rank_0.log"))
    from .trainer import Trainer

    started = False
    try:
        trainer = Trainer(config)
        started = True
        stopped_by = trainer.train(Interruption(stop_file))
        return 0 if started_here else _exit_code(stopped_by)  # the launcher knows what it handed on
    except KeyboardInterrupt:
        os._exit(130)
    except BaseException as error:
        _record(error)
        if rank != "0" or not started_here:
            print(f"error: rank {rank}: {error}", file=sys.stderr)
            if not isinstance(error, ValueError):
                traceback.print_exc()
        elif not isinstance(error, ValueError):
            with (Path(started_here) / "rank_0.log").open("a") as log:
                traceback.print_exc(file=log)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(2 if isinstance(error, ValueError) and not started else 1)


def _watch_launcher(stop_file: Path) -> None:
    """End this process when the launcher is gone, or sends SIGTERM because another rank has failed.

    A rank that waits for a lost one in a collective runs no Python; a thread of its own hears the signal through a pipe. A
    SIGTERM that the launcher got too is its request to stop, and is left to the training loop.
    """
    launcher, (receive, send) = os.getppid(), os.pipe()
    os.set_blocking(send, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(send, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def watch() -> None:
        while os.getppid() == launcher:
            ready, _, _ = select.select([receive], [], [], 1.0)
            if ready and signal.SIGTERM in os.read(receive, 64):
                time.sleep(1.0)
                if not stop_file.exists():
                    os._exit(128 + signal.SIGTERM)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _record(error: BaseException) -> None:
    """Leave the error for the launcher, in the format of torch's elastic agent and with a time finer than its seconds."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
        try:
            Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}, "time_ns": time.time_ns()}))
        except OSError:  # a full disk, say; half a record would hide that anything failed
            Path(file).unlink(missing_ok=True)


class _Tee:
    """Standard output that a file receives too."""

    def __init__(self, path: Path) -> None:
        self._terminal, self._file = sys.stdout, path.open("a", buffering=1)

    def write(self, text: str) -> int:
        self._file.write(text)
        return self._terminal.write(text)

    def flush(self) -> None:
        self._file.flush()
        self._terminal.flush()

    def isatty(self) -> bool:
        return self._terminal.isatty()


if __name__ == "__main__":
    sys.exit(main())
