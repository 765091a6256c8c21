"""Other people's programs see the same samples on minidl's loader as on torch's, and are recorded."""

from __future__ import annotations

import client_checks
import pytest
from client_checks import Ran, cases, each
from client_runs import ONE_PROCESS, Client
from sizes import slow

pytestmark = [pytest.mark.live, pytest.mark.timeout(420)]  # two programs, each bounded by client_runs.BOUND


@pytest.mark.parametrize(("client", "mode"), cases(ONE_PROCESS, "direct", "run", "observe"))
def test_a_client_sees_the_samples_that_torchs_loader_gives(client: Client, mode: str, ran: Ran) -> None:
    client_checks.sees_torchs_samples(client, mode, ran)


@pytest.mark.parametrize(("client", "mode"), cases(ONE_PROCESS, "run", "observe"))
def test_a_clients_run_is_recorded_and_keeps_the_protocol(client: Client, mode: str, ran: Ran) -> None:
    client_checks.is_recorded(client, mode, ran)


@pytest.mark.parametrize(("name", "mode"), [("webdataset", "run arena"), *slow(("torchdata", "observe arena"))])
def test_a_client_sees_the_same_samples_with_slabs(name: str, mode: str, ran: Ran) -> None:
    """By minidl's loader, and by a loader of torch's kind; `client_runs` has these modes for all of them."""
    client = next(client for client in ONE_PROCESS if client.name == name)
    client_checks.sees_torchs_samples(client, mode, ran)
    client_checks.is_recorded(client, mode, ran)


@pytest.mark.slow
@pytest.mark.parametrize("client", each(tuple(client for client in ONE_PROCESS if "direct" in client.modes)))
def test_a_client_sees_the_same_samples_on_the_one_page(client: Client, ran: Ran) -> None:
    client_checks.sees_torchs_samples(client, "mini", ran)


@pytest.mark.parametrize("client", each(ONE_PROCESS))
def test_the_readme_says_what_came(client: Client, ran: Ran) -> None:
    client_checks.is_told(client, ran)
