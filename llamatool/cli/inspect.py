"""`llamatool inspect`: identity, exact parameters, RoPE, licence and traps of a checkpoint."""

from llamatool.cli.options import JsonOption, SourcesArgument, TokensOption, standard_input
from llamatool.cli.progress import progress


def inspect(
    sources: SourcesArgument, tokens: TokensOption = None, as_json: JsonOption = False
) -> None:
    """Say which Llama this is, how large, what is odd about it, and what its licence asks.

    Reads configurations and headers only, never the weights, and stays offline unless SOURCE is a
    hub id. Several SOURCEs are put side by side, with the rows that differ marked.

    Examples:

      llamatool inspect config.json

      llamatool inspect ./Llama-3.1-8B --tokens 100000

      llamatool inspect a/config.json b/config.json

      curl -s https://.../config.json | llamatool inspect -

      llamatool inspect llama-3.1-8b --json
    """
    from llamatool.errors import UsageError
    from llamatool.inspection import inspect_source
    from llamatool.source import load_source

    if sources.count("-") > 1:
        raise UsageError("`-` can be given only once: standard input holds one configuration")
    if tokens == 0:
        raise UsageError("`--tokens` is 0", hint="give the length of the document in tokens")
    found = []
    with progress("Reading headers", unit="files") as update:
        for source in sources:
            loaded = load_source(source, with_tensors=True, stdin=standard_input(), progress=update)
            found.append(inspect_source(loaded, tokens=tokens))
    if as_json:
        from llamatool.render.blocks import show_json
        from llamatool.render.inspect import to_json

        show_json(to_json(found))
        return
    from llamatool.render.blocks import show
    from llamatool.render.inspect import to_blocks

    show(to_blocks(found))
