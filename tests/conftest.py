"""What holds for every test: the imported modules are not searched for garbage again and again."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """Keep what the imports left out of later collections.

    Each ``Trainer.train()`` calls ``gc.collect()``, which searches every object of torch,
    transformers and the collected tests: a third of a second, longer than most runs here take.
    """
    gc.collect()
    gc.freeze()
