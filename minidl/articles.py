"""The four articles that this package implements, as a table of their sections.

Interface: `ARTICLES` (number -> Article), `sections(text)` (what a text cites). A citation is "article 1 §2.4.3", or
"article 1 §2.4.3, §2.4.4", or "article 2 §3.1 to §3.3"; the event table leaves out the word "article". Articles 1 and 2
number their sections. The sections of articles 3 and 4 have headings only, and are cited by the names given here.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Section:
    """A section: how it is cited, what it is about, and its heading if that is all that identifies it."""

    article: int
    anchor: str
    name: str
    heading: str = ""


@dataclass(frozen=True, slots=True)
class Article:
    """An article: title and author ("" if it names none), language, and its sections in order."""

    number: int
    title: str
    author: str
    language: str
    about: str
    sections: tuple[Section, ...]


def _numbered(article: int, table: str) -> tuple[Section, ...]:
    """Sections from lines of "anchor name"."""
    rows = (line.split(maxsplit=1) for line in table.strip().splitlines())
    return tuple(Section(article, anchor, name) for anchor, name in rows)


ARTICLES = {
    1: Article(
        1,
        "[Анализ исходного кода] Распределенный PyTorch (2) --- DataLoader для загрузки данных",
        "мысли Росси",
        "Russian",
        "the DataLoader: single-process and multi-process iteration",
        _numbered(
            1,
            """
            0x00 summary
            0x01 previously
            0x02 DataLoader
            2.1 the constructor's options
            2.2 key functions
            2.3 loading in the loader's process
            2.3.1 making the iterator
            2.3.2 the iterator's base class
            2.3.3 the single-process iterator
            2.3.4 fetching samples
            2.4 loading in worker processes
            2.4.1 overall logic
            2.4.2 starting workers, queues and the pin-memory thread
            2.4.3 reset: beginning an epoch
            2.4.4 getting an index and sending it
            2.4.5 the worker's main function
            2.4.6 the pin-memory thread
            2.4.7 how the user gets data
            2.4.8 summary
            2.5 the pipeline as a picture
            0xEE the author
            0xFF references
            """,
        ),
    ),
    2: Article(
        2,
        "[Анализ исходного кода] Распределенный PyTorch (1) --- DistributedSampler загрузки данных",
        "мысли Росси",
        "Russian",
        "the loading pipeline, and samplers that divide a dataset among ranks",
        _numbered(
            2,
            """
            0x00 summary
            0x01 loading data
            1.1 ways to accelerate
            1.2 processing in parallel: the CPU loads while the GPU trains
            1.3 the pipeline: load, pin, copy to the device
            1.4 GPU: copies on streams, preprocessing on the device (DALI)
            0x02 distributed loading
            2.1 DDP
            2.2 dataset, sampler and loader in a distributed run
            0x03 DistributedSampler
            3.1 initialisation
            3.2 iteration: each rank's share
            3.3 shuffling
            3.3.1 use: set_epoch
            3.3.2 in Python
            3.3.3 in C++
            3.3.4 summary
            3.4 the samplers of the C++ front end
            3.4.1 definitions
            3.4.2 implementation
            3.4.2.1 DistributedRandomSampler
            3.4.2.2 DistributedSequentialSampler
            0xEE the author
            0xFF references
            """,
        ),
    ),
    3: Article(
        3,
        "",
        "",
        "Chinese",
        "how tensors travel from the workers to the loader, and how often they are copied",
        (
            Section(3, "queue", "the loader sends data through multiprocessing.Queue",
                    "Dataloader使用multiprocess.Queue来传输数据"),
            Section(3, "tensor", "pickling and unpickling a CPU tensor",
                    "Tensor(CPU Tensor)在multiprocessing.Queue中的序列化和反序列化"),
            Section(3, "storage", "pickling and unpickling a storage: the copy into shared memory",
                    "Tensor.Storage的序列化与反序列化"),
            Section(3, "summary", "what is copied when: the feeder thread pickles after put() has returned", "小结"),
            Section(3, "collate", "the shortcut: collate straight into shared memory", "Dataloader的小心机"),
        ),
    ),
    4: Article(
        4,
        "Pytorch Data Introduction",
        "sheep",
        "Chinese",
        "the parts of torch.utils.data, and the shutdown of a loader with workers",
        (
            Section(4, "dataset", "the datasets", "Dataset"),
            Section(4, "dataloader", "the loader: an outline", "Dataloader"),
            Section(4, "sampler", "the samplers", "Sampler"),
            Section(4, "iterator", "the multi-process iterator: prefetching, in_order, the reorder buffer",
                    "Dataloader Iterator"),
            Section(4, "utils", "utilities", "Utils"),
            Section(4, "collate", "collate, and its shared-memory shortcut", "collate"),
            Section(4, "pin_memory", "page-locked memory", "pin_memory"),
            Section(4, "shutdown", "ways to end, per actor; liveness; queues; SIGCHLD", "Dataloader Graceful shutdown"),
        ),
    ),
}  # fmt: skip

_ANCHOR = r"0x[0-9A-F]{2}|[0-9](?:\.[0-9]+)*|[a-z_]+"
_CITATION = re.compile(rf"\b([0-9])((?:(?:,| to|) §(?:{_ANCHOR}))+)")


@functools.cache
def sections(text: str) -> tuple[Section, ...]:
    """The sections that `text` cites, in its order. Raises LookupError for a citation of a section that is not there.

    "§3.1 to §3.3" gives the two ends.
    """
    found = []
    for number, anchors in _CITATION.findall(" ".join(text.split())):
        article = ARTICLES.get(int(number))
        for anchor in re.findall(rf"§({_ANCHOR})", anchors):
            section = next((s for s in article.sections if s.anchor == anchor), None) if article else None
            if section is None:
                raise LookupError(f"article {number} §{anchor}: no such section; see minidl/articles.py")
            found.append(section)
    return tuple(found)
