"""On Ray: replicas and workers are killed, an engine fails, a node disappears, the driver dies; nothing is lost,
doubled or changed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import yaml

import asrd
from asrd.cli import main
from asrd.lab.tiny.task import held_out
from asrd.serve.limits import Limits
from asrd.serve.plan import Plan
from asrd.serve.ray_serve import ENVIRONMENT, deploy
from tests.support.server import Running, alone, chat, tiny

pytestmark = pytest.mark.slow
QUIET = ENVIRONMENT | {"OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0"}
PATIENCE = 600.0  # seconds; a busy machine takes minutes to start Ray's processes
LONG = {"decoder": "standard", "block_length": 32}
KEY = "correct-horse-battery"
SETTINGS = ["--max-new-tokens", "48", "--decoder", "standard", "--temperature", "1"]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two Ray nodes on this host."""
    ray = pytest.importorskip("ray", reason="Ray is not installed (pip install 'asrd[ray]')")
    from ray import serve
    from ray.cluster_utils import Cluster

    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = found.add_node(num_cpus=1)
    ray.init(address=found.address, log_to_driver=False, logging_level="error")
    yield found, second
    serve.shutdown()
    ray.shutdown()
    found.shutdown()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def processes(server: Running, tries: int = 40) -> set[int]:
    """The replicas that answer."""
    client = server.client(max_retries=20, api_key=KEY)
    return {client.models.retrieve("tiny").model_extra["asrd"]["process"] for _ in range(tries)}


class Askers:
    """Four clients that ask again and again, and try again as the official client does; they end with the block."""

    def __init__(self, server: Running, expected: dict[int, str], count: int = 4) -> None:
        self.server, self.expected, self.count = server, expected, 0
        self.wrong: list[tuple[int, str]] = []
        self.failed: list[Exception] = []
        self.ending = threading.Event()
        self.threads = [threading.Thread(target=self._ask, args=(first,)) for first in range(count)]

    def __enter__(self) -> Askers:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ending.set()
        for thread in self.threads:
            thread.join(PATIENCE)

    def _ask(self, turn: int) -> None:
        client = self.server.client(max_retries=100, timeout=60, api_key=KEY)
        numbers = list(self.expected)
        while not self.ending.is_set():
            number, turn = numbers[turn % len(numbers)], turn + 1
            try:
                answer = client.chat.completions.create(model="tiny", messages=chat(number), max_tokens=24)
            except Exception as error:
                self.failed.append(error)
                return
            if answer.choices[0].message.content != self.expected[number]:
                self.wrong.append((number, answer.choices[0].message.content))
            self.count += 1

    def wait_for(self, more: int) -> None:
        """Until so many more answers are there."""
        enough = self.count + more
        until(lambda: self.count >= enough or self.failed)
        assert self.failed == []


def until(true: Callable[[], Any], seconds: float = 0) -> None:
    end = time.monotonic() + (seconds or PATIENCE)
    while not true():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.1)


def test_two_nodes_are_used_and_all_requests_answered_when_a_replica_and_a_node_die(cluster: Any) -> None:
    nodes, second = cluster
    port = free_port()
    plan = Plan("tiny", "tiny", slots=4, limits=Limits(grace=5), settings={"max_new_tokens": 24})
    deploy(plan, replicas=2, port=port)
    server = Running(port, None)  # type: ignore[arg-type]
    used = processes(server)
    assert len(used) == 2, "both replicas should answer"
    assert all("Replica" in " ".join(psutil.Process(pid).cmdline()) for pid in used)
    expected = {number: alone(chat(number), 24)[0] for number in range(4, 8)}
    with Askers(server, expected) as askers:
        askers.wait_for(8)
        os.kill(sorted(used)[0], signal.SIGKILL)  # a replica
        askers.wait_for(16)
        nodes.remove_node(second, allow_graceful=False)  # and a whole node
        askers.wait_for(32)
    assert askers.wrong == []
    assert askers.failed == []
    chunks = server.client(max_retries=20).chat.completions.create(
        model="tiny", messages=chat(), max_tokens=24, stream=True, extra_body={"asrd": {"drafts": True}}
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected[4]
    with pytest.raises(ValueError, match=f"already runs on this cluster, at 127.0.0.1:{port}"):
        deploy(plan, replicas=1, port=free_port())
    with pytest.raises(Exception, match="is not supported"):
        server.client().chat.completions.create(model="tiny", messages=chat(), tools=[{"type": "function"}])  # type: ignore


def test_a_server_that_cannot_be_made_says_why_and_leaves_nothing_on_the_cluster(cluster: Any) -> None:
    from ray import serve

    wrong = Plan("tiny", "tiny", settings={"decoder": "native"})
    with pytest.raises(ValueError, match=r"^decoder='native' is for block-diffusion models.*LLaDA and Dream$"):
        deploy(wrong, replicas=2, port=free_port())
    assert serve.status().applications == {}


@dataclass(frozen=True)
class Fragile(Plan):
    """A server whose engine fails as long as a file is there."""

    file: str = ""

    def make(self) -> tuple[Any, Any]:
        service, app = super().make()
        make = service.worker.make

        def made(observer: Any) -> Any:
            engine = make(observer)
            step = engine.step

            def fragile() -> Any:
                if os.path.exists(self.file):
                    raise RuntimeError("the engine is broken")
                return step()

            engine.step = fragile
            return engine

        service.worker.make, service.worker.engine = made, made(service.worker._observe)
        return service, app


def test_a_replica_whose_engine_fails_again_and_again_is_replaced(cluster: Any, tmp_path: Path) -> None:
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # replicas need not find the tests
    port, file = free_port(), tmp_path / "broken"
    deploy(Fragile("tiny", "tiny", slots=2, file=str(file)), replicas=1, port=port)
    server = Running(port, None)  # type: ignore[arg-type]
    (first,) = processes(server, 3)
    ask = server.client().chat.completions.create
    file.touch()
    for _ in range(3):
        with pytest.raises(openai.InternalServerError, match="RuntimeError in the engine"):
            ask(model="tiny", messages=chat(), max_tokens=24)
    file.unlink()
    with pytest.raises(openai.InternalServerError, match="the engine is not running"):
        ask(model="tiny", messages=chat())
    until(lambda: first not in processes(server, 1))  # Ray asks every 5 seconds, three times
    answer = server.client(max_retries=50).chat.completions.create(model="tiny", messages=chat(), max_tokens=24)
    assert answer.choices[0].message.content == alone(chat(), 24)[0]


def test_the_cluster_of_the_docs_is_one_for_ray() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    config = yaml.safe_load(block)
    validate_config(prepare_config(config))
    config["head_node_typ"] = config.pop("head_node_type")
    with pytest.raises(Exception, match="head_node_typ"):
        validate_config(prepare_config(config))


# --- the command line ------------------------------------------------------------------------------------------------


def start(out: Path, *words: str) -> subprocess.Popen[bytes]:
    """The command line, with a cluster that is not there in the environment: those of its own must not look for it."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RAY_ADDRESS": "127.0.0.1:1", "ASRD_API_KEY": KEY}
    with (out / "output.txt").open("ab") as output:
        return subprocess.Popen([sys.executable, "-m", "asrd", *words], env=environment, stdout=output, stderr=output)


def output(out: Path) -> str:
    return (out / "output.txt").read_text(encoding="utf-8", errors="replace")


def descendants(process: subprocess.Popen[bytes], name: str) -> list[psutil.Process]:
    """The processes of its Ray cluster whose title has this name."""
    return [p for p in psutil.Process(process.pid).children(recursive=True) if name in " ".join(p.cmdline())]


def test_asrd_serve_on_ray_scales_survives_a_kill_and_ends_gracefully(tmp_path: Path) -> None:
    port = free_port()
    words = ["--ray", "--replicas", "1", "--max-replicas", "2", "--slots", "1", "--max-new-tokens", "24"]
    process = start(tmp_path, "serve", "tiny", "--port", str(port), *words)
    try:
        until(lambda: "tiny is served at" in output(tmp_path) or process.poll() is not None)
        assert process.poll() is None, output(tmp_path)
        server = Running(port, None)  # type: ignore[arg-type]
        with pytest.raises(openai.AuthenticationError):
            server.client().models.list()
        (first,) = processes(server, 5)
        expected = {number: alone(chat(number), 24)[0] for number in range(4, 8)}
        with Askers(server, expected, 8) as askers:
            until(
                lambda: len(processes(server, 10)) == 2 or askers.failed
            )  # Ray waits half a minute before it adds one
            askers.wait_for(16)
            os.kill(first, signal.SIGKILL)
            askers.wait_for(16)
            until(lambda: len(processes(server, 10) - {first}) == 2 or askers.failed)
        assert (askers.wrong, askers.failed) == ([], [])
        leave_in_mid_answer(server)
        texts: list[str] = []
        body: Any = {"model": "tiny", "messages": chat(), "max_tokens": 200, "extra_body": {"asrd": LONG}}

        def stream() -> None:
            chunks = server.client(api_key=KEY).chat.completions.create(stream=True, **body)
            texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))

        threads = [threading.Thread(target=stream) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(1.0)
        replicas = descendants(process, "Replica")
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(PATIENCE)
        assert texts == [alone(chat(), 200, **LONG)[0]] * 2, "what ran at the signal was not finished"
        assert process.wait(PATIENCE) == 0, output(tmp_path)
        psutil.wait_procs(replicas, 30)
        assert replicas
        assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in replicas), "replicas were left"
    finally:
        process.kill()


def leave_in_mid_answer(server: Running) -> None:
    """A client that goes away is cancelled through Ray's proxy as well."""

    def cancelled() -> float:
        return sum(value("asrd_cancelled_total", server).values())

    before = cancelled()
    stream = server.client(api_key=KEY).chat.completions.create(
        model="tiny", messages=chat(), max_tokens=256, stream=True, extra_body={"asrd": LONG}
    )
    next(iter(stream))
    stream.close()
    until(lambda: cancelled() > before)


def value(name: str, server: Running, tries: int = 20) -> dict[float, float]:
    """What each replica's /metrics says of a name, by when its process was started."""
    found = {}
    for _ in range(tries):
        request = urllib.request.Request(f"{server.url}/metrics", headers={"Authorization": f"Bearer {KEY}"})
        with urllib.request.urlopen(request) as answer:
            lines = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[:1] != "#")
        found[float(lines["asrd_cancelled_created"])] = float(lines[name])
    return found


# --- files of prompts ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("batch") / "prompts.jsonl"
    requests: list[Any] = [problem.question for problem in held_out(40)]
    requests[3] = {"prompt": requests[3], "seed": 9, "max_new_tokens": 24}
    requests[5] = {"prompt": "ann", "max_new_tokens": 0}
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


def begin(file: Path, out: Path) -> subprocess.Popen[bytes]:
    words = ["batch", str(file), "--out", str(out), "--workers", "2", "--batch", "4", "--slots", "2", *SETTINGS]
    return start(out, *words)


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    def enough() -> bool:
        assert process.poll() is None, "it ended too early to be killed: " + output(path.parent)
        return path.exists() and path.read_bytes().count(b"\n") >= count

    until(enough)


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_killed_worker_and_a_killed_driver_lose_and_double_nothing(
    file: Path, tmp_path: Path, alone_in_one_engine: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.jsonl"
    first = begin(file, tmp_path)
    wait_for_lines(path, 4, first)
    first.kill()  # the driver, as kill -9
    first.wait()
    kept = path.read_text().split("\n")[:-1]
    assert 4 <= len(kept) < 40
    second = begin(file, tmp_path)
    wait_for_lines(path, len(kept) + 4, second)
    workers = descendants(second, "MapWorker")
    assert workers
    workers[0].kill()
    assert second.wait(PATIENCE) == 2, "one prompt cannot be decoded, which the exit code says"
    assert "1 of 40 prompts could not be decoded" in output(tmp_path), "whether before the kill or after it"
    found = results(path)
    assert [record["index"] for record in found] == list(range(40)), "in order, each once"
    assert [record["tokens"] for record in found] == alone_in_one_engine
    assert set(kept) <= set(path.read_text().splitlines()), "what was there has not been decoded again"
    assert "max_new_tokens=0 is out of range" in found[5]["error"]
    assert main(["batch", str(file), "--out", str(tmp_path), *SETTINGS, "--max-new-tokens", "47"]) == 2
    assert "has results of other prompts, settings or model" in capsys.readouterr().err
