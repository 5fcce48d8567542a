"""The model before its weights: what stands around a question, and which file is which."""

import json

import pytest

from llamatool.errors import CheckpointError, InputError, UnsupportedError
from llamatool.needle.experiment import Design, Experiment
from llamatool.needle.haystack import Encoder, GrammarHaystack
from llamatool.needle.subject import open_subject, pocket_folder

CHATML = (
    "{{ bos_token }}{% for m in messages %}<user>{{ m.content }}</user>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def chat_folder(tmp_path):
    """The pocket model with a chat template."""

    def make(template: str):
        for file in pocket_folder("pocket").iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        path = tmp_path / "tokenizer_config.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**content, "chat_template": template}), encoding="utf-8")
        return tmp_path

    return make


def test_pocket_is_raw_with_one_bos():
    subject = open_subject(None)
    assert subject.name == "pocket"
    assert subject.frame.before == (subject.tokenizer.bos_id,)
    assert subject.frame.after == ()
    assert not subject.frame.is_chat
    assert subject.chunk == 512
    assert subject.is_local_below_top
    assert not open_subject("pocket-rope").is_local_below_top
    assert open_subject("pocket-rope").chunk is None


def test_a_chat_model_is_asked_in_its_own_format(chat_folder):
    subject = open_subject(str(chat_folder(CHATML)))
    encode, frame = subject.tokenizer.encode, subject.frame
    assert frame.is_chat
    assert list(frame.before) == [subject.tokenizer.bos_id, *encode("<user>")]
    assert subject.tokenizer.decode(frame.after).endswith("</user><assistant>")
    encoder = Encoder(subject.tokenizer)
    made = Experiment(Design((512,), (0.0, 1.0), 1), encoder, frame, GrammarHaystack(encoder, "en"))
    job = made.build(made.outlines()[0])
    for question in job.questions:
        prompt = made.prompt(job, question)
        assert len(prompt) + made.sizes.budget == question.cell.length
        assert prompt.count(subject.tokenizer.bos_id) == 1
        text = subject.tokenizer.decode(prompt)
        assert text.startswith("<user>")
        assert "</user><assistant>The magic number for" in text


def test_a_chat_model_can_be_asked_raw(chat_folder):
    subject = open_subject(str(chat_folder(CHATML)), template="raw")
    assert not subject.frame.is_chat
    assert "as asked for" in subject.frame.why


def test_a_template_that_writes_bos_twice_is_refused(chat_folder):
    folder = chat_folder("{{ bos_token }}" + CHATML)
    with pytest.raises(InputError, match="BOS more than once"):
        open_subject(str(folder))


def test_a_base_model_is_never_given_a_template_in_silence():
    with pytest.raises(UnsupportedError, match="no chat template"):
        open_subject("pocket", template="chat")


def test_a_folder_called_pocket_goes_before_the_built_in_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pocket").mkdir()
    for file in pocket_folder("pocket-rope").iterdir():
        (tmp_path / "pocket" / file.name).write_bytes(file.read_bytes())
    assert not open_subject("pocket").is_pocket
    assert open_subject(None).is_pocket


def test_the_fingerprint_follows_the_weights(chat_folder):
    folder = chat_folder(CHATML)
    before = open_subject(str(folder))
    assert before.sha256 == open_subject(str(folder)).sha256
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert open_subject(str(folder)).sha256 != before.sha256


def test_a_catalogue_entry_has_no_weights():
    with pytest.raises(CheckpointError, match="without weights"):
        open_subject("llama-3.1-8b")
