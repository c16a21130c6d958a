r"""Continue the pretraining of a masked language model on public text, without privacy.

    python recipes/pretraining/masked_lm.py --config recipes/pretraining/minilm_masked_lm.yaml \
        --text_files A.parquet B.parquet

This script runs the same main as `hf-dp train` with `task: masked_lm`. Read
hf_dp/cli/tasks/masked_lm.py to see each step.
"""

import sys

from hf_dp.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["train", "--task", "masked_lm", *sys.argv[1:]]))
