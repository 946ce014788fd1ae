"""`asrd serve` as a process of its own, and its memory over time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil


class Server:
    """A server that answers at `port`.

    memory: (seconds since it answered, resident megabytes), about once a second
    """

    def __init__(self, port: int, process: subprocess.Popen[bytes]) -> None:
        self.port, self.begun, self.memory = port, time.perf_counter(), list[tuple[float, float]]()
        self._process = psutil.Process(process.pid)
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def cpu(self) -> float:
        """Seconds of processor time that it has used."""
        return float(sum(self._process.cpu_times()[:2]))

    @property
    def now(self) -> float:
        """Seconds since it answered."""
        return time.perf_counter() - self.begun

    def largest(self, since: float) -> float:
        """Most megabytes that it has had since then."""
        return max((size for moment, size in self.memory if moment >= since), default=self.memory[-1][1])

    def _watch(self) -> None:
        while not self._ended.is_set():
            self.memory.append((self.now, self._process.memory_info().rss / 1e6))
            self._ended.wait(1.0)

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()


@contextmanager
def server(slots: int) -> Iterator[Server]:
    """`asrd serve` on a free port of loopback, on one thread."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "asrd", "serve", "--port", str(port), "--slots", str(slots)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        while not _answers(port):
            if process.poll() is not None:
                raise RuntimeError(f"asrd serve ended with exit code {process.returncode}")
            time.sleep(0.2)
        running = Server(port, process)
        yield running
        running.end()
    finally:
        process.terminate()
        process.wait(60)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
