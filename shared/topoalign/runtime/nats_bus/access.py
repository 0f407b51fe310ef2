"""
The credentials for NATS, and its address without secrets.

Credentials come from files, so that they are in no address, no process list and no log. An address with
credentials works too, and is shown without them.
"""

import ssl
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from topoalign.core.model.errors import InvalidField, clean
from topoalign.kubelet.files.reading import open_regular_file
from topoalign.runtime.settings import RuntimeSettings


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """Paths of the files with our identity and the trusted authorities. They are read for every connection, so that renewed
    files are used."""

    creds: str | None = None
    """A `.creds` file: JWT and seed, for servers with operators and accounts."""
    nkey: str | None = None
    """A file with the seed of an nkey user (`SU…`)."""
    tls_ca: str | None = None
    """PEM of the authority that signed the server's certificate. Without it the machine's own authorities count."""
    tls_cert: str | None = None
    """PEM of our own certificate, where the server asks for one."""
    tls_key: str | None = None
    """PEM of its key; without it the key is in `tls_cert`."""

    @classmethod
    def of(cls, settings: RuntimeSettings) -> "Access":
        """The access that the settings describe."""
        return cls(
            creds=settings.nats_creds,
            nkey=settings.nats_nkey,
            tls_ca=settings.nats_tls_ca,
            tls_cert=settings.nats_tls_cert,
            tls_key=settings.nats_tls_key,
        )

    def options(self) -> dict[str, str]:
        """The options of the NATS client. Raises InvalidField that names the setting whose file cannot be used."""
        if self.creds is not None:
            if b"BEGIN USER NKEY SEED" not in read_setting_file("TOPOALIGN_NATS_CREDS", self.creds):
                raise InvalidField(
                    "TOPOALIGN_NATS_CREDS", "not a credentials file", "make one with `nsc generate creds`"
                )
            return {"user_credentials": self.creds}
        if self.nkey is not None:
            import nkeys  # here: it loads a library of its own, and few servers want it

            try:
                nkeys.from_seed(bytearray(read_setting_file("TOPOALIGN_NATS_NKEY", self.nkey).strip())).wipe()
            except (nkeys.NkeysError, ValueError) as error:
                raise InvalidField(
                    "TOPOALIGN_NATS_NKEY", "not the seed of an nkey user", "put the seed, `SU…`, alone in the file"
                ) from error
            return {"nkeys_seed": self.nkey}
        return {}

    def tls(self, urls: Sequence[str]) -> ssl.SSLContext | None:
        """The TLS context of connections; None without TLS. Raises InvalidField for an unusable file."""
        wanted = any(url.startswith(("tls://", "wss://")) for url in urls)
        if not wanted and self.tls_ca is None and self.tls_cert is None:
            return None
        for setting, file in (
            ("TOPOALIGN_NATS_TLS_CA", self.tls_ca),
            ("TOPOALIGN_NATS_TLS_CERT", self.tls_cert),
            ("TOPOALIGN_NATS_TLS_KEY", self.tls_key),
        ):
            if file is not None:
                read_setting_file(setting, file)
        setting = "TOPOALIGN_NATS_TLS_CA"
        try:
            context = ssl.create_default_context(cafile=self.tls_ca)
            setting = "TOPOALIGN_NATS_TLS_CERT"
            if self.tls_cert is not None:
                context.load_cert_chain(self.tls_cert, self.tls_key)
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
    """An address, or several, without user and password. What is no port there may be a part of a password."""
    parts = []
    for part in url.split(","):
        scheme, separator, rest = part.strip().rpartition("://")
        host, colon, port = rest.rpartition("@")[2].rpartition(":")
        if colon and not port.isdigit() and not port.endswith("]"):
            port = "…"
        parts.append(f"{scheme}{separator}{host}{colon}{port}")
    return clean(",".join(parts), 300)
