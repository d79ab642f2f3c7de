"""The one error tree: every failure has a stable code, an HTTP status and a hint on what to do next.

RelayError                error                500  any of these
  RequestError            the request cannot be taken (4xx); asking again with the same bytes fails again
    MalformedRequest        malformed            422  not msgpack, wrong schema, wrong types
    SchemaMismatch          schema_mismatch      422  client and gateway speak different schema versions
    ProtocolMismatch        protocol_mismatch    426  one part of torchrelay is too old for another
    ForbiddenTarget         forbidden_target     422  an operator outside the closed table
    BadExpression           bad_expression       422  a size expression outside the grammar
    LimitExceeded           limit_exceeded       413  bytes, nodes, depth or constants over a limit
    Unsupported             unsupported          422  the wire cannot carry it (client side: nothing is sent)
      LibraryMismatch       library_mismatch     422  the worker has another version of a library, or does not have it
    BadOption               bad_option           422  an Inductor option outside the closed table
    BadTuneJob              bad_tune_job         422  a batch job with a line that cannot be
    BadTrainJob             bad_train_job        422  a training job with a line that cannot be
  AccessError             the token does not allow it
    Unauthenticated         unauthenticated      401  no token, or one that is not known
    Forbidden               forbidden            403  the token lacks the role
      SourceForbidden       source_forbidden     403  nobody with the permission to send source has sent this graph
  NotFound                  not_found            404  what was asked for is not there
  ServiceError            the service could not do it now (5xx); the client compiles locally
    NoWorker                no_worker            503  no live worker for this toolchain and target
    Overloaded              overloaded           429  queue full; Retry-After tells when
      RateLimited           rate_limited         429  one token asks too often
    OverQuota               over_quota           429  the namespace compiles or has spent as much as it may
    CompileFailed           compile_failed       422  the compiler itself refused the graph
      SpecializeInputs      specialize_inputs    422  Python numbers among the inputs must become constants
      DataDependent         data_dependent       422  values that only a run knows decide what the graph does
      TuningUnknown         tuning_unknown       422  a strict tuning lock has no winner for a problem of the graph
    CompileTimeout          compile_timeout      504  the compile took longer than it may
    CompileKilled           compile_killed       500  the child died: out of memory, crashed or killed
    IsolationUnavailable    isolation            503  a worker that must shut its compiles in cannot
    VerifyFailed            verify_failed        422  compiled and eager results differ
    Unavailable             unavailable          503  Redis, Ray or the blob store cannot be reached
  ClientError             raised in the user's process only
    GatewayUnreachable      gateway_unreachable  -  no gateway is configured, or it does not answer
    DeadlineExceeded        deadline_exceeded    -  this process waited longer than it may
    NotCached               not_cached           -    mode `cache`, and nobody has compiled this yet
    BindingMismatch         binding_mismatch     -    a value would reach another placeholder than its own
    ArtifactError           bad_artifact         -    truncated, wrong digest, unknown format
      SizesDiffer           sizes_differ         -    compiled for other sizes, with assumptions that do not hold here
      CannotLoad            cannot_load          -    whole, but its libraries do not load on this machine
    SignatureError          bad_signature        -  not signed by a key that this client trusts
    ToolchainMismatch       toolchain_mismatch   -  built for another Python, torch or device
    ResultsDiffer           results_differ       -    a first call does not give what eager gives
    LocalCompileFailed      local_compile_failed -    Inductor could not compile it here either: it runs eagerly
    SettingsError           bad_setting          -    a value that cannot be used
    TuningLockError         bad_tuning_lock      -    the tuning lock file is missing, or a line of it is wrong
    JobUnreachable          job_unreachable      -    what the job's processes decide through cannot be reached
    CheckpointError         bad_checkpoint       -    a training's checkpoint cannot be read, or is another model's
    ExportFailed            export_failed        -    a model cannot be exported, or what was made differs from eager
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import ClassVar


class RelayError(Exception):
    """Base of all torchrelay errors. `str(error)` is one line: what is wrong, then what to do."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    hint: ClassVar[str] = ""
    key: str = ""
    """The cache key of the graph that this happened to, where the client had made one."""

    def __init__(self, message: str, *, hint: str | None = None, retry_after: int = 0) -> None:
        self.message = message
        self.advice = self.hint if hint is None else hint
        self.retry_after = retry_after
        """Seconds; 0 where the service's settings say."""
        super().__init__(f"{message}. {self.advice}" if self.advice else message)

    def __reduce__(self) -> tuple[object, tuple[str, str, str]]:
        return (from_code, (self.code, self.message, self.advice))


class RequestError(RelayError):
    code, status = "bad_request", 400


class MalformedRequest(RequestError):
    code, status = "malformed", 422
    hint = "Send the body that this version's client makes"


class SchemaMismatch(RequestError):
    code, status = "schema_mismatch", 422
    hint = "Install the same torchrelay version on client and service"


class ProtocolMismatch(RequestError):
    """The message names both parts; api/protocols.py."""

    code, status = "protocol_mismatch", 426
    hint = "Upgrade the older part"


class ForbiddenTarget(RequestError):
    code, status = "forbidden_target", 422
    hint = "The operator is not in the service's table for this torch version; compile it locally"


class BadExpression(RequestError):
    code, status = "bad_expression", 422
    hint = "Size expressions hold integers, symbols, + - * // % ** comparisons, Min, Max and And/Or/Not"


class LimitExceeded(RequestError):
    code, status = "limit_exceeded", 413
    hint = "Raise the limit in the service's settings, or split the graph"


class Unsupported(RequestError):
    code, status = "unsupported", 422
    hint = "The service cannot compile this graph for you; docs/fallbacks.md says what can be done"
    operator: str = ""
    """The operator that cannot be sent, where it is one."""
    line: str = ""
    """`FILE:LINE` of the user's code, where it is known."""


class LibraryMismatch(Unsupported):
    code = "library_mismatch"
    hint = "Install the same version on both sides"


class BadOption(RequestError):
    code, status = "bad_option", 422
    hint = "Use Inductor's own option names, or compile locally"


class BadTuneJob(RequestError):
    """The message names the line of the job's file."""

    code, status = "bad_tune_job", 422
    hint = "Correct that line; docs/tuning/jobs.md lists what a job may say"


class BadTrainJob(RequestError):
    """The message names the line of the job's file, or the option that stands for it."""

    code, status = "bad_train_job", 422
    hint = "Correct that; docs/training.md lists what a job may say"


class AccessError(RelayError):
    code, status = "access", 403


class Unauthenticated(AccessError):
    code, status = "unauthenticated", 401
    hint = "Set TORCHRELAY_TOKEN, or run where `torchrelay up` wrote its credentials file"


class Forbidden(AccessError):
    code, status = "forbidden", 403
    hint = "Ask an administrator for a token with this role"


class SourceForbidden(Forbidden):
    code = "source_forbidden"
    hint = (
        "Ask an administrator for a token that may send source: "
        "`torchrelay token create NAME --role compile --allow-source`"
    )


class NotFound(RelayError):
    code, status = "not_found", 404
    hint = "POST the graph to /v1/compile first"


class ServiceError(RelayError):
    code, status = "service", 500


class NoWorker(ServiceError):
    code, status = "no_worker", 503
    hint = (
        "Start a worker with this Python, torch and device: `torchrelay worker`; or let the nodes use this "
        "environment too: TORCHRELAY_SERVICE_TOOLCHAINS"
    )


class Overloaded(ServiceError):
    code, status = "overloaded", 429
    hint = "Try again after the Retry-After delay, or add workers"


class RateLimited(Overloaded):
    code = "rate_limited"
    hint = "Ask less often, or ask an administrator for a token with a higher rate"


class OverQuota(ServiceError):
    """Its Retry-After may be hours away: the client compiles locally at once."""

    code, status = "over_quota", 429
    hint = "Wait for the namespace's other compiles, or ask for a larger quota: `torchrelay namespace show`"


class CompileFailed(ServiceError):
    code, status = "compile_failed", 422
    hint = 'The message is the compiler\'s own. Report the graph if backend="inductor" compiles it'


class SpecializeInputs(CompileFailed):
    """The message names the inputs by position; the client has Dynamo trace again with them as constants."""

    code = "specialize_inputs"
    hint = "The client retries by itself with these numbers as constants"

    @classmethod
    def at(cls, positions: Iterable[int]) -> SpecializeInputs:
        return cls(f"inputs {', '.join(map(str, sorted(positions)))} must be constants")

    @property
    def positions(self) -> list[int]:
        return [int(text) for text in re.findall(r"\d+", self.message)]


class DataDependent(CompileFailed):
    """Python code that the compiler runs (an operator's backward, say) asks for a value of a tensor."""

    code = "data_dependent"
    hint = "torch.compile breaks the graph there and asks for its parts, as with Inductor"


class TuningUnknown(CompileFailed):
    code = "tuning_unknown"
    hint = (
        "Tune it without the lock, then `torchrelay tune export`; "
        "or set TORCHRELAY_TUNING_LOCK_MODE=loose: what the lock lacks is measured"
    )


class CompileTimeout(ServiceError):
    code, status = "compile_timeout", 504
    hint = "Raise the compile deadline in the service's settings"


class CompileKilled(ServiceError):
    code, status = "compile_killed", 500
    hint = "Raise the worker's memory limit, or compile locally"


class IsolationUnavailable(ServiceError):
    code, status = "isolation", 503
    hint = "Allow user namespaces or Landlock on the worker, or set TORCHRELAY_SERVICE_ISOLATION=auto"


class VerifyFailed(ServiceError):
    code, status = "verify_failed", 422
    hint = (
        "Nothing was published. Either the code is wrong, and would be here too, or random inputs do not suit the "
        "graph: compare a step with eager, and report it"
    )


class Unavailable(ServiceError):
    code, status = "unavailable", 503
    hint = "Check that Redis and Ray run: `torchrelay doctor`"


class ClientError(RelayError):
    code, status = "client", 500


class GatewayUnreachable(ClientError):
    code = "gateway_unreachable"
    hint = "Start one with `torchrelay up`, or set TORCHRELAY_URL"


class DeadlineExceeded(ClientError):
    code = "deadline_exceeded"
    hint = "Raise TORCHRELAY_DEADLINE (seconds)"


class NotCached(ClientError):
    code = "not_cached"
    hint = "Run once with TORCHRELAY_MODE=remote to fill the cache"


class BindingMismatch(ClientError):
    """A defect of torchrelay's: the message names the placeholder."""

    code = "binding_mismatch"
    hint = "The graph was not sent; please report this with the program"


class ArtifactError(ClientError):
    code = "bad_artifact"
    hint = "The file is damaged; it was not used"


class SizesDiffer(ArtifactError):
    """The client then requests an artifact for exactly its sizes; a user does not see this."""

    code = "sizes_differ"
    hint = "Request it with exact sizes"


class CannotLoad(ArtifactError):
    code = "cannot_load"
    hint = "The artifact is whole; see what this machine lacks"


class SignatureError(ClientError):
    code = "bad_signature"
    hint = "The artifact is not signed by a key you trust; nothing in it was used"


class ToolchainMismatch(ClientError):
    code = "toolchain_mismatch"
    hint = "The artifact was built for another Python, torch or device"


class ResultsDiffer(ClientError):
    code = "results_differ"
    hint = (
        "The artifact was not used, and was removed from this machine's cache: Inductor compiles the graph here. "
        "Please report this"
    )


class LocalCompileFailed(ClientError):
    """Not raised: the graph runs eagerly."""

    code = "local_compile_failed"
    hint = (
        "It is slower until the service compiles it, or Inductor can here: that needs a C++ compiler (g++), and Triton "
        "for a GPU. `torchrelay doctor` shows what this machine lacks"
    )

    @classmethod
    def of(cls, error: Exception) -> LocalCompileFailed:
        cause = getattr(error, "inner_exception", None) or error
        lines = str(cause).strip().splitlines() or [""]
        return cls(f"Inductor fails here: {type(cause).__name__}: {lines[0][:300]}".rstrip(".: "))


class SettingsError(ClientError):
    code = "bad_setting"
    hint = "Correct or unset it"


class TuningLockError(ClientError):
    code = "bad_tuning_lock"
    hint = "Correct it, or write it anew: `torchrelay tune export`"


class JobUnreachable(ClientError):
    code = "job_unreachable"
    hint = "This process decides for itself from now on; others of its job may decide otherwise"


class CheckpointError(ClientError):
    code = "bad_checkpoint"
    hint = "Look at the place of the checkpoints; without them training begins anew"


class ExportFailed(ClientError):
    code = "export_failed"


def _tree(root: type[RelayError]) -> dict[str, type[RelayError]]:
    table = {root.code: root}
    for child in root.__subclasses__():
        table |= _tree(child)
    return table


BY_CODE: dict[str, type[RelayError]] = _tree(RelayError)


_BRANCH = re.compile(r"^ *(\w+) {2,}(?:[a-z_]+ +(?:\d{3}|-)(?: +|$))?(.*)$", re.MULTILINE)


def meanings() -> dict[type[RelayError], str]:
    """What each error of the tree above means, in its order."""
    classes = {each.__name__: each for each in BY_CODE.values()}
    return {classes[name]: meaning for name, meaning in _BRANCH.findall(__doc__ or "") if name in classes}


def from_code(code: str, message: str, advice: str = "") -> RelayError:
    """Rebuild an error that crossed a wire; an unknown code becomes a ServiceError."""
    return BY_CODE.get(code, ServiceError)(message, hint=advice or None)
