"""`minidl merge`: put profiles of a run into its trace, or join the traces of several ranks.

Interface: `merge(paths, output)`. A trace and what torch.profiler exported of its run become that trace with the
profiles attached (`tracefile.profile`); several traces, or a directory of them, are ranks of one run
(`tracefile.join`).
"""

from __future__ import annotations

import argparse
import gzip
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

from minidl.tracefile.attachments import SUFFIX, Attachment, free_name
from minidl.tracefile.format import MANIFEST, PACKED_SUFFIX, TraceError
from minidl.tracefile.join import join
from minidl.tracefile.packs import whole
from minidl.tracefile.profile import GZIP, profile
from minidl.tracefile.reader import read_trace
from minidl.tracefile.words import counted


def run(arguments: argparse.Namespace) -> int:
    """The command; prints where the result is."""
    print(merge([arguments.trace, *arguments.others], arguments.output))
    return 0


def merge(paths: Sequence[Path], output: Path | None = None) -> Path:
    """Join what lies at `paths`; the path of the result.

    A trace's directory gets the profiles put into it, unless `output` names a packed file to write instead; a packed
    trace needs one. Raises TraceError if the arguments do not go together, or one of them is not usable.
    """
    for path in paths:
        if not path.exists():
            raise TraceError(f"{path}: there is no such file or directory: give a trace, then profiles of its run")
    traces = [path for path in paths if _is_trace(path)]
    profiles = [path for path in paths if path not in traces]
    if not profiles and (len(traces) > 1 or (traces[0].is_dir() and not (traces[0] / MANIFEST).is_file())):
        return _join_ranks(traces, output)
    if len(traces) != 1 or not profiles:
        raise TraceError(
            f"merge takes one trace and profiles of its run, and was given {counted(len(traces), 'trace')} and "
            f"{counted(len(profiles), 'other file')}: give a trace's directory or packed file, then the files that "
            "torch.profiler exported during that run"
        )
    return _merge_profiles(traces[0], profiles, output)


def _join_ranks(paths: Sequence[Path], output: Path | None) -> Path:
    if output is None:
        raise TraceError("merge: say with -o where the joined trace of the ranks should go")
    joined, lacks = join(paths, output)
    for text in lacks:
        print(f"minidl: {text}", file=sys.stderr)
    return joined


def _is_trace(path: Path) -> bool:
    """Whether this is a trace rather than a file of another program; all else is found out when it is read."""
    if path.is_dir() or path.suffix == PACKED_SUFFIX:
        return True
    try:
        with path.open("rb") as file:
            start = file.read(2)
            file.seek(0)
            if start == GZIP:
                with gzip.open(file) as plain:
                    return plain.read(262)[257:262] == b"ustar"
    except (OSError, EOFError, zlib.error):
        pass  # reading it as a profile reports what is wrong with it
    return False


def _merge_profiles(path: Path, profiles: Sequence[Path], output: Path | None) -> Path:
    trace = read_trace(path)
    if output is None and not path.is_dir():
        raise TraceError(f"{path} is packed: say with -o where the merged trace should go")
    new: list[Attachment] = []
    for one in profiles:
        taken = {attachment.name for attachment in trace.attachments + new}
        new.append(Attachment(free_name(f"profiler-1{SUFFIX}", taken), profile(one, trace, new)))
    if output is None:
        for attachment in new:
            with whole(path / attachment.name) as draft:
                draft.write_bytes(attachment.data())
        return path
    trace.attachments += new
    return trace.pack(output)
