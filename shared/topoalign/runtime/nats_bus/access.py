"""
The credentials for NATS, and its address without secrets.

Credentials are read from files, so that they do not appear in addresses, process lists and logs. An address with
credentials also works, and is shown without them.
"""

import ssl
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from topoalign.core.model.errors import InvalidField, clean
from topoalign.kubelet.files.reading import open_regular_file
from topoalign.runtime.settings import Access


def client_options(access: Access) -> dict[str, str]:
    """The options of the NATS client. Raises InvalidField with the name of the setting if its file cannot be used."""
    if access.nats_creds is not None:
        if b"BEGIN USER NKEY SEED" not in read_setting_file("TOPOALIGN_NATS_CREDS", access.nats_creds):
            raise InvalidField("TOPOALIGN_NATS_CREDS", "not a credentials file", "make one with `nsc generate creds`")
        return {"user_credentials": access.nats_creds}
    if access.nats_nkey is not None:
        import nkeys  # imported here, because it loads PyNaCl and is rarely needed

        try:
            nkeys.from_seed(bytearray(read_setting_file("TOPOALIGN_NATS_NKEY", access.nats_nkey).strip())).wipe()
        except (nkeys.NkeysError, ValueError) as error:
            raise InvalidField(
                "TOPOALIGN_NATS_NKEY", "not the seed of an nkey user", "put the seed, `SU…`, alone in the file"
            ) from error
        return {"nkeys_seed": access.nats_nkey}
    return {}


def tls_context(access: Access, urls: Sequence[str]) -> ssl.SSLContext | None:
    """The TLS context of connections; None without TLS. Raises InvalidField for an unusable file."""
    wanted = any(url.startswith(("tls://", "wss://")) for url in urls)
    if not wanted and access.nats_tls_ca is None and access.nats_tls_cert is None:
        return None
    for setting, file in (
        ("TOPOALIGN_NATS_TLS_CA", access.nats_tls_ca),
        ("TOPOALIGN_NATS_TLS_CERT", access.nats_tls_cert),
        ("TOPOALIGN_NATS_TLS_KEY", access.nats_tls_key),
    ):
        if file is not None:
            read_setting_file(setting, file)
    setting = "TOPOALIGN_NATS_TLS_CA"
    try:
        context = ssl.create_default_context(cafile=access.nats_tls_ca)
        setting = "TOPOALIGN_NATS_TLS_CERT"
        if access.nats_tls_cert is not None:
            context.load_cert_chain(access.nats_tls_cert, access.nats_tls_key)
    except ssl.SSLError as error:
        raise InvalidField(setting, clean(str(error), 200), "give a PEM file, and the key that fits it") from error
    return context


def read_setting_file(setting: str, file: str) -> bytes:
    """The text of a file that a setting names. Raises InvalidField with the setting."""
    try:
        with open_regular_file(Path(file)) as readable:
            return readable.read()
    except OSError as error:
        raise InvalidField(
            setting, f"{clean(file, 200)!r}: {error.strerror}", "name a file that this user can read"
        ) from error


def split_addresses(url: str) -> list[str]:
    """The servers of a comma-separated list. Raises InvalidField."""
    urls = [part.strip() for part in url.split(",") if part.strip()]
    urls = [part if "://" in part else f"nats://{part}" for part in urls]
    for part in urls:
        try:
            parts = urlsplit(part)
            valid = parts.scheme in ("nats", "tls", "ws", "wss") and bool(parts.hostname) and parts.port != 0
            valid &= parts.scheme in ("ws", "wss") or not (parts.path.strip("/") or parts.query or parts.fragment)
        except ValueError:
            valid = False
        if not valid:
            raise InvalidField(
                "TOPOALIGN_NATS_URL", f"{hide_credentials(part)!r} is not an address", "write nats://host:4222"
            )
    if not urls:
        raise InvalidField("TOPOALIGN_NATS_URL", "empty", "write nats://host:4222")
    return urls


def hide_credentials(url: str) -> str:
    """Addresses without user and password. An invalid port is hidden, because it may be a part of a password."""
    parts = []
    for part in url.split(","):
        scheme, separator, rest = part.strip().rpartition("://")
        host, colon, port = rest.rpartition("@")[2].rpartition(":")
        if colon and not port.isdigit() and not port.endswith("]"):
            port = "…"
        parts.append(f"{scheme}{separator}{host}{colon}{port}")
    return clean(",".join(parts), 300)
