"""Writes completions/ from the command tree: static files that call no Python.

python tools/make_completions.py [FOLDER]
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from commandtree import Argument, Command, Option, Value, program, sentence

from llamatool.config.catalog import entries

_FOLDER = Path(__file__).resolve().parent.parent / "completions"
_HEAD = "Completion of llamatool for {}. Written by tools/make_completions.py; do not edit."


def main(folder: Path = _FOLDER) -> None:
    """Writes the three files into `folder`."""
    root, commands = program()
    models = tuple(entry.id for entry in entries())
    for name, make in (("llamatool.bash", bash), ("_llamatool", zsh), ("llamatool.fish", fish)):
        (folder / name).write_text(make(root, commands, models), encoding="utf-8")


# --- bash -----------------------------------------------------------------------------------

_BASH = """\
# {head}

_llamatool() {{
    # bash splits --name=value at the sign: it arrives as three words.
    local cur prev word command="" options="" valued="" i position=0 only_arguments=""
    local IFS=$' \\t\\n'
    local models="{models}"
    COMPREPLY=()
    cur=${{COMP_WORDS[COMP_CWORD]}}
    prev=""
    if ((COMP_CWORD > 0)); then prev=${{COMP_WORDS[COMP_CWORD - 1]}}; fi
    if [[ $cur == "=" ]]; then
        cur=""
    elif [[ $prev == "=" ]] && ((COMP_CWORD > 1)); then
        prev=${{COMP_WORDS[COMP_CWORD - 2]}}
    fi

    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${{COMP_WORDS[i]}}
        if [[ -z $command ]]; then
            case $word in
{commands}
                *) continue ;;
            esac
            command=$word
        elif [[ -n $only_arguments ]]; then
            ((position++))
        elif [[ $word == "--" ]]; then
            only_arguments=yes
        elif [[ $word == -?* ]]; then
            if [[ " $valued " == *" $word "* ]]; then
                ((i++)) # its value
                if [[ ${{COMP_WORDS[i]}} == "=" ]]; then ((i++)); fi
            fi
        elif [[ $word != "=" ]]; then
            ((position++))
        fi
    done

    if [[ -z $command ]]; then
        COMPREPLY=($(compgen -W "{names} {options}" -- "$cur"))
        return
    fi

    if [[ -z $only_arguments ]]; then
        case $command:$prev in
{values}
        esac
        if [[ $cur == -* ]]; then
            COMPREPLY=($(compgen -W "$options" -- "$cur"))
            return
        fi
    fi

    case $command:$position in
{arguments}
        *) COMPREPLY=($(compgen -W "$options" -- "$cur")) ;;
    esac
}}

# One of some words; with a third argument, or a file or folder.
_llamatool_offer() {{
    local IFS=$' \\t\\n'
    COMPREPLY=($(compgen -W "$2" -- "$1"))
    if [[ -n ${{3-}} ]]; then
        if ((${{#COMPREPLY[@]}})); then
            IFS=$'\\n'
            if [[ $3 == folder ]]; then
                COMPREPLY+=($(compgen -d -- "$1"))
            else
                COMPREPLY+=($(compgen -f -- "$1"))
            fi
            compopt -o filenames 2>/dev/null
        elif [[ $3 == folder ]]; then
            compopt -o dirnames 2>/dev/null
        else # the shell completes file names itself, quotes and all
            compopt -o default 2>/dev/null
        fi
    fi
}}

if type compopt >/dev/null 2>&1; then
    complete -F _llamatool llamatool
else # bash 3 has no way to say it later
    complete -o default -F _llamatool llamatool
fi
"""


def bash(root: Command, commands: Sequence[Command], models: Sequence[str]) -> str:
    """The file for bash."""
    table = []
    for command in commands:
        names = _option_names(command.options)
        valued = _option_names([option for option in command.options if option.value])
        table += [
            f"{' ' * 16}{command.name})",
            f'{" " * 20}options="{names}"',
            f'{" " * 20}valued="{valued}"',
            f"{' ' * 20};;",
        ]
    return _BASH.format(
        head=_HEAD.format("bash"),
        models=" ".join(models),
        commands="\n".join(table),
        names=" ".join(command.name for command in commands),
        options=_option_names(root.options),
        values="\n".join(_bash_values(commands)),
        arguments="\n".join(_bash_arguments(commands)),
    )


def _bash_values(commands: Sequence[Command]) -> Iterator[str]:
    for command in commands:
        replies: dict[str, list[str]] = {}
        for option in command.options:
            if option.value is not None:
                patterns = replies.setdefault(_bash_reply(option.value), [])
                patterns += [f"{command.name}:{name}" for name in option.names]
        for reply, patterns in replies.items():
            yield f"{' ' * 12}{' | '.join(patterns)})"
            yield f"{' ' * 16}{reply}"
            yield f"{' ' * 16}return"
            yield f"{' ' * 16};;"


def _bash_arguments(commands: Sequence[Command]) -> Iterator[str]:
    for command in commands:
        for position, argument in enumerate(command.arguments):
            pattern = "*" if argument.multiple else str(position)
            yield f"{' ' * 8}{command.name}:{pattern}) {_bash_reply(argument.value)} ;;"


def _bash_reply(value: Value) -> str:
    words = "$models" if value.models else " ".join(value.words)
    paths = "" if value.paths == "none" else f" {value.paths}"
    return f'_llamatool_offer "$cur" "{words}"{paths}' if words or paths else ":"


def _option_names(options: Sequence[Option]) -> str:
    return " ".join(name for option in options for name in option.names)


# --- zsh ------------------------------------------------------------------------------------

_ZSH = """\
#compdef llamatool
# {head}

_llamatool_commands() {{
  local -a commands
  commands=(
{names}
  )
  _describe -t commands 'command' commands
}}

_llamatool_models() {{
  local -a models
  models=(
{models}
  )
  _describe -t models 'built-in model' models
}}

# A completer, then words that may stand there too.
_llamatool_either() {{
  _alternative "words:word:(${{*[2,-1]}})" "files:file or folder:$1"
}}

_llamatool_sources() {{
  _alternative 'models:built-in model:_llamatool_models' 'files:file or folder:_files'
}}

_llamatool() {{
  local curcontext="$curcontext" state line
  typeset -A opt_args
  _arguments -C -S \\
{options}
    '1: :_llamatool_commands' \\
    '*:: :->rest'
  [[ $state == rest ]] || return
  curcontext="${{curcontext%:*:*}}:llamatool-$words[1]:"
  case $words[1] in
{commands}
  esac
}}

if [[ $funcstack[1] == _llamatool ]]; then
  _llamatool "$@"
else # sourced, not autoloaded
  compdef _llamatool llamatool
fi
"""


def zsh(root: Command, commands: Sequence[Command], models: Sequence[str]) -> str:
    """The file for zsh."""
    table = []
    for command in commands:
        specs = [_zsh_option(option) for option in command.options]
        specs += [_zsh_argument(argument) for argument in command.arguments]
        lines = " \\\n".join(f"        {spec}" for spec in specs)
        table.append(f"    {command.name})\n      _arguments -s -S \\\n{lines}\n      ;;")
    return _ZSH.format(
        head=_HEAD.format("zsh"),
        names="\n".join(
            "    " + _zsh_quoted(f"{command.name}:{command.summary}") for command in commands
        ),
        models="\n".join(f"    {model}" for model in models),
        options="\n".join(f"    {_zsh_option(option)} \\" for option in root.options),
        commands="\n".join(table),
    )


def _zsh_option(option: Option) -> str:
    text = _zsh_escaped(sentence(option.help))
    ends = "--help" in option.names or "--version" in option.names
    exclusive = "- *" if ends else "" if option.multiple else " ".join(option.names)
    before = f"({exclusive})" if exclusive else "*"
    action = _zsh_action(option.value) if option.value else ""
    # A long name takes its value after = or in the next word, a short one in the next word.
    names = [
        name + ("=" if option.value and name.startswith("--") else "") for name in option.names
    ]
    if len(names) == 1:
        return _zsh_quoted(f"{before}{names[0]}[{text}]{action}")
    return f"'{before}'{{{','.join(names)}}}" + _zsh_quoted(f"[{text}]{action}")


def _zsh_argument(argument: Argument) -> str:
    before = "*" if argument.multiple else "" if argument.required else ":"
    return _zsh_quoted(before + _zsh_action(argument.value))


def _zsh_action(value: Value) -> str:
    completer = {"none": "", "file": "_files", "folder": "_files -/"}[value.paths]
    words = " ".join(value.words)
    if value.models:
        action = "_llamatool_sources" if completer else "_llamatool_models"
    elif words and completer:
        action = f' _llamatool_either "{completer}" {words}'
    else:
        action = completer or (f"({words})" if words else " ")
    return f":{_zsh_escaped(value.metavar)}:{action}"


def _zsh_escaped(text: str) -> str:
    for character in "\\[]:":
        text = text.replace(character, "\\" + character)
    return text


def _zsh_quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


# --- fish -----------------------------------------------------------------------------------


def fish(root: Command, commands: Sequence[Command], models: Sequence[str]) -> str:
    """The file for fish."""
    lines = [
        f"# {_HEAD.format('fish')}",
        "",
        "function __llamatool_models",
        *(f"    echo {model}" for model in models),
        "end",
        "",
        "# Files only where a command reads or writes them.",
        "complete -c llamatool -f",
    ]
    lines += [_fish_option("__fish_use_subcommand", option) for option in root.options]
    lines += [
        f"complete -c llamatool -n __fish_use_subcommand -a {command.name} "
        f"-d {_fish_quoted(command.summary)}"
        for command in commands
    ]
    for command in commands:
        condition = f"'__fish_seen_subcommand_from {command.name}'"
        lines += ["", f"# {command.name}"]
        lines += [_fish_option(condition, option) for option in command.options]
        for argument in command.arguments:
            lines += _fish_values(condition, argument.value)
    return "\n".join(lines) + "\n"


def _fish_option(condition: str, option: Option) -> str:
    names = " ".join(
        f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names
    )
    value = ""
    if option.value is not None:
        offered = _fish_words(option.value)
        value = " -r -F" if option.value.paths == "file" else " -x"
        value += f" -a {_fish_quoted(offered)}" if offered else ""
    text = _fish_quoted(sentence(option.help))
    return f"complete -c llamatool -n {condition} {names}{value} -d {text}"


def _fish_values(condition: str, value: Value) -> list[str]:
    start = f"complete -c llamatool -n {condition}"
    lines = [f"{start} -F"] if value.paths == "file" else []
    offered = _fish_words(value)
    if offered:
        title = " -d 'built-in model'" if value.models else ""
        lines.append(f"{start} -a {_fish_quoted(offered)}{title}")
    return lines


def _fish_words(value: Value) -> str:
    offered = ["(__llamatool_models)"] if value.models else list(value.words)
    if value.paths == "folder":
        offered.append("(__fish_complete_directories)")
    return " ".join(offered)


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
