"""Which Llama is this: a verdict with its evidence, its confidence and every other candidate.

Decided by structure, in this order: model_type, vocabulary, tensor shapes, RoPE, ties, context,
token ids; only then by what any later tool may have rewritten (transformers_version, names). A
configuration that fits two models comes out as ambiguous, with both.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from llamatool.config.catalog import CatalogEntry, by_shape, find, relative
from llamatool.config.model import ModelConfig, Note
from llamatool.records import record

Confidence = Literal["certain", "high", "medium", "ambiguous", "unknown"]
Family = Literal["llama", "llama-architecture", "other"]

# The vocabularies of Meta's tokenizers: 1 and 2, Code Llama, 3, 4.
_VOCABULARIES = {32000: "Llama 1, 2 or Code Llama", 32016: "Code Llama", 128256: "Llama 3 or later"}
_VOCABULARIES[202048] = "Llama 4"
_INSTRUCT_EOS = frozenset({128008, 128009})
_LLAMA3_EOS = frozenset({128001, 128008, 128009})


@record
class Evidence:
    """One observation that speaks for the verdict."""

    field: str
    value: object
    says: str


@record
class Identity:
    """The verdict. `candidates` lists all that fit, the leaning one first; empty if one only."""

    family: Family
    generation: str | None
    model: str | None  # a catalogue id, or the name of another maker's model
    variant: Literal["base", "instruct", "guard"] | None
    confidence: Confidence
    candidates: tuple[str, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    notes: tuple[Note, ...] = ()

    @property
    def entry(self) -> CatalogEntry | None:
        """The catalogue's entry of the model that the verdict names or leans to."""
        return find(self.model) if self.model and self.family == "llama" else None


@dataclass(slots=True)
class _Case:
    """What has been found out so far."""

    config: ModelConfig
    evidence: list[Evidence] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def saw(self, name: str, value: object, says: str) -> None:
        self.evidence.append(Evidence(name, value, says))

    def verdict(
        self,
        generation: str | None,
        model: str | None,
        confidence: Confidence,
        candidates: tuple[str, ...] = (),
        *,
        family: Family = "llama",
        variant: Literal["base", "instruct", "guard"] | None = None,
    ) -> Identity:
        others = tuple(dict.fromkeys(c for c in candidates if c != model))
        first = (model,) if model and others else ()
        return Identity(
            family=family,
            generation=generation,
            model=model,
            variant=variant,
            confidence=confidence,
            candidates=first + others,
            evidence=tuple(self.evidence),
            notes=tuple(self.notes),
        )


def identify(config: ModelConfig) -> Identity:
    """The model that `config` describes, as far as its configuration can tell.

    Example: config.json of Llama 3.1 70B Instruct -> ambiguous, leaning to llama-3.1-70b-instruct,
    with llama-3.3-70b-instruct as the other candidate.
    """
    identity = _verdict(_Case(config))
    entry = identity.entry
    if entry is None or entry.config.tie_word_embeddings == config.tie_word_embeddings:
        return identity
    ours, theirs = config.tie_word_embeddings, entry.config.tie_word_embeddings
    note = Note(
        "tie-differs",
        f"`tie_word_embeddings` is {str(ours).lower()} here and {str(theirs).lower()} in the "
        f"published {entry.name}; the count follows this file",
    )
    return replace(identity, notes=(*identity.notes, note))


def _verdict(case: _Case) -> Identity:
    config = case.config
    model_type = config.model_type
    if model_type not in ("llama", "mllama", "mllama_text_model", "llama4", "llama4_text"):
        case.saw("model_type", model_type, "not a Llama; sizes are computed all the same")
        return case.verdict(None, None, "certain", family="other")
    if model_type != "llama" or config.source_format == "huggingface":
        case.saw("model_type", model_type, _MODEL_TYPES[model_type])
    if model_type in ("llama4", "llama4_text"):
        return _llama4(case)
    if model_type in ("mllama", "mllama_text_model"):
        return _vision(case)
    return _dense(case)


_MODEL_TYPES = {
    "llama": "a dense Llama, or a model of its architecture",
    "mllama": "Llama 3.2 Vision",
    "mllama_text_model": "the text model of Llama 3.2 Vision",
    "llama4": "Llama 4",
    "llama4_text": "the text model of Llama 4",
}


def _llama4(case: _Case) -> Identity:
    config = case.config
    fitting = by_shape(config)
    case.saw("vocab_size", config.vocab_size, _vocabulary_of(config))
    if not fitting and config.vocab_size != 202048:
        return _unknown_shape(case)
    if config.moe is None:
        case.saw("moe_layers", [], "Llama 4 without experts: Llama Guard 4")
        model = "llama-guard-4-12b" if fitting else None
        return case.verdict("guard-4", model, "certain" if model else "medium", variant="guard")
    case.saw("num_local_experts", config.moe.num_local_experts, "16 is Scout, 128 is Maverick")
    if not fitting:
        case.saw("shape", _shape(config), "not that of a published model")
        return case.verdict("4", None, "medium")
    if config.max_position_embeddings is None:
        names = tuple(entry.id for entry in fitting)
        return case.verdict("4", names[0], "high", names)
    case.saw(
        "max_position_embeddings",
        config.max_position_embeddings,
        "262,144 is the base model, more is Instruct",
    )
    exact = [e for e in fitting if _positions(e) == config.max_position_embeddings]
    if not exact:
        names = tuple(entry.id for entry in fitting)
        return case.verdict("4", names[0], "medium", names)
    entry = exact[0]
    # What rests on a value that no public copy of the file confirms is not certain.
    sure: Confidence = "high" if "max_position_embeddings" in entry.assumed else "certain"
    return case.verdict("4", entry.id, sure, variant=entry.variant)


def _vision(case: _Case) -> Identity:
    config = case.config
    fitting = [e for e in by_shape(config) if e.generation == "3.2-vision"]
    case.saw("vocab_size", config.vocab_size, _vocabulary_of(config))
    if not fitting and config.vocab_size != 128256:
        return _unknown_shape(case)
    if not fitting:
        case.saw("shape", _shape(config), "not that of a published model")
        return case.verdict("3.2-vision", None, "medium")
    case.saw("num_hidden_layers", config.num_hidden_layers, "40 is 11B, 100 is 90B")
    variant = _variant_by_eos(case)
    if config.vision is not None:
        case.saw(
            "vision_config.image_size",
            config.vision.image_size,
            "11B: 448 is the base model, 560 is Instruct; 90B: both are 560",
        )
        fitting = [e for e in fitting if _image_size(e) == config.vision.image_size] or fitting
    names = tuple(entry.id for entry in fitting)
    if len(fitting) == 1:
        entry = fitting[0]
        return case.verdict(
            "3.2-vision", entry.id, "certain", entry.lookalikes, variant=entry.variant
        )
    chosen = next((e for e in fitting if e.variant == variant), fitting[0])
    return case.verdict("3.2-vision", chosen.id, "high", names, variant=variant)


def _dense(case: _Case) -> Identity:
    config = case.config
    fitting = by_shape(config)
    case.saw("vocab_size", config.vocab_size, _vocabulary_of(config))
    if not fitting:
        return _unknown_shape(case)
    case.saw("shape", _shape(config), "that of " + _families(fitting))
    same_vocabulary = [e for e in fitting if e.config.vocab_size == config.vocab_size]
    if not same_vocabulary:
        return _grown_vocabulary(case, fitting)
    case.saw("rope_theta", config.rope.theta, _says_theta(config))
    if config.rope.type != "default":
        case.saw("rope_scaling", _scaling(config), _says_scaling(config))
    same_rope = [e for e in same_vocabulary if _rope_signature(e.config) == _rope_signature(config)]
    if not same_rope:
        return _other_rope(case, same_vocabulary)
    generations = {entry.generation for entry in same_rope}
    if generations & {"1", "2", "guard-1"}:
        return _one_or_two(case, same_rope)
    if "code" in generations:
        return case.verdict("code", _family_head(same_rope), "certain", _ids(same_rope))
    return _three(case, same_rope)


def _unknown_shape(case: _Case) -> Identity:
    name = relative(case.config)
    if name is None and case.config.name_or_path:
        case.saw("_name_or_path", case.config.name_or_path, "the name it was saved under")
    case.saw("shape", _shape(case.config), f"that of {name}" if name else "not one of Meta's")
    return case.verdict(None, name, "certain", family="llama-architecture")


def _grown_vocabulary(case: _Case, fitting: tuple[CatalogEntry, ...]) -> Identity:
    same_rope = [e for e in fitting if _rope_signature(e.config) == _rope_signature(case.config)]
    if not same_rope:
        return case.verdict(None, None, "certain", family="llama-architecture")
    base = same_rope[0]
    case.notes.append(
        Note(
            "vocabulary-changed",
            f"{case.config.vocab_size} rows of vocabulary where {base.name} has "
            f"{base.config.vocab_size}: a derivative with another tokenizer or added tokens",
        )
    )
    return case.verdict(base.generation, base.id, "medium", _ids(same_rope))


def _other_rope(case: _Case, fitting: list[CatalogEntry]) -> Identity:
    config = case.config
    code = [e for e in fitting if e.generation == "code"]
    if code and config.rope.theta == 10000.0 and config.rope.type == "default":
        if config.vocab_size == 32000 and len(code) == len(fitting):
            case.notes.append(
                Note(
                    "rope-theta-lost",
                    "the shape is Llama 2 34B, which was never released, or Code Llama 34B with "
                    "its `rope_theta` of 1000000 lost; without it Code Llama's output is broken",
                )
            )
            return case.verdict(
                "2", None, "ambiguous", ("Llama 2 34B (never released)", *_ids(code))
            )
        case.notes.append(
            Note(
                "rope-theta-lost",
                "Code Llama's `rope_theta` of 1000000 is missing; without it the output is broken",
            )
        )
        return case.verdict("code", _family_head(code), "high", _ids(code))
    base = fitting[0]
    case.notes.append(
        Note(
            "rope-changed",
            f"RoPE differs from that of {base.name}: a derivative, perhaps for a longer context",
        )
    )
    return case.verdict(base.generation, base.id, "medium", _ids(fitting))


def _one_or_two(case: _Case, fitting: list[CatalogEntry]) -> Identity:
    config = case.config
    generations = {entry.generation for entry in fitting} - {"guard-1", "code"}
    if config.architectures == ("LLaMAForCausalLM",):
        return _decapoda(case, fitting)
    if len(generations) == 1:  # 30B and 65B exist in Llama 1 only, 70B in Llama 2 only
        head = _family_head(fitting)
        generation = generations.pop()
        if any(entry.generation == "code" for entry in fitting):
            # 70B Python and Instruct of Code Llama share Llama 2's RoPE, not its vocabulary.
            fitting = [e for e in fitting if e.generation == generation]
        return case.verdict(generation, head, "certain")
    ones = [e for e in fitting if e.generation == "1"]
    twos = [e for e in fitting if e.generation in ("2", "guard-1")]
    case.saw("rms_norm_eps", config.rms_norm_eps, "weak: 1e-6 in Llama 1, 1e-5 in Llama 2")
    if config.source_format == "meta":
        leaning = ones if config.rms_norm_eps == 1e-6 else twos
        return case.verdict(
            leaning[0].generation,
            leaning[0].id,
            "ambiguous",
            (*_ids(leaning), *_ids(ones), *_ids(twos)),
        )
    return _one_or_two_by_keys(case, ones, twos)


def _one_or_two_by_keys(
    case: _Case, ones: list[CatalogEntry], twos: list[CatalogEntry]
) -> Identity:
    config = case.config
    has_kv_key = "num_key_value_heads" in config.present_keys
    case.saw(
        "num_key_value_heads",
        "present" if has_kv_key else "absent",
        "the key came with Llama 2" if has_kv_key else "so in Llama 1 files",
    )
    positions = config.max_position_embeddings
    case.saw("max_position_embeddings", positions, "2048 in Llama 1, 4096 in Llama 2")
    if positions == 2048 and not has_kv_key:
        return _llama1(case, ones)
    if positions == 2048 and config.rms_norm_eps == 1e-6:
        names = (*_ids(ones), twos[0].id + "-chat", *ones[0].lookalikes)
        return case.verdict("1", ones[0].id, "ambiguous", names)
    return _llama2(case, twos)


def _decapoda(case: _Case, fitting: list[CatalogEntry]) -> Identity:
    case.saw("architectures", "LLaMAForCausalLM", "an early conversion of Llama 1")
    case.notes.append(
        Note(
            "wrong-token-ids",
            f"this early conversion has wrong token ids (bos {case.config.bos_token_id}, eos "
            f"{case.config.eos_token_ids[0] if case.config.eos_token_ids else None}); Llama 1 has "
            "bos 1 and eos 2",
        )
    )
    ones = [e for e in fitting if e.generation == "1"] or fitting
    return case.verdict("1", ones[0].id, "certain")


def _llama1(case: _Case, ones: list[CatalogEntry]) -> Identity:
    if "max_sequence_length" in case.config.present_keys:
        case.saw("max_sequence_length", "present", "a key of Llama 1 files only")
        return case.verdict("1", ones[0].id, "high", ones[0].lookalikes)
    case.saw(
        "max_sequence_length", "absent", "Llama 1 files have it; leans to OpenLLaMA or a derivative"
    )
    return case.verdict("1", None, "ambiguous", (*ones[0].lookalikes, ones[0].id))


def _llama2(case: _Case, twos: list[CatalogEntry]) -> Identity:
    entry = twos[0]
    own = entry.config.transformers_version
    version, name = case.config.transformers_version, case.config.name_or_path
    same_name = name is None or find(name) in twos
    if version == own and same_name:
        case.saw("transformers_version", version, "that of the release's own file")
        return case.verdict("2", entry.id, "high", entry.lookalikes)
    if not same_name:
        case.saw("_name_or_path", name, "not Meta's name: a derivative")
    else:
        case.saw("transformers_version", version, f"not the release's {own}: saved again")
    return case.verdict("2", entry.id, "ambiguous", entry.lookalikes)


def _three(case: _Case, fitting: list[CatalogEntry]) -> Identity:
    config = case.config
    guards = [e for e in fitting if e.variant == "guard"]
    metas = [e for e in fitting if e.variant != "guard" and _same_packing(config, e)]
    if not metas:  # packed by somebody else
        metas = [e for e in fitting if e.variant != "guard" and e.config.quantization is None]
    if config.quantization is not None:
        case.saw("quantization_config", config.quantization.method, "the weights are packed")
    if not metas:
        guard = guards[0]
        return case.verdict(guard.generation, guard.id, "certain", variant="guard")
    if any(entry.unique_total for entry in metas):
        entry = next(entry for entry in metas if entry.unique_total)
        case.notes.append(
            Note(
                "kv-heads-stored-twice",
                f"every KV head is stored twice: {entry.unique_total:,} parameters are unique, "
                "and the KV cache is twice as large as the deduplicated model needs",
            )
        )
        return case.verdict(entry.generation, entry.id, "certain")
    if config.source_format == "meta":
        return _three_from_meta(case, metas, guards)
    variant = _variant_by_eos(case)
    derivative = config.eos_token_ids and not set(config.eos_token_ids) <= _LLAMA3_EOS
    chosen = next((e for e in metas if e.variant == (variant or "base")), metas[0])
    if derivative:
        case.saw("eos_token_id", list(config.eos_token_ids), "not Meta's id: a derivative")
        return case.verdict(chosen.generation, _base(metas).id, "medium", _ids(metas))
    releases = {entry.generation for entry in metas}
    if len(releases) > 1:
        return _between_releases(case, metas, variant)
    if variant == "instruct" and guards and not _release_file(case, chosen):
        return case.verdict(
            chosen.generation, chosen.id, "ambiguous", chosen.lookalikes, variant=variant
        )
    sure: Confidence = "certain"
    if variant == "instruct" and chosen.generation in ("3.1", "3.2") and "405b" not in chosen.id:
        sure = "high"  # many fine-tunes keep the file of an Instruct model as it is
    return case.verdict(
        chosen.generation, chosen.id, sure, chosen.lookalikes, variant=variant or chosen.variant
    )


def _same_packing(config: ModelConfig, entry: CatalogEntry) -> bool:
    ours, theirs = config.quantization, entry.config.quantization
    return (ours.method if ours else None) == (theirs.method if theirs else None)


def _three_from_meta(
    case: _Case, metas: list[CatalogEntry], guards: list[CatalogEntry]
) -> Identity:
    """A params.json: it has neither token ids nor a context, so base and Instruct look alike."""
    head = _base(metas)
    names = (*_ids(metas), *_ids(guards))
    if len({entry.generation for entry in metas}) > 1:
        case.saw("params.json", "identical", "the files of 3.1 and 3.3 70B are the same")
        return case.verdict(head.generation, head.id, "ambiguous", names)
    if head.generation == "3" and "use_scaled_rope" in case.config.present_keys:
        case.saw("use_scaled_rope", False, "a key of 3.1 and later; also in Llama Guard 3 8B")
        names = (*names, "llama-guard-3-8b", "llama-3.1-8b")
        return case.verdict("3", head.id, "ambiguous", names)
    return case.verdict(head.generation, head.id, "certain", names)


def _between_releases(
    case: _Case, metas: list[CatalogEntry], variant: Literal["base", "instruct"] | None
) -> Identity:
    """Llama 3.1 70B and 3.3 70B: shape, RoPE and ids are the same."""
    config = case.config
    if variant == "base":
        case.saw("eos_token_id", 128001, "a base model: 3.3 has none")
        return case.verdict("3.1", "llama-3.1-70b", "certain", variant="base")
    has_head_dim = "head_dim" in config.present_keys
    case.saw(
        "head_dim",
        "present" if has_head_dim else "absent",
        "weak: 3.3's file has it" if has_head_dim else "weak: 3.1's file has none",
    )
    case.saw("transformers_version", config.transformers_version, "weak: 3.1 4.42, 3.3 4.47")
    lean_33 = has_head_dim
    named = find(config.name_or_path) if config.name_or_path else None
    if named in metas and named is not None:
        case.saw("_name_or_path", config.name_or_path, "the name it was saved under")
        lean_33 = named.generation == "3.3"
    leaning = next(
        e for e in metas if e.variant == "instruct" and (e.generation == "3.3") == lean_33
    )
    others = tuple(e.id for e in metas if e.variant == "instruct")
    return case.verdict(
        leaning.generation, leaning.id, "ambiguous", others + leaning.lookalikes, variant="instruct"
    )


def _release_file(case: _Case, entry: CatalogEntry) -> bool:
    own, version = entry.config.transformers_version, case.config.transformers_version
    same = version == own
    case.saw(
        "transformers_version",
        version,
        "that of the release's own file" if same else f"not the release's {own}: saved again",
    )
    return same


def _variant_by_eos(case: _Case) -> Literal["base", "instruct"] | None:
    ids = set(case.config.eos_token_ids)
    if not ids or not ids <= _LLAMA3_EOS:
        return None
    instruct = bool(ids & _INSTRUCT_EOS)
    case.saw(
        "eos_token_id",
        sorted(ids),
        "ends a turn: an Instruct model" if instruct else "ends a text: a base model",
    )
    return "instruct" if instruct else "base"


def completed(config: ModelConfig, identity: Identity) -> ModelConfig:
    """`config` with the context of the identified model, where its own file has none.

    params.json does not say how long the context is; the origin becomes `derived`.
    """
    entry = identity.entry
    if config.max_position_embeddings is not None or entry is None:
        return config
    return replace(
        config,
        max_position_embeddings=_positions(entry),
        origins={**config.origins, "max_position_embeddings": "derived"},
    )


def _positions(entry: CatalogEntry) -> int | None:
    values = entry.config_values
    found = values.get("text_config", values).get("max_position_embeddings", 2048)
    return found if isinstance(found, int) else None


def _image_size(entry: CatalogEntry) -> int | None:
    return entry.config.vision.image_size if entry.config.vision else None


def _ids(found: list[CatalogEntry] | tuple[CatalogEntry, ...]) -> tuple[str, ...]:
    return tuple(entry.id for entry in found)


def _base(found: list[CatalogEntry]) -> CatalogEntry:
    return next((entry for entry in found if entry.variant != "instruct"), found[0])


def _family_head(found: list[CatalogEntry]) -> str:
    """The plainest name of a set of variants that look alike."""
    return min(_ids(found), key=len)


def _vocabulary_of(config: ModelConfig) -> str:
    return _VOCABULARIES.get(config.vocab_size, "no vocabulary of Meta's")


def _families(found: tuple[CatalogEntry, ...]) -> str:
    names = dict.fromkeys(
        entry.name.removesuffix(" Instruct").removesuffix(" Chat") for entry in found
    )
    shown = list(names)[:4]
    return ", ".join(shown) + (" and others" if len(names) > len(shown) else "")


def _shape(config: ModelConfig) -> str:
    return (
        f"{config.hidden_size} x {config.num_hidden_layers} layers, "
        f"{config.num_attention_heads}/{config.num_key_value_heads} heads, "
        f"feed-forward {config.intermediate_size}"
    )


def _rope_signature(config: ModelConfig) -> tuple[object, ...]:
    rope = config.rope
    if rope.type == "default":
        return (rope.theta, "default")
    return (
        rope.theta,
        rope.type,
        rope.factor,
        rope.low_freq_factor,
        rope.high_freq_factor,
        rope.original_max_position_embeddings,
    )


def _scaling(config: ModelConfig) -> str:
    return f"{config.rope.type} x{config.rope.factor:g}" if config.rope.factor else config.rope.type


def _says_theta(config: ModelConfig) -> str:
    known = {10000.0: "Llama 1 and 2", 1000000.0: "Code Llama", 500000.0: "Llama 3 and later"}
    return known.get(config.rope.theta, "none of Meta's")


def _says_scaling(config: ModelConfig) -> str:
    if config.rope.type != "llama3":
        return "none of Meta's"
    known = {8.0: "Llama 3.1 or 3.3", 32.0: "Llama 3.2 1B or 3B", 16.0: "Llama 4 Scout"}
    return known.get(config.rope.factor or 0.0, "none of Meta's")
