"""Clients that take long or need torchvision: as the others, and asked for by -m slow."""

from __future__ import annotations

import client_checks
import pytest
from client_checks import Ran, cases
from client_runs import MORE, Client

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(420)]


@pytest.mark.parametrize(("client", "mode"), cases(MORE, "run", "observe"))
def test_a_client_sees_the_samples_that_torchs_loader_gives(client: Client, mode: str, ran: Ran) -> None:
    client_checks.sees_torchs_samples(client, mode, ran)


@pytest.mark.parametrize(("client", "mode"), cases(MORE, "run", "observe"))
def test_a_clients_run_is_recorded_and_keeps_the_protocol(client: Client, mode: str, ran: Ran) -> None:
    client_checks.is_recorded(client, mode, ran)


@pytest.mark.parametrize("client", MORE, ids=str)
def test_the_readme_says_what_came(client: Client, ran: Ran) -> None:
    client_checks.is_told(client, ran)
