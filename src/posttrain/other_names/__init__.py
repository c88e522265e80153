"""Names of other libraries (TRL, transformers, peft, verl, vLLM, Unsloth, Axolotl, LLaMA-Factory, ...), with ours.

One table answers for keys of recipes, options of commands, arguments of Python, names of components and
``posttrain explain NAME``. A name leads to the key that takes the same value, to a sentence (the value is written
otherwise, or nothing needs to be said), or is not offered, with the nearest way to the same end.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from posttrain.other_names.absent import METHODS, OPTIONS
from posttrain.other_names.answers import SAID
from posttrain.other_names.command_names import COMMAND_OPTIONS, COMMAND_SAYS, COMMANDS_BY_NAMES, COMPONENTS
from posttrain.other_names.keys import CARRIERS, FAMILIES, KEYS
from posttrain.other_names.not_needed import NOT_NEEDED
from posttrain.other_names.terms import TERMS
from posttrain.other_names.values import VALUES, WITHOUT_DEFAULT


def _by_name(table: Mapping[str, str], before: str = "") -> dict[str, str]:
    """Return the answer of each name of a table."""
    return {name: f"{before}{answer}" for answer, names in table.items() for name in names.split()}


_NOT_NEEDED, _NOT_OFFERED = "nothing: ", "not offered: "
# The answer by name: a key, a sentence, or one of these with its beginning.
OTHER_NAMES: dict[str, str] = {
    **_by_name(TERMS),
    **_by_name(METHODS, _NOT_OFFERED),
    **_by_name(OPTIONS, _NOT_OFFERED),
    **_by_name(NOT_NEEDED, _NOT_NEEDED),
    **_by_name(KEYS),
    **_by_name(SAID),
}
# Our command, by the names that people try.
COMMANDS = _by_name(COMMANDS_BY_NAMES)
_COMMAND_SAYS = {command: _by_name(table) for command, table in COMMAND_SAYS.items()}
# Types of numbers as torch calls them, with the names of recipes and options.
_TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "double": "fp64"}
# Last parts of dotted names that have a meaning only with the part before them.
_WITHOUT_MEANING = frozenset(
    {"enable", "enabled", "path", "name", "type", "kind", "id", "key", "args", "kwargs", "config", "file", "use", "url"}
    | {"_component_", "_target_", "mode", "steps", "tool", "ranks"}
)
# Changes of a name that leave its meaning: two spellings of a word, and words that say whose option it is.
_CHANGES = [
    (re.compile(pattern), put)
    for pattern, put in (
        (r"coeff(?=_|$)", "coef"),
        (r"(?<![a-z])grad(?=_)", "gradient"),
        (r"(?<![a-z])gradient(?=_)", "grad"),
        (r"(?<![a-z])attn(?=_|$)", "attention"),
        (r"(?<![a-z])impl(?=$)", "implementation"),
        (r"(?<![a-z])len(?=_|$)", "length"),
        (r"(?<![a-z])length(?=_|$)", "len"),
        (r"(?<![a-z])n_", "num_"),
        (r"(?<![a-z])eps(?=_|$)", "epsilon"),
        (r"_(?=\d+$)", ""),
        (r"^(?:use|enable|is|apply|do)_", ""),
        (r"_(?:enable|enabled|config|cfg|name|per_gpu|per_device)$", ""),
        (
            r"^(?:actor|policy|vllm|rollout|trainer|train|training|algo|ds|grpo|ppo|dpo|sft|rl|trl|ref|fsdp|deepspeed)_",
            "",
        ),
        (r"s$", ""),
        (r"(?<=[a-z])$", "s"),
    )
]
_SECTIONS = {key.partition(".")[0] for key in KEYS}
_OURS = {key.rpartition(".")[2] for key in KEYS}  # they are no misspelling


def short_dtype(value: object) -> Any:
    """Return ``bf16`` for ``bfloat16`` or ``torch.bfloat16``; any other value as it is."""
    if not isinstance(value, str):
        return value
    return _TYPES.get(value.removeprefix("torch."), value)


def answer_option(name: str, known: Collection[str]) -> str:
    """Return the options that are called otherwise elsewhere, or nothing; ``known``: the command's own and sections."""
    plain = _plain(name)
    found = [o for o, names in COMMAND_OPTIONS.items() if o.partition(".")[0] in known and plain in names.split()]
    return " or ".join(found)


def answer_command(command: str, name: str) -> str:
    """Return what a command says about an option of another program that does the same, or nothing."""
    plain = name.strip("-")
    if len(plain) > 1:
        plain = _plain(name)
    return _sentence(_COMMAND_SAYS.get(command, {}).get(plain, ""))


def answer_component(kind: str, name: str) -> str:
    """Return `` This is called correct here.`` for the name of a component elsewhere, or nothing."""
    plain = _plain(name)
    found = next((ours for ours, names in COMPONENTS.get(kind, {}).items() if plain in names.split()), "")
    return _sentence(found) or answer_other_name(name)


def answer_other_name(name: str) -> str:
    """Return `` This is called train.lr here.`` for the name of an option elsewhere, or nothing.

    Of a dotted name the last parts count; if the last one says nothing (``reward_model.enable``), the one before it. A
    name that no table has is answered for its family (``galore_rank``), or for a section that is not offered
    (``profiler.ranks``). Case and ``-`` or ``_`` do not count.
    """
    found = _find(name)
    if name == found:
        return ""
    if found:
        return _sentence(found)
    plain = _plain(name)
    ours = {kind: one for kind, table in COMPONENTS.items() for one, names in table.items() if plain in names.split()}
    named = " or ".join(f"the {kind} {one}" for kind, one in ours.items())
    return _sentence(named)


def answer_spelling(name: str) -> str:
    """Return the answer to another spelling of a name of the table (``use_lora`` for ``lora``), or nothing."""
    last = _plain(name).rpartition(".")[2]
    if last in _WITHOUT_MEANING or last in _OURS:
        return ""
    spelled = next((one for one in _spellings(last) if one in OTHER_NAMES), _family_of(last, CARRIERS))
    return _sentence(OTHER_NAMES.get(spelled, ""))


def answer_value(key: str, value: object) -> str:
    """Return `` Give all-linear.`` for a value that a key of ours cannot have and options elsewhere have, or nothing.

    ``None`` is the default of many libraries; here a default is that of a key that is left out.
    """
    text = str(value).lower()
    if isinstance(value, str | int | float) or value is None:
        for answer, patterns in VALUES.get(key, {}).items():
            if any(fnmatchcase(text, pattern) for pattern in patterns.split()):
                return f". {answer}"
    if value is None and "." in key and key.rpartition(".")[2] not in WITHOUT_DEFAULT:
        return ". Leave the key out for its default"
    return ""


def answer_absent(name: str) -> str:
    """Return the answer about what is not offered or not needed, and nothing for a name that leads to a key."""
    is_absent = _find(name).startswith((_NOT_NEEDED, _NOT_OFFERED))
    if not is_absent:
        return ""
    return answer_other_name(name)


def _find(name: str) -> str:
    """Return the answer to a name as the tables have it, or nothing."""
    parts = _plain(name).split(".")
    tried = [".".join(parts[start:]) for start in range(len(parts))]
    if parts[-1] in _WITHOUT_MEANING and (parts[0] not in _SECTIONS or len(parts) > 2):
        tried += [".".join(parts[start:-1]) for start in range(len(parts) - 1)]
    if (exact := next((one for one in tried if one in OTHER_NAMES), "")) or parts[-1] in _OURS:
        return OTHER_NAMES.get(exact, "")
    if family := _family_of(parts[-1], FAMILIES):
        return OTHER_NAMES[family]
    return _answer_of_section(parts[:-1])


def _answer_of_section(sections: Sequence[str]) -> str:
    """Return the answer to all options of the innermost section that is not offered or is a family, or nothing."""
    for section in reversed(sections):
        answer = OTHER_NAMES.get(section, "")
        if answer.startswith((_NOT_NEEDED, _NOT_OFFERED)):
            return answer
        if family := _family_of(section, FAMILIES) or _family_of(f"{section}.", FAMILIES):
            return OTHER_NAMES[family]
    return ""


def _family_of(name: str, families: Mapping[str, str]) -> str:
    """Return the name of the tables whose answer a family has, or nothing."""
    for answered, patterns in families.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns.split()):
            return answered
    return ""


def _spellings(name: str) -> list[str]:
    """Return other ways to write a name, by at most two changes: ``clip_coef`` for ``clip_coeff``, ``lora``, ..."""
    found = [name]
    newest = [name]
    for _ in range(2):
        newest = [changed for one in newest for pattern, put in _CHANGES if (changed := pattern.sub(put, one)) != one]
        newest = [one for one in dict.fromkeys(newest) if one and one not in found]
        found += newest
    return found[1:]


def _plain(name: str) -> str:
    return name.strip("-").lower().replace("-", "_").replace(" ", "_")


def _sentence(found: str) -> str:
    """Return an answer of the table as a sentence after a space; nothing for none."""
    if not found:
        return ""
    if found.startswith(_NOT_NEEDED):
        return f" There is no such key here, and none is needed: {found.removeprefix(_NOT_NEEDED)}."
    if found.startswith(_NOT_OFFERED):
        return f" It is not offered here: {found.removeprefix(_NOT_OFFERED)}."
    if " " not in found:
        return f" This is called {found} here."
    return f" Here it is {found}."
