"""The fixed prompts of ``eval.prompts``: a list, or a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from posttrain.errors import RecipeError
from posttrain.option_types import shorten
from posttrain.untrusted import kind_of_file

PANEL = "panel"  # the name under which the answers are recorded
MAX_PROMPTS = 64
MAX_PROMPT_CHARS = 20_000
_MAX_FILE_BYTES = 8 * MAX_PROMPTS * MAX_PROMPT_CHARS  # a character takes at most 6 bytes in JSON, with room for keys
_MAX_DIGITS = 300
_OF_A_PROMPT = ("system", "system_prompt", "system_message", "messages", "tools", "chat_template_kwargs")
_FORMS = "Give a list of prompts, or a file: .txt (one a line), .json (a list), .jsonl (rows with 'prompt')"


def check_panel(prompts: Sequence[str]) -> None:
    """Refuse a panel that cannot be asked.

    Raises:
        ValueError: no prompt, too many, a blank one, or one that is too long; the message names its place from 0.
    """
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"{len(prompts):,} prompts, and at most {MAX_PROMPTS} are answered; give fewer")
    for number, prompt in enumerate(prompts):
        if not prompt.strip():
            raise ValueError(f"prompt {number} (counted from 0) is blank; give it a text, or leave it out")
        if len(prompt) > MAX_PROMPT_CHARS:
            raise ValueError(
                f"prompt {number} (counted from 0) has {len(prompt):,} characters, and at most {MAX_PROMPT_CHARS:,} "
                "are asked; shorten it"
            )


def read_panel(place: str) -> list[str]:
    """Return the prompts of a file: of a text file its lines, of JSON a list, of JSONL texts or rows with ``prompt``.

    Raises:
        RecipeError: no such file, or not one of prompts.
    """
    where = f"eval.prompts: {shorten(place)}"
    kind = kind_of_file(place)
    if kind == "nothing" and place.startswith("["):  # YAML that is no list
        raise RecipeError(f"{where}: this is no list. Put each prompt in quotes, such as ['What is 3 plus 4?']")
    if kind == "nothing":
        raise RecipeError(f"{where}: there is no such file. {_FORMS}")
    if kind != "file":  # a pipe would be waited for
        raise RecipeError(f"{where}: this is a {kind}. {_FORMS}")
    path = Path(place)
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise RecipeError(f"{where}: larger than {_MAX_FILE_BYTES:,} bytes. Give at most {MAX_PROMPTS} prompts")
        prompts = _parse(path.read_text(encoding="utf-8-sig"), path.suffix.lower())
        check_panel(prompts)
    except UnicodeDecodeError:
        raise RecipeError(f"{where}: not a text file in UTF-8. Save it as one") from None
    except OSError as error:
        raise RecipeError(f"{where}: cannot be read ({error.strerror}). Give a file that can") from None
    except RecursionError:
        raise RecipeError(f"{where}: nested too deeply. {_FORMS}") from None
    except ValueError as error:
        raise RecipeError(f"{where}: {error}") from None
    if not prompts:
        raise RecipeError(f"{where}: it is empty. {_FORMS}")
    return prompts


def _parse(text: str, suffix: str) -> list[str]:
    """Return the texts of a file.

    Raises:
        ValueError: it has something else.
    """
    values: list[object] = []
    if suffix == ".json":
        content = _load(text, "the file")
        if not isinstance(content, list):
            raise ValueError(f"the file holds no list. {_FORMS}")
        values = content
    elif suffix in (".jsonl", ".ndjson"):
        for number, line in enumerate(text.split("\n"), start=1):  # not at U+2028, which JSON may hold
            if line.strip():
                values.append(_load(line, f"line {number}"))
    elif suffix in ("", ".txt"):
        lines = text.strip("\n").split("\n")
        if any(lines):
            return lines
    else:
        raise ValueError(f"files that end in {suffix} are not read here. {_FORMS}")
    prompts: list[str] = []
    for number, value in enumerate(values):
        prompt = value
        if isinstance(value, dict):
            prompt = value.get("prompt")
            _refuse_other_parts(value, number)
        if not isinstance(prompt, str):
            raise ValueError(f"prompt {number} (counted from 0) is no text: {shorten(value)}. {_FORMS}")
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise ValueError(f"prompt {number} (counted from 0) has half of a surrogate pair. Remove it") from None
        prompts.append(prompt)
    return prompts


def _refuse_other_parts(row: dict[str, object], number: int) -> None:
    """Refuse what would be part of a prompt elsewhere; a panel has a user's text alone."""
    for name in _OF_A_PROMPT:
        if row.get(name):
            raise ValueError(
                f"prompt {number} (counted from 0) has {name!r}, which is not read here: a panel asks a user's text "
                "alone. Remove the key"
            )


def _load(text: str, where: str) -> object:
    try:
        return _JSON.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error.msg}). {_FORMS}") from None


def _whole_number(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"it has a number of {len(digits):,} digits. {_FORMS}")
    return int(digits)


def _without_twice(pairs: list[tuple[str, object]]) -> dict[str, object]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it has the key {shorten(twice)} twice in an object. Remove one")
    return row


_JSON = json.JSONDecoder(object_pairs_hook=_without_twice, parse_int=_whole_number)
