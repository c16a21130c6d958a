"""Several processes: ``hf-dp train --num_processes``, ``accelerate launch`` and ``torchrun``.

The commands are those that the configurations in recipes/accelerate name in their first lines.
"""

import fnmatch
import importlib
import io
import logging
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest
from accelerate.commands.launch import launch_command_parser
from processes import results
from recipe import Recipe
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from warm import OFFLINE

from hf_dp.cli import launch, train
from hf_dp.cli.main import main
from hf_dp.cli.tasks import classification
from hf_dp.cli.tasks.classification import TEXTS
from hf_dp.errors import ConfigError
from hf_dp.statement.evidence import disagreements, read
from hf_dp.tasks import models
from hf_dp.trainer.arguments import DPTrainingArguments

ROOT = Path(__file__).parent.parent.parent
FILES = {path.stem: path for path in sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))}
PROGRAMS = {
    "accelerate": [sys.executable, "-m", "accelerate.commands.accelerate_cli"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "hf-dp": [sys.executable, "-m", "hf_dp.cli.main"],
}


@pytest.fixture(scope="module", autouse=True)
def without_prv() -> None:
    """Leave nothing out: processes of their own do not, and are compared with this one."""


@pytest.fixture
def recipe(task) -> Recipe:
    """The tiny recipe with given noise, for no processor in particular."""
    task.change(target_epsilon=None, accountant=None, use_cpu=None, noise_multiplier=1.0)
    return task


def start(words: list[str]) -> subprocess.Popen[str]:
    """Start a command in the root of the project."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [*PROGRAMS[words[0]], *words[1:]], cwd=ROOT, env=OFFLINE, **pipes, text=True
    )


def started(words: list[str], recipe: Recipe) -> tuple[int, str, str]:
    """Run a command on the recipe (RECIPE); return its exit code and what it wrote."""
    child = start([str(recipe) if word == "RECIPE" else word for word in words])
    stdout, stderr = child.communicate()
    return child.returncode, stdout, stderr


def commands(name: str, **values: str) -> list[list[str]]:
    """The commands that a configuration's first lines name, with these values in their places."""
    text = FILES[name].read_text()
    found = re.findall(r"^#.*?\b((?:accelerate launch|torchrun) .*)", text, flags=re.MULTILINE)
    return [[values.get(word, word) for word in shlex.split(command)] for command in found]


def check_run(recipe: Recipe, stdout: str) -> None:
    """The run is there, once: its folder is verified, and it was printed by one process."""
    lines = stdout.strip().splitlines()
    assert lines[-1] == str(recipe.out)
    for printed in ("Privacy: ", "accuracy on the 20 evaluation rows", "  pld ", lines[-1]):
        assert len([line for line in lines if line.startswith(printed)]) == 1, stdout
    record = read(recipe.out)
    assert disagreements(record) == []
    assert [(event.steps, event.sample_rate) for event in record.ledger.events] == [(3, 0.2)]
    assert record.statement["epsilon"] == pytest.approx(0.957, abs=1e-3)
    files = {path.name for path in recipe.out.iterdir()}
    assert {"README.md", "model.safetensors", "eval_results.json"} <= files


def test_hf_dp_train_starts_two_processes(recipe, tmp_path, monkeypatch):
    """By accelerate's own launcher; each writes down what it is told, and the second one fails."""
    program = tmp_path / "python"
    said = f'echo "$WORLD_SIZE $ACCELERATE_USE_CPU $@" > {tmp_path}/rank$RANK'
    program.write_text(f"#!/bin/sh\n{said}\nexit $((3 * RANK))\n")
    program.chmod(0o755)
    monkeypatch.setenv("PYTHON_EXEC", str(program))  # in torch's launcher
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    recipe.run("train --num_processes 2", code=3)
    assert "rank 1 failed first, with exit code 3" in recipe.said
    told = f"2 true -u -m hf_dp.cli.main train --config {recipe}"
    assert [(tmp_path / f"rank{rank}").read_text().strip() for rank in (0, 1)] == [told] * 2


def test_two_processes_are_one_run(recipe):
    def rank() -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        logging.getLogger("hf_dp").addHandler(logging.StreamHandler(err))
        with redirect_stdout(out), redirect_stderr(err):
            code = main(["train", "--config", str(recipe)])
        return code, out.getvalue(), err.getvalue()

    codes, stdout, stderr = zip(*results(2, rank), strict=True)
    assert codes == (0, 0)
    check_run(recipe, "".join(reversed(stdout)))
    assert "".join(stderr).count("the 2 processes train on the CPU") == 1
    assert "".join(stderr).count("Loading weights: 100%") == 1


# -- real runs: about 20 s of processor time each ---


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        *commands("cpu", **{"RECIPE.yaml": "RECIPE"}),
        *commands("cpu_2_processes", **{"RECIPE.yaml": "RECIPE"}),
        shlex.split("torchrun --standalone --nproc_per_node 2 recipes/text_classification.py --config RECIPE"),
        # without accelerators these would be two jobs that do not know of each other
        shlex.split(
            "accelerate launch --multi_gpu --num_processes 2 --main_process_port 0 "
            "recipes/text_classification.py --config RECIPE"
        ),
        shlex.split("hf-dp train --accelerate_config cpu_2_processes --config RECIPE"),
        shlex.split("hf-dp train --num_processes 2 --config RECIPE"),
    ],
    ids=lambda words: " ".join(words[:4]),
)  # fmt: skip
def test_other_launchers_start_the_same_run(words, recipe):
    code, stdout, stderr = started(words, recipe)
    assert code == 0, stderr[-3000:]
    check_run(recipe, stdout)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
def test_two_launchers_on_one_machine_are_two_machines(launcher, recipe, tmp_path):
    values = {"HOST": "127.0.0.1", "RECIPE.yaml": str(recipe)}
    small = tmp_path / "two.yaml"
    small.write_text(
        FILES["ddp_2_machines"].read_text().replace("num_processes: 16", "num_processes: 2")
    )
    values |= {"recipes/accelerate/ddp_2_machines.yaml": str(small), "8": "1"}
    children = []
    for rank in ("0", "1"):
        (words,) = (
            words
            for words in commands("ddp_2_machines", RANK=rank, **values)
            if words[0] == launcher
        )
        children.append(start([*words, "--use_cpu", "True"]))
    (stdout, stderr), (other, other_stderr) = (child.communicate() for child in children)
    assert [child.returncode for child in children] == [0, 0], stderr + other_stderr
    check_run(recipe, stdout)
    assert "Privacy: " not in other and "accuracy on" not in other


@pytest.mark.slow
def test_accelerate_launch_that_starts_one_process_says_so(recipe):
    words = "accelerate launch --cpu --num_processes 2 recipes/text_classification.py --config"
    code, _, stderr = started([*words.split(), "RECIPE"], recipe)
    assert code != 0
    assert "`accelerate launch --cpu --num_processes N` started one process." in stderr
    assert not recipe.out.exists()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["one_gpu", "ddp_8_gpus", "fsdp2_8_gpus"])
def test_the_configurations_for_gpus_run_as_their_first_line_says(name, recipe):
    import torch

    (words,) = commands(name, **{"RECIPE.yaml": "RECIPE"})
    if name != "one_gpu":
        count = min(8, torch.cuda.device_count())
        if count < 2:
            pytest.skip("needs two GPUs")
        words[2:2] = ["--num_processes", str(count)]
    code, stdout, stderr = started(words, recipe)
    assert code == 0, stderr[-3000:]
    check_run(recipe, stdout)


# -- the configurations ---


@pytest.mark.parametrize("name", FILES)
def test_accelerate_reads_a_configuration_and_starts_what_its_first_line_says(name, monkeypatch):
    started = []
    for launcher in ("simple_launcher", "multi_gpu_launcher"):
        monkeypatch.setattr(
            f"accelerate.commands.launch.{launcher}",
            lambda args, launcher=launcher: started.append((launcher, args)),
        )
    monkeypatch.chdir(ROOT)
    first = FILES[name].read_text().splitlines()[0]
    assert f"accelerate launch --config_file recipes/accelerate/{name}.yaml " in first
    words = commands(name, RANK="1", HOST="first")[0]
    parsed = launch_command_parser().parse_args(words[2:])
    launch_command = importlib.import_module("accelerate.commands.launch").launch_command
    launch_command(parsed)
    ((launcher, args),) = started
    assert args.training_script == "recipes/text_classification.py"
    expected = {
        "cpu": (1, 1), "cpu_2_processes": (2, 1), "one_gpu": (1, 1), "ddp_8_gpus": (8, 1),
        "ddp_2_machines": (16, 2), "fsdp2_8_gpus": (8, 1),
    }  # fmt: skip
    assert (args.num_processes, args.num_machines) == expected[name]
    assert launcher == ("simple_launcher" if args.num_processes == 1 else "multi_gpu_launcher")
    assert args.use_cpu == name.startswith("cpu") and args.mixed_precision == "no"
    assert args.use_fsdp == (name == "fsdp2_8_gpus")
    if args.use_fsdp:
        how = args.fsdp_version, args.fsdp_auto_wrap_policy, args.fsdp_state_dict_type
        assert how == (2, "TRANSFORMER_BASED_WRAP", "FULL_STATE_DICT")
        assert args.fsdp_reshard_after_forward and not args.fsdp_cpu_ram_efficient_loading
    if args.num_machines == 2:
        assert (args.machine_rank, args.main_process_ip) == (1, "first")


@pytest.mark.parametrize("name", FILES)
def test_the_keys_of_a_configuration_are_accelerates(name):
    """accelerate refuses unknown keys at the top, and drops unknown ones inside a block."""
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(FILES[name]))
    known = vars(launch_command_parser().parse_args(["script.py"]))
    assert set(config.fsdp_config) <= set(known)


def test_the_configurations_are_installed_with_the_package():
    package_data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = package_data["package-data"]["hf_dp"]
    for path in launch.FOLDER.glob("*.yaml"):
        inside = path.relative_to(ROOT / "hf_dp").as_posix()
        assert any(fnmatch.fnmatch(inside, pattern) for pattern in patterns), inside
    assert list(FILES) == launch.CONFIGURATIONS  # recipes/accelerate is the same folder


# -- the options ---


@pytest.fixture
def launched(monkeypatch) -> list[Namespace]:
    """What accelerate was asked to launch; nothing starts."""
    found: list[Namespace] = []
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("accelerate.commands.launch.launch_command", found.append)
    return found


@pytest.mark.parametrize(
    ("accelerator", "words", "file", "count"),
    [
        (False, ["--num_processes", "3"], "cpu_2_processes", 3),
        (True, ["--num-processes", "3"], "ddp_8_gpus", 3),
        (False, ["--accelerate_config", "ddp_8_gpus"], "ddp_8_gpus", None),
        (False, ["--accelerate_config=one_gpu", "--num_processes", "1"], "one_gpu", 1),
    ],
)
def test_other_words_are_passed_on(accelerator, words, file, count, launched, recipe, monkeypatch):
    monkeypatch.setattr("hf_dp.trainer.launch.has_accelerator", lambda: accelerator)
    rest = ["--max_steps", "2", "--learning_rate=3"]
    recipe.run("train", *words, *rest)
    (args,) = launched
    assert (args.module, args.training_script) == (True, "hf_dp.cli.main")
    assert args.training_script_args == ["train", "--config", str(recipe), *rest]
    assert Path(args.config_file).stem == file and args.num_processes == count
    assert args.main_process_port == 0  # a free one


def test_one_process_is_this_one(launched, recipe, monkeypatch):
    ran = []
    known = train.training_module("text_classification").ARGUMENTS
    module = Namespace(train=lambda values, words: ran.append(words) or 0, ARGUMENTS=known)
    monkeypatch.setattr(train, "training_module", lambda name: module)
    recipe.run("train --num_processes 1")
    assert ran == [[]] and not launched


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        (["--num_processes", "0"], {}, r"`num_processes` to be a whole number >= 1, got 0"),
        (["--num_processes", "2"], {"WORLD_SIZE": "2"}, r"`--num_processes` to be left out .*WORLD_SIZE is '2'.*, got '2'"),
        (["--accelerate_config", "ddp"], {}, r"to be one of \['cpu', .*'one_gpu'\], got 'ddp'"),
        (["--accelerate_config", "no.yaml"], {}, r"one of \['cpu', .*got 'no.yaml'"),
        (["--accelerate_config", "RECIPE"], {}, r"refuses the configuration 'run.yaml': A `distributed_type`"),
        (["--task", "masked_lm", "--num_processes", "2"], {}, "'masked_lm' runs in one process"),
        (["--task", "masked_lm"], {"WORLD_SIZE": "2"}, "runs in one process, and a launcher star"),
    ],
)  # fmt: skip
def test_what_cannot_be_launched_is_refused(
    words, environment, message, launched, recipe, monkeypatch
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    recipe.refused(message, "train", *(str(recipe) if w == "RECIPE" else w for w in words))
    assert not launched


@pytest.mark.parametrize("command", ["eval", "sweep"])
def test_commands_of_one_process_refuse_a_launcher(command, recipe, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = {"eval": [], "sweep": ["--output-dir", "nowhere"]}[command]
    recipe.refused(f"`hf-dp {command}` runs in one process, and a launcher", command, *words)


def test_each_run_of_a_sweep_is_divided(recipe, children, tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    words = ["--output-dir", str(tmp_path / "sweep"), "--num-processes", "2"]
    recipe.run("sweep", *words, code=1)
    ((*_, name, count),) = children
    assert (name, count) == ("--num_processes", "2")


def test_an_error_names_its_rank(recipe, monkeypatch, capsys):
    monkeypatch.setattr(train, "main", Mock(side_effect=ConfigError("no.")))
    capsys.readouterr()
    for rank, who in (("0", "hf-dp train: no."), ("3", "hf-dp train (rank 3): no.")):
        monkeypatch.setenv("RANK", rank)
        assert main(["train"]) == 2
        assert capsys.readouterr().err.strip() == who


# -- what ranks share ---


def test_the_main_process_prepares_rows_before_the_others(recipe, monkeypatch):
    """They go into a cache that all processes of a machine share."""
    inside: list[str] = []

    @contextmanager
    def first(self: object, local: bool = True, desc: str = "work") -> Iterator[None]:
        inside.append(desc)
        yield
        inside.pop()

    def watched(module: ModuleType, name: str) -> None:
        act = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: seen.append((name, *inside)) or act(*args))

    seen: list[tuple[str, ...]] = []
    for name in ("load_train", "load_evaluation", "encode"):
        watched(classification, name)
    watched(models, "load_classifier")
    monkeypatch.setattr(DPTrainingArguments, "main_process_first", first)
    TEXTS.trainer_of({**recipe.values, "use_cpu": True}, [])
    assert seen == [
        ("load_train", "loading the rows"),
        ("load_evaluation", "loading the rows"),
        ("load_classifier",),
        ("encode", "encoding the rows"),
        ("encode", "encoding the rows"),
    ]


@pytest.mark.parametrize(("rank", "anew"), [(None, True), ("0", True), ("1", False)])
def test_only_the_first_process_of_a_machine_prepares_a_folder_anew(
    rank, anew, tmp_path, monkeypatch
):
    from hf_dp.tasks.sources import load_hub

    asked: list[dict[str, object]] = []
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **options: asked.append(options))
    if rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", rank)
    load_hub(str(tmp_path), None, "train")
    assert ("download_mode" in asked[0]) is anew


# -- exit codes ---


def failed(code: int) -> ChildFailedError:
    failure = ProcessFailure(local_rank=1, pid=1, exitcode=code, error_file="none")
    return ChildFailedError("hf_dp", {1: failure})


# What a rank or the only process ends with, and hf-dp train after it.
CODES = [(2, 2), (1, 1), (-9, 137), (-15, 143)]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        *((failed(code), end, f"rank 1 failed first, with exit code {end}") for code, end in CODES),
        *((subprocess.CalledProcessError(code, "python"), end, "") for code, end in CODES),
        (SignalException("stopped", signal.SIGINT), 130, ""),
        (ValueError("Less than two GPU ids"), 2, "refuses the configuration"),
    ],
)
def test_what_the_launcher_raises_is_an_exit_code(error, code, said, launched, recipe, monkeypatch):
    monkeypatch.setattr("accelerate.commands.launch.launch_command", Mock(side_effect=error))
    recipe.run("train --num_processes 2", code=code)
    assert said in recipe.said
