"""Messages that no sane peer would send, for any method: from its descriptor, and from valid ones that are bent."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

_POWERS = (31, 32, 53, 63, 64)
_INTEGERS = (0, 1, 2, 7, 16, 255, 319, 320, 1024, *(2**power + off for power in _POWERS for off in (-1, 0)))
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e38, -1e38, float("inf"), float("-inf"), float("nan"))
_STRINGS = (
    "", "x", "hello", "tiny", "auto", "127.0.0.1:1", "[::1]:0", "no such host:1", "decode-0", "prefill-0", "../../etc",
    "\0", "\n\r\x1b[31m", "\N{ROCKET}" * 40, "%s%n{}", "x" * 127, "x" * 5000, "00-" + "0" * 32 + "-" + "0" * 16 + "-01",
)  # fmt: skip
_DEPTH = 5
_LIMITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


class Fuzzer:
    """Makes messages from a seed. `known` are strings and bytes worth trying: tickets and hashes that exist."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.known: list[str] = []

    def requests(self, method: MethodDescriptor, valid: list[Message]) -> list[bytes]:
        """What to send to `method`, one message or several; `valid` are messages that it would take, in order."""
        count = self.rng.choice((0, 1, 1, 2, 3, 5)) if method.client_streaming else 1
        kind = GetMessageClass(method.input_type)
        sent = []
        for place in range(count):
            if valid and self.rng.random() < 0.6:
                message = kind()
                in_order = self.rng.random() < 0.8
                message.CopyFrom(valid[min(place, len(valid) - 1)] if in_order else self.rng.choice(valid))
                for _ in range(self.rng.choice((0, 1, 1, 2, 4))):
                    self._bend(message)
            else:
                message = kind()
                self._fill(message, _DEPTH)
            sent.append(self._damaged(message.SerializeToString()))
        return sent

    def _fill(self, message: Message, depth: int) -> None:
        for field in message.DESCRIPTOR.fields:
            if self.rng.random() < 0.4:
                self._set(message, field, depth)

    def _bend(self, message: Message) -> None:
        """Change one field, here or in a message within."""
        field = self.rng.choice(message.DESCRIPTOR.fields) if message.DESCRIPTOR.fields else None
        if field is None:
            return
        inner = field.type == FieldDescriptor.TYPE_MESSAGE and not field.is_repeated
        if inner and message.HasField(field.name) and self.rng.random() < 0.7:
            self._bend(getattr(message, field.name))
        elif self.rng.random() < 0.2:
            message.ClearField(field.name)
        else:
            self._set(message, field, 2)

    def _set(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            self._set_map(message, field, depth)
        elif field.is_repeated:
            values = getattr(message, field.name)
            for _ in range(self.rng.choice((0, 1, 2, 3, 300))):
                if field.type != FieldDescriptor.TYPE_MESSAGE:
                    values.append(self._scalar(field))
                elif depth and len(values) < 20:
                    self._fill(values.add(), depth - 1)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            inner = getattr(message, field.name)
            inner.SetInParent()
            if depth:
                self._fill(inner, depth - 1)
        else:
            setattr(message, field.name, self._scalar(field))

    def _set_map(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        entry: Descriptor = field.message_type
        values = getattr(message, field.name)
        for _ in range(self.rng.choice((0, 1, 3))):
            key = self._scalar(entry.fields_by_name["key"])
            value = entry.fields_by_name["value"]
            if value.type == FieldDescriptor.TYPE_MESSAGE:
                if depth:
                    self._fill(values[key], depth - 1)
            else:
                values[key] = self._scalar(value)

    def _scalar(self, field: FieldDescriptor) -> Any:
        kind, rng = field.cpp_type, self.rng
        if kind in _LIMITS:
            low, high = _LIMITS[kind]
            return min(high, max(low, rng.choice((1, 1, -1)) * rng.choice(_INTEGERS)))
        if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
            return rng.choice(_FLOATS)
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        if kind == FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice((0, 1, 2, 3, 99, -1))
        text = rng.choice(self.known) if self.known and rng.random() < 0.3 else rng.choice(_STRINGS)
        if field.type == FieldDescriptor.TYPE_BYTES:
            return rng.choice((text.encode(), rng.randbytes(rng.choice((1, 16, 32, 3000)))))
        return text

    def _damaged(self, data: bytes) -> bytes:
        """Now and then no message any more."""
        rng = self.rng
        if rng.random() > 0.12 or not data:
            return data
        at = rng.randrange(len(data))
        before, after = data[:at], data[at:]
        return rng.choice((before, before + rng.randbytes(3) + after, before + rng.randbytes(1) + after[1:]))
