"""Chat templates for the instruct models, in Jinja, worded here; the formats are Meta's.

Source: llama generation.py (Llama 2); llama-models llama3/chat_format.py, llama4/chat_format.py.
"""

_LLAMA2 = (
    "{%- set turns = messages -%}"
    "{%- set system = '' -%}"
    "{%- if turns and turns[0]['role'] == 'system' -%}"
    "{%- set system = '<<SYS>>\\n' + turns[0]['content'] + '\\n<</SYS>>\\n\\n' -%}"
    "{%- set turns = turns[1:] -%}"
    "{%- endif -%}"
    "{%- for turn in turns -%}"
    "{%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{- raise_exception('user and assistant must take turns, the user first') -}}"
    "{%- endif -%}"
    "{%- if turn['role'] == 'user' -%}"
    "{{- bos_token + '[INST] ' + (system if loop.first else '') + turn['content'] | trim"
    " + ' [/INST]' -}}"
    "{%- else -%}"
    "{{- ' ' + turn['content'] | trim + ' ' + eos_token -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
)


# Every turn names its source, and a system turn comes first, if need be an empty one.
_CODELLAMA70B = (
    "{%- set turns = messages -%}"
    "{%- set system = '' -%}"
    "{%- if turns and turns[0]['role'] == 'system' -%}"
    "{%- set system = turns[0]['content'] | trim -%}"
    "{%- set turns = turns[1:] -%}"
    "{%- endif -%}"
    "{{- bos_token + ' Source: system\\n\\n ' + system + '<step>' -}}"
    "{%- for turn in turns -%}"
    "{{- ' Source: ' + turn['role'] + '\\n\\n ' + turn['content'] | trim + '<step>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{- ' Source: assistant\\nDestination: user\\n\\n ' -}}"
    "{%- endif -%}"
)


def _headers(start: str, end: str, stop: str, tool_stop: str) -> str:
    # What a tool returns comes from `ipython` in Meta's formats, and ends its own way in Llama 4.
    return (
        "{{- bos_token -}}"
        "{%- for turn in messages -%}"
        "{%- set tool = turn['role'] in ['tool', 'ipython'] -%}"
        f"{{{{- '{start}' + ('ipython' if tool else turn['role']) + '{end}\\n\\n'"
        f" + turn['content'] | trim + ('{tool_stop}' if tool else '{stop}') -}}}}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}"
        f"{{{{- '{start}assistant{end}\\n\\n' -}}}}"
        "{%- endif -%}"
    )


_LLAMA3 = _headers("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eot_id|>")
_LLAMA4 = _headers("<|header_start|>", "<|header_end|>", "<|eot|>", "<|eom|>")


def chat_template(generation: str | None, model: str | None = None) -> str | None:
    """The chat template of a generation's instruct models; None where there is none.

    Args: model: its name in the catalogue; Code Llama 70B has a format of its own.
    Example: `3.1` -> the one with `<|start_header_id|>`.
    """
    if generation is None:
        return None
    if generation == "code" and model is not None and model.startswith("codellama-70b"):
        return _CODELLAMA70B
    if generation.startswith("3"):
        return _LLAMA3
    return {"2": _LLAMA2, "code": _LLAMA2, "4": _LLAMA4}.get(generation)
