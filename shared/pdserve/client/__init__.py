"""The Python client: typed requests in, typed events out, cancelled when you stop reading.

    async with Client("127.0.0.1:50051") as client:
        async with client.generate("Once upon a time", max_tokens=64) as events:
            async for event in events:
                if isinstance(event, Output):
                    print(event.text, end="")

SyncClient is the same without asyncio. Any gRPC client can do what these do with the protos; they add types, errors,
retries and tracing. What they raise, all of it a PdserveError:

    InvalidRequest            bad input; names the field
    Unauthenticated           no API key, or one that is not known here
    PermissionDenied          the key is not for that model or tenant
    UnknownModel              no such model here
    UnknownRequest            no such request among the recent ones
    NoCapacity                the fleet is full; may say when to come back. Retried where it does
    ├── TenantLimited         the tenant or the key has as many requests or tokens as it may have
    └── TooLate               it would miss what it asked for, for what is ahead of it
    Unavailable               the router cannot be reached, or lacks workers. Retried
    RpcError                  what has no type of its own; has the gRPC code
    └── DeadlineExceeded      `timeout` passed

The first nine are in pdserve.core.errors, the others in pdserve.rpc.errors. Retries are logged to the logger
"pdserve.client" at info.
"""

from __future__ import annotations

from pdserve.client.aio import Client, EventStream
from pdserve.client.attempts import CALL_TIMEOUT
from pdserve.client.decisions import Candidate, Decision, DecisionKind, Explanation, LocalReason
from pdserve.client.events import Completion, Event, Finish, FinishReason, Output, PromptInfo, Stages, Token, Usage
from pdserve.client.fleet import FleetLink, FleetWorker, Model
from pdserve.client.options import GenerateOptions, Prompt
from pdserve.client.retry import DEFAULT_RETRIES, NO_RETRIES, Retry, RetryPolicy
from pdserve.client.session import Session
from pdserve.client.stats import LatencyStats, ModelStats, Stats
from pdserve.client.sync import SyncClient, SyncEventStream
from pdserve.client.tokens import Tokenization
from pdserve.client.traces import RequestState, RequestSummary, Trace, TraceSource
from pdserve.rpc.tls import Tls

__all__ = [
    "CALL_TIMEOUT",
    "DEFAULT_RETRIES",
    "NO_RETRIES",
    "Candidate",
    "Client",
    "Completion",
    "Decision",
    "DecisionKind",
    "Event",
    "EventStream",
    "Explanation",
    "Finish",
    "FinishReason",
    "FleetLink",
    "FleetWorker",
    "GenerateOptions",
    "LatencyStats",
    "LocalReason",
    "Model",
    "ModelStats",
    "Output",
    "Prompt",
    "PromptInfo",
    "RequestState",
    "RequestSummary",
    "Retry",
    "RetryPolicy",
    "Session",
    "Stages",
    "Stats",
    "SyncClient",
    "SyncEventStream",
    "Tls",
    "Token",
    "Tokenization",
    "Trace",
    "TraceSource",
    "Usage",
]
