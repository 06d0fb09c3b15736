"""Address and credentials of the API server, for the operator's client and for kopf.

As in kubectl, a named kubeconfig (argument or ``KUBECONFIG``) comes first, then the pod's service account, then
``~/.kube/config``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kopf
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

DEFAULT_KUBECONFIG = "~/.kube/config"


class NoCluster(Exception):
    """There is no configuration of an API server, or it cannot be read."""


async def load(kubeconfig: str | None = None, environ: Mapping[str, str] = os.environ) -> Configuration:
    """The connection's configuration; a service account's token, which the kubelet rotates, is read again every minute.

    Raises:
        NoCluster: names the place that was searched.
    """
    named = kubeconfig or environ.get("KUBECONFIG") or None
    # Without trust_env: proxies come from the configuration, not from environment variables.
    configuration = Configuration(client_session_kwargs={"trust_env": False}, connection_pool_maxsize=64)
    try:
        if named is None and "KUBERNETES_SERVICE_HOST" in environ:
            load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        else:
            await load_kube_config(  # type: ignore[no-untyped-call]
                config_file=_existing(named or DEFAULT_KUBECONFIG),
                client_configuration=configuration,
                persist_config=False,
            )
    except ConfigException as error:
        raise NoCluster(f"{named or 'the pod service account'}: {error}") from error
    return configuration


async def for_kopf(configuration: Configuration) -> kopf.ConnectionInfo:
    """The same connection for kopf, which requests it again when the server rejects the token."""
    authorization = await configuration.get_api_key_with_prefix("BearerToken") or ""
    scheme, _, token = authorization.partition(" ")
    credentials: dict[str, Any] = {"scheme": scheme.capitalize(), "token": token} if token else {}
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        proxy_url=configuration.proxy,
        **credentials,
    )


def _existing(kubeconfig: str) -> str:
    path = Path(kubeconfig).expanduser()
    if not path.is_file():
        raise NoCluster(f"no kubeconfig at {path} and no service account in this pod; set KUBECONFIG")
    return str(path)
