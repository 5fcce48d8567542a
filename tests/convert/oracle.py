"""Meta's layout made from Hugging Face tensors by torch alone, as the public scripts have it.

Nothing here reads llamatool's table of names. Source: transformers convert_llama_weights_to_hf.py,
convert_mllama_weights_to_hf.py, convert_llama4_weights_to_hf.py, each read backwards.
"""

import json
from pathlib import Path
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
RATIOS = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1))


def to_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """`permute` of the script: Meta's row order to Hugging Face's."""
    half = weight.shape[0] // heads // 2
    return weight.view(heads, half, 2, -1).transpose(1, 2).reshape(weight.shape)


def to_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    half = weight.shape[0] // heads // 2
    return weight.view(heads, 2, half, -1).transpose(1, 2).reshape(weight.shape)


def split(tensor: torch.Tensor, axis: int | None, num_shards: int) -> list[torch.Tensor]:
    if axis is None:
        return [tensor.clone() for _ in range(num_shards)]
    return [part.contiguous() for part in tensor.chunk(num_shards, axis)]


class Shards:
    def __init__(self, num_shards: int) -> None:
        self.files: list[Tensors] = [{} for _ in range(num_shards)]

    def add(self, name: str, tensor: torch.Tensor, axis: int | None) -> None:
        for file, part in zip(self.files, split(tensor, axis, len(self.files)), strict=True):
            file[name] = part

    def add_stacked(self, name: str, tensors: list[torch.Tensor]) -> None:
        """Each rank's rows of several matrices, one below the other."""
        parts = [split(tensor, 0, len(self.files)) for tensor in tensors]
        for rank, file in enumerate(self.files):
            file[name] = torch.cat([part[rank] for part in parts])

    def save(self, folder: Path, params: dict[str, Any], **options: Any) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for rank, file in enumerate(self.files):
            torch.save(file, folder / f"consolidated.{rank:02d}.pth", **options)
        (folder / "params.json").write_text(json.dumps(params))
        return folder


def dense(
    hf: Tensors, *, layers: int, heads: int, kv_heads: int, num_shards: int, embedding_axis: int
) -> Shards:
    shards = Shards(num_shards)
    embedding = hf["model.embed_tokens.weight"]
    shards.add("tok_embeddings.weight", embedding, embedding_axis)
    shards.add("norm.weight", hf["model.norm.weight"], None)
    shards.add("output.weight", hf.get("lm_head.weight", embedding), 0)
    for i in range(layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        q = to_pairs(hf[theirs + "self_attn.q_proj.weight"], heads)
        k = to_pairs(hf[theirs + "self_attn.k_proj.weight"], kv_heads)
        shards.add(ours + "attention.wq.weight", q, 0)
        shards.add(ours + "attention.wk.weight", k, 0)
        for name, other, axis in (
            ("attention.wv.weight", "self_attn.v_proj.weight", 0),
            ("attention.wo.weight", "self_attn.o_proj.weight", 1),
            ("feed_forward.w1.weight", "mlp.gate_proj.weight", 0),
            ("feed_forward.w2.weight", "mlp.down_proj.weight", 1),
            ("feed_forward.w3.weight", "mlp.up_proj.weight", 0),
            ("attention_norm.weight", "input_layernorm.weight", None),
            ("ffn_norm.weight", "post_attention_layernorm.weight", None),
        ):
            shards.add(ours + name, hf[theirs + other], axis)
    return shards


def mllama(hf: Tensors, config: Any, num_shards: int) -> Shards:
    """Tensors under the hub's names (`language_model.model...`) to Meta's layout."""
    text, vision = config.text_config, config.vision_config
    shards = Shards(num_shards)
    embedding = hf["language_model.model.embed_tokens.weight"]
    shards.add("text_model.tok_embeddings.weight", embedding[: text.vocab_size], 0)
    shards.add("text_model.learnable_embedding.weight", embedding[text.vocab_size :], 0)
    shards.add("text_model.norm.weight", hf["language_model.model.norm.weight"], None)
    shards.add("text_model.output.weight", hf["language_model.lm_head.weight"], 0)
    own = crossing = 0
    for i in range(text.num_hidden_layers):
        theirs = f"language_model.model.layers.{i}."
        if i in text.cross_attention_layers:
            ours = f"text_model.cross_attention_layers.{crossing}."
            crossing += 1
            kind = "cross_attn"
            shards.add(ours + "gate_attn", hf[theirs + "cross_attn_attn_gate"], None)
            shards.add(ours + "gate_ffwd", hf[theirs + "cross_attn_mlp_gate"], None)
            for letter in "qk":
                norm = hf[f"{theirs}cross_attn.{letter}_norm.weight"]
                shards.add(f"{ours}attention.{letter}_norm.weight", norm, None)
        else:
            ours = f"text_model.layers.{own}."
            own += 1
            kind = "self_attn"
        for letter, heads in (("q", text.num_attention_heads), ("k", text.num_key_value_heads)):
            weight = hf[f"{theirs}{kind}.{letter}_proj.weight"]
            weight = to_pairs(weight, heads) if kind == "self_attn" else weight
            shards.add(f"{ours}attention.w{letter}.weight", weight, 0)
        for name, other, axis in (
            ("attention.wv.weight", f"{kind}.v_proj.weight", 0),
            ("attention.wo.weight", f"{kind}.o_proj.weight", 1),
            ("feed_forward.w1.weight", "mlp.gate_proj.weight", 0),
            ("feed_forward.w2.weight", "mlp.down_proj.weight", 1),
            ("feed_forward.w3.weight", "mlp.up_proj.weight", 0),
            ("attention_norm.weight", "input_layernorm.weight", None),
            ("ffn_norm.weight", "post_attention_layernorm.weight", None),
        ):
            shards.add(ours + name, hf[theirs + other], axis)
    encoder = "vision_model.vision_encoder."
    patch = hf["vision_model.patch_embedding.weight"]
    shards.add(encoder + "conv1._linear.weight", patch.reshape(patch.shape[0], -1), 0)
    _tower_edges(shards, hf, encoder)
    position = "vision_model.gated_positional_embedding."
    shards.add(encoder + "positional_embedding", hf[position + "embedding"], None)
    shards.add(encoder + "gated_positional_embedding_gate", hf[position + "gate"], None)
    patches = hf[position + "embedding"].shape[0]
    table = hf[position + "tile_embedding.weight"]
    cells = untabulated(table, vision.max_num_tiles, patches, vision.hidden_size)
    shards.add(encoder + "gated_positional_embedding", cells, None)
    for place in ("pre", "post"):
        theirs = f"vision_model.{place}_tile_positional_embedding."
        cells = untabulated(
            hf[theirs + "embedding.weight"], vision.max_num_tiles, 1, vision.hidden_size
        )
        shards.add(f"{encoder}{place}_tile_pos_embed.embedding", cells, None)
        shards.add(f"{encoder}{place}_tile_pos_embed.gate", hf[theirs + "gate"], None)
    for tower, count in (
        ("transformer", vision.num_hidden_layers),
        ("global_transformer", vision.num_global_layers),
    ):
        for i in range(count):
            ours = f"{encoder}{tower}.resblocks.{i}."
            theirs = f"vision_model.{tower}.layers.{i}."
            _tower_block(shards, hf, ours, theirs, bias=False)
            if tower == "global_transformer":
                shards.add(ours + "gate_attn", hf[theirs + "gate_attn"], None)
                shards.add(ours + "gate_ffn", hf[theirs + "gate_ffn"], None)
    for kind in ("weight", "bias"):
        shards.add(f"vision_model.vision_projection.{kind}", hf[f"multi_modal_projector.{kind}"], 0)
    return shards


def tabulated(cells: torch.Tensor) -> torch.Tensor:
    """Meta's table of tiles [T, T, ...] as rows by aspect ratio, as the script fills them."""
    tiles = cells.shape[0]
    table = torch.zeros(len(RATIOS) + 1, tiles, *cells.shape[2:], dtype=cells.dtype)
    for number, (height, width) in enumerate(RATIOS, start=1):
        table[number, : height * width] = cells[:height, :width].reshape(
            height * width, *cells.shape[2:]
        )
    return table.flatten(1)


def untabulated(table: torch.Tensor, tiles: int, patches: int, width: int) -> torch.Tensor:
    cells = torch.zeros(tiles, tiles, patches, width, dtype=table.dtype)
    rows = table.view(-1, tiles, patches, width)
    for number, (height, wide) in reversed(list(enumerate(RATIOS, start=1))):
        cells[:height, :wide] = rows[number, : height * wide].view(height, wide, patches, width)
    return cells


def llama4(hf: Tensors, config: Any, num_shards: int) -> Shards:
    text, vision = config.text_config, config.vision_config
    shards = Shards(num_shards)
    shards.add("tok_embeddings.weight", hf["language_model.model.embed_tokens.weight"], 0)
    shards.add("output.weight", hf["language_model.lm_head.weight"], 0)
    shards.add("norm.weight", hf["language_model.model.norm.weight"], None)
    for i in range(text.num_hidden_layers):
        ours, theirs = f"layers.{i}.", f"language_model.model.layers.{i}."
        qkv = [hf[f"{theirs}self_attn.{letter}_proj.weight"] for letter in "qkv"]
        shards.add_stacked(ours + "attention.wqkv.weight", qkv)
        shards.add(ours + "attention.wo.weight", hf[theirs + "self_attn.o_proj.weight"], 1)
        norm = hf[theirs + "input_layernorm.weight"]
        shards.add(ours + "attention.wqkv.layer_norm_weight", norm, None)
        norm = hf[theirs + "post_attention_layernorm.weight"]
        feed = theirs + "feed_forward."
        if i in config.text_config.moe_layers:
            shards.add(ours + "feed_forward.norm.weight", norm, None)
            _experts(shards, hf, ours + "feed_forward.", feed)
        else:
            shards.add(ours + "feed_forward.mlp.layer_norm_weight", norm, None)
            shards.add_stacked(
                ours + "feed_forward.mlp.fc1_weight",
                [hf[feed + "gate_proj.weight"], hf[feed + "up_proj.weight"]],
            )
            shards.add(ours + "feed_forward.mlp.fc2_weight", hf[feed + "down_proj.weight"], 1)
    encoder = "vision_embeddings.vision_encoder."
    shards.add(
        encoder + "conv1._linear.weight", hf["vision_model.patch_embedding.linear.weight"], 0
    )
    _tower_edges(shards, hf, encoder)
    shards.add(
        encoder + "positional_embedding_vlm", hf["vision_model.positional_embedding_vlm"], None
    )
    for i in range(vision.num_hidden_layers):
        _tower_block(
            shards,
            hf,
            f"{encoder}transformer.resblocks.{i}.",
            f"vision_model.model.layers.{i}.",
            bias=True,
        )
    adapter = "vision_embeddings.vision_adapter.mlp."
    shards.add(adapter + "c_fc.weight", hf["vision_model.vision_adapter.mlp.fc1.weight"], 0)
    shards.add(adapter + "c_proj.weight", hf["vision_model.vision_adapter.mlp.fc2.weight"], 1)
    shards.add("vision_projection.weight", hf["multi_modal_projector.linear_1.weight"], 0)
    return shards


def _experts(shards: Shards, hf: Tensors, ours: str, theirs: str) -> None:
    gate, up = hf[theirs + "experts.gate_up_proj"].chunk(2, -1)
    down = hf[theirs + "experts.down_proj"]
    for rank, file in enumerate(shards.files):
        for name, tensor, axis in (
            ("moe_w_in_eD_F", gate, 2),
            ("moe_w_swiglu_eD_F", up, 2),
            ("moe_w_out_eF_D", down, 1),
        ):
            part = tensor.chunk(len(shards.files), axis)[rank]
            file[f"{ours}experts.{name}"] = part.reshape(-1, part.shape[-1]).contiguous()
    shards.add(ours + "router_DE", hf[theirs + "router.weight"].t().contiguous(), None)
    shared = theirs + "shared_expert."
    shards.add(ours + "w_in_shared_FD.weight", hf[shared + "gate_proj.weight"], 0)
    shards.add(ours + "w_swiglu_FD.weight", hf[shared + "up_proj.weight"], 0)
    shards.add(ours + "w_out_shared_DF.weight", hf[shared + "down_proj.weight"], 1)


def _tower_edges(shards: Shards, hf: Tensors, encoder: str) -> None:
    shards.add(encoder + "class_embedding", hf["vision_model.class_embedding"], None)
    for place in ("pre", "post"):
        for kind in ("weight", "bias"):
            shards.add(
                f"{encoder}ln_{place}.{kind}", hf[f"vision_model.layernorm_{place}.{kind}"], None
            )


def _tower_block(shards: Shards, hf: Tensors, ours: str, theirs: str, *, bias: bool) -> None:
    for letter in "qkvo":
        axis = 1 if letter == "o" else 0
        weight = hf[f"{theirs}self_attn.{letter}_proj.weight"]
        shards.add(f"{ours}attn.w{letter}.weight", weight, axis)
        if bias:
            values = hf[f"{theirs}self_attn.{letter}_proj.bias"]
            shards.add(f"{ours}attn.w{letter}.bias", values, None if letter == "o" else 0)
    shards.add(ours + "mlp.c_fc.weight", hf[theirs + "mlp.fc1.weight"], 0)
    shards.add(ours + "mlp.c_fc.bias", hf[theirs + "mlp.fc1.bias"], 0)
    shards.add(ours + "mlp.c_proj.weight", hf[theirs + "mlp.fc2.weight"], 1)
    shards.add(ours + "mlp.c_proj.bias", hf[theirs + "mlp.fc2.bias"], None)
    for number, norm in (("1", "input_layernorm"), ("2", "post_attention_layernorm")):
        for kind in ("weight", "bias"):
            shards.add(f"{ours}ln_{number}.{kind}", hf[f"{theirs}{norm}.{kind}"], None)
