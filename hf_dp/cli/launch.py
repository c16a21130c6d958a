"""Run a command in several processes: ``--num_processes`` and ``--accelerate_config``.

The command starts itself again through ``accelerate launch``, whose configuration files of the
cases that matter are in ``accelerate/`` beside this module.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_dp._validate import integer, one_of
from hf_dp.errors import ConfigError, HfDpError

FOLDER = Path(__file__).parent / "accelerate"


def configurations() -> list[str]:
    """Return the names of the configurations that come with hf_dp."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how many processes run a command, and how they are started."""
    add = parser.add_argument
    add(
        "--num-processes",
        type=int,
        metavar="N",
        help="processes on this machine: on as many GPUs, or on the CPU where there is none "
        "(default: 1)",
    )
    add(
        "--accelerate-config",
        metavar="NAME",
        help="how processes are started: a configuration file of accelerate, or one of "
        f"{', '.join(configurations())}",
    )


def launched_processes() -> int:
    """Return how many processes the launcher that started this one has started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def refuse_several(command: str, next_move: str) -> None:
    """Raise ConfigError where a launcher runs a command of one process in several."""
    if launched_processes() > 1:
        raise ConfigError(
            f"`{command}` runs in one process, and a launcher started {launched_processes()} "
            f"($WORLD_SIZE). {next_move}"
        )


def show_progress_once() -> None:
    """Hide the progress bars of data sets and models in all processes but the main one."""
    if int(os.environ.get("RANK") or 0) == 0:
        return
    import datasets
    from transformers.utils import logging

    datasets.disable_progress_bars()
    logging.disable_progress_bar()


def launch_words(args: argparse.Namespace) -> list[str]:
    """Return the words that ask for processes, empty where this one is enough.

    Raises: InvalidArgumentError, ConfigError: a number below 1, or a launcher started this process.
    """
    named = {"--num_processes": args.num_processes, "--accelerate_config": args.accelerate_config}
    asked = [
        word for name, value in named.items() if value is not None for word in (name, str(value))
    ]
    if asked and "WORLD_SIZE" in os.environ:
        raise ConfigError(
            f"Expected `{asked[0]}` to be left out where a launcher started this process "
            f"($WORLD_SIZE is {os.environ['WORLD_SIZE']!r}), got {asked[1]!r}. Let one of the two "
            "start the processes."
        )
    if args.num_processes is not None:
        integer("num_processes", args.num_processes, 1)
    return [] if args.num_processes == 1 and args.accelerate_config is None else asked


def launch(command: str, words: Sequence[str], args: argparse.Namespace) -> int:
    """Run ``hf-dp COMMAND WORDS`` in the processes that the options ask for.

    Returns: the exit code of the process that failed first, 128 and the signal's number where a
        signal ended it; 0 when all succeeded.

    Raises: ConfigError, InvalidArgumentError: a configuration that cannot be used.
    """
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command, launch_command_parser
    from accelerate.utils import patch_environment
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    file = _file(args.accelerate_config or _fitting())
    options = ["--config_file", str(file)]
    if args.num_processes is not None:
        options += ["--num_processes", str(args.num_processes)]
    try:
        config: Any = load_config_from_file(str(file))
        if (args.num_processes or config.num_processes) > 1 and config.distributed_type == "NO":
            raise ConfigError(
                f"Expected one process with {file.name!r}, whose `distributed_type` is NO, got "
                f"{args.num_processes}. Choose another of {configurations()}."
            )
        if config.main_process_port is None and config.num_machines == 1:
            options += ["--main_process_port", "0"]  # a free one: another run may have accelerate's
        parsed = launch_command_parser().parse_args(
            [*options, "--module", "hf_dp.cli.main", command, *words]
        )
        # accelerate itself does not hand `use_cpu` to several processes.
        on_cpu = {"accelerate_use_cpu": "true"} if config.use_cpu else {}
        with patch_environment(**on_cpu), _signals_reach_children():
            launch_command(parsed)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        code = _exit_code(failure.exitcode)
        print(
            f"hf-dp {command}: the process of rank {rank} failed first, with exit code {code}. "
            "What it said is above.",
            file=sys.stderr,
        )
        return code
    except subprocess.CalledProcessError as failed:  # of a configuration for one process
        return _exit_code(failed.returncode)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except HfDpError:
        raise
    except (ValueError, KeyError, TypeError, ConnectionError) as problem:
        raise ConfigError(
            f"accelerate refuses the configuration {file.name!r}: {problem} "
            "`accelerate config --config_file FILE` writes one."
        ) from problem
    return 0


def _fitting() -> str:
    """Return the configuration for several processes on this machine."""
    from hf_dp.trainer.launch import has_accelerator

    return "ddp_8_gpus" if has_accelerator() else "cpu_2_processes"


def _file(name: str) -> Path:
    """Return the file of a configuration, by its name or its path. Raises: ConfigError,
    InvalidArgumentError."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml", ".json"):
        known = one_of(
            "accelerate_config", name, configurations(), "Or give a file that ends in .yaml."
        )
        return FOLDER / f"{known}.yaml"
    if not path.is_file():
        raise ConfigError(
            f"Expected `accelerate_config` to be a file, or one of {configurations()}, got "
            f"{name!r}, which does not exist."
        )
    return path


@contextmanager
def _signals_reach_children() -> Iterator[None]:
    """Hand SIGTERM to the child that accelerate starts, and waits for, where there is one process.

    Where there are several, torch's launcher has handlers of its own while it runs.
    """

    def forward(number: int, frame: object) -> None:
        import psutil

        for child in psutil.Process().children():
            child.send_signal(number)

    before = signal.signal(signal.SIGTERM, forward)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit_code(returned: int) -> int:
    """Return an exit code as a shell has it, for a process that a signal (below 0) ended, too."""
    return 128 - returned if returned < 0 else returned
