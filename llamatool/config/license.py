"""What each generation's licence asks, with the section that says so. This is no legal advice.

Sources: LICENSE, USE_POLICY.md and MODEL_CARD.md of each generation in meta-llama/llama-models;
the licence files of the Guards in meta-llama/PurpleLlama. The text of the Llama 1 licence was not
read, only what is generally reported of it.
"""

from llamatool.records import record

DISCLAIMER = "this is no legal advice; read the licence itself"


@record
class LicenseTerms:
    """The terms that decide whether a model may be used for a purpose."""

    id: str
    name: str
    commercial_use: bool | None
    monthly_users_limit: str | None  # the 700 million clause
    attribution: str | None
    naming: str | None
    training_on_outputs: str | None
    eu_multimodal: str | None
    note: str | None = None


_USERS = (
    "section 2: ask Meta for a licence if all your services together had over 700 million monthly "
    "users in the calendar month before the version's release"
)
_NOTICE = "1.b.iii: keep the notice text with each copy"
_BUILT = '1.b.i: show "Built with Llama"; ' + _NOTICE
_PREFIX = (
    '1.b.i: a model trained with it, or with its outputs, must carry a name beginning with "Llama"'
)
_OUTPUTS = "allowed, with the naming duty of 1.b.i"
_NO_OUTPUTS = "1.b.v: not allowed for any other language model"
_EU = (
    "use policy, last part: no rights for individuals living in, or companies with their principal "
    "place of business in the European Union; users of a product built on it are exempt"
)

_TERMS = {
    terms.id: terms
    for terms in (
        LicenseTerms(
            "llama1",
            "LLaMA research licence, by application",
            False,
            None,
            None,
            None,
            None,
            None,
            "non-commercial research only; the text was not read, so its details are not listed",
        ),
        LicenseTerms(
            "llama2",
            "Llama 2 Community License",
            True,
            _USERS,
            _NOTICE,
            None,
            _NO_OUTPUTS + " except Llama 2 and its derivatives",
            None,
        ),
        LicenseTerms(
            "llama3",
            "Meta Llama 3 Community License",
            True,
            _USERS,
            '1.b.i: show "Built with Meta Llama 3"; ' + _NOTICE,
            '1.b.i: a distributed model made with it must carry a name beginning with "Llama 3"',
            _NO_OUTPUTS,
            None,
        ),
        LicenseTerms(
            "llama3.1",
            "Llama 3.1 Community License",
            True,
            _USERS,
            _BUILT,
            _PREFIX,
            _OUTPUTS,
            None,
        ),
        LicenseTerms(
            "llama3.2", "Llama 3.2 Community License", True, _USERS, _BUILT, _PREFIX, _OUTPUTS, _EU
        ),
        LicenseTerms(
            "llama3.3",
            "Llama 3.3 Community License",
            True,
            _USERS,
            _BUILT,
            _PREFIX,
            _OUTPUTS,
            None,
            "the use policy carries the EU sentence on multimodal models; no 3.3 model is one",
        ),
        LicenseTerms(
            "llama4", "Llama 4 Community License", True, _USERS, _BUILT, _PREFIX, _OUTPUTS, _EU
        ),
    )
}

_UNCERTAIN = LicenseTerms(
    "uncertain",
    "uncertain: the published licence file does not fit the base model",
    None,
    None,
    None,
    None,
    None,
    None,
)


def license_terms(license_id: str, *, multimodal: bool, note: str | None = None) -> LicenseTerms:
    """The terms of a licence for a model, `multimodal` where it takes images.

    Example: `llama3.2` for the 1B text model has no EU clause, for 11B Vision it has.
    """
    terms = _TERMS.get(license_id, _UNCERTAIN)
    return LicenseTerms(
        id=terms.id,
        name=terms.name,
        commercial_use=terms.commercial_use,
        monthly_users_limit=terms.monthly_users_limit,
        attribution=terms.attribution,
        naming=terms.naming,
        training_on_outputs=terms.training_on_outputs,
        eu_multimodal=terms.eu_multimodal if multimodal else None,
        note=note or terms.note,
    )
