"""One model written in every layout, by code that shares nothing with the program's own.

The Meta writer works from transformers' state dict towards Meta's names, the direction opposite
to the loader's; GGUF files are written by the gguf package.
"""

import json
from pathlib import Path
from typing import Any

import torch

Dense = dict[str, torch.Tensor]


def save_huggingface(theirs: Any, folder: Path, max_shard_size: str = "5GB") -> Path:
    theirs.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def halves_to_pairs(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Row by row: row i + half of a head goes to 2i + 1, row i to 2i."""
    head_dim = weight.shape[0] // num_heads
    half = head_dim // 2
    out = torch.empty_like(weight)
    for head in range(num_heads):
        for i in range(half):
            out[head * head_dim + 2 * i] = weight[head * head_dim + i]
            out[head * head_dim + 2 * i + 1] = weight[head * head_dim + i + half]
    return out


def save_meta(
    theirs: Any, folder: Path, num_ranks: int, *, by_columns: bool, with_output: bool = False
) -> Path:
    """A dense model as `consolidated.NN.pth` and params.json.

    Args: by_columns: splits the input table by columns, as Llama 1 and 2 do. with_output: stores
    the output table of a tied model too, as Meta's Llama 3.2 does.
    """
    config, state = theirs.config, theirs.state_dict()
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    ranks: list[Dense] = [{} for _ in range(num_ranks)]

    def put(name: str, tensor: torch.Tensor, axis: int | None) -> None:
        parts = tensor.chunk(num_ranks, axis) if axis is not None else [tensor] * num_ranks
        for rank, part in zip(ranks, parts, strict=True):
            rank[name] = part.clone()

    put("tok_embeddings.weight", state["model.embed_tokens.weight"], 1 if by_columns else 0)
    put("norm.weight", state["model.norm.weight"], None)
    if with_output or not config.tie_word_embeddings:
        put("output.weight", state["lm_head.weight"], 0)
    for i in range(config.num_hidden_layers):
        theirs_i, meta = f"model.layers.{i}.", f"layers.{i}."
        q = halves_to_pairs(state[theirs_i + "self_attn.q_proj.weight"], heads)
        k = halves_to_pairs(state[theirs_i + "self_attn.k_proj.weight"], kv_heads)
        put(meta + "attention.wq.weight", q, 0)
        put(meta + "attention.wk.weight", k, 0)
        put(meta + "attention.wv.weight", state[theirs_i + "self_attn.v_proj.weight"], 0)
        put(meta + "attention.wo.weight", state[theirs_i + "self_attn.o_proj.weight"], 1)
        put(meta + "feed_forward.w1.weight", state[theirs_i + "mlp.gate_proj.weight"], 0)
        put(meta + "feed_forward.w3.weight", state[theirs_i + "mlp.up_proj.weight"], 0)
        put(meta + "feed_forward.w2.weight", state[theirs_i + "mlp.down_proj.weight"], 1)
        put(meta + "attention_norm.weight", state[theirs_i + "input_layernorm.weight"], None)
        put(meta + "ffn_norm.weight", state[theirs_i + "post_attention_layernorm.weight"], None)
    if by_columns:
        for rank in ranks:
            rank["rope.freqs"] = torch.ones(4)
    params = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": heads,
        "n_kv_heads": kv_heads,
        "vocab_size": config.vocab_size,
        "multiple_of": 32,
        "ffn_dim_multiplier": config.intermediate_size / (8 * config.hidden_size / 3),
        "norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
    }
    return _save(folder, ranks, params)


def save_meta_llama4(theirs: Any, folder: Path, num_ranks: int) -> Path:
    """A Llama 4 text model with the tensor names of Meta's published files."""
    config, state = theirs.config, theirs.state_dict()
    ranks: list[Dense] = [{} for _ in range(num_ranks)]

    def put(name: str, tensor: torch.Tensor, axis: int | None) -> None:
        parts = tensor.chunk(num_ranks, axis) if axis is not None else [tensor] * num_ranks
        for rank, part in zip(ranks, parts, strict=True):
            rank[name] = part.clone()

    def fuse(name: str, tensors: list[torch.Tensor]) -> None:
        for number, rank in enumerate(ranks):
            rank[name] = torch.cat([t.chunk(num_ranks, 0)[number] for t in tensors])

    put("tok_embeddings.weight", state["model.embed_tokens.weight"], 0)
    put("norm.weight", state["model.norm.weight"], None)
    put("output.weight", state["lm_head.weight"], 0)
    for i in range(config.num_hidden_layers):
        layer = {
            name.removeprefix(f"model.layers.{i}."): tensor
            for name, tensor in state.items()
            if name.startswith(f"model.layers.{i}.")
        }
        meta = f"layers.{i}."
        fuse(meta + "attention.wqkv.weight",
             [layer[f"self_attn.{x}_proj.weight"] for x in "qkv"])  # fmt: skip
        put(meta + "attention.wo.weight", layer["self_attn.o_proj.weight"], 1)
        put(meta + "attention.wqkv.layer_norm_weight", layer["input_layernorm.weight"], None)
        norm = layer["post_attention_layernorm.weight"]
        feed = meta + "feed_forward."
        if "feed_forward.router.weight" not in layer:
            put(feed + "mlp.layer_norm_weight", norm, None)
            fuse(feed + "mlp.fc1_weight", [layer["feed_forward.gate_proj.weight"],
                                           layer["feed_forward.up_proj.weight"]])  # fmt: skip
            put(feed + "mlp.fc2_weight", layer["feed_forward.down_proj.weight"], 1)
            continue
        put(feed + "norm.weight", norm, None)
        put(feed + "router_DE", layer["feed_forward.router.weight"].T, None)
        gate, up = layer["feed_forward.experts.gate_up_proj"].chunk(2, dim=-1)
        down = layer["feed_forward.experts.down_proj"]
        for number, rank in enumerate(ranks):
            for name, tensor, axis in (("moe_w_in_eD_F", gate, 2), ("moe_w_swiglu_eD_F", up, 2),
                                       ("moe_w_out_eF_D", down, 1)):  # fmt: skip
                share = tensor.chunk(num_ranks, axis)[number]
                rank[f"{feed}experts.{name}"] = share.reshape(-1, share.shape[-1]).clone()
        shared = "feed_forward.shared_expert."
        put(feed + "w_in_shared_FD.weight", layer[shared + "gate_proj.weight"], 0)
        put(feed + "w_swiglu_FD.weight", layer[shared + "up_proj.weight"], 0)
        put(feed + "w_out_shared_DF.weight", layer[shared + "down_proj.weight"], 1)
        put(feed + "expert_activation_DE", torch.ones(config.hidden_size, 4), None)
    params = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        "use_qk_norm": config.use_qk_norm,
        "attention_chunk_size": config.attention_chunk_size,
        "nope_layer_interval": 4,
        "attn_temperature_tuning": True,
        "floor_scale": config.floor_scale,
        "attn_scale": config.attn_scale,
        # (8/3) x 64 = 170 -> 96 in the dense layers, half of that in the experts
        "ffn_dim_multiplier": 0.5625,
        "ffn_exp": 4.0,
        "multiple_of": 16,
        "moe_args": {
            "num_experts": config.num_local_experts,
            "top_k": config.num_experts_per_tok,
            "interleave_moe_layer_step": config.interleave_moe_layer_step,
            "capacity_factor": 1.0,
            "auto_scale_F": True,
        },
    }
    return _save(folder, ranks, params)


def save_gguf(theirs: Any, path: Path, *, dtype: str = "F32") -> Path:
    """A dense model as llama.cpp's converter writes it: q and k with rows in pairs."""
    import gguf

    config, state = theirs.config, theirs.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem = name.removesuffix(".weight").removesuffix(".bias")
        ending = name[len(stem) :]
        block = ""
        if stem.startswith("model.layers."):
            _, _, number, stem = stem.split(".", 3)
            block = f"blk.{number}."
        if stem.endswith(("q_proj", "k_proj")):
            is_q = stem.endswith("q_proj")
            tensor = halves_to_pairs(
                tensor, config.num_attention_heads if is_q else config.num_key_value_heads
            )
        values = tensor.float().numpy()
        kind = gguf.GGMLQuantizationType[dtype if values.ndim == 2 else "F32"]
        packed = gguf.quants.quantize(values, kind)
        writer.add_tensor(block + names[stem] + ending, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _save(folder: Path, ranks: list[Dense], params: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, rank in enumerate(ranks):
        torch.save(rank, folder / f"consolidated.{number:02}.pth")
    (folder / "params.json").write_text(json.dumps(params))
    return folder
