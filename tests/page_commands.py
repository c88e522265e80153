"""Commands that documents, helps and sources tell a reader to type, and what can be checked of each without a run."""

from __future__ import annotations

import re
import shlex
import tomllib
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

from posttrain import cli
from posttrain.interpret.differences.changes_recipe import load_diff_recipe
from posttrain.interpret.saes.sae_recipe import load_sae_recipe
from posttrain.recipes.document import complete_component, known_keys, recipe_names
from posttrain.recipes.recipe import Recipe, load_recipe
from posttrain.sweeps.file import shipped_sweeps
from posttrain.sweeps.plan import load_sweep
from posttrain.untrusted import declare_code

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "AGENTS.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "contrib").rglob("*.md")),
]
SOURCES = [
    path
    for folder in ("src", "contrib", "examples", "benchmarks", "tools")
    for kind in ("*.py", "*.yaml")
    for path in sorted((ROOT / folder).rglob(kind))
]
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_PROGRAMS = "posttrain|make|python|pip|torchrun"
_SETTINGS = r"(?:[A-Z_]+=\S+ )*"
_INLINE = re.compile(rf"(?<!`)`({_SETTINGS}(?:{_PROGRAMS}) [^`\n]+)`(?!`)")
_TYPED = re.compile(rf"^ *(?:#|//)? *(?:\$ |!)?({_SETTINGS}(?:{_PROGRAMS}) .+)$")
# Programs of others, of which only the first word is known.
OTHERS = {"export", "source", "cd", "echo", "docker", "ray", "hf", "curl", "git", "srun", "exec", "jupyter", "trackio"}
_PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*|\.\.\.|…")


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of the code blocks of a page, without their indentation."""
    return [
        (language, "\n".join(line.removeprefix(indent) for line in text.splitlines()))
        for indent, language, text in BLOCK.findall(page.read_text(encoding="utf-8"))
    ]


def clean(command: str) -> str:
    """Return a command without the remark behind it."""
    return re.split(r"\s+#|\s{3,}", command.strip())[0].strip()


def typed_in(language: str, text: str) -> list[str]:
    """Commands of a block: each line of bash, what follows ``$`` in a console, and what a script says of ours."""
    lines = text.replace("\\\n", " ").splitlines()
    if language == "bash":
        return lines
    if language == "console":
        return [line[2:] for line in lines if line.startswith("$ ")]
    if language in ("sh", "text"):
        return re.findall(r"(?:^|exec |\d )(posttrain [^'|;\n]+)", text, re.MULTILINE)
    return []


@cache
def commands() -> tuple[tuple[str, str], ...]:
    """(place, command) of all, each once a place."""
    found: list[tuple[str, str]] = []
    for page in PAGES:
        place = page.relative_to(ROOT).as_posix()
        for language, text in blocks(page):
            found += [(place, line) for line in typed_in(language, text)]
        prose = BLOCK.sub("", page.read_text(encoding="utf-8"))
        found += [(place, command) for command in _INLINE.findall(prose)]
    parser, subparsers = cli.build_parser()
    for owner in (parser, *subparsers.values()):
        found += [("help", line) for line in (owner.epilog or "").splitlines() if "posttrain " in line]
        found += [("help", command) for command in _INLINE.findall(owner.format_help().replace("\n", " "))]
    for source in SOURCES:
        place, text = source.relative_to(ROOT).as_posix(), source.read_text(encoding="utf-8")
        found += [(place, command) for command in _INLINE.findall(text) if not {"{", "}"} & set(command)]
        if source.parent.name in ("benchmarks", "examples", "contrib"):
            head = text.partition('"""')[2].partition('"""')[0]
            found += [(place, match[1]) for line in head.splitlines() if (match := _TYPED.match(line))]
    cleaned = [(place, clean(" ".join(command.split("\n")))) for place, command in found]
    return tuple((place, command) for place, command in dict.fromkeys(cleaned) if command)


def words_of(command: str) -> list[str]:
    """The words of the first command of a line, without settings in front of it, and pipes and files behind."""
    first = re.split(r" (?:\||>|&&|2>&1|;) ?", command)[0].rstrip(";")
    words = shlex.split(first)
    words = [word for word in words if not word.startswith("$")]  # a variable of the shell
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        del words[0]
    if words and words[0] == "torchrun" and "posttrain" in words:
        del words[: words.index("posttrain")]
    return words


def write_files(place: str, folder: Path) -> None:
    """Write the files that a page shows, those whose first line is their name, and the Python of all pages."""
    for page in PAGES:
        is_here = page.relative_to(ROOT).as_posix() == place
        for _, text in blocks(page):
            named = re.match(r"# ([\w-]+\.(py|yaml|jsonl))\b", text)
            if named and (is_here or named[2] == "py"):
                (folder / named[1]).write_text(text, encoding="utf-8")


def check(command: str, folder: Path) -> None:
    """Assert that a command can be typed: programs, files, options and recipe keys exist, and a recipe resolves.

    ``folder``, the working directory, has the files of the command's page (``write_files``).

    Raises:
        AssertionError, PosttrainError, SystemExit: something does not.
    """
    words = words_of(command)
    program = words[0].rpartition("/")[2]
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        goals = [word for word in words[1:] if "=" not in word]
        assert set(goals) <= set(targets), goals
    elif program in ("python", "python3"):
        _check_script(words[1:], folder)
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for names in re.findall(r"\.\[([\w,-]+)\]", command):
            assert set(names.split(",")) <= set(extras), names
    elif program == "posttrain":
        _check_own(words[1:], folder)
    else:
        assert program in OTHERS, f"nobody knows {program}"


def _check_script(words: list[str], folder: Path) -> None:
    """A script is there, does something, and names each option."""
    if words[:1] == ["-m"]:
        if words[1] == "posttrain":
            _check_own(words[2:], folder)
        else:
            assert words[1] in ("venv", "pytest", "pip", "http.server", "ruff"), words[1]
        return
    assert words, "python alone"
    path = next((place / words[0] for place in (ROOT, folder) if (place / words[0]).is_file()), None)
    assert path is not None, f"there is no script {words[0]}"
    text = path.read_text(encoding="utf-8")
    if path.is_relative_to(ROOT):
        assert '__name__ == "__main__"' in text, f"{words[0]} does nothing when it is run"
    for word in words[1:]:
        option = word.partition("=")[0]
        assert not option.startswith("--") or f'"{option}"' in text, f"{words[0]} has no {option}"


def _check_own(words: list[str], folder: Path) -> None:
    if words[-1] == "--help" or words == ["--version"]:
        assert len(words) == 1 or words[0] in cli.COMMANDS
        return
    try:
        namespace = cli.parse(words)
    except (cli.UsageError, SystemExit):
        if not _names_known_options(words):
            raise
        return
    _check_keys(namespace, folder)


def _names_known_options(words: list[str]) -> bool:
    """Whether this is a command as a sentence names it: an argument or a value is a placeholder, or is missing."""
    is_placeholder = [_PLACEHOLDER.fullmatch(word.strip("[]'\"")) is not None for word in words]
    is_short = len(words) <= 3 or words[-1].startswith("-")
    if not (any(is_placeholder) or is_short):
        return False
    parser, known = cli.build_parser()
    name = " ".join(words[:2]) if " ".join(words[:2]) in known else words[0]
    if name not in known and words[0].startswith("-"):
        return words[0] in parser.format_help()
    if name not in known:
        return False
    options = {o for n, p in known.items() if n.partition(" ")[0] == words[0] for o in p._option_string_actions}
    given = [word.partition("=")[0] for word in words if word.startswith("--")]
    keys = cli.COMMANDS[name].keys
    return all(
        option in options or (keys is not None and "." in option and is_recipe_key(option[2:])) for option in given
    )


def is_recipe_key(key: str) -> bool:
    """Whether a dotted key is one of a recipe, as far as that follows from its sections; a component's are its own."""
    parts = [part for part in key.split(".") if part not in ("KEY", "key", "NAME")]
    for depth, part in enumerate(parts):
        known = known_keys(Recipe, parts[:depth])
        if not known:
            return True  # of a component, or of a value
        if part not in known and not part.isdigit():
            return _is_open(parts[:depth])
    return True


def _is_open(path: list[str]) -> bool:
    """Whether a section takes keys that are not its own: those of a component."""
    model: object = Recipe
    for part in (part for part in path if not part.isdigit()):
        field = getattr(model, "model_fields", {}).get(part)
        if field is None:
            return True
        text = str(field.annotation)
        if "Component" in text or "dict" in text:
            return True
        kinds = re.findall(r"sections\.(\w+Section)", text)
        import posttrain.recipes.sections as sections

        model = getattr(sections, kinds[0]) if kinds else None
    return False


def _check_keys(namespace: object, folder: Path) -> None:
    """Keys of recipes, tasks and templates are known; a recipe that is there resolves with them."""
    about = vars(namespace)
    command, overrides = about["command"], about["overrides"]
    action = about.get("action")
    recipe = str(about.get("recipe") or "")
    declare_code([str(value) for value in about.values()], folder, ROOT / "contrib")
    if command == "train":
        _check_training(recipe, overrides)
    elif command == "sweep":
        given = {"over": about["over"], "rows": about["rows"]}
        if recipe in recipe_names() or recipe in [name.rpartition("/")[2] for name in shipped_sweeps()]:
            assert load_sweep(recipe, overrides, folder="unused", **given).trials
    elif command == "sae" and action == "train" and recipe in recipe_names():
        load_sae_recipe(recipe, overrides).resolve()
    elif command == "sae" and action == "diff" and len(about["models"]) == 1 and about["models"][0] in recipe_names():
        load_diff_recipe(about["models"], overrides).resolve()
    elif command == "recipes" and action == "show":
        assert about["name"] in recipe_names()
    elif command == "explain" and about["name"] and not _PLACEHOLDER.fullmatch(" ".join(about["name"])):
        assert cli.main(["explain", *about["name"]]) == 0, "nothing is called that"
    elif command in ("evaluate", "generate", "quantize", "activations", "data"):
        if command == "data":
            namespace = SimpleNamespace(**about, task=about["name"], template=None)
        read = partial(cli.imported("options:read_components"), sections=_sections(namespace))
        for kind, components in read(namespace).items():
            for component in components:
                if component.name and not _PLACEHOLDER.fullmatch(component.name):
                    complete_component(component, kind, f"--{kind}")


def _sections(namespace: object) -> tuple[str, ...]:
    """The components that a command takes."""
    return tuple(kind for kind in ("task", "template", "engine") if hasattr(namespace, kind))


def _check_training(recipe: str, overrides: list[tuple[str, str]]) -> None:
    if _PLACEHOLDER.fullmatch(recipe) or (recipe.endswith(".yaml") and not _find(recipe)):
        unknown = [key for key, _ in overrides if not is_recipe_key(key)]
        assert not unknown, f"{unknown} are no keys of a recipe"
        return
    values = [value for _, value in overrides]
    if any(_PLACEHOLDER.fullmatch(value) for value in values):
        overrides = [(key, value) for key, value in overrides if not _PLACEHOLDER.fullmatch(value)]
    place = str(_find(recipe) or recipe)
    assert load_recipe(place, overrides).resolve().objective.name


def _find(recipe: str) -> Path | None:
    """A recipe file of the working directory, or of this repository."""
    return next((place / recipe for place in (Path(), ROOT) if (place / recipe).is_file()), None)
