"""Certificates made by `openssl`, for any time of validity."""

import shutil
import subprocess
from datetime import datetime
from pathlib import Path

import pytest

CONFIG = """
[ca]
default_ca = authority
[authority]
database = {folder}/index.txt
serial = {folder}/serial
new_certs_dir = {folder}
default_md = sha256
policy = any
x509_extensions = leaf
unique_subject = no
[any]
commonName = supplied
[leaf]
subjectAltName = IP:127.0.0.1
basicConstraints = CA:FALSE
"""


class Authority:
    """A certificate authority in a folder of its own; skips the test where there is no `openssl`."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("no openssl on this machine")
        folder.mkdir(parents=True)
        self.folder, self.certificate = folder, folder / "ca.crt"
        (folder / "index.txt").touch()
        (folder / "serial").write_text("01")
        (folder / "openssl.cnf").write_text(CONFIG.format(folder=folder))
        subject = ["-subj", f"/CN={folder.name}", "-days", "3650"]
        self.openssl("req", "-x509", *new_key(folder / "ca.key"), *subject, "-out", str(self.certificate))

    def openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True)

    def issue(self, to: Path, name: str, until: datetime) -> None:
        """Writes `tls.crt` and `tls.key` there, each replaced at once."""
        to.mkdir(exist_ok=True)
        key, asked, made = (self.folder / f"{name}{ending}" for ending in (".key", ".csr", ".crt"))
        self.openssl("req", *new_key(key), "-subj", f"/CN={name}", "-out", str(asked))
        dates = ["-startdate", "20200101000000Z", "-enddate", f"{until:%Y%m%d%H%M%SZ}"]
        signing = ["-cert", str(self.certificate), "-keyfile", "ca.key", "-config", "openssl.cnf", "-batch", "-notext"]
        self.openssl("ca", *signing, *dates, "-in", str(asked), "-out", str(made))
        key.replace(to / "tls.key")
        made.replace(to / "tls.crt")


def new_key(path: Path) -> list[str]:
    """The options of a new key, small and quick to make."""
    return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(path)]
