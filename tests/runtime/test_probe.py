"""A health check tells a process that is ready from one that is not, is late, or is something else, at little cost."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from topoalign.cli import health_check, root
from topoalign.cli.health_check import LONGEST_ANSWER, request_page

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok\n"
FAILING = b"HTTP/1.1 503 Service Unavailable\r\n\r\n[-] bus: not connected\nnot ready\n"


@contextmanager
def answering(answer: bytes | None, host: str = "127.0.0.1") -> Iterator[tuple[int, list[bytes]]]:
    """A server that sends each connection this answer (None: nothing) and closes it; its port, and what it received."""
    heard: list[bytes] = []
    kept: list[socket.socket] = []
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                heard.append(connection.recv(4096))
                if answer is None:
                    kept.append(connection)
                else:
                    connection.sendall(answer)
                    connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1], heard
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in kept:
                connection.close()


def test_a_status_of_200_is_ready_and_any_other_is_not_with_the_reasons() -> None:
    with answering(OK) as (port, heard):
        good = request_page("127.0.0.1", port, "/readyz", 5)
    with answering(FAILING) as (port, _):
        bad = request_page("127.0.0.1", port, "/readyz", 5)

    assert (True, "ok\n") == good
    assert (False, "[-] bus: not connected\nnot ready\n") == bad
    assert heard[0].startswith(b"GET /readyz HTTP/1.1\r\nHost: 127.0.0.1:")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_host_that_stands_for_all_addresses_is_asked_at_the_loopback(host: str) -> None:
    with answering(OK, "::1" if host == "::" else "127.0.0.1") as (port, _):
        assert (True, "ok\n") == request_page(host, port, "/readyz", 5)


def test_a_peer_that_accepts_and_is_silent_ends_at_the_deadline() -> None:
    """A server that accepts the connection and sends nothing is not waited for beyond the deadline."""
    with answering(None) as (port, _), pytest.raises(TimeoutError):
        request_page("127.0.0.1", port, "/readyz", 0.01)


def test_an_answer_without_end_is_read_no_further_than_its_bound() -> None:
    with answering(OK + b"x" * (2 * LONGEST_ANSWER)) as (port, _):
        ready, text = request_page("127.0.0.1", port, "/readyz", 5)

    assert ready
    assert len(text) <= LONGEST_ANSWER


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 abc\r\n\r\n", b"\xff\xfe"])
def test_what_is_no_http_server_is_not_ready(answer: bytes) -> None:
    with answering(answer) as (port, _), pytest.raises(ValueError, match="is no HTTP server"):
        request_page("127.0.0.1", port, "/readyz", 5)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8222", ("127.0.0.1", 8222, "/readyz")),
        ("http://127.0.0.1:8222/", ("127.0.0.1", 8222, "/")),
        ("http://nats:8222/healthz?js-enabled-only=true", ("nats", 8222, "/healthz?js-enabled-only=true")),
        ("http://[::1]:80/livez", ("::1", 80, "/livez")),
        ("https://127.0.0.1:8222/", None),
        ("http://127.0.0.1", None),
        ("http://127.0.0.1:0/", None),
        ("http://127.0.0.1:65536/", None),
        ("http://:80/", None),
        ("http://h:80/a b", None),
        ("http://h:80/\r\nX: y", None),
        ("http://h:٣/", None),
    ],
)
def test_a_url_has_host_port_optional_path_and_nothing_else(url: str, expected: tuple[str, int, str] | None) -> None:
    """A URL has a host, a port and an optional path, and nothing that would break a request."""
    assert expected == health_check.page_at(url, "/readyz")


def test_health_asks_the_service_of_the_environment_and_prints_what_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOPOALIGN_HTTP_HOST", "0.0.0.0")
    with answering(FAILING.replace(b"bus", b"b\x1b[31mus")) as (port, heard):
        monkeypatch.setenv("TOPOALIGN_HTTP_PORT", str(port))
        status = health_check.quick(["health", "--live"])

    out, err = capsys.readouterr()
    assert 69 == status
    assert "" == out
    assert err.splitlines()[0] == f"http://0.0.0.0:{port}/livez: [-] b?[31mus: not connected"
    assert heard[0].startswith(b"GET /livez ")


def test_the_command_line_gives_the_answers_of_the_quick_way(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(OK) as (port, _):
        statuses = (
            health_check.quick(["health", f"http://127.0.0.1:{port}"]),
            root.run_command_line(["health", f"http://127.0.0.1:{port}"]),
        )
    with answering(FAILING) as (port, _):
        failing = root.run_command_line(["health", f"http://127.0.0.1:{port}", "--json"])

    out = capsys.readouterr().out.splitlines()
    assert (0, 0) == statuses
    assert ["ok", "ok"] == out[:2]
    assert 69 == failing
    assert "NotReady" == json.loads(out[2])["error"]["code"]


@pytest.mark.parametrize("arguments", [["health", "--help"], ["health", "x"], ["health", "a", "b"], ["topo"], []])
def test_what_is_no_plain_health_check_is_left_to_the_command_line(arguments: list[str]) -> None:
    assert None is health_check.quick(arguments)


def test_a_health_check_without_a_port_says_which_setting_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TOPOALIGN_HTTP_PORT", raising=False)

    assert None is health_check.quick(["health"])
    assert 5 == root.run_command_line(["health"])
    assert "TOPOALIGN_HTTP_PORT" in capsys.readouterr().err


def test_a_health_check_imports_no_library_and_not_the_command_line() -> None:
    script = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "sys.argv = ['topoalign', 'health', sys.argv[1]]\n"
        "import topoalign.cli\n"
        "try:\n"
        "    topoalign.cli.main()\n"
        "finally:\n"
        "    print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))\n"
    )
    with answering(OK) as (port, _):
        done = subprocess.run(
            [sys.executable, "-I", "-c", script, f"http://127.0.0.1:{port}"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )

    said, imported = done.stdout.splitlines()
    assert "ok" == said
    assert set() == set(imported.split()) & {"click", "msgspec", "re", "typing", "urllib", "http", "ssl", "stringprep"}
