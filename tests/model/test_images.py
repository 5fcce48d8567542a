"""Pictures to tiles: as the processors of transformers and Meta's code; and files of every kind."""

import ast
import contextlib
import io
import math
import struct
import sys
import zlib
from collections import defaultdict
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from llamatool.config.catalog import find
from llamatool.config.model import VisionConfig
from llamatool.errors import CheckpointError, InputError, MissingExtraError, UnsupportedError
from llamatool.model.images import (
    MAX_PIXELS,
    choose_grid,
    fitted_size,
    load_tiles,
    open_picture,
    tile,
)

# Width and height: every grid of the small family, wide and tall, tiny and large, one pixel off.
SIZES = [
    *((1000, 600), (600, 1000), (336, 336), (560, 560), (100, 100), (50, 700), (2000, 300)),
    *((1, 1), (1500, 1000), (337, 335), (1120, 1120), (1234, 567), (640, 480), (5, 1999)),
]


def vision(name: str) -> VisionConfig:
    entry = find(name)
    assert entry is not None
    assert entry.config.vision is not None
    return entry.config.vision


MLLAMA = vision("llama-3.2-11b-vision-instruct")
MLLAMA_BASE = vision("llama-3.2-11b-vision")
LLAMA4 = vision("llama-4-scout-17b-16e-instruct")


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Coloured clouds: neighbours are alike, as in photographs, and no two places are."""
    generator = np.random.default_rng(seed)
    shape = (max(height // 8, 1), max(width // 8, 1), 3)
    noise = generator.integers(0, 256, shape, dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


# --- against the processors ---


def llama4_functions() -> SimpleNamespace:
    """The functions of transformers' processor, out of a module that cannot be imported here.

    It needs torchvision, of which it uses three functions on tensors: they stand here instead.
    """
    import transformers.image_transforms as transforms
    from transformers.image_processing_utils import BatchFeature
    from transformers.image_utils import SizeDict

    folder = Path(transforms.__file__).parent
    tree = ast.parse((folder / "models/llama4/image_processing_llama4.py").read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        function.returns, function.decorator_list = None, []
        arguments = [*function.args.args, function.args.kwarg]
        for argument in filter(None, arguments):
            argument.annotation = None
    wanted = ast.Module([f for f in functions if f.name != "__init__"], [])
    space: dict[str, Any] = {
        "math": math, "torch": torch, "defaultdict": defaultdict, "lru_cache": lru_cache,
        "SizeDict": SizeDict, "BatchFeature": BatchFeature,
        "group_images_by_shape": transforms.group_images_by_shape,
        "reorder_images": transforms.reorder_images,
        "split_to_tiles": transforms.split_to_tiles,
        "tvF": SimpleNamespace(pad=_pad),
    }  # fmt: skip
    exec(compile(wanted, "image_processing_llama4", "exec"), space)
    return SimpleNamespace(**{f.name: space[f.name] for f in wanted.body})


def _pad(images: torch.Tensor, padding: list[int], fill: list[int]) -> torch.Tensor:
    assert padding[:2] == [0, 0]
    assert fill == [0, 0, 0]
    return torch.nn.functional.pad(images, (0, padding[2], 0, padding[3]))


def _resize(images: torch.Tensor, size: Any, resample: Any) -> torch.Tensor:
    # What torchvision calls for bilinear resizing with antialiasing.
    return torch.nn.functional.interpolate(
        images, (size.height, size.width), mode="bilinear", antialias=True
    )


def _normalize(images: torch.Tensor, mean: list[float], std: list[float]) -> torch.Tensor:
    means, stds = (torch.tensor(x, dtype=images.dtype)[:, None, None] for x in (mean, std))
    return images.sub(means).div_(stds)


def their_llama4(image: Image.Image, side: int = 336) -> Any:
    from transformers.image_utils import SizeDict

    functions = llama4_functions()
    processor = SimpleNamespace(resize=_resize, normalize=_normalize)
    processor.rescale_and_normalize = lambda *args: functions.rescale_and_normalize(
        processor, *args
    )
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    return functions._preprocess(
        processor, [pixels], do_resize=True, size=SizeDict(height=side, width=side), resample=2,
        do_rescale=True, rescale_factor=1 / 255, do_normalize=True, image_mean=[0.5] * 3,
        image_std=[0.5] * 3, max_patches=16, resize_to_max_canvas=False, disable_grouping=True,
        return_tensors="pt",
    )  # fmt: skip


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("family", [MLLAMA, MLLAMA_BASE], ids=["560", "448"])
def test_llama_3_2_as_transformers(size: tuple[int, int], family: VisionConfig) -> None:
    """Bit for bit."""
    from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil

    side = family.image_size
    theirs = MllamaImageProcessorPil(
        size={"height": side, "width": side},
        image_mean=[0.48145466, 0.4578275, 0.40821073],
        image_std=[0.26862954, 0.26130258, 0.27577711],
    )
    image = picture(*size)
    expected = theirs(images=[image], return_tensors="pt")
    found = tile(image, family)
    count = expected["num_tiles"][0][0]
    number = int(expected["aspect_ratio_ids"][0, 0])
    assert family.supported_aspect_ratios.index(found.grid) + 1 == number
    assert found.pixels_NCHW.shape == (count, 3, side, side)
    assert torch.equal(found.pixels_NCHW, expected["pixel_values"][0, 0, :count])


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_llama_4_as_transformers(size: tuple[int, int]) -> None:
    """The same tiles; pixels within one level of 255, where two resizers round differently.

    Pillow resizes here, as in Meta's code, and torch there.
    """
    image = picture(*size)
    expected = their_llama4(image)
    found = tile(image, LLAMA4)
    assert list(found.grid) == expected["aspect_ratios"][0].tolist()
    pixels = expected["pixel_values"].view(-1, 3, 336, 336)
    assert found.pixels_NCHW.dtype == pixels.dtype == torch.bfloat16
    assert found.pixels_NCHW.shape == pixels.shape
    difference = (found.pixels_NCHW.float() - pixels.float()).abs()
    # A level is 2/255 = 0.0078; rounding to bfloat16 adds 2^-8.
    assert difference.max() <= 2 / 255 + 2**-8
    assert (difference > 0).float().mean() < 0.05


FUNCTIONS = llama4_functions()


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 5000))
def test_grids_of_any_size(height: int, width: int) -> None:
    from transformers.image_utils import SizeDict
    from transformers.models.mllama import image_processing_pil_mllama as mllama

    canvas = mllama.get_optimal_tiled_canvas(height, width, 4, 560)
    grid = choose_grid(height, width, 560, 4)
    assert (canvas[0] // 560, canvas[1] // 560) == grid
    fitted = mllama.get_image_size_fit_to_canvas(height, width, *canvas, 560)
    assert tuple(map(int, fitted)) == fitted_size(height, width, 560, *grid)
    canvases = FUNCTIONS.find_supported_resolutions(16, SizeDict(height=336, width=336))
    best = FUNCTIONS.get_best_fit((height, width), torch.tensor(canvases)).tolist()
    grid = choose_grid(height, width, 336, 16)
    assert [336 * side for side in grid] == best
    # In Python's numbers, as Meta's code has it. transformers passes tensors, whose division is
    # in fp32, and so is one pixel off for about 1 size in 7,000 (2420 x 1540, for one).
    limits = (min(max(height, 336), best[0]), min(max(width, 336), best[1]))
    exact = FUNCTIONS.get_max_res_without_distortion((height, width), limits)
    assert (max(exact[0], 1), max(exact[1], 1)) == fitted_size(height, width, 336, *grid)


def test_worked_numbers() -> None:
    assert choose_grid(600, 1000, 560, 4) == (2, 2)
    assert choose_grid(300, 1600, 560, 4) == (1, 3)
    assert fitted_size(600, 1000, 560, 2, 2) == (600, 1000)
    assert fitted_size(100, 300, 560, 1, 1) == (186, 560)
    assert fitted_size(2420, 1540, 336, 5, 3) == (1584, 1008)
    assert tile(picture(1000, 600), MLLAMA).pixels_NCHW.shape == (4, 3, 560, 560)


def test_the_rest_of_the_canvas_is_black() -> None:
    white = Image.new("RGB", (560, 300), "white")
    for family, black in ((MLLAMA, -0.48145466 / 0.26862954), (LLAMA4, -1.0)):
        found = tile(white, family)
        side = family.image_size
        assert float(found.pixels_NCHW[0, 0, 0, 0]) > 0.9
        assert float(found.pixels_NCHW[0, 0, side - 1, 0]) == pytest.approx(black, abs=1e-6)


def test_tiles_are_cut_row_by_row() -> None:
    """Each tile of a picture of 2 x 3 fields has the colour of its field; then comes the whole."""
    image = Image.new("RGB", (3 * 336, 2 * 336))
    for row in range(2):
        for column in range(3):
            field = Image.new("RGB", (336, 336), (40 * (3 * row + column), 0, 0))
            image.paste(field, (336 * column, 336 * row))
    found = tile(image, LLAMA4)
    assert found.grid == (2, 3)
    reds = [float(pixels[0].float().mean()) for pixels in found.pixels_NCHW]
    assert reds[:6] == pytest.approx([40 * i / 255 * 2 - 1 for i in range(6)], abs=0.01)
    assert len(reds) == 7
    assert reds[6] == pytest.approx(sum(reds[:6]) / 6, abs=0.02)


# --- files ---


def saved(image: Image.Image, path: Path, **options: Any) -> Path:
    image.save(path, **options)
    return path


def test_file_as_its_picture(tmp_path: Path) -> None:
    image = picture(700, 500)
    found = load_tiles(saved(image, tmp_path / "a.png"), MLLAMA)
    assert torch.equal(found.pixels_NCHW, tile(image, MLLAMA).pixels_NCHW)


def test_kind_is_told_by_content(tmp_path: Path) -> None:
    image = picture(30, 20)
    image.save(tmp_path / "photo.jpg", format="PNG")
    assert open_picture(tmp_path / "photo.jpg").tobytes() == image.tobytes()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_cameras_note_turns_the_picture(tmp_path: Path, orientation: int) -> None:
    from PIL import ImageOps

    image = picture(80, 40)
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = saved(image, tmp_path / "a.jpg", exif=exif, quality=95)
    found = open_picture(path)
    assert found.size == ((80, 40) if orientation < 5 else (40, 80))
    with Image.open(path) as raw:
        assert found.tobytes() == ImageOps.exif_transpose(raw).convert("RGB").tobytes()


def transparent(mode: str) -> Image.Image:
    """Red, half and fully transparent, from left to right."""
    image = Image.new("RGBA", (3, 1))
    for x, alpha in enumerate((255, 128, 0)):
        image.putpixel((x, 0), (200, 0, 0, alpha))
    return image.convert(mode)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
def test_transparent_is_white(tmp_path: Path, mode: str) -> None:
    from transformers.image_transforms import convert_to_rgb

    image = transparent("RGBA" if mode == "PA" else mode)
    path = tmp_path / "a.png"
    if mode == "PA":  # a palette with one transparent colour
        image = Image.new("P", (3, 1), 1)
        image.putpalette([255, 255, 0, 200, 0, 0])
        image.putpixel((2, 0), 0)
        image.save(path, transparency=0)
    else:
        image.save(path)
    found = open_picture(path)
    assert found.mode == "RGB"
    assert found.getpixel((2, 0)) == (255, 255, 255)
    assert found.getpixel((0, 0)) == ((200, 0, 0) if mode != "LA" else (60, 60, 60))
    with Image.open(path) as raw:
        assert np.array_equal(np.array(found), convert_to_rgb(raw, return_numpy=True))


@pytest.mark.parametrize("mode", ["L", "1", "P", "CMYK"])
def test_other_colours(tmp_path: Path, mode: str) -> None:
    image = picture(30, 20).convert(mode)
    path = saved(image, tmp_path / ("a.tif" if mode == "CMYK" else "a.png"))
    assert open_picture(path).tobytes() == image.convert("RGB").tobytes()


@pytest.mark.parametrize("kind", ["png", "tif"])
def test_grey_of_16_bits(tmp_path: Path, kind: str) -> None:
    """Scaled, where a plain conversion would make everything above 255 white."""
    values = np.array([[0, 128, 129, 257, 32768, 65534, 65535]], dtype=np.uint16)
    path = saved(Image.fromarray(values), tmp_path / f"a.{kind}")
    found = np.array(open_picture(path))[0, :, 0].tolist()
    assert found == [round(int(v) / 257) for v in values[0]] == [0, 0, 1, 1, 128, 255, 255]


def test_first_picture_of_an_animation(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    path = saved(frames[0], tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert open_picture(path).getpixel((0, 0)) == (255, 0, 0)


def png_of(width: int, height: int, data: bytes = b"") -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", data or zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("side", [10_001, 14_000, 60_000])
def test_huge_pictures_are_refused_unread(tmp_path: Path, side: int) -> None:
    """Below and above the limits of Pillow itself; and no memory is taken for them."""
    import tracemalloc

    path = tmp_path / "bomb.png"
    path.write_bytes(png_of(side, side))
    tracemalloc.start()
    with pytest.raises(InputError, match=f"more than {MAX_PIXELS:,}") as caught:
        open_picture(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.where == str(path)
    assert peak < 5_000_000


@pytest.mark.parametrize("lenient", [False, True])
def test_broken_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lenient: bool) -> None:
    # Other packages, such as llama-models, make Pillow lenient for the whole process.
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", lenient)
    stream = io.BytesIO()
    picture(200, 100).save(stream, format="PNG")
    whole = stream.getvalue()
    path = tmp_path / "a.png"
    for size in (8, 20, 33, 60, len(whole) // 2, len(whole) - 100):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match=r"the picture is broken|no picture of a kind"):
            open_picture(path)
    path.write_bytes(png_of(0, 5))
    with pytest.raises(InputError):
        open_picture(path)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 3), st.lists(st.tuples(st.integers(0, 5000), st.binary(max_size=4)), max_size=6)
)
def test_damaged_files_give_one_line(kind: int, changes: list[tuple[int, bytes]]) -> None:
    """A picture or an InputError, whatever bytes are changed."""
    import tempfile

    stream = io.BytesIO()
    picture(40, 30).save(stream, format=("PNG", "JPEG", "GIF", "TIFF")[kind])
    data = bytearray(stream.getvalue())
    for place, new in changes:
        place %= len(data)
        data[place : place + len(new)] = new
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(data)
        with contextlib.suppress(InputError, UnsupportedError):
            assert open_picture(file.name).mode == "RGB"


def test_what_is_no_picture(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
    for content in (b"", b"hello", b"<svg></svg>", postscript):
        path.write_bytes(content)
        with pytest.raises(InputError, match="no picture of a kind that is read here"):
            open_picture(path)
    with pytest.raises(CheckpointError):
        open_picture(tmp_path / "missing.png")
    with pytest.raises(CheckpointError, match="expected a file"):
        open_picture(tmp_path)
    saved(Image.new("F", (4, 4)), tmp_path / "f.tif")
    with pytest.raises(UnsupportedError, match="floating point"):
        open_picture(tmp_path / "f.tif")


def test_without_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match="reading images needs Pillow") as caught:
        open_picture(tmp_path / "a.png")
    assert caught.value.exit_code == 4
    assert caught.value.hint == "pip install 'llamatool[vision]'"
