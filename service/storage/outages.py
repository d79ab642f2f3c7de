"""What the blob store raises, as this service's own errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from obstore.exceptions import AlreadyExistsError, GenericError
from obstore.exceptions import BaseError as StoreError

from ...compiler.errors import Unavailable

_OUTAGES = (GenericError, OSError)
"""How obstore reports a store that cannot be reached, is silent, answers 5xx or has no room."""
_FAILED = {
    "read": "the blob store cannot be read",
    "write": "the blob store cannot be written",
    "delete": "the blob store cannot delete",
    "sweep": "the blob store cannot be swept",
}
Operation = Literal["read", "write", "delete", "sweep"]


class BlobStoreDown(Unavailable):
    """The blob store does not answer now, and may do so later. A client gets Unavailable."""


class StoreOutages:
    """on_error: called with each operation that failed."""

    def __init__(self, on_error: Callable[[Operation], object] = lambda operation: None) -> None:
        self._on_error = on_error

    @contextmanager
    def as_unavailable(self, operation: Operation) -> Iterator[None]:
        """Ends the block at a blob that is not there. Raises Unavailable if the store fails."""
        try:
            yield
        except FileNotFoundError:
            return
        except AlreadyExistsError:
            raise
        except (StoreError, OSError) as error:
            raise self.unavailable(operation, error) from error

    def unavailable(self, operation: Operation, error: Exception, what: str = "") -> Unavailable:
        """The error, with the first line of obstore's; the others are about its source code."""
        self._on_error(operation)
        passing = isinstance(error, _OUTAGES) and not isinstance(error, FileNotFoundError)
        return (BlobStoreDown if passing else Unavailable)(
            f"{what or _FAILED[operation]}: {str(error).partition(chr(10))[0].strip()}",
            hint="See to the store, then ask again",
        )
