"""Metadata goes into a weights file and nothing else of it changes."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from hf_dp.errors import LedgerError
from hf_dp.run.witnesses import NOT_WEIGHTS, add_metadata, read_metadata, weights_files
from hf_dp.statement import durable
from hf_dp.tuners.single_entries import _MASKS

TENSORS = {
    "a.weight": torch.arange(35, dtype=torch.float32).reshape(5, 7),
    "naïve": torch.tensor([1, 2, 3], dtype=torch.uint8),  # leaves what follows at an odd place
    "c": torch.randn(3, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "empty": torch.zeros(0, 4),
}


@pytest.fixture(
    params=[None, {"format": "pt"}, {"format": "pt", "other": 'quoted " and\nbroken ä'}]
)
def weights(request, tmp_path: Path) -> tuple[Path, dict[str, str]]:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(TENSORS, path, metadata=request.param)
    return path, request.param or {}


def tensor_bytes(path: Path) -> bytes:
    content = path.read_bytes()
    return content[8 + int.from_bytes(content[:8], "little") :]


@pytest.mark.parametrize("length", [0, 1, 2, 7, 8, 1000])
def test_tensors_and_other_metadata_stay_as_they_are(weights, length) -> None:
    path, before = weights
    data = tensor_bytes(path)
    add_metadata(path, {"mark": "x" * length})
    assert tensor_bytes(path) == data
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    with safe_open(path, framework="pt") as file:
        assert (file.metadata() or {}) == {**before, "mark": "x" * length} == read_metadata(path)
    loaded = safetensors.torch.load_file(path)
    assert loaded.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert torch.equal(loaded[name], value) and loaded[name].dtype == value.dtype
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_metadata_can_be_put_in_again(weights) -> None:
    path, before = weights
    data, size = tensor_bytes(path), []
    for text in ("one", "a longer one than before", "s"):
        add_metadata(path, {"mark": text})
        size.append(path.stat().st_size)
    assert read_metadata(path) == {**before, "mark": "s"}
    assert tensor_bytes(path) == data
    assert size[2] <= size[0] < size[1]


def test_a_file_in_pieces_is_the_same_file(weights, monkeypatch) -> None:
    monkeypatch.setattr("hf_dp.run.witnesses._CHUNK", 7)
    test_metadata_can_be_put_in_again(weights)


@pytest.mark.parametrize("where", ["replace", "fsync"])
def test_a_kill_leaves_the_old_file(weights, monkeypatch, where) -> None:
    path, _ = weights
    content = path.read_bytes()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(durable.os, where, killed)
    with pytest.raises(KeyboardInterrupt):
        add_metadata(path, {"mark": "x"})
    monkeypatch.undo()
    assert path.read_bytes() == content
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_rights_of_the_file_are_kept(weights) -> None:
    path, _ = weights
    path.chmod(0o640)
    add_metadata(path, {"mark": "x"})
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x05",
        b"\xff" * 8,
        (100).to_bytes(8, "little") + b'{"a"',
        (2).to_bytes(8, "little") + b"[]",
        (22).to_bytes(8, "little") + b'{"__metadata__":{"a":1}}'[:22],
        (24).to_bytes(8, "little") + b'{"__metadata__":{"a":1}}',
        (2).to_bytes(8, "little") + b"\xff\xff",
    ],
)
def test_a_header_that_cannot_be_read_is_refused_and_left(content, tmp_path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    said = r"model\.safetensors to be a safetensors file.*cannot be read.*Restore it"
    for call in (read_metadata, lambda p: add_metadata(p, {"a": "b"})):
        with pytest.raises(LedgerError, match=said):
            call(path)
    assert path.read_bytes() == content


def test_which_files_are_weights(tmp_path) -> None:
    adapters = {"adapter_model.safetensors", "mine/adapter_model.safetensors"}
    wanted = {"model.safetensors", "model-00001-of-00002.safetensors", *adapters}
    deeper = {"checkpoint-2/adapter_model.safetensors", "deep/model.safetensors"}
    others = {"_released_rows.safetensors", "x.bin", *NOT_WEIGHTS, *deeper}
    for name in wanted | others:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert {str(path.relative_to(tmp_path)) for path in weights_files(tmp_path)} == wanted


def test_masks_have_the_name_under_which_they_are_saved() -> None:
    assert NOT_WEIGHTS == (_MASKS,)
