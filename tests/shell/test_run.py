"""Running the server: the port, Ctrl-C, the line of throughput."""

import dataclasses
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from pagedjax.engine.stats import StatsKeeper
from pagedjax.server.run import address, bind, throughput_line

ROOT = Path(__file__).resolve().parents[2]
SERVER = """
from pagedjax.server.run import address, bind, serve
from tests.shell.tiny import make_engine
sock = bind("127.0.0.1", 0)
print(address(sock), flush=True)
serve(make_engine(), sock, log=print)
print("stopped", flush=True)
"""


@pytest.fixture
def process():
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


def wait_until_up(process):
    url = process.stdout.readline().strip()
    deadline = time.monotonic() + 60
    while True:
        assert process.poll() is None, process.stderr.read()
        try:
            assert httpx.get(f"{url}/health").status_code == 200
            return
        except httpx.TransportError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_ctrl_c_stops_cleanly(process):
    wait_until_up(process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "stopped" in out
    assert "Traceback" not in err


def test_second_ctrl_c_stops_at_once(process):
    wait_until_up(process)
    process.send_signal(signal.SIGINT)
    assert "once more" in process.stderr.readline() + process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=5)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_port_in_use_is_said_plainly():
    with bind("127.0.0.1", 0) as sock:
        sock.listen()
        port = sock.getsockname()[1]
        assert address(sock) == f"http://127.0.0.1:{port}"
        with pytest.raises(OSError, match=f"port {port} on 127.0.0.1 is in use"):
            bind("127.0.0.1", port)


def test_throughput_line():
    before = StatsKeeper(num_blocks=100, block_size=16).snapshot(num_queued=0)
    after = dataclasses.replace(
        before,
        num_running=3,
        num_waiting=1,
        num_free_blocks=60,
        num_evictable_blocks=30,
        prompt_tokens=200,
        cached_tokens=50,
        output_tokens=100,
    )
    assert throughput_line(before, after, 5.0) == (
        "running 3, waiting 1 | prompt 40.0 tok/s (25% cached), output 20.0 tok/s | "
        "blocks 10 used, 30 cached of 100"
    )


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--port", "99999", "port must be from 0 to 65535"),
        ("--max-body-bytes", "0", "max_body_bytes must be at least 1"),
    ],
)
def test_bad_options_of_the_server_are_said_plainly(monkeypatch, capsys, flag, value, words):
    import serve_local

    monkeypatch.setattr(sys, "argv", ["serve_local.py", flag, value])
    with pytest.raises(SystemExit) as stopped:
        serve_local.main()
    assert stopped.value.code == 2
    assert words in " ".join(capsys.readouterr().err.replace("│", " ").split())
