"""A packed trace as a file: its members' names and contents, and how it is written.

Interface: `members_of(place)`, or `members(Unzipped(...), problems)` of one that may be damaged;
`unpacked_bytes(place)`, `write_packed(path, members)`, `whole(target)`. `Unzipped` reads any gzip file, up to a limit.
Names inside a packed file are never used as paths.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import os
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from minidl.tracefile.format import PACKED_SUFFIX, TraceError

ZIPPED: Final = b"\x1f\x8b"
"""What a packed file starts with."""

MOST_ZIPPED: Final = 100
"""How many times as large as a packed file its contents may be; events of one kind, each 1 µs later, are 12 times."""

ALWAYS_FITS: Final = 64 << 20
"""Bytes that the contents of any packed file may have."""


def unpacked_bytes(place: Path) -> int:
    """How many bytes a packed file has unpacked, below 4 GiB; 0 if that can't be read."""
    with contextlib.suppress(OSError), place.open("rb") as file:
        file.seek(-4, os.SEEK_END)
        return int.from_bytes(file.read(4), "little")
    return 0


def members_of(place: Path) -> Iterator[tuple[str, bytes]]:
    """The members of a packed file. Raises OSError if it is damaged."""
    problems: list[str] = []
    with place.open("rb") as file:
        plain = Unzipped(place, file)
        yield from members(plain, problems)
        if problems or plain.problem:
            raise OSError(errno.EIO, plain.problem or problems[0], str(place))


class Unzipped:
    """The contents of a gzip file, which may be cut short or damaged, in pieces.

    problem: what is wrong with it, "" while nothing is. Raises TraceError for contents beyond the limit, before they
    are unpacked if their size is announced.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.problem = path, ""
        self._size = os.fstat(file.fileno()).st_size
        self.limit = max(ALWAYS_FITS, MOST_ZIPPED * self._size)
        self.at = 0
        self._file, self._unzip = file, zlib.decompressobj(wbits=31)

    def expect(self, size: int) -> None:
        """Say that so many bytes are to come. Raises TraceError if they are too many."""
        if self.at + size > self.limit:
            raise TraceError(
                f"{self.path} has {self._size} bytes and unpacks to {self.at + size} or more: the limit is "
                f"{self.limit}. It is damaged, or made to fill a memory; if you trust it, unpack it by tar -xzf"
            )

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes, or as many as there are."""
        data = b"".join(self._pieces(size))
        self.at += len(data)
        self.expect(0)
        return data

    def rest(self) -> Iterator[bytes]:
        """Yield what is left, to the end of the file, which tells whether it is whole."""
        while data := self.read(1 << 20):
            yield data

    def _pieces(self, size: int) -> Iterator[bytes]:
        try:
            while size and not self.problem and not self._unzip.eof:
                zipped = self._unzip.unconsumed_tail or self._file.read(1 << 16)
                piece = self._unzip.decompress(zipped, min(size, 1 << 20))
                size -= len(piece)
                yield piece
                if not zipped and not piece:
                    self.problem = "truncated: what is there was read"
        except zlib.error as error:
            self.problem = f"damaged ({error}): what comes before the damage was read"


def members(plain: Unzipped, problems: list[str]) -> Iterator[tuple[str, bytes]]:
    """Name and content of each plain member of a tar file, the last one perhaps cut short.

    Headers are taken one by one, and tarfile's own walk is not used: its extensions can lead it back and forth in a
    file made for that.
    """
    while any(block := plain.read(tarfile.BLOCKSIZE)) and len(block) == tarfile.BLOCKSIZE:
        try:
            member = tarfile.TarInfo.frombuf(block, "ascii", "replace")
        except tarfile.HeaderError as error:
            before = plain.at - tarfile.BLOCKSIZE
            problems.append(f"the packed file is damaged behind its first {before} bytes ({error})")
            return
        size = max(0, member.size)
        plain.expect(size)
        data = plain.read(size)
        if member.type == tarfile.REGTYPE:
            yield member.name, data
        else:
            problems.append(f"a member named {member.name[:80]!r} is no plain file and was left out")
        plain.read(-size % tarfile.BLOCKSIZE)


_REMEDIES = {
    errno.ENOENT: "its directory does not exist: create that first, or give another path",
    errno.EISDIR: "this is a directory: give the path of a file",
}
"""What the user can do if a file cannot be written."""


@contextlib.contextmanager
def whole(target: Path) -> Iterator[Path]:
    """Give the path of a draft beside `target`, with its suffix; it takes the target's place if the block succeeds.

    What was there before is kept until then, also after Ctrl-C or on a full disk. Raises OSError as `open` does, about
    the target and not about the draft.
    """
    draft = target.with_name(f".{os.getpid()}.{target.name}")
    try:
        yield draft
        draft.replace(target)
    except OSError as error:
        if str(error.filename) != str(draft):
            raise
        raise OSError(error.errno, _REMEDIES.get(error.errno or 0, error.strerror), str(target)) from error
    finally:
        draft.unlink(missing_ok=True)


def write_packed(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    """Write the named files as one packed trace and return its path, with its suffix added if it is missing.

    A file that is there is replaced once the new one is whole. Only its owner can read it. The same members give the
    same bytes.
    """
    target = path if path.suffix == PACKED_SUFFIX else path.with_name(path.name + PACKED_SUFFIX)
    with (
        whole(target) as draft,
        open(draft, "wb", opener=_private) as file,
        gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return target


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
