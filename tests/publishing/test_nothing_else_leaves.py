"""Over every byte that the Hub receives: no row, path, un-noised loss, draw, name or token.

A run that writes all of these into its own folder is pushed; what is looked for is there, and not
in what was received.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import tiny
from loopback_hub import TOKEN, USER
from peft import LoraConfig
from transformers import DataCollatorWithPadding, TrainerCallback

from hf_dp.plans.samplers import PoissonSampler
from hf_dp.publishing import allowed
from hf_dp.trainer.trainer import DPTrainer

NAME = f"{USER}/model"
PERSON, MACHINE = "quillon-of-tests", "machine-zanzibar"
LOSS = 7654321.0  # added to every example's loss, which moves no gradient


class KnownLoss(DPTrainer):
    def compute_per_example_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        return super().compute_per_example_loss(model, inputs) + LOSS


class WritesAllDown(TrainerCallback):
    """What a careless script leaves in the folders from which is pushed."""

    def __init__(self, rows: list[str], draws: list[list[int]]):
        self.rows, self.draws = rows, draws

    def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir)
        for place in (folder, *folder.glob("checkpoint-*")):
            (place / "predictions.jsonl").write_text("\n".join(self.rows))
            (place / "draws.txt").write_text("\n".join(map(json.dumps, self.draws)))
            (place / "notes.txt").write_text(f"{TOKEN} {Path.home()} {PERSON} {MACHINE}")


def published(
    hub, tmp_path: Path, monkeypatch, strategy: str, adapter: bool
) -> tuple[dict[str, bytes], DPTrainer]:
    """Train and push; return what must not have left, by name, and the trainer."""
    home = tmp_path / "home-of-people" / PERSON
    output = home / "outputs-ruritania" / "run-sealand"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("LOGNAME", PERSON)
    monkeypatch.setenv("USER", PERSON)
    monkeypatch.setattr("socket.gethostname", lambda: MACHINE)
    base = tiny.save(home / "bases-freedonia" / "bert")
    reader = tiny.tokenizer().from_pretrained(base)
    rows = [f"row-{i}-of-graustark {row['sentence']}" for i, row in enumerate(tiny.rows(40))]
    file = home / "data-elbonia" / "train.parquet"
    tiny.dataset().add_column("sentence", rows).to_parquet(file)
    data = datasets.Dataset.from_parquet(str(file), cache_dir=str(home / "cache-latveria"))
    draws: list[list[int]] = []
    draw = PoissonSampler.draw
    monkeypatch.setattr(
        PoissonSampler, "draw", lambda self: (draws.append(found := draw(self)), found)[1]
    )
    config = LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS") if adapter else None
    given = {"model": str(base), "peft_config": config, "callbacks": [WritesAllDown(rows, draws)]}
    given |= {"train_dataset": data, "processing_class": reader}
    given["data_collator"] = DataCollatorWithPadding(reader)
    # The loss is released into the logs of this machine.
    logs = {"logging_steps": 1, "report_to": "tensorboard", "release": ["training_loss"]}
    saves = {"save_strategy": "steps", "save_steps": 2, "run_name": f"run by {PERSON}"}
    pushes = {"push_to_hub": True, "hub_model_id": NAME, "hub_strategy": strategy}
    pushes |= {"hub_always_push": True, "hub_token": TOKEN}
    trainer = tiny.trainer(output, cls=KnownLoss, given=given, **logs, **saves, **pushes)
    trainer.describe(base_model=f"{USER}/tiny-base")
    trainer.train()
    trainer.push_to_hub()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    losses = [loss for loss in losses if loss]  # 0 for an empty draw
    drawn = [found for found in draws if len(found) >= 4]
    assert losses and min(losses) > LOSS / 9 and drawn
    words = {
        "a row": b"-of-graustark",
        "the output folder": b"outputs-ruritania",
        "the run's folder": b"run-sealand",
        "the data's path": b"data-elbonia",
        "the base's path": b"bases-freedonia",
        "the home folder": b"home-of-people",
        "the user": PERSON.encode(),
        "the machine": MACHINE.encode(),
        "the token": TOKEN.encode(),
        **{f"draw {n}": json.dumps(found)[1:-1].encode() for n, found in enumerate(drawn)},
    }
    for n, loss in enumerate(losses):
        words[f"loss {n} in words"] = str(loss)[:9].encode()
        words[f"loss {n} in bytes"] = b"\x15" + struct.pack("<f", loss)  # as TensorBoard's event
    return words, trainer


def found(words: dict[str, bytes], texts: Iterator[tuple[str, bytes]]) -> dict[str, str]:
    """Where each of the words is, of those that are anywhere."""
    return {name: where for where, text in texts for name, word in words.items() if word in text}


def on_disk(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in folder.rglob("*"):
        yield str(path), str(path).encode()
        if path.is_file():
            yield str(path), path.read_bytes()


def test_of_what_is_private_nothing_is_received(hub, tmp_path, monkeypatch):
    words, trainer = published(hub, tmp_path, monkeypatch, "every_save", False)
    assert set(found(words, on_disk(tmp_path))) == set(words)  # there to be found
    assert len(hub.pushes(NAME)) == 3
    assert any("model.safetensors" in where for where, _ in hub.received())
    assert found(words, hub.received()) == {}
    assert all(TOKEN in request.headers.get("authorization", "") for request in hub.requests)

    # The same, with an allow-list to which one file is added, or that lets everything go.
    checkpoint = f"{trainer.args.output_dir}/checkpoint-4"
    goes = {r"trainer_state\.json": "planted", **allowed._GOES}
    monkeypatch.setattr(allowed, "_GOES", goes)
    trainer._push_from_checkpoint(checkpoint)
    assert any(name.startswith("loss") for name in found(words, hub.received()))
    monkeypatch.setattr(allowed, "_GOES", {r"(?!_|checkpoint).*": "planted"})
    monkeypatch.setattr("hf_dp.publishing.scan.Scan.published", lambda self, name, text: text)
    trainer.push_to_hub()
    seen = set(found(words, hub.received()))
    shown = {name for name in words if name.startswith(("loss", "draw"))}
    assert {"a row", "the user", "the machine", "the token", *shown} <= seen
    assert {"the output folder", "the run's folder"} <= seen


def test_nothing_private_is_received_of_an_adapter(hub, tmp_path, monkeypatch):
    words, _ = published(hub, tmp_path, monkeypatch, "end", True)
    assert set(found(words, on_disk(tmp_path))) == set(words)
    assert len(hub.pushes(NAME)) == 1
    assert any("adapter_model.safetensors" in where for where, _ in hub.received())
    assert found(words, hub.received()) == {}
