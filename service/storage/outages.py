"""What the blob store raises, as this service's own errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from obstore.exceptions import AlreadyExistsError, GenericError
from obstore.exceptions import BaseError as StoreError

from ...compiler.errors import Unavailable

_OUTAGES = (GenericError, OSError)
"""How obstore reports a store that cannot be reached, is silent, answers 5xx or has no room."""


class BlobStoreDown(Unavailable):
    """The blob store does not answer now, and may do so later. A client gets Unavailable."""


@contextmanager
def outages_as_unavailable(what: str) -> Iterator[None]:
    """Ends the block at a blob that is not there. Raises Unavailable if the store fails."""
    try:
        yield
    except FileNotFoundError:
        return
    except AlreadyExistsError:
        raise
    except (StoreError, OSError) as error:
        raise unavailable(what, error) from error


def unavailable(what: str, error: Exception) -> Unavailable:
    """With the first line of obstore's error; the others are about its source code."""
    passing = isinstance(error, _OUTAGES) and not isinstance(error, FileNotFoundError)
    return (BlobStoreDown if passing else Unavailable)(
        f"{what}: {str(error).partition(chr(10))[0].strip()}", hint="See to the store, then ask again"
    )
