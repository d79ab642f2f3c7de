"""Stage 4: checks a JWT that another issuer signed, and says what its holder may do.

Until its signature is verified, whatever is wrong with a token is answered in the same words; the log has the reason.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import jwt
import structlog

from ....compiler.api.admin import Role, TokenRecord
from ....compiler.api.sign_in import SignInProvider, SignInReply
from ....compiler.errors import Forbidden, Unauthenticated
from .code_flow import CodeFlow
from .issuer_keys import ALGORITHMS, IssuerKeys
from .sign_in_file import Issuer, SignInRule, read_issuers

log = structlog.get_logger(__name__)

_TOKEN_BYTES = 16 << 10
_JWT = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*", re.ASCII)
_TYPES = ("jwt", "at+jwt", "application/at+jwt")
"""What a header may say of its type (RFC 9068). Others are for other purposes: a logout, an event."""
_LEEWAY_SECONDS = 30
"""The issuer's clock may differ by so much."""
REMEMBERED_SECONDS = 30.0
"""A token that was good is not checked again for so long: a check takes 0.2 ms, and a job's ranks send one token."""
_REMEMBERED = 8192
_ID_DIGITS = 16
_NAME_LENGTH = 64
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._@:-]")
_CLAIMS = (
    jwt.ExpiredSignatureError,
    jwt.ImmatureSignatureError,
    jwt.InvalidAudienceError,
    jwt.InvalidIssuedAtError,
    jwt.exceptions.InvalidSubjectError,
    jwt.exceptions.InvalidJTIError,
    jwt.MissingRequiredClaimError,
)
"""What PyJWT raises only after it has verified the signature."""
_AGAIN = "Sign in again: `torchrelay login`"
_AUDIENCE = "Its `aud` must have the audience of the service's sign-in file: see to the provider's client"


class JwtTokens:
    """Accepts tokens of the issuers in the service's sign-in file."""

    def __init__(self, file: Path) -> None:
        """Raises SettingsError."""
        self._issuers = {each.issuer: (each, IssuerKeys(each)) for each in read_issuers(file)}
        self.code_flows = [CodeFlow(each) for each, _ in self._issuers.values() if each.browsers]
        self._checked: OrderedDict[bytes, tuple[float, TokenRecord]] = OrderedDict()  # until when, by digest

    def looks_like_one(self, token: str) -> bool:
        """Whether `check` may accept it. Asks nobody."""
        return len(token) <= _TOKEN_BYTES and _JWT.fullmatch(token) is not None

    def sign_in(self) -> SignInReply:
        """Where people get such tokens."""
        return SignInReply(
            [
                SignInProvider(
                    issuer=each.issuer, client_id=each.client_id, scopes=each.scopes, bearer=each.bearer
                )
                for each, _ in self._issuers.values()
                if each.client_id
            ]
        )

    async def check(self, token: str) -> TokenRecord:
        """The token's holder as the record of an issued token; `id` stands for issuer and `sub`. Raises
        Unauthenticated, Forbidden for a holder whom no rule names, Unavailable where the issuer's keys cannot be had.
        """
        digest = hashlib.sha256(token.encode()).digest()
        until, record = self._checked.get(digest, (0.0, None))
        if record is None or until <= time.time():
            until, record = await self._check(token)
            self._checked[digest] = until, record
            if len(self._checked) > _REMEMBERED:
                self._checked.popitem(last=False)
        return record

    async def holds(self, token: str) -> bool:
        """Whether `check` accepts it. Raises Forbidden, Unavailable."""
        with suppress(Unauthenticated):
            await self.check(token)
            return True
        return False

    async def _check(self, token: str) -> tuple[float, TokenRecord]:
        """Until when the record holds without another check, and the record. Raises as `check`."""
        try:
            issuer, claims = await self._verified(token)
        except _CLAIMS as error:  # checked after the signature: the holder may know
            raise _refused(error) from None
        except (jwt.PyJWTError, Unauthenticated) as error:
            log.info("token_refused", reason=str(error)[:200])
            raise Unauthenticated("the token is not known", hint=_AGAIN) from None
        name = _name(claims, issuer.name_claim)
        rules = [rule for rule in issuer.rules if _fits(rule, claims)]
        if not rules:
            log.info("holder_without_a_rule", issuer=issuer.issuer, name=name)
            raise Forbidden(
                f"{name} has signed in and may do nothing here",
                hint="Ask an administrator: no rule of the service's sign-in file fits your claims",
            )
        home = [rule for rule in rules if rule.namespace == rules[0].namespace]
        record = TokenRecord(
            id=hashlib.sha256(f"{issuer.issuer}\0{claims['sub']}".encode()).hexdigest()[:_ID_DIGITS],
            name=name,
            roles=frozenset[Role]().union(*(rule.roles for rule in home)),
            namespace=rules[0].namespace,
            created=int(time.time()),
            rate=rules[0].rate,
            allow_source=any(rule.allow_source for rule in home),
            allow_programs=any(rule.allow_programs for rule in home),
        )
        return min(time.time() + REMEMBERED_SECONDS, int(claims["exp"]) + _LEEWAY_SECONDS), record

    async def _verified(self, token: str) -> tuple[Issuer, dict[str, Any]]:
        """The issuer, and the claims that it has signed and that hold. Raises PyJWTError, of these _CLAIMS only after
        the signature was verified; Unauthenticated, Unavailable."""
        unverified = jwt.decode_complete(token, options={"verify_signature": False})
        header, said = unverified["header"], unverified["payload"].get("iss")
        algorithm, kind, kid = (header.get(name, "") for name in ("alg", "typ", "kid"))
        if algorithm not in ALGORITHMS:
            raise Unauthenticated("its algorithm is not accepted")
        if kind and str(kind).lower() not in _TYPES:
            raise Unauthenticated("its type is not accepted")
        if not isinstance(said, str) or said not in self._issuers:
            raise Unauthenticated("its issuer is not accepted")
        issuer, keys = self._issuers[said]
        claims = jwt.decode(
            token,
            await keys.key(kid),
            algorithms=ALGORITHMS,
            issuer=issuer.issuer,
            audience=issuer.audience,
            leeway=_LEEWAY_SECONDS,
            options={"require": ["iss", "sub", "aud", "exp"], "enforce_minimum_key_length": True},
        )
        return issuer, claims


def _refused(error: jwt.PyJWTError) -> Unauthenticated:
    match error:
        case jwt.ExpiredSignatureError():
            return Unauthenticated("the token has expired", hint=_AGAIN)
        case jwt.InvalidAudienceError():
            return Unauthenticated("the token is for another audience", hint=_AUDIENCE)
    return Unauthenticated(f"the token's claims do not hold: {error}", hint=_AGAIN)


def _name(claims: dict[str, Any], claim: str) -> str:
    """The holder's name for the audit log: people may choose theirs, so it has no characters that mean something
    elsewhere."""
    found = claims.get(claim)
    text = found if isinstance(found, str) and found else str(claims["sub"])
    return _NOT_IN_NAMES.sub("-", text[:_NAME_LENGTH])


def _fits(rule: SignInRule, claims: dict[str, Any]) -> bool:
    path = [rule.claim] if isinstance(rule.claim, str) else rule.claim
    found: Any = claims
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    if path == ["email"] and claims.get("email_verified") is not True:
        return False  # anyone may have given it
    return found == rule.equals or (isinstance(found, list) and rule.equals in found)
