"""The loader that `minidl run` puts in torch's place, and when it leaves the loading to torch.

`StandIn` is minidl's loader. Where that could not give what torch's gives, torch's own iterator does the loading, and
is observed: if the program has patched one of torch's internals (`patches`), if the dataset is a DataPipe, if the
multiprocessing context is the program's own, or if minidl's loader refuses what torch's takes. The reason is said once
on stderr. It is looked for when a loader is made and at each iter(); what is torch's once stays torch's.
"""

from __future__ import annotations

import functools
import multiprocessing.context
from typing import Any, Final, TypeVar

from torch.utils.data.dataloader import DataLoader as _TorchLoader

from minidl.auto.loading import may_change_within
from minidl.dataloader import LoaderWithoutState, checked_transport
from minidl.guides import more
from minidl.loader.dataloader import DATAPIPES, _LiveIterators, users_line
from minidl.loader.iterators import _BaseDataLoaderIter
from minidl.record.harmless import say_once
from minidl.record.observe import ObservedContext
from minidl.record.patches import patched

T_co = TypeVar("T_co", covariant=True)


class StandIn(LoaderWithoutState[T_co]):
    """See the module. `_left_to_torch`: why torch's iterators load, "" where minidl's do."""

    _left_to_torch = ""

    chooses = False
    """Whether loaders of map datasets choose their number of workers: `minidl run --auto`."""

    @functools.wraps(_TorchLoader.__init__)  # type: ignore[misc]  # frameworks look for the arguments' names
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        reason = _reason(args[0] if args else kwargs.get("dataset")) or self._make_minidls(args, kwargs)
        if reason:
            self._make_torchs(args, kwargs)
            self._leave(reason)

    def _make_minidls(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """As minidl makes it; returns why it does not."""
        try:
            super().__init__(*args, **kwargs)
            if self.chooses and may_change_within(self):
                self.choose_workers()
        except Exception as error:
            return f"minidl's refuses it ({type(error).__name__}: {error})"
        return ""

    def _make_torchs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """As torch makes it: raises what torch's own loader raises."""
        self.__dict__.pop("_DataLoader__initialized", None)  # minidl's may have come so far
        _TorchLoader.__init__(self, *args, **kwargs)
        self.transport = checked_transport(None)
        self._live_iterators = _LiveIterators()
        self.__dict__.setdefault("_made_at", users_line(self))

    def _leave(self, reason: str) -> None:
        self._left_to_torch = reason
        if self._auto is not None:
            self._auto.leave(self)
        say_once(f"{reason}: torch's own loader is used in place of minidl's, and observed ({more('left to torch')})")

    def _is_torchs(self) -> bool:
        """Whether torch's iterator is to load, from now on."""
        if not self._left_to_torch:
            reason = _reason(getattr(self, "dataset", None), getattr(self, "multiprocessing_context", None))
            if reason and _lives(getattr(self, "_iterator", None)):
                say_once(f"{reason}: a loader whose persistent workers live already goes on as minidl's")
            elif reason:
                self._leave(reason)
        return bool(self._left_to_torch)

    def _iterate(self) -> Any:
        return _TorchLoader.__iter__(self) if self._is_torchs() else super()._iterate()

    def _make_iterator(self) -> Any:
        goes_on = self._auto is not None and self._auto.rest is not None
        return _TorchLoader._get_iterator(self) if not goes_on and self._is_torchs() else super()._make_iterator()


StandIn.__name__ = StandIn.__qualname__ = "DataLoader"  # as programs print it, and ask for it
DataLoader = StandIn  # where pickle looks for a class of this name


def _lives(iterator: Any) -> bool:
    """Whether it is minidl's iterator, with workers that wait for another epoch."""
    return isinstance(iterator, _BaseDataLoaderIter) and not iterator._lifecycle.shut_down


def _reason(dataset: Any, context: Any = None) -> str:
    """Why torch's loader is to load; "" if minidl's may."""
    if (name := patched()) is not None:
        return f"{name} is patched"
    if isinstance(dataset, DATAPIPES):
        return f"{type(dataset).__name__} is a DataPipe"
    if not (context is None or isinstance(context, ObservedContext) or type(context) in _CONTEXTS):
        return f"{type(context).__name__} is a multiprocessing context of the program's own"
    return ""


_CONTEXTS: Final = {
    multiprocessing.context.DefaultContext,
    *(type(multiprocessing.get_context(method)) for method in multiprocessing.get_all_start_methods()),
}
