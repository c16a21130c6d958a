"""Run a command in several processes: ``--num_processes`` and ``--accelerate_config``.

The command starts itself again by accelerate's own launcher, whose configuration files of the cases
that matter are in ``accelerate/`` beside this module.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_dp._validate import integer, one_of
from hf_dp.cli.options import Parser
from hf_dp.errors import ConfigError

FOLDER = Path(__file__).parent / "accelerate"
CONFIGURATIONS = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def add_launch_options(parser: Parser) -> None:
    """Add the options that say how many processes run a command, and how they are started."""
    where = "processes on this machine: on as many GPUs, or on the CPU where there is none"
    parser.option("--num-processes", f"{where} (default: 1)", "N", type=int)
    how = "how processes are started: a configuration file of accelerate, or one of "
    parser.option("--accelerate-config", how + ", ".join(CONFIGURATIONS), "NAME")


def launched_processes() -> int:
    """Return how many processes the launcher that started this one has started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def refuse_several(command: str, next_move: str = "Start it without a launcher.") -> None:
    """Raise ConfigError where a launcher runs a command of one process in several."""
    if launched_processes() > 1:
        raise ConfigError(
            f"`{command}` runs in one process, and a launcher started {launched_processes()} "
            f"($WORLD_SIZE). {next_move}"
        )


def launch_words(args: argparse.Namespace) -> list[str]:
    """Return the words that ask for processes, empty where this one is enough."""
    named = {"--num_processes": args.num_processes, "--accelerate_config": args.accelerate_config}
    given = {name: str(value) for name, value in named.items() if value is not None}
    asked = [word for pair in given.items() for word in pair]
    if asked and "WORLD_SIZE" in os.environ:
        raise ConfigError(
            f"Expected `{asked[0]}` to be left out where a launcher started this process "
            f"($WORLD_SIZE is {os.environ['WORLD_SIZE']!r}), got {asked[1]!r}."
        )
    if args.num_processes is not None:
        integer("num_processes", args.num_processes, 1)
    return [] if asked == ["--num_processes", "1"] else asked


def launch(command: str, words: Sequence[str], args: argparse.Namespace) -> int:
    """Run ``hf-dp COMMAND WORDS`` in the processes that the options ask for.

    Returns: the exit code of the process that failed first, 128 and the signal's number where a
        signal ended it; 0 when all succeeded.
    """
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command, launch_command_parser
    from accelerate.utils import patch_environment
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from hf_dp.trainer.launch import has_accelerator

    fitting = "ddp_8_gpus" if has_accelerator() else "cpu_2_processes"
    file = args.accelerate_config or fitting
    if not Path(file).is_file():
        advice = "Or give a file of accelerate."
        file = str(FOLDER / f"{one_of('accelerate_config', file, CONFIGURATIONS, advice)}.yaml")
    options = ["--config_file", file]
    if args.num_processes is not None:
        options += ["--num_processes", str(args.num_processes)]
    try:
        config = load_config_from_file(file)
        if config.main_process_port is None and config.num_machines == 1:
            options += ["--main_process_port", "0"]  # a free one: another run may have accelerate's
        parsed = launch_command_parser().parse_args(
            [*options, "--module", "hf_dp.cli.main", command, *words]
        )
        # accelerate itself does not hand `use_cpu` to several processes.
        with patch_environment(**({"accelerate_use_cpu": "true"} if config.use_cpu else {})):
            launch_command(parsed)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        print(f"hf-dp {command}: rank {rank} failed first, with exit code {code}", file=sys.stderr)
        return code
    except subprocess.CalledProcessError as failed:  # of a configuration for one process
        return failed.returncode if failed.returncode >= 0 else 128 - failed.returncode
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except (ValueError, KeyError, TypeError, ConnectionError) as problem:
        raise ConfigError(
            f"accelerate refuses the configuration {Path(file).name!r}: {problem} "
            "`accelerate config --config_file FILE` writes one."
        ) from problem
    return 0
