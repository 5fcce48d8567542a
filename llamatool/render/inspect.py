"""An inspection as text and as JSON; several side by side."""

from collections.abc import Sequence
from typing import Any

from llamatool.config.generation import Identity
from llamatool.config.license import DISCLAIMER
from llamatool.config.model import ModelConfig, Note, RopeConfig
from llamatool.inspection import CheckpointReport, Inspection
from llamatool.render.blocks import Block, Grid, Lines
from llamatool.sizing.kv_cache import image_tokens
from llamatool.units import format_bytes, format_count, format_tokens

_GROUP_LABELS = {
    "embedding": "embedding",
    "lm_head": "lm_head",
    "attention": "attention",
    "mlp": "mlp",
    "norms": "norms",
    "router": "router",
    "routed_experts": "routed experts",
    "shared_experts": "shared experts",
    "cross_attention": "cross-attention",
    "cross_attention_gates": "cross-attention gates",
    "vision_tower": "vision tower",
    "projector": "projector",
}
_MAX_LISTED = 12  # tensors named in each list of differences


def to_blocks(found: Sequence[Inspection]) -> list[Block]:
    """One source in sections, several as columns with the rows that differ marked."""
    if len(found) == 1:
        return _single(found[0])
    return _side_by_side(found)


def to_json(found: Sequence[Inspection]) -> dict[str, Any]:
    """The object of one source; for several, an object with one for each of them."""
    if len(found) == 1:
        return {"schema": 1, **_object(found[0])}
    objects = [_object(inspection) for inspection in found]
    leaves = [_leaves(value) for value in objects]
    keys = list(dict.fromkeys(key for column in leaves for key in column))
    return {
        "schema": 1,
        "models": objects,
        "differences": [
            key
            for key in keys
            if any(column.get(key) != leaves[0].get(key) for column in leaves[1:])
        ],
    }


# What says how a model was read, and not what it is.
_NOT_COMPARED = ("source", "source_kind", "config_origins", "checkpoint", "warnings")


def _leaves(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested objects by their path: `config.rope_theta`."""
    found: dict[str, Any] = {}
    for key, item in value.items():
        if not prefix and key in _NOT_COMPARED:
            continue
        if isinstance(item, dict):
            found |= _leaves(item, f"{prefix}{key}.")
        elif f"{prefix}{key}" != "identity.evidence":
            found[prefix + key] = item
    return found


def headline(inspection: Inspection) -> str:
    """The verdict in a sentence: `Llama 3.1 8B, base (certain)`."""
    identity = inspection.identity
    if identity is None:
        return "weights without a configuration"
    if identity.family == "other":
        assert inspection.config is not None
        return f"not a Llama: model_type {inspection.config.model_type}"
    name = _model_name(identity)
    if identity.family == "llama-architecture":
        return f"{name or 'unnamed'}: Llama's architecture, not a model of Meta's"
    if name is None:
        name = _generation_name(identity.generation)
    if identity.confidence == "ambiguous":
        if identity.model:
            return f"ambiguous, leaning to {name}"
        return "ambiguous: " + " or ".join(_candidate_name(c) for c in identity.candidates[:3])
    return f"{name} ({identity.confidence})"


def _generation_name(generation: str | None) -> str:
    if generation is None:
        return "a Llama"
    if generation == "code":
        return "Code Llama"
    words = generation.replace("guard-", "Guard ").replace("-vision", " Vision")
    return f"Llama {words}"


def _model_name(identity: Identity) -> str | None:
    entry = identity.entry
    return entry.name if entry is not None else identity.model


def _candidate_name(candidate: str) -> str:
    from llamatool.config.catalog import find

    entry = find(candidate)
    return entry.name if entry is not None and entry.id == candidate else candidate


# --- one source -----------------------------------------------------------------------------


def _single(inspection: Inspection) -> list[Block]:
    blocks: list[Block] = [Lines((headline(inspection),))]
    if inspection.identity is not None:
        blocks.append(_identity_block(inspection.identity))
    if inspection.config is not None:
        blocks.append(_shape_block(inspection))
        blocks.extend(_parameter_blocks(inspection))
        blocks.append(_memory_block(inspection))
        blocks.append(_rope_block(inspection))
    if inspection.license is not None:
        blocks.append(_license_block(inspection))
    if inspection.checkpoint is not None:
        blocks.extend(_checkpoint_blocks(inspection.checkpoint))
    if inspection.notes:
        rows = tuple(f"{note.message} [{note.code}]" for note in inspection.notes)
        blocks.append(Lines(rows, title="Warnings"))
    return blocks


def _identity_block(identity: Identity) -> Grid:
    rows = [(item.field, _value(item.value), item.says) for item in identity.evidence]
    if identity.candidates:
        names = ", ".join(_candidate_name(name) for name in identity.candidates)
        rows.append(("fits", names, ""))
    return Grid(tuple(rows), title="Why")


def _shape_block(inspection: Inspection) -> Grid:
    config = inspection.config
    assert config is not None
    rows = [(label, value, _origin(config, label)) for label, value in _shape_rows(inspection)]
    return Grid(tuple(rows), align="lll", title="Shape")


def _shape_rows(inspection: Inspection) -> list[tuple[str, str]]:
    config = inspection.config
    assert config is not None
    rows = [
        ("hidden_size", str(config.hidden_size)),
        ("num_hidden_layers", _layer_kinds(inspection)),
        ("num_attention_heads", str(config.num_attention_heads)),
        ("num_key_value_heads", _kv_heads(config)),
        ("head_dim", str(config.head_dim)),
        ("intermediate_size", str(config.intermediate_size)),
    ]
    if config.intermediate_size_mlp is not None:
        rows.append(("intermediate_size_mlp", str(config.intermediate_size_mlp)))
    if config.moe is not None:
        rows.append(
            (
                "num_local_experts",
                f"{config.moe.num_local_experts}, {config.moe.num_experts_per_tok} per token, "
                f"in {len(config.moe.moe_layers)} layers",
            )
        )
    rows += [
        ("vocab_size", str(config.vocab_size)),
        ("tie_word_embeddings", str(config.tie_word_embeddings).lower()),
        ("rms_norm_eps", f"{config.rms_norm_eps:g}"),
        ("dtype", config.dtype or "not stated, sized as bfloat16"),
    ]
    if config.quantization is not None and inspection.stored is not None:
        rows.append(("quantization_config", inspection.stored.description))
    if config.vision is not None:
        vision = config.vision
        rows.append(
            (
                "vision_config",
                f"{vision.num_hidden_layers + vision.num_global_layers} layers of "
                f"{vision.hidden_size}, {vision.image_size} px, patch {vision.patch_size}",
            )
        )
    return rows


def _kv_heads(config: ModelConfig) -> str:
    per_layer = config.num_key_value_heads_per_layer
    if per_layer is None:
        return str(config.num_key_value_heads)
    return f"{min(per_layer)} to {max(per_layer)} by layer"


def _layer_kinds(inspection: Inspection) -> str:
    counts: dict[str, int] = {}
    for layer in inspection.layers:
        window = f" of {layer.window}" if layer.window else ""
        nope = "" if layer.uses_rope or layer.attention == "cross" else " without RoPE"
        label = f"{layer.attention}{window}{nope}"
        counts[label] = counts.get(label, 0) + 1
    total = str(len(inspection.layers))
    if list(counts) == ["full"]:
        return total
    return f"{total}: " + ", ".join(f"{count} {label}" for label, count in counts.items())


def _origin(config: ModelConfig, label: str) -> str:
    origin = config.origins.get(label)
    return f"({origin})" if origin in ("default", "derived") else ""


def _parameter_blocks(inspection: Inspection) -> list[Block]:
    count = inspection.parameters
    assert count is not None
    rows = [
        (_GROUP_LABELS[group], f"{number:,}", f"{100 * number / count.total:.1f} %")
        for group, number in count.by_group.items()
    ]
    if count.tied:
        rows.insert(1, ("lm_head", "tied", "embedding"))
    rows.append(("total", f"{count.total:,}", format_count(count.total)))
    blocks: list[Block] = [Grid(tuple(rows), align="lrr", title="Parameters")]
    facts = []
    if count.per_layer is not None:
        facts.append(f"each layer: {count.per_layer:,}")
    if count.active is not None:
        facts.append(
            f"active per token: {count.active.total:,} ({format_count(count.active.total)}), "
            f"{count.active.without_input_embedding:,} without the input embedding"
        )
    if count.vision:
        facts.append(f"text model: {count.text:,}; images: {count.vision:,}")
    if count.stored != count.total:
        facts.append(f"stored: {count.stored:,} (the tied output table is in the files too)")
    entry = inspection.identity.entry if inspection.identity else None
    unique = entry.unique_total if entry else None
    if unique is not None:
        facts.append(f"unique: {unique:,} (without the KV heads stored twice)")
    if facts:
        blocks.append(Lines(tuple(facts)))
    return blocks


def _memory_block(inspection: Inspection) -> Grid:
    rows = []
    stored = inspection.stored
    if stored is not None:
        about = "" if stored.exact else "about "
        rows.append(
            ("weights as stored", f"{about}{stored.num_bytes:,} B", format_bytes(stored.num_bytes))
        )
    rows += [
        (f"weights {dtype}", f"{size:,} B", format_bytes(size))
        for dtype, size in inspection.weights_bytes.items()
        if dtype != "float16"
    ]
    kv = inspection.kv
    if kv is not None:
        in_window, growing = kv.in_window_bytes_per_token, kv.growing_bytes_per_token
        if growing == in_window:
            shown = format_bytes(growing) if growing >= 1024 else ""
            rows.append(("KV cache per token", f"{growing:,} B", shown))
        else:
            rows.append(("KV per token, in window", f"{in_window:,} B", format_bytes(in_window)))
            rows.append(("KV per token, beyond", f"{growing:,} B", format_bytes(growing)))
        if kv.bytes_per_image:
            rows.append(
                ("KV per image", f"{kv.bytes_per_image:,} B", format_bytes(kv.bytes_per_image))
            )
        elif inspection.config is not None and inspection.config.vision is not None:
            fewest, most = image_tokens(inspection.config.vision)
            rows.append(("tokens per image", f"{fewest:,} to {most:,}", "by shape"))
        context = inspection.config.max_position_embeddings if inspection.config else None
        if context:
            size = kv.num_bytes(context)
            rows.append(
                (f"KV at {format_tokens(context)} tokens", f"{size:,} B", format_bytes(size))
            )
    return Grid(tuple(rows), align="lrr", title="Memory (KV cache in bfloat16)")


def _rope_block(inspection: Inspection) -> Lines:
    config, context = inspection.config, inspection.context
    assert config is not None
    assert context is not None
    lines = [f"theta {config.rope.theta:g}, {_scaling(config.rope)}"]
    bands = inspection.bands
    if bands is not None:
        lines.append(
            f"of {config.head_dim // 2} frequencies {bands.unchanged} stay, {bands.interpolated} "
            f"are interpolated, {bands.divided} are divided by {config.rope.factor:g}"
        )
    if context.longest_wavelength is not None:
        lines.append(f"longest wavelength: {context.longest_wavelength:,.0f} positions")
    stated = context.max_position_embeddings
    if stated is None:
        lines.append("context: not stated")
    else:
        origin = config.origins.get("max_position_embeddings")
        mark = f" ({origin})" if origin in ("default", "derived") else ""
        lines.append(f"context: {stated:,} tokens ({format_tokens(stated)}){mark}")
    if context.note:
        lines.append(context.note)
    if context.answer:
        lines.append(context.answer)
    return Lines(tuple(lines), title="Position and context")


def _scaling(rope: RopeConfig) -> str:
    if rope.type == "default":
        return "no scaling"
    factor = f" by {rope.factor:g}" if rope.factor else ""
    original = rope.original_max_position_embeddings
    trained = f" from {original:,} positions" if original else ""
    return f"{rope.type} scaling{factor}{trained}"


def _license_block(inspection: Inspection) -> Lines:
    terms = inspection.license
    assert terms is not None
    lines = [terms.name]
    commercial = {True: "allowed", False: "not allowed", None: "not known"}[terms.commercial_use]
    lines.append(f"commercial use: {commercial}")
    for label, text in (
        ("over 700 million users", terms.monthly_users_limit),
        ("attribution", terms.attribution),
        ("naming", terms.naming),
        ("training on outputs", terms.training_on_outputs),
        ("European Union", terms.eu_multimodal),
        ("note", terms.note),
    ):
        if text:
            lines.append(f"{label}: {text}")
    lines.append(DISCLAIMER)
    return Lines(tuple(lines), title="Licence")


def _checkpoint_blocks(report: CheckpointReport) -> list[Block]:
    files = "1 file" if report.num_files == 1 else f"{report.num_files} files"
    rows = [
        (group.dtype, f"{group.num_tensors:,}", f"{group.num_elements:,}", f"{group.num_bytes:,} B")
        for group in report.by_dtype
    ]
    title = f"Checkpoint: {report.format}, {files}, {format_bytes(report.num_bytes)}"
    blocks: list[Block] = [
        Grid(tuple(rows), ("dtype", "tensors", "elements", "bytes"), "lrrr", title=title)
    ]
    facts = []
    if report.kv_bytes_per_token:
        facts.append(f"KV cache: {report.kv_bytes_per_token:,} B per token in bfloat16")
    if report.compared:
        facts += _differences("missing", report.missing)
        facts += _differences("unexpected", report.unexpected)
        facts += _differences("ill-shaped", report.ill_shaped)
        facts += _differences("other dtype", report.ill_typed)
        if not facts:
            facts.append("every tensor that the configuration asks for is there, as it should be")
    if facts:
        blocks.append(Lines(tuple(facts)))
    return blocks


def _differences(label: str, names: Sequence[str]) -> list[str]:
    lines = [f"{label}: {name}" for name in names[:_MAX_LISTED]]
    if len(names) > _MAX_LISTED:
        lines.append(f"{label}: and {len(names) - _MAX_LISTED} more (all in --json)")
    return lines


# --- several sources ------------------------------------------------------------------------


def _side_by_side(found: Sequence[Inspection]) -> list[Block]:
    rows = _compared_rows(found)
    marked = frozenset(i for i, (_, *values) in enumerate(rows) if len(set(values)) > 1)
    columns = ("", *(_short(inspection.source) for inspection in found))
    blocks: list[Block] = [Grid(tuple(rows), columns, "l" + "l" * len(found), marked=marked)]
    count = len(marked)
    blocks.append(
        Lines((f"{count} of {len(rows)} rows differ (marked)" if count else "no row differs",))
    )
    for inspection in found:
        if inspection.notes:
            lines = tuple(f"{note.message} [{note.code}]" for note in inspection.notes)
            blocks.append(Lines(lines, title=f"Warnings: {_short(inspection.source)}"))
    return blocks


def _compared_rows(found: Sequence[Inspection]) -> list[tuple[str, ...]]:
    columns = [_facts(inspection) for inspection in found]
    labels = _merged([list(column) for column in columns])
    return [(label, *(column.get(label, "-") for column in columns)) for label in labels]


def _merged(columns: Sequence[Sequence[str]]) -> list[str]:
    """All labels, each new one behind the label that stands before it in its own column."""
    labels: list[str] = []
    for column in columns:
        place = 0
        for label in column:
            if label in labels:
                place = labels.index(label) + 1
            else:
                labels.insert(place, label)
                place += 1
    return labels


def _facts(inspection: Inspection) -> dict[str, str]:
    facts = {"model": headline(inspection)}
    config, count = inspection.config, inspection.parameters
    if config is None or count is None:
        report = inspection.checkpoint
        if report is not None:
            facts["parameters"] = f"{report.num_elements:,}"
        return facts
    facts.update(_shape_rows(inspection))
    facts["model_type"] = config.model_type
    facts["parameters"] = f"{count.total:,}"
    for group, number in count.by_group.items():
        facts[f"  {_GROUP_LABELS[group]}"] = f"{number:,}"
    if count.tied:
        facts["  lm_head"] = "tied"
    if count.active is not None:
        facts["active"] = f"{count.active.total:,}"
    if inspection.stored is not None:
        facts["weights"] = format_bytes(inspection.stored.num_bytes)
    if inspection.kv is not None:
        facts["KV per token"] = f"{inspection.kv.in_window_bytes_per_token:,} B"
        if inspection.kv.growing_bytes_per_token != inspection.kv.in_window_bytes_per_token:
            facts["KV beyond window"] = f"{inspection.kv.growing_bytes_per_token:,} B"
    facts["rope_theta"] = f"{config.rope.theta:g}"
    facts["rope_scaling"] = _scaling(config.rope)
    context = config.max_position_embeddings
    facts["max_position_embeddings"] = f"{context:,}" if context else "not stated"
    verdict = inspection.context
    if verdict is not None and verdict.asked_tokens is not None:
        fits = {True: "yes", False: "no", None: "not known"}[verdict.fits]
        if verdict.trained_context is not None and verdict.asked_tokens > verdict.trained_context:
            fits = f"{fits}, beyond the {verdict.trained_context:,} of training"
        facts[f"takes {verdict.asked_tokens:,} tokens"] = fits
    facts["bos_token_id"] = _value(config.bos_token_id)
    facts["eos_token_id"] = _value(config.eos_token_ids)
    facts["pad_token_id"] = _value(config.pad_token_id)
    facts["transformers_version"] = config.transformers_version or "-"
    if inspection.license is not None:
        facts["licence"] = inspection.license.name
    return facts


def _short(source: str) -> str:
    return source if len(source) <= 40 else "..." + source[-37:]


def _value(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value) or "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return "-" if value is None else str(value)


# --- JSON -----------------------------------------------------------------------------------


def _object(inspection: Inspection) -> dict[str, Any]:
    config = inspection.config
    return {
        "source": inspection.source,
        "source_kind": inspection.kind,
        "identity": _identity_object(inspection.identity),
        "config": _config_object(config) if config else None,
        "config_origins": dict(sorted(config.origins.items())) if config else None,
        "parameters": _parameters_object(inspection),
        "weights_bytes": inspection.weights_bytes,
        "weights_stored": (
            {
                "bytes": inspection.stored.num_bytes,
                "description": inspection.stored.description,
                "exact": inspection.stored.exact,
            }
            if inspection.stored
            else None
        ),
        "kv_cache": _kv_object(inspection),
        "rope": _rope_object(inspection),
        "context": _context_object(inspection),
        "license": _license_object(inspection),
        "warnings": [_note_object(note) for note in inspection.notes],
        "checkpoint": _checkpoint_object(inspection.checkpoint),
    }


def _identity_object(identity: Identity | None) -> dict[str, Any] | None:
    if identity is None:
        return None
    return {
        "family": identity.family,
        "generation": identity.generation,
        "model": identity.model,
        "variant": identity.variant,
        "confidence": identity.confidence,
        "candidates": list(identity.candidates),
        "evidence": [
            {"field": item.field, "value": item.value, "says": item.says}
            for item in identity.evidence
        ],
    }


def _config_object(config: ModelConfig) -> dict[str, Any]:
    values: dict[str, Any] = {
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": (
            list(config.num_key_value_heads_per_layer)
            if config.num_key_value_heads_per_layer
            else config.num_key_value_heads
        ),
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "intermediate_size_mlp": config.intermediate_size_mlp,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "dtype": config.dtype,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "sliding_window": config.sliding_window,
        "attention_chunk_size": config.attention_chunk_size,
        "no_rope_layers": list(config.no_rope_layers),
        "cross_attention_layers": list(config.cross_attention_layers),
        "num_local_experts": config.moe.num_local_experts if config.moe else None,
        "num_experts_per_tok": config.moe.num_experts_per_tok if config.moe else None,
        "moe_layers": list(config.moe.moe_layers) if config.moe else None,
        "quantization_method": config.quantization.method if config.quantization else None,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "pad_token_id": config.pad_token_id,
        "transformers_version": config.transformers_version,
    }
    # Here a list of the layers without RoPE; config.json's own key has a flag for each layer.
    values["nope_layer_indices"] = values.pop("no_rope_layers")
    return values


def _parameters_object(inspection: Inspection) -> dict[str, Any] | None:
    count = inspection.parameters
    if count is None:
        return None
    entry = inspection.identity.entry if inspection.identity else None
    return {
        "total": count.total,
        "active": (
            {
                "total": count.active.total,
                "without_input_embedding": count.active.without_input_embedding,
            }
            if count.active
            else None
        ),
        "stored": count.stored,
        "unique": entry.unique_total if entry and entry.unique_total else count.total,
        "tied": count.tied,
        "text": count.text,
        "by_group": count.by_group,
    }


def _kv_object(inspection: Inspection) -> dict[str, Any] | None:
    kv = inspection.kv
    if kv is None:
        return None
    windows = {group.window for group in kv.groups if group.window is not None}
    return {
        "kv_dtype": "bfloat16",
        "bytes_per_token": kv.in_window_bytes_per_token,
        "bytes_per_token_growing": kv.growing_bytes_per_token,
        "fixed_bytes_per_image": kv.bytes_per_image,
        "layers": {
            kind: sum(layer.attention == kind for layer in inspection.layers)
            for kind in ("full", "chunked", "sliding", "cross")
        },
        "window": min(windows, default=None),
    }


def _rope_object(inspection: Inspection) -> dict[str, Any] | None:
    if inspection.config is None:
        return None
    rope, bands = inspection.config.rope, inspection.bands
    return {
        "theta": rope.theta,
        "type": rope.type,
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
        "bands": (
            {
                "unchanged": bands.unchanged,
                "interpolated": bands.interpolated,
                "divided": bands.divided,
            }
            if bands
            else None
        ),
        "longest_wavelength": (
            inspection.context.longest_wavelength if inspection.context else None
        ),
    }


def _context_object(inspection: Inspection) -> dict[str, Any] | None:
    context = inspection.context
    if context is None:
        return None
    return {
        "max_position_embeddings": context.max_position_embeddings,
        "trained": context.trained_context,
        "note": context.note,
        "asked_tokens": context.asked_tokens,
        "fits": context.fits,
        "answer": context.answer,
    }


def _license_object(inspection: Inspection) -> dict[str, Any] | None:
    terms = inspection.license
    if terms is None:
        return None
    return {
        "id": terms.id,
        "name": terms.name,
        "commercial_use": terms.commercial_use,
        "monthly_users_limit": terms.monthly_users_limit,
        "attribution": terms.attribution,
        "naming": terms.naming,
        "training_on_outputs": terms.training_on_outputs,
        "eu_multimodal": terms.eu_multimodal,
        "note": terms.note,
        "disclaimer": DISCLAIMER,
    }


def _note_object(note: Note) -> dict[str, str]:
    return {"code": note.code, "message": note.message}


def _checkpoint_object(report: CheckpointReport | None) -> dict[str, Any] | None:
    if report is None:
        return None
    return {
        "format": report.format,
        "files": report.num_files,
        "tensors": report.num_tensors,
        "elements": report.num_elements,
        "bytes": report.num_bytes,
        "by_dtype": [
            {
                "dtype": group.dtype,
                "tensors": group.num_tensors,
                "elements": group.num_elements,
                "bytes": group.num_bytes,
            }
            for group in report.by_dtype
        ],
        "compared": report.compared,
        "missing": list(report.missing),
        "unexpected": list(report.unexpected),
        "ill_shaped": list(report.ill_shaped),
        "ill_typed": list(report.ill_typed),
        "kv_bytes_per_token": report.kv_bytes_per_token,
    }
