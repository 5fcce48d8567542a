"""Inspect, size, convert and run Llama checkpoints.

From Python, as the command line does it:

    loaded = llamatool.load_source("llama-3.1-8b")
    llamatool.inspect_source(loaded).parameters.total  # 8030261248
    model = llamatool.load_model("folder-with-weights")  # needs PyTorch
    llamatool.load_generator("folder-with-weights").generate("Hello").text
"""

TYPE_CHECKING = False  # typing is not imported for this alone
if TYPE_CHECKING:
    from llamatool.errors import LlamatoolError
    from llamatool.generate.text_model import load_generator
    from llamatool.inspection import inspect_source
    from llamatool.listing import list_models
    from llamatool.model.load import load_model
    from llamatool.source import load_source

__version__ = "0.1.0"
__all__ = [
    "LlamatoolError",
    "__version__",
    "inspect_source",
    "list_models",
    "load_generator",
    "load_model",
    "load_source",
]

_HOMES = {
    "LlamatoolError": "llamatool.errors",
    "inspect_source": "llamatool.inspection",
    "list_models": "llamatool.listing",
    "load_generator": "llamatool.generate.text_model",
    "load_model": "llamatool.model.load",
    "load_source": "llamatool.source",
}


def __getattr__(name: str) -> object:
    """A public name, loaded when it is first used, so that `import llamatool` costs nothing."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module `llamatool` has no attribute `{name}`")
    from importlib import import_module

    try:
        return getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from llamatool.errors import MissingExtraError

        raise MissingExtraError(name, "PyTorch", "torch") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
