"""`load`: a bidirectional model and its tokenizer from a checkpoint.

The rest of the package reads from a loaded model: `config.mask_token_id`, `config.logits_shift` (True: the logits of
position i are in row i-1) and `config.is_causal` (False). `save_pretrained` keeps these fields and `load` reads them.
One difference from LLaDA's own code: in half precision it rotates queries and keys in float32, Llama's code does not.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from asrd.models.conversion import converting
from asrd.models.plan import Plan
from asrd.models.source import load_tokenizer, read_json, resolve, stored_shape, weight_names
from asrd.models.special_ids import END_OF_TURN
from asrd.models.translate import translation_of, with_token_ids
from asrd.models.translate_blocks import with_block_length

log = logging.getLogger("asrd")

HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
ORIGINAL_TYPES = (
    "llada",
    "dream",
    "sdar",
    "sdar_moe",
    "llada2_moe",
)  # model_type of authors' own checkpoints
LARGE = 10**9  # parameters; more than that on a CPU is worth a warning
OUR_ARGUMENTS = ("config", "ignore_mismatched_sizes", "key_mapping", "output_loading_info", "state_dict")


def load(
    path_or_id: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype = "auto",
    device_map: Any = None,
    attn_implementation: str = "auto",
    trust_remote_code: bool = False,
    block_length: int | None = None,
    **from_pretrained_kwargs: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load a diffusion LLM: bidirectional, in eval mode, every weight accounted for.

    path_or_id: Hub id, local folder, or the name of a model that ships with the package ("tiny").
    dtype: "auto" is the checkpoint's own.
    device_map: as in transformers; None is "auto" where there is a GPU, else the CPU.
    attn_implementation: "auto" is FlashAttention if flash-attn is installed and the model is in half precision on CUDA,
        else SDPA; every name that transformers knows is passed on.
    trust_remote_code: run the checkpoint's own code, if its architecture is not known here.
    block_length: of a block-diffusion model (SDAR, LLaDA2), where its config.json does not say.
    from_pretrained_kwargs: go to transformers' `from_pretrained` (revision, quantization_config, tp_plan, ...).

    Returns (model, tokenizer). The tokenizer pads on the left; it is None if the checkpoint has none.
    Raises ValueError that says what is wrong and what would be right.
    """
    _check_arguments(from_pretrained_kwargs)
    source = resolve(path_or_id)
    hub = {name: from_pretrained_kwargs[name] for name in HUB_ARGUMENTS if name in from_pretrained_kwargs}
    raw = read_json(source, "config.json", hub, required=True)
    _refuse_quantised(raw, source)
    translate = translation_of(raw, source, trust_remote_code)
    tokenizer = load_tokenizer(source, hub, remote_code=translate is None)
    generation = read_json(source, "generation_config.json", hub)
    raw = with_block_length(with_token_ids(raw, generation, getattr(tokenizer, "mask_token_id", None)), block_length)

    if device_map is None and torch.cuda.is_available() and "tp_plan" not in from_pretrained_kwargs:
        device_map = "auto"
    arguments = {**from_pretrained_kwargs, "dtype": dtype, "device_map": device_map}
    if attn_implementation != "auto":
        arguments["attn_implementation"] = attn_implementation
    if translate is None:
        model = _load_remote(source, raw, arguments)
        _warn_of_size(model)
        return model, tokenizer
    model = _load_planned(source, translate(raw), hub, {"attn_implementation": "sdpa", **arguments})
    if isinstance(generation.get("max_new_tokens"), int):
        model.generation_config.max_new_tokens = generation["max_new_tokens"]
    if attn_implementation == "auto" and flash_is_usable(model):
        _try_flash(model)
    _warn_of_size(model)
    if tokenizer is not None and END_OF_TURN in tokenizer.get_vocab():
        model.config.eot_token_id = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    return model, tokenizer


def _refuse_quantised(raw: Mapping[str, Any], source: str) -> None:
    """Raise ValueError for an original checkpoint with quantised weights: their names are not known here."""
    found = raw.get("quantization_config")
    if not found or str(raw.get("model_type")).lower() not in ORIGINAL_TYPES:
        return
    method = found.get("quant_method", "an unknown method") if isinstance(found, Mapping) else found
    raise ValueError(
        f"{source!r} holds weights that are quantised already (quantization_config: {method}), which is not supported"
        " for original checkpoints: load the full-precision one, with quantization_config= to quantise it on the way"
    )


def make_bidirectional(model: PreTrainedModel) -> None:
    """Make the attention of a Llama-like decoder bidirectional, for eager, SDPA and flash implementations.

    `config.is_causal` selects the mask that transformers builds, and is saved with a model. Where no mask is built
    (SDPA and flash without padding) transformers reads `is_causal` from the config when a whole model is called, and
    from the attention module when a layer is called alone. So both are set.
    """
    windows = {kind for kind in getattr(model.config, "layer_types", None) or () if kind != "full_attention"}
    if windows:
        raise ValueError(f"layer_types has {sorted(windows)}: all layers must be 'full_attention'")
    model.config.is_causal = False
    module: Any
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False


def flash_is_usable(model: PreTrainedModel) -> bool:
    """Whether FlashAttention can run this model on its device; looks up the distribution without importing it."""
    try:
        importlib.metadata.version("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        return False
    on_cuda = all(parameter.device.type == "cuda" for parameter in model.parameters())
    return on_cuda and model.dtype in (torch.float16, torch.bfloat16)


def _warn_of_size(model: PreTrainedModel) -> None:
    """Decoding with billions of parameters on a CPU takes hours: say so."""
    number = sum(parameter.numel() for parameter in model.parameters() if parameter.device.type == "cpu")
    if number >= LARGE:
        hint = "pass device_map='auto'" if torch.cuda.is_available() else "a GPU would be far faster"
        log.warning(
            "%.1f billion parameters are on the CPU: decoding will take minutes to hours; %s", number / 1e9, hint
        )


def _try_flash(model: PreTrainedModel) -> None:
    try:
        model.set_attn_implementation("flash_attention_2")
    except (ImportError, ValueError) as error:
        log.warning("flash-attn is installed but transformers cannot use it; using SDPA: %s", error)


def _check_arguments(given: Mapping[str, Any]) -> None:
    if "torch_dtype" in given:
        raise ValueError("asrd.load does not take torch_dtype=: write dtype=")
    for name in OUR_ARGUMENTS:
        if name in given:
            raise ValueError(f"asrd.load does not take {name}=: it sets that itself, from the checkpoint")


def _load_planned(source: str, plan: Plan, hub: Mapping[str, Any], arguments: Mapping[str, Any]) -> PreTrainedModel:
    ours: dict[str, Any] = {"config": plan.config}
    if not plan.converters:
        ours["key_mapping"] = _patterns(plan.keys)
    if plan.generation is not None:
        ours["generation_config"] = plan.generation
    _check_sizes(source, plan, hub)
    _check_names(source, plan, hub)
    with converting(plan.model_class, _patterns(plan.keys), plan.converters):
        model: Any = _from_pretrained(plan.model_class, source, plan.keys, **{**ours, **arguments})
    if plan.config.tie_word_embeddings and not model.all_tied_weights_keys:
        raise ValueError(f"{source!r} ties its embedding tables in config.json but holds two different ones: untie")
    model._weight_conversions = []  # else save_pretrained writes the original names beside a Llama config
    make_bidirectional(model)
    return cast(PreTrainedModel, model)


def _check_names(source: str, plan: Plan, hub: Mapping[str, Any]) -> None:
    """Raise if stored weights are missing or unexpected. transformers' own report is not enough: it takes experts in
    the order of their numbers, gaps included, and a stored weight that already has one of our names would replace the
    one that is renamed to it."""
    stored = set(weight_names(source, hub))
    if plan.names is not None and stored:
        misfits = {"missing": plan.names - stored, "unexpected": stored - plan.names - plan.optional}
        _refuse_misfits(source, misfits)
    elif plan.keys:
        _refuse_misfits(source, {"unexpected": [name for name in stored if _renamed(name, plan.keys) is None]})


def _check_sizes(source: str, plan: Plan, hub: Mapping[str, Any]) -> None:
    """Raise if config.json and the stored weights disagree on layers, width or vocabulary, before memory is taken."""
    names = {_renamed(name, plan.keys) or name: name for name in weight_names(source, hub)}
    if not names:
        return
    layers = {int(found[1]) for name in names if (found := re.match(r"model\.layers\.(\d+)\.", name))}
    due: int = plan.config.num_hidden_layers
    if layers and layers != set(range(min(due, len(layers) + 1))):
        raise ValueError(f"config.json says {due} layers, but the weights of {source!r} have {len(layers)}")
    shape = stored_shape(source, names.get("model.embed_tokens.weight", ""), hub)
    wanted = (plan.config.vocab_size, plan.config.hidden_size)
    if shape is not None and shape != wanted:
        raise ValueError(f"config.json says an embedding table of {wanted}, but the weights of {source!r} have {shape}")


def _load_remote(source: str, raw: Mapping[str, Any], arguments: Mapping[str, Any]) -> PreTrainedModel:
    auto_class = AutoModelForCausalLM if "AutoModelForCausalLM" in raw["auto_map"] else AutoModel
    model = _from_pretrained(auto_class, source, {}, trust_remote_code=True, **arguments)
    model.config.mask_token_id = raw["mask_token_id"]
    return model


def _from_pretrained(loader: Any, source: str, keys: Mapping[str, str], **arguments: Any) -> PreTrainedModel:
    """`from_pretrained` that raises instead of initialising missing weights. keys: name there -> name here."""
    try:
        with _without_load_report():
            model, info = loader.from_pretrained(
                source, output_loading_info=True, ignore_mismatched_sizes=True, **arguments
            )
    except (ImportError, OSError, SafetensorError) as error:
        raise ValueError(f"cannot load {source!r}: {error}") from error

    originals = {ours: theirs for theirs, ours in keys.items()}

    def there(name: str) -> str:
        return _renamed(name, originals) or name

    misfits = {kind: [there(name) for name in info[f"{kind}_keys"]] for kind in ("missing", "unexpected")}
    misfits["of the wrong shape"] = [
        f"{there(name)} (is {tuple(found)}, must be {tuple(due)})" for name, found, due in info["mismatched_keys"]
    ]
    _refuse_misfits(source, misfits)
    return cast(PreTrainedModel, model)


@contextmanager
def _without_load_report() -> Iterator[None]:
    """transformers' report of weights that do not fit says that they can be ignored; we raise, and name them."""
    logger = logging.getLogger("transformers.modeling_utils")

    def keep(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in str(record.msg) or "CONVERSION" in str(record.msg)  # an error that refers to it

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _refuse_misfits(source: str, misfits: Mapping[str, Collection[str]], limit: int = 8) -> None:
    """Raise ValueError if any kind of misfit has names; the message lists the first few."""
    problems = []
    for kind, names in misfits.items():
        if names:
            rest = f" and {len(names) - limit} more" if len(names) > limit else ""
            problems.append(f"{kind}: {', '.join(sorted(names)[:limit])}{rest}")
    if problems:
        raise ValueError(f"the weights of {source!r} do not fit its config.json; {'; '.join(problems)}")


def _patterns(keys: Mapping[str, str]) -> dict[str, str]:
    r"""{"a.{i}.b": "c.{i}.d"} as patterns over whole names, with one group at most: transformers leaves \2 as it is."""
    return {
        "^" + re.escape(old).replace(r"\{i\}", r"(\d+)") + r"\.": new.replace("{i}", r"\1") + "."
        for old, new in keys.items()
    }


def _renamed(name: str, keys: Mapping[str, str]) -> str | None:
    """The name that `keys` gives to a weight; None if it has none."""
    for pattern, replacement in _patterns(keys).items():
        if re.match(pattern, name):
            return re.sub(pattern, replacement, name)
    return None
