"""An attacker without the run's token at the coordinator's port."""

from __future__ import annotations

from attack_list import admitted

from scalerl_api import endpoints

TOKEN = "secret"
"""As ``conftest`` writes it."""
OF_OTHERS = {endpoints.WEIGHTS_JOIN, endpoints.WEIGHTS_RECEIVE, endpoints.WEIGHTS_PROBE}
SERVED = {
    path
    for name, path in vars(endpoints).items()
    if name.isupper() and path.startswith("/v1/") and path not in OF_OTHERS
}


async def test_nothing_but_probes_answers_without_the_token(local):
    assert await admitted(local.url, TOKEN, of_server=SERVED) == []
