"""Make a folder with the tokenizer and the shape of a small GPT-2, from public text.

    python recipes/pretraining/fresh_gpt2.py --text_files public.parquet --text_columns text \
        --output_dir outputs/fresh_gpt2

Then train it from random weights, with ``from_scratch: true``.
"""

from __future__ import annotations

import argparse

from hf_dp.tasks.generation.fresh_gpt2 import fresh_gpt2
from hf_dp.tasks.public_text import read_texts

parser = argparse.ArgumentParser(description="Make a small GPT-2 without weights.")
parser.add_argument("--text_files", nargs="+", required=True, help="files of public text")
parser.add_argument("--text_columns", nargs="+", required=True, help="columns of text")
parser.add_argument("--output_dir", required=True, help="folder to write")
for name, default in (("vocabulary", 4096), ("layers", 4), ("width", 192), ("heads", 4)):
    parser.add_argument(f"--{name}", type=int, default=default)
given = vars(parser.parse_args())
texts = read_texts(given.pop("text_files"), given.pop("text_columns"))
folder = given.pop("output_dir")
for made in fresh_gpt2(texts, **given):
    made.save_pretrained(folder)
print(folder)
