"""These tests compile for GPUs that are not here: test_kernel_processes.py starts them; by hand, name the file."""

import os
from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect them only when named, and never where TRITON_INTERPRET=1 keeps Triton from compiling."""
    named = any("compiled" in argument for argument in config.args)
    return None if named and os.environ.get("TRITON_INTERPRET") != "1" else True
