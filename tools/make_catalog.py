"""Writes llamatool/config/catalog.json from the reference configurations and the table below.

Run: python tools/make_catalog.py

Each model names the configuration it has (`config`) and what differs from it (`changes`).
`assumed` lists what no public copy of the file confirms; identification never calls a verdict
that rests on an assumed field certain.
"""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "tests" / "data" / "configs"
TARGET = ROOT / "llamatool" / "config" / "catalog.json"

INSTRUCT_EOS = [128001, 128008, 128009]

# 405B in FP8: attention stays, and the feed-forward of the first and last layer.
FP8_KEPT = ["lm_head", "model.layers.0.mlp", "model.layers.125.mlp"] + [
    f"model.layers.{i}.self_attn" for i in range(126)
]


def model(name, display, hub_id, config, **extra):
    entry = {"id": name, "name": display, "hub_id": hub_id, "config": config}
    entry.update(extra)
    return entry


def family(entries, **shared):
    return [{**entry, **{k: v for k, v in shared.items() if k not in entry}} for entry in entries]


LLAMA_1 = family(
    [
        model(
            "llama-1-7b",
            "Llama 1 7B",
            "huggyllama/llama-7b",
            "llama-1-7b",
            meta_shards=1,
            lookalikes=["OpenLLaMA 7B", "Vicuna 7B <= v1.3"],
        ),
        model(
            "llama-1-13b",
            "Llama 1 13B",
            "huggyllama/llama-13b",
            "llama-1-13b",
            meta_shards=2,
            lookalikes=["OpenLLaMA 13B", "Vicuna 13B <= v1.3"],
        ),
        model(
            "llama-1-30b",
            "Llama 1 30B",
            "huggyllama/llama-30b",
            "llama-1-30b",
            meta_shards=4,
            aliases=["llama-1-33b"],
        ),
        model("llama-1-65b", "Llama 1 65B", "huggyllama/llama-65b", "llama-1-65b", meta_shards=8),
    ],
    generation="1",
    license="llama1",
    released="2023-02-24",
    training_tokens="1.0T to 1.4T",
    assumed=["released"],
)

LLAMA_2 = family(
    [
        entry
        for size, shards, lookalikes in (
            ("7b", 1, ["Vicuna v1.5", "llama-guard-1-7b"]),
            ("13b", 2, ["Vicuna 13B v1.5"]),
            ("70b", 8, []),
        )
        for entry in (
            model(
                f"llama-2-{size}",
                f"Llama 2 {size.upper()}",
                f"meta-llama/Llama-2-{size}-hf",
                f"llama-2-{size}",
                meta_shards=shards,
                lookalikes=lookalikes,
                **({"published_total": 6738415616} if size == "7b" else {}),
            ),
            model(
                f"llama-2-{size}-chat",
                f"Llama 2 {size.upper()} Chat",
                f"meta-llama/Llama-2-{size}-chat-hf",
                f"llama-2-{size}",
                meta_shards=shards,
                variant="instruct",
                lookalikes=lookalikes,
            ),
        )
    ],
    generation="2",
    license="llama2",
    released="2023-07-18",
    training_tokens="2.0T",
)

# 70B Python and Instruct run at the base frequency and context of Llama 2
# (meta-llama/codellama#188, answered by an author); the Python variants of 7B and 13B have the
# vocabulary of Llama 2.
SHORT_70B = {"rope_theta": 10000.0, "max_position_embeddings": 4096}
CODE_CHANGES = {
    ("7b", "-python"): {"vocab_size": 32000},
    ("13b", "-python"): {"vocab_size": 32000},
    ("70b", "-python"): SHORT_70B,
    ("70b", "-instruct"): SHORT_70B,
}
CODE = [
    model(
        f"codellama-{size}{kind}",
        f"Code Llama {size.upper()}{kind.replace('-', ' ').title()}",
        f"codellama/CodeLlama-{size}{kind.title()}-hf",
        f"codellama-{size}",
        meta_shards=shards,
        generation="code",
        license="llama2",
        released="2024-01-29" if size == "70b" else "2023-08-24",
        training_tokens="Llama 2 and 500B of code (70B: 1T)",
        assumed=["vocab_size"] if size == "34b" else [],
        changes=CODE_CHANGES.get((size, kind), {}),
        **({"variant": "instruct"} if kind == "-instruct" else {}),
    )
    for size, shards in (("7b", 1), ("13b", 2), ("34b", 4), ("70b", 8))
    for kind in ("", "-python", "-instruct")
]

LLAMA_3 = family(
    [
        model(
            "llama-3-8b",
            "Llama 3 8B",
            "meta-llama/Meta-Llama-3-8B",
            "llama-3-8b",
            meta_shards=1,
            published_total=8030261248,
            variant="base",
            lookalikes=["llama-guard-2-8b"],
        ),
        model(
            "llama-3-8b-instruct",
            "Llama 3 8B Instruct",
            "meta-llama/Meta-Llama-3-8B-Instruct",
            "llama-3-8b-instruct",
            meta_shards=1,
            variant="instruct",
            lookalikes=["llama-guard-2-8b"],
        ),
        model(
            "llama-3-70b",
            "Llama 3 70B",
            "meta-llama/Meta-Llama-3-70B",
            "llama-3-70b",
            meta_shards=8,
            variant="base",
            published_total=70553706496,
        ),
        model(
            "llama-3-70b-instruct",
            "Llama 3 70B Instruct",
            "meta-llama/Meta-Llama-3-70B-Instruct",
            "llama-3-70b",
            meta_shards=8,
            variant="instruct",
            changes={"eos_token_id": 128009},
        ),
    ],
    generation="3",
    license="llama3",
    released="2024-04-18",
    training_tokens="15T+",
)

LLAMA_31 = family(
    [
        model(
            "llama-3.1-8b",
            "Llama 3.1 8B",
            "meta-llama/Llama-3.1-8B",
            "llama-3.1-8b",
            meta_shards=1,
            variant="base",
            lookalikes=["llama-guard-3-8b"],
            published_total=8030261248,
        ),
        model(
            "llama-3.1-8b-instruct",
            "Llama 3.1 8B Instruct",
            "meta-llama/Llama-3.1-8B-Instruct",
            "llama-3.1-8b-instruct",
            meta_shards=1,
            variant="instruct",
            lookalikes=["llama-guard-3-8b", "DeepSeek-R1-Distill-Llama-8B"],
        ),
        model(
            "llama-3.1-70b",
            "Llama 3.1 70B",
            "meta-llama/Llama-3.1-70B",
            "llama-3.1-70b-instruct",
            meta_shards=8,
            variant="base",
            changes={"eos_token_id": 128001},
        ),
        model(
            "llama-3.1-70b-instruct",
            "Llama 3.1 70B Instruct",
            "meta-llama/Llama-3.1-70B-Instruct",
            "llama-3.1-70b-instruct",
            meta_shards=8,
            variant="instruct",
            lookalikes=["DeepSeek-R1-Distill-Llama-70B"],
        ),
        model(
            "llama-3.1-405b",
            "Llama 3.1 405B",
            "meta-llama/Llama-3.1-405B",
            "llama-3.1-405b-instruct",
            meta_shards=8,
            variant="base",
            changes={"eos_token_id": 128001},
            published_total=405853388800,
        ),
        model(
            "llama-3.1-405b-instruct",
            "Llama 3.1 405B Instruct",
            "meta-llama/Llama-3.1-405B-Instruct",
            "llama-3.1-405b-instruct",
            meta_shards=8,
            variant="instruct",
            published_total=405853388800,
        ),
        model(
            "llama-3.1-405b-fp8",
            "Llama 3.1 405B FP8",
            "meta-llama/Llama-3.1-405B-FP8",
            "llama-3.1-405b-instruct",
            meta_shards=8,
            variant="base",
            changes={
                "eos_token_id": 128001,
                "quantization_config": {
                    "quant_method": "fbgemm_fp8",
                    "modules_to_not_convert": FP8_KEPT,
                },
            },
        ),
        model(
            "llama-3.1-405b-instruct-fp8",
            "Llama 3.1 405B Instruct FP8",
            "meta-llama/Llama-3.1-405B-Instruct-FP8",
            "llama-3.1-405b-instruct",
            meta_shards=8,
            variant="instruct",
            changes={
                "quantization_config": {
                    "quant_method": "fbgemm_fp8",
                    "modules_to_not_convert": FP8_KEPT,
                },
            },
        ),
        model(
            "llama-3.1-405b-mp16",
            "Llama 3.1 405B (16 shards, KV heads stored twice)",
            "meta-llama/Llama-3.1-405B",
            "llama-3.1-405b-mp16",
            meta_shards=16,
            unique_total=405853388800,
        ),
    ],
    generation="3.1",
    license="llama3.1",
    released="2024-07-23",
    training_tokens="15T+ (405B: 15.6T)",
)


def int4(size, kind):
    return model(
        f"llama-3.2-{size}-instruct-{kind.lower()}-int4",
        f"Llama 3.2 {size.upper()} Instruct {kind} INT4",
        f"meta-llama/Llama-3.2-{size.upper()}-Instruct-"
        f"{'QLORA' if kind == 'QLoRA' else 'SpinQuant'}_INT4_EO8",
        f"llama-3.2-{size}-instruct",
        meta_shards=1,
        variant="instruct",
        changes={
            "max_position_embeddings": 8192,
            "quantization_config": {
                "quant_method": kind.lower(),
                "bits": 4,
                "group_size": 32,
            },
        },
        assumed=["group_size"],
    )


LLAMA_32 = family(
    [
        model(
            "llama-3.2-1b",
            "Llama 3.2 1B",
            "meta-llama/Llama-3.2-1B",
            "llama-3.2-1b",
            meta_shards=1,
            variant="base",
            published_total=1235814400,
            lookalikes=["llama-guard-3-1b"],
        ),
        model(
            "llama-3.2-1b-instruct",
            "Llama 3.2 1B Instruct",
            "meta-llama/Llama-3.2-1B-Instruct",
            "llama-3.2-1b-instruct",
            meta_shards=1,
            variant="instruct",
            lookalikes=["llama-guard-3-1b"],
        ),
        int4("1b", "QLoRA"),
        int4("1b", "SpinQuant"),
        model(
            "llama-3.2-3b",
            "Llama 3.2 3B",
            "meta-llama/Llama-3.2-3B",
            "llama-3.2-3b",
            meta_shards=1,
            variant="base",
            published_total=3212749824,
        ),
        model(
            "llama-3.2-3b-instruct",
            "Llama 3.2 3B Instruct",
            "meta-llama/Llama-3.2-3B-Instruct",
            "llama-3.2-3b-instruct",
            meta_shards=1,
            variant="instruct",
        ),
        int4("3b", "QLoRA"),
        int4("3b", "SpinQuant"),
    ],
    generation="3.2",
    license="llama3.2",
    released="2024-09-25",
    training_tokens="up to 9T",
)

VISION_32 = family(
    [
        model(
            "llama-3.2-11b-vision",
            "Llama 3.2 11B Vision",
            "meta-llama/Llama-3.2-11B-Vision",
            "llama-3.2-11b-vision",
            meta_shards=1,
            variant="base",
        ),
        model(
            "llama-3.2-11b-vision-instruct",
            "Llama 3.2 11B Vision Instruct",
            "meta-llama/Llama-3.2-11B-Vision-Instruct",
            "llama-3.2-11b-vision-instruct",
            meta_shards=1,
            variant="instruct",
            published_total=10670220835,
            lookalikes=["llama-guard-3-11b-vision"],
        ),
        model(
            "llama-3.2-90b-vision",
            "Llama 3.2 90B Vision",
            "meta-llama/Llama-3.2-90B-Vision",
            "llama-3.2-90b-vision-instruct",
            meta_shards=8,
            variant="base",
            changes={"text_config": {"eos_token_id": 128001}},
            assumed=["eos_token_id"],
        ),
        model(
            "llama-3.2-90b-vision-instruct",
            "Llama 3.2 90B Vision Instruct",
            "meta-llama/Llama-3.2-90B-Vision-Instruct",
            "llama-3.2-90b-vision-instruct",
            meta_shards=8,
            variant="instruct",
        ),
    ],
    generation="3.2-vision",
    license="llama3.2",
    released="2024-09-25",
    training_tokens="6B image and text pairs",
)

LLAMA_33 = [
    model(
        "llama-3.3-70b-instruct",
        "Llama 3.3 70B Instruct",
        "meta-llama/Llama-3.3-70B-Instruct",
        "llama-3.3-70b-instruct",
        meta_shards=8,
        variant="instruct",
        generation="3.3",
        license="llama3.3",
        released="2024-12-06",
        training_tokens="15T+",
    )
]

LLAMA_4 = family(
    [
        model(
            "llama-4-scout-17b-16e",
            "Llama 4 Scout",
            "meta-llama/Llama-4-Scout-17B-16E",
            "llama-4-scout-17b-16e",
            variant="base",
            training_tokens="about 40T",
            aliases=["llama-4-scout"],
        ),
        model(
            "llama-4-scout-17b-16e-instruct",
            "Llama 4 Scout Instruct",
            "meta-llama/Llama-4-Scout-17B-16E-Instruct",
            "llama-4-scout-17b-16e-instruct",
            variant="instruct",
            training_tokens="about 40T",
            published_total=108641793536,
            trained_context=262144,
            aliases=["llama-4-scout-instruct"],
        ),
        model(
            "llama-4-maverick-17b-128e",
            "Llama 4 Maverick",
            "meta-llama/Llama-4-Maverick-17B-128E",
            "llama-4-maverick-17b-128e",
            variant="base",
            training_tokens="about 22T",
            assumed=["max_position_embeddings"],
            aliases=["llama-4-maverick"],
        ),
        model(
            "llama-4-maverick-17b-128e-instruct",
            "Llama 4 Maverick Instruct",
            "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
            "llama-4-maverick-17b-128e-instruct",
            variant="instruct",
            training_tokens="about 22T",
            published_total=401583781376,
            trained_context=262144,
            aliases=["llama-4-maverick-instruct"],
        ),
    ],
    generation="4",
    license="llama4",
    released="2025-04-05",
    meta_shards=8,
)

GUARDS = family(
    [
        model(
            "llama-guard-1-7b",
            "Llama Guard 1 7B",
            "meta-llama/LlamaGuard-7b",
            "llama-guard-1-7b",
            generation="guard-1",
            license="llama2",
            released="2023-12-07",
            lookalikes=["llama-2-7b", "Vicuna v1.5"],
            aliases=["llamaguard-7b", "llama-guard-7b"],
        ),
        model(
            "llama-guard-2-8b",
            "Llama Guard 2 8B",
            "meta-llama/Meta-Llama-Guard-2-8B",
            "llama-3-8b-instruct",
            generation="guard-2",
            license="uncertain",
            released="2024-04-18",
            lookalikes=["llama-3-8b"],
            license_note="PurpleLlama's licence file is the Llama 2 text, the model is based on "
            "Llama 3",
        ),
        model(
            "llama-guard-3-8b",
            "Llama Guard 3 8B",
            "meta-llama/Llama-Guard-3-8B",
            "llama-guard-3-8b",
            generation="guard-3",
            license="uncertain",
            released="2024-07-23",
            lookalikes=["llama-3.1-8b-instruct"],
            license_note="PurpleLlama's licence file is the Llama 3.2 text, the model is based "
            "on Llama 3.1",
        ),
        model(
            "llama-guard-3-1b",
            "Llama Guard 3 1B",
            "meta-llama/Llama-Guard-3-1B",
            "llama-3.2-1b-instruct",
            generation="guard-3",
            license="llama3.2",
            released="2024-09-25",
            lookalikes=["llama-3.2-1b"],
        ),
        model(
            "llama-guard-3-1b-int4",
            "Llama Guard 3 1B INT4",
            "meta-llama/Llama-Guard-3-1B-INT4",
            "llama-3.2-1b-instruct",
            generation="guard-3",
            license="llama3.2",
            released="2024-09-25",
            changes={
                "num_hidden_layers": 12,
                "intermediate_size": 6400,
                "quantization_config": {"quant_method": "executorch-int4"},
            },
            assumed=["transformers_version"],
        ),
        model(
            "llama-guard-3-11b-vision",
            "Llama Guard 3 11B Vision",
            "meta-llama/Llama-Guard-3-11B-Vision",
            "llama-3.2-11b-vision-instruct",
            generation="guard-3",
            license="llama3.2",
            released="2024-09-25",
            lookalikes=["llama-3.2-11b-vision-instruct"],
        ),
        # Scout with the routed experts and the router taken out: the shared expert is the
        # dense feed-forward, which gives the published 12B.
        model(
            "llama-guard-4-12b",
            "Llama Guard 4 12B",
            "meta-llama/Llama-Guard-4-12B",
            "llama-4-scout-17b-16e-instruct",
            generation="guard-4",
            license="llama4",
            released="2025-04-29",
            changes={
                "text_config": {
                    "num_local_experts": 0,
                    "moe_layers": [],
                    "intermediate_size_mlp": 8192,
                    "attention_chunk_size": None,
                    "max_position_embeddings": 131072,
                    "rope_scaling": None,
                }
            },
            assumed=[
                "intermediate_size_mlp",
                "attention_chunk_size",
                "max_position_embeddings",
                "rope_scaling",
                "moe_layers",
            ],
        ),
    ],
    meta_shards=1,
    variant="guard",
    training_tokens="its base model, then safety tuning",
    assumed=["released"],
)

# Models of others with Llama's architecture, named where the shape is theirs alone:
# hidden_size, layers, heads, KV heads, feed-forward, vocabulary, RoPE theta.
RELATIVES = [
    ["TinyLlama 1.1B", 2048, 22, 32, 4, 5632, 32000, 10000.0],
    ["SmolLM 135M", 576, 30, 9, 3, 1536, 49152, 10000.0],
    ["SmolLM2 135M", 576, 30, 9, 3, 1536, 49152, 100000.0],
    ["SmolLM2 360M", 960, 32, 15, 5, 2560, 49152, 100000.0],
    ["SmolLM2 1.7B", 2048, 24, 32, 32, 8192, 49152, 130000.0],
    ["Yi 6B", 4096, 32, 32, 4, 11008, 64000, 5000000.0],
    ["Yi 34B", 7168, 60, 56, 8, 20480, 64000, 5000000.0],
    ["OpenLLaMA 3B", 3200, 26, 32, 32, 8640, 32000, 10000.0],
    ["pocket of llamatool", 128, 4, 4, 2, 320, 2760, 10000.0],
    ["pocket-rope of llamatool", 128, 4, 4, 2, 320, 2760, 500000.0],
]


def main():
    models = LLAMA_1 + LLAMA_2 + CODE + LLAMA_3 + LLAMA_31 + LLAMA_32 + VISION_32 + LLAMA_33
    models += LLAMA_4 + GUARDS
    used = sorted({entry["config"] for entry in models})
    configs = {name: json.loads((CONFIGS / f"{name}.json").read_text()) for name in used}
    lines = ['{"configs": {']
    lines.append(
        ",\n".join(f"{json.dumps(k)}: {json.dumps(v, sort_keys=True)}" for k, v in configs.items())
    )
    lines.append('},\n"models": [')
    lines.append(",\n".join(json.dumps(entry, sort_keys=True) for entry in models))
    lines.append('],\n"relatives": [')
    lines.append(",\n".join(json.dumps(row) for row in RELATIVES))
    lines.append("]}")
    TARGET.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
