"""Teach a language model by rewards to answer with the right word about a film review (page:
hf_dp/trainer/grpo.md).

    python recipes/sst2/grpo.py BASE TRAIN.parquet DEV.parquet OUTPUT_DIR

BASE is a decoder that knows words, such as HuggingFaceTB/SmolLM2-135M-Instruct.
"""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dp.trainer.grpo import DPGRPOConfig, DPGRPOTrainer

WORDS = ["negative", "positive"]


def prompts(file: str) -> Dataset:
    """Return the sentences as prompts, each with its answer."""
    return Dataset.from_parquet(file).map(
        lambda row: {
            "prompt": f"Review: {row['sentence'].strip()}\nSentiment (positive or negative):",
            "answer": WORDS[row["label"]],
        },
        remove_columns=["sentence", "label"],
    )


def says_it(completions: list[str], answer: list[str], **others: object) -> list[float]:
    """Return 1 for a completion that begins with the right word."""
    pairs = zip(completions, answer, strict=True)
    return [float(text.strip().lower().startswith(right)) for text, right in pairs]


def main(base: str, train: str, dev: str, output: str) -> None:
    trainer = DPGRPOTrainer(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16),
        says_it,
        DPGRPOConfig(
            output_dir=output,
            target_epsilon=8,
            expected_batch_size=96,
            num_generations=4,
            max_completion_length=2,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=16,
            per_example_max_grad_norm=0.1,
            max_steps=20,
            learning_rate=4e-3,
            lr_scheduler_type="constant",
            use_cpu=True,
            logging_steps=1,
            report_to="none",
        ),
        train_dataset=prompts(train),
        eval_dataset=prompts(dev).select(range(150)),
        processing_class=AutoTokenizer.from_pretrained(base),
        peft_config=LoraConfig(
            r=2,
            lora_alpha=4,
            target_modules=["q_proj", "v_proj"],
            layers_to_transform=list(range(22, 30)),
            task_type="CAUSAL_LM",
        ),
    )
    print("reward before", trainer.evaluate()["eval_reward"])
    trainer.train()
    print("reward after", trainer.evaluate()["eval_reward"])
    print(trainer.privacy_statement())
    trainer.save_model()


if __name__ == "__main__":
    main(*sys.argv[1:])
