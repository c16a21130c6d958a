"""A full disk, an unwritable folder and too little memory: a clear error, a usable last checkpoint,
and each release recorded once."""

import errno
import os
import resource
from pathlib import Path

import pytest
import tiny
import torch
from safetensors import SafetensorError
from warm import run_program
from watch import watch

from hf_dp.errors import MemoryShortError, OutputError
from hf_dp.run.checkpoint import SAVING
from hf_dp.run.gate import Release
from hf_dp.run.witnesses import checkpoints, read_run

pytestmark = pytest.mark.usefixtures("unchecked")


def saving(folder: Path, **options):
    options = {"save_strategy": "steps", "save_steps": 2, "logging_strategy": "no", **options}
    return tiny.trainer(folder, accountant="rdp", **options)


@pytest.fixture
def let_out(monkeypatch):
    """The noised values that left."""
    return watch(monkeypatch, Release, "sum")


def check_and_resume(folder: Path, let_out: list, last: str | None) -> None:
    assert len(let_out) <= read_run(folder).ledger.steps() <= len(let_out) + 1
    assert [path.name for path in checkpoints(folder)][:1] == ([last] if last else [])
    assert all((path / "optimizer.pt").exists() for path in checkpoints(folder))
    if last:
        before = read_run(folder).ledger.steps()
        again = tiny.resumed(saving(folder))
        assert again.state.global_step == 4 and not (folder / SAVING).exists()
        assert again.ledger.steps() == before + 4 - int(last[-1])


@pytest.mark.parametrize("code", [errno.ENOSPC, pytest.param(errno.EACCES, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "call", "last", "said"),
    [
        ("ledger.jsonl", 3, "checkpoint-2", "The ledger"),  # of the third step
        ("_ledger_head.json", 3, "checkpoint-2", "The ledger"),
        ("_saving/checkpoint-4/model.safetensors", 0, "checkpoint-2", "checkpoint-4"),
        ("_saving/checkpoint-2/_ledger_copy.jsonl", 0, None, "checkpoint-2"),
    ],
)
def test_a_file_that_cannot_be_written(
    tmp_path, monkeypatch, let_out, name, call, last, said, code
):
    """The disk refuses at the sync, where a full one may say so first."""
    fsync, seen = os.fsync, [0]
    target, _, file = str(tmp_path / name).rpartition("/")

    def refuse(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        in_folder, _, written = path.rpartition("/")
        if in_folder == target and (written == file or written.startswith(f"_{file}.")):
            seen[0] += 1
            if seen[0] > max(0, call - 1):
                raise OSError(code, os.strerror(code))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(OutputError) as refused:
            saving(tmp_path).train()
    message = str(refused.value)
    assert message.startswith(said) and os.strerror(code) in message
    assert str(tmp_path) in message and "resume_from_checkpoint=True" in message
    check_and_resume(tmp_path, let_out, last)


@pytest.mark.parametrize("what", ["optimizer", "weights"])
def test_writers_with_errors_of_their_own_are_understood(tmp_path, monkeypatch, let_out, what):
    trainer = saving(tmp_path)
    owner, name, error = {
        "optimizer": (torch, "save", RuntimeError("PytorchStreamWriter failed writing file data/0")),
        "weights": (trainer.model, "save_pretrained", SafetensorError("No space left on device (os error 28)")),
    }[what]  # fmt: skip
    write = getattr(owner, name)

    def refuse(*given, **named):
        path = next((str(each) for each in given if isinstance(each, (str, Path))), "")
        if "checkpoint-4" in path and what in f"{path} weights":
            raise error
        return write(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, refuse)
        with pytest.raises(OutputError, match="checkpoint-4 could not be written"):
            trainer.train()
    check_and_resume(tmp_path, let_out, "checkpoint-2")


@pytest.mark.slow
def test_a_real_limit_on_file_size_stops_the_run_clearly(tmp_path):
    """RLIMIT_FSIZE makes the system itself refuse, as a quota does: weights of 40 kB."""
    code = """
import pathlib, resource, signal, sys
sys.path[:0] = sys.argv[2:]
import test_disk_and_memory
trainer = test_disk_and_memory.saving(pathlib.Path(sys.argv[1]))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
trainer.train()
"""
    folder = tmp_path / "run"
    tests = [str(Path(__file__).parent), str(Path(tiny.__file__).parent)]
    done = run_program(code, tmp_path, [str(folder), *tests])
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    assert done.returncode == 1
    assert "OutputError: checkpoint-2 could not be written" in done.stderr, done.stderr[-2000:]
    assert read_run(folder).ledger.steps() == 2 and checkpoints(folder) == []


@pytest.mark.parametrize("folder_is", ["a file", "read-only"])
def test_an_output_folder_that_cannot_be_used(tmp_path, monkeypatch, folder_is):
    folder = tmp_path / "run"
    trainer = saving(folder)
    if folder_is == "a file":
        folder.rmdir()
        folder.write_text("mine")
    else:
        denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        monkeypatch.setattr(Path, "mkdir", lambda *args, **kwargs: (_ for _ in ()).throw(denied))
    with pytest.raises(OutputError, match="A new run could not be written to.*another output_dir"):
        trainer.train()


OUT_OF_MEMORY = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    "cpu": RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate"),
}  # fmt: skip


@pytest.mark.parametrize("error", OUT_OF_MEMORY.values(), ids=OUT_OF_MEMORY)
def test_memory_that_runs_out_in_a_physical_batch_records_nothing(tmp_path, let_out, error):
    trainer = saving(tmp_path, per_device_train_batch_size=4, expected_batch_size=20)
    losses, calls = trainer.run.loss_of, [0]

    def short(model, batch):
        calls[0] += trainer.state.global_step == 2 and trainer.run._step_is_open
        if calls[0] == 2:  # the second physical batch of the third step
            raise error
        return losses(model, batch)

    trainer.run.loss_of = short
    with pytest.raises(MemoryShortError, match="per_device_train_batch_size.*max_tokens"):
        trainer.train()
    assert read_run(tmp_path).ledger.steps() == 2 == len(let_out)
    assert all(p.grad is None or not p.grad.any() for p in trainer.model.parameters())
    again = tiny.resumed(
        saving(tmp_path, per_device_train_batch_size=2, expected_batch_size=20, max_steps=3)
    )
    assert again.ledger.steps() == 3
