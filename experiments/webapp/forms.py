"""Shared parts of pages: reading forms, waiting for the engine, and answers that are no pages."""

import asyncio
from concurrent.futures import Future
from typing import Any
from urllib.parse import parse_qs

from starlette.requests import Request

from experiments.launch.terminal import say_error
from marl.common.errors import UserError

BODY = 16_384  # bytes of a form at most


class Refused(Exception):
    """An answer that is no page: its status, and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


async def done(future: Future[Any]) -> Any:
    """The result of a command to the engine. UserError as it says; a fault of the server is no page's business."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), timeout=60)
    except TimeoutError as error:
        raise UserError("The server is very busy. Load the page again.") from error
    except UserError:
        raise
    except Exception as error:  # the terminal has it; a visitor learns nothing of the server
        say_error(f"web: {type(error).__name__}: {error}")
        raise UserError("The server could not do that.") from error


async def form_of(request: Request) -> dict[str, str]:
    """The fields of a form. Refuses one that is too large, before it is read."""
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:12]) > BODY:
        raise Refused(413, "That is too much text.")
    if not request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
        raise Refused(415, "Expected a form.")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY:
            raise Refused(413, "That is too much text.")
    try:
        fields = parse_qs(body.decode(), keep_blank_values=True, max_num_fields=20)
    except ValueError as error:
        raise Refused(400, "That is no form.") from error
    return {name: values[-1] for name, values in fields.items()}
