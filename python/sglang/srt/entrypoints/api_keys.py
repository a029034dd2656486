"""The keys of clients and of the administrator, and the file they are read from."""

from __future__ import annotations

import hashlib
import hmac
import logging
import stat
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from sglang.srt.arg_groups.http_hook import check_key
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 1024 * 1024
# Each request's key is compared with all of them.
MAX_KEYS = 1000
NAME_CHARS = 16
_SALT_FIELD = "cache_salt"


class Role(IntEnum):
    """Rights of a caller; a higher role includes the lower ones.

    ADMIN may do what concerns all clients; OPERATOR may also do what slows the server
    down or changes what it writes.
    """

    NOBODY = 0
    CLIENT = 1
    ADMIN = 2
    OPERATOR = 3


class Caller(NamedTuple):
    """The caller of a route; `name` identifies a client without revealing its key, and
    `salt` is the `cache_salt` of its line in the key file."""

    role: Role
    name: str
    salt: str = ""


class ApiKeys:
    """Identifies the owner of a key. Without keys every caller is an operator; without
    an administrator's key every client is an administrator, but not an operator.

    Raises:
        ValueError: --api-key-file cannot be read; names the reason and no key.
    """

    def __init__(self, server_args: ServerArgs) -> None:
        given, admin = server_args.api_key, server_args.admin_api_key
        self._file = server_args.api_key_file
        self._given = [] if given is None else [_digest(given)]
        self._admin = None if admin is None else _digest(admin)
        # Salts by the digests of the keys.
        self._clients: dict[bytes, str] = {}
        self._load()

    @property
    def has_client_keys(self) -> bool:
        return bool(self._clients)

    def identify(self, *keys: bytes) -> Caller:
        """Return the caller who sent `keys`.

        Takes the same time whichever key matches and whatever a wrong key looks like,
        because all digests are compared.
        """
        digests = [hashlib.sha256(key).digest() for key in keys]
        is_admin = bool(_matches(digests, [] if self._admin is None else [self._admin]))
        clients = _matches(digests, list(self._clients))
        if is_admin:
            return Caller(Role.OPERATOR, "")
        if clients:
            role = Role.ADMIN if self._admin is None else Role.CLIENT
            key = clients[0]
            return Caller(role, key.hex()[:NAME_CHARS], self._clients[key])
        if not self._clients:
            return Caller(Role.OPERATOR if self._admin is None else Role.CLIENT, "")
        return Caller(Role.NOBODY, "")

    def reload(self) -> None:
        """Read the file again; an unusable file leaves the keys unchanged."""
        if self._file is None:
            logger.info("there is no --api-key-file to read again")
            return
        try:
            self._load()
        except ValueError as error:
            logger.error("%s; the keys stay as they were", error)
        else:
            logger.info("read %s: %d key(s)", self._file, len(self._clients))

    def _load(self) -> None:
        from_file = {} if self._file is None else _read_keys(Path(self._file))
        clients = dict.fromkeys(self._given, "")
        clients |= {_digest(key): salt for key, salt in from_file.items()}
        if self._admin in clients:
            raise ValueError(
                "--admin-api-key is also a client's key, which would make every client "
                "an administrator; choose another"
            )
        self._clients = clients


def _read_line(line: str, where: str) -> tuple[str, str]:
    """Return the key of a line and its salt, which is empty if the line has none."""
    key, _, rest = line.partition(" ")
    field, _, salt = rest.strip().partition("=")
    if rest and (field != _SALT_FIELD or not salt):
        raise ValueError(
            f"{where} holds a space, after which it may only have {_SALT_FIELD}=NAME; "
            "a key has no spaces"
        )
    check_key(key + salt, where)
    return key, salt


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _matches(digests: list[bytes], known: list[bytes]) -> list[bytes]:
    """Return the entries of `known` that are among `digests`, comparing all pairs."""
    return [a for a in known for b in digests if hmac.compare_digest(a, b)]


def _read_keys(path: Path) -> dict[str, str]:
    """Read keys and their salts from a file, one key per line, skipping empty lines and
    comments (#)."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
            raise ValueError(
                f"--api-key-file {path}: not a file of at most {MAX_FILE_BYTES} bytes"
            )
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--api-key-file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--api-key-file {path}: not UTF-8") from error
    if status.st_mode & stat.S_IROTH:
        logger.warning("%s can be read by every user of this host; chmod 600 it", path)
    keys: dict[str, str] = {}
    count = 0
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        where = f"--api-key-file {path}: line {number}"
        key, salt = _read_line(line.strip(), where)
        count += 1
        if keys.setdefault(key, salt) != salt:
            raise ValueError(f"{where} repeats a key with another {_SALT_FIELD}")
    if not 1 <= count <= MAX_KEYS:
        raise ValueError(
            f"--api-key-file {path}: holds {count} keys; write 1 to {MAX_KEYS}, "
            "one per line"
        )
    return keys
