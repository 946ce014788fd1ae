"""On Ray: replicas and workers are killed, a node disappears, the driver dies; nothing is lost, doubled or changed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import asrd
from asrd.cli import main
from asrd.lab.tiny.task import held_out
from asrd.serve.limits import Limits
from asrd.serve.plan import Plan
from tests.support.server import Running, alone, chat, tiny

pytestmark = pytest.mark.long
QUIET = {
    "RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
    "RAY_DEDUP_LOGS": "0",
}
SETTINGS = ["--max-new-tokens", "48", "--decoder", "standard", "--temperature", "1"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two Ray nodes on this host."""
    ray = pytest.importorskip("ray", reason="Ray is not installed (pip install 'asrd[ray]')")
    from ray.cluster_utils import Cluster

    os.environ.update(QUIET)
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = found.add_node(num_cpus=1)
    ray.init(address=found.address, log_to_driver=False, logging_level="error")
    yield found, second
    from ray import serve

    serve.shutdown()
    ray.shutdown()
    found.shutdown()


def processes(server: Running, tries: int = 40) -> set[int]:
    """The replicas that answer."""
    client = server.client(max_retries=20)
    return {client.models.retrieve("tiny").model_extra["asrd"]["process"] for _ in range(tries)}


def test_two_nodes_are_used_and_all_requests_answered_when_a_replica_and_a_node_die(cluster: Any) -> None:
    from asrd.serve.ray_serve import deploy

    nodes, second = cluster
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    plan = Plan("tiny", "tiny", slots=4, limits=Limits(grace=5), settings={"max_new_tokens": 24})
    deploy(plan, replicas=2, port=port)
    server = Running(port, None)  # type: ignore[arg-type]
    used = processes(server)
    assert len(used) == 2, "both replicas should answer"
    assert all("Replica" in " ".join(psutil.Process(pid).cmdline()) for pid in used)
    expected = {number: alone(chat(number), 24)[0] for number in range(4, 8)}
    answers: list[tuple[int, str]] = []
    begun = threading.Barrier(5)

    def ask(first: int) -> None:
        client = server.client(max_retries=30, timeout=60)
        begun.wait()
        for turn in range(12):
            number = 4 + (first + turn) % 4
            answer = client.chat.completions.create(model="tiny", messages=chat(number), max_tokens=24)
            answers.append((number, answer.choices[0].message.content))
            time.sleep(0.1)

    threads = [threading.Thread(target=ask, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    begun.wait()
    time.sleep(1.0)
    os.kill(sorted(used)[0], signal.SIGKILL)  # a replica
    time.sleep(2.0)
    nodes.remove_node(second, allow_graceful=False)  # and a whole node
    for thread in threads:
        thread.join(200)
    assert len(answers) == 48, "every request is answered"
    assert all(text == expected[number] for number, text in answers)
    assert processes(server, 5) - used or processes(server, 5) & used
    chunks = server.client(max_retries=20).chat.completions.create(
        model="tiny", messages=chat(), max_tokens=24, stream=True, extra_body={"asrd": {"drafts": True}}
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected[4]
    with pytest.raises(Exception, match="is not supported"):
        server.client().chat.completions.create(model="tiny", messages=chat(), tools=[{"type": "function"}])  # type: ignore


# --- files of prompts ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("batch") / "prompts.jsonl"
    requests: list[Any] = [problem.question for problem in held_out(40)]
    requests[3] = {"prompt": requests[3], "seed": 9, "max_new_tokens": 24}
    requests[5] = {"prompt": "ann <|mask|>"}
    path.write_text("".join(json.dumps(request) + "\n" for request in requests), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def alone_in_one_engine(file: Path) -> list[list[int]]:
    """Tokens of every prompt, without Ray."""
    model, tokenizer = tiny()
    engine = asrd.Engine(model, tokenizer, slots=4, max_new_tokens=48, decoder="standard", temperature=1.0)
    handles = []
    for number, line in enumerate(file.read_text().splitlines()):
        request = json.loads(line)
        request = {"prompt": request} if isinstance(request, str) else request
        handles.append(engine.submit(**{"row_id": number} | request))
    list(engine.run())
    return [handle.result.tokens for handle in handles]


def start(file: Path, out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "asrd", "batch", str(file), "--out", str(out), "--workers", "2", "--batch", "4"]
    command += ["--slots", "2", *SETTINGS]
    return subprocess.Popen(command, env=os.environ | QUIET, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 200
    while (path.read_bytes().count(b"\n") if path.exists() else 0) < count:
        assert process.poll() is None, "it ended too early to be killed"
        assert time.monotonic() < end
        time.sleep(0.05)


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_killed_worker_and_a_killed_driver_lose_and_double_nothing(
    file: Path, tmp_path: Path, alone_in_one_engine: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.jsonl"
    first = start(file, tmp_path)
    wait_for_lines(path, 4, first)
    first.kill()  # the driver, as kill -9
    first.wait()
    kept = path.read_text().split("\n")[:-1]
    assert 4 <= len(kept) < 40
    second = start(file, tmp_path)
    wait_for_lines(path, len(kept) + 4, second)
    workers = [p for p in psutil.process_iter(["cmdline"]) if "MapWorker" in " ".join(p.info["cmdline"] or [])]
    assert workers
    workers[0].kill()
    assert second.wait(250) == 2, "one prompt has a mask in it and fails, which the exit code says"
    found = results(path)
    assert [record["index"] for record in found] == list(range(40)), "in order, each once"
    assert [record["tokens"] for record in found] == alone_in_one_engine
    assert set(kept) <= set(path.read_text().splitlines()), "what was there has not been decoded again"
    assert found[5]["error"].endswith("(infilling is not offered)") or "mask" in found[5]["error"]
    assert main(["batch", str(file), "--out", str(tmp_path), *SETTINGS, "--max-new-tokens", "47"]) == 2
    assert "has results of other prompts, settings or model" in capsys.readouterr().err
