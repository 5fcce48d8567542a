"""The image tower that a configuration describes."""

from torch import nn

from llamatool.config.model import ModelConfig
from llamatool.errors import UnsupportedError
from llamatool.model.vision_llama4 import Llama4Projector, Llama4Tower
from llamatool.model.vision_mllama import MllamaProjector, MllamaTower

Tower = MllamaTower | Llama4Tower


def tower_of(config: ModelConfig) -> tuple[Tower, nn.Module]:
    """The tower, which turns an image into features, and their projection to the decoder's width.

    Raises: UnsupportedError if the model has no tower.
    """
    vision = config.vision
    if vision is None:
        raise UnsupportedError("this model reads no images")
    if vision.kind == "mllama":
        return MllamaTower(vision), MllamaProjector(vision, config.hidden_size)
    return Llama4Tower(vision), Llama4Projector(vision, config.hidden_size)
