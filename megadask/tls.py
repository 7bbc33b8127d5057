"""Who wants to reach a cluster with TLS needs certificates; Dask's own error does not say so."""

from __future__ import annotations

from distributed import Security

from megadask.planner.errors import ConfigError


def check_security(address: str, security: Security | None) -> None:
    """Raise ConfigError for a ``tls://`` address without certificates, here or in Dask's config."""
    if not address.startswith("tls://"):
        return
    used = Security() if security is None else security
    if used.get_connection_args("client").get("ssl_context") is None:
        raise ConfigError(
            "connect(security=) for a cluster with TLS",
            got=f"{address}, and no certificate",
            remedy="Pass distributed.Security(tls_ca_file=, tls_client_cert=, tls_client_key=), "
            "or set distributed.comm.tls in Dask's configuration.",
        )
