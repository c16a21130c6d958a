"""The model of image classification: an encoder of images with a head, and its image processor."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_dp.errors import ConfigError, DataError, HfDpError, UnsupportedModelError
from hf_dp.tasks.models import ClassifierArguments, labels_of, without_weights

COLORS = 3


@dataclass
class ImageModelArguments(ClassifierArguments):
    """Which model starts, and whether its head is kept."""

    new_head: bool = field(
        default=False,
        metadata={
            "help": "Replace the head of the base by a random one, also where it has the same "
            "classes. A head with other classes is always replaced."
        },
    )


def load_image_classifier(arguments: ImageModelArguments, names: Sequence[str]) -> tuple[Any, Any]:
    """Return model and image processor. The head is new, unless the base has these classes.

    Args:
        names: the classes, in the order of their ids.

    Raises:
        ConfigError: Pillow is not installed.
        DataError: model or image processor cannot be loaded.
        UnsupportedModelError: the model does not take images in RGB, or it is not known which part
            of it is the head.
    """
    from hf_dp.run.synthetic import image_config
    from hf_dp.tasks.files import resolve_model

    require_pillow()
    path = resolve_model(arguments.model_name_or_path)
    try:
        processor = load_processor(path)
        model = _load_model(path, names, arguments.from_scratch, arguments.new_head)
    except HfDpError:
        raise  # its message is complete; some are also a ValueError
    except (OSError, ValueError, ImportError) as problem:
        raise DataError(
            f"The model {arguments.model_name_or_path!r} could not be loaded as an image "
            f"classifier: {str(problem).splitlines()[0]} Give a Hub name, or a folder with "
            "config.json, weights and preprocessor_config.json."
        ) from problem
    channels = getattr(image_config(model), "num_channels", COLORS)
    if channels != COLORS:
        raise UnsupportedModelError(
            f"Expected a model that takes images in RGB, but {arguments.model_name_or_path!r} has "
            f"num_channels {channels}. Choose another model."
        )
    return model, processor


def require_pillow() -> None:
    """Raise ConfigError where images cannot be decoded."""
    if importlib.util.find_spec("PIL") is None:
        raise ConfigError(
            "Images are decoded with Pillow, which is not installed. Install it with: pip install "
            "'hf-dp[images]'"
        )


def load_processor(path: str) -> Any:
    """Return the image processor of a model; the same one whether or not torchvision is here."""
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(path, backend="pil")


def _load_model(path: str, names: Sequence[str], from_scratch: bool, new_head: bool) -> Any:
    from transformers import AutoConfig, AutoModelForImageClassification

    auto = AutoModelForImageClassification
    own = AutoConfig.from_pretrained(path)
    config = AutoConfig.from_pretrained(path, **labels_of(names))
    if from_scratch:
        return without_weights(auto, config)
    # A head of another size is made anew; what else does not fit is refused below.
    model, info = auto.from_pretrained(
        path, config=config, output_loading_info=True, ignore_mismatched_sizes=True
    )
    head = _head_parameters(model)
    other = sorted({name for name, *_ in info["mismatched_keys"]} - head)
    if other:
        raise DataError(
            f"The weights in {path!r} do not fit its config.json: {', '.join(other)} have other "
            "shapes. Use the configuration with which they were saved."
        )
    known = [own.id2label[index] for index in range(own.num_labels)]
    renewed: set[str] = set()
    if new_head or known != list(names):
        renewed = head
        _copy(auto.from_config(config), model, head)
    model.newly_initialized = sorted(renewed | set(info["missing_keys"]))
    return model


def _head_parameters(model: Any) -> set[str]:
    """Return the names of the parameters of a classifier's head.

    Raises: UnsupportedModelError where it is not known, or there is none beside the backbone.
    """
    from hf_dp.run.checks import head_of

    names = {
        f"{part}.{name}"
        for part, module in head_of(model).items()
        for name, _ in module.named_parameters()
    }
    if not names:
        raise UnsupportedModelError(
            f"Expected a model with a head beside its backbone, but {type(model).__name__} has "
            f"nothing beside {model.base_model_prefix!r}. Choose another model."
        )
    return names


def _copy(source: Any, target: Any, names: Collection[str]) -> None:
    """Give one model the named parameters of another."""
    import torch

    with torch.no_grad():
        for name in names:
            target.get_parameter(name).copy_(source.get_parameter(name))


def check_pixels(model: Any, shape: Sequence[int]) -> None:
    """Raise DataError if a model does not take images of this size; made-up ones are used.

    Args: shape: of one image's pixels, (3, H, W).
    """
    import torch

    training = model.training
    try:
        with torch.no_grad():
            model.eval()(pixel_values=torch.zeros(1, *shape, dtype=model.dtype))
    except (RuntimeError, ValueError) as problem:
        raise DataError(
            f"The image processor makes images of {' x '.join(map(str, shape))}, on which the "
            f"model fails: {str(problem).splitlines()[0]} Set `size` in preprocessor_config.json "
            "to the model's image_size."
        ) from problem
    finally:
        model.train(training)
