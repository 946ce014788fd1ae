"""Weights that are split or merged while they are loaded, for one load only.

`from_pretrained` takes renamings but no converters; transformers finds those in a registry, by the name of the class.
Rules that stayed there would change how other people's models of that class are loaded and saved.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel, conversion_mapping
from transformers.core_model_loading import WeightRenaming

_lock = threading.Lock()


@contextmanager
def converting(model_class: type[PreTrainedModel], renamings: Mapping[str, str], converters: Sequence[Any]) -> Iterator:
    """Loads of `model_class` within this context rename (pattern -> replacement) and convert. Without converters it
    does nothing, since `from_pretrained` itself takes renamings."""
    if not converters:
        yield
        return
    name = model_class.__name__
    rules = [WeightRenaming(pattern, replacement) for pattern, replacement in renamings.items()]
    with _lock:
        if conversion_mapping.get_checkpoint_conversion_mapping(name) is not None:
            raise RuntimeError(f"transformers already has conversion rules for {name}: remove them before asrd.load")
        conversion_mapping.register_checkpoint_conversion_mapping(name, [*rules, *converters])
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # what a converter raises on weights of wrong sizes
            raise ValueError(f"the weights do not fit config.json: {error}") from error
        finally:
            registry: Any = conversion_mapping._checkpoint_conversion_mapping_cache
            registry.pop(name, None)
            conversion_mapping.USER_REGISTERED_MAPPINGS.discard(name)
