"""Size checks for untrusted model configurations, done before building anything."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import UsageError
from posttrain.option_types import shorten
from posttrain.store.durable import write_json
from posttrain.untrusted import entries_of, kind_of_file

if TYPE_CHECKING:  # not needed for checks
    from transformers import PreTrainedConfig as Config
else:
    Config = Any

# Upper bounds above any current model; keys follow transformers configurations.
LARGEST: dict[str, int] = {
    **dict.fromkeys(("vocab_size",), 10**8),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "head_dim"), 10**6),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim"), 10**7),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 2_000),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head"), 10**5),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 10**9),
}
MAX_FILE_BYTES = 2**27  # limit for every file except weights
_DESCRIPTION = re.compile(
    r"(token|config|vocab|merges|index|manifest|template|processor|quantization).*\.(json|txt)$"
    r"|\.(jinja|model|tiktoken)$"
)
MAX_DEPTH = 50  # of objects in objects
_SHOWN = 300  # characters of a place
# Items such as labels, experts and layers, which libraries enumerate while reading a configuration.
MAX_COUNT = 10**6
_COUNT = re.compile(r"(num|n)_(?!.*(position|ctx|param|token))")
# Some families list these per layer.
OF_EACH_LAYER = ("intermediate_size", "ffn_dim", "num_attention_heads", "num_key_value_heads")


def check_kinds(folder: Path) -> None:
    """Refuse model folders that could block a reader forever: pipes, devices, huge description files.

    Raises:
        UsageError: names the offending path.
    """
    templates = folder / "additional_chat_templates"
    places = sorted(folder.iterdir())
    if kind_of_file(templates) == "folder":
        places += sorted(templates.iterdir())
    for place in places:
        kind = kind_of_file(place)
        if kind in ("pipe", "device", "socket"):
            raise UsageError(f"model.name: {place} is a {kind}; give a complete model")
        if kind == "file" and _DESCRIPTION.search(place.name) and place.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(
                f"model.name: {place}: {place.stat().st_size:,} bytes; such a file has at most {MAX_FILE_BYTES:,}"
            )


def check_folder(folder: Path) -> None:
    """Check a model folder: ``check_kinds``, sizes in config.json, weight indexes pointing outside.

    Raises:
        UsageError: refused, with path and key.
    """
    check_kinds(folder)
    place = folder / "config.json"
    if place.is_file():
        try:
            check_sizes(read_object(place), f"model.name: {place}: ")
        except RecursionError:
            raise UsageError(f"model.name: {place} is nested too deeply; give a complete model") from None
    for index in sorted(folder.glob("*.index.json")):
        places = read_object(index).get("weight_map")
        if not isinstance(places, dict):
            raise UsageError(f"model.name: {index}: weight_map: an object is needed; got {shorten(places)}")
        for name in places.values():
            if not isinstance(name, str) or name != Path(name).name or name in ("", ".", ".."):
                raise UsageError(
                    f"model.name: {index}: weight_map: {shorten(name)} is not in the same folder; give a complete model"
                )


def read_object(place: Path) -> dict[str, Any]:
    """Read a small JSON object from a model folder.

    Raises:
        UsageError: unreadable, or not a JSON object.
    """
    try:
        content = json.loads(place.read_bytes())
    except (OSError, ValueError, RecursionError) as error:  # ValueError: bad UTF-8, bad JSON, or a huge number
        reason = str(error).partition("\n")[0][:200]
        raise UsageError(f"model.name: {place} cannot be read ({reason}); give a complete model") from None
    if not isinstance(content, dict):
        raise UsageError(f"model.name: {place} must hold a JSON object; got {shorten(content)}")
    return content


def write_object(place: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object of a model folder as transformers does: sorted keys, two spaces."""
    write_json(place, content, indent=2, sort_keys=True)


def ids_in(declared: object) -> list[Any]:
    """List what a configuration declares as a token id, a list of ids, or null."""
    if declared is None:
        return []
    if isinstance(declared, list):
        return declared
    return [declared]


def check_sizes(config: Mapping[str, Any], where: str, depth: int = 0) -> None:
    """Refuse impossible sizes, recursing into nested configurations; ``where`` prefixes each key.

    Raises:
        UsageError: not an integer between 1 and the known maximum.
    """
    for key, largest in LARGEST.items():
        value = config.get(key)
        sizes = [value]
        if isinstance(value, list) and key in OF_EACH_LAYER:
            sizes = value
        for size in sizes:
            whole = isinstance(size, int) and not isinstance(size, bool)
            if size is not None and not (whole and 1 <= size <= largest):
                raise UsageError(f"{where}{key}: a whole number from 1 to {largest:,} is needed; got {shorten(value)}")
    for key, value in config.items():
        if isinstance(value, Mapping):
            if depth == MAX_DEPTH:
                raise UsageError(f"{where[:_SHOWN]} ...: objects in {MAX_DEPTH} others; give a complete model")
            check_sizes(value, f"{where}{key}.", depth + 1)
        counts = _numbers_in_lists(value)
        if _COUNT.match(key):
            counts.append(value)
        for count in counts:
            if isinstance(count, int) and count > MAX_COUNT:
                raise UsageError(f"{where}{key}: {count:,}; at most {MAX_COUNT:,}")


def _numbers_in_lists(value: object) -> list[object]:
    """Collect numbers inside nested lists; some families use them as repeat counts."""
    numbers: list[object] = []
    for row in entries_of(value):
        numbers += entries_of(row)
        numbers += _numbers_in_lists(row)
    return numbers


def note_ties(model: Any) -> None:
    """Set ``tie_word_embeddings`` from the actual weights, because other programs trust it when loading exports."""
    head = model.get_output_embeddings()
    if head is None:
        return
    is_tied = head.weight is model.get_input_embeddings().weight
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = is_tied
    if not is_tied:
        model.all_tied_weights_keys = {}


def context_length(config: Config) -> int:
    """Look up the maximum sequence length in tokens."""
    text = config.get_text_config()
    # max_seq_len: MPT, whose attention biases end there
    names = ("max_position_embeddings", "n_positions", "max_seq_len")
    for name in names:
        length = getattr(text, name, None)
        if length:
            return int(length)
    return 1 << 20


# Configuration keys measured in tokens: windows, chunks, original lengths for rotary scaling, temperature steps,
# sparse-attention top-k. Pattern keys count layers instead.
_LENGTHS = re.compile(
    r"window(?!_layers|_pattern)|chunk|original_max_position|max_position_embeddings|floor_scale|block_size|index_topk"
    r"|local_attention"
)
# Keys limiting full attention.
_WINDOWS = re.compile(
    r"sliding_window(?!_pattern)|attention_window|window_size|attention_chunk_size|index_topk|local_attention"
)


def shortest_window(config: Config) -> int | None:
    """Find the longest row with full causal attention; None if unlimited."""
    lengths = _lengths_in(config.get_text_config().to_dict(), _WINDOWS)
    return min((length for length in lengths if length > 0), default=None)


def find_switches(config: Config, reach: int) -> tuple[int, ...]:
    """Find positions below ``reach`` where the model changes its computation."""
    lengths = _lengths_in(config.get_text_config().to_dict(), _LENGTHS)
    return tuple(sorted({length for length in lengths if 1 < length < reach}))


def _lengths_in(settings: Mapping[str, object], keys: re.Pattern[str], is_length: bool = False) -> Iterator[int]:
    for key, value in settings.items():
        found = is_length or keys.search(str(key)) is not None
        if isinstance(value, Mapping):
            yield from _lengths_in(value, keys, found)
        elif found:
            numbers = [value]
            if isinstance(value, list | tuple):
                numbers = [*value]
            yield from (int(n) for n in numbers if isinstance(n, int | float) and n is not True and n == int(n))
