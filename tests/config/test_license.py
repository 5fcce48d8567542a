"""Licence terms, section by section."""

import pytest

from llamatool.config.catalog import entries, find
from llamatool.config.license import license_terms


@pytest.mark.parametrize(
    ("license_id", "commercial", "users", "outputs", "prefix", "built"),
    [
        ("llama1", False, False, None, None, None),
        ("llama2", True, True, "1.b.v", None, None),
        ("llama3", True, True, "1.b.v", '"Llama 3"', '"Built with Meta Llama 3"'),
        ("llama3.1", True, True, "allowed", '"Llama"', '"Built with Llama"'),
        ("llama3.2", True, True, "allowed", '"Llama"', '"Built with Llama"'),
        ("llama3.3", True, True, "allowed", '"Llama"', '"Built with Llama"'),
        ("llama4", True, True, "allowed", '"Llama"', '"Built with Llama"'),
    ],
)
def test_terms(license_id, commercial, users, outputs, prefix, built):
    terms = license_terms(license_id, multimodal=False)
    assert terms.commercial_use is commercial
    assert ("section 2" in (terms.monthly_users_limit or "")) is users
    assert (outputs in terms.training_on_outputs) if outputs else not terms.training_on_outputs
    assert (prefix in terms.naming) if prefix else terms.naming is None
    assert (built in terms.attribution) if built else "Built" not in (terms.attribution or "")
    assert terms.eu_multimodal is None


def test_the_clause_on_the_european_union_is_for_multimodal_models():
    assert license_terms("llama3.2", multimodal=True).eu_multimodal
    assert license_terms("llama4", multimodal=True).eu_multimodal
    assert license_terms("llama3.3", multimodal=True).eu_multimodal is None


def test_guards_whose_file_does_not_fit_are_uncertain():
    for name in ("llama-guard-2-8b", "llama-guard-3-8b"):
        entry = find(name)
        terms = license_terms(entry.license, multimodal=False, note=entry.license_note)
        assert terms.id == "uncertain"
        assert "licence file is the Llama" in terms.note


def test_every_entry_has_terms():
    for entry in entries():
        assert license_terms(entry.license, multimodal=False).name
