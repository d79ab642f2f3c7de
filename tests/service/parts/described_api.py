"""The API as a gateway describes it, ready to be called with what the description allows."""

from __future__ import annotations

import json
import re

import httpx2
import schemathesis


def described_api(url: str) -> schemathesis.BaseSchema:
    """The operations of the gateway at `url`. Bodies of its own media types are any bytes."""
    address = f"{url}/openapi.json"
    text = json.dumps(httpx2.get(address).json())
    for media_type in set(re.findall(r'"(application/vnd\.[^"]+)"', text)):
        schemathesis.serializer.alias(media_type, "application/octet-stream")
    return schemathesis.openapi.from_url(address)
