"""Prompts of every generation as ids, against the makers' code; one BOS; text stays text."""

import random
import sys
from dataclasses import replace
from datetime import datetime
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from llamatool.config.catalog import find
from llamatool.config.generation import identify
from llamatool.config.huggingface import parse_huggingface
from llamatool.errors import InputError, TokenizerError, UnsupportedError, UsageError
from llamatool.generate.formats import FORMATS, ROLES, Message, encode_parts, format_of
from llamatool.generate.prompt import choose_writing, encode_chat, encode_infill, encode_raw
from llamatool.generate.stop import stop_ids
from llamatool.generate.template import ChatTemplate, encode_template, render
from llamatool.source import load_source
from llamatool.tokenizers.modelproto import USER_DEFINED, build_model
from llamatool.tokenizers.sentencepiece import SentencePieceTokenizer
from tests.tokenizers.conftest import meta_file, random_text

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
SYSTEM, USER = "You are brief.", "What is 2 + 2?"
CONVERSATION = [Message("system", SYSTEM), Message("user", USER)]
TURNS = [
    *CONVERSATION,
    Message("assistant", "Four."),
    Message("user", "And 3 + 3?\n\nSay it in Chinese: \u516d."),
]

# Of each configuration: the format of an Instruct sibling, and its stop ids.
LLAMA3_STOPS, LLAMA4_STOPS = {128001, 128008, 128009}, {200001, 200007, 200008}
TABLE = [
    *((name, "llama2", "llama-2", {2}) for name in ("llama-2-7b", "llama-2-13b", "llama-2-70b")),
    *((f"codellama-{size}", "llama2", "llama-2", {2}) for size in ("7b", "13b", "34b")),
    ("llama-3-8b-instruct", "llama3", "llama-3", LLAMA3_STOPS),
    *(
        (f"llama-{name}-instruct", "llama3", "llama-3", LLAMA3_STOPS)
        for name in (
            "3.1-8b",
            "3.1-70b",
            "3.1-405b",
            "3.2-1b",
            "3.2-3b",
            "3.2-11b-vision",
            "3.3-70b",
        )
    ),
    *(
        (f"llama-4-{name}-instruct", "llama4", "llama-4", LLAMA4_STOPS)
        for name in ("scout-17b-16e", "maverick-17b-128e")
    ),
]


@pytest.mark.parametrize(("name", "vocabulary", "form", "stops"), TABLE, ids=[t[0] for t in TABLE])
def test_conversation_of_every_generation(
    name: str, vocabulary: str, form: str, stops: set[int], request: pytest.FixtureRequest
) -> None:
    tokenizer = request.getfixturevalue(vocabulary)
    loaded = load_source(str(CONFIGS / f"{name}.json"))
    writing = choose_writing(loaded.identity, names=[f"{name}-chat"])
    assert (writing.mode, writing.format) == ("chat", FORMATS[form])
    prompt = encode_chat(writing, CONVERSATION, tokenizer)
    assert list(prompt.ids) == EXPECTED[form]
    assert prompt.ids.count(tokenizer.bos_id) == 1
    assert prompt.ids[0] == tokenizer.bos_id
    assert prompt.warnings == ()
    config, _ = loaded.need_config()
    found = stop_ids(
        tokenizer,
        config=config.eos_token_ids,
        is_instruct=writing.is_instruct,
        names=prompt.stop_names,
    )
    assert found.ids == stops


# Written down from the makers' formats, token by token; the comparisons below check them again.
# fmt: off
EXPECTED = {
    "llama-2": [
        1, 518, 25580, 29962, 3532, 14816, 29903, 6778, 13, 3492, 526, 11473, 29889, 13, 29966, 829,
        14816, 29903, 6778, 13, 13, 5618, 338, 29871, 29906, 718, 29871, 29906, 29973, 518, 29914,
        25580, 29962],
    "llama-3": [
        128000, 128006, 9125, 128007, 271, 2675, 527, 10015, 13, 128009, 128006, 882, 128007, 271,
        3923, 374, 220, 17, 489, 220, 17, 30, 128009, 128006, 78191, 128007, 271],
    "llama-4": [
        200000, 200005, 15651, 200006, 368, 4662, 583, 17867, 26, 200008, 200005, 1556, 200006, 368,
        3668, 373, 220, 30, 584, 220, 30, 43, 200008, 200005, 140680, 200006, 368],
}
# fmt: on


# --- against the makers' own code ---


def stand_ins() -> dict[str, ModuleType]:
    """What Meta's module of the chat format imports and does not use for text."""

    def decorator(*_: object, **__: object):
        return lambda function: function

    pydantic = ModuleType("pydantic")
    pydantic.BaseModel = object
    pydantic.ConfigDict = dict
    pydantic.Field = lambda *_, **__: None
    pydantic.field_serializer = pydantic.field_validator = pydantic.model_validator = decorator
    vision, transforms = ModuleType("torchvision"), ModuleType("torchvision.transforms")
    vision.transforms = transforms
    transforms.functional = ModuleType("torchvision.transforms.functional")
    modules = {"pydantic": pydantic, "torchvision": vision, "torchvision.transforms": transforms}
    return modules | {"torchvision.transforms.functional": transforms.functional}


@pytest.fixture
def meta_chat_format(monkeypatch: pytest.MonkeyPatch):
    """Meta's ChatFormat of a generation, in the llama-models package."""
    pytest.importorskip("torch")
    pytest.importorskip("PIL")
    meta_file("llama3")
    for name in [name for name in sys.modules if name.startswith("llama_models")]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in stand_ins().items():
        monkeypatch.setitem(sys.modules, name, module)

    def load(generation: str):
        package = f"llama_models.{generation}"
        tokenizer = import_module(f"{package}.tokenizer").Tokenizer.get_instance()
        return import_module(f"{package}.chat_format").ChatFormat(tokenizer)

    yield load
    for name in [name for name in sys.modules if name.startswith("llama_models")]:
        del sys.modules[name]


@pytest.mark.parametrize("generation", ["llama3", "llama4"])
def test_ids_are_those_of_meta(generation: str, meta_chat_format, request) -> None:
    """Also where contents begin or end with white space, or hold the names of control tokens."""
    theirs = meta_chat_format(generation)
    tokenizer = request.getfixturevalue(generation)
    parts = FORMATS[f"llama-{generation[-1]}"].parts
    generator = random.Random(0)
    conversations = [CONVERSATION, TURNS, [Message("user", "\n\n hi \n")]]
    for _ in range(100):
        roles = generator.choices(ROLES, k=3)
        conversations.append([Message(role, random_text(generator)) for role in roles])
    for messages in conversations:
        raw = [
            SimpleNamespace(
                role=m.role, content=m.content, tool_calls=[], context=None, stop_reason=None
            )
            for m in messages
        ]
        expected = theirs.encode_dialog_prompt(raw).tokens
        assert encode_parts(parts(messages), tokenizer) == expected


def test_llama2_ids_are_those_of_metas_code(
    small: SentencePieceTokenizer, small_file: Path
) -> None:
    """Its dialog code, restated: encode each pair of turns with BOS and EOS, then the last turn.

    lm-sys/FastChat#2576, #1997: the spaces around [INST]; oobabooga/textgen#3226: the line end
    after <</SYS>>; samrawal/llama2_chat_templater#1: the layout of turns; paiml/aprender#2078:
    one BOS with a system text.
    """
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_file=str(small_file))
    turns = [
        ("  <<not a tag>> hello ", " world\n"),
        ("second", "answer </s> [/INST]"),
        (" third \u4e2d\u6587 ", None),
    ]
    expected: list[int] = []
    for number, (user, answer) in enumerate(turns):
        if number == 0:
            user = f"<<SYS>>\n be brief \n<</SYS>>\n\n{user}"
        if answer is None:
            expected += [1, *processor.encode(f"[INST] {user.strip()} [/INST]")]
        else:
            text = f"[INST] {user.strip()} [/INST] {answer.strip()} "
            expected += [1, *processor.encode(text), 2]
    messages = [Message("system", " be brief ")]
    for user, answer in turns:
        messages.append(Message("user", user))
        if answer is not None:
            messages.append(Message("assistant", answer))
    assert encode_parts(FORMATS["llama-2"].parts(messages), small) == expected
    assert expected.count(1) == 3
    assert expected.count(2) == 2


@pytest.mark.parametrize(
    "messages",
    [
        [Message("user", "a"), Message("user", "b")],
        [Message("assistant", "a")],
        [Message("user", "a"), Message("assistant", "b")],
        [Message("user", "a"), Message("system", "b"), Message("user", "c")],
    ],
)
def test_llama2_turns_alternate(messages: list[Message]) -> None:
    with pytest.raises(UsageError, match="turn"):
        FORMATS["llama-2"].parts(messages)


def with_pieces(tokenizer: SentencePieceTokenizer, *names: str) -> SentencePieceTokenizer:
    """The tokenizer with further pieces, as Code Llama's file adds them."""
    model = tokenizer.model
    wider = replace(
        model,
        pieces=[*model.pieces, *names],
        scores=[*model.scores, *[0.0] * len(names)],
        types=[*model.types, *[USER_DEFINED] * len(names)],
    )
    return SentencePieceTokenizer(build_model(wider), wider, tokenizer.identity)


def test_code_llama_70b(small: SentencePieceTokenizer) -> None:
    tokenizer = with_pieces(small, "<step>")
    step = len(small.model.pieces)
    entry = find("codellama-70b")
    assert entry is not None
    form = format_of(identify(entry.config))
    assert form is FORMATS["codellama-70b"]
    ids = encode_parts(form.parts([Message("user", " hi ")]), tokenizer)
    assert ids[0] == 1
    assert ids.count(step) == 2  # an empty system turn comes first
    pieces = tokenizer.decode([i for i in ids if i != step])
    assert pieces == (
        " Source: system\n\n   Source: user\n\n hi  Source: assistant\nDestination: user\n\n "
    )
    assert stop_ids(tokenizer, names=form.stop_names).ids == {2, step}


def test_infill(small: SentencePieceTokenizer) -> None:
    names = ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", "\u2581<EOT>")
    tokenizer = with_pieces(small, *names)
    pre, suf, mid, eot = range(len(small.model.pieces), len(small.model.pieces) + 4)
    prompt = encode_infill("def f(", "): return 1", tokenizer)
    between = tokenizer.encode("def f(")
    after = tokenizer.encode_continuation("): return 1")
    assert list(prompt.ids) == [1, pre, *between, suf, *after, mid]
    assert stop_ids(tokenizer, names=prompt.stop_names).ids == {2, eot}
    with pytest.raises(TokenizerError, match="no control token"):
        encode_infill("a", "b", small)


# --- BOS ---


def test_raw_prompts_get_one_bos(llama3, small) -> None:
    """abetlen/llama-cpp-python#1537: no BOS on a raw prompt."""
    assert encode_raw("hi", llama3).ids == (128000, 6151)
    assert encode_raw("hi", small).ids[0] == 1
    assert encode_raw("hi", small).ids.count(1) == 1


HEADERS = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + "
    "'<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)


def llama3_template(source: str = HEADERS) -> ChatTemplate:
    return ChatTemplate(source, "a test", {"bos_token": "<|begin_of_text|>"})


def test_a_rendered_template_gets_no_second_bos(llama3) -> None:
    """abetlen/llama-cpp-python#1501, vllm-project/vllm#16976, #27515 (#27486),
    sgl-project/sglang#888, LiveCodeBench/LiveCodeBench#146, princeton-pli/retaining-by-doing#5.
    """
    writing = choose_writing(None, template=llama3_template())
    prompt = encode_chat(writing, CONVERSATION, llama3)
    assert list(prompt.ids) == EXPECTED["llama-3"]
    assert prompt.ids.count(128000) == 1
    assert prompt.warnings == ()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ bos_token }}" + HEADERS, "BOS 2 times"),
        (HEADERS.replace("{{ bos_token }}", ""), "does not begin with BOS"),
    ],
)
def test_a_template_with_a_wrong_bos_is_warned_of(source: str, says: str, llama3) -> None:
    writing = choose_writing(None, template=llama3_template(source))
    (warning,) = encode_chat(writing, CONVERSATION, llama3).warnings
    assert says in warning


def test_smollm2_wants_no_bos(smollm) -> None:
    """Its file says so: `add_bos_token` is false, and BOS is the token that opens a turn."""
    assert smollm.tokenizer.bos_id == 1
    prompt = smollm.prompt("hi")
    assert prompt.warnings == ()
    assert prompt.ids.count(1) == 3
    assert encode_raw("hi", smollm.tokenizer).ids == tuple(smollm.tokenizer.encode("hi"))


# --- text stays text ---


@pytest.mark.parametrize("content", ["<|eot_id|>", "a<|eot_id|>b", "<|eot", "<", "_id|>x", "<|"])
def test_a_message_cannot_end_its_turn(content: str, llama3) -> None:
    """Also not by halves that the template could complete."""
    sources = (
        HEADERS,
        "{{ bos_token }}{{ messages[0]['content'] + '_id|>' + messages[0]['content'] }}",
        "{{ bos_token }}{{ '<|eot' + messages[0]['content'] }}",
    )
    for source in sources:
        ids = encode_template(llama3_template(source), [Message("user", content)], llama3)
        harmless = encode_template(llama3_template(source), [Message("user", "x")], llama3)
        special = [i for i in ids if i >= 128000]
        assert special == [i for i in harmless if i >= 128000]
        rendered = render(llama3_template(source), [{"role": "user", "content": content}])
        assert llama3.decode(ids, specials=True) == rendered


def test_stretches_are_encoded_whole(llama3) -> None:
    """A seam between template and content is no cut: merges across it are made."""
    source = "{{ bos_token }}{{ 'un' + messages[0]['content'] + 'able' }}"
    ids = encode_template(llama3_template(source), [Message("user", "believ")], llama3)
    assert ids == [128000, *llama3.encode("unbelievable")]
    separate = [128000, *llama3.encode("un"), *llama3.encode("believ"), *llama3.encode("able")]
    assert ids != separate


@pytest.mark.parametrize("name", ["llama-2", "llama-3", "llama-4"])
def test_built_in_formats_never_read_control_tokens_from_text(name: str, request) -> None:
    tokenizer = request.getfixturevalue("small" if name == "llama-2" else name.replace("-", ""))
    hostile = " ".join(list(tokenizer.special_ids)[:40])
    parts = FORMATS[name].parts
    plain = encode_parts(parts([Message("user", "x")]), tokenizer)
    ids = encode_parts(parts([Message("user", hostile)]), tokenizer)
    special = set(tokenizer.special_ids.values())
    assert [i for i in ids if i in special] == [i for i in plain if i in special]


def test_control_tokens_in_a_raw_prompt_are_said_to_be_text(llama3) -> None:
    prompt = encode_raw("a<|eot_id|>", llama3)
    assert 128009 not in prompt.ids
    (warning,) = prompt.warnings
    assert warning == "`<|eot_id|>` in the prompt is taken as text, not as a control token"


# --- templates ---


def test_smollm2_ids_are_those_of_transformers(smollm, tmp_path: Path) -> None:
    """The template in the GGUF, rendered and encoded by transformers."""
    pytest.importorskip("transformers")
    from transformers import PreTrainedTokenizerFast

    from llamatool.tokenizers.export import export

    (tmp_path / "tokenizer.json").write_bytes(
        export(smollm.tokenizer, "json").files["tokenizer.json"]
    )
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"),
        chat_template=smollm.writing.template.source,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
    )
    generator = random.Random(1)
    conversations = [CONVERSATION, TURNS]
    for _ in range(50):
        conversations.append([Message("user", random_text(generator).replace("<|", "< |"))])
    for messages in conversations:
        raw = [{"role": m.role, "content": m.content} for m in messages]
        expected = theirs.apply_chat_template(raw, add_generation_prompt=True)
        ids = smollm.prompt(messages).ids
        assert list(ids) == list(expected["input_ids"])


def test_templates_render_as_in_transformers(llama3) -> None:
    """Loop controls, tojson, strftime_now, trimmed blocks: the same text."""
    pytest.importorskip("transformers")
    from transformers.utils.chat_template_utils import render_jinja_template

    source = """
{%- set now = strftime_now("%d %b %Y") -%}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}{% continue %}{% endif %}
    {{- m.role }}: {{ m.content | trim }}
    {{ {'b': [1, "\u4e2d<&>"], 'a': none} | tojson }}
{% endfor %}
{%- if add_generation_prompt %}assistant:{% endif %}"""
    raw = [{"role": m.role, "content": m.content} for m in TURNS]
    expected, _ = render_jinja_template(
        conversations=[raw], chat_template=source, add_generation_prompt=True
    )
    assert render(ChatTemplate(source, "a test", {}), raw) == expected[0]


def test_time_in_templates_can_be_fixed(llama3) -> None:
    template = llama3_template("{{ bos_token }}{{ strftime_now('%d %b %Y') }}")
    ids = encode_template(template, CONVERSATION, llama3, now=datetime(2024, 7, 26))
    assert llama3.decode(ids) == "26 Jul 2024"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% for %}", "broken at line 1"),
        ("{{ raise_exception('no system text, please') }}", "refuses this conversation: no system"),
        ("{{ messages.append(1) }}", "must not"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "must not"),
        ("{{ messages[7].content.x }}", "fails"),
        ("{{ 1 / 0 }}", "fails"),
        ("{{ undefined_function() }}", "fails"),
        ("x" * 300_000, "too long"),
    ],
)
def test_a_bad_template_is_one_clear_error(source: str, says: str, llama3) -> None:
    with pytest.raises(InputError, match=says):
        encode_template(llama3_template(source), CONVERSATION, llama3)


def test_templates_that_convert_writes_give_the_built_in_ids(llama3, llama4) -> None:
    templates = pytest.importorskip("llamatool.checkpoint.templates")
    for generation, tokenizer in (("3.1", llama3), ("4", llama4)):
        source = templates.chat_template(generation)
        template = ChatTemplate(source, "a test", {"bos_token": "<|begin_of_text|>"})
        built_in = FORMATS["llama-" + generation[0]].parts
        ids = encode_template(template, TURNS, tokenizer)
        assert ids == encode_parts(built_in(TURNS), tokenizer)


# --- chat or raw ---


def identity_of(name: str):
    import json

    path = CONFIGS / f"{name}.json"
    return identify(parse_huggingface(json.loads(path.read_text()), where=str(path)))


@pytest.mark.parametrize(
    "name",
    ["llama-1-7b", "llama-2-7b", "llama-3-8b", "llama-3.1-8b", "llama-3.2-1b", "codellama-7b",
     "llama-4-scout-17b-16e", "llama-4-maverick-17b-128e"],
)  # fmt: skip
def test_base_models_are_never_given_a_format(name: str) -> None:
    """huggingface/transformers#30346, #33246: no default template, in silence or otherwise."""
    writing = choose_writing(identity_of(name), names=[name])
    assert (writing.mode, writing.format, writing.template) == ("raw", None, None)
    assert "nothing says that it is a chat model" in writing.why


def test_what_the_user_says_wins() -> None:
    instruct, base = identity_of("llama-3.1-8b-instruct"), identity_of("llama-3.1-8b")
    assert choose_writing(instruct, raw=True).mode == "raw"
    assert choose_writing(base, format_name="llama-3").format is FORMATS["llama-3"]
    assert choose_writing(base, chat=True).format is FORMATS["llama-3"]
    assert choose_writing(base, template=llama3_template()).template is not None
    assert choose_writing(base, template=llama3_template(), raw=True).template is None


def test_evidence_is_named() -> None:
    instruct = identity_of("llama-3.1-8b-instruct")
    assert "configuration is that of an Instruct model" in choose_writing(instruct).why
    named = choose_writing(identity_of("llama-2-7b"), names=["Llama-2-7b-Chat"])
    assert named.why == "built-in Llama 2 format; its name says `Chat`"
    other = choose_writing(identity_of("tinyllama-1.1b-chat-v1.0"), names=["TinyLlama-Chat"])
    assert other.mode == "raw"
    assert "no chat template or format is known" in other.why


def test_a_conversation_needs_a_format() -> None:
    with pytest.raises(UnsupportedError, match="no built-in format is known"):
        choose_writing(identity_of("mistral-7b-v0.1"), chat=True)
    assert format_of(identity_of("llama-1-7b")) is None
