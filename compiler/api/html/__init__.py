"""HTML pages: what the client's reports and the gateway's pages have in common."""

from __future__ import annotations
