"""The served page: at 127.0.0.1 only, and only to requests that name it so."""

from __future__ import annotations

import http.client
import threading

import pytest

from minidl.companion.serve import server_of


@pytest.mark.live
def test_the_page_is_served_to_this_machine_alone() -> None:
    with server_of("<p>page</p>") as server:
        assert server.server_address[0] == "127.0.0.1"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            answers = []
            for path, host in (("/", f"127.0.0.1:{server.server_port}"), ("/x", f"localhost:{server.server_port}"),
                               ("/", "elsewhere.example")):  # fmt: skip
                connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
                connection.request("GET", path, headers={"Host": host})
                answer = connection.getresponse()
                answers.append((answer.status, answer.read()))
                assert answer.headers["Content-Security-Policy"].endswith("frame-ancestors 'none'")
                assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
                connection.close()
        finally:
            server.shutdown()
            thread.join(20)
    assert [status for status, _ in answers] == [200, 404, 403]
    assert answers[0][1] == b"<p>page</p>"
