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


def chat_template(generation: str | None) -> str | None:
    """The chat template of a generation's instruct models; None where there is none.

    Example: `3.1` -> the one with `<|start_header_id|>`.
    """
    if generation is None:
        return None
    if generation.startswith("3"):
        return _LLAMA3
    return {"2": _LLAMA2, "code": _LLAMA2, "4": _LLAMA4}.get(generation)
