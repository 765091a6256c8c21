"""Programs of several ranks see the same samples on minidl's loader as on torch's, and are recorded in one trace."""

from __future__ import annotations

import client_checks
import pytest
from client_checks import Ran, cases, each
from client_runs import SEVERAL_RANKS, Client

pytestmark = [pytest.mark.live, pytest.mark.timeout(420)]  # two programs, each bounded by client_runs.BOUND


@pytest.mark.parametrize(("client", "mode"), cases(SEVERAL_RANKS, "direct", "run", "observe"))
def test_a_client_sees_the_samples_that_torchs_loader_gives(client: Client, mode: str, ran: Ran) -> None:
    client_checks.sees_torchs_samples(client, mode, ran)


@pytest.mark.parametrize(("client", "mode"), cases(SEVERAL_RANKS, "run", "observe"))
def test_a_clients_run_is_recorded_and_keeps_the_protocol(client: Client, mode: str, ran: Ran) -> None:
    client_checks.is_recorded(client, mode, ran)


@pytest.mark.slow
@pytest.mark.parametrize("client", each(tuple(client for client in SEVERAL_RANKS if "direct" in client.modes)))
def test_a_client_sees_the_same_samples_on_the_one_page(client: Client, ran: Ran) -> None:
    client_checks.sees_torchs_samples(client, "mini", ran)


@pytest.mark.parametrize("client", each(SEVERAL_RANKS))
def test_the_readme_says_what_came(client: Client, ran: Ran) -> None:
    client_checks.is_told(client, ran)
