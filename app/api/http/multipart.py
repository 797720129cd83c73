"""The fields of multipart/form-data (RFC 7578)."""

from __future__ import annotations

from dataclasses import dataclass, field
from email import policy
from email.parser import BytesHeaderParser

from app.errors import ClientError

_MAX_FIELDS = 16
_MAX_FIELD_HEAD_BYTES = 4096


@dataclass(frozen=True, slots=True)
class FormField:
    """One part. ``file_name``: None where it is no file."""

    name: str
    value: bytes = field(repr=False)
    file_name: str | None = None


def form_fields(content_type: str, body: bytes) -> list[FormField]:
    """The parts with a name, in order; [] without a boundary. Raises ClientError.

    Heads are read by the standard library, the body is not: a form of many parts takes it a second.
    """
    head = f"content-type: {content_type}\r\n\r\n".encode("latin-1", "replace")
    boundary = BytesHeaderParser(policy=policy.HTTP).parsebytes(head).get_boundary()
    if boundary is None:
        return []
    line = b"\r\n--" + boundary.encode("latin-1", "replace")
    fields: list[FormField] = []
    at = -2 if body.startswith(line[2:]) else body.find(line)  # the first has no line before it
    for _ in range(_MAX_FIELDS + 1):
        start = at + len(line)
        if at == -1 or body.startswith(b"--", start):
            return fields
        at = body.find(line, start)
        end = len(body) if at == -1 else at
        head_end = body.find(b"\r\n\r\n", start, end)
        part_head = body[start : end if head_end == -1 else head_end]
        if len(part_head) > _MAX_FIELD_HEAD_BYTES:
            break
        value = b"" if head_end == -1 else body[head_end + 4 : end]
        about = BytesHeaderParser(policy=policy.HTTP).parsebytes(part_head.lstrip() + b"\r\n\r\n")
        name = about.get_param("name", header="content-disposition")
        if isinstance(name, str):
            fields.append(FormField(name, value, about.get_filename()))
    raise ClientError("The form has too many or too large fields.", code="invalid_value")
