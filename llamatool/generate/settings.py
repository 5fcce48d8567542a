"""What the files beside the weights say about generating: sampling, stops, chat template.

A Hugging Face folder has generation_config.json, tokenizer_config.json and perhaps
chat_template.jinja; a GGUF file has the template in its metadata; Meta's folders have none of
them. A file that is not there says nothing; one that is damaged is an error.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llamatool.checkpoint import files
from llamatool.errors import InputError
from llamatool.generate.formats import FORMATS
from llamatool.generate.sampling import Sampling, from_generation_config
from llamatool.generate.template import MAX_TEMPLATE_CHARACTERS, ChatTemplate
from llamatool.records import record

_TEMPLATE_KEY = "tokenizer.chat_template"
_TOKEN_VARIABLES = ("bos_token", "eos_token", "unk_token", "pad_token")


@record
class Settings:
    """What a checkpoint's files say, besides its configuration."""

    sampling: Sampling
    generation_eos: tuple[int, ...] = ()  # eos_token_id of generation_config.json
    tokenizer_eos: str | None = None  # eos_token of tokenizer_config.json
    add_bos: bool | None = None  # add_bos_token of tokenizer_config.json
    template: ChatTemplate | None = None
    names: tuple[str, ...] = ()  # that a GGUF's metadata give the model


def read_folder(folder: Path) -> Settings:
    """The settings of a folder; defaults where it has none of the files.

    Raises: InputError if a file is damaged.
    """
    generation = _json(folder / "generation_config.json", "a generation_config.json")
    tokenizer = _json(folder / "tokenizer_config.json", "a tokenizer_config.json")
    variables = _variables(tokenizer)
    add_bos = tokenizer.get("add_bos_token")
    return Settings(
        sampling=from_generation_config(generation),
        generation_eos=_ids(generation.get("eos_token_id")),
        tokenizer_eos=variables.get("eos_token"),
        add_bos=add_bos if isinstance(add_bos, bool) else None,
        template=_folder_template(folder, tokenizer, variables),
    )


def read_gguf(metadata: Mapping[str, object], special_names: Mapping[int, str]) -> Settings:
    """The settings of a GGUF file.

    Args: special_names: the control tokens by id, for the variables that templates use.
    """
    source = metadata.get(_TEMPLATE_KEY)
    variables = {}
    for name in ("bos", "eos"):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(token_id, int) and token_id in special_names:
            variables[f"{name}_token"] = special_names[token_id]
    template = None
    if isinstance(source, str) and source.strip():
        template = ChatTemplate(source, _TEMPLATE_KEY, variables)
    named = (metadata.get(key) for key in ("general.name", "general.finetune"))
    return Settings(
        sampling=from_generation_config({}),
        template=template,
        names=tuple(name for name in named if isinstance(name, str)),
    )


def chosen_template(
    value: str, variables: Mapping[str, str]
) -> tuple[str | None, ChatTemplate | None]:
    """What `--template VALUE` means: the name of a built-in format, or the template in a file.

    Raises: InputError if it is neither.
    """
    if value in FORMATS:
        return value, None
    path = Path(value)
    if not path.exists():
        raise InputError(
            f"`{value[:200]}` is no file with a template and no built-in format",
            hint="built in are " + ", ".join(FORMATS),
        )
    return None, ChatTemplate(_text(path), f"`{value}`", variables)


def _folder_template(
    folder: Path, tokenizer: Mapping[str, Any], variables: Mapping[str, str]
) -> ChatTemplate | None:
    """chat_template.jinja before tokenizer_config.json, as transformers reads them.

    Between them chat_template.json, in which older image models keep the one that knows images.
    """
    path = folder / "chat_template.jinja"
    if path.exists():
        return ChatTemplate(_text(path), path.name, variables)
    source = _json(folder / "chat_template.json", "a chat template").get("chat_template")
    if isinstance(source, str) and source.strip():
        return ChatTemplate(source, "chat_template.json", variables)
    source = tokenizer.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {
            entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)
        }
        source = named.get("default")
    if isinstance(source, str) and source.strip():
        return ChatTemplate(source, "tokenizer_config.json", variables)
    return None


def _variables(tokenizer: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and the like, each a string or an object with its content."""
    found = {}
    for name in _TOKEN_VARIABLES:
        value = tokenizer.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
    return found


def _ids(value: object) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0)


def _json(path: Path, what: str) -> dict[str, Any]:
    return files.read_json(path, what) if path.exists() else {}


def _text(path: Path) -> str:
    with files.open_regular(path) as stream:
        data = stream.read(4 * MAX_TEMPLATE_CHARACTERS + 1)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InputError("the chat template is no UTF-8 text", where=str(path)) from None
