"""GGUF metadata and files made from tokenizers, for tests of that path."""

from pathlib import Path

from llamatool.tokenizers import bytelevel
from llamatool.tokenizers.modelproto import SentencePieceModel
from llamatool.tokenizers.tiktoken import TiktokenTokenizer


def spm_metadata(model: SentencePieceModel) -> dict[str, object]:
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(model.pieces),
        "tokenizer.ggml.scores": list(model.scores),
        "tokenizer.ggml.token_type": list(model.types),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def bpe_metadata(tokenizer: TiktokenTokenizer, pre: str) -> dict[str, object]:
    tokens = [bytelevel.to_text(token) for token in tokenizer.ranks]
    specials = sorted(tokenizer.special_ids, key=tokenizer.special_ids.__getitem__)
    derived = bytelevel.derive_merges(tokenizer.ranks)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens + specials,
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3] * len(specials),
        "tokenizer.ggml.merges": [
            f"{bytelevel.to_text(a)} {bytelevel.to_text(b)}" for a, b in derived
        ],
        "tokenizer.ggml.bos_token_id": tokenizer.bos_id,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_ids[0],
    }


def write_gguf(path: Path, metadata: dict[str, object]) -> None:
    """A GGUF of the vocabulary alone, written by the gguf package."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
