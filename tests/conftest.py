"""Settings of every test run: one thread (the machine has few cores), no network, and the tiers of the tests.

Three tiers (CONTRIBUTING.md): default, `slow` and `long`. With the mark `slow_after(n)` the first n cases of a test are
in the default tier, the others in the slow one.
"""

import os
from collections import Counter

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the programs that tests start
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=int, metavar="N", help="run the first N cases of each test only")


@pytest.hookimpl(tryfirst=True)  # before pytest looks at marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    most, seen, kept = config.getoption("--cases"), Counter[str](), []
    for item in items:
        if item.get_closest_marker("long") is None:
            seen[name := item.nodeid.split("[")[0]] += 1
            mark = item.get_closest_marker("slow_after")
            if mark is not None and seen[name] > mark.args[0]:
                item.add_marker("slow")
            if most is not None and seen[name] > most:
                continue
        kept.append(item)
    items[:] = kept
