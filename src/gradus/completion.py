"""`gradus completion SHELL`: a script by which bash, zsh or fish completes verbs, options, recipes, presets and keys.

In bash, `eval "$(gradus completion bash)"` in ~/.bashrc; in zsh the same with zsh in ~/.zshrc; in fish,
`gradus completion fish > ~/.config/fish/completions/gradus.fish`. Names that the script has none of are files.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from gradus.recipe import names
from gradus.recipe.keys import keys
from gradus.recipe.presets import ALIASES, PRESETS

OF_PRESETS = {"plan": "first", "show": "first", "models": "more"}  # verb → where it takes the name of a preset
WORDS = """\
_gradus() {{
    local recipes="{recipes}"
    local presets="{presets}"
    local settings="{settings}"
    local first= more= dashed=
    case "$ITS_VERB" in
{verbs}
    esac
"""
BASH = WORDS.replace("$ITS_VERB", "${{COMP_WORDS[1]}}") + """\
    local cur="${{COMP_WORDS[COMP_CWORD]}}"
    [ "$COMP_CWORD" = 2 ] && more="$first"
    [ "$COMP_CWORD" = 1 ] && more="{names}" dashed="--help --version"
    case "$cur" in -*) more="$dashed" ;; esac
    COMPREPLY=($(compgen -W "$more" -- "$cur"))
    case "${{COMPREPLY[*]}}" in *=) compopt -o nospace 2>/dev/null ;; esac
}}
complete -o default -F _gradus gradus
"""
ZSH = WORDS.replace("$ITS_VERB", "$words[2]") + """\
    compset -P "*=" && _files && return
    (( CURRENT == 3 )) && more="$first"
    (( CURRENT == 2 )) && more="{names}" dashed="--help --version"
    [[ "$PREFIX" == -* ]] && more="$dashed"
    compadd -S "" -- ${{(M)${{=more}}:#*=}}
    compadd -- ${{${{=more}}:#*=}}
    [[ "$CURRENT" == 2 || "$PREFIX" == -* ]] || _files
}}
(( $+functions[compdef] )) || {{ autoload -U compinit && compinit }}
compdef _gradus gradus
"""
FISH = """\
set -l recipes "{recipes}"
set -l presets "{presets}"
set -l settings "{settings}"
complete -c gradus -f -n "test (count (commandline -opc)) = 1" -a "{names}"
complete -c gradus -l help -l version
{verbs}
"""
ARM = '        {name}) first="{first}" more="{more}" dashed="{dashed}" ;;'
IN_FISH = """\
complete -c gradus -n "__fish_seen_subcommand_from {name}; and test (count (commandline -opc)) = 2" -a "{first}"
complete -c gradus -n "__fish_seen_subcommand_from {name}; and test (count (commandline -opc)) -gt 2" -a "{more}"
complete -c gradus -n "__fish_seen_subcommand_from {name}" -a "{dashed}\""""


def script(shell: str, verbs: Mapping[str, argparse.ArgumentParser]) -> str:
    """Of what the recipes and the parsers of the verbs hold now."""
    arm = IN_FISH if shell == "fish" else ARM
    lines = "\n".join(arm.format(name=name, **_words(name, p)) for name, p in verbs.items())
    settings = dict.fromkeys(f"{line.split()[0]}=" for line in keys() if line[:1] not in ("", " ", "#"))
    whole = {"bash": BASH, "zsh": ZSH, "fish": FISH}[shell]
    listed = {"recipes": names(), "presets": [*PRESETS, *ALIASES], "settings": settings, "names": verbs}
    return whole.format(verbs=lines, **{name: " ".join(words) for name, words in listed.items()}).rstrip()


def _words(name: str, p: argparse.ArgumentParser) -> dict[str, str]:
    """What may stand right after a verb, what later, and its options."""
    inner = p._subparsers._group_actions[0].choices if p._subparsers else {}
    actions = [action for q in (p, *inner.values()) for action in q._actions]
    named = {action.dest for action in actions}
    first = "$recipes" if "recipe" in named else ""
    choices = next((" ".join(a.choices) for a in p._actions if a.choices and not a.option_strings), first)
    more = " ".join(filter(None, [first if inner else "", "$settings" if "overrides" in named else ""]))
    dashed = dict.fromkeys(s for action in actions for s in action.option_strings if s.startswith("--"))
    words = {"first": choices, "more": more, "dashed": " ".join(dashed)}
    if name in OF_PRESETS:
        words[OF_PRESETS[name]] += " $presets"
    return words
