"""Fine-tune an encoder to classify texts with differential privacy.

    accelerate launch recipes/text_classification.py --config recipes/demo/minilm_dp_adam.yaml

This script runs the same main as `hf-dp train`. Read hf_dp/cli/tasks/classification.py to see
each step.
"""

import sys

from hf_dp.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["train", *sys.argv[1:]]))
