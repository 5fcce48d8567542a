"""Pictures as tiles: which canvas, how large, which numbers.

Both families cut an image into square tiles. They choose a canvas of as many tiles as suit the
shape of the image, resize the image to fit without distortion, fill up at the right and below
with black, and cut. Llama 4 adds a last tile that shows the whole image, squeezed to a square.

Letters: N tiles, C channels, H and W pixels along the sides of a tile.

Sources: transformers image_processing_pil_mllama.py and image_processing_llama4.py; llama-models
llama3/multimodal/image_transform.py and llama4/preprocess.py.
"""

import math
import struct
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from llamatool.checkpoint import files
from llamatool.config.model import VisionConfig
from llamatool.errors import InputError, MissingExtraError, UnsupportedError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 100_000_000  # of a picture before it is made smaller; 300 MB once unpacked
# Pillow knows more, but would start another program for some (EPS).
FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "GIF", "TIFF", "BMP", "JPEG2000", "PPM", "TGA", "ICO")
WHITE = (255, 255, 255, 255)


class Tiles(NamedTuple):
    """An image, cut and normalised: the tiles row by row, where there is one the global one last.

    The global tile does not count in `grid`.
    """

    pixels_NCHW: Tensor
    grid: tuple[int, int]  # rows and columns of tiles


class _Style(NamedTuple):
    """What the image processors of the two families differ in."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    global_tile: bool
    dtype: torch.dtype  # in which pixels are scaled


# By VisionConfig.kind.
_STYLES = {
    # The statistics of CLIP.
    "mllama": _Style(
        mean=(0.48145466, 0.4578275, 0.40821073),
        std=(0.26862954, 0.26130258, 0.27577711),
        global_tile=False,
        dtype=torch.float32,
    ),
    "llama4": _Style(
        mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), global_tile=True, dtype=torch.bfloat16
    ),
}


def load_tiles(path: str | Path, vision: VisionConfig) -> Tiles:
    """The tiles of the picture in a file, as the tower wants them.

    Raises: as `open_picture`.
    Example: 1000 x 600 pixels for Llama 3.2 at 560 px -> 2 x 2 tiles, [4, 3, 560, 560].
    """
    return tile(open_picture(path), vision)


def open_picture(path: str | Path) -> "Image":
    """The picture in a file, upright, in RGB, on white where it is transparent.

    A camera's note of how it was held (EXIF) turns the picture; 16-bit grey becomes 8-bit; of an
    animation, the first picture counts.

    Raises: MissingExtraError without Pillow; InputError if the file is missing, is no picture, is
    broken, or has more than MAX_PIXELS; UnsupportedError for pixels of floating point.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ModuleNotFoundError:
        raise MissingExtraError("reading images", "Pillow", "vision") from None
    path = Path(path)
    with files.open_regular(path) as stream, warnings.catch_warnings(), _whole_pictures_only():
        # Of large pictures (the limit here is an error in words) and of odd notes in files.
        warnings.simplefilter("ignore")
        try:
            Image.init()  # which formats there are depends on how Pillow was built
            picture = Image.open(stream, formats=[name for name in FORMATS if name in Image.OPEN])
            _require_decent(picture.size, path)
            picture.load()
            return _rgb(ImageOps.exif_transpose(picture), path)
        except Image.DecompressionBombError:
            raise InputError(
                f"the picture has more than {MAX_PIXELS:,} pixels", where=str(path)
            ) from None
        except UnidentifiedImageError:
            raise InputError(
                "this is no picture of a kind that is read here",
                where=str(path),
                hint=f"known are {', '.join(FORMATS)}",
            ) from None
        except _BROKEN as error:
            reason = str(error) or type(error).__name__
            raise InputError(f"the picture is broken: {reason[:200]}", where=str(path)) from None


@contextmanager
def _whole_pictures_only() -> Iterator[None]:
    """Pillow fills up a file that ends early where any other package has told it to."""
    from PIL import ImageFile

    before = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before


# What the decoders of Pillow raise for damaged files, besides OSError.
_BROKEN = (
    OSError, SyntaxError, ValueError, EOFError, TypeError, KeyError, IndexError, OverflowError,
    AttributeError, NotImplementedError, struct.error, zlib.error,
)  # fmt: skip


def tile(picture: "Image", vision: VisionConfig) -> Tiles:
    """The tiles of an RGB picture."""
    style, side = _STYLES[vision.kind], vision.image_size
    width, height = picture.size
    rows, columns = choose_grid(height, width, side, vision.max_num_tiles)
    new_height, new_width = fitted_size(height, width, side, rows, columns)
    canvas_CHW = torch.zeros(3, rows * side, columns * side, dtype=torch.uint8)
    canvas_CHW[:, :new_height, :new_width] = _resized(picture, new_height, new_width)
    tiles_NCHW = (
        canvas_CHW.view(3, rows, side, columns, side)
        .permute(1, 3, 0, 2, 4)
        .reshape(-1, 3, side, side)
    )
    if style.global_tile and rows * columns > 1:
        tiles_NCHW = torch.cat((tiles_NCHW, _resized(picture, side, side)[None]))
    return Tiles(_normalised(tiles_NCHW, style), (rows, columns))


def choose_grid(height: int, width: int, side: int, max_num_tiles: int) -> tuple[int, int]:
    """Rows and columns of tiles for a picture of `height` x `width` pixels.

    Of all grids of at most `max_num_tiles`, the one that needs the least enlargement to be filled
    in one direction; if all need the picture smaller, the one that keeps it largest. Among those
    alike, the fewest tiles.

    Example: 600 x 1000 pixels, tiles of 560 -> (2, 2); 300 x 1600 -> (1, 3).
    """
    grids = [
        (rows, columns)
        for rows in range(1, max_num_tiles + 1)
        for columns in range(1, max_num_tiles // rows + 1)
    ]
    scales = {grid: min(grid[1] * side / width, grid[0] * side / height) for grid in grids}
    larger = [scale for scale in scales.values() if scale >= 1]
    best = min(larger) if larger else max(scales.values())
    return min((grid for grid in grids if scales[grid] == best), key=lambda grid: grid[0] * grid[1])


def fitted_size(height: int, width: int, side: int, rows: int, columns: int) -> tuple[int, int]:
    """Height and width to which the picture is resized, without distortion.

    It fills the canvas in one direction, but is enlarged to one tile's side at most.

    Example: 600 x 1000 on 2 x 2 tiles of 560 -> (600, 1000); 100 x 300 on one -> (186, 560).
    """
    target_height = min(max(height, side), rows * side)
    target_width = min(max(width, side), columns * side)
    by_height, by_width = target_height / height, target_width / width
    if by_width < by_height:
        return min(max(math.floor(height * by_width), 1), target_height), target_width
    return target_height, min(max(math.floor(width * by_height), 1), target_width)


def _resized(picture: "Image", height: int, width: int) -> Tensor:
    from PIL.Image import Resampling

    small = picture.resize((width, height), Resampling.BILINEAR)
    pixels = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8)
    return pixels.view(height, width, 3).permute(2, 0, 1)


def _normalised(tiles_NCHW: Tensor, style: _Style) -> Tensor:
    """(pixels / 255 - mean) / std, every step rounded as the processors do."""
    if style.dtype == torch.float32:
        scaled = (tiles_NCHW.double() * (1 / 255)).float()
    else:
        scaled = tiles_NCHW.to(style.dtype) * (1 / 255)
    mean = torch.tensor(style.mean, dtype=style.dtype)[:, None, None]
    std = torch.tensor(style.std, dtype=style.dtype)[:, None, None]
    return (scaled - mean) / std


def _require_decent(size: Sequence[int], path: Path) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise InputError(f"the picture has {width} x {height} pixels", where=str(path))
    if width * height > MAX_PIXELS:
        raise InputError(
            f"the picture has {width:,} x {height:,} pixels, more than {MAX_PIXELS:,}",
            where=str(path),
            hint="make it smaller; a model sees a few million pixels at most",
        )


def _rgb(picture: "Image", path: Path) -> "Image":
    from PIL import Image

    if picture.mode == "F":
        raise UnsupportedError(
            "the picture has pixels of floating point, whose white is unknown", where=str(path)
        )
    if picture.mode.startswith("I"):
        picture = _eight_bits(picture)
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    ground = Image.new("RGBA", picture.size, WHITE)
    return Image.alpha_composite(ground, picture.convert("RGBA")).convert("RGB")


def _eight_bits(picture: "Image") -> "Image":
    """Grey of 16 bits as grey of 8: value / 257, rounded. Pillow itself would cut off at 255."""
    return picture.convert("I").point(lambda value: value * (1 / 257) + 0.5).convert("L")
