"""Where in a transformer activations are read, and the reading: ``resid.20``, ``mlp.20``, ``attn.20``, ``mlp_in.20``.

Layer L (1 .. num_layers) is the block with index L − 1. ``resid.L`` is what that block gives, ``hidden_states[L]`` in
transformers (but for the last layer, whose ``hidden_states`` have gone through the final norm; ours have not).
``resid.0`` is what the first block reads, the embeddings. ``mlp.L`` and ``attn.L`` are what the block's two halves add
to the residual stream, after any norm of their own: ``resid.L = resid.(L−1) + attn.L + mlp.L``. ``mlp_in.L`` is what
the MLP reads, after the norm before it.

Nothing above the last site is computed: no logits, no key-value cache. Rows are padded on the right and no attention
mask is given: attention is causal, so no token sees padding, and SDPA needs no matrix of scores. Long contexts
therefore cost memory in proportion to their length."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from posttrain.errors import UsageError
from posttrain.models.forward.forward import causal_lm, decoder_of
from posttrain.models.load import (
    LoadedModel,
    choose_device,
    load_model,
    load_tokenizer,
    quiet_transformers,
    reading_model,
)
from posttrain.models.sources import adapter_base, resolve_model_name
from posttrain.recipes.sections import ModelSection
from posttrain.store.checkpoint_files import stated_digests

PLACES = ("resid", "mlp", "attn", "mlp_in")
_MLPS = ("mlp", "feed_forward", "block_sparse_moe")  # what a block calls its MLP itself, without norms around it
# What architectures call (attention, MLP) of a block. The first pair whose sum is what the block adds is taken; where
# outputs are normed before they are added, the norms come first.
_HALVES = (
    ("post_attention_layernorm", "post_feedforward_layernorm"),
    ("post_self_attn_layernorm", "post_mlp_layernorm"),
    ("self_attn", "mlp"),
    ("attn", "mlp"),
    ("attention", "mlp"),
    ("self_attention", "mlp"),
    ("self_attn", "feed_forward"),
    ("self_attn", "block_sparse_moe"),
)
_PROBE_IDS = (1, 2, 3, 5, 8, 13)


@dataclass(frozen=True, slots=True, order=True)
class Site:
    """A place in a layer; ``str()`` gives its name."""

    layer: int
    place: str

    def __str__(self) -> str:
        return f"{self.place}.{self.layer}"


def read_site(name: str) -> Site:
    """The site called ``resid.20``.

    Raises:
        UsageError: this is no name of a site.
    """
    place, dot, layer = name.partition(".")
    if place not in PLACES or not dot or not layer.isdecimal() or (place != "resid" and int(layer) == 0):
        raise UsageError(
            f"{name!r} is no site: they are called resid.20, mlp.20, attn.20 or mlp_in.20 (resid.0: the embeddings)"
        )
    return Site(int(layer), place)


def backbone_of(model: Any) -> Any:
    """The transformer without its LM head: of a causal LM, a peft model around one, or a backbone itself."""
    plain = causal_lm(model)
    return decoder_of(plain) if hasattr(plain, "lm_head") or plain.get_output_embeddings() is not None else plain


def blocks_of(backbone: Any) -> tuple[str, nn.ModuleList]:
    """The blocks of a backbone, in order, and the name under which it holds them.

    Raises:
        UsageError: it keeps them in a way that is not known here.
    """
    lists = [(name, child) for name, child in backbone.named_children() if isinstance(child, nn.ModuleList)]
    expected = backbone.config.get_text_config().num_hidden_layers
    candidates = [(name, child) for name, child in lists if len(child) == expected] or lists
    if len(candidates) != 1:
        raise UsageError(f"{type(backbone).__name__}: no single list of {expected} blocks, so its layers are not known")
    return candidates[0]


def check_sites(backbone: Any, sites: Iterable[Site]) -> None:
    """Refuse layers that the model has not.

    Raises:
        UsageError: the message says how many there are.
    """
    num_layers = len(blocks_of(backbone)[1])
    for site in sites:
        if site.layer > num_layers:
            raise UsageError(f"{site}: this model has {num_layers} layers; give a layer from 0 to {num_layers}")


def halves_of(backbone: Any, layer: int) -> tuple[nn.Module, nn.Module]:
    """The modules that give ``attn.L`` and ``mlp.L``, chosen by measurement: their sum is what the block adds.

    Raises:
        UsageError: no pair of modules of this block does.
    """
    block = blocks_of(backbone)[1][layer - 1]
    pairs = [(getattr(block, a), getattr(block, m)) for a, m in _HALVES if hasattr(block, a) and hasattr(block, m)]
    watched = {id(module): module for pair in pairs for module in pair}
    seen = _probe(backbone, block, list(watched.values()))
    for attention, mlp in pairs:
        if id(attention) in seen and id(mlp) in seen:
            added = seen[id(attention)] + seen[id(mlp)]
            if _agree(added, seen[id(block)] - seen[-1], seen[id(block)]):
                return attention, mlp
    raise UsageError(
        f"{type(block).__name__}: no two modules of it add up to what it adds, so `mlp` and `attn` are not known here; "
        "`resid` is"
    )


@torch.no_grad()
def _probe(backbone: Any, block: nn.Module, modules: list[nn.Module]) -> dict[int, Tensor]:
    """By id, what the modules and the block give on a few tokens (float32); under -1 what the block reads."""
    seen: dict[int, Tensor] = {}

    def keep(key: int, values: Tensor) -> Tensor:
        seen[key] = values.float().clone()
        return values

    embeddings = backbone.get_input_embeddings().weight
    ids = torch.tensor([[i % len(embeddings) for i in _PROBE_IDS]], device=embeddings.device)
    with ExitStack() as hooks:
        for module in (*modules, block):
            hooks.enter_context(hooked(module, False, partial(keep, id(module))))
        hooks.enter_context(hooked(block, True, partial(keep, -1)))
        backbone(input_ids=ids, use_cache=False)
    return seen


def _agree(added: Tensor, expected: Tensor, after: Tensor) -> bool:
    """Whether they are equal but for the rounding of sums in the model's precision (bfloat16 at worst)."""
    if added.shape != expected.shape:
        return False
    error = (added - expected).norm()
    return bool(error <= 0.05 * expected.norm() + 2**-8 * after.norm())


FINAL_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm")


class _Reached(Exception):
    """Everything that is wanted has been computed; the layers above need not run."""


def truncate(model: Any, layer: int) -> Any:
    """The first ``layer`` blocks as a backbone whose ``last_hidden_state`` is ``hidden_states[layer]``, bit for bit.

    The final norm is replaced by the identity. Modules are shared with ``model``, which itself stays as it is: LoRA
    adapters inside the blocks work, and are switched on and off together with the model's. Once ``model`` is let go of,
    so are the blocks above.

    Raises:
        UsageError: the model has fewer layers, or keeps blocks or final norm in a way that is not known here.
    """
    backbone = backbone_of(model)
    check_sites(backbone, [Site(layer, "resid")])
    name, blocks = blocks_of(backbone)
    norms = [norm for norm in FINAL_NORMS if norm in backbone._modules]
    if len(norms) != 1:
        raise UsageError(f"{type(backbone).__name__}: no final norm that could be left out")
    shorter = copy.copy(backbone)
    shorter._modules = dict(backbone._modules)
    shorter._modules[name] = nn.ModuleList(blocks[:layer])
    shorter._modules[norms[0]] = nn.Identity()
    shorter.config = copy.deepcopy(backbone.config)
    shorten_config(shorter.config.get_text_config(), layer)
    return shorter


class Extractor:
    """Reads sites of one model; made once, called for every batch.

    Args:
        model: a causal LM, a peft model around one, or a (truncated) backbone.
        sites: names, such as ``resid.20``.

    Raises:
        UsageError: no such site in this model, or attention that would build a matrix of scores.
    """

    def __init__(self, model: Any, sites: Sequence[str]) -> None:
        self.backbone = backbone_of(model)
        self.sites = [read_site(name) for name in sites]
        check_sites(self.backbone, self.sites)
        _refuse_eager(self.backbone)
        self._read = [(site, *module_of(self.backbone, site)) for site in self.sites]

    @property
    def device(self) -> torch.device:
        device: torch.device = self.backbone.get_input_embeddings().weight.device
        return device

    @torch.no_grad()
    def __call__(self, documents: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """By site, ``[tokens, d]`` of all tokens of the documents, one document after the other, on the CPU.

        The dtype is the model's. How the documents are put together does not matter, but for rounding.
        """
        tokens, lengths = pad(documents, self.device)
        real = torch.arange(tokens.shape[1], device=self.device) < lengths[:, None]
        activations: dict[str, Tensor] = {}

        def keep(site: Site, values: Tensor) -> Tensor:
            """Copy what is wanted as soon as it is there, and stop the forward pass at the last of it."""
            activations[str(site)] = values[real]
            if len(activations) == len(self._read):
                raise _Reached
            return values

        with ExitStack() as hooks, suppress(_Reached):
            for site, module, reads_input in self._read:
                hooks.enter_context(hooked(module, reads_input, partial(keep, site)))
            self.backbone(input_ids=tokens, use_cache=False)
        return {str(site): activations[str(site)].cpu() for site in self.sites}


def pad(documents: Sequence[Sequence[int]], device: Any) -> tuple[Tensor, Tensor]:
    """(tokens int64 [B, T], lengths [B]); attention is causal, so what is behind a text is not seen by it."""
    lengths = torch.tensor([len(ids) for ids in documents])
    tokens = torch.zeros((len(documents), int(lengths.max())), dtype=torch.long)
    for row, ids in enumerate(documents):
        tokens[row, : len(ids)] = torch.as_tensor(ids, dtype=torch.long)
    return tokens.to(device), lengths.to(device)


def shorten_config(config: Any, layer: int) -> None:
    """A configuration for the first ``layer`` blocks; lists with an entry per block are cut."""
    for key, value in vars(config).items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(config, key, value[:layer])
    config.num_hidden_layers = layer


def _refuse_eager(backbone: Any) -> None:
    implementation = getattr(backbone.config, "_attn_implementation", "sdpa")
    if implementation == "eager" and hasattr(backbone, "_supports_sdpa") and backbone._supports_sdpa:
        raise UsageError("this model was loaded with eager attention, which keeps all scores; load it with sdpa")


def module_of(backbone: Any, site: Site) -> tuple[nn.Module, bool]:
    """The module that gives what a site means, and whether its input is meant and not its output.

    Raises:
        UsageError: a block whose halves are not known here.
    """
    if site.place == "resid":
        return blocks_of(backbone)[1][max(site.layer, 1) - 1], site.layer == 0
    attention, mlp = halves_of(backbone, site.layer)
    if site.place == "mlp_in":
        block = blocks_of(backbone)[1][site.layer - 1]
        return next(getattr(block, name) for name in _MLPS if hasattr(block, name)), True
    return mlp if site.place == "mlp" else attention, False


@contextmanager
def hooked(module: nn.Module, reads_input: bool, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside, the hidden states that a module gives (or reads) go through ``change``."""

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return change(output[0]), *output[1:]
        return change(output)

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}

    if reads_input:
        hook = module.register_forward_pre_hook(before, with_kwargs=True)
    else:
        hook = module.register_forward_hook(after)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def replaced(model: Any, site: str, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside, whatever the site of the model gives goes through ``change`` ([batch, tokens, d] to the same shape).

    Raises:
        UsageError: no such site in this model.
    """
    place, backbone = read_site(site), backbone_of(model)
    check_sites(backbone, [place])
    with hooked(*module_of(backbone, place), change):
        yield


# Models for extraction: only the blocks that are needed are read from the disk.

_WEIGHTS = ("model*.safetensors", "adapter_model*.safetensors", "pytorch_model*.safetensors")


def load_layers(section: ModelSection, sites: Sequence[str]) -> LoadedModel:
    """The first blocks of a model, as many as the sites need, in eval mode, with its tokenizer.

    Of a plain model the blocks above and the LM head are never read. Of an adapter, or of quantized weights, the whole
    is loaded and then cut.

    Raises:
        UsageError: no such model, or it has fewer layers than a site says.
    """
    wanted = [read_site(name) for name in sites]
    layer = max([1, *(site.layer for site in wanted)])
    check_layers(section.name, sites)
    source = resolve_model_name(section.name)
    model = load_shortened(AutoModel, section, source, layer)
    if model is not None:
        model = truncate(model, layer).to(choose_device(section.device)).eval()
        return LoadedModel(model, load_tokenizer(section.name, trust_remote_code=section.runs_remote_code), source)
    loaded = load_model(section, seed=0)
    return LoadedModel(truncate(loaded.model, layer).eval(), loaded.tokenizer, loaded.source)


def load_shortened(architecture: Any, section: ModelSection, source: str, layer: int) -> Any | None:
    """A plain model of which only the first ``layer`` blocks are read; None where the whole has to be loaded.

    ``architecture``: ``AutoModel``, or ``AutoModelForCausalLM`` for its LM head as well.
    """
    if adapter_base(source) is not None or section.load_bits is not None:
        return None
    trusted = section.runs_remote_code
    try:
        with reading_model(section.name, source):
            config = AutoConfig.from_pretrained(source, trust_remote_code=trusted)
            if config.get_text_config() is not config or getattr(config, "quantization_config", None) is not None:
                return None
            shorten_config(config, layer)
            with quiet_transformers():  # the blocks above would be reported as left over
                model, loading_info = architecture.from_pretrained(
                    source,
                    config=config,
                    dtype=getattr(torch, section.dtype),
                    trust_remote_code=trusted,
                    use_safetensors=True,
                    output_loading_info=True,
                )
    except UsageError:
        return None  # loading all of it says what is wrong
    return None if loading_info["missing_keys"] else model


def read_config(name: str) -> Any:
    """The configuration of a model, without its weights; of an adapter folder that of its base.

    Raises:
        UsageError: no such model.
    """
    source = resolve_model_name(name)
    while (base := adapter_base(source)) is not None:
        source = base
    with reading_model(name, source):
        return AutoConfig.from_pretrained(source)


def check_layers(name: str, sites: Sequence[str]) -> None:
    """Refuse sites that a model has not, by its configuration alone.

    Raises:
        UsageError: no such model, no name of a site, or a layer above the last.
    """
    num_layers = read_config(name).get_text_config().num_hidden_layers
    for site in map(read_site, sites):
        if site.layer > num_layers:
            raise UsageError(f"{site}: {name} has {num_layers} layers; give a layer from 0 to {num_layers}")


def weights_hash(name: str) -> str:
    """SHA-256 of the files that hold a model's weights, an adapter's base included; ``""`` where there are no files.

    A checkpoint of a run has them in its manifest; the files of other folders are read (about a second per GB).

    Raises:
        UsageError: no such model.
    """
    source = resolve_model_name(name)
    try:
        folder = Path(source) if Path(source).is_dir() else Path(snapshot_download(source, local_files_only=True))
    except LocalEntryNotFoundError:
        return ""
    digest = hashlib.sha256()
    known = stated_digests(folder)
    files = sorted({file for pattern in _WEIGHTS for file in folder.glob(pattern)})
    for file in files:
        with file.open("rb") as opened:
            sha256 = known.get(file.name) or hashlib.file_digest(opened, "sha256").hexdigest()
        digest.update(f"{file.name} {sha256}\n".encode())
    base = adapter_base(source)
    if base is not None:
        digest.update(weights_hash(base).encode())
    return digest.hexdigest() if files else ""


def tokenizer_hash(tokenizer: Any) -> str:
    """A hash of a tokenizer's vocabulary, by which two models are known to mean the same by the same ids."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]
