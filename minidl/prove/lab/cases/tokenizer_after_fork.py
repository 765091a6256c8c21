"""The program has tokenized a text: tokenizers' threads run. In a worker they are missing, and encode_batch waits."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils.data import DataLoader

from minidl.prove.lab.case import FORK, LabCase, LabOptions, Pictures, Truth, step

CASE = LabCase(
    theme="fork in a program with threads",
    title="the threads of tokenizers are missing in a worker",
    users_see="The first batch never comes, if TOKENIZERS_PARALLELISM=true was set against its warning.",
    thread="https://github.com/huggingface/tokenizers/issues/187",
    fix="TOKENIZERS_PARALLELISM=false, or multiprocessing_context='forkserver'.",
    truth=lambda o: Truth("worker", 0, 0, ("sample",), ("thread-missing-after-fork",)),
    methods=FORK,
    needs="tokenizers",
)

TEXTS = ["a b " * 50] * 1000


class Texts(Pictures):
    """Each sample tokenizes many texts."""

    def __init__(self, options: LabOptions) -> None:
        super().__init__(options)
        from tokenizers import Tokenizer, models, pre_tokenizers

        self.tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
        self.tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(self.tokenizer.encode_batch(TEXTS)[0].ids)


def main(options: LabOptions) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false" if options.fixed else "true"
    texts = Texts(options)
    print("a first look:", len(texts[0]), flush=True)
    for number, _ in enumerate(DataLoader(texts, **options.loading)):
        step(number)
