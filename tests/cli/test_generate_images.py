"""`generate --image` on tiny image models with the real tokenizers of their families."""

# ruff: noqa: F811  # a fixture is an argument of the name that it is imported by

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

from llamatool.errors import InputError, UnsupportedError  # noqa: E402
from llamatool.generate.formats import Message  # noqa: E402
from llamatool.generate.stats import weight_bytes_per_token  # noqa: E402
from llamatool.generate.text_model import load_generator  # noqa: E402
from tests.generate.conftest import tiny_base  # noqa: E402, F401
from tests.model.vision_models import (  # noqa: E402
    LLAMA4_TEXT,
    LLAMA4_VISION,
    MLLAMA_TEXT,
    MLLAMA_VISION,
)
from tests.tokenizers.conftest import meta_file, small_bpe, small_json  # noqa: E402, F401

GREEDY = ("-t", "0", "-n", "6")
SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4,
                         "num_key_value_heads": 2}  # fmt: skip


@pytest.fixture(scope="module")
def mllama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    text = MLLAMA_TEXT | SMALL | {"vocab_size": 128256, "bos_token_id": 128000}
    text |= {"pad_token_id": 128004, "eos_token_id": [128001, 128008, 128009]}
    config = transformers.MllamaConfig(
        text_config=text, vision_config=MLLAMA_VISION, image_token_index=128256
    )
    torch.manual_seed(0)
    model = transformers.MllamaForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if "gate" in name.rpartition(".")[2]:
            torch.nn.init.normal_(parameter, 0.6, 0.3)
    folder = tmp_path_factory.mktemp("mllama") / "Tiny-Vision"
    model.save_pretrained(folder)
    shutil.copy(meta_file("llama3"), folder / "tokenizer.model")
    return folder


@pytest.fixture(scope="module")
def llama4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    import transformers

    text = LLAMA4_TEXT | SMALL | {"head_dim": 4, "vocab_size": 202048, "bos_token_id": 200000}
    text |= {"pad_token_id": 200018, "eos_token_id": [200001, 200007, 200008]}
    config = transformers.Llama4Config(
        text_config=text, vision_config=LLAMA4_VISION, image_token_index=200092
    )
    torch.manual_seed(0)
    model = transformers.Llama4ForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.2)
    folder = tmp_path_factory.mktemp("llama4") / "Tiny-4"
    model.save_pretrained(folder)
    shutil.copy(meta_file("llama4"), folder / "tokenizer.model")
    return model, folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pictures")
    paths = []
    for name, size, colour in (("wide", (60, 25), "red"), ("small", (20, 20), "navy")):
        image = Image.linear_gradient("L").resize(size).convert("RGB")
        image.paste(colour, (0, 0, 10, 10))
        image.save(folder / f"{name}.png")
        paths.append(str(folder / f"{name}.png"))
    return paths


def test_cross_attention(run, mllama: Path, pictures: list[str]) -> None:
    done = run(
        "generate", str(mllama), "What is this?", "--image", pictures[0], "--image", pictures[1],
        "--template", "llama-3", *GREEDY, "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    lines = done.stderr.splitlines()
    assert lines[0] == f"image: {pictures[0]}, 1 x 3 tiles, 1 token"
    assert lines[1] == f"image: {pictures[1]}, 1 tile, 1 token"
    found = json.loads(done.stdout)
    ids = found["prompt_ids"]
    assert ids[0] == 128000
    assert ids.count(128256) == 2
    # By the decoder, which tests/model compares with transformers and with the formula.
    model = load_generator(mllama, max_images=2)
    tiles = [model.tiles(path) for path in pictures]
    cache = model.decoder.new_cache(len(ids) + 6, images=tiles)
    logits = model.decoder.prefill(torch.tensor([ids]), cache, images=tiles)
    expected = []
    for _ in range(6):
        expected.append(int(logits[0, -1].argmax()))
        logits = model.decoder(torch.tensor([expected[-1:]]), cache=cache)
    assert found["output_ids"] == expected
    assert found["stats"]["kv_bytes"] == cache.num_bytes
    # Without the images it says something else: they are seen.
    other = run(
        "generate", str(mllama), "What is this?", "--template", "llama-3", *GREEDY, "--json"
    )
    assert json.loads(other.stdout)["output_ids"] != expected


def test_early_fusion_as_transformers(run, llama4: tuple[Any, Path], pictures: list[str]) -> None:
    """From the file of the picture to the last id, by transformers' parts on the other side."""
    from llamatool.model.images import Tiles
    from tests.model.test_images import their_llama4
    from tests.model.test_vision_llama4 import their_output

    model, folder = llama4
    done = run(
        "generate", str(folder), "What is this?", "--image", pictures[0],
        "--template", "llama-4", *GREEDY, "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    # Tiles of 56 pixels: 60 x 25 needs two beside each other, then the global one.
    assert done.stderr.splitlines()[0] == f"image: {pictures[0]}, 1 x 2 tiles, 17 tokens"
    found = json.loads(done.stdout)
    ids = found["prompt_ids"]
    patches = [200092] * 4
    layout = [200080, *patches, 200084, *patches, 200085, 200090, *patches, 200081]
    start = ids.index(200080)
    assert ids[start : start + 17] == layout
    with Image.open(pictures[0]) as image:
        theirs = their_llama4(image.convert("RGB"), side=56)
    pixels = theirs["pixel_values"].view(-1, 3, 56, 56).float()
    expected: list[int] = []
    for _ in range(6):
        output = their_output(model, torch.tensor([ids + expected]), [Tiles(pixels, (1, 2))])
        expected.append(int(output.logits[0, -1].argmax()))
    assert found["output_ids"] == expected


def test_a_conversation_about_an_image(
    run, llama4: tuple[Any, Path], mllama: Path, pictures: list[str]
) -> None:
    """The image stays with the first message."""
    for folder, form in ((llama4[1], "llama-4"), (mllama, "llama-3")):
        done = run(
            "generate", str(folder), "--chat", "--image", pictures[1], "--template", form,
            *GREEDY, stdin=b"What is this?\nAnd its colour?\n",
        )  # fmt: skip
        assert done.exit_code == 0, done.stderr
        model = load_generator(folder, template=form, max_images=1)
        messages = [Message("user", "What is this?", 1)]
        answers = []
        for question in ("And its colour?", ""):
            answer = model.generate(
                messages, images=[pictures[1]], temperature=0.0, max_new_tokens=6
            )
            answers.append(answer.text)
            messages += [Message("assistant", answer.text), Message("user", question)]
        for text in answers:
            assert text in done.stdout


@pytest.mark.parametrize("family", ["cross", "fusion"])
def test_a_conversation_reads_its_image_once(
    family: str, llama4: tuple[Any, Path], mllama: Path, pictures: list[str], tmp_path: Path
) -> None:
    """Later turns read what is new; another picture in its place is another conversation."""
    folder, form = mllama, "llama-3"
    if family == "fusion":  # with a chunk that a conversation does not outgrow
        folder, form = tmp_path / "model", "llama-4"
        shutil.copytree(llama4[1], folder)
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["attention_chunk_size"] = 4096
        (folder / "config.json").write_text(json.dumps(config))
    model = load_generator(folder, template=form, max_images=2)
    tiles = [model.tiles(picture) for picture in pictures]
    seen: list[int] = []
    model.decoder.vision_model.register_forward_hook(lambda *_: seen.append(1))

    def ask(messages: list[Message], images: list[Any], *, keep: bool) -> Any:
        prompt = model.prompt(messages, images=images)
        answer = model.answer(model.request(prompt, temperature=0.0, max_new_tokens=4), keep=keep)
        for _ in answer:
            pass
        return answer.result

    first = [Message("user", "What is this?", 1)]
    messages = [*first, Message("assistant", "A b."), Message("user", "Why?")]
    two = [Message("user", "What are these?", 2), *messages[1:]]
    steps = (
        (first, tiles[:1], 1),
        (messages, tiles[:1], 0),
        (messages, tiles[1:], 1),  # the same ids in 3.2, but another picture
        (first, tiles[1:], 0),
        (two, tiles, 2),
        (first, tiles[:1], 1),
    )
    for asked, images, count in steps:
        seen.clear()
        kept = ask(asked, images, keep=True)
        assert len(seen) == count
        fresh = ask(asked, images, keep=False)
        assert kept.output_ids == fresh.output_ids
        assert kept.prompt_ids == fresh.prompt_ids


def test_penalty_on_an_id_without_logit(mllama: Path, pictures: list[str]) -> None:
    """128256 stands in the prompt and has no logit."""
    model = load_generator(mllama, max_images=1)
    for temperature in (0.0, 0.7):
        answer = model.generate(
            "hi", images=[pictures[0]], temperature=temperature, seed=1, max_new_tokens=4,
            repetition_penalty=1.3,
        )  # fmt: skip
        assert answer.prompt_ids[:2] == (128000, 128256)
        assert answer.output_ids


def test_errors(run, mllama: Path, tiny_base: Path, pictures: list[str], tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(Path(pictures[0]).read_bytes()[:60])
    text = tmp_path / "text.png"
    text.write_text("no picture")
    for path, code, says in (
        (tmp_path / "missing.png", 3, "no such file"),
        (broken, 3, "the picture is broken"),
        (text, 3, "no picture of a kind that is read here"),
    ):
        done = run("generate", str(mllama), "hi", "--image", str(path), *GREEDY)
        assert done.exit_code == code
        assert says in done.stderr.lower() or says in done.stderr
        assert "Traceback" not in done.stderr
    done = run("generate", str(tiny_base), "hi", "--image", pictures[0], *GREEDY)
    assert (done.exit_code, done.stdout) == (3, "")
    assert "this model reads no images" in done.stderr
    done = run("generate", str(mllama), "hi", "--image", pictures[0], "--suffix", "x")
    assert done.exit_code == 2
    assert "--image belongs to one prompt" in done.stderr
    many = ("--image", pictures[0]) * 40
    done = run("generate", str(mllama), "hi", *many, "-n", "250")
    assert done.exit_code == 3
    assert "exceed the model's context of 256 tokens" in done.stderr


def test_python_interface_says_what_is_missing(mllama: Path, pictures: list[str]) -> None:
    text = load_generator(mllama)
    with pytest.raises(UnsupportedError, match="without its image tower") as caught:
        text.generate("hi", images=[pictures[0]])
    assert caught.value.hint == "load it with max_images"
    seeing = load_generator(mllama, max_images=1, template="llama-3")
    with pytest.raises(UnsupportedError, match="places for 0 of 1 images"):
        seeing.generate([Message("user", "hi")], images=[pictures[0]])
    with pytest.raises(InputError):
        seeing.generate("hi", images=[pictures[0] + ".missing"])
    # Decoding reads nothing of the tower, and of cross-attention all but the keys and values.
    cross = sum(
        parameter.nbytes
        for name, parameter in seeing.decoder.named_parameters()
        if name.startswith(("layers.1.", "layers.4.")) and "_proj" in name
        if "k_proj" not in name and "v_proj" not in name
    )
    small = 2 * 4 * (2 * 16 + 4 + 2)  # norms and gates of two layers
    assert weight_bytes_per_token(seeing.decoder) == (
        weight_bytes_per_token(text.decoder) + cross + small
    )
