"""The Python lines of a card load what was trained, with its classes."""

import re
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny
import torch
from transformers import AutoModelForSequenceClassification

from hf_dp import FrostConfig
from hf_dp.tuners.adapter import AdapterConfig

pytestmark = pytest.mark.usefixtures("unchecked")

NAMES = ["bad", "fair", "good"]
WHAT_TRAINS = {
    "everything": None,
    "lora": peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]),
    "frost": FrostConfig(selection_sample_rate=0.2, selection_noise_multiplier=1.0),
    "adapter": AdapterConfig(task_type="SEQ_CLS", bottleneck_size=2),
}


def program(folder: Path, base: Path) -> str:
    *_, lines = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), flags=re.S)
    lines = lines.replace("path/to/this/folder", str(folder))
    # The base is a folder, of which a card has only the name.
    return re.sub(r"(Classification\.from_pretrained\()'[^']*'", rf"\1'{base}'", lines)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", WHAT_TRAINS)
@pytest.mark.parametrize("classes_of_base", [2, 3])
def test_the_lines_of_the_card_load_the_classes_and_the_weights(what, classes_of_base, tmp_path):
    base, folder = tmp_path / "base", tmp_path / "out"
    tiny.model(num_labels=classes_of_base).save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)
    model = AutoModelForSequenceClassification.from_pretrained(
        base, id2label=dict(enumerate(NAMES)), ignore_mismatched_sizes=True
    )
    given = {"model": model, "peft_config": WHAT_TRAINS[what]}
    given["processing_class"] = tiny.tokenizer()
    trainer = tiny.trained(tiny.trainer(folder, given=given, max_steps=1, accountant="rdp"))
    trainer.save_model()
    space: dict[str, Any] = {}
    exec(program(folder, base), space)
    sentence = tiny.rows()[3]["sentence"]
    (answers,) = space["model"]([sentence], top_k=None)
    with torch.no_grad():
        logits = trainer.model.eval()(**tiny.tokenizer()([sentence], return_tensors="pt")).logits
    expected = dict(zip(NAMES, logits.softmax(-1)[0].tolist(), strict=True))
    assert {each["label"]: each["score"] for each in answers} == pytest.approx(expected, abs=1e-5)
